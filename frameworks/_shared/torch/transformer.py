"""The parts of transformers and residual networks in plain PyTorch, as its users write them: ``nn.Linear``,
``nn.Embedding``, ``nn.LayerNorm``, ``nn.RMSNorm`` and ``scaled_dot_product_attention``, in modules without parameters
of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from harness import network


class Residual(nn.Module):
    """shortcut(x) + body(x); a shortcut without layers is x itself."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut if len(shortcut) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x)


class SpaceAsTime(nn.Module):
    """[B, C, H, W] to [B, H*W, C]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


class Views(nn.Module):
    """[B, C, H, W] to [B * count, C, H, W], the views of an example one after the other."""

    def __init__(self, layer: network.Views) -> None:
        super().__init__()
        self.count = layer.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        mirrored = x.flip(-1)
        views = [
            F.pad(mirrored if k % 2 else x, (k // 2, 0, k // 2, 0))[..., :height, :width] for k in range(self.count)
        ]
        return torch.stack(views, 1).flatten(0, 1)


class Positions(nn.Module):
    """Adds a trained vector for each position."""

    def __init__(self, layer: network.Positions) -> None:
        super().__init__()
        self.table = nn.Embedding(layer.length, layer.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # An entry per example: what hooks see has a batch dimension, and Opacus' ghost norm views it.
        places = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)
        return x + self.table(places)


class TokenTypes(nn.Module):
    """Adds the vector of the first kind to every token."""

    def __init__(self, layer: network.TokenTypes) -> None:
        super().__init__()
        self.table = nn.Embedding(layer.kinds, layer.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device))


class LoraLinear(nn.Module):
    """A linear map with a low-rank adapter beside it, three ``nn.Linear`` as in PEFT."""

    def __init__(self, layer: network.Linear) -> None:
        super().__init__()
        self.base = nn.Linear(layer.in_features, layer.out_features, layer.bias)
        self.lora_a = nn.Linear(layer.in_features, layer.lora, bias=False)
        self.lora_b = nn.Linear(layer.lora, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + network.LORA_SCALE * self.lora_b(self.lora_a(x))


def linear(layer: network.Linear) -> nn.Module:
    """A linear map, with its adapter where it has one."""
    return LoraLinear(layer) if layer.lora else nn.Linear(layer.in_features, layer.out_features, layer.bias)


class Bags(nn.Module):
    """[B, counts + fields * ids] integers to [B, counts + fields * dim]."""

    def __init__(self, layer: network.Bags, table: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layer = layer
        for part in layer.maps:
            self.add_module(part.name.rpartition(".")[2], table(part.num_embeddings, part.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        fields = x[:, layer.counts :].unflatten(1, (-1, layer.ids)).unbind(1)
        # Opacus' ghost norm views the ids of a field, which takes memory of their own.
        found = [table(ids.contiguous()) for table, ids in zip(self.children(), fields, strict=True)]
        # A table that is an ordinary embedding has not summed up yet.
        summed = [vectors if vectors.dim() == 2 else vectors.sum(1) for vectors in found]
        counts = x[:, : layer.counts].to(summed[0].dtype).log1p()
        return torch.cat([counts, *summed], dim=1)


class Attention(nn.Module):
    """Self-attention of [B, T, dim]."""

    def __init__(self, layer: network.Attention) -> None:
        super().__init__()
        self.layer = layer
        for part in layer.maps:
            self.add_module(part.name.rpartition(".")[2], linear(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if layer.rotary:
            cos, sin = rotary(layer, x.shape[1], x)
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        if layer.groups < layer.heads:
            key, value = (part.repeat_interleave(layer.heads // layer.groups, dim=1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=layer.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, width] to [B, heads, T, head]."""
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)


def rotary(layer: network.Attention, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, head] of the angles, in the precision of ``like``."""
    half = layer.head_dim // 2
    rates = layer.rotary ** (-torch.arange(half, device=like.device, dtype=torch.float64) / half)
    angles = torch.arange(length, device=like.device, dtype=torch.float64)[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x with the pairs (first half, second half) of every head turned by the angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SwiGLU(nn.Module):
    """down(SiLU(gate x) * up x)."""

    def __init__(self, layer: network.SwiGLU) -> None:
        super().__init__()
        self.gate, self.up, self.down = (linear(part) for part in layer.maps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
