"""One adapter, built and warmed up for one measurement, and how many steps of it are timed."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from harness.contract import Adapter, Unsupported, require
from harness.data.pretrained import starting_parameters
from harness.tasks import TASKS, Task, check_parameters
from harness.worker import sampling
from harness.worker.batches import MINIMUM_STEPS, setting_of, warm_up_batch
from harness.worker.clock import timed_steps
from harness.worker.process import Emit, load_create
from harness.worker.request import Request

CORRELATED = (
    "its noise is correlated over steps, and the comparison of measured steps and every epsilon are those of "
    "independent noise: the gate alone judges it."
)
MOST_EPOCHS = 100
MOST_READ = 2**36
"""Bytes. A replay reads the weights after every timed step, for seconds of each gigabyte: of large weights there are no
more steps than this has room for."""
FIRST_STEP_COUNTS_BELOW = 5
"""Steps of a turn. One of so few takes so long that cold caches are nothing beside it."""

CALIBRATION_STEPS = (2, 4)
CALIBRATION_SECONDS = 15.0
"""At least and at most so many steps show what one costs; beyond the least number only while they took less. The most
is one more than SETTLING_STEPS: who is judged by what is done once gets fewer timed steps than the budget has."""
SETTLING_STEPS = 3
"""Libraries do more in their first steps than in later ones: dpcore looks whether the first three batches mix their
examples, a compiler guesses at the second batch which sizes change."""


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
        if self.adapter.noise_factor(2) is not None:  # of one step none is another's
            raise Unsupported(CORRELATED)
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
        """(seconds of all steps, seconds of the shortest, how many). The first steps of ordinary size compile, allocate
        and examine, the shortest one shows what a step costs."""
        self.emit({"event": "phase", "phase": "warm-up"})
        batch = warm_up_batch(self.request, self.setting, self.request.batch_size)
        least, most = CALIBRATION_STEPS
        each = self.request.turn_steps
        seconds: list[float] = []
        while len(seconds) < least or (len(seconds) < most and sum(seconds) < CALIBRATION_SECONDS):
            seconds.append(timed_steps(self.adapter, [batch] * each))
        return sum(seconds), min(seconds) / each, len(seconds) * each

    def warm_up(self, sizes: Sequence[int]) -> tuple[float, int]:
        """(seconds, steps of the expected size that they equal): one step of every other compiled size that occurs in
        the batches. Where none is compiled and a part of an epoch is timed, steps of sizes as an epoch draws them, its
        largest first: who asks for memory when a batch is larger than all before does so in most of the steps that are
        timed, and in hardly any of an epoch."""
        nominal = self.request.batch_size
        ordinary, _ = warm_up_batch(self.request, self.setting, nominal)
        others = [size for size in sizes if size != len(ordinary)]
        if not sizes and self.request.is_partial and self.request.sampling == "poisson":
            deviation = math.sqrt(nominal * max(0.0, 1 - nominal / self.request.dataset_size))
            # Half of all epochs have none that is larger.
            largest = NormalDist().inv_cdf(0.5 ** (1 / self.whole_epoch))
            others = [max(1, round(nominal + k * deviation)) for k in (largest, -1.0, largest / 3, largest / 2)]
        extra = [warm_up_batch(self.request, self.setting, size) for size in others]
        return timed_steps(self.adapter, extra), len(extra) if sizes else round(sum(others) / nominal)

    def steps(self, step_seconds: float | None) -> int:
        if self.request.steps is not None:
            return min(self.whole_epoch, self.request.steps)
        if self.request.budget_seconds is None or step_seconds is None:
            return self.whole_epoch
        wanted = 2 * math.ceil(self.request.budget_seconds / max(step_seconds, 1e-6) / 2)  # even: see `balanced`
        least = MINIMUM_STEPS + (self.request.turn_steps if self.request.turn_steps > 1 else 0)  # the first, and a turn
        return min(self.whole_epoch, max(least, min(wanted, self._most_steps)))

    @property
    def _most_steps(self) -> int:
        return MOST_READ // self.task.weight_bytes // 2 * 2

    def turn(self, step_seconds: float | None) -> int:
        """Steps of a turn: as many as fit into its seconds, and at least those of the request. Where they are more than
        a few, the first of them is not counted, because it finds caches that are another process's; then those that are
        counted are an odd number, so that the turn has whole pairs of balanced batches."""
        assert self.request.turn_seconds is not None and step_seconds is not None
        fitting = max(self.request.turn_steps, round(self.request.turn_seconds / max(step_seconds, 1e-6)))
        return 2 * math.ceil(fitting / 2) if fitting >= FIRST_STEP_COUNTS_BELOW else max(1, fitting)

    def epochs(self, step_seconds: float | None) -> int:
        """As many as are asked for; where the budget lasts for more than one, as many as fit, because the fifth of a
        second that an epoch of a small model takes says little of what its steps cost."""
        if self.request.steps is not None or self.request.budget_seconds is None or step_seconds is None:
            return self.request.epochs
        fitting = int(self.request.budget_seconds / max(self.whole_epoch * step_seconds, 1e-6))
        return max(self.request.epochs, min(MOST_EPOCHS, fitting, self._most_steps // self.whole_epoch))

    def uncounted(self, turn: int) -> int:
        """Return how many steps of a turn are not counted, the first turn aside: none where ``synchronize`` does work
        for all steps before it, so that nobody would count that of the first one."""
        return int(turn >= FIRST_STEP_COUNTS_BELOW and self.request.turn_steps == 1)


def turn_length(left: int, turn: int) -> int:
    """Steps of the next turn, of ``turn`` steps, where so many are left: the last one is longer or shorter by half."""
    return left if left < 1.5 * turn + 1 else turn


def own_epsilon(adapter: Adapter, steps: int, delta: float) -> float | None:
    """A library whose accountant fails has no ε of its own; its times stand."""
    try:
        return adapter.epsilon(steps, delta)
    except Exception:
        traceback.print_exc()
        return None
