"""Memory that is free for a device: a GPU's own, or this machine's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's limit, what is used, and what of it can be dropped, in the second and the first version."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that may still be taken; 0 where nobody says it (on a CPU without Linux)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, AttributeError):
        said = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return min([int(said[1]) * 1024, *_rooms()])  # type: ignore[index]
    return 0


def _rooms() -> Iterator[int]:
    """Yield what each control group of this process may still take, of those that have a limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, kinds, path = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("" if number == "0" else "memory")
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            for most, used, dropped in FILES:
                with suppress(OSError, ValueError, TypeError):  # no such file, or no limit
                    limit, taken = (int((folder / name).read_text()) for name in (most, used))
                    found = re.search(rf"^{dropped} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
                    yield max(0, limit - taken + int(found[1]))  # type: ignore[index]
