"""What every worker does as a process: loads an adapter, says what it finds, keeps to its processors, and ends with the
harness. Standard library and numpy only."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Emit = Callable[[dict[str, Any]], None]


def load_create(file: Path) -> Callable[[str], Any]:
    """Return ``create`` of ``adapter.py`` or ``layers.py``, imported by path: a framework may live outside the
    repository."""
    spec = importlib.util.spec_from_file_location(f"dpbench_{file.stem}_{file.parent.name}", file)
    if spec is None or spec.loader is None or not file.exists():
        raise FileNotFoundError(f"{file.parent} has no {file.name}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    create: Callable[[str], Any] = module.create
    return create


def events() -> Emit:
    """Return what writes events to the standard output, which from here on is nobody else's: what a framework prints
    goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda event: print(json.dumps(event), file=stream, flush=True)


def save_weights(path: str, weights: dict[str, np.ndarray]) -> None:
    """Atomic: a reader sees the whole file or none."""
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **weights)  # type: ignore[arg-type]
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def versions() -> dict[str, str]:
    """Every distribution that this environment holds."""
    return {"python": platform.python_version(), **dict(_distributions())}


@cache
def _distributions() -> tuple[tuple[str, str], ...]:
    """(name, version), sorted. Read once: a quarter of a second in a well-filled environment."""
    descriptions = [distribution.metadata for distribution in importlib.metadata.distributions()]
    return tuple(sorted({(description["Name"], description["Version"]) for description in descriptions}))


def pin(threads: int) -> None:
    """Only ``threads`` of the processors that this process may use, for those threads, too, that numpy's BLAS has
    started. Before any framework starts its pools."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))[:threads]
        os.sched_setaffinity(0, allowed)
        for thread in Path("/proc/self/task").glob("*"):
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), allowed)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the harness dies (prctl PR_SET_PDEATHSIG), even by kill -9: an orphan would
    disturb whatever is measured next."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
