"""One probe of the memory frontier: the worker's own pieces at one physical batch size. Standard library and numpy.

``python -m harness.worker.frontier REQUEST.json``, events as of :mod:`harness.worker.e2e`. After model and data are in
place a ``start-up`` event says what is resident, from which the parent sets the limit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.worker import e2e as worker
from harness.worker import memory, sampling
from harness.worker.clock import Batch, ForeignLoad, timed_steps
from harness.worker.line import Line
from harness.worker.measurement import Measurement
from harness.worker.process import Emit
from harness.worker.request import Request
from harness.worker.result import Probe

UNTIMED_STEPS = 4
"""Steps before the first one that is timed: rule F7 of the protocol. Compilation is in the first, and some libraries
try things out on the first few batches (dpcore on three). Their memory counts, their time does not."""


def probe(request: Request, emit: Emit, line: Line) -> dict[str, Any]:
    """Steps of exactly ``request.batch_size`` examples: peak memory above start-up, and seconds per step.

    After :data:`UNTIMED_STEPS` at least one is timed, or as many as fit ``request.budget_seconds``.
    Python's cycle collector runs as it does for a user: what a framework leaves to it counts as memory.
    """
    m = Measurement(request, emit)
    m.place()
    start_up = memory.steady()
    emit({"event": "start-up", "resident_bytes": start_up + memory.of_files()})
    emit({"event": "phase", "phase": "steps"})
    rng = np.random.default_rng([request.batch_seed, request.batch_size, 0xF20])
    memory.reset_peak()
    first = timed_steps(m.adapter, [_batch(m, rng)])
    timed_steps(m.adapter, [_batch(m, rng) for _ in range(UNTIMED_STEPS - 1)])
    load = ForeignLoad()
    seconds: list[float] = []
    steps = 1
    with load.watch():
        while len(seconds) < steps:
            seconds.append(timed_steps(m.adapter, [_batch(m, rng)]))
            steps = math.ceil((request.budget_seconds or 0.0) / max(seconds[0], 1e-6))
    growth = max(0, memory.peak() - start_up)
    weights = m.adapter.parameters()
    result = {
        "state": "ok",
        "memory": {**m.adapter.peak_memory().bytes_by_metric, memory.GROWTH_WITH_COMPILE: growth},
        "probe": Probe(start_up, first, seconds),
        "foreign_share": load.share,
        "throttled": load.throttled,
    }
    if not all(np.isfinite(value).all() for value in weights.values()):
        result |= {"state": "rejected", "reason": "the weights after the steps are not finite."}
    return result


def _batch(m: Measurement, rng: np.random.Generator) -> Batch:
    """Exactly B rows; padded and masked to just that many where a framework needs it."""
    size = m.request.batch_size
    rows = rng.choice(m.request.dataset_size, size=size, replace=False).astype(np.int64)
    return sampling.pad(rows, (size,)) if m.setting.padded_sizes else (rows, None)


worker.MODES["probe"] = probe

if __name__ == "__main__":
    worker.main()
