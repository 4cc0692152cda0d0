"""Models whose parameters ``torch.distributed.fsdp.fully_shard`` spreads over the ranks.

A layer's parameters are whole while it computes and in shards otherwise, and the two are different objects: autograd
and the recording see the whole ones, the optimiser holds the shards. Every rank has whole gradients of its own
examples, so that norms and clipping are those of one process; what is summed is dealt out to the ranks
(:mod:`dpcore.microbatch.sharded_sums`), and noise and updates are made on shards, in their precision. Over a mesh with
two dimensions (HSDP) ranks of one group hold the shards of one model, and groups a copy each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.distributed import Ranks
from dpcore.errors import UnsupportedError
from dpcore.optimizers.wrapper import OptimizerWrapper
from dpcore.reduction import InParts, ModuleInParts, Sharded
from dpcore.tensor_parallel import ParallelModule


class ShardedModule(ModuleInParts):
    """``module``, every parameter of which is sharded, with the whole parameters as its own.

    ``reduction``: knows the sharded parameter of every whole one. UnsupportedError where a parameter is not sharded, or
    not over one mesh as data parallelism does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        _gather_nothing(module)
        sharded = dict(module.named_parameters())
        mesh = _mesh_of(sharded.values())
        modules, units = zip(*_units(module), strict=True)
        whole = {name: param for unit in units for name, param in unit.items()}
        self._whole = {f"module.{name}": whole[name] for name in sharded}
        self.ranks = Ranks(mesh.device_type, mesh.get_group() if mesh.ndim == 1 else None, sharded=True)
        of_shards, *of_copies = (Ranks(mesh.device_type, mesh.get_group(d)) for d in reversed(range(mesh.ndim)))
        self.reduction = Sharded(
            {whole[name]: p for name, p in sharded.items()},
            [[*unit.values()] for unit in units],
            modules,
            of_shards,
            of_copies[0] if of_copies else None,
        )

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The whole parameters; their storage is empty while they are not gathered."""
        for name, param in self._whole.items():
            yield f"{prefix}.{name}" if prefix else name, param


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
        wrapped = ShardedModule(module)
    elif any(isinstance(param, DTensor) for param in module.parameters()):
        wrapped = ParallelModule(module)
    else:
        return module, optimizer
    return wrapped, ShardedOptimizer(optimizer, wrapped)


def _mesh_of(params: Iterable[Parameter]) -> Any:
    """Return the one mesh over which all are sharded; UnsupportedError where there is none."""
    params = [*params]
    found = {(p.device_mesh, tuple(map(type, p.placements))) if isinstance(p, DTensor) else None for p in params}
    mesh: Any
    mesh, placements = found.pop() or (None, ())
    if found or placements not in ((Shard,), (Replicate, Shard)):
        raise UnsupportedError(
            "dpcore trains sharded models whose every parameter is sharded over one mesh, with one dimension or "
            "with two (copies, shards); call fully_shard on the root module too, with one mesh for all (and no tensor "
            "parallelism)."
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
    if any(p.device.type != mesh.device_type for p in params):
        raise UnsupportedError(
            f"The shards are not on {mesh.device_type}, where the model computes (CPUOffloadPolicy) and their sums are "
            "formed; leave the offload policy out."
        )
    return mesh


def _gather_nothing(module: nn.Module) -> None:
    """A pass without a backward one leaves the root's parameters whole."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _units(module: nn.Module) -> Iterator[tuple[FSDPModule, dict[str, Parameter]]]:
    """The modules that are gathered, with whole parameters by name: the objects are the same at every later pass."""
    for prefix, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            inside = nn.Module.named_parameters(part, prefix)  # type: ignore[arg-type]
            yield part, {name: p for name, p in inside if not isinstance(p, DTensor)}
            part.reshard()
