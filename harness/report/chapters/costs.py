"""Costs that no table of the paper had: start-up and when it pays, seconds to an accuracy, the physical floor; and what
every table rests on: hardware, and what failed.

Every frame has the columns of :data:`harness.analysis.tidy.CELL`, so that a section can be cut out of it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.naming import factor, number, size
from harness.analysis.tidy import CELL, PLACE, rows_of
from harness.report import model
from harness.report.figures.tasks import PAPER_EPOCHS, CumulativeRun, cumulative_runs
from harness.report.model import MISSING, Grid, Section
from harness.tasks import FLOAT32, TASKS

SHOWN_EPOCHS = (1, 5, 10, PAPER_EPOCHS)
CHEAPER = 0.1
"""A rival of a compiled contestant starts in less than this share of its start-up."""
WORTH_PAYING = 1.0
"""Seconds: whoever starts sooner than this has nothing to pay back."""
ACCURACY_STEP = 0.05
"""Seconds are given to the highest multiple of this that some private contestant of the block reached."""

BELOW_FLOOR = (
    "not faster than physics; the floor counts the multiplications of direct convolutions, of which Winograd's needs "
    "fewer, and the peak is that of one matrix product, which another kernel may exceed."
)
"""How a time can be under its floor."""


def hardware(tables: Tables, section: Section) -> list[Grid]:
    """Return the machine of a section: what its records say, and the peaks measured on it."""
    here = section.of(tables.raw)
    machines = [tables.records[i].machine for i in here.index]
    first = machines[0]
    rows = [
        ("processor", str(first.get("cpu", MISSING))),
        ("processors", str(first.get("cores", MISSING))),
        ("threads of a contestant", str(first.get("threads", MISSING))),
        ("memory", f"{first['memory_bytes'] / 2**30:.1f} GiB" if first.get("memory_bytes") else MISSING),
        ("GPU", "; ".join(first.get("gpus") or []) or "none"),
        ("system", " ".join(str(first[k]) for k in ("system", "kernel", "architecture") if first.get(k)) or MISSING),
    ]
    clocks = sorted(float(m["cpu_mhz"]) for m in machines if m.get("cpu_mhz"))
    if clocks:
        rows.append(("clock", f"{clocks[0]:.0f} to {clocks[-1]:.0f} MHz"))
    loads = sorted(float(m["load_average"]) for m in machines if m.get("load_average") is not None)
    if loads:
        rows.append(("load average when a process started", f"median {np.median(loads):.2f}, highest {loads[-1]:.2f}"))
    probes = [v for i in here.index if (load := tables.records[i].load) for v in [load.canary_before] if v]
    if probes:
        spread = max(probes) / min(probes) - 1
        rows.append(("fixed work of the harness", f"median {np.median(probes) * 1e3:.1f} ms, range {spread:.0%}"))
    peaks = _peaks(tables, section)
    if peaks:
        rows += [
            ("measured peak, float32 product", f"{peaks[0] / 1e9:.3g} GFLOP/s"),
            ("measured peak, memory traffic of a copy", f"{peaks[1] / 1e9:.3g} GB/s"),
        ]
    return [Grid("Hardware", ("what", "as recorded"), tuple(rows))]


def ranks(tables: Tables, section: Section) -> list[Grid]:
    """Return a table per task of what each of several processes took that train together; none where each is alone."""
    here = model.processes_of(tables, section)
    here = here[[not old and bool(tables.records[i].ranks) for i, old in zip(here.index, here.superseded, strict=True)]]
    grids = []
    for task, synthetic, group in model.blocks(here):
        rows = []
        for row in rows_of(group):
            found = tables.records[row.Index].ranks
            seconds = [rank.step_seconds for rank in found]
            given = [max(rank.payload.get(kind, 0) for rank in found) for kind in COLLECTIVES]
            sizes = [MISSING if not count else size(count) for count in (max(r.peak_bytes for r in found), *given)]
            slowest = factor(max(seconds) / float(np.mean(seconds)))
            rows.append((row.contestant, str(row.batch_size), sizes[0], slowest, *sizes[1:]))
        header = ("contestant", "batch", "peak of a rank", "slowest rank", *COLLECTIVES)
        grids.append(Grid(f"{model.task_title(task, synthetic)}: rank by rank", header, tuple(rows), (RANKS_NOTE,)))
    return grids


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "other")
RANKS_NOTE = (
    "Of the rank that has most: growth of its resident memory, and bytes that it gives to each kind of collective in a "
    "step (the larger side). Slowest rank: its processor time in a step over the mean rank's."
)


def _peaks(tables: Tables, section: Section) -> tuple[float, float] | None:
    """Return (FLOP/s, bytes/s), the best of all runs: whatever disturbed the measurement made it slower."""
    said = (tables.records[i].machine.get("peaks") for i in model.processes_of(tables, section).index)
    found = [p for p in said if p and min(p["flops_per_second"], p["bytes_per_second"]) > 0]
    if not found:
        return None
    return max(p["flops_per_second"] for p in found), max(p["bytes_per_second"] for p in found)


def failures(tables: Tables, section: Section) -> list[Grid]:
    """Return every cell without a time, with its reason, and cells of which some process failed."""
    rows = []
    cells = section.of(tables.cells)
    for task, synthetic, group in model.blocks(cells):
        failed = group[(group.state != "ok") | (group.failed > 0)]
        for (contestant, state, reason), here in failed.groupby(["contestant", "state", "reason"], sort=False):
            what = str(state) if state != "ok" else f"ok, but {here.failures.iloc[0]}"
            sizes = ", ".join(map(str, sorted(here.batch_size)))
            rows.append((str(contestant), model.task_title(task, synthetic), sizes, what, model.short(str(reason))))
    if not rows:
        return []
    header = ("contestant", "task", "batch", "state", "reason")
    note = f"{sum(cells.state == 'ok')} of {len(cells)} cells have a time. `dpbench explain` shows a reason in full."
    return [Grid("Cells without a time, and processes that failed", header, tuple(rows), (note,))]


def cumulative(tables: Tables, section: Section) -> list[Grid]:
    """Return seconds from the start to the end of epochs 1 to 20, compilation included: median over processes."""
    grids = []
    for run in cumulative_runs(tables, section):
        rows = []
        scaled, disturbed = _marked(run)
        for name in [n for n in tables.order if n in run.curves]:
            curves = run.curves[name]
            entries = [
                number(float(np.median(curves[:, e - 1])))
                + ("ᵉ" if e > run.measured_epochs or name in scaled else "")
                + ("ᵈ" if name in disturbed else "")
                + (f" [{number(curves[:, e - 1].min())}, {number(curves[:, e - 1].max())}]" if len(curves) > 1 else "")
                for e in SHOWN_EPOCHS
            ]
            rows.append((name, *entries, str(len(curves))))
        header = ("contestant", *(f"after epoch {e}" for e in SHOWN_EPOCHS), "n")
        notes = ["Median over processes [lowest, highest]; compilation and warm-up come before the first epoch."]
        if run.measured_epochs < PAPER_EPOCHS or scaled:
            notes.append(
                "ᵉ extrapolated: each process goes on with its median epoch"
                + (", or its epoch itself was scaled up from a part." if scaled else ".")
            )
        if disturbed:
            notes.append(model.DISTURBED_NOTE)
        title = f"{model.task_title(run.task, run.synthetic)}: cumulative seconds at batch {run.batch_size}"
        grids.append(Grid(title, header, tuple(rows), tuple(notes)))
    return grids


def _marked(run: CumulativeRun) -> tuple[set[str], set[str]]:
    """Return the contestants whose epochs themselves were extrapolated from a part, and those that were disturbed."""
    names = run.cells.contestant
    return set(names[run.cells.extrapolated]), set(names[run.cells.disturbed > 0])


def cumulative_numbers(tables: Tables) -> pd.DataFrame:
    """Return the curves behind :func:`cumulative`: median, lowest and highest process after every epoch."""
    rows = []
    for section in model.sections(tables):
        for run in cumulative_runs(tables, section):
            scaled, disturbed = _marked(run)
            for name, curves in run.curves.items():
                for epoch in range(1, PAPER_EPOCHS + 1):
                    here = curves[:, epoch - 1]
                    rows.append(
                        {
                            **vars(section),
                            "task": run.task,
                            "synthetic": run.synthetic,
                            "batch_size": run.batch_size,
                            "contestant": name,
                            "epoch": epoch,
                            "median": float(np.median(here)),
                            "low": float(here.min()),
                            "high": float(here.max()),
                            "n": len(here),
                            "extrapolated": epoch > run.measured_epochs or name in scaled,
                            "disturbed": name in disturbed,
                        }
                    )
    return pd.DataFrame(rows)


def start_up(tables: Tables) -> pd.DataFrame:
    """Return per private cell: seconds before the first ordinary epoch, the first epoch over an ordinary one, and after
    how many epochs a compiled contestant is ahead of one that starts at once.

    A cheap starter c0 takes c0 + n t0 seconds for n epochs, a dear one c1 + n t1; with c1 > c0 and t1 < t0 the second
    is ahead from n = (c1 - c0) / (t0 - t1) on; with t1 >= t0 it never is (infinite). ``rival`` is the fastest private
    contestant per epoch that starts in less than a tenth of the time, ``sibling`` the same among its own framework's.
    Both empty (and NaN) where there is none, or where it starts in under a second itself.
    """
    if tables.compile.empty or tables.cells.empty:
        return pd.DataFrame()
    start = tables.compile.set_index(CELL)["median"].to_dict()
    ok = tables.cells[(tables.cells.state == "ok") & tables.cells.private]
    framework = dict(zip(tables.raw.contestant, tables.raw.framework, strict=True))
    rows: list[dict[str, Any]] = []
    for place, group in ok.groupby([*PLACE, "batch_size"], sort=False):
        found = {
            name: (start[*place, name], median)
            for name, median in zip(group.contestant, group["median"], strict=True)
            if (*place, name) in start
        }
        for row in rows_of(group):
            if row.contestant not in found:
                continue
            c1, t1 = found[row.contestant]
            dear = c1 >= WORTH_PAYING
            cheap = {n: v for n, v in found.items() if dear and n != row.contestant and v[0] < CHEAPER * c1}
            own = {n: v for n, v in cheap.items() if framework[n] == framework[row.contestant]}
            entry: dict[str, Any] = {
                **dict(zip([*PLACE, "batch_size"], place, strict=True)),
                "contestant": row.contestant,
                "start_seconds": c1,
                "epoch_seconds": t1,
                "first_over_ordinary": 1 + c1 / t1,
                "n": row.n,
                "extrapolated": row.extrapolated,
                "disturbed": row.disturbed > 0,
                "swamped": row.swamped,
            }
            for label, rivals in (("rival", cheap), ("sibling", own)):
                name = min(rivals, key=lambda n: rivals[n][1], default="")
                entry[label] = name
                entry[f"{label}_epochs"] = _break_even(found[row.contestant], rivals[name]) if name else math.nan
            rows.append(entry)
    return pd.DataFrame(rows)


def _break_even(dear: tuple[float, float], cheap: tuple[float, float]) -> float:
    """Return each (seconds before the first epoch, seconds per epoch)."""
    return (dear[0] - cheap[0]) / (cheap[1] - dear[1]) if dear[1] < cheap[1] else math.inf


def start_up_grids(frame: pd.DataFrame) -> list[Grid]:
    """Return a table per task of start-up and of when it pays."""
    grids = []
    for task, synthetic, group in model.blocks(frame):
        columns: model.Columns = {
            "contestant": lambda r: r.contestant,
            "batch": lambda r: str(r.batch_size),
            "start s": lambda r: number(r.start_seconds),
            "epoch s": lambda r: number(r.epoch_seconds) + model.doubts(r),
            "first / ordinary": lambda r: model.times(r.first_over_ordinary),
            "pays, own framework": lambda r: _pays(r.sibling, r.sibling_epochs),
            "pays, all": lambda r: _pays(r.rival, r.rival_epochs),
            "n": lambda r: str(r.n),
        }
        notes = [
            "Start: compilation and warm-up less the same number of ordinary steps. First / ordinary: the first epoch "
            "with the start-up over one without.",
            "Pays: epochs after which it is ahead of the fastest private contestant (of its own framework, of all) "
            f"that starts in under {CHEAPER:.0%} of its time: difference of the starts over difference of the epochs; "
            f"never: it is slower per epoch as well. {MISSING} nobody starts that much sooner, or it starts in under "
            f"{WORTH_PAYING:g} s itself. Medians of n processes, no interval.",
            *model.doubt_notes(group),
        ]
        title = f"{model.task_title(task, synthetic)}: start-up and when it pays"
        grids.append(model.listed(title, group, columns, notes))
    return grids


def _pays(name: str, epochs: float) -> str:
    if not name:
        return MISSING
    return f"{'never' if math.isinf(epochs) else number(epochs)} ({name})"


def goals(tables: Tables) -> pd.DataFrame:
    """Training seconds, test accuracy and epsilon of every process whose accuracy was read, as medians over processes:
    seconds = start-up + steps x seconds per epoch / steps per epoch. ``reached``: the highest multiple of 5 % at or
    below its accuracy."""
    rows: list[dict[str, Any]] = []
    current = tables.raw[~tables.raw.superseded & (tables.raw.state == "ok") & tables.raw.seconds.notna()]
    columns = [*CELL, "private", "seconds", "extrapolated", "disturbed"]
    # Plain dictionaries: reading single places of a frame takes most of the time of a large report.
    for i, row in zip(current.index, current[columns].to_dict("records"), strict=True):
        r = tables.records[i]
        if r.accuracy is None or r.timed is None:
            continue
        epochs = r.accuracy.after_steps / r.timed.steps_per_epoch
        start = 0.0 if r.compile_seconds is None else r.compile_seconds
        rows.append(
            {
                **row,
                "after_steps": r.accuracy.after_steps,
                "epochs": epochs,
                "test": r.accuracy.test,
                "seconds": start + epochs * row["seconds"],
                "start_seconds": start,
                "epsilon": math.nan if r.epsilon is None or r.epsilon.pld is None else r.epsilon.pld,
                "delta": math.nan if r.epsilon is None else r.epsilon.delta,
            }
        )
    if not rows:
        return pd.DataFrame()
    processes = pd.DataFrame(rows).groupby([*CELL, "private", "after_steps"], sort=False)
    found = processes[["epochs", "test", "seconds", "start_seconds", "epsilon", "delta"]].median()
    found = found.assign(low=processes.seconds.min(), high=processes.seconds.max(), n=processes.size())
    reached = np.floor(found.test / ACCURACY_STEP + 1e-9) * ACCURACY_STEP
    marks = processes[["extrapolated", "disturbed"]].any()
    return found.assign(reached=reached).join(marks).reset_index()


def goals_grids(frame: pd.DataFrame) -> list[Grid]:
    """Return who is there first: per task the private contestants by seconds, those that reached the common accuracy
    first."""
    grids = []
    for task, synthetic, group in model.blocks(frame):
        private = group[group.private]
        target = float((private if len(private) else group).reached.max())
        shown = group.assign(there=group.test >= target - 1e-9).sort_values(
            ["there", "seconds"], ascending=[False, True], kind="stable"
        )
        columns: model.Columns = {
            "contestant": lambda r: r.contestant,
            "batch": lambda r: str(r.batch_size),
            f"reached {target:.0%}": lambda r: "yes" if r.there else "no",
            "seconds": lambda r: number(r.seconds) + model.doubts(r) + model.interval(r.low, r.high),
            "of them start": lambda r: number(r.start_seconds),
            "epochs": lambda r: number(r.epochs),
            "accuracy": lambda r: f"{r.test:.1%}",
            "ε": lambda r: MISSING if math.isnan(r.epsilon) else f"{r.epsilon:.3g}",
            "n": lambda r: str(r.n),
        }
        deltas = sorted(set(group.delta.dropna()))
        notes = [
            "Seconds of training, start-up included, until the accuracy was read (median of the processes [lowest, "
            "highest]). It is read once, at the end of a process: an upper bound of the time to that accuracy.",
            f"ε at δ = {', '.join(f'{d:g}' for d in deltas)} by privacy-loss distributions; {MISSING} without DP or "
            "without Poisson samples."
            if deltas
            else "No ε on record.",
            *_guessing(task, target),
            *model.doubt_notes(group),
        ]
        title = f"{model.task_title(task, synthetic)}: seconds to {target:.0%} test accuracy, and the ε spent"
        grids.append(model.listed(title, shown, columns, notes))
    return grids


def _guessing(task: str, target: float) -> list[str]:
    """Return a warning where the best accuracy is that of a coin."""
    if task not in TASKS or target > 1 / TASKS[task].classes + ACCURACY_STEP / 2:
        return []
    classes = TASKS[task].classes
    return [
        f"Guessing among {classes} classes reaches {1 / classes:.0%}: hardly anything has been learnt, and "
        "these seconds are no time to an accuracy worth having."
    ]


@lru_cache(maxsize=4)
def floor(tables: Tables) -> pd.DataFrame:
    """Return every timed cell over the physical floor of its task on its machine, where the peaks were measured.

    Arithmetic: ``Task.training_flops`` per example (forward, gradients of activations and weights; direct algorithms)
    over the measured float32 product. Traffic: the training data, read once an epoch, over the measured copy; weights
    and activations may stay in caches, so that they are no part of a floor. The floor is the larger of the two, as if
    they overlapped perfectly. Tasks of a lower precision have none: the peak of their products is not measured.
    """
    rows: list[dict[str, Any]] = []
    for section in model.sections(tables):
        peaks = _peaks(tables, section)
        here = section.of(tables.cells)
        raw = section.of(tables.raw)
        sizes = {name: d.train_size for i, name in raw.task.items() if (d := tables.records[i].data) is not None}
        for r in rows_of(here[here.state == "ok"]) if peaks else ():
            task = TASKS.get(r.task)
            size = sizes.get(r.task)
            if task is None or size is None or task.precision != FLOAT32:
                continue
            assert peaks is not None
            flops = task.training_flops * size
            traffic = math.prod(task.input_shape) * np.dtype(task.input_dtype).itemsize * size
            arithmetic, memory = flops / peaks[0], traffic / peaks[1]
            rows.append(
                {
                    **{c: getattr(r, c) for c in CELL},
                    "flops": flops,
                    "bytes": traffic,
                    "arithmetic_seconds": arithmetic,
                    "memory_seconds": memory,
                    "floor_seconds": max(arithmetic, memory),
                    "bound": "arithmetic" if arithmetic >= memory else "memory",
                    "seconds": r.median,
                    "over_floor": r.median / max(arithmetic, memory),
                    "n": r.n,
                    "extrapolated": r.extrapolated,
                    "disturbed": r.disturbed > 0,
                    "swamped": r.swamped,
                }
            )
    return pd.DataFrame(rows)


def floor_grids(tables: Tables, section: Section, frame: pd.DataFrame) -> list[Grid]:
    """Return a table per task of times over the physical floor."""
    if frame.empty:
        missing = (
            "No record of this section holds measured peaks of the machine (they are measured at the start of a run on "
            "a CPU), so no floor can be given."
        )
        return [Grid("Physical floor", ("what", "figure"), (("floor", MISSING),), (missing,))]
    peaks = _peaks(tables, section)
    assert peaks is not None
    grids = []
    for task, synthetic, group in model.blocks(frame):
        sizes = sorted(group.batch_size.unique())
        first = {size: group[group.batch_size == size].iloc[0] for size in sizes}
        cell = {(r.contestant, r.batch_size): f"{factor(r.over_floor)}×{model.doubts(r)}" for r in rows_of(group)}
        rows = (
            ("floor, seconds", *(f"{number(first[size].floor_seconds)} ({first[size].bound})" for size in sizes)),
            ("arithmetic, GFLOP", *(number(first[size].flops / 1e9) for size in sizes)),
            ("traffic, GB", *(number(first[size].bytes / 1e9) for size in sizes)),
            *((name, *(cell.get((name, s), MISSING) for s in sizes)) for name in dict.fromkeys(group.contestant)),
        )
        notes = (
            f"Floor: the larger of arithmetic over {peaks[0] / 1e9:.3g} GFLOP/s and traffic over {peaks[1] / 1e9:.3g} "
            "GB/s, both measured on this machine with the threads of a contestant. Arithmetic: forward and backward of "
            "an ordinary epoch by direct algorithms. Traffic: the training data, read once. Contestants: their median "
            "over the floor.",
            *([f"Below 1×: {BELOW_FLOOR}"] if (group.over_floor < 1).any() else []),
            *model.doubt_notes(group),
        )
        header = ("", *(f"batch {size}" for size in sizes))
        grids.append(Grid(f"{model.task_title(task, synthetic)}: over the physical floor", header, rows, notes))
    return grids
