"""The library's own loop, timed epoch by epoch, and its memory."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from harness.contract import Adapter
from harness.optimizer import SGD
from harness.worker import memory as resident
from harness.worker.clock import timed_epoch
from harness.worker.deferred import Stretches, fault_of
from harness.worker.line import Line
from harness.worker.measurement import Measurement, own_epsilon
from harness.worker.process import Emit, save_weights
from harness.worker.request import Request
from harness.worker.result import Timed


def measure_own_loop(request: Request, emit: Emit, line: Line) -> dict[str, Any]:
    """The library's own loop: an epoch before the clock, then, from the starting weights, timed ones, each with a seed
    of its own. The weights after the first timed epoch are those of the replay in the memory process."""
    m = Measurement(request, emit)
    m.place()
    emit({"event": "phase", "phase": "warm-up"})
    first_pass, _ = timed_epoch(m.adapter, request.initial_seed)
    warm = dict(m.adapter.parameters())
    m.adapter.build(m.task, m.setting, m.initial)
    line.ask("sizes", steps=1, epochs=1)
    request = replace(request, batch_seed=line.ask("seed")["batch_seed"])
    timed = Stretches(m.adapter, line)
    updates: list[int | None] = []
    fault: dict[str, str] = {}
    for epoch in range(request.epochs):
        emit({"event": "phase", "phase": f"epoch {epoch + 1}/{request.epochs}"})
        _, made = timed.time(functools.partial(_own_epoch, m.adapter, request, epoch), epoch)
        updates.append(made)
        if epoch == 0:
            fault = _own_fault(m, warm, timed.weights, m.whole_epoch if made is None else made)
            if request.snapshot:
                save_weights(request.snapshot, timed.weights)
    timed.finish()
    measured = timed.seconds
    if request.weights:
        save_weights(request.weights, timed.weights)
    total_steps = sum(m.whole_epoch if made is None else made for made in updates)
    return {
        "state": "ok",
        **(fault_of(timed.weights, m.initial, timed.reads, timed.load.share) or fault),
        "epoch_seconds": measured,
        "compile_seconds": max(0.0, first_pass - statistics.median(measured)),
        "timed": Timed(
            steps_per_epoch=m.whole_epoch,
            steps_timed=m.whole_epoch if updates[0] is None else updates[0],
            epochs=request.epochs,
            extrapolated=False,
            measured_seconds=measured,
            part_seconds=measured,
            first_pass_seconds=first_pass,
            parameters_read_seconds=[read.first for read in timed.reads],
            updates=updates[0],
        ),
        "foreign_share": timed.load.share,
        "throttled": timed.load.throttled,
        "epsilon_own": own_epsilon(m.adapter, total_steps, request.delta) if request.private else None,
        "epsilon_steps": total_steps,
    }


def _own_epoch(adapter: Adapter, request: Request, epoch: int, order: int) -> tuple[float, int | None]:
    """The seed of the first one is that of the replay; those of the others are told when their clock starts."""
    return timed_epoch(adapter, own_seed(request, 0) if epoch == 0 else order % 2**31)


OWN_NOISE_SHARE = 0.5
OWN_UPDATES_SHARE = 0.5


def _own_fault(
    m: Measurement, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], updates: int
) -> dict[str, str]:
    """Why a library's own loop has not made its epoch, or nothing: too few updates, or two epochs with different seeds
    that lie nearer to each other than the noise of so many updates alone would bring them. How far noise carries Adam
    has no such bound: there they must differ."""
    if updates < OWN_UPDATES_SHARE * m.whole_epoch:
        reason = f"its own loop made {updates} updates in an epoch of {m.whole_epoch}."
        return {"state": "rejected", "reason": reason}
    s = m.setting
    unit = s.learning_rate / s.batch_size * s.noise_multiplier * s.max_grad_norm
    least = OWN_NOISE_SHARE * unit * math.sqrt(2 * updates * m.task.trained_count)
    if not isinstance(s.optimizer, SGD):
        least = math.ulp(0.0)
    apart = math.sqrt(sum(float(np.square(one[n].astype(np.float64) - other[n]).sum()) for n in m.task.parameters))
    if apart < least:
        reason = f"two epochs of its own loop are {apart:.3g} apart; the noise of {updates} updates is {2 * least:.3g}."
        return {"state": "rejected", "reason": reason}
    return {}


def own_seed(request: Request, epoch: int) -> int:
    """The seed of an epoch of the library's own loop; -1 is the one before the clock."""
    return request.batch_seed + 7919 * (epoch + 1)


def measure_own_memory(request: Request, emit: Emit) -> dict[str, Any]:
    """Peak memory of the first timed epoch of the library's own loop, compilation inside, which is also its replay."""
    m = Measurement(request, emit)
    m.place()
    loaded = resident.steady()
    resident.reset_peak()
    emit({"event": "phase", "phase": "memory"})
    m.adapter.epoch(own_seed(request, 0))
    m.adapter.synchronize()
    peak = resident.peak()
    resident.settle()
    memory = {
        **m.adapter.peak_memory().bytes_by_metric,
        resident.GROWTH_WITH_COMPILE: max(0, peak - min(loaded, resident.now())),
    }
    if request.snapshot:
        save_weights(request.snapshot, dict(m.adapter.parameters()))
    return {"state": "ok", "memory": memory}
