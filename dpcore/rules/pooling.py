"""Max-pooling inside of compiled graphs: torch's own kernels. What the compiler makes of their indices is a scalar
loop, several times slower where channels lie next to each other. No parameter is involved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.tape.tape import Tape
from dpcore.tape.uses import handles

# Defined without torch.library.custom_op, which puts some 0.1 ms of Python around every call.
torch.library.define(
    "dpcore::max_pool2d",
    "(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> (Tensor, Tensor)",
)
torch.library.define(
    "dpcore::max_pool2d_backward",
    "(Tensor grad, Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
    "Tensor indices) -> Tensor",
)


def _largest(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """(largest of each window, where it lies): an operator that a graph calls as it is."""
    return torch.ops.aten.max_pool2d_with_indices(x, *window)


def _scattered(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *rest)


for _name, _function in (("dpcore::max_pool2d", _largest), ("dpcore::max_pool2d_backward", _scattered)):
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _function)


class _MaxPool2d(torch.autograd.Function):
    """The two of them for autograd, which is only there while the pass is traced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        largest, indices = torch.ops.dpcore.max_pool2d(x, *window)
        ctx.save_for_backward(x, indices)
        ctx.window = window
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, indices = ctx.saved_tensors
        return torch.ops.dpcore.max_pool2d_backward(grad, x, *ctx.window, indices), *[None] * len(ctx.window)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 if len(value) == 1 else 1)


@handles(torch.max_pool2d, F.max_pool2d)
def _max_pool2d(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        traced = type(input) is not Tensor and input.device.type == "cpu"
        if not traced or return_indices or input.dim() != 4:
            return func(*args, **kwargs)
        kernel = _pair(kernel_size)
        window = (kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation), ceil_mode)
        return _MaxPool2d.apply(input, *window)

    return call(*args, **kwargs)
