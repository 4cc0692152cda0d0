"""Tell where the time of a layer goes: its parts, their shares, and what a model of its cost predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.analysis import layer_frames
from harness.analysis.layer_frames import BASELINE, MEGABYTE
from harness.analysis.memory_law import Parts
from harness.analysis.naming import number
from harness.analysis.tidy import rows_of
from harness.layers import LAYERS
from harness.report.chapters import memory
from harness.report.model import MISSING, Grid

PARTS = ("input", "labels", "module", "gradients", "intermediate", "peak", "unexplained")


def breakdown(cells: pd.DataFrame) -> Iterator[Grid]:
    """Yield the paper's Table 4: sizes that a layer cannot do without, measured without DP, beside the published
    ones."""
    plain = cells[(cells.contestant == BASELINE) & cells.peak.notna()]
    if plain.empty:
        return
    old = layer_frames.published("memory_breakdown").set_index(["layer", "batch_size"])
    rows = []
    for r in plain.to_dict("records"):
        parts = Parts(int(r["batch_size"]), r["input"] / MEGABYTE, r["labels"] / MEGABYTE, r["module"] / MEGABYTE)
        place = (r["layer"], r["batch_size"])
        before = old.loc[place] if place in old.index else None
        measured = (parts.input_bytes, parts.label_bytes, parts.C, parts.L, parts.ratio, parts.ratio / parts.batch_size)
        columns = ("input_mb", "labels_mb", "C_mb", "L_mb", "L_over_C", "L_over_C_over_b")
        beside = ["" if before is None else f" ({before[c]:g})" for c in columns]
        shown = (f"{number(value)}{old_value}" for value, old_value in zip(measured, beside, strict=True))
        rows.append((r["layer"], str(r["batch_size"]), *shown))
    header = ("layer", "batch", "input MB", "labels MB", "C", "L", "L/C", "L/C/b")
    note = (
        "In brackets what the paper has. C: input and twice the labels (the output is as large) of one example; L: the "
        "module; both MB. On CUDA a tensor takes whole blocks of 512 bytes, so the paper's L of small ones is larger. "
        "Of attention the paper counts the query only, not key and value."
    )
    yield Grid("Sizes", header, tuple(rows), (note,))


def parts(cells: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> Iterator[Grid]:
    """Yield every part of the peak, per contestant, at the largest batch size of each layer."""
    known = cells[cells.peak.notna()]
    if known.empty:
        return
    largest = known.groupby("layer").batch_size.transform("max")
    shown = known[known.batch_size == largest]
    rank = {name: i for i, name in enumerate(LAYERS)}
    rows = []
    for r in sorted(
        shown.to_dict("records"), key=lambda r: (rank.get(r["layer"], 99), pairs.index((r["contestant"], r["passes"])))
    ):
        values = (number(r[part] / MEGABYTE) for part in PARTS)
        rows.append((r["layer"], str(r["batch_size"]), f"{r['contestant']} ({r['passes']})", *values))
    notes = (
        "MB, at the largest batch size at which a layer's parts are known. Gradients: what a pass leaves behind; "
        "intermediate: the rest of the peak. Unexplained: what an independent count of living tensors found more.",
    )
    yield Grid("Parts of the peak", ("layer", "batch", "contestant", *PARTS), tuple(rows), notes)


def shares(predicted: pd.DataFrame) -> Iterator[Grid]:
    """Yield share explained by each law: here by contestant, on the paper's tables, and as its text has it."""
    own = memory.shares(memory.of_the_paper(), [])
    rows = []
    for r in rows_of(own):
        text = memory.QUOTED_SHARES.get((r.group, r.law), MISSING)
        rows.append(("the paper's tables", r.group, r.law, *_explained(r), text))
    here = memory.shares(predicted, ["contestant", "passes"]) if len(predicted) else predicted
    for r in rows_of(here):
        rows.append((f"{r.contestant} ({r.passes})", r.group, r.law, *_explained(r), MISSING))
    header = (
        "measured",
        "layers",
        "law",
        "share explained",
        "rows",
        "over / under",
        "mean |error|",
        "the paper's text",
    )
    notes = (
        "Share explained: predicted over measured peak, mean ± standard deviation over layers and batch sizes; error: "
        "predicted over measured less one. Above 100 % a law predicts more than there was; over / under: how many rows "
        "it over- and underestimates.",
        "The paper's tables: the laws applied to its published sizes, which are rounded to two or three digits; that, "
        "and CUDA's blocks of 512 bytes, is why its text is met to about a point only.",
        DPCORE_NOTE,
    )
    yield Grid("Which share of the peak the laws explain", header, tuple(rows), notes)


DPCORE_NOTE = (
    "dpcore: bC - (b - m) output + 2L + m kept, with the physical micro-batch m and the kept bytes that it planned "
    "itself; another L for convolutions whose sum is formed apart. Opacus' ghost mode keeps no gradient per example, "
    "so bC + 2L stands for it."
)


def _explained(r: Any) -> tuple[str, str, str, str]:
    share = f"{r.share:.1%}" + ("" if math.isnan(r.share_sd) else f" ± {r.share_sd:.1%}")
    return share, str(r.n), f"{r.over} / {r.under}", f"{r.mean_absolute_error:.1%}"


def predictions(predicted: pd.DataFrame, order: Sequence[tuple[str, str]]) -> Iterator[Grid]:
    """Yield every law beside the measured peak of every cell, a grid per contestant and kind of pass."""
    for contestant, passes in order:
        mine = predicted[(predicted.contestant == contestant) & (predicted.passes == passes)]
        if mine.empty:
            continue
        laws = list(dict.fromkeys(mine.law))
        with_plan = memory.DPCORE_DP in laws
        rows = []
        for (layer, size), group in mine.groupby(["layer", "batch_size"], sort=False):
            first = group.iloc[0]
            plan = (f"{first.micro_batch:.0f}",) if with_plan else ()
            by_law = {r.law: (number(r.predicted_mb), percent(r.error), f"{r.share:.1%}") for r in rows_of(group)}
            beside = (text for name in laws for text in by_law.get(name, (MISSING,) * 3))
            rows.append((str(layer), str(size), *plan, number(first.measured_mb), *beside))
        header = ("layer", "batch", *(("m",) if with_plan else ()), "measured MB")
        header += tuple(text for name in laws for text in (f"{name} MB", "error", "explained"))
        notes = (
            "Error: predicted over measured less one; above 0 an overestimate. Explained: predicted over measured. MB: "
            f"10⁶ bytes.{' ' + DPCORE_NOTE if with_plan else ''}",
        )
        yield Grid(f"{contestant} ({passes}): predicted and measured peak", header, tuple(rows), notes)


def percent(error: float) -> str:
    """Return it signed; what rounds to zero is +0.0%."""
    return f"{round(error, 3) + 0.0:+.1%}"
