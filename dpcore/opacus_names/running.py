"""Run a script, a module, and the processes that they start, with dpcore under Opacus' name."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import zipfile
from pathlib import Path

from dpcore.opacus_names.alias import PATH

USAGE = "usage: python -m dpcore.as_opacus [--path | SCRIPT | -m MODULE] [ARGUMENT ...]"


def main(arguments: list[str]) -> int:
    """Run a script, and the processes that it starts, with dpcore under Opacus' name.

    Args:
        arguments: The script, or ``-m`` and a module, with its arguments; or ``--path``.

    Returns:
        2 where there is nothing to run, behind a sentence.
    """
    if arguments[:1] == ["--path"]:
        print(PATH)
        return 0
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module or (not is_module and arguments[0].startswith("-")):
        print(USAGE, file=sys.stderr)
        return 2
    if why := _why_no_module(arguments[1]) if is_module else _why_no_script(Path(arguments[0])):
        print(f"{arguments[is_module]} cannot be run: {why}.\n{USAGE}", file=sys.stderr)
        return 2
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH), *([before] if before else [])])
    if is_module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _why_no_module(name: str) -> str:
    for part in (name, f"{name}.__main__"):
        try:
            found = importlib.util.find_spec(part)
        except (ModuleNotFoundError, ValueError) as error:
            if not name.startswith(getattr(error, "name", None) or ""):
                raise  # it is there, and what it imports is not
            found = None
        if found is None:
            return "there is no such module, or it is a package without __main__; give one that python -m runs"
        if found.submodule_search_locations is None:
            break
    return ""


def _why_no_script(path: Path) -> str:
    if path.is_dir():
        return "" if (path / "__main__.py").exists() else "it is a folder without __main__.py; give the script in it"
    try:
        if not zipfile.is_zipfile(path):
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        return f"{(error.strerror or str(error)).lower()}; give the path of a Python script"
    except (SyntaxError, ValueError) as error:
        return f"it is no Python ({error}); give the path of a Python script"
    return ""
