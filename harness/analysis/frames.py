"""Records as one tidy frame, and the frames of numbers that every table and figure is drawn from.

Vocabulary: a *section* is what must never be pooled or compared across (machine, device, protocol, isolation); a *block
of the table* is a task on genuine or on synthetic data; a *cell* is one contestant at one batch size in it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis import naming, stats
from harness.errors import BadInput
from harness.paths import ROOT
from harness.store import surroundings
from harness.store.record import GateCheck, Record
from harness.tasks import TASKS

SECTION = ["machine", "device", "protocol", "isolation"]
PLACE = [*SECTION, "task", "synthetic"]
CELL = [*PLACE, "batch_size", "contestant"]
PAIRING = ["run", "round", "moment"]
"""What two times of one block have in common."""
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
    compiling = arranged(_medians(current[current.purpose == "time"], "compile_seconds"))
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
    order = tuple(sorted(overall, key=lambda name: _mean(overall[name])))
    ranked = sorted(slowness, key=lambda place: _mean(slowness[place]))
    return order, {place: i for i, place in enumerate(ranked)} | {
        place: len(ranked) + order.index(place[-1])
        for place in set(raw[[*PLACE, "contestant"]].itertuples(index=False, name=None)) - slowness.keys()
    }


def _mean(values: Sequence[float]) -> float:
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


Process = Mapping[Any, Any]
"""A row of the tidy frame."""


def rows_of(frame: pd.DataFrame) -> Iterator[Any]:
    """Yield the rows as named tuples with their ``Index``, as ``itertuples`` does, without a Series per column."""
    columns = (frame[name].tolist() for name in frame.columns)
    return map(_row(("Index", *frame.columns))._make, zip(frame.index.tolist(), *columns, strict=True))


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


def _medians(frame: pd.DataFrame, column: str, keys: Sequence[str] = CELL) -> pd.DataFrame:
    frame = frame[frame[column].notna()]
    groups = frame.groupby(list(keys), sort=False)[column]
    return pd.DataFrame([dict(zip(keys, place, strict=True)) | _median(g.tolist()) for place, g in groups])


def baseline(raw: pd.DataFrame, rows: Mapping[str, str]) -> str | None:
    """Return the contestant that is plain PyTorch without DP, or None where no record has it."""
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
    return paired_sides(by_block(here[here.contestant.isin([a, b])]), a, b)


Sides = Mapping[str, Mapping[Any, tuple[float, bool]]]
"""Contestant -> block (see PAIRING) -> (seconds, disturbed)."""


def by_block(here: pd.DataFrame) -> Sides:
    """Return seconds by contestant and block, of which two make a pair. A cell that was measured twice in one block (a
    retry) counts with its later value."""
    sides: dict[str, dict[Any, tuple[float, bool]]] = {}
    columns = ["contestant", *PAIRING, "seconds", "disturbed"]
    for contestant, *block, seconds, disturbed in zip(*(here[c] for c in columns), strict=True):
        sides.setdefault(contestant, {})[tuple(block)] = (seconds, disturbed)
    return sides


def paired_sides(sides: Sides, a: str, b: str) -> tuple[stats.Comparison | None, int, bool]:
    """Return what :func:`paired` does, for cells that are already grouped."""
    log_ratios, left_out, use_all = log_ratios_of(sides, a, b)
    if not log_ratios.size:
        return None, 0, False
    result = stats.compare(log_ratios)
    if use_all:
        result = stats.Comparison(result.ratio, result.low, result.high, result.n, None, False, None, result.margin)
    return result, left_out, use_all


def log_ratios_of(sides: Sides, a: str, b: str) -> tuple[np.ndarray, int, bool]:
    """Return (log(seconds of b / seconds of a) of the pairs that count, and the rest as :func:`paired`)."""
    left, right = sides.get(a, {}), sides.get(b, {})
    both = [block for block in left if block in right]
    clean = [block for block in both if not (left[block][1] or right[block][1])]
    use_all = len(clean) < min(2, len(both))
    used = both if use_all else clean
    found = stats.paired_log_ratios({k: left[k][0] for k in used}, {k: right[k][0] for k in used})
    return found, len(both) - len(used), use_all


def plain_contestants(raw: pd.DataFrame) -> list[str]:
    """PyTorch without DP, in every way that was measured: eager, compiled."""
    return sorted(raw.contestant[~raw.private & (raw.framework == naming.BASELINE_FRAMEWORK)].unique())


def medians_of(sides: Sides) -> dict[str, float]:
    """Return contestant -> median of its seconds."""
    return {name: statistics.median(seconds for seconds, _ in side.values()) for name, side in sides.items()}


def foremost(sides: Sides) -> str:
    """Return the contestant that takes no more time than any other in the rounds that both share; where rounds go in a
    circle, the one of the smallest median."""
    medians = medians_of(sides)
    by_median = sorted(medians, key=medians.__getitem__)
    unbeaten = (
        name
        for name in by_median
        if not any(
            ratios.size and ratios.mean() < 0
            for ratios in (log_ratios_of(sides, name, other)[0] for other in by_median if other != name)
        )
    )
    return next(unbeaten, by_median[0])


def against_fastest(sides: Sides, candidates: Iterable[str], contestant: str) -> dict[str, Any] | None:
    """Return a contestant's seconds over those of the :func:`foremost` candidate; None where none shares a round.

    ``low`` and ``high`` are for the truly fastest one, see :func:`harness.analysis.stats.against_fastest`.
    """
    met = [c for c in candidates if not sides[c].keys().isdisjoint(sides[contestant])]
    if not met:
        return None
    other = foremost({c: sides[c] for c in met})
    result, left_out, disturbed = paired_sides(sides, other, contestant)
    assert result is not None
    low, high = stats.against_fastest([log_ratios_of(sides, c, contestant)[0] for c in met])
    bounded = result.n >= stats.INTERVAL_ROUNDS
    return {
        "other": other,
        "ratio": result.ratio,
        # Chosen by its median, the one shown may stand outside of what the means say.
        "low": min(result.ratio, math.exp(low)) if bounded else math.nan,
        "high": max(result.ratio, math.exp(high)) if bounded else math.nan,
        "candidates": len(met),
        "n": result.n,
        "left_out": left_out,
        "disturbed": int(disturbed),
    }


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
    return _medians(pd.DataFrame(rows), "bytes", [*CELL, "metric"]) if rows else pd.DataFrame()


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
            if known is None or _worse(check, known):
                found[where] = check
    rows = [(*where, *(getattr(check, name) for name in shown)) for where, check in found.items()]
    return pd.DataFrame(rows, columns=[*keys, "check", *shown] if rows else None)


def _worse(a: GateCheck, b: GateCheck) -> bool:
    return (not a.passed, a.error or 0.0) > (not b.passed, b.error or 0.0)


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
    return _medians(pd.DataFrame(rows), "test", [*CELL, "after_steps"]) if rows else pd.DataFrame()


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
