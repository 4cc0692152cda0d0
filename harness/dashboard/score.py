"""Scores the step detection against generated histories whose truth is known: found, missed, falsely found.

``python -m harness.dashboard.score STEM`` writes STEM.md and STEM.json. Nothing in them was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness.analysis import change_points
from harness.dashboard import demo
from harness.dashboard.demo import Demo, Planted
from harness.history import runs as history
from harness.history import series
from harness.history.series import Series
from harness.store import cache

NEAR = 5
"""A step counts as the planted one if its range, widened by so many runs, holds it, in the same direction."""
SEEDS = (0, 1, 2)
EFFECTS, NOISES = (0.02, 0.05, 0.10), (0.015, 0.05)


def score(made: Demo) -> dict[str, Any]:
    """Return one generated history."""
    machines = series.of_history(history.of(made.runs))
    plants: list[dict[str, Any]] = []
    false: list[dict[str, Any]] = []
    retracted, runs = 0, 0
    for key, cells in machines.items():
        for s in cells:
            for metric in ("time", "memory"):
                truth = [p for p in made.planted if (p.machine, p.series, p.metric) == (key, s.name, metric)]
                found, points = s.found(metric)
                retracted += found.retracted
                runs += len(points) if metric == "time" else 0
                missed, wrong = _match(s, metric, truth, plants)
                plants += [_planted(p) | {"found": False} for p in missed]
                false += [{"metric": metric, "ratio": r, "cell": s.name} for r in wrong]
    return {"plants": plants, "false": false, "retracted": retracted, "series_years": runs / 365}


def _planted(p: Planted) -> dict[str, Any]:
    assert p.ratio is not None
    by = abs(p.ratio - 1)
    size = min(demo.SIZES, key=lambda s: abs(s - by)) if p.metric == "time" else None
    return {"metric": p.metric, "size": size, "noise": p.noise, "ratio": p.ratio, "cell": p.series}


def _match(
    s: Series, metric: str, truth: Sequence[Planted], plants: list[dict[str, Any]]
) -> tuple[list[Planted], list[float]]:
    """Return (planted steps that were not found, ratios of steps that are none); appends to ``plants`` what was
    found."""
    left, wrong = list(truth), []
    for step, before, after, alarm in s.changes(metric):
        fitting = [
            p
            for p in left
            if p.ratio is not None and (p.ratio > 1) == (step.ratio > 1) and before - NEAR < p.run <= after + NEAR
        ]
        if not fitting:
            wrong.append(step.ratio)
            continue
        hit = min(fitting, key=lambda p: abs(p.run - after))
        left.remove(hit)
        assert hit.ratio is not None
        plants.append(
            _planted(hit)
            | {
                "found": True,
                "delay_runs": alarm - hit.run + 1,
                "in_range": before < hit.run <= after,
                "range_runs": after - before,
                "in_interval": step.low <= hit.ratio <= step.high,
            }
        )
    return left, wrong


def delays(trials: int = 100, before: int = 100, after: int = 265) -> list[dict[str, Any]]:
    """Steps alone in clean noise, with ``before`` runs at the old level and ``after`` at the new."""
    rows = []
    for noise in NOISES:
        for effect in EFFECTS:
            series_ = change_points.simulate(before + after, trials, seed=7, sd=noise, effect=effect, at=before)
            seen = []
            for values in series_:
                hits = [s for s in change_points.find(values).steps if s.first - NEAR <= before <= s.last + NEAR]
                seen.append(hits[0].alarm - before + 1 if hits else None)
            found = sorted(d for d in seen if d is not None)
            rows.append(
                {
                    "noise": noise,
                    "effect": effect,
                    "trials": trials,
                    "found": len(found) / trials,
                    "median_delay_runs": median(found) if found else None,
                    "delay_90_runs": float(np.quantile(found, 0.9)) if found else None,
                }
            )
    return rows


def summary(scores: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return all histories together."""
    scores = list(scores)
    plants = [p for s in scores for p in s["plants"]]
    false = [f for s in scores for f in s["false"]]
    rows = []
    for noise in (*demo.NOISE, None):
        for size in demo.SIZES:
            here = [p for p in plants if p["metric"] == "time" and p["size"] == size and noise in (None, p["noise"])]
            hits = [p for p in here if p["found"]]
            rows.append(
                {
                    "noise": noise,
                    "size": size,
                    "planted": len(here),
                    "found": len(hits),
                    "missed": len(here) - len(hits),
                    "median_delay_runs": median(p["delay_runs"] for p in hits) if hits else None,
                    "median_range_runs": median(p["range_runs"] for p in hits) if hits else None,
                }
            )
    times = [p for p in plants if p["metric"] == "time" and p["found"]]
    memory = [p for p in plants if p["metric"] == "memory"]
    edges = (0.0, 0.02, 0.05, 0.10, float("inf"))
    return {
        "simulated": True,
        "histories": len(scores),
        "series_years": round(sum(s["series_years"] for s in scores), 1),
        "time": rows,
        "memory": {"planted": len(memory), "found": sum(p["found"] for p in memory)},
        "false": [
            {"from": low, "to": high if high < 1e9 else None, "time": n("time"), "memory": n("memory")}
            for low, high in pairwise(edges)
            for n in [lambda m, a=low, b=high: sum(f["metric"] == m and a <= abs(f["ratio"] - 1) < b for f in false)]
        ],
        "retracted_alarms": sum(s["retracted"] for s in scores),
        "range_holds_the_commit": round(sum(p["in_range"] for p in times) / max(1, len(times)), 3),
        "interval_holds_the_ratio": round(sum(p["in_interval"] for p in times) / max(1, len(times)), 3),
    }


def markdown(total: dict[str, Any], alone: Sequence[dict[str, Any]]) -> str:
    """Return both as text, which says in its title that all of it is simulated."""
    seeds, years, memory = ", ".join(map(str, SEEDS)), total["series_years"], total["memory"]
    false = [
        f"{f['from']:.0%} to {'any' if f['to'] is None else format(f['to'], '.0%')}: {f['time']} of time, "
        f"{f['memory']} of memory"
        for f in total["false"]
    ]
    by_noise = [
        (
            "all" if r["noise"] is None else f"{r['noise']:.1%}",
            f"{r['size']:.0%}",
            *(r["planted"], r["found"], r["missed"]),
            _text(r["median_delay_runs"]),
            _text(r["median_range_runs"]),
        )
        for r in total["time"]
    ]
    single = [
        (
            f"{a['noise']:.1%}",
            f"{a['effect']:.0%}",
            f"{a['found']:.0%}",
            _text(a["median_delay_runs"]),
            _text(a["delay_90_runs"]),
        )
        for a in alone
    ]
    parts = [
        "# Step detection against planted steps (*simulated*)",
        f"{total['histories']} generated histories (`harness/dashboard/demo.py`, seeds {seeds}): two years, 100 + 32 "
        f"cells on two machines, {years:,.0f} series-years, with drift, outliers, missing and disturbed runs. Nothing "
        "here was measured. Made by `python -m harness.dashboard.score`.",
        "## Steps of time",
        _grid(("noise", "size", "planted", "found", "missed", "median delay (runs)", "median range (runs)"), by_noise),
        f"Steps of memory (exact bytes): {memory['found']} of {memory['planted']} found.",
        f"Falsely found, by size: {'; '.join(false)}. Alarms that later runs took back: {total['retracted_alarms']}.",
        f"The range of commits holds the true one in {total['range_holds_the_commit']:.1%} of the steps found, the "
        f"interval of the ratio the true ratio in {total['interval_holds_the_ratio']:.1%}; both are meant to do so in "
        "95 % or more.",
        "## One step alone: how long until it is known",
        "100 runs before it, 265 after it, normal noise, 100 series each. Delay: runs of the new level until the "
        "alarm.",
        _grid(("noise", "step", "found", "median delay", "90 % within"), single),
        "## Noise alone: alarms in 100 series-years of daily runs",
        _grid(
            ("noise", "series of one year", "of two years"),
            [(kind, f"{one:g}", f"{two:g}") for kind, (one, two) in change_points.ALARMS_PER_100_YEARS.items()],
        ),
        "Every alarm counts that was ever raised in 1,600 series-years of each kind; see "
        "`harness/analysis/change_points.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def _grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def main(stem: Path) -> None:
    """Score generated histories and write the table to ``stem``."""
    total, alone = summary(score(demo.history(seed)) for seed in SEEDS), delays()
    content = {**total, "one_step_alone": alone, "alarms_per_100_series_years": change_points.ALARMS_PER_100_YEARS}
    cache.write_atomically(stem.with_suffix(".json"), (json.dumps(content, indent=1) + "\n").encode())
    cache.write_atomically(stem.with_suffix(".md"), markdown(total, alone).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
