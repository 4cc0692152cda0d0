"""Figures of layers. Every one stands alone: units, machine, day, n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from harness.analysis import layer_frames
from harness.analysis.layer_frames import MEGABYTE
from harness.analysis.naming import number
from harness.analysis.tidy import rows_of
from harness.layers import LAYERS
from harness.report import model
from harness.report.figures import looks, panel
from harness.report.figures.drawing import Drawing, width
from harness.report.figures.looks import MARKERS, PALETTE, Fill, Look
from harness.report.figures.panel import Panel, Scale

GREY = "#888888"
SEPARATOR = "#dddddd"
OWN = {"pytorch": "torch.nn", "opacus": "Opacus", "dpcore": "dpcore"}
SIZES_SHADES = ("#7FCDBB", "#41B6C4", "#1D91C0", "#225EA8", "#253494", "#081D58")
"""ColorBrewer's YlGnBu without its lightest: batch sizes from light to dark, an order on a grey printer too."""
LEFT = 46.0
"""Points between the edge of the page and a panel with values beside it."""
QUANTITIES = {"runtime": "runtime", "memory": "peak memory"}


def _measured(frame: pd.DataFrame) -> list[str]:
    """Return the quantities of which there are factors: no empty panel where a run counted no memory."""
    return [what for what in QUANTITIES if frame[what].notna().any()] or ["runtime"]


def factors(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Drawing:
    """Runtime (top) and memory (bottom) over torch.nn by layer, batch sizes side by side; the paper's in grey."""
    mine = frame[(frame.contestant == contestant) & (frame.passes == passes)]
    names = [name for name in LAYERS if name in set(mine.layer)]
    sizes = sorted(mine.batch_size.unique())
    style = {size: Look(_shade(i, len(sizes)), "o", "") for i, size in enumerate(sizes)}
    drawing = panel.page(f"{contestant} ({passes.replace('_', ' ')}) over torch.nn, by layer and batch size")
    whats = _measured(mine)
    with_paper = False
    for k, what in enumerate(whats):
        published = layer_frames.published(what).set_index(["layer", "batch_size"]).dp_factor
        old = {place: value for place, value in published.dropna().items() if place[0] in names and place[1] in sizes}
        top = panel.TITLE_ROOM + 6 + 124 * k
        y = panel.around([*mine[what], *old.values(), 1.0])
        one = Panel(drawing, LEFT, top, panel.PAGE - 6, top + 112, Scale(-0.5, len(names) - 0.5, log=False), y)
        is_last = k == len(whats) - 1
        ticks = [(float(i), name if is_last else "") for i, name in enumerate(names)]
        label = f"{QUANTITIES[what]} / torch.nn (log)"
        one.frame(ticks, panel.factor_ticks(y.low, y.high), y_label=label, grid="y")
        for i in range(1, len(names)):
            _line(one, (i - 0.5, y.low), (i - 0.5, y.high), SEPARATOR, 0.5)
        _line(one, (-0.5, 1.0), (len(names) - 0.5, 1.0), "#000000", 1.0, ":")
        for (name, size), value in old.items():
            with_paper = True
            one.mark(names.index(name) + _offset(size, sizes), value, Look(GREY, "_", ""), 6)
        for row in rows_of(mine[mine[what].notna()]):
            x = names.index(str(row.layer)) + _offset(row.batch_size, sizes)
            if what == "runtime":
                one.bar(x, row.runtime_low, row.runtime_high, style[row.batch_size])
            one.mark(x, getattr(row, what), style[row.batch_size], 4)
    legend = {f"batch {size}": look for size, look in style.items()}
    if with_paper:
        legend["the paper, at the same batch"] = Look(GREY, "_", "")
    notes = [
        f"Points, left to right and light to dark: batch sizes. Runtime: {_rounds(mine)}",
        *(["The paper: Opacus 1.0 on an A100 in 2021, forward and backward without clipping."] if with_paper else []),
        *_absent(mine),
        where,
    ]
    panel.below(drawing, notes, legend)
    return drawing


def modes(size: int, frame: pd.DataFrame, where: str) -> Drawing:
    """Return all DP contestants at one batch size: runtime (left) and memory factor (right), a row per layer."""
    private = frame[frame.column == "dp"]
    pairs = list(dict.fromkeys(zip(private.contestant, private.passes, strict=True)))
    names = [name for name in LAYERS if name in set(private.layer)]
    style = {pair: _look(*pair) for pair in pairs}
    drawing = panel.page(f"Layers with DP over torch.nn without, batch {size}")
    row = max(19.0, 6.5 + 4.0 * len(pairs))
    left = 9 + max((width(name, 8) for name in names), default=0.0)
    whats = _measured(private)
    gap = 24
    across = (panel.PAGE - 8 - left + gap) / len(whats)
    y = Scale(len(names) - 0.5, -0.5, log=False)  # the first layer on top
    for k, what in enumerate(whats):
        x = panel.around([*private[what], 1.0])
        begin, top = left + k * across, panel.TITLE_ROOM + 4
        one = Panel(drawing, begin, top, begin + across - gap, top + row * len(names), x, y)
        rows = [(float(i), name if k == 0 else "") for i, name in enumerate(names)]
        better = "faster" if what == "runtime" else "less"
        label = f"{QUANTITIES[what]} / torch.nn (log; left is {better})"
        one.frame(panel.factor_ticks(x.low, x.high), rows, x_label=label, grid="x")
        for i in range(1, len(names)):
            _line(one, (x.low, i - 0.5), (x.high, i - 0.5), SEPARATOR, 0.5)
        _line(one, (1.0, len(names) - 0.5), (1.0, -0.5), "#000000", 1.0, ":")
        for measured in rows_of(private[private[what].notna()]):
            pair = str(measured.contestant), str(measured.passes)
            place = names.index(str(measured.layer)) + 0.76 * (pairs.index(pair) - (len(pairs) - 1) / 2) / len(pairs)
            if what == "runtime":
                one.bar(place, measured.runtime_low, measured.runtime_high, style[pair], across=True)
            one.mark(getattr(measured, what), place, style[pair], 4)
    notes = [
        f"Runtime: {_rounds(private)} Between two lines: one layer, the contestants in the order of the legend."
        " Filled, wholly or by half: forward, backward and the clipped sum. Open: forward and backward with per-sample "
        "gradients only, which leaves the clipping to be paid.",
        *_absent(private, by_contestant=True),
        where,
    ]
    panel.below(drawing, notes, {_label(pair): replace(look, line="") for pair, look in style.items()})
    return drawing


def _label(pair: tuple[str, str]) -> str:
    return f"{pair[0]} ({pair[1].replace('_', ' ')})"


MODULES = ("mha", "rnn", "gru", "lstm")


def modules(framework: str, cells: pd.DataFrame, where: str) -> Drawing:
    """Return the paper's appendix figure: torch.nn, the library's own module without DP, and with DP; milliseconds and
    MB."""
    own = cells[(cells.framework == framework) & (cells.column == "own_module")]
    names = [name for name in MODULES if name in set(own.layer)] or list(dict.fromkeys(own.layer))[:4]
    lines = dict(_lines_of(framework, cells))
    drawing = panel.page(f"torch.nn, {OWN.get(framework, framework)}'s own module without DP, and with DP")
    across = panel.PAGE / max(1, len(names))
    quantities = (
        ("milliseconds per pass (log)", ("median_ms", "low_ms", "high_ms"), 1.0),
        ("peak MB (log)", ("peak", "peak", "peak"), MEGABYTE),
    )
    for place, name in enumerate(names):
        sizes = sorted(cells[cells.layer == name].batch_size.unique())
        for k, (label, (value, low, high), scale) in enumerate(quantities):
            of_here = {title: frame[frame.layer == name] for title, (_, frame) in lines.items()}
            left, top = place * across + (44 if place == 0 else 34), panel.TITLE_ROOM + 16 + 128 * k
            y = panel.around([v / scale for frame in of_here.values() for v in frame[value]])
            one = Panel(drawing, left, top, (place + 1) * across - 4, top + 108, panel.of_sizes(sizes), y)
            is_last = k == len(quantities) - 1
            ticks = [(size, text if is_last else "") for size, text in panel.size_ticks(sizes)]
            one.frame(
                ticks,
                panel.plain_ticks(y),
                [] if k else [name],
                "batch size (log)" if is_last else "",
                label if place == 0 else "",
            )
            for title, frame in of_here.items():
                columns = zip(frame.batch_size, frame[value], frame[low], frame[high], strict=True)
                bounded = value != low
                shown = {
                    int(size): (v / scale, *((a / scale, b / scale) if bounded else (math.nan, math.nan)))
                    for size, v, a, b in columns
                    if not math.isnan(v)
                }
                panel.lines(one, sizes, shown, lines[title][0])
    panel.below(drawing, [_processes(cells), where], {title: look for title, (look, _) in lines.items()})
    return drawing


def _lines_of(framework: str, cells: pd.DataFrame) -> Iterator[tuple[str, tuple[Look, pd.DataFrame]]]:
    """Yield (name, (look, cells)) of torch.nn, of the framework's own module and of its contestants with DP."""
    for who, column in (("pytorch", "module"), (framework, "own_module")):
        part = cells[(cells.framework == who) & (cells.column == column) & (cells.passes == "plain")]
        for contestant, group in part.groupby("contestant", sort=False):
            own = looks.of(str(contestant))
            look = replace(own, line=own.line if own.line in (":", "-.") else ":", fill="none")
            yield str(contestant), (look, group)
    dp = cells[(cells.framework == framework) & (cells.column == "dp")]
    for (contestant, passes), group in dp.groupby(["contestant", "passes"], sort=False):
        pair = str(contestant), str(passes)
        yield _label(pair), (_look(*pair), group)


def sweep(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Drawing:
    """Return the paper's embedding figure: runtime and memory factor over num_embeddings, a line per batch size."""
    sizes = sorted(frame.batch_size.unique())
    widths = sorted(frame.num_embeddings.unique())
    style = {size: Look(_shade(i, len(sizes)), MARKERS[i % len(MARKERS)], "-") for i, size in enumerate(sizes)}
    drawing = panel.page(f"Embedding of width 100: {contestant} ({passes.replace('_', ' ')}) over torch.nn")
    for k, (what, title) in enumerate((("runtime", "Runtime"), ("memory", "Peak memory (dashed: the paper's law)"))):
        predicted = list(frame.predicted_overhead) if what == "memory" else []
        y = panel.around([*frame[what], *predicted, 1.0])
        begin = k * panel.PAGE / 2
        one = Panel(drawing, begin + LEFT, 32, begin + panel.PAGE / 2 - 8, 176, panel.of_sizes(widths), y)
        one.frame(
            [(value, f"{value:,.0f}") for value in widths],
            panel.factor_ticks(y.low, y.high),
            [title],
            "num_embeddings (log)",
            f"{QUANTITIES[what]} / torch.nn (log)",
        )
        _line(one, (one.x.low, 1.0), (one.x.high, 1.0), "#000000", 1.0, ":")
        for size, look in style.items():
            mine = frame[frame.batch_size == size].sort_values("num_embeddings")
            if what == "memory":
                law_line = replace(look, line="--")
                one.curve(list(mine.num_embeddings), list(mine.predicted_overhead), law_line, 0.8)
            known = mine[mine[what].notna()]
            one.curve(list(known.num_embeddings), list(known[what]), look, 1.1)
            for row in rows_of(known):
                if what == "runtime":
                    one.bar(row.num_embeddings, row.runtime_low, row.runtime_high, look)
                one.mark(row.num_embeddings, getattr(row, what), look, 4)
    ratios = frame.drop_duplicates("num_embeddings").sort_values("num_embeddings")
    notes = [
        f"L/C from left to right: {', '.join(map(number, ratios.L_over_C))}; in the paper, which counts blocks of 512 "
        f"bytes: {', '.join(f'{value:,g}' for value in ratios.paper_L_over_C)}. Law: (bC + (1 + b)L) / (bC + 2L), of "
        f"a gradient per example. Runtime: {_rounds(frame)}",
        *_absent(frame),
        where,
    ]
    panel.below(drawing, notes, {f"batch {size}": look for size, look in style.items()})
    return drawing


def law(predicted: pd.DataFrame, where: str) -> Drawing:
    """Predicted against measured peak: without DP, Opacus by the paper's law and by today's, dpcore by its own."""
    panels = (
        ("without DP: bC + 2L", predicted[predicted.column != "dp"]),
        ("Opacus: bC + (1 + b)L", predicted[(predicted.framework == "opacus") & (predicted.law == "bC + (1 + b)L")]),
        ("Opacus: bC + 2L + 2bL", predicted[predicted.law == "bC + 2L + 2bL"]),
        ("dpcore: its own", predicted[(predicted.framework == "dpcore") & (predicted.law == "dpcore")]),
    )
    shown = [(title, frame) for title, frame in panels if len(frame)]
    names = [name for name in LAYERS if name in set(predicted.layer)]
    kinds = list(dict.fromkeys(LAYERS[name].kind for name in names))
    style = {kind: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], "") for i, kind in enumerate(kinds)}
    scale = panel.around([*predicted.predicted_mb, *predicted.measured_mb])
    ticks = [(value, label) for value, label in panel.plain_ticks(scale) if label]
    drawing = panel.page("The memory law: predicted against measured peak of a pass")
    columns = 2 if len(shown) > 1 else 1
    for k, (title, frame) in enumerate(shown):
        left, top = k % columns * panel.PAGE / columns + LEFT, panel.TITLE_ROOM + 16 + k // columns * 196
        one = Panel(drawing, left, top, left + panel.PAGE / columns - LEFT - 8, top + 148, scale, scale)
        x_label = "measured peak MB (log)" if k + columns >= len(shown) else ""
        one.frame(ticks, ticks, [title], x_label, "predicted MB (log)" if k % columns == 0 else "")
        _line(one, (scale.low, scale.low), (scale.high, scale.high), "#000000", 0.8)
        _line(one, (2 * scale.low, scale.low), (scale.high, scale.high / 2), "#000000", 0.6, ":")
        for row in rows_of(frame):
            if row.measured_mb > 0 and row.predicted_mb > 0:
                one.mark(row.measured_mb, row.predicted_mb, style[str(row.kind)], 4)
    notes = [
        "A point per layer, batch size and contestant. b: batch size; C: bytes of an example's input, label and "
        "output; L: bytes of the parameters. Full line: predicted = measured; dotted: half of it. Below the line are "
        "intermediate results and workspaces, which no law counts. MB: 10⁶ bytes.",
        where,
    ]
    panel.below(drawing, notes, style)
    return drawing


# ---- shared


def _line(
    one: Panel, begin: tuple[float, float], end: tuple[float, float], colour: str, thickness: float, line: str = "-"
) -> None:
    """Join two values."""
    one.drawing.curve((one.at(*begin), one.at(*end)), colour, thickness, panel.DASHES[line])


def _look(contestant: str, passes: str) -> Look:
    """Return a contestant's own colour and marker; open where only per-sample gradients are formed, and nowhere
    else."""
    own = looks.of(contestant)
    fill: Fill = "none" if passes == "per_sample" else "bottom" if own.fill == "none" else own.fill
    return replace(own, line="-", fill=fill)


def _absent(frame: pd.DataFrame, by_contestant: bool = False) -> list[str]:
    """Return cells without runtime and memory, which the table of the report gives a state and a reason: at which batch
    sizes, or by whom."""
    gone = frame[frame.runtime.isna() & frame.memory.isna()].groupby("layer", sort=False)
    places = [
        f"{layer} by {', '.join(dict.fromkeys(group.contestant))}"
        if by_contestant
        else f"{layer} at {', '.join(map(str, sorted(group.batch_size)))}"
        for layer, group in gone
    ]
    return [f"Not measured: {'; '.join(places)}."] if places else []


def _rounds(frame: pd.DataFrame) -> str:
    n = frame[frame.runtime_n > 0].runtime_n
    return "not measured." if n.empty else model.rounds_note(n, "bar")


def _shade(i: int, count: int) -> str:
    """Return the colour of the i-th of ``count`` batch sizes: light to dark."""
    last = len(SIZES_SHADES) - 1
    return SIZES_SHADES[last if count < 2 else round(i * last / (count - 1))]


def _offset(size: int, sizes: Sequence[int]) -> float:
    room = min(0.66, 0.2 * (len(sizes) - 1))
    return 0.0 if len(sizes) < 2 else room * (sizes.index(size) / (len(sizes) - 1) - 0.5)


def _processes(cells: pd.DataFrame) -> str:
    n = cells[cells.n > 0].n
    if (n <= 1).all():
        return "Milliseconds: one process a point, the median of its passes, bar: 95 % interval over them."
    alone = " (of one process: 95 % interval over its passes)" if (n == 1).any() else ""
    return f"Milliseconds: median of {model.processes(n)} (the median of its passes each){model.bars_note(n)}{alone}."
