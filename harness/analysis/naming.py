"""Names and order of what a report shows: contestants, machines, numbers."""

from __future__ import annotations

import calendar
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.plan.registry import frameworks

PAPER_ORDER = ("JAX (DP)", "PyTorch without DP", "Opacus", "BackPACK", "Custom TFP (XLA)", "PyVacy")
"""Rows of the paper's Table 1 from top to bottom."""
BASELINE_ROW = "PyTorch without DP"
BASELINE_FRAMEWORK = "pytorch"


def paper_rows() -> dict[str, str]:
    """Return contestant -> row of the paper's table that it stands for, as the framework's folder declares it."""
    return {f"{f.name}-{v.name}": v.paper_row for f in frameworks().values() for v in f.variants if v.paper_row}


def twins() -> dict[str, str]:
    """Private contestant -> the contestant that does the same without DP, as the framework's folder declares it."""
    return {f"{f.name}-{v.name}": v.twin for f in frameworks().values() for v in f.variants if v.twin}


def titles() -> dict[str, str]:
    """Return contestant -> its title, as the framework's folder declares it. A title that two of them share is left
    out."""
    found = {f"{f.name}-{v.name}": v.title for f in frameworks().values() for v in f.variants}
    shared = {title for title, count in Counter(found.values()).items() if count > 1}
    return {name: title for name, title in found.items() if title not in shared}


def machine_label(machine: Mapping[str, Any]) -> str:
    """``AMD EPYC 7B13, 2 cores, 16 GiB [3f2a91c0 2 threads]``: readable; in brackets what tells two machines apart that
    only look alike, and one machine that was used in two ways: with other threads, another GPU of it, a quota of
    processors, variables that libraries read."""
    parts = [re.sub(r"\((R|TM)\)|\bCPU\b|@.*$", " ", str(machine.get("cpu") or "unknown processor"))]
    if machine.get("cores"):
        parts.append(f"{machine['cores']} cores")
    if machine.get("memory_bytes"):
        parts.append(f"{machine['memory_bytes'] / 2**30:.0f} GiB")
    parts += [str(gpu).split(",")[0] for gpu in machine.get("gpus") or []]
    label = re.sub(r"\s+", " ", ", ".join(part.strip() for part in parts))
    threads = machine.get("threads")
    identity = [str(machine.get("id") or ""), f"{threads} thread{'' if threads == 1 else 's'}" if threads else ""]
    identity += [f"card {_short(machine['card'])}"] if machine.get("card") else []
    identity += [f"quota of {machine['quota']:g} processors"] if machine.get("quota") else []
    identity += [
        f"{name}={value if len(value) <= LONGEST_VALUE else _short(value)}"
        for name, value in sorted((machine.get("variables") or {}).items())
    ]
    return f"{label} [{' '.join(part for part in identity if part)}]" if any(identity) else label


LONGEST_VALUE = 16
"""Characters of a variable that a label shows; of a longer one, a path for instance, a hash."""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def machine_identity(machine: Mapping[str, Any]) -> str:
    """Return what one machine has in all of its records, however many threads were used; where they hold no identity,
    how it looks."""
    return str(machine.get("id") or machine_label({**machine, "threads": None}))


def machine_slug(label: str) -> str:
    """Return the identity in brackets at the end of a :func:`machine_label`, or all of a label that has none."""
    return label.rpartition("[")[2].rstrip("]")


def where(label: str, days: Sequence[str]) -> str:
    """Return what a reader wants to know of a measurement first: ``AMD EPYC, 1 thread, 20 Nov 2026``.

    Args:
        label: A :func:`machine_label`.
        days: Days of the measurement, as YYYY-MM-DD, in order.
    """
    hardware, _, identity = label.partition(" [")
    processor, *rest = hardware.split(", ")
    gpus = [part for part in rest if not re.fullmatch(r"\d+ (cores|GiB)", part)]
    threads = re.findall(r"\d+ threads?|quota of \S+ processors|\w+=[^\s\]]*", identity)
    dates = [f"{int(d[8:10])} {calendar.month_abbr[int(d[5:7])]} {d[:4]}" for d in dict.fromkeys((days[0], days[-1]))]
    return ", ".join([processor, *gpus, *threads, " to ".join(dates)])


def slug(*parts: str) -> str:
    """Parts as one file name: lower case, digits and hyphens, parts separated by ``_``."""
    return "_".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part)


def number(value: float) -> str:
    """Three significant digits without an exponent: 0.00123, 1.23, 12.3, 1230."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    value = float(f"{value:.3g}")
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def factor(value: float) -> str:
    """Return a ratio with as many digits as an interval of some per cent deserves, and never 0.00: 0.00249, 0.56,
    153."""
    return f"{value:.2f}" if 0.1 <= abs(float(f"{value:.3g}")) < 10 else number(value)


def duration(seconds: float) -> str:
    """Return seconds with the unit that people would use."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{number(seconds * scale)} {unit}"
    return f"{number(seconds)} s"


def size(count: int) -> str:
    """Return bytes, a change of them too, with the unit that people would use."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= scale:
            return f"{number(count / scale)} {unit}".replace("-", "−")
    return f"{count} B".replace("-", "−")
