"""The batches of an epoch, and the order in which they are made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from harness.contract import Setting
from harness.tasks import known_task
from harness.worker import sampling
from harness.worker.clock import Batch
from harness.worker.request import Request

MINIMUM_STEPS = 4
REPLAYED_STEPS = MINIMUM_STEPS
"""The first steps of the first epoch, after which the weights are read for comparison with the untimed replay. Every
timed process makes at least so many, so that both have the same steps behind them."""


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
        threads=max(1, request.threads // request.world_size),
        precision=task.precision,
        padded_sizes=sizes,
        optimizer=task.optimizer,
        world_size=request.world_size,
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
    read. Under a protocol whose order is known anyway they stay as they are.

    Between turns, which are short, the pairs of :func:`harness.worker.sampling.balanced` stay together, so that no turn
    has more rows than another; of an odd number the first batch, whose partner is done, stays where it is."""
    if request.sampling != "poisson":
        return batches
    rng = np.random.default_rng(order)
    if request.turn_seconds is None:
        return [batches[i] for i in rng.permutation(len(batches)).tolist()]
    first = len(batches) % 2
    pairs = [first + 2 * i for i in rng.permutation(len(batches) // 2).tolist()]
    flips = rng.integers(2, size=len(pairs)).tolist()
    return batches[:first] + [batches[i + j] for i, flip in zip(pairs, flips, strict=True) for j in (flip, 1 - flip)]


def timed_batches(
    request: Request, setting: Setting, steps: int, epochs: int, starts: Sequence[tuple[int, int]]
) -> list[Batch]:
    """All timed steps of a process in their order. ``starts``: (epoch, steps of it that are done) of each stretch."""
    found: list[Batch] = []
    for epoch in range(epochs):
        batches = epoch_batches(request, setting, epoch, steps)
        for done in (done for of_epoch, done in starts if of_epoch == epoch):
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
