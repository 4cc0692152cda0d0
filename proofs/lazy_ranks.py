"""Measure a step of lazy tables as copies and in shares: ``torchrun --nproc-per-node 2 -m proofs.lazy_ranks``.

A table of a million rows; ids follow Zipf's law, a half of each batch on each of two ranks. Processor time of a rank,
of all its threads, and time on the clock; median and range of blocks that take turns. And the bytes that a rank holds.
"""

from __future__ import annotations

import statistics
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel
from dpcore.lazy_tables import LazyEngine

ROWS, WIDTH, BATCH, BLOCKS, STEPS = 1_000_000, 64, 2048, 9, 10


def _engine(in_shares: bool) -> LazyEngine:
    inner = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1), nn.Flatten(0))
    model = DifferentiallyPrivateDistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.1, "expected_batch_size": BATCH}
    losses = nn.BCEWithLogitsLoss(reduction="none")
    return LazyEngine(model, losses, tables=["module.0"], optimizer=optimizer, shard_tables=in_shares, **given)


def main() -> None:
    """Print the table, on rank 0."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rng, mine = np.random.default_rng(0), slice(dist.get_rank(), None, dist.get_world_size())
    engines = {what: _engine(what == "shares") for what in ("copies", "shares")}
    found: dict[str, list[tuple[float, float]]] = {}

    def steps(what: str, count: int) -> None:
        for _ in range(count):
            ids = torch.from_numpy(np.minimum(rng.zipf(1.2, BATCH), ROWS) - 1)[mine]
            engines[what].step(ids, torch.ones(len(ids)))

    for what in engines:
        steps(what, 30)
    for _ in range(BLOCKS):
        for what in engines:
            dist.barrier()
            begun = time.process_time(), time.perf_counter()
            steps(what, STEPS)
            ended = time.process_time(), time.perf_counter()
            found.setdefault(what, []).append(tuple(1e3 * (e - b) / STEPS for b, e in zip(begun, ended, strict=True)))
    for what, engine in engines.items():
        engine.flush()
        held = engine.model.module[0].weight.untyped_storage().nbytes() / 1e6  # type: ignore[union-attr, operator, index]
        parts = [f"{statistics.median(of):.1f} [{min(of):.1f}, {max(of):.1f}]" for of in zip(*found[what], strict=True)]
        if dist.get_rank() == 0:
            print(f"{what}: {parts[0]} ms of a rank's processor, {parts[1]} by the clock, {held:.0f} MB of weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
