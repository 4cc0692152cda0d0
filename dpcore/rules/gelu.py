"""GELU by its tanh form on a CPU, by a kernel: it has no parameters, but torch's tanh takes a seventh of a small ViT's
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore import native
from dpcore.rules.pooling import is_for_kernel
from dpcore.tape.tape import Tape
from dpcore.tape.uses import handles


class _Gelu(torch.autograd.Function):
    """Keep nothing but x, as torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return native.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Gradients that get gradients (create_graph=True), and many at once (is_grads_batched), are torch's.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad) or not native.serves(x, grad):
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]
        return native.gelu_grad(x, grad)


@handles(F.gelu)
def _gelu(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def call(input: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate != "tanh" or not (input.is_contiguous() and is_for_kernel(input)):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        return _Gelu.apply(input)  # type: ignore[no-any-return]

    return call(*args, **kwargs)
