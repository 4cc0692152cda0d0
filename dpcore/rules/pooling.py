"""Max-pooling: by a kernel on a CPU, and inside of compiled graphs by torch's own.

No parameter is involved, but torch takes some 13 ns for an output of dense planes, which is half of the step of a small
convolutional network, and 2.4 where channels lie next to each other. What the compiler makes of torch's indices is a
scalar loop, several times slower there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore import native
from dpcore.rules.cross_entropy import is_watched
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


class _ByKernel(torch.autograd.Function):
    """(x [B, C, H, W], window, size of the outputs) -> [B, C, *size]; of x only the shape is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[int, ...], size: list[int]) -> Tensor:
        out, codes = native.max_pool(x, window, size)
        ctx.save_for_backward(codes)
        ctx.shape, ctx.window = x.shape, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        # Gradients that get gradients (create_graph=True), and many at once (is_grads_batched), are torch's.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad) or not native.serves(grad):
            places = _places(codes, ctx.shape, ctx.window).flatten(2)
            found = grad.new_zeros((*ctx.shape[:2], ctx.shape[2:].numel())).scatter_add(-1, places, grad.flatten(2))
            return found.unflatten(-1, ctx.shape[2:]), None, None
        return native.max_pool_grad(grad, codes, ctx.shape, ctx.window), None, None


def _places(codes: Tensor, shape: torch.Size, window: tuple[int, ...]) -> Tensor:
    """Return where in its plane every largest number lies: torch's indices."""
    (rows, columns), (_, width, *strides), paddings = codes.shape[-2:], window[:4], window[4:]
    row = torch.arange(rows, device=codes.device)[:, None] * strides[0] - paddings[0] + codes.long() // width
    return (
        row * shape[-1] + torch.arange(columns, device=codes.device) * strides[1] - paddings[1] + codes.long() % width
    )


def _outputs(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return how many windows there are in one direction; 0 for what is torch's to compute, or to refuse."""
    rest = length + 2 * padding - kernel
    if dilation != 1 or min(kernel, stride) < 1 or not 0 <= 2 * padding <= kernel or rest < 0:
        return 0
    count = (-(-rest // stride) if ceil_mode else rest // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


WORTH_A_KERNEL = 2**14
"""Numbers; below, torch takes less time than a function of one's own costs."""


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 if len(value) == 1 else 1)


def is_for_kernel(x: Tensor) -> bool:
    """Return whether a kernel takes what is done to the numbers of ``x``, and saves more than it costs."""
    return (
        x.numel() >= WORTH_A_KERNEL
        and x.requires_grad
        and torch.is_grad_enabled()
        and not is_watched()
        and native.serves(x)
    )


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)


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
        if return_indices or input.dim() != 4 or not (traced or (_is_dense(input) and is_for_kernel(input))):
            return func(*args, **kwargs)
        kernel = _pair(kernel_size)
        window = (kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation), ceil_mode)
        if traced:
            return _MaxPool2d.apply(input, *window)
        size = [_outputs(*places, ceil_mode) for places in zip(input.shape[2:], *window[:4], strict=True)]
        if 0 in size or kernel[0] * kernel[1] > 255:
            return func(*args, **kwargs)
        return _ByKernel.apply(input, (*kernel, *window[1], *window[2]), size)

    return call(*args, **kwargs)
