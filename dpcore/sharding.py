"""Models whose parameters ``torch.distributed.fsdp.fully_shard`` spreads over the ranks.

A layer's parameters are whole while it computes and in shards otherwise, and the two are different objects: autograd
and the recording see the whole ones, the optimiser holds the shards. Every rank has whole gradients of its own
examples, so that norms and clipping are those of one process; what is summed is dealt out to the ranks
(:mod:`dpcore.microbatch.sharded_sums`), and noise and updates are made on shards, in their precision. Over a mesh with
two dimensions (HSDP) ranks of one group hold the shards of one model, and groups a copy each.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpcore.distributed import Ranks
from dpcore.errors import UnsupportedError
from dpcore.optimizers.wrapper import OptimizerWrapper
from dpcore.reduction import InParts
from dpcore.sharded_module import ShardedModule, check_not_offloaded, gather_nothing, units_of
from dpcore.tensor_parallel import ParallelModule


class ShardedOptimizer(OptimizerWrapper):
    """``optimizer`` over shards, as one over the parameters that a pass uses, whose gradients stay empty.

    Settings are the same in both, whichever of them a schedule changes.
    """

    def __init__(self, optimizer: Optimizer, module: ShardedModule | ParallelModule) -> None:
        self.optimizer = optimizer
        self._reduction: InParts = module.reduction
        self._whole = {shard: p for p, shard in module.reduction.shards.items()}
        self._groups: list[dict[str, Any]] = []
        self._agreed: list[dict[str, Any]] = []
        self._agree()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, of the parameters that a pass uses."""
        self._agree()
        return self._groups

    def _agree(self) -> None:
        """Hand on what was changed in one of the two since they last agreed."""
        for group in self.optimizer.param_groups[len(self._groups) :]:
            self._groups.append(dict(group))
            self._agreed.append(_settings(group))
        for k, (mine, wrapped) in enumerate(zip(self._groups, self.optimizer.param_groups, strict=False)):
            # Those that the wrapped step would change: who looks for added ones has to see them.
            mine["params"] = [self._whole.get(p, p) for p in wrapped["params"]]
            for name, value in {**_settings(wrapped), **_settings(mine)}.items():
                before = self._agreed[k].get(name)
                is_mine = name in mine and value is not before and value != before
                mine[name] = wrapped[name] = value if is_mine else wrapped.get(name, value)
            self._agreed[k] = _settings(mine)

    def state_dict(self) -> dict[str, Any]:
        self._agree()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        for mine, wrapped in zip(self._groups, self.optimizer.param_groups, strict=True):
            mine.update(_settings(wrapped))
        self._agreed = [_settings(group) for group in self._groups]

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    @property
    def inner(self) -> Optimizer:
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for param in self._reduction.shards:
            param.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The wrapped step, on what was released into the shards' gradients."""
        self._agree()
        self.optimizer.step()
        self._reduction.note_released()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's learning rate and the like."""
    return {name: value for name, value in group.items() if name != "params"}


def shard(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Both as they are, or with the parameters that a pass uses where a part of the module is sharded or parallel."""
    wrapped: ShardedModule | ParallelModule
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        wrapped = _parallel(module) if any(map(_is_in_two, module.parameters())) else ShardedModule(module)
    elif any(isinstance(param, DTensor) for param in module.parameters()):
        wrapped = ParallelModule(module)
    else:
        return module, optimizer
    return wrapped, ShardedOptimizer(optimizer, wrapped)


def _is_in_two(param: Any) -> bool:
    """Return whether a parameter is sharded over the first of two dimensions of a mesh, unlike HSDP's."""
    return isinstance(param, DTensor) and param.device_mesh.ndim == 2 and hasattr(param.placements[0], "dim")


def _parallel(module: nn.Module) -> ParallelModule:
    """Return ``module``, whose layers are split over one dimension of a mesh, and sharded over the other.

    UnsupportedError where a parameter is not sharded so.
    """
    gather_nothing(module)
    sharded: dict[str, Any] = dict(module.named_parameters())
    grids = {param.device_mesh for param in sharded.values() if _is_in_two(param)}
    grid = grids.pop()
    data = dist.get_process_group_ranks(grid.get_group(0))
    for name, param in sharded.items():
        fits = not grids and isinstance(param, DTensor) and hasattr(param.placements[0], "dim")
        if not fits or dist.get_process_group_ranks(param.device_mesh.get_group(0)) != data:
            raise UnsupportedError(
                f"Parameter {name} is not sharded over the dimension of the mesh over which layers that are split "
                'are: give fully_shard mesh["data"] for every part and the root, and parallelize_module '
                'mesh["tensor"], of one mesh of two dimensions.'
            )
        check_not_offloaded(param, grid)
    if any(group != sorted(group) for group in (*grid.mesh.tolist(), *grid.mesh.t().tolist())):
        raise UnsupportedError(f"The mesh has the ranks in the order {grid.mesh.tolist()}; sort them.")
    modules, units = zip(*units_of(module), strict=True)
    held = {name: param for unit in units for name, param in unit.items()}
    of_shards = Ranks(grid.device_type, grid.get_group(0))
    together = {part: [*unit.values()] for part, unit in zip(modules, units, strict=True)}
    return ParallelModule(module, of_shards, {param: held[name] for name, param in sharded.items()}, together)
