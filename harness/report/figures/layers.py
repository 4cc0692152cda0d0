"""Figures of layers. Every one stands alone: units, machine, day, n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pandas as pd

from harness.analysis import layer_frames
from harness.analysis.layer_frames import MEGABYTE
from harness.analysis.naming import number
from harness.analysis.tidy import rows_of
from harness.layers import LAYERS
from harness.report import model
from harness.report.figures import looks, panel
from harness.report.figures.looks import MARKERS, PALETTE, Fill, Look
from harness.report.figures.panel import Axis, Panel, Spec

GREY = "#888888"
SEPARATOR = "#dddddd"
OWN = {"pytorch": "torch.nn", "opacus": "Opacus", "dpcore": "dpcore"}
SIZES_SHADES = ("#7FCDBB", "#41B6C4", "#1D91C0", "#225EA8", "#253494", "#081D58")
"""ColorBrewer's YlGnBu without its lightest: batch sizes from light to dark, an order on a grey printer too."""
WIDTH, HALF, LOW = 560, 232, 170
"""Pixels of a panel that stands alone, of one of two, and their height."""
QUANTITIES = {"runtime": "runtime", "memory": "peak memory"}


def _measured(frame: pd.DataFrame) -> list[str]:
    """Return the quantities of which there are factors: no empty panel where a run counted no memory."""
    return [what for what in QUANTITIES if frame[what].notna().any()] or ["runtime"]


def factors(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Spec:
    """Runtime (top) and memory (bottom) over torch.nn by layer, batch sizes side by side; the paper's in grey."""
    mine = frame[(frame.contestant == contestant) & (frame.passes == passes)]
    names = [name for name in LAYERS if name in set(mine.layer)]
    sizes = sorted(mine.batch_size.unique())
    style = {size: Look(_shade(i, len(sizes)), "o", "") for i, size in enumerate(sizes)}
    whats = _measured(mine)
    with_paper, panels = False, []
    for k, what in enumerate(whats):
        published = layer_frames.published(what).set_index(["layer", "batch_size"]).dp_factor
        old = {place: value for place, value in published.dropna().items() if place[0] in names and place[1] in sizes}
        y = panel.factors(panel.around([*mine[what], *old.values(), 1.0]), f"{QUANTITIES[what]} / torch.nn (log)")
        ticks = [(float(i), name if k == len(whats) - 1 else "") for i, name in enumerate(names)]
        one = Panel(Axis(-0.5, len(names) - 0.5, log=False, ticks=ticks, grid=False), y, WIDTH, 140)
        for i in range(1, len(names)):
            one.curve((i - 0.5, i - 0.5), (y.low, y.high), looks.line(SEPARATOR), 0.8)
        one.curve((-0.5, len(names) - 0.5), (1.0, 1.0), looks.line("#000000", ":"), 1.2)
        for (name, size), value in old.items():
            with_paper = True
            one.mark(names.index(name) + _offset(size, sizes), value, Look(GREY, "_", ""), 60)
        for row in rows_of(mine[mine[what].notna()]):
            x = names.index(str(row.layer)) + _offset(row.batch_size, sizes)
            if what == "runtime":
                one.bar(x, row.runtime_low, row.runtime_high, style[row.batch_size])
            one.mark(x, getattr(row, what), style[row.batch_size], 26)
        panels.append(one.spec())
    legend = {f"batch {size}": look for size, look in style.items()}
    if with_paper:
        legend["the paper, at the same batch"] = Look(GREY, "_", "")
    notes = [
        f"Points, left to right and light to dark: batch sizes. Runtime: {_rounds(mine)}",
        *(["The paper: Opacus 1.0 on an A100 in 2021, forward and backward without clipping."] if with_paper else []),
        *_absent(mine),
        where,
    ]
    title = f"{contestant} ({passes.replace('_', ' ')}) over torch.nn, by layer and batch size"
    return panel.page(title, panels, notes, legend)


def modes(size: int, frame: pd.DataFrame, where: str) -> Spec:
    """Return all DP contestants at one batch size: runtime (left) and memory factor (right), a row per layer."""
    private = frame[frame.column == "dp"]
    pairs = list(dict.fromkeys(zip(private.contestant, private.passes, strict=True)))
    names = [name for name in LAYERS if name in set(private.layer)]
    style = {pair: _look(*pair) for pair in pairs}
    row = max(25.0, 9 + 5.0 * len(pairs))
    whats = _measured(private)
    panels = []
    for k, what in enumerate(whats):
        better = "faster" if what == "runtime" else "less"
        ends = panel.around([*private[what], 1.0])
        x = panel.factors(ends, f"{QUANTITIES[what]} / torch.nn (log; left is {better})")
        # The first layer on top.
        rows = [(float(i), name if k == 0 else "") for i, name in enumerate(names)]
        y = Axis(len(names) - 0.5, -0.5, log=False, ticks=rows, grid=False)
        one = Panel(x, y, HALF if len(whats) > 1 else WIDTH, row * len(names))
        for i in range(1, len(names)):
            one.curve((x.low, x.high), (i - 0.5, i - 0.5), looks.line(SEPARATOR), 0.8)
        one.curve((1.0, 1.0), (-0.5, len(names) - 0.5), looks.line("#000000", ":"), 1.2)
        for measured in rows_of(private[private[what].notna()]):
            pair = str(measured.contestant), str(measured.passes)
            place = names.index(str(measured.layer)) + 0.76 * (pairs.index(pair) - (len(pairs) - 1) / 2) / len(pairs)
            if what == "runtime":
                one.bar(place, measured.runtime_low, measured.runtime_high, style[pair], across=True)
            one.mark(getattr(measured, what), place, style[pair], 26)
        panels.append(one.spec())
    notes = [
        f"Runtime: {_rounds(private)} Between two lines: one layer, the contestants in the order of the legend."
        " Filled or tinted: forward, backward and the clipped sum. Open: forward and backward with per-sample "
        "gradients only, which leaves the clipping to be paid.",
        *_absent(private, by_contestant=True),
        where,
    ]
    legend = {_label(pair): replace(look, line="") for pair, look in style.items()}
    return panel.page(f"Layers with DP over torch.nn without, batch {size}", panels, notes, legend, columns=2)


def _label(pair: tuple[str, str]) -> str:
    return f"{pair[0]} ({pair[1].replace('_', ' ')})"


MODULES = ("mha", "rnn", "gru", "lstm")


def modules(framework: str, cells: pd.DataFrame, where: str) -> Spec:
    """Return the paper's appendix figure: torch.nn, the library's own module without DP, and with DP; milliseconds and
    MB."""
    own = cells[(cells.framework == framework) & (cells.column == "own_module")]
    names = [name for name in MODULES if name in set(own.layer)] or list(dict.fromkeys(own.layer))[:4]
    lines = dict(_lines_of(framework, cells))
    across = panel.PAGE / max(1, len(names))
    quantities = (
        ("milliseconds per pass (log)", ("median_ms", "low_ms", "high_ms"), 1.0),
        ("peak MB (log)", ("peak", "peak", "peak"), MEGABYTE),
    )
    panels = []
    for (k, (label, (value, low, high), scale)), (place, name) in product(enumerate(quantities), enumerate(names)):
        sizes = sorted(cells[cells.layer == name].batch_size.unique())
        of_here = {title: frame[frame.layer == name] for title, (_, frame) in lines.items()}
        ends = panel.around(v / scale for frame in of_here.values() for v in frame[value])
        x = panel.of_sizes(sizes, "batch size (log)" if k == len(quantities) - 1 else "")
        one = Panel(x, panel.plain(ends, label if place == 0 else ""), across - 62, 140, [] if k else [name])
        for title, frame in of_here.items():
            columns = zip(frame.batch_size, frame[value], frame[low], frame[high], strict=True)
            bounded = value != low
            shown = {
                int(size): (v / scale, *((a / scale, b / scale) if bounded else (math.nan, math.nan)))
                for size, v, a, b in columns
                if not math.isnan(v)
            }
            panel.over_sizes(one, sizes, shown, lines[title][0])
        panels.append(one.spec())
    title = f"torch.nn, {OWN.get(framework, framework)}'s own module without DP, and with DP"
    legend = {title: look for title, (look, _) in lines.items()}
    return panel.page(title, panels, [_processes(cells), where], legend, columns=len(names))


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


def sweep(contestant: str, passes: str, frame: pd.DataFrame, where: str) -> Spec:
    """Return the paper's embedding figure: runtime and memory factor over num_embeddings, a line per batch size."""
    sizes = sorted(frame.batch_size.unique())
    widths = sorted(frame.num_embeddings.unique())
    style = {size: Look(_shade(i, len(sizes)), MARKERS[i % len(MARKERS)], "-") for i, size in enumerate(sizes)}
    panels = []
    for what, title in (("runtime", "Runtime"), ("memory", "Peak memory (dashed: the paper's law)")):
        predicted = list(frame.predicted_overhead) if what == "memory" else []
        y = panel.factors(panel.around([*frame[what], *predicted, 1.0]), f"{QUANTITIES[what]} / torch.nn (log)")
        ticks = [(float(value), f"{value:,.0f}") for value in widths]
        x = Axis(min(widths) / 1.6, max(widths) * 1.6, ticks=ticks, title="num_embeddings (log)")
        one = Panel(x, y, HALF, LOW, [title])
        one.curve((x.low, x.high), (1.0, 1.0), looks.line("#000000", ":"), 1.2)
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
                one.mark(row.num_embeddings, getattr(row, what), look, 26)
        panels.append(one.spec())
    ratios = frame.drop_duplicates("num_embeddings").sort_values("num_embeddings")
    notes = [
        f"L/C from left to right: {', '.join(map(number, ratios.L_over_C))}; in the paper, which counts blocks of 512 "
        f"bytes: {', '.join(f'{value:,g}' for value in ratios.paper_L_over_C)}. Law: (bC + (1 + b)L) / (bC + 2L), of "
        f"a gradient per example. Runtime: {_rounds(frame)}",
        *_absent(frame),
        where,
    ]
    title = f"Embedding of width 100: {contestant} ({passes.replace('_', ' ')}) over torch.nn"
    return panel.page(title, panels, notes, {f"batch {size}": look for size, look in style.items()}, columns=2)


def law(predicted: pd.DataFrame, where: str) -> Spec:
    """Predicted against measured peak: without DP, Opacus by the paper's law and by today's, dpcore by its own."""
    laws = (
        ("without DP: bC + 2L", predicted[predicted.column != "dp"]),
        ("Opacus: bC + (1 + b)L", predicted[(predicted.framework == "opacus") & (predicted.law == "bC + (1 + b)L")]),
        ("Opacus: bC + 2L + 2bL", predicted[predicted.law == "bC + 2L + 2bL"]),
        ("dpcore: its own", predicted[(predicted.framework == "dpcore") & (predicted.law == "dpcore")]),
    )
    shown = [(title, frame) for title, frame in laws if len(frame)]
    names = [name for name in LAYERS if name in set(predicted.layer)]
    kinds = list(dict.fromkeys(LAYERS[name].kind for name in names))
    style = {kind: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], "") for i, kind in enumerate(kinds)}
    low, high = panel.around([*predicted.predicted_mb, *predicted.measured_mb])
    ticks = [(value, label) for value, label in panel.plain_ticks(low, high) if label]
    panels = []
    for k, (title, frame) in enumerate(shown):
        x = Axis(low, high, ticks=ticks, title="measured peak MB (log)" if k + 2 >= len(shown) else "")
        y = Axis(low, high, ticks=ticks, title="predicted MB (log)" if k % 2 == 0 else "")
        one = Panel(x, y, HALF, HALF, [title])
        one.curve((low, high), (low, high), looks.line("#000000"), 1.0)
        one.curve((2 * low, high), (low, high / 2), looks.line("#000000", ":"), 0.8)
        for row in rows_of(frame):
            if row.measured_mb > 0 and row.predicted_mb > 0:
                one.mark(row.measured_mb, row.predicted_mb, style[str(row.kind)], 26)
        panels.append(one.spec())
    notes = [
        "A point per layer, batch size and contestant. b: batch size; C: bytes of an example's input, label and "
        "output; L: bytes of the parameters. Full line: predicted = measured; dotted: half of it. Below the line are "
        "intermediate results and workspaces, which no law counts. MB: a million bytes.",
        where,
    ]
    title = "The memory law: predicted against measured peak of a pass"
    return panel.page(title, panels, notes, style, columns=2)


# ---- shared


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
