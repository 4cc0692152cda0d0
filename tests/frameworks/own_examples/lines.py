"""How many lines a user changes to train with DP: each library's example beside the same loop without DP."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT_DP = {
    "torch_loops.py": "pytorch_eager",
    "jax_loops.py": "jax_non_private",
    "keras_loops.py": "keras_non_private",
}
"""The loop without DP of each file."""
OTHERS = {"dp_lora_hooks": "peft_eager", "objax_private_gradients": "objax_non_private"}
"""That of an example which differs from its file's by more than DP."""
OF_THE_COMPARISON = {"_criterion", "_forever", "_loader", "_losses", "_of_words"}
"""What is no change of a user's: the comparison needs it, or every user has it. So is the last line of an example."""


def changed(contestant: str) -> int:
    """Return the lines that are added, changed or removed between the loop without DP and the contestant's example.

    A line is a statement, however it is wrapped; a function of the file that only one of the two calls is counted with
    it, because its user has to write it. Docstrings and comments are none.

    Raises:
        KeyError: there is no example of that contestant.
    """
    name = contestant.replace("-", "_")
    for file, plain in WITHOUT_DP.items():
        functions = _functions(file)
        if name in functions:
            plain = OTHERS.get(name, plain)
            return between(functions, plain, name)
    raise KeyError(contestant)


def between(functions: Mapping[str, ast.FunctionDef], plain: str, private: str) -> int:
    """Return how many lines differ between two functions, by name."""
    return _distance(_lines(functions, plain, private), _lines(functions, private, plain))


@lru_cache
def _functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file by name, read and not imported: each file needs its own framework."""
    tree = ast.parse((HERE / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _lines(functions: Mapping[str, ast.FunctionDef], name: str, other: str) -> list[str]:
    own = sorted(_called(functions, name) - _called(functions, other) - {name, other} - OF_THE_COMPARISON)
    return [line for each in (*own, name) for line in _statements(functions[each])]


def _called(functions: Mapping[str, ast.FunctionDef], name: str) -> set[str]:
    """The functions of the file that this one calls, and those that they call."""
    found = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name) and n.id in functions} - {name}
    return found.union(*(_called(functions, each) for each in found))


def _statements(function: ast.FunctionDef) -> Iterator[str]:
    """The lines of a function's body, one statement each."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    for node in body:
        if isinstance(node, ast.Return) and ast.unparse(node).startswith("return Loop("):
            continue
        yield from ast.unparse(node).splitlines()


def _distance(before: list[str], after: list[str]) -> int:
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in steps if kind != "equal")
