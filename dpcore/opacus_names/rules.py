"""Opacus' rules of single layers, as functions and in a table: one function of torch's serves them all."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.layers.dp_multihead_attention import SequenceBias
from dpcore.layers.dp_rnn import RNNLinear
from dpcore.rules.custom import Sampler


def grad_sample(layer: nn.Module, activations: Any, backprops: Tensor) -> dict[Parameter, Tensor]:
    """Return {trained parameter: [B, *shape]} of a layer with one input.

    Args:
        layer: The layer.
        activations: Its input [B, ...], or a list with that.
        backprops: The gradient [B, ...] at its output, of every example's own loss.
    """
    given = activations if isinstance(activations, Tensor) else activations[0]
    trained = {n: p.detach() for n, p in layer.named_parameters() if p.requires_grad}

    def one(x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda values: functional_call(layer, values, (x.unsqueeze(0),)), trained)[1]
        return pull(gradient.unsqueeze(0))[0]

    with torch.no_grad():
        found = vmap(one, randomness="same")(given, backprops)
    return {p: found[name] for name, p in layer.named_parameters() if name in found}


def norm_sample(layer: nn.Module, activations: Any, backprops: Tensor) -> dict[Parameter, Tensor]:
    """Return {trained parameter: [B] norms} of what :func:`grad_sample` returns."""
    return {p: g.flatten(1).norm(2, dim=1) for p, g in grad_sample(layer, activations, backprops).items()}


LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.RMSNorm,
    RNNLinear,
    SequenceBias,
)


class Samplers(MutableMapping[type[nn.Module], Sampler]):
    """The rules by class: of the user's own, which can be set, and of torch's layers."""

    def __init__(self, own: dict[type[nn.Module], Sampler], usual: Sampler) -> None:
        self.own = own
        self.usual = dict.fromkeys(LAYERS, usual)

    def __getitem__(self, kind: type[nn.Module]) -> Sampler:
        return self.own[kind] if kind in self.own else self.usual[kind]

    def __setitem__(self, kind: type[nn.Module], sampler: Sampler) -> None:
        self.own[kind] = sampler

    def __delitem__(self, kind: type[nn.Module]) -> None:
        del self.own[kind]

    def __iter__(self) -> Iterator[type[nn.Module]]:
        return iter(self.usual | self.own)

    def __len__(self) -> int:
        return len(self.usual | self.own)


NEVER_CALLED = (
    "add_hooks",
    "capture_activations_hook",
    "capture_backprops_hook",
    "iterate_submodules",
    "rearrange_grad_samples",
)


def refuse_overrides(kind: type) -> None:
    """UnsupportedError where a class of wrappers overrides a method that is never called here."""
    for name in NEVER_CALLED:
        if name in vars(kind):
            raise UnsupportedError(
                f"{kind.__name__} overrides {name}(), which dpcore never calls: it records torch's functions, not "
                "layers. Give a layer a rule of your own by register_grad_sampler, or change p.grad_sample behind "
                "backward()."
            )
