"""The module around one that ``torch.distributed.fsdp.fully_shard`` spreads over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

from dpcore.distributed import Ranks
from dpcore.errors import UnsupportedError
from dpcore.reduction import ModuleInParts, Sharded


class ShardedModule(ModuleInParts):
    """``module``, every parameter of which is sharded, with the whole parameters as its own.

    ``reduction``: knows the sharded parameter of every whole one. UnsupportedError where a parameter is not sharded, or
    not over one mesh as data parallelism does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        gather_nothing(module)
        sharded = dict(module.named_parameters())
        mesh = _mesh_of(sharded.values())
        modules, units = zip(*units_of(module), strict=True)
        whole = {name: param for unit in units for name, param in unit.items()}
        self._whole = {f"module.{name}": whole[name] for name in sharded}
        self.ranks = Ranks(mesh.device_type, mesh.get_group() if mesh.ndim == 1 else None, sharded=True)
        of_shards, *of_copies = (Ranks(mesh.device_type, mesh.get_group(d)) for d in reversed(range(mesh.ndim)))
        self.reduction = Sharded(
            {whole[name]: p for name, p in sharded.items()},
            dict(zip(modules, ([*unit.values()] for unit in units), strict=True)),
            of_shards,
            self.ranks,
            of_copies[0] if of_copies else None,
        )
        self.shards = self.reduction.shards

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The whole parameters; their storage is empty while they are not gathered."""
        for name, param in self._whole.items():
            yield f"{prefix}.{name}" if prefix else name, param


def _mesh_of(params: Iterable[Parameter]) -> Any:
    """Return the one mesh over which all are sharded; UnsupportedError where there is none."""
    params = [*params]
    found = {(p.device_mesh, tuple(map(type, p.placements))) if isinstance(p, DTensor) else None for p in params}
    mesh: Any
    mesh, placements = found.pop() or (None, ())
    if found or placements not in ((Shard,), (Replicate, Shard)):
        raise UnsupportedError(
            "dpcore trains sharded models whose every parameter is sharded over one mesh, with one dimension or "
            "with two (copies, shards); call fully_shard on the root module too, with one mesh for all, after "
            "parallelize_module where there is any."
        )
    if len(placements) == 2 and mesh.size() != dist.get_world_size():
        raise UnsupportedError(
            f"The mesh of copies and shards has {mesh.size()} of {dist.get_world_size()} processes, and all of them "
            "must train together; make the mesh of all processes."
        )
    if mesh.size() != dist.get_world_size():
        warnings.warn(
            f"The model's mesh has {mesh.size()} of {dist.get_world_size()} processes: others train a model of their "
            "own, if any, and a release of several costs the sum of their budgets. For groups that train copies of one "
            "model together give fully_shard the mesh of two dimensions (copies, shards), not a part of it.",
            stacklevel=5,
        )
    for param in params:
        check_not_offloaded(param, mesh)
    return mesh


def check_not_offloaded(param: Parameter, mesh: Any) -> None:
    """UnsupportedError where a shard is not where the model computes."""
    if param.device.type != mesh.device_type:
        raise UnsupportedError(
            f"The shards are not on {mesh.device_type}, where the model computes (CPUOffloadPolicy) and their sums are "
            "formed; leave the offload policy out."
        )


def gather_nothing(module: nn.Module) -> None:
    """A pass without a backward one leaves the root's parameters whole."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def units_of(module: nn.Module) -> Iterator[tuple[FSDPModule, dict[str, Parameter]]]:
    """The modules that are gathered, with whole parameters by name: the objects are the same at every later pass."""
    sharded = {*module.parameters()}
    for prefix, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            inside = nn.Module.named_parameters(part, prefix)  # type: ignore[arg-type]
            yield part, {name: p for name, p in inside if p not in sharded}
            part.reshard()
