"""Run by torchrun, by four processes: tensor parallelism in one dimension of a mesh, data parallelism in the other.

``torchrun ... grids.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each check found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, DistributedSampler

from dpcore import Engine
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from tests.dpcore import parallel
from tests.dpcore.parallel import SHARDS_HERE, Perceptron, Refused, data, made_private, private, train
from tests.dpcore.ranks import refusal, step


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))


def in_copies(module: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """Split layers over pairs of ranks, which are copies of each other."""
    mesh = grid()
    return DPDDP(parallelize_module(module, mesh["tensor"], plan), device_mesh=mesh["data"])


def in_shards(module: nn.Module, plan: dict[str, Any], mesh: DeviceMesh | None = None) -> nn.Module:
    """Split layers over pairs of ranks, and shard the parts over both pairs."""
    mesh = mesh or grid()
    parallelize_module(module, mesh["tensor"], plan)
    for part in (module.head, module):
        fully_shard(part, mesh=mesh["data"])  # type: ignore[arg-type]
    return module


PUT: dict[str, Callable[[nn.Module, dict[str, Any]], nn.Module]] = {
    "copies": in_copies,
    **({"shards": in_shards} if SHARDS_HERE else {}),
}
SAME: dict[str, dict[str, Any]] = {
    "block": {"steps": 2},
    "pieces": {"kind": "perceptron", "max_physical_batch_size": 2, "steps": 2},
    "adaptive": {"kind": "perceptron", "clipping": "adaptive", "sigma": 0.5, "steps": 2},
}
"""Runs that are the same in one process and on a grid."""
MORE: dict[str, dict[str, Any]] = {
    "longer": {"steps": 6},
    "float32": {"kind": "perceptron", "dtype": torch.float32, "steps": 2},
    "empty": {"sample_rate": 1e-9, "steps": 1},
    "automatic pieces": {"max_physical_batch_size": "auto", "steps": 2},
    "by layer": {"kind": "perceptron", "clipping": "per_layer", "max_grad_norm": [0.5] * 9, "steps": 2},
}
"""Others of them."""


def check_same(runs: dict[str, dict[str, Any]] = SAME) -> Any:
    return {how: {name: train(put=put, **options) for name, options in runs.items()} for how, put in PUT.items()}


def check_more() -> Any:
    return check_same(MORE)


def check_owned() -> Any:
    """Return runs whose batches are not followed: every share's examples are its own."""
    return {how: train(steps=2, kind="perceptron", put=put, check_batches=False) for how, put in PUT.items()}


def check_secure() -> Any:
    """Return runs of secure mode, whose batches no two ranks can draw."""
    return {how: train(steps=2, kind="perceptron", put=put, seed=None, secure=True) for how, put in PUT.items()}


def check_noise() -> Any:
    return {how: parallel.check_noise(put=put) for how, put in PUT.items()}


def check_resume_copies(folder: Path) -> Any:
    return parallel.check_resume(folder, put=in_copies)


def check_resume_shards(folder: Path) -> Any:
    return parallel.check_resume(folder, put=in_shards)


def check_keep_copies(folder: Path) -> None:
    parallel.check_keep(folder, put=in_copies)


def check_keep_shards(folder: Path) -> None:
    parallel.check_keep(folder, put=in_shards)


def check_go_on_copies(folder: Path) -> Any:
    return parallel.check_go_on(folder, put=in_copies)


def check_go_on_shards(folder: Path) -> Any:
    return parallel.check_go_on(folder, put=in_shards)


def of_step(
    differ: Callable[[Any, Any], tuple[Any, Any]] = lambda x, y: (x, y),
    change: Callable[[nn.Module], Any] = lambda module: None,
    **options: Any,
) -> str:
    return parallel.of_step(differ, change, **{"put": in_copies} | options)


def of_meshes(tensor: Any, copies: Any = None) -> str:
    """Say how copies over a mesh, if any, are refused of a perceptron whose layers are split over another one."""
    module = parallelize_module(Perceptron(), tensor, Perceptron.PLAN)
    return refusal(lambda: DPDDP(module, device_mesh=copies))


def other_copy(module: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """Put into copies a model of which one has other numbers in its part of a layer that is split."""
    module = in_copies(module, plan)
    moved_copy(module.module)  # type: ignore[arg-type]
    return module


def moved_copy(module: nn.Module) -> None:
    with torch.no_grad():
        module.up.weight.to_local().add_(dist.get_rank() // 2)  # type: ignore[union-attr, operator]


def of_left_out(put: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> str:
    """Say how a step is refused for which the second pair of ranks has left a batch out."""
    _, module, optimizer, loader = private("perceptron", put=put)
    handed_out = iter(loader)
    for _ in range(dist.get_rank() // 2):
        next(handed_out)
    x, y, _ = next(handed_out)
    return refusal(lambda: step(module, optimizer, x, y))


def of_sampler(ranks: int, rank: int) -> str:
    """Say how a loader without Poisson sampling is refused that hands out this part."""
    sampler: Any = DistributedSampler(data(), ranks, rank, shuffle=False)
    loader = DataLoader(data(), batch_size=4, sampler=sampler)
    return refusal(lambda: private(loader=loader, put=in_copies, poisson_sampling=False, sample_rate=None))


def of_orders(epoch: int) -> str:
    """Say how a step is refused for which pairs of ranks take their parts of two orders of the examples."""
    sampler: Any = DistributedSampler(data(), 2, dist.get_rank() // 2)
    sampler.set_epoch(epoch)
    options = {"loader": DataLoader(data(), batch_size=4, sampler=sampler), "sample_rate": None}
    return refusal(lambda: train(1, kind="perceptron", put=in_copies, poisson_sampling=False, **options))


def check_refused() -> Any:
    rank, mesh = dist.get_rank(), grid()
    crossed = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("rows", "columns"))
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("data", "tensor"))
    whole = DPDataLoader(data(), sample_rate=0.25)
    found = {
        "no copies": made_private(parallelize_module(Perceptron(), mesh["tensor"], Perceptron.PLAN)),
        "no mesh": of_meshes(mesh["tensor"]),
        "whole model": refusal(lambda: DPDDP(Perceptron(), mesh["data"])),
        "both dimensions": refusal(
            lambda: DPDDP(parallelize_module(Perceptron(), mesh["tensor"], Perceptron.PLAN), mesh)
        ),
        "one dimension twice": of_meshes(mesh["tensor"], mesh["tensor"]),
        "of another mesh": of_meshes(mesh["tensor"], crossed["columns"]),
        "another order": of_meshes(turned["tensor"], turned["data"]),
        "other inputs": of_step(lambda x, y: (x.roll(rank, 0), y)),
        "other targets": of_step(lambda x, y: (x, y.roll(rank, 0))),
        "other seeds": refusal(lambda: private(put=in_copies, seed=rank)),
        "other seeds of copies": refusal(lambda: private(put=in_copies, seed=rank // 2)),
        "another copy": refusal(lambda: private("perceptron", put=other_copy)),
        "another copy since then": of_step(change=moved_copy),
        "left out": of_left_out(in_copies),
        "whole loader": refusal(lambda: private(loader=whole, put=in_copies)),
        "a part for each rank": of_sampler(4, rank),
        "one part for all": of_sampler(2, 0),
        "two orders": of_orders(rank // 2),
        "partial gradient": of_step(make=Refused),
        "small partial gradient": of_step(make=partial(Refused, 0.01)),
        "penalty": parallel.of_penalty(put=in_copies),
    }
    return found | refused_in_shards() if SHARDS_HERE else found


def refused_in_shards() -> dict[str, str]:
    rank = dist.get_rank()
    of_shards = partial(of_step, put=in_shards)
    in_part = parallelize_module(Perceptron(), (mesh := grid())["tensor"], Perceptron.PLAN)
    fully_shard(in_part.up, mesh=mesh["data"])
    turned = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("data", "tensor"))
    return {
        "in part": made_private(in_part),
        "another order of shards": made_private(in_shards(Perceptron(), Perceptron.PLAN, turned)),
        "around shards": refusal(lambda: DPDDP(in_shards(Perceptron(), Perceptron.PLAN), mesh["data"])),
        "other whole weights": refusal(lambda: private("perceptron", put=in_shards, make=of_rank)),
        "other inputs of shards": of_shards(lambda x, y: (x.roll(rank, 0), y)),
        "other targets of shards": of_shards(lambda x, y: (x, y.roll(rank, 0))),
        "partial gradient of shards": of_shards(make=Refused),
        "small partial gradient of shards": of_shards(make=partial(Refused, 0.01)),
        "other seeds of shards": refusal(lambda: private(put=in_shards, seed=rank)),
        "left out of shards": of_left_out(in_shards),
        "penalty on shards": parallel.of_penalty(put=in_shards),
        "engine": refusal(lambda: Engine(
            in_shards(Perceptron(), Perceptron.PLAN), F.cross_entropy, noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=8,
        )),
        "computed weight": of_shards(make=with_computed_weight),
        "no rule": of_shards(make=lambda: parallel.with_rule_free(Perceptron())),
    }  # fmt: skip


def with_computed_weight() -> nn.Module:
    module = Perceptron()
    weight_norm(module.head)
    return module


def of_rank() -> nn.Module:
    """Return a perceptron whose table is another one on the second rank of each pair."""
    return parallel.moved(Perceptron(), dist.get_rank() % 2)


if __name__ == "__main__":
    parallel.main(globals())
