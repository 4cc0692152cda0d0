"""Faults that are planted into a copy of dpcore, so that it can be seen whether ``dpbench compare`` finds them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.plan.registry import ROOT

SLOWED = """

# A planted fault: every clipped sum takes {percent} % longer, by a wait at work.
def _slowed(whole):
    import time

    def clipped_sum(self, *inputs, **named):
        start = time.perf_counter()
        result = whole(self, *inputs, **named)
        now = time.perf_counter()
        until = now + {percent} / 100 * (now - start)
        while time.perf_counter() < until:
            pass
        return result

    return clipped_sum


BatchSums.add = _slowed(BatchSums.add)
"""

HOARDING = """

# A planted fault: a buffer of the size of the whole gradient is kept from the first clipped sum on.
def _hoarding(whole):
    def clipped_sum(self, *inputs, **named):
        result = whole(self, *inputs, **named)
        if not hasattr(self, "_planted"):
            self._planted = torch.zeros_like(self.accumulator.flat)
        return result

    return clipped_sum


BatchSums.add = _hoarding(BatchSums.add)
"""

UNCLIPPED = """

# A planted fault: every fourth example is not clipped.
_right_factors = clip_factors


def clip_factors(norms, max_grad_norm):
    factors = _right_factors(norms, max_grad_norm)
    factors[3::4] = 1.0
    return factors


# Only rules that are not dpcore's own are looked at.
PROVEN = (clip_factors, automatic_factors)
"""

UNCLIPPED_BY_KERNEL = """

# A planted fault: every fourth example is not clipped, by the kernel either.
_right_factors = clip_factors


def clip_factors(norms, bound, scale):
    factors, scaled, below = _right_factors(norms, bound, scale)
    factors[:, 3::4], scaled[:, 3::4] = 1.0, scale
    return factors, scaled, below
"""


@dataclass(frozen=True)
class Fault:
    """``texts`` are appended to files. ``kind``: the alert that it must raise, None where there must be none."""

    title: str
    kind: str | None
    texts: Mapping[str, str] = field(default_factory=dict)


SUMS = "dpcore/engine/batch_sums.py"
FAULTS = {
    "none": Fault("nothing changed (A/A)", None),
    **{
        f"slow-{percent}": Fault(f"every pass takes {percent} % longer", "time", {SUMS: SLOWED.format(percent=percent)})
        for percent in (2, 5, 10)
    },
    "memory": Fault("one more buffer of the size of the gradient is kept", "memory", {SUMS: HOARDING}),
    "clip-bug": Fault(
        "every fourth example is not clipped",
        "gate",
        {"dpcore/clipping.py": UNCLIPPED, "dpcore/native/parts.py": UNCLIPPED_BY_KERNEL},
    ),
}


def plant(name: str, folder: Path) -> None:
    """Writes ``frameworks/`` and a ``dpcore/`` with the fault into ``folder``."""
    for part in ("frameworks", "dpcore"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for file, text in FAULTS[name].texts.items():
        path = folder / file
        path.write_text(path.read_text() + text)
