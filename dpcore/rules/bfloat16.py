"""Products of bfloat16 matrices by the hardware's own units, for gradients of examples that are formed.

Their operands stay bfloat16. The hardware adds up in float32; for CPUs torch then rounds what it returns to bfloat16,
as it does with the weights' gradients of ordinary training, and on CUDA it returns float32 where it can be told to.
What comes out is widened, which is exact, and from there on it is the example's gradient: its norm is taken of it, and
the clip factor multiplies it, in float32. So no bound depends on how a product rounds. A gradient is formed once, and
nothing here may take the norm of one product and add another.

One example more must not change how those of all others are rounded: a change of 2^-8 in each of them is bounded by no
clipping. So what decides is the layer and the machine, never the batch: not its length, not that of the longest
sequence, not whether another example goes through float64. A layer that comes here has no norms by Gram matrices, whose
entries would moreover say nothing where positions cancel, if they were rounded so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SWITCH = "DPCORE_BFLOAT16"
"""Environment variable: ``0`` widens all operands to float32, ``1`` widens none, whatever the hardware has."""

FEWEST_NUMBERS = 2**15
"""Smaller gradients are formed in float32, of all examples at once: starting a product of each takes longer."""

OLDEST_CUDA = 8
"""Major compute capability of the first GPUs with units for bfloat16."""


_switched_off = False


@contextmanager
def disabled() -> Iterator[None]:
    """Within, all operands are widened to float32."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def takes(g: Tensor, x: Tensor) -> bool:
    """Return whether :func:`product` forms the gradients of a linear map over several positions, however many.

    Not in a graph that is traced: what compiles it may form a gradient twice, and round it once.

    Args:
        g: The gradient at the output. It is bfloat16 where the map was computed in it.
        x: The input. Under autocast it may be recorded in float32, before it was rounded for that computation.

    Raises:
        ValueError: the environment asks for something that there is not.
    """
    return (
        g.dtype == torch.bfloat16
        and x.dtype in (torch.bfloat16, torch.float32)
        and type(g) is type(x) is Tensor
        and g.device == x.device
        and g.shape[-1] * x.shape[-1] >= FEWEST_NUMBERS
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and is_on(g.device)
    )


def is_on(device: torch.device) -> bool:
    """Return whether products of bfloat16 are taken on ``device``: as the environment says, or by its hardware.

    Raises:
        ValueError: the environment asks for something that there is not.
    """
    asked = os.environ.get(SWITCH, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} is {asked!r}: say 0 or 1, or nothing, so that the hardware decides.")
    return not _switched_off and (asked == "1" or (asked == "" and _has_units(device)))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ right [m, n] for left [T, m] and right [T, n], which are rounded to bfloat16.

    The hardware adds up in float32. The result is bfloat16, or float32 where torch can be told to return it.
    """
    left, right = (t.to(torch.bfloat16).contiguous() for t in (left, right))
    if _returns_float32(left.device):
        return torch.ops.aten.mm.dtype(left.t(), right, torch.float32)  # type: ignore[no-any-return]
    return torch.mm(left.t(), right)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Return :func:`product` of every example in float32, [B, m, n] for left [B, T, m] and right [B, T, n].

    One after the other: a library may add up in another order where a batch has another length.
    """
    out = torch.empty((len(left), left.shape[2], right.shape[2]), dtype=torch.float32, device=left.device)
    for i, into in enumerate(out):
        into.copy_(product(left[i], right[i]))
    return out


@functools.cache
def _has_units(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 faster than float32: AMX, or tensor cores."""
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
        return supported is not None and torch.backends.mkldnn.is_available() and bool(supported())
    return _returns_float32(device) and torch.cuda.get_device_capability(device)[0] >= OLDEST_CUDA


@functools.cache
def _returns_float32(device: torch.device) -> bool:
    """Return whether products on a device can be told to return float32: on CUDA, from torch 2.8 on. It is tried."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(257, 16, dtype=torch.bfloat16, device=device)  # 257 is no number of bfloat16
        found = torch.ops.aten.mm.dtype(ones.t(), ones, torch.float32)
        return found.dtype == torch.float32 and bool((found == 257.0).all())
    except (AttributeError, RuntimeError):
        return False
