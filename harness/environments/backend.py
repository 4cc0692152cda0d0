"""The place where workers run, as the runs see it: one interface for virtual environments, containers, a Python as it
is found, and this very process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.environments import memory_limit, variables
from harness.environments.executor import WORKER, Executor, Limits
from harness.environments.unavailable import Unavailable
from harness.errors import BadInput
from harness.plan.layer_registry import LayerContestant
from harness.plan.registry import Contestant, Framework
from harness.store import surroundings
from harness.store.record import Container, Image
from harness.worker import machine, quota, speed_probe
from harness.worker.result import Result

AnyContestant = Contestant | LayerContestant
Log = Callable[[str], None]
"""Takes a line for the progress display."""


@dataclass(frozen=True)
class Input:
    """A file that a tool reads: ``path`` itself, or ``name`` in the folder ``path``, which a container sees whole."""

    path: Path
    name: str = ""

    @property
    def file(self) -> Path:
        return self.path / self.name


@dataclass(frozen=True)
class Output:
    """Output of a tool: the file ``path``, or the files ``names`` into the folder ``path``."""

    path: Path
    names: tuple[str, ...] = ()


Argument = str | Input | Output
RunTool = Callable[[str, Sequence[Argument], Log], str]
"""A function like :meth:`Backend.run_tool`."""


@dataclass(frozen=True)
class Provenance:
    """The place where a process ran, as its record names it."""

    image: Image | None
    container: Container | None
    machine: dict[str, Any]


class Backend(Protocol):
    """Interface to the place where workers run. ``VenvBackend``, ``ContainerBackend``, ``UnpinnedBackend`` and
    ``InProcessBackend`` have it.
    """

    def prepare(self, contestants: Iterable[AnyContestant], log: Log) -> None:
        """Make what :meth:`describe` tells of, before the folder of the run is opened."""
        ...

    def executor(self, contestant: AnyContestant, log: Log, module: str = WORKER) -> Executor | Unavailable:
        """Return where the contestant's workers run, or why they cannot.

        Args:
            contestant: whose environment and code it is.
            log: takes a line for the progress display.
            module: the worker, as for ``python -m``.
        """
        ...

    def run_tool(self, module: str, arguments: Sequence[Argument], log: Log) -> str:
        """Run a tool that needs PyTorch: a float64 reference, an evaluation.

        Args:
            module: the tool, as for ``python -m``.
            arguments: its arguments; files are marked as :class:`Input` or :class:`Output`.
            log: takes a line for the progress display.

        Returns:
            What it printed.

        Raises:
            ToolFault: it failed, or left a file of its output out.
            EnvironmentFault: there is no environment with PyTorch.
        """
        ...

    def environment_id(self, framework: Framework) -> str:
        """Return the hash of the framework's pins, or of the versions that stand in their place."""
        ...

    def resources(self, device: str, threads: int | None, memory_bytes: int | None, seconds: float) -> Resources:
        """Return what every process gets; ``threads`` and ``memory_bytes`` None for most of what there is.

        Raises:
            BadInput: the machine lacks the device, or so many processors.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find the same, for ``plan.json``."""
        ...

    def place(self, device: str, threads: int) -> dict[str, Any]:
        """Return the facts of this machine and of the way it is used that tell two places apart
        (:data:`harness.store.surroundings.FACTS`)."""
        ...

    def describe_process(self, framework: Framework, result: Result | None) -> Provenance:
        """Return where the process ran whose result it is; without one, where it would have."""
        ...

    def speed_probe(self) -> float | None:
        """Return the seconds of a fixed piece of work now, or None where they would not show the workers' speed."""
        ...

    def close(self) -> None:
        """Remove what this process has left running."""
        ...


@dataclass(frozen=True)
class Resources:
    """``threads`` of every process, which are as many pinned processors, and its ``limits``."""

    threads: int
    limits: Limits


class LocalBackend:
    """Common part of the backends whose workers are ordinary processes of this machine."""

    def prepare(self, contestants: Iterable[AnyContestant], log: Log) -> None:
        """Environments are built when an executor is asked for: nothing that is described depends on them."""

    def environment_id(self, framework: Framework) -> str:
        return framework.lock_hash

    def resources(self, device: str, threads: int | None, memory_bytes: int | None, seconds: float) -> Resources:
        chosen = threads or default_threads()
        check_device(device)
        check_threads(chosen)
        return Resources(chosen, Limits(memory_bytes or memory_limit.default_limit(), seconds))

    def describe(self) -> dict[str, Any]:
        return {}

    def place(self, device: str, threads: int) -> dict[str, Any]:
        limit = quota.group()
        ways = {"quota": limit.processors if limit else None, "variables": variables.named()}
        return surroundings.facts(place_of(device, threads) | ways)

    def describe_process(self, framework: Framework, result: Result | None) -> Provenance:
        return Provenance(None, None, {**machine.describe(), **machine.state()})

    def speed_probe(self) -> float | None:
        return speed_probe.seconds()

    def close(self) -> None:
        """Every process ends with its measurement."""


def default_threads() -> int:
    """Return all processors of this process but one: the one that the harness and the machine's other work are on.

    On processors that are all busy as many threads can take many times as long as one: those of a pool spin while they
    wait for each other.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)


def place_of(device: str, threads: int) -> dict[str, Any]:
    """Return the machine, and the threads and the GPU that are used of it."""
    card = machine.card() if device == "cuda" else None
    return {**machine.describe(), "threads": threads, "card": card}


def check_threads(threads: int) -> None:
    """Raise :class:`BadInput` for none, or for more threads than processors, which would not be pinned one to one."""
    if threads < 1:
        raise BadInput(f"--threads is {threads}: it must be at least 1.")
    available = len(os.sched_getaffinity(0))
    if threads > available:
        raise BadInput(f"--threads is {threads}, but this process may use {available} processors; choose at most that.")


def check_device(device: str) -> None:
    """Raise :class:`BadInput` where the device is not there."""
    if device == "cuda" and not machine.gpus():
        raise BadInput(
            "--device is cuda, but nvidia-smi sees no GPU on this machine; use --device cpu, or repair the driver."
        )
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cuda" and asked is not None and machine.card() is None:
        raise BadInput(f"--device is cuda, but CUDA_VISIBLE_DEVICES is {asked!r}, which names no GPU here; name one.")
    if device not in {"cpu", "cuda"}:
        raise BadInput(f"--device is {device!r}: choose cpu or cuda.")


def as_words(arguments: Sequence[Argument]) -> list[str]:
    """Return the arguments of a tool that sees the files of this machine."""
    return [a if isinstance(a, str) else str(a.file if isinstance(a, Input) else a.path) for a in arguments]


def last_json(printed: str) -> dict[str, Any]:
    """Return the JSON object on the last line that a tool printed."""
    said: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return said
