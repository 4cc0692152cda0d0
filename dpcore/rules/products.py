"""Matrix products of the engine, by whichever of torch's CPU libraries is faster.

On AMD processors with AVX-512, which MKL does not use there, torch's float32 ``mm`` and ``bmm`` (MKL) reach half of
what oneDNN does (Zen 5), or the same (Zen 4); torch only uses oneDNN for convolutions and recurrent layers. There one
product at a time through oneDNN beats a batch of them through MKL as soon as a product is large enough to outweigh the
call. Elsewhere MKL is faster, and everything is torch's own: in a step of BERT on a Sapphire Rapids oneDNN reached 117
GFLOP/s and MKL 140; on a Zen 3, without AVX-512, steps of ViT, BERT and WRN took 3 to 7 % less by MKL. The choice is by
the processor and not by a measurement of one's own, so that a run repeats itself to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from dpcore.native.levels import has_avx512, is_intel
from dpcore.numerics.precision import is_lowered

# About 10 us of overhead per call at 200 GFLOP/s against 100.
WORTH_A_CALL_FLOPS = 4e6


def _available() -> bool:
    mkl_is_faster = torch.backends.mkl.is_available() and (is_intel() or not has_avx512())
    if not torch.backends.mkldnn.is_available() or mkl_is_faster:
        return False
    try:
        a = torch.ones(2, 3)
        return bool((torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "") == 3.0).all())
    except (AttributeError, RuntimeError):
        return False


_AVAILABLE = _available()


def prefers_onednn(a: Tensor, flops: float) -> bool:
    """Return whether a product with left operand ``a`` goes through oneDNN.

    That is where it is float32 on a CPU, large, in full precision, outside of tracing.
    """
    return (
        _AVAILABLE
        and flops >= WORTH_A_CALL_FLOPS
        and a.dtype == torch.float32
        and a.device.type == "cpu"
        and type(a) is Tensor
        and not is_lowered()
        and not torch.compiler.is_compiling()
    )


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    # Operands with any other strides would fall to a reference kernel a thousand times slower.
    b = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b, bias, "none", [], "")


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A bᵀ + bias, [m, n], for a [m, k], b [n, k] and bias [n]."""
    if prefers_onednn(a, 2.0 * a.numel() * b.shape[0]):
        return _onednn(a, b, bias)
    return torch.nn.functional.linear(a, b, bias)


def products(a: Tensor, *others: Tensor) -> list[Tensor]:
    """a_i b_iᵀ for every example, [B, m, n], for a [B, m, k] and each of the others b [B, n, k]."""
    examples, m, k = a.shape
    if not examples or not prefers_onednn(a, 2.0 * m * k * min(b.shape[1] for b in others)):
        return [torch.bmm(a, b.transpose(1, 2)) for b in others]
    # An operand that is not dense is copied an example at a time, which leaves it in the cache: copies of all examples
    # at once go to memory and back.
    left, rights = _Dense(a[0]), [_Dense(b[0]) for b in others]
    outs = [a.new_empty((examples, m, b.shape[1])) for b in others]
    for i, a_i in enumerate(a.unbind(0)):
        dense = left.of(a_i).contiguous()
        for b, right, out in zip(others, rights, outs, strict=True):
            out[i].copy_(_onednn(dense, right.of(b[i])))
    return outs


class _Dense:
    """Gives matrices like ``example`` as they are, if they are dense or densely transposed, or else in one buffer."""

    def __init__(self, example: Tensor) -> None:
        self._buffer: Tensor | None = None
        if not example.is_contiguous() and not example.t().is_contiguous():
            self._buffer = torch.empty_like(example, memory_format=torch.contiguous_format)

    def of(self, matrix: Tensor) -> Tensor:
        return matrix if self._buffer is None else self._buffer.copy_(matrix)


class Projection(torch.autograd.Function):
    """(x [m, p], W [d, p], bias [d] or None) -> x Wᵀ + bias; only x gets a gradient.

    The result is no view: torch forbids to change one in place that a function of one's own has made.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable  # a second derivative would be wrong without a word
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return product(grad, weight.t()) if ctx.needs_input_grad[0] else None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, by the faster library where weight and bias get no gradient."""
    if 2.0 * x.numel() * len(weight) < WORTH_A_CALL_FLOPS:  # first: of small products the other questions are a part
        return torch.nn.functional.linear(x, weight, bias)
    constants = (weight, bias) if bias is not None else (weight,)
    if (
        all(type(t) in (Tensor, Parameter) and t.dtype == torch.float32 and not t.requires_grad for t in constants)
        and all(t.device == x.device for t in constants)
        and weight.shape[1:] == x.shape[-1:]
        # oneDNN reads as many numbers as there are outputs, torch spreads out what it gets.
        and (bias is None or bias.shape == weight.shape[:1])
        and prefers_onednn(x, 2.0 * x.numel() * len(weight))
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.maybe_current_level() is None
    ):
        if x.dim() == 2:
            return Projection.apply(x, weight, bias)  # type: ignore[no-any-return]
        z = Projection.apply(x.reshape(-1, x.shape[-1]), weight, bias)
        return z.view(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]
    return torch.nn.functional.linear(x, weight, bias)
