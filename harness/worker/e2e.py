"""The worker: one fresh process inside a framework's own environment, one measurement.

``python -m harness.worker.e2e REQUEST.json`` writes JSON lines to its standard output: ``phase`` events for the
progress
display and one ``result`` at the end. What the framework prints goes to standard error. Standard library and numpy
only, because nothing of the harness may be installed into a framework's environment.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract import Adapter, Setting, Unsupported, require
from harness.data.pretrained import starting_parameters
from harness.optimizer import SGD
from harness.tasks import TASKS, Task, check_parameters, known_task
from harness.worker import memory as resident
from harness.worker import sampling, sketch
from harness.worker.clock import (
    DISTURBED_SHARE,
    Batch,
    ForeignLoad,
    collector_paused,
    timed_epoch,
    timed_steps,
    timed_until,
)
from harness.worker.line import Line, Remote
from harness.worker.process import Emit, die_with_parent, events, load_create, pin, save_weights, versions
from harness.worker.reading import reading_rate, transparent
from harness.worker.request import Request
from harness.worker.result import Check, Result, Timed, of_error

MINIMUM_STEPS = 4
MOST_EPOCHS = 100
REPLAYED_STEPS = MINIMUM_STEPS
"""The first steps of the first epoch, after which the weights are read for comparison with the untimed replay. Every
timed process makes at least so many, so that both have the same steps behind them."""

CALIBRATION_STEPS = (2, 4)
CALIBRATION_SECONDS = 15.0
"""At least and at most so many steps show what one costs; beyond the least number only while they took less. The most
is one more than SETTLING_STEPS: who is judged by what is done once gets fewer timed steps than the budget has."""
SETTLING_STEPS = 3
"""Libraries do more in their first steps than in later ones: dpcore looks whether the first three batches mix their
examples, a compiler guesses at the second batch which sizes change."""


def setting_of(request: Request) -> Setting:
    sizes: tuple[int, ...] = ()
    if request.static_shapes and request.sampling in {"poisson", "own"}:
        sizes = sampling.padded_sizes(request.batch_size, request.dataset_size)
    elif request.static_shapes:
        last = request.dataset_size % request.batch_size
        sizes = tuple(sorted({request.batch_size, last or request.batch_size}))
    task = known_task(request.task)
    return Setting(
        variant=request.variant,
        private=request.private,
        batch_size=request.batch_size,
        dataset_size=request.dataset_size,
        noise_multiplier=request.noise_multiplier if request.private else 0.0,
        max_grad_norm=request.max_grad_norm,
        learning_rate=request.learning_rate,
        seed=request.noise_seed,
        device=request.device,
        threads=request.threads,
        precision=task.precision,
        padded_sizes=sizes,
        optimizer=task.optimizer,
    )


def epoch_batches(request: Request, setting: Setting, epoch: int, steps: int) -> list[Batch]:
    """The first ``steps`` batches of an epoch, the same for every framework that gets the same seed."""
    if request.sampling == "poisson":
        seed = request.batch_seed + 7919 * epoch
        whole = sampling.steps_per_epoch(request.dataset_size, request.batch_size)
        lists = sampling.poisson_batches(request.dataset_size, setting.sample_rate, whole, seed)
        lists = (sampling.balanced(lists) if request.is_partial else lists)[:steps]
    else:
        lists = sampling.consecutive_batches(request.dataset_size, request.batch_size)[:steps]
    return [_shaped(indices, setting) for indices in lists]


def order_of(seed: int, epoch: int, done: int) -> int:
    """Return the shuffling seed of an epoch's batches from ``done`` on; the worker learns it when their clock
    starts."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {done}".encode()).digest()[:8])


def in_order(request: Request, batches: list[Batch], order: int) -> list[Batch]:
    """Shuffle a stretch's batches by ``order``, so that an adapter cannot know the next batches while its weights are
    read. Under a protocol whose order is known anyway they stay as they are."""
    if request.sampling != "poisson":
        return batches
    return [batches[i] for i in np.random.default_rng(order).permutation(len(batches)).tolist()]


def timed_batches(request: Request, setting: Setting, steps: int, epochs: int, halt: int) -> list[Batch]:
    """All timed steps of a process in their order. A stretch begins with every epoch, after the first REPLAYED_STEPS
    steps, and after ``halt`` of all steps."""
    found: list[Batch] = []
    for epoch in range(epochs):
        batches = epoch_batches(request, setting, epoch, steps)
        starts = [0, *([REPLAYED_STEPS] if epoch == 0 else [])]
        starts += [halt % steps] if epoch == halt // steps and halt % steps else []
        for done in starts:
            end = REPLAYED_STEPS if epoch == done == 0 else steps
            batches[done:end] = in_order(request, batches[done:end], order_of(request.order_seed, epoch, done))
        found += batches
    return found


def _shaped(indices: np.ndarray, setting: Setting) -> Batch:
    return sampling.pad(indices, setting.padded_sizes) if setting.padded_sizes else (indices, None)


def warm_up_batch(request: Request, setting: Setting, size: int) -> Batch:
    """A batch of ``size`` rows that belongs to no epoch."""
    rng = np.random.default_rng([request.initial_seed, size, 0xA12])
    return _shaped(rng.choice(request.dataset_size, size=size, replace=False).astype(np.int64), setting)


def padding_fraction(batches: list[Batch]) -> float:
    """Share of the rows computed that were padding."""
    rows = sum(len(indices) for indices, _ in batches)
    real = sum(len(indices) if mask is None else int(mask.sum()) for indices, mask in batches)
    return 1.0 - real / rows if rows else 0.0


class Measurement:
    """An adapter with a task, a setting, its data and its starting weights; ``reset`` puts it back to the start."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request = request
        self.emit = emit
        self.task: Task = TASKS[request.task]
        self.setting = setting_of(request)
        self.initial = starting_parameters(self.task, request.initial_seed, request.synthetic)
        self.whole_epoch = sampling.steps_per_epoch(request.dataset_size, request.batch_size)
        emit({"event": "phase", "phase": "import"})
        self.adapter = load_create(Path(request.folder, "adapter.py"))(request.variant)
        require(self.adapter, self.setting)
        self.adapter.build(self.task, self.setting, self.initial)
        fault = check_parameters(self.task, self.adapter.parameters())
        if fault:
            raise ValueError(fault)

    def place(self) -> None:
        from harness.data import load

        self.emit({"event": "phase", "phase": "data"})
        data = load(self.request.data, "train", synthetic=self.request.synthetic)
        self.adapter.place(data.x[: self.request.dataset_size], data.y[: self.request.dataset_size])

    def reset(self) -> None:
        """Back to the starting weights. Where only a part of an epoch is timed, some steps follow, untimed: after a
        rebuild the first ones touch fresh memory and do what is done once, and scaling that up to an epoch would
        multiply it."""
        self.adapter.build(self.task, self.setting, self.initial)
        if self.request.is_partial:
            batch = warm_up_batch(self.request, self.setting, self.request.batch_size)
            timed_steps(self.adapter, [batch] * SETTLING_STEPS)

    def calibrate(self) -> tuple[float, float, int]:
        """(seconds of all steps, seconds of the last one, how many). The first steps of ordinary size compile, allocate
        and examine, the last one shows what a step costs."""
        self.emit({"event": "phase", "phase": "warm-up"})
        batch = warm_up_batch(self.request, self.setting, self.request.batch_size)
        least, most = CALIBRATION_STEPS
        seconds: list[float] = []
        while len(seconds) < least or (len(seconds) < most and sum(seconds) < CALIBRATION_SECONDS):
            seconds.append(timed_steps(self.adapter, [batch]))
        return sum(seconds), seconds[-1], len(seconds)

    def warm_up(self, sizes: Sequence[int]) -> tuple[float, int]:
        """(seconds, steps): one step of every other compiled size that occurs in the batches."""
        ordinary, _ = warm_up_batch(self.request, self.setting, self.request.batch_size)
        extra = [warm_up_batch(self.request, self.setting, size) for size in sizes if size != len(ordinary)]
        return timed_steps(self.adapter, extra), len(extra)

    def steps(self, step_seconds: float | None) -> int:
        if self.request.steps is not None:
            return min(self.whole_epoch, self.request.steps)
        if self.request.budget_seconds is None or step_seconds is None:
            return self.whole_epoch
        wanted = 2 * math.ceil(self.request.budget_seconds / max(step_seconds, 1e-6) / 2)  # even: see `balanced`
        return min(self.whole_epoch, max(MINIMUM_STEPS, wanted))

    def epochs(self, step_seconds: float | None) -> int:
        """As many as are asked for; where the budget lasts for more than one, as many as fit, because the fifth of a
        second that an epoch of a small model takes says little of what its steps cost."""
        if self.request.steps is not None or self.request.budget_seconds is None or step_seconds is None:
            return self.request.epochs
        fitting = int(self.request.budget_seconds / max(self.whole_epoch * step_seconds, 1e-6))
        return max(self.request.epochs, min(MOST_EPOCHS, fitting))


@dataclass(frozen=True)
class Read:
    """Seconds: of the timed stretch before it, of a first and of a second reading of the weights; of this process's
    processor time in the longer one, and how much more it was in the first."""

    timed: float
    first: float
    second: float
    cpu: float
    extra_cpu: float


def _read_twice(adapter: Adapter, timed: float, line: Line) -> tuple[dict[str, np.ndarray], Read]:
    """(weights, how long it took): work that was deferred past the clock shows as a slow reading. The referee, who is
    told of each, has a clock that the adapter cannot stop."""
    start, cpu_start = time.perf_counter(), time.process_time()
    weights = dict(adapter.parameters())
    middle, cpu_middle = time.perf_counter(), time.process_time()
    line.tell("read")
    again, cpu_again = time.perf_counter(), time.process_time()
    adapter.parameters()
    end, cpu_end = time.perf_counter(), time.process_time()
    line.tell("read")
    one, other = cpu_middle - cpu_start, cpu_end - cpu_again
    return weights, Read(timed, middle - start, end - again, max(one, other), one - other)


@dataclass
class Stretches:
    """The timed stretches of one process. ``line``: to the referee, who lets each of them go."""

    adapter: Adapter
    line: Line
    load: ForeignLoad = field(default_factory=ForeignLoad)
    seconds: list[float] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def time(
        self,
        work: Callable[[int], tuple[float, Any]],
        epoch: int,
        done: int = 0,
        stop_within: float | None = None,
    ) -> tuple[float, Any]:
        """``work``, given the number that the order of the steps from ``done`` on follows from, gives seconds and
        something more. The weights are read after it. ``stop_within``: the referee may ask it to stop at any moment
        within so many seconds."""
        with collector_paused(), self.load.watch():
            order = self.line.ask("go", epoch=epoch, done=done, stop_within=stop_within)["order"]
            seconds, more = work(order)
            self.line.tell("end")
        self.seconds.append(seconds)
        self.weights, read = _read_twice(self.adapter, seconds, self.line)
        self.reads.append(read)
        return seconds, more


def _stretch(
    adapter: Adapter,
    request: Request,
    part: list[Batch],
    is_stopped: Callable[[], bool] | None,
    order: int,
) -> tuple[float, int]:
    """(seconds, steps made) of a stretch. ``part`` is put into its order."""
    part[:] = in_order(request, part, order)
    return timed_until(adapter, part, is_stopped)


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
    steps, count = m.steps(step_seconds), m.epochs(step_seconds)
    sizes = line.ask("sizes", steps=steps, epochs=count)["sizes"]
    if first_pass is not None:
        seconds, extra = m.warm_up(sizes)
        first_pass, warm_up_steps = first_pass + seconds, warm_up_steps + extra
        m.reset()
    request = replace(request, batch_seed=line.ask("seed")["batch_seed"])
    epochs = [epoch_batches(request, m.setting, epoch, steps) for epoch in range(count)]
    timed = Stretches(m.adapter, line)
    measured: list[float] = []
    made_in_all = halt = 0
    halted: dict[str, np.ndarray] = {}
    for epoch, batches in enumerate(epochs):
        emit({"event": "phase", "phase": f"epoch {epoch + 1}/{len(epochs)}"})
        done = 0
        measured.append(0.0)
        while done < len(batches):
            # A few steps, then until the referee stops it, in whichever epoch that is, then the rest.
            is_first = epoch == done == 0
            part = batches[:REPLAYED_STEPS] if is_first else batches[done:]
            expected, stop = None, None
            if not is_first and not halted:
                expected = timed.seconds[0] / REPLAYED_STEPS * (steps * count - made_in_all)
                stop = line.is_stopped
            work = functools.partial(_stretch, m.adapter, request, part, stop)
            seconds, made = timed.time(work, epoch, done, expected)
            batches[done : done + len(part)] = part
            measured[-1] += seconds
            done, made_in_all = done + made, made_in_all + made
            if is_first and request.snapshot:
                save_weights(request.snapshot, timed.weights)
            if not halted and (made < len(part) or made_in_all == steps * count):
                halt, halted = made_in_all, timed.weights
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
    own = _own_epsilon(m.adapter, total_steps, request.delta) if request.private else None
    fault = _fault(weights, m.initial if rows or m.setting.noise_multiplier else {}, timed.reads, timed.load.share)
    if request.checked and not fault:
        emit({"event": "phase", "phase": "check"})
        taken = [batch for batches in epochs for batch in batches]
        save_weights(request.checked, replay(m, taken, halt, halted, weights))
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
        "epsilon_own": own,
        "epsilon_steps": total_steps,
    }


WINDOW_STEPS = 64
WINDOW_BYTES = 32 * 2**20
WINDOW_ROWS = 1024
WINDOW_FLOPS = 2e10
"""So many consecutive steps of a replay are kept, as long as their weights, and the work to make them again one example
at a time, stay below these."""
FEWEST_COMPARED = 2
"""At least so many."""
JUMP_SLACK = 7.0
"""Standard deviations by which the length of a step's noise may exceed its expectation, about sqrt(parameters)."""


def window(task: Task, batch_size: int, steps: int) -> int:
    """How many consecutive steps of a replay of ``steps`` are compared."""
    rows = max(1, batch_size)
    most = min(
        WINDOW_STEPS,
        WINDOW_BYTES // task.weight_bytes,
        WINDOW_ROWS // rows,
        int(WINDOW_FLOPS / (rows * task.training_flops)),
    )
    return min(steps, max(FEWEST_COMPARED, most))


def replay(
    m: Measurement,
    batches: list[Batch],
    halt: int,
    halted: Mapping[str, np.ndarray],
    ended: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """All timed steps again, untimed, the weights read after every one, and some steps of them in detail: consecutive
    ones, drawn as it goes on, so that no step knows whether it is among them, the one at the halt and the last one.

    Adam's steps do not tell the gradients that it got. There a replay with the task's own constants leaves the weights
    at the halt and at the end, and the steps in detail are those of a second one, of the same rows and the same noise,
    with constants that let the gradients be read (:func:`harness.worker.reading.transparent`).

    Arrays: the weights where the clock halted after ``halt`` steps (``timed``) and where it ended (``timed_end``), and
    those of the replay there (``replayed``, ``replayed_end``); ``steps``: how many, and the halt; ``numbers`` of the
    steps in detail, and for the i-th of them ``i/before``, ``i/after``, ``i/rows``; after the first of them from the
    same weights without noise (``exact``); ``jump``: the longest step of all, over what rows and noise explain, and
    its number.
    """
    chance = random.SystemRandom()
    width = window(m.task, m.request.batch_size, len(batches))
    replayed: Mapping[str, np.ndarray] = {}
    end: Mapping[str, np.ndarray] = {}
    own = m.setting.optimizer
    rate = reading_rate(own, m.setting.learning_rate)
    if not isinstance(own, SGD):
        replayed, end = _own_replay(m, batches, halt)
        m.setting = transparent(m.setting, rate)
    m.reset()
    after = dict(m.adapter.parameters())
    recent = deque([after], maxlen=width + 1)
    first, kept = 0, list(recent)
    detail: dict[int, tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]] = {}
    jump = (0.0, 0.0)
    for t, (indices, mask) in enumerate(batches):
        before = after
        m.adapter.step(indices, mask)
        m.adapter.synchronize()
        after = dict(m.adapter.parameters())
        recent.append(after)
        jump = max(jump, (_length(before, after) / _longest(m, rate, indices, mask), float(t)))
        start = t + 1 - width
        if start >= 0 and chance.randrange(start + 1) == 0:
            first, kept = start, list(recent)
        if t + 1 == halt and isinstance(own, SGD):
            replayed = after
        if t + 1 in (halt, len(batches)):
            detail[t] = before, after
    detail |= {first + i: (kept[i], kept[i + 1]) for i in range(width)}
    numbers = [*range(first, first + width), *(t for t in sorted(detail) if not first <= t < first + width)]
    indices, mask = batches[first]
    m.adapter.build(m.task, replace(m.setting, noise_multiplier=0.0), dict(kept[0]))
    m.adapter.step(indices, mask)
    m.adapter.synchronize()
    parts: dict[str, Mapping[str, np.ndarray]] = {
        "timed": halted,
        "replayed": replayed,
        "timed_end": ended,
        "replayed_end": end or after,
        "exact": dict(m.adapter.parameters()),
    }
    rows: dict[str, np.ndarray] = {}
    for i, t in enumerate(numbers):
        parts[f"{i}/before"], parts[f"{i}/after"] = detail[t]
        indices, mask = batches[t]
        rows[f"{i}/rows"] = indices if mask is None else indices[mask]
    found = {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
    about = {"steps": np.array([len(batches), halt]), "numbers": np.array(numbers), "jump": np.array(jump)}
    return found | rows | about


def _own_replay(
    m: Measurement, batches: list[Batch], halt: int
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The weights at the halt and at the end, with the task's own optimizer."""
    m.reset()
    halted: Mapping[str, np.ndarray] = {}
    for t, (indices, mask) in enumerate(batches):
        m.adapter.step(indices, mask)
        m.adapter.synchronize()
        if t + 1 == halt:
            halted = dict(m.adapter.parameters())
    return halted, dict(m.adapter.parameters())


def _length(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(after[n].astype(np.float64) - before[n]).sum()) for n in before))


def _longest(m: Measurement, rate: float, indices: np.ndarray, mask: np.ndarray | None) -> float:
    """How far one step of ``rate`` can move the weights; without clipping there is no bound."""
    s = m.setting
    if not s.private:
        return math.inf
    rows = len(indices) if mask is None else int(mask.sum())
    noise = s.noise_multiplier * (math.sqrt(m.task.trained_count) + JUMP_SLACK)
    # And what the float32 rounding of the weights adds.
    rounding = 2.0**-23 * math.sqrt(m.task.trained_count)
    return rate / s.batch_size * s.max_grad_norm * (rows + noise) + rounding


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
    measured = timed.seconds
    if request.weights:
        save_weights(request.weights, timed.weights)
    total_steps = sum(m.whole_epoch if made is None else made for made in updates)
    return {
        "state": "ok",
        **(_fault(timed.weights, m.initial, timed.reads, timed.load.share) or fault),
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
        "epsilon_own": _own_epsilon(m.adapter, total_steps, request.delta) if request.private else None,
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
    for indices, mask in batches:
        m.adapter.step(indices, mask)
        m.adapter.synchronize()
    peak = resident.peak()
    memory = {
        **m.adapter.peak_memory().bytes_by_metric,
        # Last: the harness's own figures are nobody else's to give.
        resident.GROWTH: max(0, peak - loaded),
        resident.GROWTH_WITH_COMPILE: max(0, peak - loaded, peak_of_warm_up - loaded),
        resident.KEPT_AFTER_WARM_UP: max(0, kept - loaded),
    }
    if request.snapshot:
        save_weights(request.snapshot, dict(m.adapter.parameters()))
    result: dict[str, Any] = {"state": "ok", "memory": memory}
    if request.sketches:
        moved = {name: value.astype(np.float64) - m.initial[name] for name, value in m.adapter.parameters().items()}
        result["sketch"] = sketch.of(moved)
    return result


def run_gate(request: Request, emit: Emit, line: Line) -> dict[str, Any]:
    """The admission gate of this adapter on this task; needs no data set."""
    from harness.worker.gate.checks import run_gate as checks_of

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


def _own_epsilon(adapter: Adapter, steps: int, delta: float) -> float | None:
    """A library whose accountant fails has no ε of its own; its times stand."""
    try:
        return adapter.epsilon(steps, delta)
    except Exception:
        traceback.print_exc()
        return None


READ_SECONDS = 0.02
READ_BYTES_PER_SECOND = 50e6
"""No reading of the weights, the second included, may take longer than READ_SECONDS and what their bytes need."""
DEFERRED_SECONDS = 0.005
DEFERRED_SHARE = 0.02
"""Of the timed stretch: by so much the first reading may take longer than the second."""


def _fault(
    weights: dict[str, np.ndarray], initial: dict[str, np.ndarray], reads: list[Read], foreign_share: float
) -> dict[str, Any]:
    """Why the timed run itself must be rejected, or nothing.

    ``initial``: the starting weights, empty where the steps had nothing to move them. On a busy machine a slow reading
    proves nothing by itself: then the process must also have been at work during it.
    """
    if not all(np.isfinite(value).all() for value in weights.values()):
        return {"state": "rejected", "reason": "the weights after the timed steps are not finite."}
    if all(np.array_equal(weights[name], initial[name]) for name in initial) and initial:
        return {"state": "rejected", "reason": "the timed steps left every weight unchanged."}
    is_quiet = foreign_share <= DISTURBED_SHARE
    longest = READ_SECONDS + sum(value.nbytes for value in weights.values()) / READ_BYTES_PER_SECOND
    for read in reads:
        slow = max(read.first, read.second)
        if slow > longest and (is_quiet or read.cpu > longest):
            reason = f"reading the weights took {slow:.3f} s (limit {longest:.3f} s): work was deferred past the clock."
            return {"state": "rejected", "reason": reason, "deferred": True}
        limit = DEFERRED_SECONDS + DEFERRED_SHARE * read.timed
        extra = read.first - read.second
        if extra > limit and (is_quiet or read.extra_cpu > limit):
            reason = (
                f"reading the weights after the clock stopped took {extra:.3f} s longer than a second time (limit "
                f"{limit:.3f} s): work was deferred past the clock."
            )
            return {"state": "rejected", "reason": reason, "deferred": True}
    return {}


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
