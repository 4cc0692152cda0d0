"""Whether a function that ran again has brought the same tensors, told by a few numbers of each that are kept.

Of a tensor [B, ..., n] they are, by example, two products aᵀ X b with random vectors a, of its positions, and b, of its
features. Tensors of the same bits have the same numbers. Those of tensors that differ by Δ are off by about |Δ|, but
for a chance of about |X| u / |Δ| in each of the two, u being the roundoff, to look the same. (Plain sums would not tell
an order of positions from another.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.numerics.precision import full_precision, may_be_lowered
from dpcore.tape.uses import Saved, Use

PRODUCTS = 2
TOLERATED_UNITS, MOST_TOLERATED = 1024, 1e-2
"""By how much of its length a tensor may differ, in units of its precision: GPUs may add in another order."""


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much of its length a tensor of that type may differ from run to run."""
    if dtype == torch.float32 and may_be_lowered():
        return MOST_TOLERATED
    return min(MOST_TOLERATED, TOLERATED_UNITS * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Fingerprint:
    """The numbers [B, PRODUCTS] of a use's gradient and floating-point inputs, and its other inputs themselves."""

    numbers: Sequence[Tensor]
    others: Sequence[Tensor]

    @staticmethod
    def of(use: Use) -> Fingerprint:
        """Take the fingerprint of a use that has its inputs and gradient."""
        tensors = _tensors(use)
        with full_precision():
            numbers = [_numbers(tensor) for tensor in tensors if tensor.is_floating_point()]
        return Fingerprint(numbers, [tensor for tensor in tensors if not tensor.is_floating_point()])

    def same_bits(self, other: Fingerprint) -> bool:
        """Return whether they are of the same tensors, as far as can be told; never of what is not finite."""
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self.numbers, other.numbers, strict=True))

    def near(self, other: Fingerprint, use: Use) -> bool:
        """Return whether these may be the numbers of ``use``, whose own are ``other``, added in another order."""
        if len(self.numbers) != len(other.numbers) or len(self.others) != len(other.others):
            return False
        if not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(self.others, other.others, strict=True)):
            return False
        floating = [tensor for tensor in _tensors(use) if tensor.is_floating_point()]
        for before, after, tensor in zip(self.numbers, other.numbers, floating, strict=True):
            if before.shape != after.shape:
                return False
            if torch.equal(before.double(), after.double()):
                continue
            most = tolerance(tensor.dtype) * _lengths(tensor)
            # What is finite in one run alone is off; what is in neither tells nothing, and is clipped to nothing.
            off = ~((before.double() - after.double()).abs() <= most) & (before.isfinite() | after.isfinite())
            if bool(off.any()):
                return False
        return True


def saved_in(use: Use) -> list[Saved]:
    """Return the inputs that a use keeps."""
    found: list[Saved] = []
    for value in vars(use).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        found += [part for part in parts if isinstance(part, Saved)]
    return found


def _tensors(use: Use) -> list[Tensor]:
    """The gradient of a use, its inputs, and other tensors that it holds."""
    assert use.grad is not None
    held = [v for k, v in vars(use).items() if k != "grad" and isinstance(v, Tensor) and not isinstance(v, Parameter)]
    return [use.grad, *(saved.get("a checkpointed layer") for saved in saved_in(use)), *held]


def _numbers(tensor: Tensor) -> Tensor:
    """[B, PRODUCTS]; in float64 where they overflow otherwise."""
    rows = _rows(tensor)
    found = _products(rows)
    return found if rows.dtype == torch.float64 or bool(found.isfinite().all()) else _products(rows.double())


def _products(rows: Tensor) -> Tensor:
    by_feature = rows @ _vectors(rows.shape[2], 1, rows.dtype, rows.device)
    return (by_feature * _vectors(rows.shape[1], 2, rows.dtype, rows.device)).sum(1)


def _lengths(tensor: Tensor) -> Tensor:
    """[B, 1] in float64, without overflow."""
    rows = _rows(tensor).flatten(1).double()
    largest = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return largest * torch.linalg.vector_norm(rows / largest, dim=1, keepdim=True)


def _rows(tensor: Tensor) -> Tensor:
    """A tensor [B, ..., n] as [B, T, n], in float32 or better."""
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    if wide.dim() < 2:
        return wide.reshape(-1, 1, 1)
    return wide.reshape(len(wide), -1, wide.shape[-1])


@functools.lru_cache(maxsize=256)
def _vectors(length: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[length, PRODUCTS]: the same in every run."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(length, PRODUCTS, generator=numbers, dtype=torch.float64).to(device, dtype)
