"""Read what control groups leave to this process, of processors above all, by cgroup v1 or v2. Standard library only.

A container with ``--cpus 0.5`` and a pod with a limit are stopped for a part of every period. The kernel counts that,
and no load of the machine shows it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True)
class Group:
    """A control group with a quota: its folder, and the ``processors`` whose time it may use."""

    folder: Path
    processors: float

    def periods(self) -> tuple[int, int]:
        """Return (periods that have begun, those in which it was stopped) so far."""
        counts = {"nr_periods": 0, "nr_throttled": 0}
        with suppress(OSError, ValueError):
            for line in (self.folder / "cpu.stat").read_text().splitlines():
                name, value = line.split()
                counts[name] = int(value)
        return counts["nr_periods"], counts["nr_throttled"]


def group(proc: Path = PROC) -> Group | None:
    """Return the group, this process's own or one above it, that leaves the least; None where none leaves less than
    the processors that the process may run on.

    Args:
        proc: the process's folder in /proc.
    """
    found = [Group(folder, limit) for folder in groups("cpu", proc) if (limit := _limit(folder)) is not None]
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    least = min(found, key=lambda one: one.processors, default=None)
    return least if least is not None and least.processors < there else None


def groups(kind: str, proc: Path = PROC) -> Iterator[Path]:
    """Yield the folders of the process's group that counts ``cpu`` or ``memory``, and of those above it."""
    with suppress(OSError, ValueError):
        lines = (line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines())
        # Of v2 no kind is named; v1 has a hierarchy for each kind.
        own = {kind: Path(path) for _, kinds, path in lines for kind in kinds.split(",")}
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            root, mount = (part.replace("\\040", " ") for part in before.split()[3:5])
            system, _, options = after.split()[:3]
            path = own.get("" if system == "cgroup2" else kind)
            if path is not None and (system == "cgroup2" or (system == "cgroup" and kind in options.split(","))):
                # Without a namespace of its own, a container sees its group as the root of the mount.
                inside = path.relative_to(root) if path.is_relative_to(root) else Path()
                yield from (Path(mount) / part for part in (inside, *inside.parents))


def _limit(folder: Path) -> float | None:
    """Return the quota in processors; None for ``max`` and, of v1, -1, and where there is none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            found = math.inf if quota == "max" else float(quota) / float(period)
            return found if 0 < found < math.inf else None
    return None
