"""Records as one tidy frame, and the frames of numbers that every table and figure is drawn from.

Vocabulary: a *section* is what must never be pooled or compared across (machine, device, protocol, isolation); a *block
of the table* is a task on genuine or on synthetic data; a *cell* is one contestant at one batch size in it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness import stats
from harness.errors import BadInput
from harness.record import Record
from harness.registry import ROOT
from harness.report import naming
from harness.tasks import TASKS

SECTION = ["machine", "device", "protocol", "isolation"]
PLACE = [*SECTION, "task", "synthetic"]
CELL = [*PLACE, "batch_size", "contestant"]
PAIRING = ["run", "round"]

UNGATED = "ungated"
UNGATED_REASON = (
    "no passed admission gate with this adapter source and environment lock stands in the record, so its time does not "
    "count; measure it again with the gate on"
)
PUBLISHED_LABEL = "published in 2021, NVIDIA A100 40 GB"


@dataclass(frozen=True)
class Tables:
    """Everything a report shows, as frames; ``records[i]`` is row ``i`` of ``raw``."""

    records: Sequence[Record]
    raw: pd.DataFrame
    cells: pd.DataFrame
    ratios: pd.DataFrame
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


def build(
    records: Sequence[Record], rows: Mapping[str, str] | None = None, twins: Mapping[str, str] | None = None
) -> Tables:
    """All frames of a report. ``rows``: contestant -> row of the paper's table, ``twins``: private contestant -> the
    one that does the same without DP (defaults: as the frameworks declare).

    Raises :class:`BadInput` for no record.
    """
    if not records:
        raise BadInput("There are no records to report; make some with `dpbench run e2e`.")
    rows = naming.paper_rows() if rows is None else rows
    twins = naming.twins() if twins is None else twins
    raw = tidy(records)
    order = tuple(naming.ordered(zip(raw.framework, raw.contestant, strict=True), rows))
    position = {name: i for i, name in enumerate(order)}
    task_order = {name: i for i, name in enumerate(TASKS)}

    def arranged(frame: pd.DataFrame) -> pd.DataFrame:
        if frame.empty:
            return frame
        keys = [c for c in [*CELL, "notion"] if c in frame.columns]

        def key(column: pd.Series) -> pd.Series:
            if column.name == "contestant":
                return column.map(position)
            if column.name == "task":
                return column.map(lambda name: task_order.get(name, len(task_order)))
            return column

        return frame.sort_values(keys, key=key, kind="stable").reset_index(drop=True)

    current = raw[~raw.superseded]
    all_cells = arranged(cells(raw))
    compiling = arranged(_medians(current[current.purpose == "time"], "compile_seconds"))
    return Tables(
        records=records,
        raw=raw,
        cells=all_cells,
        ratios=arranged(ratios(current, baseline(raw, rows))),
        overheads=arranged(overheads(current, compiling, baseline(raw, rows), twins)),
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
    )


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """One row per record, in order.

    ``seconds`` is the process's value (median of its epochs; NaN unless its state is ok). ``superseded`` rows are shown
    nowhere but counted: the same cell was measured again with a newer adapter or environment, or completely where
    this one was extrapolated.
    """
    labels: dict[str, str] = {}
    table = []
    for r in records:
        identity = repr(sorted((k, str(v)) for k, v in r.machine.items() if k in _MACHINE_FACTS))
        if identity not in labels:
            labels[identity] = naming.machine_label(r.machine)
        state, reason = _admitted(r)
        table.append(
            {
                "machine": labels[identity],
                "device": r.cell.device,
                "protocol": r.cell.protocol,
                "isolation": r.cell.isolation,
                "task": r.cell.task,
                "synthetic": r.data.synthetic if r.data else None,
                "batch_size": r.cell.batch_size,
                "contestant": r.cell.contestant,
                "framework": r.cell.framework,
                "private": r.cell.private,
                "purpose": r.purpose,
                "state": state,
                "reason": " ".join((reason or "").split()),
                "seconds": stats.process_value(r.epoch_seconds) if state == "ok" and r.epoch_seconds else float("nan"),
                "epochs": len(r.epoch_seconds),
                "compile_seconds": r.compile_seconds if state == "ok" else None,
                "extrapolated": bool(r.timed and r.timed.extrapolated),
                "disturbed": bool(r.load and r.load.disturbed),
                "own_sampling": _own_sampling(r),
                "run": r.block.run,
                "round": r.block.round,
                "order": r.block.order,
                "started": r.started,
                "commit": r.source.commit,
                "dirty": r.source.dirty,
                "code": f"{r.source.adapter_hash}+{r.source.lock_hash}",
                "cell": r.cell.name,
            }
        )
    frame = pd.DataFrame(table)
    frame["compile_seconds"] = frame["compile_seconds"].astype(float)
    frame["synthetic"] = _filled(frame)
    _reject_whole_cells(frame)
    frame["superseded"] = _superseded(frame)
    return frame


REPLAYED = 1e-2
"""A library's own loop whose weights differ from those of its replay by more than this share of the way is another loop
every time."""


def _own_sampling(r: Record) -> str | None:
    """How the library's own loop draws its batches (protocol as_shipped), and whether its seed fixes them."""
    if r.timed is None or r.timed.own_sampling is None:
        return None
    varies = r.timed.replay_error is not None and r.timed.replay_error > REPLAYED
    return r.timed.own_sampling + (", unseeded" if varies else "")


_MACHINE_FACTS = {"id", "cpu", "cores", "memory_bytes", "gpus", "threads"}


def _admitted(r: Record) -> tuple[str, str | None]:
    """State and reason as shown. A time or a memory figure without a passed gate is not shown (rules P7, V9)."""
    if r.state != "ok" or r.purpose == "gate":
        return r.state, r.reason
    if r.gate is None:
        return UNGATED, UNGATED_REASON
    if not r.gate.passed:
        return "rejected", r.reason or "the admission gate failed; its record says which check"
    return "ok", r.reason


def _filled(frame: pd.DataFrame) -> pd.Series:
    """A process that failed before it had data belongs to the data of its neighbours; genuine if nobody knows."""
    known = frame[frame.synthetic.notna()].groupby([*SECTION, "task"]).synthetic.min()
    places = pd.MultiIndex.from_frame(frame[[*SECTION, "task"]])
    guess = pd.Series(known.reindex(places).to_numpy(), index=frame.index)
    return frame.synthetic.where(frame.synthetic.notna(), guess).map(lambda value: value is not None and value == 1)


def _superseded(frame: pd.DataFrame) -> pd.Series:
    where = [*CELL, "purpose"]
    newest_code = frame.sort_values("started", kind="stable").groupby(where).code.transform("last").sort_index()
    older = newest_code != frame.code
    timed = (frame.state == "ok") & (frame.purpose == "time") & ~older
    # Processes of one run differ in how much of an epoch fitted into their time; they stay together, or blocks would
    # lose their pairs. A run that timed whole epochs replaces one that never did.
    whole_in_run = (timed & ~frame.extrapolated).groupby([frame[c] for c in [*where, "run"]]).transform("any")
    whole_anywhere = (timed & ~frame.extrapolated).groupby([frame[c] for c in where]).transform("any")
    return older | (frame.extrapolated & whole_anywhere & ~whole_in_run)


def _reject_whole_cells(frame: pd.DataFrame) -> None:
    """One rejected process rejects the times and memory of its cell: the same code made them. Changes ``frame``."""
    rejected = frame[frame.state == "rejected"].groupby([*CELL, "code"]).reason.first()
    places = pd.MultiIndex.from_frame(frame[[*CELL, "code"]])
    why = pd.Series(rejected.reindex(places).to_numpy(), index=frame.index)
    tainted = why.notna() & (frame.state == "ok") & (frame.purpose != "gate")
    frame.loc[tainted, "state"] = "rejected"
    frame.loc[tainted, "reason"] = "another process of this cell was rejected: " + why[tainted].astype(str)
    frame.loc[tainted, ["seconds", "compile_seconds"]] = float("nan")


def cells(raw: pd.DataFrame) -> pd.DataFrame:
    """One row per cell: ``state`` ok with ``median``, ``low``, ``high``, ``coverage``, ``n`` of its processes, or the
    state and ``reason`` of its latest failure. ``failures``: how many processes failed, by state (text).

    A contestant that was stopped before timing on a task (its gate or memory process failed) gets its state at every
    batch size at which others were timed.
    """
    rows: list[dict[str, Any]] = []
    current = raw[~raw.superseded]
    timed = current[current.purpose == "time"]
    older = raw[raw.superseded & (raw.purpose == "time")].groupby(CELL).size()
    for place, group in timed.groupby(CELL, sort=False):
        rows.append(_cell(dict(zip(CELL, place, strict=True)), group, int(older.get(place, 0))))
    sizes = timed.groupby(PLACE).batch_size.unique()
    seen = set(timed.groupby([*PLACE, "contestant"]).groups)
    stopped = current[(current.purpose != "time") & (current.state != "ok")]
    for place, group in stopped.groupby([*PLACE, "contestant"], sort=False):
        if place in seen:
            continue
        *where, contestant = place
        for size in sizes.get(tuple(where), group.batch_size.unique()):
            cell = dict(zip(PLACE, where, strict=True)) | {"batch_size": size, "contestant": contestant}
            rows.append(_cell(cell, group, 0))
    return pd.DataFrame(rows)


def _cell(place: dict[str, Any], group: pd.DataFrame, older: int) -> dict[str, Any]:
    ok = group[group.state == "ok"]
    ok = ok[ok.seconds.notna()]
    failed = group[group.state != "ok"].sort_values("started")
    row: dict[str, Any] = {
        **place,
        "private": bool(group.private.iloc[0]),
        "state": "ok" if len(ok) else str(failed.state.iloc[-1]),
        "reason": "" if failed.empty else failed.reason.iloc[-1] or "no reason recorded",
        "failures": ", ".join(f"{count} {state}" for state, count in Counter(failed.state).items()),
        "failed": len(failed),
        "superseded": older,
        "extrapolated": bool(ok.extrapolated.any()),
        "disturbed": int(ok.disturbed.sum()),
        # A later round is not compared with a replay, so that any one that was not the same says so for all.
        "own_sampling": max(ok.own_sampling.dropna(), key=len, default=None),
        "cell": group.cell.iloc[0],
    }
    return row | _median(ok.seconds)


def _median(values: pd.Series) -> dict[str, Any]:
    if len(values) == 0:
        nan = float("nan")
        return {"median": nan, "low": nan, "high": nan, "n": 0, "coverage": nan}
    m = stats.median_interval(values.tolist())
    return {"median": m.median, "low": m.low, "high": m.high, "n": m.n, "coverage": m.coverage}


def _medians(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    frame = frame[frame[column].notna()]
    return pd.DataFrame(
        [
            dict(zip(CELL, place, strict=True)) | _median(group[column])
            for place, group in frame.groupby(CELL, sort=False)
        ]
    )


def baseline(raw: pd.DataFrame, rows: Mapping[str, str]) -> str | None:
    """The contestant that is plain PyTorch without DP, or None where no record has it."""
    plain = raw[~raw.private]
    declared = sorted(c for c in plain.contestant.unique() if rows.get(c) == naming.BASELINE_ROW)
    fallback = sorted(plain[plain.framework == naming.BASELINE_FRAMEWORK].contestant.unique())
    return next(iter([*declared, *fallback]), None)


def paired(
    current: pd.DataFrame, place: Mapping[str, Any], a: str, b: str
) -> tuple[stats.Comparison | None, int, bool]:
    """a against b in one block of the table at one batch size.

    Returns (comparison, or None where no round holds both; number of pairs left out because one was disturbed; whether
    disturbed pairs had to be used because fewer than two others were left, which allows no verdict).
    """
    here = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    for column, value in place.items():
        here = here[here[column] == value]
    return _paired(here, a, b)


def _paired(here: pd.DataFrame, a: str, b: str) -> tuple[stats.Comparison | None, int, bool]:
    columns = ["seconds", "disturbed"]
    left, right = (here[here.contestant == name].set_index(PAIRING)[columns] for name in (a, b))
    # A cell that was measured twice in one block (a retry) counts with its later value.
    left, right = (side[~side.index.duplicated(keep="last")] for side in (left, right))
    both = left.merge(right, left_index=True, right_index=True, suffixes=("_a", "_b"))
    if both.empty:
        return None, 0, False
    clean = both[~(both.disturbed_a | both.disturbed_b)]
    use_all = len(clean) < min(2, len(both))
    used = both if use_all else clean
    result = stats.compare(stats.paired_log_ratios(used.seconds_a.to_dict(), used.seconds_b.to_dict()))
    if use_all:
        result = stats.Comparison(result.ratio, result.low, result.high, result.n, None, False, None, result.margin)
    return result, len(both) - len(used), use_all


def ratios(current: pd.DataFrame, base: str | None) -> pd.DataFrame:
    """Seconds of every contestant over seconds of the baseline, paired in blocks, with a 95 % interval."""
    rows = []
    ok = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        for contestant in group.contestant.unique():
            if base is None or contestant == base:
                continue
            result, left_out, disturbed = _paired(group, base, contestant)
            if result is None:
                continue
            mine = group[group.contestant == contestant]
            rows.append(
                dict(zip([*PLACE, "batch_size"], place, strict=True))
                | {
                    "contestant": contestant,
                    "private": bool(mine.private.iloc[0]),
                    "baseline": base,
                    "ratio": result.ratio,
                    "low": result.low,
                    "high": result.high,
                    "n": result.n,
                    "left_out": left_out,
                    "disturbed": int(disturbed),
                    "extrapolated": bool(group[group.contestant.isin([base, contestant])].extrapolated.any()),
                }
            )
    return pd.DataFrame(rows)


def overheads(
    current: pd.DataFrame, compiling: pd.DataFrame, base: str | None, twins: Mapping[str, str]
) -> pd.DataFrame:
    """What the time of a private contestant over that of the baseline is made of, by means of its non-private twin:

    total = contestant / baseline = (twin / baseline) * (contestant / twin) = framework * DP, each the mean over paired
    blocks with a 95 % interval; where one block lacks one of the three, the product is not exactly the total. Compiling
    is no part of an epoch: ``compile`` and ``compile_twin`` are seconds before the first (NaN: none on record).
    """
    rows = []
    ok = current[(current.purpose == "time") & (current.state == "ok") & current.seconds.notna()]
    seconds: dict[Any, float] = {} if compiling.empty else compiling.set_index(CELL)["median"].to_dict()
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        present = set(group.contestant)
        for contestant, twin in twins.items():
            if base is None or not {contestant, twin, base} <= present:
                continue
            row = {**dict(zip([*PLACE, "batch_size"], place, strict=True)), "contestant": contestant, "twin": twin}
            for name, a, b in (("framework", base, twin), ("dp", twin, contestant), ("total", base, contestant)):
                result = None if a == b else _paired(group, a, b)[0]
                if a == b:
                    row |= {name: 1.0, f"{name}_low": float("nan"), f"{name}_high": float("nan")}
                elif result is not None:
                    row |= {name: result.ratio, f"{name}_low": result.low, f"{name}_high": result.high}
            if {"framework", "dp", "total"} <= row.keys():
                mine = group[group.contestant == contestant].seconds
                rows.append(
                    row
                    | {
                        "n": len(mine),
                        "seconds": float(mine.median()),
                        "compile": seconds.get((*place, contestant), float("nan")),
                        "compile_twin": seconds.get((*place, twin), float("nan")),
                        "baseline": base,
                        "extrapolated": bool(group[group.contestant.isin([base, twin, contestant])].extrapolated.any()),
                    }
                )
    return pd.DataFrame(rows)


def memory(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Peak memory in bytes by notion, from processes that measure nothing else."""
    here = current[(current.purpose == "memory") & (current.state == "ok")]
    rows = [
        {**{c: here.at[i, c] for c in CELL}, "notion": notion, "bytes": value}
        for i in here.index
        for notion, value in records[i].memory.items()
    ]
    if not rows:
        return pd.DataFrame()
    frame = pd.DataFrame(rows)
    return pd.DataFrame(
        [
            dict(zip([*CELL, "notion"], place, strict=True)) | _median(group.bytes)
            for place, group in frame.groupby([*CELL, "notion"], sort=False)
        ]
    )


def gate(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Per section, task, contestant and check: the largest error of all records and its limit; passed if all passed."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in current.itertuples():
        record_gate = records[row.Index].gate
        if record_gate is None:
            continue
        for check in record_gate.checks:
            where = (row.machine, row.device, row.protocol, row.isolation, row.task, row.contestant, check.check)
            entry = {
                **dict(zip([*SECTION, "task", "contestant", "check"], where, strict=True)),
                "error": check.error,
                "limit": check.limit,
                "passed": check.passed,
                "detail": check.detail,
            }
            known = found.get(where)
            if known is None or _worse(entry, known):
                found[where] = entry
    return pd.DataFrame(found.values())


def _worse(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return (not a["passed"], a["error"] or 0.0) > (not b["passed"], b["error"] or 0.0)


def privacy(current: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """epsilon at delta after the steps of the record: by two accountants of ours and by the library's own."""
    rows = {}
    for row in current[current.private & (current.purpose == "time")].itertuples():
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
        {**{c: here.at[i, c] for c in CELL}, "after_steps": a.after_steps, "test": a.test}
        for i in here.index
        if (a := records[i].accuracy) is not None
    ]
    if not rows:
        return pd.DataFrame()
    keys = [*CELL, "after_steps"]
    return pd.DataFrame(
        [
            dict(zip(keys, place, strict=True)) | _median(group.test)
            for place, group in pd.DataFrame(rows).groupby(keys, sort=False)
        ]
    )


def coverage(all_cells: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """How many cells of each contestant are in each state, by section."""
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
    """What each contestant ran on: Python and the packages that its time can depend on."""
    found: dict[tuple[str, str], None] = {}
    for row in current.itertuples():
        v = records[row.Index].versions
        if v:
            text = ", ".join(f"{name} {v[name]}" for name in ("python", *SHOWN_PACKAGES) if name in v)
            found[(row.contestant, text)] = None
    rows = sorted(found, key=lambda item: list(order).index(item[0]))
    return pd.DataFrame(rows, columns=["contestant", "versions"])


def published() -> pd.DataFrame:
    """The paper's Table 1: task, paper_row, batch_size, seconds (median of 20 epochs)."""
    with (ROOT / "results" / "paper" / "e2e_runtime.csv").open(newline="") as file:
        rows = [
            {
                "task": line["task"],
                "paper_row": line["framework"],
                "batch_size": int(line["batch_size"]),
                "seconds": float(line["median_epoch_seconds"]),
            }
            for line in csv.DictReader(file)
        ]
    return pd.DataFrame(rows)
