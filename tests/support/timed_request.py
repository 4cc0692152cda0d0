"""The request of a timed process, for tests of what it makes of it."""

from __future__ import annotations

from harness.tasks import Task
from harness.worker.gate import pool as gate_pool
from harness.worker.request import Request


def timed_request(task: Task, batch_size: int, learning_rate: float) -> Request:
    """Return the request of a cell of ``task``."""
    return Request(
        mode="time",
        folder="",
        variant="",
        private=True,
        static_shapes=False,
        task=task.name,
        batch_size=batch_size,
        dataset_size=gate_pool.POOL_SIZE,
        sampling="poisson",
        warm_up=True,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
        learning_rate=learning_rate,
        delta=1e-5,
        device="cpu",
        threads=1,
        initial_seed=3,
        batch_seed=4,
        noise_seed=5,
    )
