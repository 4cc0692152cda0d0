"""Models of whose layers every rank holds a part: ``parallelize_module`` with ColwiseParallel and RowwiseParallel.

Seen from a rank such a layer is an ordinary one with a smaller weight, which the recording knows: torch's hooks around
it exchange inputs and outputs, and between them the layer computes on local tensors. All ranks work on the same
examples, and their gradients of a split weight are blocks of the whole one
(:mod:`dpcore.microbatch.parallel_sums`). A row-wise layer's bias is the first rank's alone. Where the layers are split
over one dimension of a mesh, ranks along the other one train copies of the model, each with its share of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel, Ranks, fingerprint, grid_of
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.backward_pass import owner_of
from dpcore.reduction import ModuleInParts, Parallel, ParallelSharded

STYLES: dict[type[nn.Module], dict[int, tuple[Any, tuple[Any, ...], Any]]] = {
    nn.Linear: {
        0: (Replicate(), (Shard(-1), Replicate()), Shard(0)),
        1: (Shard(-1), (Replicate(),), Replicate()),
    },
    nn.Embedding: {0: (Replicate(), (Replicate(),), None), 1: (Replicate(), (Shard(-1), Replicate()), None)},
}
"""Layouts of inputs, outputs and bias, for a layer's class and the dimension in which its weight is split."""
UNDERSTOOD = (
    "dpcore trains nn.Linear and nn.Embedding in ColwiseParallel or RowwiseParallel with their default layouts "
    "(and output_layouts=Replicate()), plain tensors between layers, all else whole on every rank; no sequence, "
    "context, pipeline or loss parallelism, and fully_shard over the other dimension of one mesh alone."
)


class ParallelModule(ModuleInParts):
    """``module``, some layers of which are split over the ranks, with this rank's parts as its parameters.

    ``reduction``: knows the DTensor of every part. UnsupportedError where a layer is split in another way than is
    understood.

    Args:
        module: The model.
        copies: Those that train the same parts on other examples, where there are any.
        held: For every parameter that is stepped the one that is used in a pass, where it is another.
        units: The used ones that are gathered together.
    """

    def __init__(
        self,
        module: nn.Module,
        copies: Ranks | None = None,
        held: Mapping[Parameter, Any] | None = None,
        units: Mapping[Any, Sequence[Any]] = MappingProxyType({}),
    ) -> None:
        if isinstance(module, DifferentiallyPrivateDistributedDataParallel):
            copies, module = module.ranks, module.module
        super().__init__(module)
        held = {p: p for p in module.parameters()} if held is None else held
        self.shards = {p: stepped for stepped, p in held.items()}
        split = {p for p in held.values() if isinstance(p, DTensor)}
        self.ranks = grid_of(_mesh_of(split), copies)
        parts = self.ranks.parts
        assert parts is not None
        self._parts = {p: Parameter(p._local_tensor.detach(), requires_grad=p.requires_grad) for p in split}
        self._used = {key: self._parts.get(p, p) for stepped, p in held.items() for key in (stepped, p)}
        if any(map(_leaves_a_rank_out, split)):  # found by all ranks, none of which waits for another
            raise UnsupportedError("A rank has no row of a layer that is split; use fewer ranks, or leave it whole.")
        self.lengths_of_ranks = set().union(*self.ranks.gather({n for p in self._parts.values() for n in p.shape}))
        """Of dimensions of parts: all ranks look at the model on equally many examples, which are as many as none."""
        of_first: set[Parameter] = set()
        for name, layer in module.named_modules():
            params = {n: held[p] for n, p in layer._parameters.items() if p is not None}
            if (output := _output_layout(name, layer, params)) is not None:
                layer.forward = ParallelLayer(layer, params, output, self._parts, parts)
                of_first |= layer.forward.of_first
        shards = {self._used[p]: stepped for stepped, p in held.items() if self._used[p] is not stepped}
        of_split = {part for p, part in self._parts.items() if not p.placements[0].is_replicate()}
        self.reduction = Parallel(shards, of_split, of_first, self.ranks)
        if units:
            used = {part: [self._used[p] for p in unit] for part, unit in units.items()}
            self.reduction = ParallelSharded(shards, of_split, of_first, self.ranks, used)
        self.ranks.agree({"the weights": fingerprint(self.reduction.alike(self.parameters()))})
        self.reduction.check_weights(self.parameters())

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The parameters that a pass uses: parts in the place of DTensors."""
        for name, param in self.module.named_parameters(f"{prefix}.module" if prefix else "module", *args, **kwargs):
            yield name, self._used.get(param, param)


class ParallelLayer:
    """The forward pass of ``layer`` between torch's hooks, on this rank's ``parts`` of its parameters ``shards``.

    ``of_first``: those that the first rank alone uses.
    """

    def __init__(
        self, layer: nn.Module, shards: dict[str, Any], output: Any, parts: Mapping[Any, Parameter], ranks: Ranks
    ) -> None:
        self.layer, self.shards, self.output, self.ranks = layer, shards, output, ranks
        self.parts = {name: parts[shard] for name, shard in self.shards.items()}
        weight = self.shards["weight"]
        self.mesh, self.dim, self.shape = weight.device_mesh, weight.placements[0].dim, weight.shape
        by_rows = isinstance(layer, nn.Linear) and self.dim == 1
        self.of_first = {self.parts["bias"]} if by_rows and "bias" in self.parts else set()

    def __call__(self, x: Any) -> Any:
        if not any(owner_of(part) is not None for part in self.parts.values()):
            return type(self.layer).forward(self.layer, x)  # as torch does: nothing of it is recorded
        for name, part in self.parts.items():
            self._check(self.layer._parameters[name], self.shards[name], part)
        if isinstance(self.layer, nn.Linear):
            return self._linear(x)
        return self._looked_up(x.to_local())

    def _check(self, now: Any, shard: Any, part: Parameter) -> None:
        local = shard._local_tensor
        is_same = now is shard and (local.dtype, local.shape) == (part.dtype, part.shape)
        if not is_same or local.data_ptr() != part.data_ptr():
            raise PrivacyError(
                f"A parameter of a tensor-parallel layer, of shape {tuple(part.shape)} on this rank, was replaced or "
                "moved after make_private, which trains what it was; convert or load the model before make_private."
            )

    def _linear(self, x: DTensor) -> DTensor:
        weight, bias = self.parts["weight"], self.parts.get("bias")
        if self.dim == 1:
            return self._joined(F.linear(x.to_local(), weight, bias if self.ranks.rank == 0 else None), Partial())
        local = x.to_local(grad_placements=[Partial()])
        return self._joined(F.linear(local, weight, bias), Shard(local.dim() - 1))

    def _looked_up(self, ids: Tensor) -> DTensor:
        weight = self.parts["weight"]
        padding: int | None = self.layer.padding_idx  # type: ignore[assignment]
        if self.dim == 1:
            return self._joined(F.embedding(ids, weight, padding), Shard(ids.dim()))
        first = self.ranks.rank * -(-self.shape[0] // self.ranks.size)
        inside = (ids >= first) & (ids < first + len(weight))
        own = None if padding is None or not first <= padding < first + len(weight) else padding - first
        found = F.embedding(torch.where(inside, ids - first, 0), weight, own)
        return self._joined(found.masked_fill(~inside.unsqueeze(-1), 0.0), Partial())

    def _joined(self, out: Tensor, placement: Any) -> DTensor:
        """This rank's part of an output, in the layout that torch's hook hands on as it is."""
        whole = self.shape[1 if isinstance(self.layer, nn.Embedding) else 0]
        shape = torch.Size((*out.shape[:-1], whole))
        strides = torch.empty(shape, device="meta").stride()
        found = DTensor.from_local(out, self.mesh, [placement], run_check=False, shape=shape, stride=strides)
        return found.redistribute(placements=[self.output]) if self.output.is_replicate() else found


def _mesh_of(split: Iterable[Any]) -> Any:
    """Return the one mesh over whose ranks parameters are ``split``, of one dimension."""
    meshes = {param.device_mesh for param in split}
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise UnsupportedError(f"The model is split over several meshes, or one of several dimensions. {UNDERSTOOD}")
    return mesh


def _output_layout(name: str, layer: nn.Module, held: Mapping[str, Any]) -> Any:
    """Return the layout of a split layer's output, whose parameters are ``held``; None of one that each rank has whole.

    UnsupportedError where it is split, or torch changes its activations, in a way that is not understood.
    """
    hooks = [h for of in (layer._forward_pre_hooks, layer._forward_hooks) for h in of.values() if _is_torchs(h)]
    tensors = (*held.values(), *layer._buffers.values())
    kind = type(layer).__mro__[2] if isinstance(layer, FSDPModule) else type(layer)  # which has made a class of its own
    if not hooks and not any(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    try:
        layouts = [_bound(hook) for hook in hooks]
        placed = {name: param.placements for name, param in held.items()}
        (split,) = placed.pop("weight")
        of_input, of_output, of_bias = STYLES[kind][split.dim]
        (_, ((output,), _)) = layouts
        known = [((of_input,), (of_input,)), ((output,), True)]
        understood = layouts == known and output in of_output and placed in ({}, {"bias": (of_bias,)})
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        understood = False
    if not understood or type(vars(layer).get("forward")) not in (type(None), ParallelLayer):
        raise UnsupportedError(
            f"Layer {name!r}, of class {kind.__name__}, is split in another way than is known. {UNDERSTOOD}"
        )
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        raise UnsupportedError(
            f"Table {name!r} has max_norm, scale_grad_by_freq or sparse, and is split; leave it whole."
        )
    return output


def _leaves_a_rank_out(param: DTensor) -> bool:
    (placement,) = param.placements
    if not isinstance(placement, Shard):
        return False
    ranks, length = param.device_mesh.size(), param.shape[placement.dim]
    return bool((ranks - 1) * -(-length // ranks) >= length)


def _is_torchs(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor")


def _bound(hook: Any) -> tuple[Any, ...]:
    """Return what a style has bound for the function that torch's hook around a layer calls."""
    seen = dict(zip(hook.__code__.co_freevars, (cell.cell_contents for cell in hook.__closure__), strict=True))
    return tuple(seen["input_fn" if "input_fn" in seen else "output_fn"].args)
