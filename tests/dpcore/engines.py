"""Answer what ``ranks.py`` asks of engines alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dpcore import Engine
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpcore.noise import GaussianNoise, SecureNoise
from tests.dpcore.ranks import CLIP, DIVISOR, RATE, WORLD, data, model, refusal, sharding, ways, weights


def _losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def engine_of(module: nn.Module, sigma: float = 1.0, **options: Any) -> Engine:
    given = {"max_grad_norm": CLIP, "expected_batch_size": DIVISOR, "noise": GaussianNoise(7)} | options
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    return Engine(module, _losses, noise_multiplier=sigma, optimizer=optimizer, **given)


def held(how: str) -> nn.Module:
    module = model(torch.float32)
    if how == "replicated":
        return DPDDP(module)
    for layer in (module[0], module[4], module) if how != "alone" else ():  # type: ignore[index]
        fully_shard(layer, **sharding(how))
    return module


def train_by_engine(alone: bool, how: str = "replicated", **options: Any) -> dict[str, Any]:
    """Weights after each of eight steps of Engine, and the noise of an empty batch behind them."""
    module = held("alone" if alone else how)
    engine = engine_of(module, **options)
    loader = DPDataLoader(data(torch.float32), sample_rate=RATE, seed=5, distributed=not alone, shares="dealt", steps=8)
    history, drawn = [], []
    for x, y, number in loader:
        engine.step(x, y)
        history.append(weights(module))
        drawn.append(number.tolist())
    x, y, _ = data(torch.float32)[:0]
    engine.privatize(x, y)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    noise = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads])
    return {"weights": torch.stack(history), "batches": drawn, "noise": noise}


def failed_in_shards() -> dict[str, Any]:
    """On the last rank alone a loss fails, in the first piece or the last one, or a batch lacks a target."""
    rank, last = dist.get_rank(), WORLD - 1
    x, y, _ = data(torch.float32)[rank::WORLD]
    reports: dict[str, Any] = {}
    truth = engine_of(held("sharded"), physical_batch_size=3)
    truth.step(x[:8], y[:8])
    for what, failing in {"first": 0, "last": 7, "targets": None}.items():
        engine = engine_of(held("sharded"), physical_batch_size=3)
        targets = y[:8].clone()
        if rank == last and failing is not None:
            targets[failing] = 9  # there is no such class
        given = targets[:7] if rank == last and failing is None else targets
        try:
            engine.step(x[:8], given)
        except Exception as error:
            reports[what] = {"said": str(error), "steps": engine.steps}
        engine.step(x[:8], y[:8])
        reports[what]["same"] = torch.equal(weights(engine.model), weights(truth.model))
    return reports


def found() -> dict[str, Any]:
    """Engine on copies, in pieces of one plan or of three examples, with a seed and with a secret one."""
    reports: dict[str, Any] = {"same": train_by_engine(False), "pieces": train_by_engine(False, physical_batch_size=3)}
    for how in ways()[1:]:
        reports[how] = train_by_engine(False, how, physical_batch_size=2)
    reports["secret"] = train_by_engine(False, noise=None)
    reports["secure"] = train_by_engine(False, noise=SecureNoise())
    if WORLD > 1:
        rank = dist.get_rank()
        x, y, _ = data(torch.float32)[:]
        mine = slice(rank, None, WORLD)
        reports["same batch"] = refusal(lambda: engine_of(DPDDP(model(torch.float32))).step(x[:4], y[:4]))
        reports["sigma"] = refusal(lambda: engine_of(DPDDP(model(torch.float32)), 1.0 + rank).step(x[mine], y[mine]))
        engine = engine_of(DPDDP(model(torch.float32)))
        engine.steps = rank  # a rank that has left a batch out
        before = weights(engine.model)
        reports["steps"] = refusal(lambda: engine.step(x[mine], y[mine]))
        assert torch.equal(weights(engine.model), before) and not engine.accumulator.flat.any()
        if "sharded" in ways():
            reports["failed"] = failed_in_shards()
            reports["same batch in shards"] = refusal(lambda: engine_of(held("sharded")).step(x[:4], y[:4]))
            model_of_last = held("hybrid")
            if rank + 1 == WORLD:
                with torch.no_grad():
                    next(reversed([*model_of_last.parameters()])).to_local().add_(1.0)  # type: ignore[union-attr]
            engine = engine_of(model_of_last)
            reports["unequal copies"] = refusal(lambda: engine.step(x[mine], y[mine]))
            reports["sigma in shards"] = refusal(lambda: engine_of(held("sharded"), 1.0 + rank).step(x[mine], y[mine]))
    return reports
