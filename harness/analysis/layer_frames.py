"""Records of layers as tidy frames, and the paper's own tables of layers beside them.

Vocabulary: a *section* is what must never be pooled (machine, device, protocol, isolation); a *cell* is one layer,
batch size, contestant and kind of pass in it; its *baseline* is plain ``torch.nn`` in the same block. MB are 10^6
bytes, as in the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import naming, stats
from harness.analysis.pairs import PAIRING
from harness.analysis.tidy import SECTION, UNGATED, UNGATED_REASON, Process, grouped, origin_of, section_of
from harness.layers import LAYERS
from harness.paths import ROOT
from harness.store.record import Record

PLACE = [*SECTION, "layer", "batch_size"]
CELL = [*PLACE, "passes", "contestant"]
Key = tuple[Any, ...]
MEGABYTE = 1e6
BASELINE = "pytorch-eager"
"""Plain torch.nn without DP, which every factor is over."""
PARTS = ("input", "labels", "module", "gradients", "intermediate", "peak", "baseline", "unexplained")
PUBLISHED_LABEL = "published in 2021, NVIDIA A100 40 GB, torch 1.10, Opacus 1.0"


@dataclass(frozen=True)
class LayerTables:
    """Everything that a report shows of layers. ``contestants``: in the order of a report, as (contestant, passes);
    ``superseded``: processes of cells that were measured again with newer code, which nothing else holds."""

    raw: pd.DataFrame
    cells: pd.DataFrame
    factors: pd.DataFrame
    spread: pd.DataFrame
    superseded: pd.DataFrame
    contestants: tuple[tuple[str, str], ...]


def build(records: Sequence[Record]) -> LayerTables | None:
    """Return the frames of layers; None where no record is of kind layer."""
    everything = _rows([r for r in records if r.cell.kind == "layer" and r.layer is not None])
    if everything.empty:
        return None
    old = _superseded(everything)
    raw = everything[~old].reset_index(drop=True)
    order = _contestants(raw)
    summary = _arranged(cells(raw), order)
    return LayerTables(raw, summary, factors(raw, summary), spread(raw, order), everything[old], order)


def _contestants(raw: pd.DataFrame) -> tuple[tuple[str, str], ...]:
    """Plain torch.nn, then by framework: its own modules without DP, per-sample gradients, clipped sums."""
    columns, passes = ("module", "own_module", "dp"), ("plain", "per_sample", "clipped")
    rank = {"pytorch": 0, "opacus": 1, "dpcore": 2}
    found = raw[["framework", "contestant", "passes", "column"]].drop_duplicates().itertuples(index=False)
    ordered = sorted(
        found,
        key=lambda r: (rank.get(r.framework, 9), r.framework, columns.index(r.column), passes.index(r.passes), r[1]),
    )
    return tuple((r.contestant, r.passes) for r in ordered)


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per record. ``median_ms`` and ``mean_ms`` are the process's, over its passes; what a pass holds is
    in bytes. Records of a cell measured again with newer code are left out."""
    raw = _rows(records)
    return raw if raw.empty else raw[~_superseded(raw)].reset_index(drop=True)


def _superseded(raw: pd.DataFrame) -> pd.Series:
    """Return which rows are of a cell that was measured again with newer code."""
    newest = raw.sort_values("when", kind="stable").groupby([*CELL, "purpose"]).code.transform("last").sort_index()
    return raw.code != newest


def _rows(records: Sequence[Record]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for r in records:
        assert r.layer is not None
        state, reason = _admitted(r)
        seconds = r.layer.pass_seconds if state == "ok" else []
        parts = r.layer.parts if state == "ok" else None
        if parts is not None and not parts.peak:
            parts = None  # every layer has inputs: an allocator that saw no byte of them counted nothing
        rows.append(
            {
                **section_of(r, naming.machine_label(r.machine)),
                "layer": r.cell.layer,
                "paper_row": r.layer.paper_row,
                "kind": r.layer.kind,
                "batch_size": r.cell.batch_size,
                "passes": r.cell.passes,
                "contestant": r.cell.contestant,
                "framework": r.cell.framework,
                "column": r.layer.column,
                "purpose": r.purpose,
                "state": state,
                "reason": " ".join((reason or "").split()),
                "median_ms": statistics.median(seconds) * 1e3 if seconds else math.nan,
                "mean_ms": statistics.fmean(seconds) * 1e3 if seconds else math.nan,
                **_over_passes(seconds),
                "passes_timed": len(seconds),
                **{name: float(getattr(parts, name) or 0) if parts else math.nan for name in PARTS},
                "instrument": parts.instrument if parts else None,
                "input_bytes": r.layer.input_bytes,
                "label_bytes": r.layer.label_bytes,
                "output_bytes": r.layer.output_bytes,
                "C": r.layer.example_bytes,
                "L": r.layer.parameter_bytes,
                "micro_batch": r.layer.plan.get("micro_batch", math.nan),
                "kept_bytes": r.layer.plan.get("kept_bytes", math.nan),
                "disturbed": bool(r.load and r.load.disturbed),
                "run": r.block.run,
                "round": r.block.round,
                **origin_of(r),
            }
        )
    return pd.DataFrame(rows)


def _over_passes(seconds: Sequence[float]) -> dict[str, float]:
    """Return interval of the median over the passes of one process."""
    m = stats.median_interval(list(seconds)) if seconds else None
    return {"pass_low_ms": m.low * 1e3 if m else math.nan, "pass_high_ms": m.high * 1e3 if m else math.nan}


def _admitted(r: Record) -> tuple[str, str | None]:
    """Return what counts: a time with a passed gate of its own process only, bytes also with the one of the same
    code."""
    if r.state == "ok" and r.gate is not None and not r.gate.passed:
        return "rejected", r.reason or "its gate failed"
    if r.state == "ok" and r.purpose == "time" and r.gate is None:
        return UNGATED, UNGATED_REASON
    return r.state, r.reason


def cells(raw: pd.DataFrame) -> pd.DataFrame:
    """Return one row per cell: its runtime (median over processes of their medians, mean of their means) and its bytes
    (median over processes). [low, high] is over processes or, where there is one only, over its passes. ``state`` and
    ``reason`` are those of what is missing, runtime first."""
    # Plain dictionaries here and below: a small frame for every cell would take most of a report's time.
    rows = []
    for place, group in grouped(raw, CELL).items():
        timed = [p for p in group if p["purpose"] == "time" and not math.isnan(p["median_ms"])]
        counted = [p for p in group if not math.isnan(p["peak"])]
        failed = sorted((p for p in group if p["state"] != "ok"), key=lambda p: p["when"])
        failed.sort(key=lambda p: str(p["purpose"]), reverse=True)
        first = group[0]
        m = stats.median_interval([p["median_ms"] for p in timed]) if timed else None
        low, high = (m.low, m.high) if m else (math.nan, math.nan)
        if len(timed) == 1:
            low, high = float(timed[0]["pass_low_ms"]), float(timed[0]["pass_high_ms"])
        rows.append(
            {
                **dict(zip(CELL, place, strict=True)),
                **{c: first[c] for c in ("paper_row", "kind", "framework", "column", "C", "L")},
                **{c: first[c] for c in ("input_bytes", "label_bytes", "output_bytes")},
                "micro_batch": _middle(group, "micro_batch"),
                "kept_bytes": _middle(group, "kept_bytes"),
                "state": "ok" if timed or counted or not failed else failed[-1]["state"],
                "reason": failed[-1]["reason"] if failed else "",
                "failed": ", ".join(sorted({p["state"] for p in failed})),
                "median_ms": m.median if m else math.nan,
                "low_ms": low,
                "high_ms": high,
                "mean_ms": float(np.mean([p["mean_ms"] for p in timed])) if timed else math.nan,
                "n": len(timed),
                "passes_timed": sum(p["passes_timed"] for p in timed),
                "disturbed": sum(p["disturbed"] for p in timed),
                **{name: _middle(counted, name) for name in PARTS},
                "memory_n": len(counted),
                "cell": first["cell"],
            }
        )
    return pd.DataFrame(rows)


def _middle(processes: Sequence[Process], column: str) -> float:
    """Return median of what is known of a column; NaN where nothing is."""
    known = [p[column] for p in processes if not math.isnan(p[column])]
    return float(statistics.median(known)) if known else math.nan


_RATIO = [f"runtime{end}" for end in ("", "_low", "_high", "_n")]
FACTORS = [
    *(*CELL, "framework", "column", "paper_row", "kind", "C", "L"),
    *(*_RATIO, "memory", *(f"own_{name}" for name in _RATIO), "own_memory"),
]


def factors(raw: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Return every contestant over plain torch.nn at the same layer and batch: ``runtime`` paired in blocks with its 95
    % interval, ``memory`` of the peaks; and over the framework's own module, where it has one (``own_runtime``,
    ``own_memory``)."""
    timed = raw[(raw.purpose == "time") & raw.median_ms.notna()]
    by_cell: dict[Key, dict[Hashable, float]] = {}
    for key, group in grouped(timed, CELL).items():
        blocks = by_cell.setdefault(key, {})
        for process in group:
            block = tuple(process[c] for c in PAIRING)
            blocks.pop(block, None)  # a cell that was measured twice in one block counts with its later value
            blocks[block] = process["median_ms"]
    peaks = {tuple(row[c] for c in CELL): row["peak"] for row in summary.to_dict("records")}
    own_modules = {
        (*(row[c] for c in PLACE), row["framework"]): str(row["contestant"])
        for row in summary[summary.column == "own_module"].to_dict("records")
    }
    rows = []
    for row in summary.to_dict("records"):
        if row["contestant"] == BASELINE:
            continue
        place = tuple(row[c] for c in PLACE)
        mine = (*place, row["passes"], row["contestant"])
        base = (*place, "plain", BASELINE)
        own = own_modules.get((*place, row["framework"]))
        module = (*place, "plain", own) if own and row["column"] == "dp" else None
        rows.append(
            {
                **{c: row[c] for c in [*CELL, "framework", "column", "paper_row", "kind", "C", "L"]},
                **_ratio("runtime", by_cell, mine, base),
                "memory": _over(peaks, mine, base),
                **_ratio("own_runtime", by_cell, mine, module),
                "own_memory": _over(peaks, mine, module),
            }
        )
    return pd.DataFrame(rows, columns=FACTORS)


def _over(values: dict[Key, float], a: Key, b: Key | None) -> float:
    return math.nan if b is None or not values.get(b) else values[a] / values[b]


def _ratio(name: str, by_cell: Mapping[Key, Mapping[Hashable, float]], a: Key, b: Key | None) -> dict[str, float]:
    """Return milliseconds of a over those of b, the mean over blocks that hold both, with Student's interval on
    log-ratios."""
    nothing = {name: math.nan, f"{name}_low": math.nan, f"{name}_high": math.nan, f"{name}_n": 0}
    if b is None or a not in by_cell or b not in by_cell:
        return nothing
    logs = stats.paired_log_ratios(by_cell[b], by_cell[a])
    if not len(logs):
        return nothing
    found = stats.compare(logs)
    return {name: found.ratio, f"{name}_low": found.low, f"{name}_high": found.high, f"{name}_n": found.n}


RUNS_SHOWN = 5
"""Most runs of a cell whose values are all shown; of more, the lowest and the highest value are."""


def spread(raw: pd.DataFrame, order: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return how far whole runs lie apart, per cell that several runs hold: (largest - smallest) / median of the runs'
    values. A run's value is the median of its processes' medians, for bytes of their peaks. ``runs_ms``: the values
    themselves, oldest run first."""
    rows = []
    starts: dict[str, float] = {}
    for run, when in zip(raw.run, raw.when, strict=True):
        starts[run] = min(when, starts.get(run, math.inf))
    for place, group in grouped(raw, CELL).items():
        by_run: dict[str, list[Process]] = {run: [] for run in sorted(starts, key=lambda run: (starts[run], run))}
        for process in group:
            by_run[process["run"]].append(process)
        times, peaks = (
            {run: value for run, mine in by_run.items() if not math.isnan(value := _middle(mine, column))}
            for column in ("median_ms", "peak")
        )
        if len(times) > 1 or len(peaks) > 1:
            rows.append(
                {
                    **dict(zip(CELL, place, strict=True)),
                    "runs": max(len(times), len(peaks)),
                    "median_ms": statistics.median(times.values()) if times else math.nan,
                    "lowest_ms": min(times.values(), default=math.nan),
                    "highest_ms": max(times.values(), default=math.nan),
                    "runs_ms": " ".join(f"{value:.6g}" for value in times.values()),
                    "runtime_spread": _spread(list(times.values())),
                    "memory_spread": _spread(list(peaks.values())),
                    "disturbed": sum(p["disturbed"] for p in group if not math.isnan(p["median_ms"])),
                }
            )
    return _arranged(pd.DataFrame(rows), order)


def _arranged(frame: pd.DataFrame, order: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return rows of cells in the order of a report."""
    if frame.empty:
        return frame
    position = {pair: i for i, pair in enumerate(order)}
    rank = {name: i for i, name in enumerate(LAYERS)}
    places = [position[pair] for pair in zip(frame.contestant, frame.passes, strict=True)]
    keys = frame[[*SECTION, "batch_size"]].assign(layer=frame.layer.map(rank).fillna(len(rank)), order=places)
    keys = keys.sort_values([*SECTION, "layer", "batch_size", "order"], kind="stable")
    return frame.loc[keys.index].reset_index(drop=True)


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else math.nan


def published(kind: str) -> pd.DataFrame:
    """``runtime``, ``memory`` or ``memory_breakdown`` of the paper, as its CSV has it, with our name of the ``layer``
    beside its ``paper_row``."""
    frame = pd.read_csv(ROOT / "results" / "paper" / f"layer_{kind}.csv").rename(columns={"layer": "paper_row"})
    names = {layer.paper_row: name for name, layer in LAYERS.items() if layer.paper_row}
    frame.insert(0, "layer", frame.paper_row.map(names))
    return frame
