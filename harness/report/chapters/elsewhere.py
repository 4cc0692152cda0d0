"""The speed of private training as others have published it, beside what was measured here.

Machines differ, so only ratios stand side by side: examples per second with DP over those of the same training without.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import numpy as np
import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.paths import ROOT
from harness.report.model import MISSING, Chapter, Columns, Grid, doubts, listed

FILE = ROOT / "results" / "published" / "speed.csv"
TITLE = "Speed of private training, published elsewhere"
READ = {"figure": "read from a figure, ±2 %", "text": "stated in a text", "claim": "claimed in an abstract or a README"}
"""How a figure was had, by the word in the file."""
NO_TWIN = "no run without DP beside it"


def published() -> pd.DataFrame:
    """Return the published figures, a row each.

    ``ratio_low``, ``ratio_high``: speed with DP over the speed without; one value where both are equal, NaN where the
    source has no run without DP. ``times_low``, ``times_high``: speed over that of ``times_of``, another training with
    DP, of sources that have no other figure. ``read``: a key of READ. ``flat_exact``: whether it is exact clipping by
    one norm over all parameters, as every contestant here must do.
    """
    frame = pd.read_csv(FILE, dtype={"task": str}).fillna({"task": ""})
    ratio = frame.examples_per_second / frame.without_dp
    return frame.assign(ratio_low=frame.ratio_low.fillna(ratio), ratio_high=frame.ratio_high.fillna(ratio))


def measured(tables: Tables) -> pd.DataFrame:
    """Return the same ratio of the contestants with a non-private twin: a row per task, its range over batch sizes."""
    if tables.overheads.empty:
        return pd.DataFrame()
    rows = []
    for (task, contestant, twin, machine, device), group in tables.overheads.groupby(
        ["task", "contestant", "twin", "machine", "device"], sort=False
    ):
        speed = 1.0 / group.dp
        rows.append(
            {
                "task": task,
                "contestant": contestant,
                "twin": twin,
                "hardware": f"{machine}, {device}",
                "batch_sizes": ", ".join(map(str, sorted(set(group.batch_size)))),
                "ratio_low": float(speed.min()),
                "ratio_high": float(speed.max()),
                "n": int(group.n.min()),
                "extrapolated": bool(group.extrapolated.any()),
                "disturbed": int(group.disturbed.any()),
            }
        )
    return pd.DataFrame(rows)


def chapter(tables: Tables) -> Chapter:
    """Return the chapter: the published figures, then the measured ones."""
    theirs, ours = published(), measured(tables)
    frames = {"published-elsewhere": theirs} | ({"speed-over-without-dp": ours} if len(ours) else {})
    return Chapter(TITLE, None, tuple(_grids(theirs, ours)), frames=frames, printed=False, brief=())


def _grids(theirs: pd.DataFrame, ours: pd.DataFrame) -> Iterator[Grid]:
    over_another = theirs.times_of.notna()
    what = {name: attrgetter(name) for name in ("method", "network", "setting", "hardware")}
    origin: Columns = {
        "one exact norm": lambda r: "yes" if r.flat_exact == "yes" else "no",
        "how read": lambda r: READ[r.read],
        "source": attrgetter("source"),
    }
    speeds: Columns = {
        "examples/s": lambda r: _number(r.examples_per_second),
        "without DP": lambda r: _number(r.without_dp),
        "ratio": lambda r: _range(r.ratio_low, r.ratio_high) or NO_TWIN,
    }
    times: Columns = {
        "times": lambda r: _range(r.times_low, r.times_high),
        "of": attrgetter("times_of"),
    }
    yield listed(
        "Published: speed with DP over the speed without",
        theirs[~over_another],
        what | speeds | origin,
        ("Nothing of this was measured here. Where the norm is not one over all parameters, less work is done.",),
    )
    yield listed(
        "Published: speed with DP over that of another training with DP",
        theirs[over_another],
        what | times | origin,
        ("Nothing of this was measured here, and no training without DP stands beside it.",),
    )
    if len(ours):
        yield listed(
            "Measured here: speed with DP over that of the contestant's own twin without",
            ours,
            {
                "contestant": attrgetter("contestant"),
                "task": attrgetter("task"),
                "batch sizes": attrgetter("batch_sizes"),
                "hardware": attrgetter("hardware"),
                "twin": attrgetter("twin"),
                "ratio": lambda r: f"{_range(r.ratio_low, r.ratio_high)}{doubts(r)}",
                "n": lambda r: str(r.n),
            },
            ("Means over paired rounds, the lowest and the highest of the batch sizes; other tasks and machines.",),
        )


def _number(value: float) -> str:
    return MISSING if np.isnan(value) else f"{value:g}"


def _range(low: float, high: float) -> str:
    """Return a ratio, or the range of one; nothing for NaN."""
    words = [factor(value) for value in dict.fromkeys((low, high)) if not np.isnan(value)]
    return " to ".join(dict.fromkeys(words))
