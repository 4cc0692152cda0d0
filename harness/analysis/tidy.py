"""Records as one tidy frame, a row a process, and the cells that its processes make.

Vocabulary: a *section* is what must never be pooled or compared across (machine, device, protocol, isolation); a *block
of the table* is a task on genuine or on synthetic data; a *cell* is one contestant at one batch size in it.
"""

from __future__ import annotations

import math
from collections import Counter, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from harness.analysis import naming, stats
from harness.store import surroundings
from harness.store.record import Record

SECTION = ["machine", "device", "protocol", "isolation"]
PLACE = [*SECTION, "task", "synthetic"]
CELL = [*PLACE, "batch_size", "contestant"]
OF_CELLS = [
    *(*CELL, "private", "state", "reason", "failures", "failed", "superseded", "extrapolated", "disturbed"),
    *("swamped", "own_sampling", "judged_as", "cell", "median", "low", "high", "n", "coverage"),
]
"""Columns of the frame of cells, for a run that timed nothing."""
SWAMPED = 0.5
"""Share of the processors that others took, beyond which a time tells of them and not of the contestant."""
UNGATED = "ungated"
UNGATED_REASON = (
    "no passed admission gate with this adapter source and environment lock stands in the record, so its time does not "
    "count; measure it again with the gate on"
)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; infinity of none."""
    return sum(values) / len(values) if values else math.inf


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per record, in order.

    ``seconds`` is the process's value (median of its epochs; NaN unless its state is ok). ``superseded`` rows are shown
    nowhere but counted: the same cell was measured again with a newer adapter or environment, or completely where
    this one was extrapolated.
    """
    labels: dict[str, str] = {}
    of_machine: dict[int, str] = {}  # many records share one, and to tell it from others takes longer than a row
    table = []
    for r in records:
        if id(r.machine) not in of_machine:
            key = surroundings.of(r).key
            of_machine[id(r.machine)] = labels.setdefault(key, naming.machine_label(r.machine))
        state, reason = admitted(r)
        table.append(
            {
                **section_of(r, of_machine[id(r.machine)]),
                "task": r.cell.task,
                "precision": r.precision,
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
                "foreign": r.load.foreign_share if r.load else 0.0,
                "own_sampling": _own_sampling(r),
                "judged_as": r.gate.judged_as if r.gate else None,
                "run": r.block.run,
                "round": r.block.round,
                "order": r.block.order,
                **origin_of(r),
            }
        )
    # Words as plain objects: pandas' own strings take several times as long to compare and to walk through.
    plain = pd.DataFrame(table, dtype=object)
    frame = plain.infer_objects()
    frame = frame.assign(**{c: plain[c] for c in frame if isinstance(frame[c].dtype, pd.StringDtype)})
    frame["compile_seconds"] = frame["compile_seconds"].astype(float)
    frame["synthetic"] = _filled(frame)
    _reject_whole_cells(frame)
    frame["superseded"] = _superseded(frame)
    return frame


def section_of(r: Record, machine: str) -> dict[str, Any]:
    """Return the columns of SECTION."""
    return dict(zip(SECTION, (machine, r.cell.device, r.cell.protocol, r.cell.surroundings), strict=True))


def origin_of(r: Record) -> dict[str, Any]:
    """Return the columns that say when a record was made, of which code and for which cell."""
    made = {"moment": r.block.moment, "started": r.started, "when": r.when, "commit": r.source.commit}
    return {**made, "dirty": r.source.dirty, "code": surroundings.code(r.source), "cell": r.cell.name}


REPLAYED = 1e-2
"""A library's own loop whose weights differ from those of its replay by more than this share of the way is another loop
every time."""


def _own_sampling(r: Record) -> str | None:
    """Return how the library's own loop draws its batches (protocol as_shipped), and whether its seed fixes them."""
    if r.timed is None or r.timed.own_sampling is None:
        return None
    varies = r.timed.replay_error is not None and r.timed.replay_error > REPLAYED
    return r.timed.own_sampling + (", unseeded" if varies else "")


def admitted(r: Record) -> tuple[str, str | None]:
    """State and reason as shown. A time or a memory figure without a passed gate is not shown (rules P7, V9)."""
    if r.state != "ok" or r.purpose == "gate":
        return r.state, r.reason
    if r.gate is None:
        return UNGATED, UNGATED_REASON
    if not r.gate.passed:
        return "rejected", r.reason or "the admission gate failed; its record says which check"
    return "ok", r.reason


def _filled(frame: pd.DataFrame) -> pd.Series:
    """Return whether it ran on synthetic data. A process that failed before it had data counts with its neighbours; as
    genuine if none of them says."""
    known = frame[frame.synthetic.notna()].groupby([*SECTION, "task"]).synthetic.min()
    places = pd.MultiIndex.from_frame(frame[[*SECTION, "task"]])
    guess = pd.Series(known.reindex(places).to_numpy(), index=frame.index)
    return frame.synthetic.where(frame.synthetic.notna(), guess).map(lambda value: value is not None and value == 1)


def _superseded(frame: pd.DataFrame) -> pd.Series:
    where = [*CELL, "purpose"]
    newest_code = frame.sort_values("when", kind="stable").groupby(where).code.transform("last").sort_index()
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
    """Return one row per cell: ``state`` ok with ``median``, ``low``, ``high``, ``coverage``, ``n`` of its processes,
    or the state and ``reason`` of its latest failure. ``failures``: how many processes failed, by state (text).

    A contestant that was stopped before timing on a task (its gate or memory process failed) gets its state at every
    batch size at which others were timed.
    """
    rows: list[dict[str, Any]] = []
    current = raw[~raw.superseded]
    timed = current[current.purpose == "time"]
    older = raw[raw.superseded & (raw.purpose == "time")].groupby(CELL).size()
    for place, processes in grouped(timed, CELL).items():
        rows.append(_cell(dict(zip(CELL, place, strict=True)), processes, int(older.get(place, 0))))
    sizes = timed.groupby(PLACE).batch_size.unique()
    seen = set(timed.groupby([*PLACE, "contestant"]).groups)
    stopped = current[(current.purpose != "time") & (current.state != "ok")]
    for place, processes in grouped(stopped, [*PLACE, "contestant"]).items():
        if place in seen:
            continue
        *where, contestant = place
        for size in sizes.get(tuple(where), list(dict.fromkeys(p["batch_size"] for p in processes))):
            cell = dict(zip(PLACE, where, strict=True)) | {"batch_size": size, "contestant": contestant}
            rows.append(_cell(cell, processes, 0))
    return pd.DataFrame(rows, columns=None if rows else OF_CELLS)


def rows_of(frame: pd.DataFrame) -> Iterator[Any]:
    """Yield the rows as named tuples with their ``Index``, as ``itertuples`` does, without a Series per column."""
    columns = (frame[name].tolist() for name in frame.columns)
    return map(_row(("Index", *frame.columns))._make, zip(frame.index.tolist(), *columns, strict=True))


Process = Mapping[Any, Any]
"""A row of the tidy frame."""


@lru_cache(maxsize=64)
def _row(names: tuple[str, ...]) -> Any:
    return namedtuple("_row", names, rename=True)


def grouped(frame: pd.DataFrame, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Process]]:
    """Return rows by key as plain dictionaries: thousands of small frames would take a minute."""
    groups: dict[tuple[Any, ...], list[Process]] = {}
    names = [str(name) for name in frame]
    for values in zip(*(frame[name].tolist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _cell(place: dict[str, Any], processes: Sequence[Process], older: int) -> dict[str, Any]:
    ok = [p for p in processes if p["state"] == "ok" and p["seconds"] == p["seconds"]]
    failed = sorted((p for p in processes if p["state"] != "ok"), key=lambda p: p["when"])
    row: dict[str, Any] = {
        **place,
        "private": bool(processes[0]["private"]),
        "state": "ok" if ok else str(failed[-1]["state"]),
        "reason": "" if not failed else failed[-1]["reason"] or "no reason recorded",
        "failures": ", ".join(f"{count} {state}" for state, count in Counter(p["state"] for p in failed).items()),
        "failed": len(failed),
        "superseded": older,
        "extrapolated": any(p["extrapolated"] for p in ok),
        "disturbed": sum(p["disturbed"] for p in ok),
        # Where waiting for a processor is not among the seconds, other load disturbs nobody.
        "swamped": bool(ok) and all(p["disturbed"] and p["foreign"] > SWAMPED for p in ok),
        # A later round is not compared with a replay, so that any one that was not the same says so for all.
        "judged_as": max((p["judged_as"] for p in ok if isinstance(p["judged_as"], str)), default=None),
        "own_sampling": max(
            (p["own_sampling"] for p in ok if isinstance(p["own_sampling"], str)), key=len, default=None
        ),
        "cell": processes[0]["cell"],
    }
    return row | _median([p["seconds"] for p in ok])


def _median(values: Sequence[float]) -> dict[str, Any]:
    if len(values) == 0:
        nan = float("nan")
        return {"median": nan, "low": nan, "high": nan, "n": 0, "coverage": nan}
    m = stats.median_interval(values)
    return {"median": m.median, "low": m.low, "high": m.high, "n": m.n, "coverage": m.coverage}


def medians_by(frame: pd.DataFrame, column: str, keys: Sequence[str] = CELL) -> pd.DataFrame:
    """Return median and range of a column for each combination of the keys."""
    frame = frame[frame[column].notna()]
    groups = frame.groupby(list(keys), sort=False)[column]
    return pd.DataFrame([dict(zip(keys, place, strict=True)) | _median(g.tolist()) for place, g in groups])
