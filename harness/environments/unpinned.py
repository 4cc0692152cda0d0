"""A Python environment as it is found on a machine: nothing is installed into it, and nobody pinned its versions.

Cells measured in it have the isolation ``unpinned``, which every table shows beside the machine.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.environments import executor
from harness.environments.backend import AnyContestant, Argument, LocalBackend, Log, as_words, last_json
from harness.environments.executor import WORKER, AnyRequest, Event, Executor, Limits, Venv
from harness.environments.unavailable import Unavailable
from harness.errors import BadInput
from harness.paths import ROOT
from harness.plan.registry import Framework
from harness.store.record import UNPINNED
from harness.worker.result import Result

LOCAL = ("harness", "frameworks", "dpcore")
REFERENCES = tuple(ROOT / "frameworks" / "_tools" / name for name in ("reference.py", "layer_reference.py"))
"""Programs that compute the float64 references of all gates."""
PROBE_SECONDS = 120.0
JAX_GROWS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables for processes side by side: by default each process of JAX takes three quarters of a GPU's memory at its
start."""


class OutOfTime(Exception):
    """The time of the whole run is over: what was under way is not recorded, and is begun anew by the next run."""


@dataclass
class Deadline:
    """``seconds`` from now on."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def used(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def end(self) -> None:
        """Stop at once: nothing that ends from now on is recorded."""
        self.seconds = 0.0

    def check(self) -> None:
        if self.left <= 0:
            raise OutOfTime


@dataclass(frozen=True)
class UnpinnedEnvironment:
    """``python`` with all its ``versions``. ``missing``: by framework, what it lacks of that framework's imports."""

    python: Path
    versions: dict[str, str]
    missing: dict[str, tuple[str, ...]]

    @property
    def identity(self) -> str:
        """A hash of the versions, in the place of the hash of a lock."""
        text = "\n".join(f"{name}=={version}" for name, version in self.versions.items())
        return f"{UNPINNED}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def device(self, name: str) -> dict[str, Any]:
        """Return what ``torch`` or ``jax`` says of the CUDA device: ``device`` is missing where it sees none."""
        try:
            return {"framework": name, **ask(self.python, "frameworks._tools.devices", [name])}
        except executor.ToolFault as fault:
            return {"framework": name, "why_not": str(fault).splitlines()[-1][-300:]}


class UnpinnedBackend(LocalBackend):
    """Every worker and every tool in the one ``environment``.

    No process outlasts ``deadline``; one that takes more than ``longest_seconds`` is a ``timeout`` like any other.
    ``side_by_side``: several processes run at once just now.
    """

    def __init__(self, environment: UnpinnedEnvironment, deadline: Deadline, longest_seconds: float) -> None:
        self.environment = environment
        self.deadline = deadline
        self.longest_seconds = longest_seconds
        self.side_by_side = False

    def executor(self, contestant: AnyContestant, log: Log, module: str = WORKER) -> Executor | Unavailable:
        if missing := self.environment.missing.get(contestant.framework.name):
            return Unavailable(f"not installed in {self.environment.python}: {', '.join(missing)}.")
        return UnpinnedExecutor(self, contestant.variant.environment, module)

    def run_tool(self, module: str, arguments: Sequence[Argument], log: Log) -> str:
        """Run the tool. Raises :class:`OutOfTime` where the time of the whole run ends first."""
        self.deadline.check()
        try:
            python, words = self.environment.python, as_words(arguments)
            return executor.run_tool(python, module, words, self.deadline.left, search_path())
        except executor.ToolFault:
            self.deadline.check()
            raise

    def environment_id(self, framework: Framework) -> str:
        return self.environment.identity

    def speed_probe(self) -> float | None:
        return None if self.side_by_side else super().speed_probe()


class UnpinnedExecutor:
    """A fresh process of the Python that was found, with what its PYTHONPATH names."""

    name = UNPINNED

    def __init__(self, backend: UnpinnedBackend, environment: dict[str, str], module: str) -> None:
        self.backend = backend
        self.identity = backend.environment.identity
        python, paths = backend.environment.python, search_path()
        self._alone = Venv(python, {**environment, **paths}, module)
        self._beside = Venv(python, {**environment, **paths, **JAX_GROWS}, module)

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Result:
        """Run a process as every executor does. Raises :class:`OutOfTime` where not the process but the run took too
        long."""
        deadline = self.backend.deadline
        deadline.check()
        own = min(limits.timeout_seconds, self.backend.longest_seconds)
        venv = self._beside if self.backend.side_by_side else self._alone
        least = min(own, deadline.left)
        limits = replace(limits, timeout_seconds=least, ends_at=deadline.start + deadline.seconds)
        result = venv.run(request, limits, on_event)
        if result.state != "ok":
            deadline.check()
        return result


def search_path() -> dict[str, str]:
    """PYTHONPATH of a worker: this tree, then what the user's names (packages that were carried along)."""
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *named]))}


def look(python: Path, files: dict[str, tuple[Path, ...]]) -> UnpinnedEnvironment:
    """Return what ``python`` has for each framework, by name with the ``files`` that its workers import.

    Raises :class:`BadInput` where it is no Python that runs.
    """
    executable = shutil.which(str(python))
    if executable is None:
        raise BadInput(f"--python is {python}, which is no program here; give the path of a Python interpreter.")
    needs = {name: imports(paths) | {"numpy"} for name, paths in files.items()}
    every = sorted(set().union(*needs.values())) if needs else ["numpy"]
    try:
        said = ask(Path(executable), "harness.worker.unpinned_probe", every)
    except executor.ToolFault as fault:
        raise BadInput(
            f"{python} does not run ({str(fault).splitlines()[-1][-300:]}); give another by --python."
        ) from None
    missing = {name: tuple(sorted(wanted & set(said["missing"]))) for name, wanted in needs.items()}
    # Not resolved: behind its link, the interpreter of a virtual environment would not know its packages.
    return UnpinnedEnvironment(Path(executable).absolute(), said["versions"], missing)


def ask(python: Path, module: str, arguments: list[str]) -> dict[str, Any]:
    """Return the JSON object on the last line that ``python -m module`` prints. Raises :class:`ToolFault`."""
    return last_json(executor.run_tool(python, module, arguments, PROBE_SECONDS, {**search_path(), **JAX_GROWS}))


def imports(paths: Iterable[Path]) -> set[str]:
    """Top-level modules outside of this repository and the standard library that the files need to be imported at all:
    what they, and the files of this repository that they import, name at module level."""
    todo, seen, found = list(paths), set[Path](), set[str]()
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for name in _named(ast.parse(path.read_text())):
            top = name.split(".")[0]
            if top in LOCAL:
                todo += _local(name)
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return found


def _named(tree: ast.Module) -> Iterable[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _local(name: str) -> list[Path]:
    """Return the files that importing a module of this repository runs, itself and the packages above it."""
    parts = name.split(".")
    above = [ROOT.joinpath(*parts[:i], "__init__.py") for i in range(1, len(parts) + 1)]
    return [*above, ROOT.joinpath(*parts).with_suffix(".py")]
