"""The worker: one fresh process inside a framework's own environment, one measurement.

``python -m harness.worker.e2e REQUEST.json`` writes JSON lines to its standard output: ``phase`` events for the
progress
display and one ``result`` at the end. What the framework prints goes to standard error. Standard library and numpy
only, because nothing of the harness may be installed into a framework's environment.
"""

from __future__ import annotations

import functools
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract import Adapter, Unsupported
from harness.tasks import known_task
from harness.worker import memory as resident
from harness.worker import sketch
from harness.worker.batches import (
    REPLAYED_STEPS,
    epoch_batches,
    in_order,
    order_of,
    padding_fraction,
    setting_of,
    warm_up_batch,
)
from harness.worker.clock import Batch, ForeignLoad, timed_until
from harness.worker.deferred import Stretches, fault_of
from harness.worker.line import Line, Remote
from harness.worker.measurement import SETTLING_STEPS, Measurement, own_epsilon, turn_length
from harness.worker.own_loop import measure_own_loop, measure_own_memory
from harness.worker.process import Emit, die_with_parent, events, load_create, pin, save_weights, versions
from harness.worker.replay import replay
from harness.worker.request import Request
from harness.worker.result import Check, Rank, Result, Timed, of_error


def _stretch(
    adapter: Adapter,
    request: Request,
    part: list[Batch],
    length: int,
    is_stopped: Callable[[], bool] | None,
    order: int,
) -> tuple[float, int]:
    """(seconds, steps made) of a stretch of so many steps. ``part``, what is left, is put into its order."""
    part[:] = in_order(request, part, order)
    return timed_until(adapter, part[:length], is_stopped)


def measure_time(request: Request, emit: Emit, line: Line) -> dict[str, Any]:  # noqa: PLR0915  (one process, in its order)
    """Warm-up, then timed epochs. The clock stops twice more: after the first steps, so that their weights can be
    compared with an untimed replay in another process, and once where the referee says so, for the replay in this one.
    The batches are known only when everything is built, their order only when the clock of their stretch starts."""
    if request.sampling == "own":
        return measure_own_loop(request, emit, line)
    m = Measurement(request, emit)
    m.place()
    first_pass, step_seconds, warm_up_steps = None, None, 0
    if request.warm_up:
        first_pass, step_seconds, warm_up_steps = m.calibrate()
    planned = {"steps": m.steps(step_seconds), "epochs": m.epochs(step_seconds)}
    planned |= {"turn": m.turn(step_seconds)} if request.turn_seconds is not None else {}
    agreed = line.ask("sizes", **planned)
    steps, count, sizes, turn = agreed["steps"], agreed["epochs"], agreed["sizes"], agreed.get("turn")
    if first_pass is not None:
        seconds, extra = m.warm_up(sizes)
        first_pass, warm_up_steps = first_pass + seconds, warm_up_steps + extra
        m.reset()
    request = replace(request, batch_seed=line.ask("seed")["batch_seed"])
    epochs = [epoch_batches(request, m.setting, epoch, steps) for epoch in range(count)]
    timed = Stretches(m.adapter, line, ForeignLoad(ranks=request.world_size > 1))
    measured: list[float] = []
    made_in_all = halt = 0
    halted: dict[str, np.ndarray] = {}
    ends: list[int] = []
    for epoch, batches in enumerate(epochs):
        emit({"event": "phase", "phase": f"epoch {epoch + 1}/{len(epochs)}"})
        done = counted = 0
        measured.append(0.0)
        while done < len(batches):
            # A few steps, those of the memory process, then until the referee stops it, in whichever epoch that is,
            # then the rest. With turns, these two in as many turns as it takes.
            is_first = epoch == done == 0
            if turn is not None:
                uncounted = 0 if is_first else m.uncounted(turn)
                timed.begin_turn(batches[done : done + uncounted], epoch, done)
                done, made_in_all = done + uncounted, made_in_all + uncounted
            part = batches[:REPLAYED_STEPS] if is_first else batches[done:]
            length = len(part) if is_first or turn is None else turn_length(len(part), turn - uncounted)
            expected, stop = None, None
            if not is_first and not halted:
                expected = timed.seconds[0] / REPLAYED_STEPS * (steps * count - made_in_all)
                stop = line.is_stopped
            work = functools.partial(_stretch, m.adapter, request, part, length, stop)
            seconds, made = timed.time(work, epoch, done, expected)
            batches[done : done + len(part)] = part
            measured[-1] += seconds
            done, made_in_all, counted = done + made, made_in_all + made, counted + made
            ends.append(made_in_all)
            if is_first and request.snapshot:
                save_weights(request.snapshot, timed.weights)
            if not halted and (made < length or made_in_all == steps * count):
                halt, halted = made_in_all, {name: value.copy() for name, value in timed.weights.items()}
        measured[-1] *= len(batches) / counted
    timed.finish()
    weights = timed.weights
    if request.weights:
        save_weights(request.weights, weights)
    rows = sum(len(i) if mask is None else int(mask.sum()) for batches in epochs for i, mask in batches)
    scale = m.whole_epoch / steps
    compile_seconds = None
    if first_pass is not None:
        compile_seconds = max(0.0, first_pass - warm_up_steps * statistics.median(measured) / steps)
    # Those that were asked for: how many more a budget had room for depends on the machine.
    total_steps = m.whole_epoch * request.epochs
    own = own_epsilon(m.adapter, total_steps, request.delta) if request.private else None
    fault = fault_of(weights, m.initial if rows or m.setting.noise_multiplier else {}, timed.reads, timed.load.share)
    if request.checked and not fault:
        emit({"event": "phase", "phase": "check"})
        taken = [batch for batches in epochs for batch in batches]
        save_weights(request.checked, replay(m, taken, halt, halted, weights, ends))
    return {
        "state": "ok",
        **fault,
        "epoch_seconds": [seconds * scale for seconds in measured],
        "compile_seconds": compile_seconds,
        "timed": Timed(
            steps_per_epoch=m.whole_epoch,
            steps_timed=steps,
            epochs=len(epochs),
            extrapolated=steps < m.whole_epoch,
            measured_seconds=measured,
            part_seconds=timed.seconds,
            first_pass_seconds=first_pass,
            warm_up_steps=warm_up_steps,
            padding_fraction=padding_fraction([batch for batches in epochs for batch in batches]),
            parameters_read_seconds=[read.first for read in timed.reads],
            rows_timed=rows,
        ),
        "foreign_share": timed.load.share,
        "throttled": timed.load.throttled,
        "epsilon_own": own,
        "epsilon_steps": total_steps,
    }


def measure_memory(request: Request, emit: Emit, line: Line) -> dict[str, Any]:
    """Peak memory of the first steps of the first epoch, which are also the untimed replay of the timed process.

    Before them one step of every shape that has to be compiled (or simply the first step) for the warm-up's own peak.
    """
    if request.sampling == "own":
        return measure_own_memory(request, emit)
    m = Measurement(request, emit)
    m.place()
    batches = epoch_batches(request, m.setting, 0, min(REPLAYED_STEPS, m.steps(None)))
    batches = in_order(request, batches, order_of(request.order_seed, 0, 0))
    if request.is_partial:
        settling = warm_up_batch(request, m.setting, request.batch_size)
        batches = [settling] * SETTLING_STEPS + batches
    loaded = resident.steady()
    ranks = resident.Ranks() if request.world_size > 1 else None
    resident.reset_peak()
    emit({"event": "phase", "phase": "memory"})
    shapes = {len(indices): (indices, mask) for indices, mask in batches if mask is not None}
    for indices, mask in shapes.values() or batches[:1]:
        m.adapter.step(indices, mask)
    m.adapter.synchronize()
    peak_of_warm_up = resident.peak()
    m.adapter.build(m.task, m.setting, m.initial)
    resident.settle()
    kept = resident.now()
    loaded = min(loaded, kept)  # some (TensorFlow) let go of the data's original only in their next call
    resident.reset_peak()
    sent = resident.sent()
    if ranks is not None:
        ranks.begin()
    for indices, mask in batches:
        m.adapter.step(indices, mask)
        m.adapter.synchronize()
    by_rank = ranks.end(len(batches)) if ranks is not None else {}
    peak = resident.peak()
    memory = {
        **m.adapter.peak_memory().bytes_by_metric,
        # Last: the harness's own figures are nobody else's to give.
        resident.GROWTH: max(0, peak - loaded),
        resident.GROWTH_WITH_COMPILE: max(0, peak - loaded, peak_of_warm_up - loaded),
        resident.KEPT_AFTER_WARM_UP: max(0, kept - loaded),
    }
    if request.world_size > 1:
        memory[resident.SENT] = (resident.sent() - sent) // len(batches)
    if request.snapshot:
        save_weights(request.snapshot, dict(m.adapter.parameters()))
    result: dict[str, Any] = {"state": "ok", "memory": memory}
    if request.sketches:
        moved = {name: value.astype(np.float64) - m.initial[name] for name, value in m.adapter.parameters().items()}
        result["sketch"] = sketch.of(moved)
    if request.world_size > 1:  # last: it makes one more step
        given = m.adapter.exchanged(*batches[-1])
        result["ranks"] = [Rank(*by_rank[process], payload=dict(given[process])) for process in given]
    return result


def run_gate(request: Request, emit: Emit, line: Line) -> dict[str, Any]:
    """The admission gate of this adapter on this task; needs no data set."""
    from harness.worker.gate.checks import checks as checks_of

    emit({"event": "phase", "phase": "gate"})
    create = load_create(Path(request.folder, "adapter.py"))
    with np.load(str(request.reference), allow_pickle=False) as reference:
        checks = checks_of(
            lambda: create(request.variant),
            known_task(request.task),
            setting_of(request),
            request.static_shapes,
            dict(reference),
            budget=request.budget,
        )
    return {"state": "ok", "checks": [Check(**check) for check in checks]}


MODES: dict[str, Callable[[Request, Emit, Line], dict[str, Any]]] = {
    "time": measure_time,
    "memory": measure_memory,
    "gate": run_gate,
}


def run(request: Request, emit: Emit, line: Line) -> None:
    """One measurement; whatever happens, the last event is a ``result``. ``line``: to the referee."""
    try:
        result = Result(**MODES[request.mode](request, emit, line))
    except Unsupported as error:
        result = Result("unsupported", str(error))
    except Exception as error:
        traceback.print_exc()
        result = of_error(error)
    emit(replace(result, versions=versions()).as_event())


def main() -> None:
    die_with_parent()
    request = Request.from_json(Path(sys.argv[1]).read_text())
    emit = events()
    pin(request.threads)
    resident.adopt_orphans()
    run(request, emit, Remote(emit, sys.stdin.readline))


if __name__ == "__main__":
    main()
