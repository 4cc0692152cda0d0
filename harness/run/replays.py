"""Gate, part 5, on the measured cell itself: the weights that a timed process left, against an untimed replay of its
first steps by the memory process, one in its own, and the float64 reference of some of them. Where the memory process
comes later, the time is held back until then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.data import store
from harness.data.pretrained import starting_parameters
from harness.environments.backend import Argument, Backend, Input, Log, last_json
from harness.environments.executor import ToolFault
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run import held
from harness.run.session import Session, short
from harness.store.record import Compared, Record
from harness.tasks import TASKS
from harness.worker.batches import REPLAYED_STEPS, setting_of, timed_batches
from harness.worker.deferred import hash_of
from harness.worker.reading import reading_rate
from harness.worker.request import Request
from harness.worker.result import Result, State

REPLAY_TOLERANCE = 1e-4
"""Relative distance of the timed from the replayed weights, over the distance travelled: kernels that sum in another
order from run to run differ by a few float32 roundings, a skipped step or another noise by about 1."""
REPLAY_STEPS = 10.0
REPLAY_GROWTH = 100.0
"""Roundings grow from step to step: the tolerance grows by itself every REPLAY_STEPS steps, to REPLAY_GROWTH times as
much. One step left out of n is 1/sqrt(n) of the way or more."""
LONGEST_STEP = 1.01
"""Slack for what float32 adds to a step that is as long as its rows and its noise can make it."""
STEP_REFERENCE = "frameworks._tools.step_reference"

Run = Session[Options, Contestant, Job, Request]


def replayed(run: Run, job: Job) -> Path | None:
    """Return the weights that the untimed replay of a timed process has left; None where they are not there."""
    memory = replace(job, purpose="memory")
    record, weights = run.folder.read(run.record_name(memory)), Path(str(run.request(memory).snapshot))
    return weights if record is not None and record.state == "ok" and weights.exists() else None


def waiting(run: Run, job: Job) -> Record | None:
    """Return the time that waits for this memory process; None where there is none."""
    record = run.folder.read(run.record_name(replace(job, purpose="time"))) if job.purpose == "memory" else None
    return record if record is not None and held.is_held(record) else None


def is_lost(run: Run, job: Job, record: Record) -> bool:
    """Return whether weights that this process left for a comparison are lost, and that is still to come."""
    is_open = held.is_held(record)
    if job.purpose == "memory" and job.round == 0 and record.state == "ok" and run.options.time:
        is_open = waiting(run, job) is not None or run.is_due(replace(job, purpose="time"))
    return is_open and not Path(str(run.request(job).snapshot)).exists()


def unchecked(run: Run, job: Job) -> Result | None:
    """Return why a time would count that nothing is compared with: only the first round's is, and it is not right."""
    is_later = job.purpose == "time" and job.round > 0
    first = run.folder.read(run.record_name(replace(job, round=0))) if is_later else None
    if first is None or first.state == "ok":
        return None
    return Result(first.state, f"as in round 1: {first.reason}", interrupted=first.interrupted)


def settle(run: Run, job: Job, log: Log) -> None:
    """Compare the time that has waited for this memory process, if one has. Where they differ, neither counts: nobody
    knows which of them trained as it should. Where there is no replay, the time has none, and counts as little."""
    timed, time, memory = replace(job, purpose="time"), waiting(run, job), run.folder.read(run.record_name(job))
    if time is None or memory is None:
        return
    refused, weights = run.refusal(timed), replayed(run, timed)
    if refused is None and weights is None:
        refused = Result("crashed", "the memory process left no weights to compare the timed ones with.")
    if refused.interrupted if refused else is_lost(run, timed, time):
        return  # the next run makes again what is lost
    found = refused or after_first_steps(
        Result("ok", timed=time.timed), run.request(timed), weights, job.contestant.variant.own_replays
    )
    told = {"state": found.state, "reason": found.reason, "log_tail": found.log_tail}
    settled = [(timed, time.model_copy(update={**told, "interrupted": False, "timed": found.timed}))]
    if found.state != "ok":
        log(f"{job.cell.name}: {found.state}: {found.reason}")
        settled += [] if refused else [(job, memory.model_copy(update=told))]
    for one, record in settled:
        run.folder.write(run.record_name(one), record)
        run.note(one, record)


def after_first_steps(result: Result, request: Request, replayed: Path | None, own_replays: bool) -> Result:
    """Return the result; another state where the weights after the first timed steps are not the replay's.

    The limit leaves room for one float32 rounding of every weight that moved in every step.

    Args:
        result: of the timed process.
        request: what it was asked for, a snapshot among it.
        replayed: the weights that the memory process, the untimed replay, left; None where that is still to come.
        own_replays: whether the library's own loop can be seeded. One that cannot, and says so, keeps its error in the
            record and its time.
    """
    snapshot, is_own = Path(str(request.snapshot)), request.sampling == "own"
    if not snapshot.exists():
        return _as(result, "crashed", "the timed process left no weights: run the same command with --fresh.")
    initial = starting_parameters(TASKS[request.task], request.initial_seed, request.synthetic)
    try:
        changed = _changed(result, snapshot, initial, {"": 0})
        error, rounding = _relative_distance(snapshot, replayed, initial) if replayed is not None else (0.0, 0.0)
    except Exception as why:  # whatever a contestant made of a file
        reason = f"timed = replayed: the weights after the first timed steps cannot be read ({short(why)})."
        return _as(result, "rejected", reason)
    if changed or replayed is None:
        return _as(result, "rejected", changed) if changed else result
    assert result.timed is not None
    limit = REPLAY_TOLERANCE + rounding * (result.timed.steps_timed if is_own else REPLAYED_STEPS)
    result = replace(result, timed=replace(result.timed, replay_error=error if math.isfinite(error) else None))
    if error <= limit or (is_own and not own_replays):
        return result
    reason = (
        "timed = replayed: the weights after the first timed steps differ from an untimed replay by "
        f"{error:.3g} (limit {limit:.3g}) of the way travelled."
    )
    return _as(result, "rejected", reason)


def at_steps_drawn(result: Result, request: Request, measure: Callable[[], dict[str, Any]]) -> Result:
    """Return the result; another state where the timed weights at a moment that nobody could know, or at the end, are
    not those of a replay, or steps of that replay, drawn at random, are not the float64 reference's on the same rows.

    Args:
        result: of the timed process.
        request: what it was asked for, the replay to be checked among it.
        measure: asks :func:`step_reference`.
    """
    path = Path(str(request.checked))
    if not path.exists():
        return _as(result, "crashed", "the timed process left no replay to compare.")
    with np.load(path) as found:
        steps, halt = (int(value) for value in found["steps"])
        numbers = [int(value) for value in found["numbers"]]
        rows = [found[f"{i}/rows"] for i in range(len(numbers))]
        jump, jumped = (float(value) for value in found["jump"])
    timed = result.timed
    assert timed is not None
    each = timed.steps_timed
    if steps != each * timed.epochs or not 0 < halt <= steps or not {halt - 1, steps - 1} <= set(numbers):
        return _as(result, "rejected", f"the replay is of {steps} steps, halted at {halt}: not the timed ones.")
    batches = timed_batches(request, setting_of(request), each, timed.epochs, timed.starts)
    for number, found_rows in zip(numbers, rows, strict=True):
        indices, mask = batches[number] if 0 <= number < steps else (np.zeros(0), None)
        if not np.array_equal(found_rows, indices if mask is None else indices[mask]):
            return _as(result, "rejected", f"the replay's step {number} is not of the rows that it was given.")
    try:
        measured = measure()
    except ToolFault as fault:
        return _as(result, "crashed", f"the float64 reference of a step could not be made: {fault}")
    initial = starting_parameters(TASKS[request.task], request.initial_seed, request.synthetic)
    if changed := _changed(result, path, initial, {"timed/": None, "timed_end/": -1}):
        return _as(result, "rejected", changed)
    error, limit = _replay_error(path, initial, halt, "")
    end_error, end_limit = _replay_error(path, initial, steps, "_end")
    compared = Compared(
        step=numbers[0],
        steps=halt,
        rows=len(rows[0]),
        replay_error=error,
        replay_limit=limit,
        all_steps=steps,
        end_error=end_error,
        end_limit=end_limit,
        compared_steps=len(numbers),
        longest_step=jump,
        longest_step_number=int(jumped),
        **measured,
    ).model_dump()
    faults = _faults_of(compared)
    result = replace(result, timed=replace(timed, compared=compared))
    return _as(result, "rejected", "; ".join(faults)) if faults else result


def step_reference(backend: Backend, request: Request, log: Log) -> dict[str, Any]:
    """Return what :mod:`frameworks._tools.step_reference` says of the step.

    Raises :class:`ToolFault` where it cannot be asked.
    """
    rate = reading_rate(TASKS[request.task].optimizer, request.learning_rate) / request.batch_size
    data, checked = store.folder(request.data, request.synthetic), Path(str(request.checked))
    arguments: list[Argument] = ["--task", request.task, "--rate", repr(rate), "--checked", Input(checked)]
    arguments += ["--x", Input(data, "train_x.npy"), "--y", Input(data, "train_y.npy")]
    if request.private:
        arguments += ["--bound", repr(request.max_grad_norm)]
        arguments += ["--deviation", repr(request.noise_multiplier * request.max_grad_norm)]
    return last_json(backend.run_tool(STEP_REFERENCE, arguments, log))


def _as(result: Result, state: State, reason: str) -> Result:
    return replace(result, state=state, reason=reason)


def _faults_of(compared: dict[str, Any]) -> list[str]:
    """Return sentences on what of :class:`Compared` is beyond its limit; NaN is."""
    found = []
    if not compared["replay_error"] <= compared["replay_limit"]:
        found.append(
            f"timed = replayed: the weights after {compared['steps']} timed steps differ from an untimed replay by "
            f"{compared['replay_error']:.3g} (limit {compared['replay_limit']:.3g}) of the way travelled"
        )
    if compared["end_error"] is not None and not compared["end_error"] <= compared["end_limit"]:
        found.append(
            f"timed = replayed: the weights after all {compared['all_steps']} timed steps differ from an untimed "
            f"replay by {compared['end_error']:.3g} (limit {compared['end_limit']:.3g}) of the way travelled"
        )
    if compared["longest_step"] is not None and not compared["longest_step"] <= LONGEST_STEP:
        found.append(
            f"measured step: step {compared['longest_step_number']} of the replay moved the weights "
            f"{compared['longest_step']:.3g} times as far as its rows and its noise can"
        )
    if not compared["update_error"] <= compared["update_limit"]:
        found.append(
            f"measured step: the update of step {compared['step']} ({compared['rows']} rows) is off by "
            f"{compared['update_error']:.3g} (limit {compared['update_limit']:.3g})"
        )
    for name, score in compared["noise_scores"].items():
        if not score <= compared["noise_limit"]:
            found.append(
                f"measured step: the noise of step {compared['step']}, {name}: {score:.3g} standard deviations "
                f"(limit {compared['noise_limit']:.3g})"
            )
    return found


def _changed(result: Result, path: Path, names: Iterable[str], parts: Mapping[str, int | None]) -> str | None:
    """Return a sentence where weights in a file are not those that the worker committed itself to when it had read
    them. ``parts``: prefix -> which of the stretches, None for any."""
    if result.committed is None:
        return None
    with np.load(path) as found:
        for prefix, place in parts.items():
            known = result.committed if place is None else result.committed[place:][:1]
            if hash_of({name: found[prefix + name] for name in names}) not in known:
                return "timed = replayed: the weights are not those that were read when the clock had stopped."
    return None


def _replay_error(path: Path, initial: dict[str, np.ndarray], steps: int, where: str) -> tuple[float, float]:
    """Return (error, limit) of the timed weights after so many steps against the replay's."""
    error, rounding = _relative_distance(path, path, initial, (f"timed{where}/", f"replayed{where}/"))
    return error, REPLAY_TOLERANCE * min(1.0 + steps / REPLAY_STEPS, REPLAY_GROWTH) + rounding * steps


def _relative_distance(
    a: Path, b: Path, start: dict[str, np.ndarray], prefixes: tuple[str, str] = ("", "")
) -> tuple[float, float]:
    """Return (|a - b|, |one float32 rounding of every weight that moved|), both over |a - start|. NaN passes no limit;
    where nothing moved the distances are absolute."""
    apart, travelled, rounding = 0.0, 0.0, 0.0
    with np.load(a) as left, np.load(b) as right:
        for name, origin in start.items():
            here = left[prefixes[0] + name].astype(np.float64)
            apart += float(np.sum((here - right[prefixes[1] + name]) ** 2))
            travelled += float(np.sum((here - origin) ** 2))
            rounding += float(np.sum(np.spacing(np.abs(origin[here != origin])).astype(np.float64) ** 2))
    scale = math.sqrt(travelled) or 1.0
    return math.sqrt(apart) / scale, math.sqrt(rounding) / scale
