"""Models whose parameters ``torch.distributed.fsdp.fully_shard`` spreads over the ranks.

A layer's parameters are whole while it computes and in shards otherwise, and the two are different objects: autograd
and the recording see the whole ones, the optimiser holds the shards. Every rank has whole gradients of its own
examples, so that norms and clipping are those of one process; the clipped sums are whole too (one buffer of the
model's size on every rank), and each rank updates its shard of their total. Parameters and the optimiser's state stay
sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.optimizers.wrapper import OptimizerWrapper


class ShardedModule(nn.Module):
    """``module``, every parameter of which is sharded, with the whole parameters as its own.

    ``shards``: whole parameter -> the sharded one. UnsupportedError for meshes with more than one dimension, and where
    a parameter is not sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _gather_nothing(module)
        sharded = dict(module.named_parameters())
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in sharded.values()}
        mesh = meshes.pop()
        if meshes or mesh is None or mesh.ndim != 1:
            raise UnsupportedError(
                "dpcore trains sharded models whose every parameter is sharded over one mesh with one dimension; call "
                "fully_shard on the root module too, with one mesh for all (and no tensor parallelism)."
            )
        self.module = module
        whole = _whole_parameters(module)
        self._whole = {f"module.{name}": whole[name] for name in sharded}
        self.shards = {whole[name]: p for name, p in sharded.items()}
        self.ranks = Ranks(mesh.device_type, mesh.get_group(), sharded=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The whole parameters; their storage is empty while they are not gathered."""
        for name, param in self._whole.items():
            yield f"{prefix}.{name}" if prefix else name, param


class ShardedOptimizer(OptimizerWrapper):
    """``optimizer`` over shards, as one over whole parameters: a step scatters their gradients."""

    param_groups: list[dict[str, Any]] = []  # noqa: RUF012  its own: the wrapped one's hold the shards

    def __init__(self, optimizer: Optimizer, module: ShardedModule) -> None:
        self.optimizer = optimizer
        self.shards = module.shards
        whole = {shard: p for p, shard in module.shards.items()}
        self.param_groups = [
            {**group, "params": [whole.get(p, p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        self._released: dict[Parameter, tuple[Tensor, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        self._hand_on_settings()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        for mine, group in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    @property
    def inner(self) -> Optimizer:
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for param in self.shards:
            param.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Every shard's part of its whole parameter's gradient, which is then dropped; then the wrapped step."""
        for param, shard in self.shards.items():
            grad, version = self._released.get(shard, (None, 0))
            if shard.grad is not None and (shard.grad is not grad or _version(shard.grad) != version):
                raise PrivacyError(
                    f"A sharded parameter of shape {tuple(shard.shape)} has an ordinary, unclipped gradient: it is "
                    "used by an operation that dpcore has no rule for. Wrap that operation in a module of a kind that "
                    "dpcore knows, or freeze the parameter."
                )
            if param.grad is not None:
                total = param.grad.to(shard.dtype)
                shard.grad = distribute_tensor(total, *_layout(shard), src_data_rank=None)
                self._released[shard] = (shard.grad, _version(shard.grad))
                param.grad = None
        self._hand_on_settings()
        self.optimizer.step()

    def _hand_on_settings(self) -> None:
        """Learning rates and the like may have been changed by a scheduler."""
        for mine, group in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group.update({name: value for name, value in mine.items() if name != "params"})


def shard(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Both as they are, or with whole parameters where a part of the module is sharded."""
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        return module, optimizer
    wrapped = ShardedModule(module)
    return wrapped, ShardedOptimizer(optimizer, wrapped)


def _layout(shard: Tensor) -> tuple[Any, Any]:
    assert isinstance(shard, DTensor)
    return shard.device_mesh, shard.placements


def _version(grad: Tensor) -> int:
    return grad.to_local()._version if isinstance(grad, DTensor) else grad._version


def _gather_nothing(module: nn.Module) -> None:
    """A pass without a backward one leaves the root's parameters whole."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _whole_parameters(module: nn.Module) -> dict[str, Parameter]:
    """Whole parameters by name, gathered once; the objects are the same at every later pass."""
    found: dict[str, Parameter] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            inside = nn.Module.named_parameters(part, prefix)  # type: ignore[arg-type]
            found |= {name: p for name, p in inside if not isinstance(p, DTensor)}
            part.reshard()
    return found
