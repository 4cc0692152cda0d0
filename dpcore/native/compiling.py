"""Compiles the kernels. Standard library only: the wheel is built with this file, without torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti")
EXACT = {"noise.cpp": ("-ffp-contract=off",)}
"""More flags by source: the noise is the same to the last bit on every processor, so that no product and sum may become
one instruction where there is one."""


GLIBC = "2.28"
"""The oldest C library that a wheel's kernels run with."""

RELEASE = (
    "-g0",
    "-fvisibility=default",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--gc-sections",
    "-Wl,--strip-all",
)
"""More flags of a library that a wheel carries: small, and without a path of the machine that compiled it."""

PINNED = "ziglang"
"""A package with a clang of its own: what the wheels are compiled with (`make wheels` pins its version)."""


class NativeBuildError(RuntimeError):
    """The kernels could not be compiled; the pure torch path remains."""


def as_in_the_wheel() -> bool:
    """Return whether the library is compiled here as a wheel's is: the package of that compiler is installed."""
    return not os.environ.get("CXX") and importlib.util.find_spec(PINNED) is not None


def compiler() -> list[str]:
    """Return the command of the C++ compiler: what CXX says, the wheels' own, or the first one that is found.

    Raises:
        NativeBuildError: there is none.
    """
    if as_in_the_wheel():
        return [sys.executable, "-m", PINNED, "c++", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}"]
    chosen = os.environ.get("CXX") or next((c for c in COMPILERS if shutil.which(c)), None)
    if chosen is None:
        raise NativeBuildError(f"No C++ compiler ({', '.join(COMPILERS)}) was found; install one, or set CXX.")
    return chosen.split()


def has_compiler() -> bool:
    """Return whether there is a C++ compiler."""
    try:
        compiler()
    except NativeBuildError:
        return False
    return True


def compile_library(target: Path, level: str, command: Sequence[str], more: Sequence[str] = ()) -> None:
    """Compile all kernels into the shared library ``target``, which appears whole or not at all.

    Args:
        target: File to write.
        level: The instruction set, as ``-march`` takes it.
        command: The compiler.
        more: Further flags, of compiling and linking.

    Raises:
        NativeBuildError: the compiler failed.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = [*FLAGS, *more]
    # zig's clang links each object, too: told to strip, it leaves nothing of it.
    compiling = [flag for flag in flags if not flag.startswith("-Wl,")]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for source in SOURCES:
            made = Path(folder) / f"{source.stem}.o"
            _run(
                [
                    *command,
                    *compiling,
                    *_instructions(level, command),
                    *EXACT.get(source.name, ()),
                    "-c",
                    str(source),
                    "-o",
                    str(made),
                ]
            )
            objects.append(str(made))
        library = Path(folder) / target.name
        # The pinned compiler would otherwise first compile its C++ library, of which the kernels use nothing: minutes.
        alone = ["-nostdlib++"] if PINNED in command else []
        _run([*command, *flags, *alone, "-shared", *objects, "-o", str(library)])
        os.replace(library, target)


def _instructions(level: str, command: Sequence[str]) -> list[str]:
    """Return the flags for an instruction set: armv8-a needs none, and zig has words of its own."""
    if level == "armv8-a":
        return []
    return [f"-mcpu={level.replace('-', '_')}"] if PINNED in command else [f"-march={level}"]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
