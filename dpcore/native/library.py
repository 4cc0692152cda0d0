"""Choose the library of kernels: the one in the wheel or one compiled here, for the best instruction set."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dpcore.native import compiling, levels, self_check
from dpcore.native.levels import Level

SWITCH = "DPCORE_NATIVE"
"""Environment variable: ``0`` forbids kernels, the name of a level (``x86-64-v3``) those above it."""

PACKAGED = Path(__file__).parent / "libraries"
"""Where a wheel carries its libraries."""


@dataclass(frozen=True)
class Kernels:
    """A library that was loaded, and its instruction set."""

    level: Level
    library: ctypes.CDLL


def allowed() -> tuple[Level, ...]:
    """Return the levels that this processor has and that the environment allows, the best first.

    Raises:
        ValueError: the environment names a level that does not exist.
    """
    asked = os.environ.get(SWITCH, "")
    here = levels.levels_here()
    if asked == "0":
        return ()
    if asked in ("", "1"):
        return here
    names = [level.name for level in levels.LEVELS]
    if asked not in names:
        raise ValueError(f"{SWITCH} is {asked!r}: say 0, or the highest instruction set of {', '.join(names)}.")
    above = names[: names.index(asked)]
    return tuple(level for level in here if level.name not in above)


def compiled_path(level: Level) -> Path:
    """Return where the library lies, or would lie, that is compiled here for ``level``."""
    kind = compiling.PINNED if compiling.as_in_the_wheel() else "any"
    digest = hashlib.sha256("\0".join([*compiling.FLAGS, repr(compiling.EXACT), level.name, kind]).encode())
    for source in (*compiling.HEADERS, *compiling.SOURCES):
        digest.update(source.read_bytes())
    named = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # A user without a home folder (``docker run --user 12345``) has a folder for temporary files.
    cache = Path(named if os.path.isabs(named) else Path(tempfile.gettempdir(), f"dpcore-{os.getuid()}"))
    return cache / "dpcore" / f"native-{digest.hexdigest()[:16]}-{level.file_name}"


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels in use; None where there are none, or they failed their check."""
    for level in allowed():
        for path in (PACKAGED / level.file_name, compiled_path(level)):
            if path.exists():
                return _checked(level, path)
    return None


@functools.cache
def function(library: ctypes.CDLL, name: str, pointers: int, sizes: int, numbers: int = 0) -> Callable[..., int]:
    """Return a kernel that knows its arguments: addresses, integers, and floats.

    Told at every call, they would take as long as a small kernel's work.
    """
    found = library[name]  # each look finds an object of its own
    found.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes + [ctypes.c_double] * numbers
    return found


def _checked(level: Level, path: Path) -> Kernels | None:
    """Load the library, and give it up with a warning where it computes something else than torch does."""
    try:
        fault = _may_be_forged(path)
        if fault is None:
            library = ctypes.CDLL(str(path))
            fault = self_check.fault(library)
    except OSError as error:
        fault = str(error)
    if fault is None:
        _share_threads(library)
        return Kernels(level, library)
    warnings.warn(
        f"dpcore's compiled kernels are switched off: {fault} ({path}). The pure torch path computes the same, more "
        "slowly. Please report this with the name of your processor.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _share_threads(library: ctypes.CDLL) -> None:
    """Let the kernels run on torch's threads, where those are OpenMP's; a forked child has none of them any more."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return
    team = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if team is None:
        return
    library.dpcore_use_team(team)
    os.register_at_fork(after_in_child=lambda: library.dpcore_use_team(None))


def _may_be_forged(path: Path) -> str | None:
    """Return why somebody else may have put the library there: code runs as soon as it is loaded."""
    if path.parent == PACKAGED:
        return None  # where the package lies, its Python files could be replaced, too
    for place in (path, path.parent):
        facts = place.stat()
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & stat.S_IWOTH:
            return f"{place} is another user's, or every user may write to it"
    return None
