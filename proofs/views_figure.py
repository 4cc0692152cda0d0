"""Draw the table of proofs/views_accuracy.py that is in docs/privacy-unit.md: ``python -m proofs.views_figure FIGURE``.

Each seed is a stroke; the mean of each row and its 95 % interval are above it.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure
from scipy.stats import t as student

PAGE = Path(__file__).parents[1] / "docs" / "privacy-unit.md"
COLOURS = {"4 views": "#0f766e"}


def main() -> None:
    """Draw the figure."""
    table = PAGE.read_text().partition("<!-- table of proofs/views_accuracy.py -->")[2].partition("<!-- end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    drawn = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = drawn.subplots()
    for place, (kind, _, each, *_) in enumerate(rows):
        values, colour = [float(value) for value in each.split(", ")], COLOURS.get(kind, "#9a3412")
        n = len(values)
        half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5
        axes.errorbar(statistics.mean(values), place - 0.12, xerr=half, fmt="o", color=colour, capsize=3, markersize=4)
        axes.plot(values, [place + 0.15] * n, "|", color=colour, markersize=9)
    axes.set_yticks(range(len(rows)), [kind for kind, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("Four views of an example, in a setting that was sought for them", loc="left", fontweight="bold")
    axes.set_xlabel(
        "test accuracy in %, 10,000 training pictures of CIFAR-10, epsilon 8 at delta 1e-5\n"
        "seeds 1 to 5 (strokes), mean with 95 % interval; EPYC (Zen 2), 28 Nov 2026; axis cut"
    )
    figure = Path(sys.argv[1])
    drawn.savefig(figure, metadata={"Date": None} if figure.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
