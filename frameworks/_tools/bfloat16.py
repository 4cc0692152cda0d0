"""What mixed precision rounds away, in the float64 reference: what goes into a product and what comes out of it is
rounded to bfloat16, forward and backward, as ``torch.autocast`` does it; all else stays float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness.tasks import FLOAT32, Task

PRODUCTS = {F.linear, F.conv2d}
"""Those of the tasks' networks, beside the two of attention; the recurrence of an LSTM has no lower precision here."""


class _Rounded(torch.autograd.Function):
    """The nearest bfloat16 of a value, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.to(torch.bfloat16).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient.to(torch.bfloat16).to(gradient.dtype)


def rounded(value: object) -> Any:
    """The nearest bfloat16 of a tensor of numbers, and of its gradient; anything else as it is."""
    return _Rounded.apply(value) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Attention(torch.autograd.Function):
    """``scaled_dot_product_attention`` of [B, heads, T, head] as fused kernels compute it: shares and their gradients
    are rounded before they are multiplied, and the backward pass takes each row's mean gradient from the rounded
    output, so that what ought to cancel (the gradient of the keys' biases) cancels to eight bits only."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, is_causal = args
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        shares = scores.softmax(-1)
        out = rounded(rounded(shares) @ value)
        ctx.save_for_backward(query, key, value, shares, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares, out = ctx.saved_tensors
        arrived = rounded(gradients[0])
        by_share = arrived @ value.transpose(-1, -2) - (arrived * out).sum(-1, keepdim=True)
        by_score = rounded(shares * by_share) / math.sqrt(query.shape[-1])
        products = (by_score @ key, by_score.transpose(-1, -2) @ query, rounded(shares).transpose(-1, -2) @ arrived)
        return (*map(rounded, products), None)


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    out: Tensor = _Attention.apply(*map(rounded, (query, key, value)), is_causal)
    return out


class _RoundedProducts(TorchFunctionMode):
    """Inside it products round."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **more)
        if func not in PRODUCTS:
            return func(*args, **more)
        return rounded(func(*map(rounded, args), **{name: rounded(value) for name, value in more.items()}))


def arithmetic(task: Task) -> AbstractContextManager[object]:
    """The region in which products round as the task's precision asks for; without effect in float32."""
    return nullcontext() if task.precision == FLOAT32 else _RoundedProducts()
