"""The frames of numbers that every table and figure is drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import naming
from harness.analysis.pairs import against_fastest, by_block, medians_of, paired_sides
from harness.analysis.tidy import CELL, PLACE, SECTION, cells, mean_of, medians_by, rows_of, tidy
from harness.errors import BadInput
from harness.paths import ROOT
from harness.store.record import GateCheck, Record
from harness.tasks import TASKS

PAPER = (
    "Yousefpour et al. 2021, Opacus: User-Friendly Differential Privacy Library in PyTorch, arXiv:2109.12298, whose "
    "end-to-end benchmark goes back to Subramani, Vadivelu and Kamath 2021, arXiv:2010.09063"
)
"""The paper whose tables are in results/paper, and whose benchmark is rebuilt here."""
PUBLISHED_LABEL = "published by Yousefpour et al. 2021, NVIDIA A100 40 GB"


@dataclass(frozen=True, eq=False)  # equal to itself only, so that what is computed of it can be kept
class Tables:
    """Everything a report shows, as frames; ``records[i]`` is row ``i`` of ``raw``.

    ``order``: all contestants, the fastest first; inside of each block of the table every frame has its own such order.
    ``ratios``: over the faster of PyTorch's contestants without DP; ``paper_ratios``: over the one that stands for the
    paper's row, whichever is faster.
    """

    records: Sequence[Record]
    raw: pd.DataFrame
    cells: pd.DataFrame
    ratios: pd.DataFrame
    paper_ratios: pd.DataFrame
    overheads: pd.DataFrame
    compile: pd.DataFrame
    memory: pd.DataFrame
    gate: pd.DataFrame
    privacy: pd.DataFrame
    accuracy: pd.DataFrame
    coverage: pd.DataFrame
    versions: pd.DataFrame
    published: pd.DataFrame
    order: tuple[str, ...]
    rows: Mapping[str, str]
    titles: Mapping[str, str]

    def title(self, contestant: str) -> str:
        """Return the contestant's name for readers; where none is declared, the name that commands take."""
        return self.titles.get(contestant, contestant)


def build(
    records: Sequence[Record], rows: Mapping[str, str] | None = None, twins: Mapping[str, str] | None = None
) -> Tables:
    """Return all frames of the end-to-end records; others are left out. ``rows``: contestant -> row of the paper's
    table, ``twins``: private contestant -> the one that does the same without DP (defaults: as the frameworks declare).

    Records of layers have tables of their own and are left out. Raises :class:`BadInput` for no record.
    """
    others = sorted({r.cell.kind for r in records if r.cell.kind != "e2e"})
    records = [r for r in records if r.cell.kind == "e2e"]
    if not records:
        only = f" (only of: {', '.join(others)}, which `dpbench report` shows)" if others else ""
        raise BadInput(f"There are no end-to-end records here{only}; make some with `dpbench run e2e`.")
    rows = naming.paper_rows() if rows is None else rows
    twins = naming.twins() if twins is None else twins
    raw = tidy(records)
    all_cells = cells(raw)
    order, rank = _by_speed(all_cells, raw)
    task_order = {name: i for i, name in enumerate(TASKS)}

    def arranged(frame: pd.DataFrame) -> pd.DataFrame:
        if frame.empty:
            return frame
        columns = [c for c in (*PLACE, "contestant") if c in frame.columns]
        places = frame[columns].itertuples(index=False, name=None)
        last = len(order)
        keys = frame[[c for c in (*PLACE, "batch_size", "metric") if c in frame.columns]].assign(
            task=frame.task.map(lambda name: task_order.get(name, len(task_order))),
            speed=[rank.get(place, last) if len(place) > len(PLACE) else order.index(place[-1]) for place in places],
        )
        by = [c for c in (*PLACE, "speed", "batch_size", "metric") if c in keys.columns]
        return frame.loc[keys.sort_values(by, kind="stable").index].reset_index(drop=True)

    current = raw[~raw.superseded]
    all_cells = arranged(all_cells)
    base = baseline(raw, rows)
    compiling = arranged(medians_by(current[current.purpose == "time"], "compile_seconds"))
    return Tables(
        records=records,
        raw=raw,
        cells=all_cells,
        ratios=arranged(with_swamped(ratios(current, plain_contestants(raw)), all_cells)),
        paper_ratios=arranged(with_swamped(ratios(current, [base] if base else []), all_cells)),
        overheads=arranged(with_swamped(overheads(current, compiling, base, twins), all_cells)),
        compile=compiling,
        memory=arranged(memory(current, records)),
        gate=arranged(gate(current, records)),
        privacy=arranged(privacy(current, records)),
        accuracy=arranged(accuracy(current, records)),
        coverage=coverage(all_cells, order),
        versions=versions(current, records, order),
        published=published(),
        order=order,
        rows=rows,
        titles=naming.titles(),
    )


def _by_speed(all_cells: pd.DataFrame, raw: pd.DataFrame) -> tuple[tuple[str, ...], Mapping[tuple[Any, ...], int]]:
    """Return (all contestants, the fastest first; (place, contestant) -> its rank in that place).

    Slowness is the geometric mean, over what was measured, of the time over that of the fastest at the same batch size.
    Who has no time comes last, by name.
    """
    slowness: dict[tuple[Any, ...], list[float]] = {}
    overall: dict[str, list[float]] = {name: [] for name in sorted(raw.contestant.unique())}
    ok = all_cells[all_cells.state == "ok"]
    logs = np.log(ok["median"] / ok.groupby([*PLACE, "batch_size"])["median"].transform("min"))
    for place, value in zip(ok[[*PLACE, "contestant"]].itertuples(index=False, name=None), logs, strict=True):
        slowness.setdefault(place, []).append(value)
        overall[place[-1]].append(value)
    order = tuple(sorted(overall, key=lambda name: mean_of(overall[name])))
    ranked = sorted(slowness, key=lambda place: mean_of(slowness[place]))
    return order, {place: i for i, place in enumerate(ranked)} | {
        place: len(ranked) + order.index(place[-1])
        for place in set(raw[[*PLACE, "contestant"]].itertuples(index=False, name=None)) - slowness.keys()
    }


def baseline(raw: pd.DataFrame, rows: Mapping[str, str]) -> str | None:
    """Return the contestant that is plain PyTorch without DP, or None where no record has it."""
    plain = raw[~raw.private]
    declared = sorted(c for c in plain.contestant.unique() if rows.get(c) == naming.BASELINE_ROW)
    fallback = sorted(plain[plain.framework == naming.BASELINE_FRAMEWORK].contestant.unique())
    return next(iter([*declared, *fallback]), None)


def plain_contestants(raw: pd.DataFrame) -> list[str]:
    """PyTorch without DP, in every way that was measured: eager, compiled."""
    return sorted(raw.contestant[~raw.private & (raw.framework == naming.BASELINE_FRAMEWORK)].unique())


def ratios(current: pd.DataFrame, bases: Sequence[str]) -> pd.DataFrame:
    """Return seconds of every contestant over seconds of the baseline, paired in blocks, with a 95 % interval.

    The ``baseline`` of a batch size is that of the ``bases`` with the smallest median there.
    """
    rows = []
    ok = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    private = dict(zip(current.contestant, current.private, strict=True))
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        sides = by_block(group)
        medians = medians_of(sides)
        known = [b for b in bases if b in sides]
        base = min(known, key=medians.__getitem__, default=None)
        extrapolated = set(group.contestant[group.extrapolated])
        for contestant in sides:
            if base is None or contestant == base:
                continue
            # The other plain ones stand beside the fastest of them, and not beside themselves.
            candidates = [base] if contestant in known else known
            shares = not sides[base].keys().isdisjoint(sides[contestant])
            found = against_fastest(sides, candidates, contestant) if shares else None
            if found is None:
                continue
            rows.append(
                dict(zip([*PLACE, "batch_size"], place, strict=True))
                | {"contestant": contestant, "private": bool(private[contestant]), "baseline": found.pop("other")}
                | found
                | {"extrapolated": not extrapolated.isdisjoint((base, contestant))}
            )
    return pd.DataFrame(rows)


OTHERS = ("contestant", "baseline", "twin", "other")
"""Columns that name a contestant of whose times a number is made."""


def with_swamped(frame: pd.DataFrame, all_cells: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with a column ``swamped``: whether one of the cells behind a number is too disturbed to be a
    result. ``frame``: a row per place, batch size and contestant."""
    if frame.empty:
        return frame
    known = set(all_cells.loc[all_cells.swamped, CELL].itertuples(index=False, name=None))
    swamped = pd.Series(False, index=frame.index)
    for column in (c for c in OTHERS if c in frame.columns):
        places = frame[[*CELL[:-1], column]].itertuples(index=False, name=None)
        swamped |= pd.Series([place in known for place in places], index=frame.index)
    return frame.assign(swamped=swamped)


def overheads(
    current: pd.DataFrame, compiling: pd.DataFrame, base: str | None, twins: Mapping[str, str]
) -> pd.DataFrame:
    """Return what the time of a private contestant over that of the baseline is made of, by means of its non-private
    twin.

    total = contestant / baseline = (twin / baseline) * (contestant / twin) = framework * DP, each the mean over paired
    blocks with a 95 % interval; where one block lacks one of the three, the product is not exactly the total. Compiling
    is no part of an epoch: ``compile`` and ``compile_twin`` are seconds before the first (NaN: none on record). ``n``:
    the fewest rounds behind one of the three; ``left_out``: the most pairs that one of them lost to disturbances.
    """
    rows = []
    ok = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    seconds: dict[Any, float] = {} if compiling.empty else compiling.set_index(CELL)["median"].to_dict()
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        sides = by_block(group)
        present = set(sides)
        for contestant, twin in twins.items():
            if base is None or not {contestant, twin, base} <= present:
                continue
            row = {**dict(zip([*PLACE, "batch_size"], place, strict=True)), "contestant": contestant, "twin": twin}
            rounds, left_out, any_disturbed = [], 0, False
            for name, a, b in (("framework", base, twin), ("dp", twin, contestant), ("total", base, contestant)):
                if a == b:
                    row |= {name: 1.0, f"{name}_low": float("nan"), f"{name}_high": float("nan")}
                    continue
                result, without, disturbed = paired_sides(sides, a, b)
                left_out, any_disturbed = max(left_out, without), any_disturbed or disturbed
                if result is not None:
                    rounds.append(result.n)
                    row |= {name: result.ratio, f"{name}_low": result.low, f"{name}_high": result.high}
            if {"framework", "dp", "total"} <= row.keys():
                mine = group[group.contestant == contestant].seconds
                rows.append(
                    row
                    | {
                        "n": min(rounds),
                        "left_out": left_out,
                        "disturbed": int(any_disturbed),
                        "seconds": float(mine.median()),
                        "compile": seconds.get((*place, contestant), float("nan")),
                        "compile_twin": seconds.get((*place, twin), float("nan")),
                        "baseline": base,
                        "extrapolated": bool(group[group.contestant.isin([base, twin, contestant])].extrapolated.any()),
                    }
                )
    return pd.DataFrame(rows)


def memory(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Return peak memory in bytes by metric, from processes that measure nothing else."""
    here = current[(current.purpose == "memory") & (current.state == "ok")]
    rows = [
        {**place, "metric": metric, "bytes": value}
        for i, place in zip(here.index, here[CELL].to_dict("records"), strict=True)
        for metric, value in records[i].memory.items()
    ]
    return medians_by(pd.DataFrame(rows), "bytes", [*CELL, "metric"]) if rows else pd.DataFrame()


def gate(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Return per section, task, contestant and check: the largest error of all records and its limit; passed if all
    passed."""
    keys, shown = [*SECTION, "task", "contestant"], ["error", "limit", "passed", "detail"]
    found: dict[tuple[Any, ...], GateCheck] = {}
    seen: set[tuple[Any, ...]] = set()
    for index, *place in current[keys].itertuples(name=None):
        record_gate = records[index].gate
        if record_gate is None or (*place, id(record_gate)) in seen:
            continue
        seen.add((*place, id(record_gate)))
        for check in record_gate.checks:
            where = (*place, check.check)
            known = found.get(where)
            if known is None or (not check.passed, check.error or 0.0) > (not known.passed, known.error or 0.0):
                found[where] = check
    rows = [(*where, *(getattr(check, name) for name in shown)) for where, check in found.items()]
    return pd.DataFrame(rows, columns=[*keys, "check", *shown] if rows else None)


def privacy(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """epsilon at delta after the steps of the record: by two accountants of ours and by the library's own."""
    rows = {}
    for row in rows_of(current[current.private & (current.purpose == "time")]):
        e = records[row.Index].epsilon
        if e is None:
            continue
        place = {c: getattr(row, c) for c in CELL}
        values = {"delta": e.delta, "steps": e.steps, "rdp": e.rdp, "pld": e.pld, "own": e.own}
        rows[(*place.values(), e.steps)] = place | values
    return pd.DataFrame(rows.values())


def accuracy(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Test accuracy after the record's steps: median and range over processes."""
    here = current[current.state == "ok"]
    rows = [
        {**place, "after_steps": a.after_steps, "test": a.test}
        for i, place in zip(here.index, here[CELL].to_dict("records"), strict=True)
        if (a := records[i].accuracy) is not None
    ]
    return medians_by(pd.DataFrame(rows), "test", [*CELL, "after_steps"]) if rows else pd.DataFrame()


def coverage(all_cells: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """Return how many cells of each contestant are in each state, by section."""
    if all_cells.empty:
        return pd.DataFrame()
    counts = all_cells.groupby([*SECTION, "contestant", "state"]).size().unstack("state", fill_value=0).reset_index()
    counts.columns.name = None
    states = [c for c in counts.columns if c not in {*SECTION, "contestant"}]
    counts.insert(len(SECTION) + 1, "cells", counts[states].sum(axis=1))
    counts = counts[[*SECTION, "contestant", "cells", *sorted(states, key=lambda s: (s != "ok", s))]]
    return counts.sort_values(
        [*SECTION, "contestant"], key=lambda c: c.map(list(order).index) if c.name == "contestant" else c
    ).reset_index(drop=True)


SHOWN_PACKAGES = (
    *("torch", "opacus", "jax", "jaxlib", "optax", "dm-haiku", "flax", "backpack-for-pytorch", "tensorflow"),
    *("tensorflow-privacy", "dpcore", "mlx", "numpy"),
)


def versions(current: pd.DataFrame, records: Sequence[Record], order: Sequence[str]) -> pd.DataFrame:
    """Return what each contestant ran on, by section: Python and the packages that its time can depend on."""
    found: dict[tuple[str, ...], None] = {}
    for row in rows_of(current):
        v = records[row.Index].versions
        if v:
            text = ", ".join(f"{name} {v[name]}" for name in ("python", *SHOWN_PACKAGES) if name in v)
            found[(*(str(getattr(row, c)) for c in SECTION), row.contestant, text)] = None
    rows = sorted(found, key=lambda item: (item[: len(SECTION)], list(order).index(item[-2])))
    return pd.DataFrame(rows, columns=[*SECTION, "contestant", "versions"])


def published() -> pd.DataFrame:
    """Return the paper's Table 1: task, paper_row, batch_size, seconds (median of 20 epochs)."""
    names = {"task": "task", "framework": "paper_row", "batch_size": "batch_size", "median_epoch_seconds": "seconds"}
    frame = pd.read_csv(ROOT / "results" / "paper" / "e2e_runtime.csv")
    return frame[list(names)].rename(columns=names)
