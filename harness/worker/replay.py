"""All timed steps once more, without a clock: what the weights must equal."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from harness.optimizer import SGD
from harness.tasks import Task
from harness.worker.clock import Batch
from harness.worker.measurement import Measurement
from harness.worker.reading import reading_rate, transparent

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
    ends: Collection[int],
) -> dict[str, np.ndarray]:
    """All timed steps again, untimed, the weights read after every one, and some steps of them in detail: consecutive
    ones, drawn as it goes on, so that no step knows whether it is among them, the one at the halt and the last one.

    Adam's steps do not tell the gradients that it got. There a replay with the task's own constants leaves the weights
    at the halt and at the end, and the steps in detail are those of a second one, of the same rows and the same noise,
    with constants that let the gradients be read (:func:`harness.worker.reading.transparent`). So it is where
    ``synchronize`` does work for all steps before it: the first replay has it where the clock stopped, which was after
    ``ends`` steps, the second one after every step.

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
    is_read_apart = not isinstance(own, SGD) or m.request.turn_steps > 1
    if is_read_apart:
        replayed, end = _own_replay(m, batches, halt, ends)
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
        if t + 1 == halt and not is_read_apart:
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
    m: Measurement, batches: list[Batch], halt: int, ends: Collection[int]
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The weights at the halt and at the end, with the task's own optimizer, and the stretches that were timed."""
    m.reset()
    halted: Mapping[str, np.ndarray] = {}
    for t, (indices, mask) in enumerate(batches):
        m.adapter.step(indices, mask)
        if t + 1 in ends:
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
