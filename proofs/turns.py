"""Draw how comparisons came to their verdicts: the interval of head over base against the minutes of measuring.

``python -m proofs.turns FOLDER FIGURE`` reads every ``NAME.json`` of FOLDER, a ``comparison.json`` of one cell, and
prints a table of them, too. How those of results/comparisons/turns-2026-11-27 came about is said there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from harness.analysis.sequential import Rule, judge
from harness.compare.record import Comparison, counted, most_set_aside, read

COLOURS = {"processes": "#9a3412", "turns": "#0f766e"}


def looks(comparison: Comparison) -> Iterator[tuple[float, float, float, float]]:
    """Yield (minutes of measuring so far, low, ratio, high) after every pair that a look came after."""
    cell = comparison.cells[0]
    rule = Rule(comparison.alpha, comparison.timed_cells, comparison.threshold, comparison.max_rounds)
    kept, _ = counted(cell.pairs, most_set_aside(rule.rounds))
    spent, ratios = 0.0, []
    for pair in cell.pairs:
        spent += (pair.base.wall_seconds + pair.head.wall_seconds) / 60.0
        if pair in kept and pair.log_ratio is not None:
            ratios.append(pair.log_ratio)
            found = judge(ratios[: rule.rounds], rule)
            if found.low is not None and found.high is not None and found.ratio is not None:
                yield spent, found.low, found.ratio, found.high


def main() -> None:
    """Draw the figure and print the table."""
    folder, figure = map(Path, sys.argv[1:3])
    comparisons = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    drawn = Figure(figsize=(8, 4.2), layout="constrained")
    axes = drawn.subplots(1, 2, sharex=True, sharey=True)
    print("| comparison | change | how | verdict | head over base | pairs | minutes |\n|---|---|---|---|---|---|---|")
    for name, comparison in comparisons.items():
        found = list(looks(comparison))
        how = "turns" if comparison.cells[0].pairs[0].blocks else "processes"
        is_planted = name.startswith("planted")
        place = axes[0 if is_planted else 1]
        minutes, low, middle, high = zip(*found, strict=True)
        place.fill_between(minutes, low, high, color=COLOURS[how], alpha=0.15, linewidth=0)
        place.plot(minutes, middle, color=COLOURS[how], marker="o", markersize=3, label=how)
        both = [(m - a, b - m) for a, m, b in zip(low, middle, high, strict=True)]
        place.errorbar(minutes, middle, [*zip(*both, strict=True)], color=COLOURS[how], linewidth=0.8, capsize=2)
        verdict, n = comparison.cells[0].verdict, len(comparison.cells[0].pairs)
        change = "5 % busy loop" if is_planted else "none"
        ratio = f"{middle[-1]:.3f} [{low[-1]:.3f}, {high[-1]:.3f}]"
        print(f"| {name} | {change} | {how} | {verdict} | {ratio} | {n} | {minutes[-1]:.1f} |")
    day = next(iter(comparisons.values())).started[:10]
    for place, title in zip(axes, ("a busy loop of 5 % of each step", "nothing has changed"), strict=True):
        place.axhline(1.0, color="#64748b", linewidth=0.8)
        place.set_title(title, fontsize=10)
        place.set_xlabel("minutes of measuring")
        names: dict[str, object] = {}
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            names.setdefault({"turns": "turns", "processes": "one process after the other"}[label], handle)
        place.legend(list(names.values()), list(names), fontsize=8, loc="upper right")
    axes[0].set_ylabel("time of head over base, interval at all looks")
    top = max(high for comparison in comparisons.values() for *_, high in looks(comparison))
    axes[0].set_ylim(2.0 - min(top, 1.4), min(top, 1.4))
    drawn.suptitle(
        f"dpcore on MNIST CNN at 64, one thread, AMD EPYC with two cores that others also used, {day}, "
        f"n = {len(comparisons)} comparisons",
        fontsize=9,
    )
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(figure, metadata={"Date": None} if figure.suffix == ".svg" else None)
    assert math.isfinite(top)


if __name__ == "__main__":
    main()
