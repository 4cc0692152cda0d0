"""The instruction sets that the kernels are compiled for, and which of them this processor has.

The levels of x86-64 are those of its psABI; they are chosen when the kernels are loaded, so that one wheel serves every
processor. Standard library only: the wheel is built with this file.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """An instruction set: its name (the compiler's ``-march``), and the processor's flags that it needs."""

    name: str
    machine: str
    needs: frozenset[str]

    @property
    def file_name(self) -> str:
        """The name of the library of this level."""
        return f"kernels-{self.name}.so"


_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

LEVELS = (
    Level("x86-64-v4", "x86_64", _V4),
    Level("x86-64-v3", "x86_64", _V3),
    Level("x86-64-v2", "x86_64", _V2),
    Level("armv8-a", "aarch64", frozenset({"asimd"})),
)
"""The best of each machine first."""


def levels_of(machine: str, flags: frozenset[str]) -> tuple[Level, ...]:
    """Return the levels that a processor can run, the best first.

    Args:
        machine: As :func:`platform.machine` has it.
        flags: What the kernel says that the processor can do.
    """
    return tuple(level for level in LEVELS if level.machine == machine and level.needs <= flags)


def levels_here() -> tuple[Level, ...]:
    """Return the levels that this processor can run, the best first; none where the system does not say."""
    return levels_of(platform.machine(), frozenset(_fact("flags", "features").split()))


def is_intel() -> bool:
    """Return whether this is a processor of Intel's; not where the system does not say."""
    return _fact("vendor_id").strip() == "GenuineIntel"


def has_avx512() -> bool:
    """Return whether this processor has AVX-512, as x86-64-v4 wants it; not where the system does not say."""
    return any(level.needs == _V4 for level in levels_here())


def _fact(*names: str) -> str:
    """Return what the system says of the first processor under one of these names, or nothing."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.lower().startswith(names)), "")
