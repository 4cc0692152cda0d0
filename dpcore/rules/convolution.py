"""Rules for convolutions in one, two or three dimensions, with groups, stride, dilation and any zero padding.

Other padding modes need nothing: the module pads first and then calls a convolution without padding. Per example, with
unfolded inputs U (p x T) and output gradients G (d x T): dW = G Uᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore import gpu, native
from dpcore.gpu.windows import Windows
from dpcore.native.parts import Part
from dpcore.numerics.precision import convolutions_are_lowered
from dpcore.numerics.rounding import SquaredNorm, gram, gram_roundings, squares
from dpcore.rules.gram import examples_at_once, gram_norm_sq, matrices_norm_sq
from dpcore.rules.limits import Limits
from dpcore.rules.linear import contraction_norm_sq, flops_per_kept_float, wide
from dpcore.rules.products import products
from dpcore.tape.tape import Tape
from dpcore.tape.uses import Saved, Use, handles

# Unfolding inputs for one example after the other takes some 5 % longer where gradients are of fewer numbers.
FEWEST_IN_TURN = 2**19
# Where channels come first, unfolding copies what a batch then has to fetch again: one example stays in the cache.
FEWEST_IN_TURN_BY_ROWS = 2**17
# The absolute terms of a norm by products of windows can come to as many times the norm as there are windows. Beyond 8
# times (over all parameters together) an example is left to float64, which takes far longer than its gradient would.
MOST_WINDOWS = 32


# Numbers of an example's unfolded inputs beyond which torch forms its gradient, without them: those of a volume of 40^3
# and 16 channels took 110 MB, and three times as long.
MOST_UNFOLDED = 2**21


class ConvolutionUse(Use):
    """Input [B, c, *size], weight [d, c / groups, *kernel], output gradient [B, d, *out]."""

    def __init__(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        trained: tuple[Parameter, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        channels_last: bool,
    ) -> None:
        self.name = name
        self.params = trained
        self.weight = weight.detach()
        self.geometry = (stride, padding, dilation, groups)
        self.channels_last = groups == 1 and x.dim() == 4 and channels_last
        self._x = Saved(x)
        self._limits = Limits()

    def kind(self) -> tuple[Any, ...] | None:
        x, g = self._x.tensor, self.grad
        if g is None or x.dtype != torch.float32 or g.dtype != torch.float32 or g.device.type != "cpu":
            return None
        if self.geometry[3] > 1:  # which goes by torch's settings, too
            return None
        shapes = x.shape[1:], g.shape[1:], self.weight.shape
        return type(self), self.channels_last, *self.geometry, *shapes, *map(id, self.params)

    def _input(self) -> Tensor:
        return wide(self._x.get(self.name).detach())

    def _gradient(self) -> Tensor:
        assert self.grad is not None
        return wide(self.grad)

    def _is_bias(self, param: Parameter) -> bool:
        return param.dim() == 1

    @property
    def _has_kernel(self) -> bool:
        """Whether the compiled kernel can form per-sample gradients: in two dimensions, without groups or dilation."""
        return self.weight.dim() == 4 and self.geometry[2:] == ((1, 1), 1)

    def _windows(self) -> Windows:
        return Windows(tuple(self.weight.shape[2:]), *self.geometry, self.channels_last)

    def _for_gpu(self, param: Parameter) -> tuple[Tensor, Tensor, Windows] | None:
        """Output gradients and inputs in their own precision, where kernels for GPUs take them."""
        if self._is_bias(param) or self.grad is None or not gpu.available():
            return None
        g, x, windows = self.grad.detach(), self._x.get(self.name).detach(), self._windows()
        return (g, x, windows) if gpu.serves_convolution(g, x, windows) else None

    def _bias_grad_sample(self) -> Tensor:
        return self._gradient().flatten(2).sum(2)

    def _padded(self) -> tuple[Tensor, list[int], list[int]]:
        """The padded input, and its strides over the kernel's dimensions and over the output's."""
        stride, padding, dilation, _ = self.geometry
        x = F.pad(self._input(), [pad for p in reversed(padding) for pad in (p, p)])
        strides = x.stride()[2:]
        of_kernel, of_output = ([s * k for s, k in zip(strides, by, strict=True)] for by in (dilation, stride))
        return x, of_kernel, of_output

    def _unfolded(self) -> Tensor:
        """[B, groups, c / groups * kernel, T]: for every output position the inputs that it saw.

        Rows in the order of the weight's memory, (c, *kernel), or (*kernel, c) where the weight is channels-last.
        """
        groups = self.geometry[3]
        kernel = self.weight.shape[2:]
        out = self._gradient().shape[2:]
        x, kernel_strides, out_strides = self._padded()
        strides = x.stride()
        if self.channels_last:
            shape = (len(x), *out, *kernel, x.shape[1])
            windows = x.as_strided(shape, (strides[0], *out_strides, *kernel_strides, strides[1]))
            return windows.reshape(len(x), 1, out.numel(), -1).transpose(2, 3)
        windows = x.as_strided((*x.shape[:2], *kernel, *out), (*strides[:2], *kernel_strides, *out_strides))
        return windows.reshape(len(x), groups, -1, out.numel())

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        if self._is_bias(param):
            return squares(self._bias_grad_sample())
        if (taken := self._for_gpu(param)) is not None:
            norms, limits = gpu.convolution_norm_sq(*taken)
            assert self.grad is not None
            self._limits.note(self.grad, limits)
            return norms
        groups = self.geometry[3]
        by_pixels, by_windows = self._costs()
        if by_windows < by_pixels:
            return contraction_norm_sq(self._gradient().flatten(2).transpose(1, 2), self._seen())
        if groups == 1:
            return self._norm_by_pixels()
        u = self._unfolded().flatten(0, 1)
        g = self._gradient().reshape(len(u), -1, u.shape[-1])
        roundings = gram_roundings(u.shape[1]) + gram_roundings(g.shape[1]) + groups
        norms = gram_norm_sq((u.transpose(1, 2), g.transpose(1, 2)), roundings)
        assert norms.scale is not None
        return SquaredNorm(norms.value.view(-1, groups).sum(1), norms.error, norms.scale.view(-1, groups).sum(1))

    def _norm_by_pixels(self) -> SquaredNorm:
        """Without groups, by products of pixels and of output gradients, of some examples after the others."""
        x, padding = self._x.get(self.name), self.geometry[1]
        pixels = math.prod(size + 2 * pad for size, pad in zip(x.shape[2:], padding, strict=True))
        at_once = max(1, examples_at_once(pixels**2, wide(x[:0])))
        if at_once < len(x):
            norms = [self._some(slice(k, k + at_once))._norm_by_pixels() for k in range(0, len(x), at_once)]
            values, errors, scales, _ = zip(*norms, strict=True)
            return SquaredNorm(torch.cat(values), errors[0], torch.cat(scales))
        gram_g = gram(self._gradient().flatten(2).transpose(1, 2))
        # A product of windows is one of pixels, added up over the offsets of one dimension after the other.
        roundings = gram_roundings(x.shape[1]) + sum(self.weight.shape[2:])
        return matrices_norm_sq(self._window_gram(), gram_g, roundings + gram_roundings(len(self.weight)))

    def _some(self, rows: slice) -> ConvolutionUse:
        """This use by some of its examples."""
        assert self.grad is not None
        x = self._x.get(self.name)[rows]
        some = ConvolutionUse(self.name, x, self.weight, self.params, *self.geometry, self.channels_last)
        some.grad = self.grad[rows]
        return some

    def _seen(self) -> Tensor:
        """[B, T, c * kernel]: for every output position the inputs that it saw, without groups, in memory's order."""
        x, kernel_strides, out_strides = self._padded()
        kernel, out = self.weight.shape[2:], self._gradient().shape[2:]
        of_channels = ((x.shape[1],), (x.stride(1),))
        of_kernel = (tuple(kernel), tuple(kernel_strides))
        inner = (of_kernel, of_channels) if self.channels_last else (of_channels, of_kernel)
        shape, strides = ((*first, *second) for first, second in zip(*inner, strict=True))
        windows = x.as_strided((len(x), *out, *shape), (x.stride(0), *out_strides, *strides))
        return windows.reshape(len(x), out.numel(), -1)

    def _window_gram(self) -> Tensor:
        """[B, T, T] products of windows, UᵀU, from the Gram matrix M of single pixels, without unfolding:

        (UᵀU)[t, s] = Σ_k M[stride t + dilation k, stride s + dilation k] over the kernel's offsets k.

        With pixels numbered row by row an offset moves both indices by one number, so the sum over one dimension's
        offsets is one over long dense rows, for windows at every pixel, and the next dimension's starts from it.
        """
        stride, padding, dilation, _ = self.geometry
        kernel, out = self.weight.shape[2:], self._gradient().shape[2:]
        x = F.pad(self._input(), [pad for p in reversed(padding) for pad in (p, p)])
        size = x.shape[2:]
        pixels = gram(x.flatten(2).transpose(1, 2))
        steps = [size[i + 1 :].numel() for i in range(len(size))]
        for step, d, k in zip(steps, dilation, kernel, strict=True):
            if k > 1:
                pixels = _diagonal_sums(pixels, range(0, step * d * k, step * d))
        n = pixels.shape[1]
        rows, columns = ([step * s * m for step, s in zip(steps, stride, strict=True)] for m in (n, 1))
        windows = pixels.as_strided((len(x), *out, *out), (n * n, *rows, *columns))
        return windows.reshape(len(x), out.numel(), out.numel())

    def grad_sample(self, param: Parameter) -> Tensor:
        if self._is_bias(param):
            return self._bias_grad_sample()
        found = self._at_once()
        if found is not None:
            return found
        x, g = self._input(), self._gradient()
        unfolded = self.weight.shape[1:].numel() * self.geometry[3] * g.shape[2:].numel()
        is_traced = torch.compiler.is_compiling() or type(x) is not Tensor
        if unfolded > MOST_UNFOLDED and self._torch_serves and not is_traced:
            by_example, weight = zip(g.split(1), x.split(1), strict=True), wide(self.weight)
            return torch.stack([_by_torch(one, of, weight, *self.geometry) for one, of in by_example])
        u = self._unfolded()
        g = self._gradient().reshape(len(u), u.shape[1], -1, u.shape[-1])
        if u.shape[1] > 1:
            return torch.matmul(g, u.transpose(2, 3)).view(len(u), *self.weight.shape)
        (grads,) = products(g.squeeze(1), u.squeeze(1))
        if self.channels_last:
            d, c, *kernel = self.weight.shape
            return grads.view(len(u), d, *kernel, c).movedim(-1, 2)
        return grads.view(len(u), *self.weight.shape)

    def _at_once(self) -> Tensor | None:
        """Per-sample gradients of the weight by one call, a kernel's or torch's; None where neither serves."""
        stride, padding, _, _ = self.geometry
        if self._has_kernel:
            x, g, size = self._input(), self._gradient(), (self.weight.shape[2], self.weight.shape[3])
            if native.serves(x, g):
                return native.conv2d_grad_sample(x, g, size, stride, padding, self.channels_last)
            if self.channels_last and native.serves_graph(x, g):
                return torch.ops.dpcore.conv2d_grad_sample(x, g, list(size), list(stride), list(padding)).movedim(-1, 2)
        return self._folded() if self._folds else None

    @property
    def _folds(self) -> bool:
        """Whether :meth:`_folded` forms per-sample gradients: in float32 on a CPU, of groups, by oneDNN (torch's own
        convolution of so many groups takes longer than unfolding).
        """
        x, groups = self._x.tensor, self.geometry[3]
        on_cpu = x.device.type == "cpu" and wide(x[:0]).dtype == torch.float32
        onednn = torch.backends.mkldnn.is_available() and not convolutions_are_lowered()
        return groups > 1 and on_cpu and x.numel() > 0 and onednn

    def _folded(self) -> Tensor:
        """[B, *weight.shape]: the weight's gradient where every group of every example is a group of its own.

        Of a depthwise convolution it takes what the gradient of the batch takes. Unfolded inputs have as many numbers
        as the kernel has for each of theirs: at 56 by 56 pixels and a kernel of 3 by 3 that took 19 times as long.
        """
        stride, padding, dilation, groups = self.geometry
        x, g = self._input(), self._gradient()
        many = x.new_empty((len(x) * self.weight.shape[0], *self.weight.shape[1:]))
        gs, xs = (t.reshape(1, -1, *t.shape[2:]) for t in (g, x))
        grads = _by_torch(gs, xs, many, stride, padding, dilation, len(x) * groups)
        return grads.reshape(len(x), *self.weight.shape)

    def for_kernels(self, param: Parameter, formed: bool) -> Part | None:
        x, g = self._x.get(self.name), self.grad
        assert g is not None
        if not native.are_plain(x, g) or not g.numel():
            return None
        if self._is_bias(param):
            g = g.flatten(2).transpose(1, 2)
            return Part.sums(g) if g.stride(-1) == 1 else None
        stride, padding, _, _ = self.geometry
        in_order = param.is_contiguous(
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
        )
        if not formed or not in_order or not self._has_kernel:
            return None
        size = (self.weight.shape[2], self.weight.shape[3])
        grads = native.conv2d_grad_sample(x, g, size, stride, padding, self.channels_last)
        return Part.rows((grads.movedim(2, -1) if self.channels_last else grads).flatten(1))

    def takes_turns(self, param: Parameter) -> bool:
        fewest = FEWEST_IN_TURN if self.channels_last else FEWEST_IN_TURN_BY_ROWS
        return not self._is_bias(param) and param.numel() >= fewest

    def example(self, param: Parameter, i: int) -> Tensor:
        return self._some(slice(i, i + 1)).grad_sample(param)[0]

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        if self._is_bias(param):
            out.addmv_(self._bias_grad_sample().t(), factors)
            return
        if (taken := self._for_gpu(param)) is not None:
            gpu.convolution_clipped_sum(*taken, factors, out, self._limits.of(self.grad))
            return
        g = self._gradient()
        g = g * factors.view(-1, *[1] * (g.dim() - 1))
        out.add_(
            _by_torch(g, self._input(), wide(self.weight), *self.geometry) if self._torch_serves else self._summed(g)
        )

    @property
    def _torch_serves(self) -> bool:
        """Whether torch's own sums of products are used: a GPU's convolutions may be others, or in lower precision."""
        return self._x.tensor.device.type == "cpu" and not convolutions_are_lowered()

    def _summed(self, g: Tensor) -> Tensor:
        """Σ over the examples of the weight gradients for output gradients g [B, d, *out], as a product of matrices.

        A GPU's convolutions may be Winograd's or Fourier's, or in TF32 without being asked, none of which keeps to the
        bound of a sum of products.
        """
        u = self._unfolded()
        by_group = g.reshape(len(u), u.shape[1], -1, u.shape[-1]).permute(1, 2, 0, 3).flatten(2)
        summed = torch.bmm(by_group, u.permute(1, 0, 3, 2).flatten(1, 2))
        if self.channels_last:
            d, c, *kernel = self.weight.shape
            return summed.view(d, *kernel, c).movedim(-1, 1)
        return summed.view(self.weight.shape)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        if self._is_bias(param):
            return False
        if self._for_gpu(param) is not None:
            return True
        if self._folds and self.weight.shape[1] == 1:  # depthwise: small gradients, in one operator
            return False
        return min(self._costs()) < flops_per_kept_float(self._gradient().device) * self.weight.numel()

    def _costs(self) -> tuple[float, float]:
        """FLOPs for one example's ghost norm, from products of pixels and from products of windows."""
        x, g = self._x.tensor, self._gradient()
        positions, pixels = g.shape[2:].numel(), x.shape[2:].numel()
        price = flops_per_kept_float(g.device)
        of_gradients = 2 * g.shape[1] * positions**2
        by_pixels = (2 * x.shape[1] + price * sum(self.weight.shape[2:])) * pixels**2 + of_gradients
        window = self.weight.shape[1:].numel()
        by_windows = 2 * window * positions**2 + price * positions * window + of_gradients
        return by_pixels, by_windows if self.geometry[3] == 1 and positions <= MOST_WINDOWS else math.inf

    def rows(self, index: Tensor, dtype: torch.dtype) -> ConvolutionUse:
        x = self._x.get(self.name).detach().index_select(0, index).to(dtype)
        use = ConvolutionUse(self.name, x, self.weight.to(dtype), self.params, *self.geometry, self.channels_last)
        use.grad = None if self.grad is None else self.grad.index_select(0, index).to(dtype)
        use._limits = self._limits.rows(self.grad, index, use.grad)
        return use


def _by_torch(g: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """The weight's gradient of all examples together."""
    nothing, mask = [0] * len(stride), (False, True, False)
    grads: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, nothing, groups, mask
    )[1]
    return grads


def _diagonal_sums(gram: Tensor, offsets: range) -> Tensor:
    """[B, n, n], Σ_o gram[:, t + o, s + o] over two offsets or more, from [B, n + offsets[-1], n + offsets[-1]]."""
    n = gram.shape[1] - offsets[-1]
    first, second, *others = (gram[:, o : o + n, o : o + n] for o in offsets)
    total = first + second
    for other in others:
        total += other
    return total


def _by_kernel(x: Tensor, grad: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """:func:`native.conv2d_grad_sample` as an operator of a compiled graph, [B, d, kh, kw, c]."""
    size = (kernel[0], kernel[1])
    return native.conv2d_grad_sample(x, grad, size, tuple(stride), tuple(padding)).movedim(2, -1)


def _like_the_kernels(x: Tensor, grad: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return x.new_empty((len(x), grad.shape[1], *kernel, x.shape[1]))


# Without torch.library.custom_op, which puts some 0.1 ms of Python around every call.
_KERNEL = "dpcore::conv2d_grad_sample"
torch.library.define(_KERNEL, "(Tensor x, Tensor grad, int[] kernel, int[] stride, int[] padding) -> Tensor")
torch.library.impl(_KERNEL, "default", _by_kernel)
torch.library.register_fake(_KERNEL, _like_the_kernels)


def _tuple(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


@handles(torch.conv1d, torch.conv2d, torch.conv3d)
def _convolution(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        weight_trains, bias_trains = tape.trains(weight), bias is not None and tape.trains(bias)
        params = (*((weight,) if weight_trains else ()), *((bias,) if bias_trains else ()))
        if not params:
            return func(input, weight, bias, stride, padding, dilation, groups)
        tape.batch.check(input, params)
        dims = weight.dim() - 2
        if input.dim() != weight.dim():
            tape.batch.check(input[:0], params)
        stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            # Total padding dilation (kernel - 1) per dimension; an odd remainder goes to the end.
            totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            input = F.pad(input, [pad for t in reversed(totals) for pad in (0, t % 2)])
            padding = tuple(t // 2 for t in totals)
        padding = _tuple(padding, dims)
        if tape.channels_last and input.dim() == 4 and input.shape[1] == 1:
            # One channel: plain and channels-last strides mean the same, but only the latter make the output
            # channels-last.
            h, w = input.shape[2:]
            input = input.contiguous().as_strided(input.shape, (h * w, 1, w, 1))
        constant = weight.detach() if weight_trains else weight
        added = bias.detach() if bias_trains and bias is not None else bias
        output = func(input, constant, added, stride, padding, dilation, groups)
        use = ConvolutionUse(
            tape.layer(params), input, weight, params, stride, padding, dilation, groups, tape.channels_last
        )
        return tape.record(use, output)

    return call(*args, **kwargs)
