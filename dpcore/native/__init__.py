"""The optional compiled part: C++ kernels for what torch's operators do badly on a CPU.

A binary wheel brings them, for several instruction sets; the best one that the processor has is loaded at first use
and checked against torch. Where there is no such wheel, ``python -m dpcore.native`` (or :func:`build`) compiles the
sources of this folder into the user's cache. Without either, or with ``DPCORE_NATIVE=0``, every rule runs its pure
torch form, which computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dpcore.native.compiling import (
    COMPILERS,
    RELEASE,
    NativeBuildError,
    as_in_the_wheel,
    compile_library,
    compiler,
)
from dpcore.native.levels import levels_here
from dpcore.native.library import SWITCH, allowed, compiled_path, function, kernels

__all__ = ["COMPILERS", "SWITCH", "NativeBuildError", "available", "build", "description", "disabled", "path", "reload"]

REMEDY = "not in use (python -m dpcore.native compiles them, where there is a C++ compiler)"


def path() -> Path:
    """Return where the library lies, or would lie, that is compiled here for the best instruction set that is allowed.

    Raises:
        NativeBuildError: there are no kernels for this processor, or the environment forbids them.
    """
    levels = allowed() or levels_here()
    if not levels:
        raise NativeBuildError("Kernels run on Linux on x86-64-v2 and later and on armv8-a; this is neither.")
    return compiled_path(levels[0])


def build() -> Path:
    """Compile the library unless it is there, and return its path.

    Raises:
        NativeBuildError: there is no C++ compiler, it failed, or there are no kernels for this processor.
    """
    target = path()
    if not target.exists():
        level = (allowed() or levels_here())[0]
        compile_library(target, level.name, compiler(), RELEASE if as_in_the_wheel() else ())
    reload()
    return target


def reload() -> None:
    """Look for the library again, after a build or a change of the environment."""
    kernels.cache_clear()


def description() -> str:
    """Return whether kernels are in use and for which instruction set, or how to get them."""
    found = kernels()
    return REMEDY if found is None or _switched_off else f"in use ({found.level.name})"


_switched_off = False


def available() -> bool:
    """Return whether the compiled part is in use."""
    return kernels() is not None and not _switched_off


@contextmanager
def disabled() -> Iterator[None]:
    """Within, every rule runs its pure torch form: to compare the two."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def serves(*tensors: Tensor) -> bool:
    """Return whether kernels can take these tensors.

    They must be float32 on a CPU, outside of tracing, with memory of their own that holds their values (not their
    negatives, as that of ``z.conj().imag`` does).
    """
    # First what no kernel may run in: the first look for a library draws random numbers to check it.
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() or not available():
        return False
    return are_plain(*tensors)


def are_plain(*tensors: Tensor) -> bool:
    """Return the part of :func:`serves` that is about the tensors, for where it was asked about others before."""
    for t in tensors:
        if (
            type(t) is not Tensor
            or t.dtype != torch.float32
            or t.device.type != "cpu"
            or t.is_neg()
            or t._is_zerotensor()
        ):
            return False
    return True


def serves_graph(*tensors: Tensor) -> bool:
    """Do what :func:`serves` does, for tensors without values while a graph is traced that will call the kernels."""
    return available() and all(
        isinstance(t, FakeTensor) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors
    )


def _call(name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int], *numbers: float, strided: int = 0) -> int:
    """``strided``: so many tensors at the beginning may have any strides, which are among the sizes; None: none.

    Returns what the function returns, if anything.
    """
    found = kernels()
    assert found is not None
    for tensor in tensors[strided:]:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} got a tensor of strides {tensor.stride()} for shape {tuple(tensor.shape)}.")
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    return function(found.library, name, len(pointers), len(sizes), len(numbers))(*pointers, *sizes, *numbers)


def lstm_forward(z: Tensor, weight: Tensor, gates: Tensor, h: Tensor, c: Tensor, tanh_c: Tensor, reverse: bool) -> None:
    """The loop of :class:`dpcore.rules.recurrent_loops.LstmRecurrence`: from z [T, B, 4H] and the first rows of h and
    c [T + 1, B, H] (the last ones in reverse) fills in gates [T, B, 4H], which may be z itself, tanh_c [T, B, H], h and
    c.
    """
    steps, batch, hidden = tanh_c.shape
    sizes = (steps, batch, hidden, int(reverse), torch.get_num_threads())
    _call("dpcore_lstm_forward", (z, weight.contiguous(), gates, h, c, tanh_c), sizes)
    torch.autograd.graph.increment_version(gates)


def lstm_backward(
    gates: Tensor,
    c: Tensor,
    tanh_c: Tensor,
    weight: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    delta: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """From the gradients at all h [T, B, H] and the last c, fills in δ [T, B, 4H], which may be ``gates`` itself, and
    returns the gradients at the first h and c [B, H].
    """
    steps, batch, hidden = tanh_c.shape
    dc = grad_c.clone(memory_format=torch.contiguous_format)
    dh = torch.empty_like(dc)
    sizes = (steps, batch, hidden, int(reverse), torch.get_num_threads())
    read = (t.contiguous() for t in (c, tanh_c, weight, grad_h))
    tensors = (gates, *read, delta, dh, dc)
    _call("dpcore_lstm_backward", tensors, sizes)
    torch.autograd.graph.increment_version(delta)
    return dh, dc


def gru_forward(
    z: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, recurrent_n: Tensor, h: Tensor, reverse: bool
) -> None:
    """The loop of :class:`dpcore.rules.recurrent_loops.GruRecurrence`: from z [T, B, 3H] and the first row of h
    [T + 1, B, H] (the last one in reverse) fills in gates [T, B, 3H], which may be z itself, recurrent_n [T, B, H] and
    h.
    """
    sizes = (*recurrent_n.shape, int(reverse), torch.get_num_threads())
    bias = None if bias is None else bias.contiguous()
    _call("dpcore_gru_forward", (z, weight.contiguous(), bias, gates, recurrent_n, h), sizes)
    torch.autograd.graph.increment_version(gates)


def gru_backward(
    gates: Tensor, recurrent_n: Tensor, h: Tensor, weight: Tensor, grad_h: Tensor, delta: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """From the gradients at all h [T, B, H], fills in δ at z [T, B, 3H], which may be ``gates`` itself, and returns the
    gradients at W h + b [T, B, 3H] and at the first h [B, H].
    """
    at_recurrent, dh = torch.empty_like(gates), h.new_empty(h.shape[1:])
    sizes = (*recurrent_n.shape, int(reverse), torch.get_num_threads())
    # What the pure loop kept may be a part of something wider.
    read = (t.contiguous() for t in (recurrent_n, h, weight, grad_h))
    tensors = (gates, *read, delta, at_recurrent, dh)
    _call("dpcore_gru_backward", tensors, sizes)
    torch.autograd.graph.increment_version(delta)
    return at_recurrent, dh


def rnn_forward(z: Tensor, weight: Tensor, h: Tensor, relu: bool, reverse: bool) -> None:
    """The loop of :class:`dpcore.rules.recurrent_loops.RnnRecurrence`: from z [T, B, H] and the first row of h [T + 1,
    B, H] (the last one in reverse) fills in h.
    """
    sizes = (int(relu), *z.shape, int(reverse), torch.get_num_threads())
    _call("dpcore_rnn_forward", (z.contiguous(), weight.contiguous(), h), sizes)


def rnn_backward(h: Tensor, weight: Tensor, grad_h: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    """From the gradients at all h [T, B, H], returns δ [T, B, H] and the gradient at the first h [B, H]."""
    delta = torch.empty(grad_h.shape, dtype=h.dtype, device=h.device)
    dh = h.new_empty(h.shape[1:])
    sizes = (int(relu), *grad_h.shape, int(reverse), torch.get_num_threads())
    _call("dpcore_rnn_backward", (h.contiguous(), weight.contiguous(), grad_h.contiguous(), delta, dh), sizes)
    return delta, dh


def _dense_last(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where their last dimension is not dense."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _contraction_sizes(g: Tensor, x: Tensor) -> tuple[int, ...]:
    return (*g.shape, x.shape[2], *g.stride()[:2], *x.stride()[:2])


def contraction_grad_sample(g: Tensor, x: Tensor) -> Tensor:
    """[B, d, p]: Σ_t g_t x_tᵀ of each example, for g [B, T, d] and x [B, T, p] of any strides."""
    g, x = _dense_last(g, x)
    out = x.new_empty((len(x), g.shape[2], x.shape[2]))
    sizes = (*_contraction_sizes(g, x), torch.get_num_threads())
    _call("dpcore_contraction_grad_sample", (g, x, out, None), sizes, strided=2)
    return out


def contraction_into(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Write what :func:`contraction_grad_sample` returns to ``out``, and return its squared norms [B], in float64."""
    g, x = _dense_last(g, x)
    squares = out.new_empty(len(x), dtype=torch.float64)
    sizes = (*_contraction_sizes(g, x), torch.get_num_threads())
    _call("dpcore_contraction_grad_sample", (g, x, out, squares), sizes, strided=2)
    torch.autograd.graph.increment_version(out)
    return squares


GRAM_BLOCK = 512
"""Products that :func:`contraction_norms` adds up in float32 at most, as in contraction.cpp."""


def gram_roundings(length: int) -> int:
    """Return how many roundings a product of vectors passes through in :func:`contraction_norms`.

    Those of its lane in a block, and those of the lanes' sum; blocks are added up in float64.
    """
    found = kernels()
    assert found is not None
    lanes = int(found.library.dpcore_lanes())
    return min(length, -(-min(length, GRAM_BLOCK) // lanes) + lanes)


def contraction_norms(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms of what :func:`contraction_grad_sample` returns, without forming it, by Gram matrices.

    Returns, in float64 and [B], the squared norms, (Σ_t |x_t||g_t|)² and Σ_t max(|x_t|², |g_t|²). Products of vectors
    pass through at most :func:`gram_roundings` roundings; nothing after them is float32.
    """
    g, x = _dense_last(g, x)
    found = x.new_empty((3, len(x)), dtype=torch.float64)
    norms, scales, largest = found.unbind(0)
    sizes = (*_contraction_sizes(g, x), torch.get_num_threads())
    _call("dpcore_contraction_norms", (g, x, norms, scales, largest), sizes, strided=2)
    return norms, scales, largest


def contraction_clipped_sum(g: Tensor, x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Out [d, p], whose last dimension is dense, += Σ_b factors[b] Σ_t g_t x_tᵀ, for g and x as above, factors [B].

    An example whose factor is 0 is left out, whatever it holds.
    """
    g, x = _dense_last(g, x)
    if out.stride(1) != 1:
        raise ValueError(f"dpcore_contraction_clipped_sum got sums of strides {out.stride()}.")
    sizes = (*_contraction_sizes(g, x), out.stride(0), torch.get_num_threads())
    _call("dpcore_contraction_clipped_sum", (g, x, out, factors.contiguous()), sizes, strided=3)
    torch.autograd.graph.increment_version(out)


def conv2d_grad_sample(
    x: Tensor,
    grad: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    channels_last: bool = True,
) -> Tensor:
    """[B, d, c, kh, kw], in memory channels-last or not: the weight gradient of each example of a convolution with
    inputs x [B, c, h, w] and output gradients [B, d, oh, ow], without groups or dilation.
    """
    channels, height, width = x.shape[1:]
    inputs, grads = (x.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1)) if channels_last else (x, grad)
    inputs, grads = inputs.contiguous(), grads.contiguous()
    window = (*kernel, channels) if channels_last else (channels, *kernel)
    out = x.new_empty((x.shape[0], grad.shape[1], *window))
    of_x = (x.shape[0], height, width, channels)
    sizes = (*of_x, grad.shape[1], *kernel, *stride, *padding, *grad.shape[2:], int(not channels_last))
    _call("dpcore_conv2d_grad_sample", (inputs, grads, out), (*sizes, torch.get_num_threads()))
    return out.movedim(-1, 2) if channels_last else out


def count_tokens(ids: Tensor, rows: int, skipped: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count the tokens of each example of ids [B, T], each in [0, rows).

    Returns the different ids of each example (int32) and how often it holds each (float32), those of example b at
    starts[b] : starts[b + 1] (int32 [B + 1]), and the sums of the squared counts [B]. ``skipped`` does not count.
    """
    batch, length = ids.shape
    # torch.empty alone would follow torch.set_default_dtype and set_default_device; the kernel does not.
    tokens, counts = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.numel(), dtype=torch.float32)
    starts, squares = ids.new_empty(batch + 1, dtype=torch.int32), ids.new_empty(batch, dtype=torch.float32)
    sizes = (batch, length, rows, -1 if skipped is None else skipped)
    _call("dpcore_count_tokens", (ids, tokens, counts, starts, squares), sizes)
    return tokens, counts, starts, squares


def add_by_token(out: Tensor, tokens: Tensor, counts: Tensor, starts: Tensor, vectors: Tensor) -> None:
    """out[tokens[n]] += counts[n] * vectors[b] for all n in starts[b] : starts[b + 1]; out [V, d], vectors [B, d]."""
    sizes = (len(vectors), *out.shape, torch.get_num_threads())
    _call("dpcore_add_by_token", (tokens, counts, starts, vectors.contiguous(), out), sizes)


def _rows_of_classes(z: Tensor) -> tuple[int, ...]:
    """(rows, rows for one step of the first dimension, classes, strides) of z [.., C] of two or three dimensions."""
    inner, outer_step = (z.shape[1], z.stride(0)) if z.dim() == 3 else (max(len(z), 1), 0)
    return z.shape[:-1].numel(), max(inner, 1), z.shape[-1], outer_step, z.stride(-2)


def cross_entropy(z: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses [R] of logits z [R, C] or [A, R / A, C], whose last dimension is dense, and what the gradient needs.

    The labels [R] are in [0, C), or ``ignored``: there the loss is 0.
    """
    rows = labels.numel()
    losses, shifts = z.new_empty(rows), z.new_empty((2, rows))
    sizes = (*_rows_of_classes(z), ignored, torch.get_num_threads())
    _call("dpcore_cross_entropy_forward", (z, labels, losses, shifts), sizes, strided=1)
    return losses, shifts


def cross_entropy_grad(z: Tensor, labels: Tensor, grad: Tensor, shifts: Tensor, ignored: int) -> Tensor | None:
    """The gradient of Σ_r grad[r] loss[r] at z, dense, of its shape, for what :func:`cross_entropy` took and gave.

    None where they have changed since: the probabilities of a row do not add up to one, or a label is no class.
    """
    (z,) = _dense_last(z)  # what hooks of saved tensors bring back may lie in memory otherwise
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    sizes = (*_rows_of_classes(z), ignored, torch.get_num_threads())
    changed = _call("dpcore_cross_entropy_backward", (z, labels, grad.contiguous(), shifts, out), sizes, strided=1)
    return None if changed else out


def gelu(x: Tensor) -> Tensor:
    """GELU of x by its tanh form, dense."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _call("dpcore_gelu_forward", (x, out), (x.numel(), torch.get_num_threads()))
    return out


def gelu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient at x for one at what :func:`gelu` gave."""
    x, grad = x.contiguous(), grad.contiguous()
    out = torch.empty_like(x)
    _call("dpcore_gelu_backward", (x, grad, out), (x.numel(), torch.get_num_threads()))
    return out


def max_pool(x: Tensor, window: Sequence[int], size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest of every window of x [.., H, W], and what the gradient needs, both [.., *size].

    ``window``: the kernel's height and width (at most 255 numbers), strides, paddings. x is dense, or [B, C, H, W]
    whose channels lie beside each other, as those of the result then do.
    """
    shape, last = (*x.shape[:-2], *size), not x.is_contiguous()
    shape = (shape[0], *size, shape[1]) if last else shape
    out = x.new_empty(shape)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)  # not the user's default one
    if not last:
        _call("dpcore_max_pool_forward", (x, out, codes), _planes(x, window, size))
        return out, codes
    _call("dpcore_max_pool_forward_last", (x.permute(0, 2, 3, 1), out, codes), _pictures(x, window, size))
    return out.permute(0, 3, 1, 2), codes.permute(0, 3, 1, 2)


def max_pool_grad(grad: Tensor, codes: Tensor, shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """The gradient at x of ``shape`` for one at what :func:`max_pool` gave."""
    if codes.is_contiguous():
        found = grad.new_zeros(shape)
        sizes = _planes(found, window, grad.shape[-2:])
        _call("dpcore_max_pool_backward", (grad.contiguous(), codes, found), sizes)
        return found
    found = grad.new_zeros((shape[0], *shape[2:], shape[1])).permute(0, 3, 1, 2)
    order = [t.permute(0, 2, 3, 1) for t in (grad, codes, found)]
    _call(
        "dpcore_max_pool_backward_last", (order[0].contiguous(), *order[1:]), _pictures(found, window, grad.shape[-2:])
    )
    return found


def _planes(x: Tensor, window: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    return (*x.shape[-2:], *size, *window, x.shape[:-2].numel(), torch.get_num_threads())


def _pictures(x: Tensor, window: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    return (*x.shape[-2:], *size, *window, *x.shape[:2], torch.get_num_threads())


def put_normals(target: Tensor, std: float, name: bytes, start: int, add: bool) -> None:
    """Write std * (the numbers from ``start`` on of the stream ``name``) to ``target``, or ``add`` them to it."""
    found = kernels()
    if found is None or not target.is_contiguous():
        raise ValueError(f"Noise cannot be written to a tensor of strides {target.stride()}.")
    call = function(found.library, "dpcore_add_normals" if add else "dpcore_fill_normals", 2, 3, 1)
    call(name, target.data_ptr(), start, target.numel(), torch.get_num_threads(), std)
    torch.autograd.graph.increment_version(target)


def fill_mixed(
    rows: Tensor, names: bytes, factors: Sequence[float], start: int, feeds_back: bool, goes_on: bool
) -> None:
    """Set rows [K, n] to the mixed noise of the last K of the steps whose streams have these ``names``.

    A step's is its own numbers from ``start`` on, plus factors[j] times those of the step j + 1 before it, or, where it
    ``feeds_back``, times that step's mixed noise. Before the first step there was none, or it ``goes_on`` behind what
    the rows hold, at least as many as there are factors.
    """
    words = torch.frombuffer(bytearray(names), dtype=torch.uint8)
    by = torch.tensor(factors, dtype=torch.float32, device="cpu")
    sizes = (len(names) // 16, len(by), *rows.shape, start, int(feeds_back), int(goes_on), torch.get_num_threads())
    _call("dpcore_fill_mixed", (words, by, rows), sizes)
    torch.autograd.graph.increment_version(rows)


def add_normals_to_rows(target: Tensor, deviations: Tensor, name: bytes, rows: Tensor, start: int) -> None:
    """target[i, j] += deviations[i] * (number start + rows[i] * width + j of the stream), as :mod:`dpcore.normals`.

    ``rows``: int64 [n], different ones in ascending order; target [n, width], deviations [n].
    """
    words = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    sizes = (*target.shape, start, torch.get_num_threads())
    _call("dpcore_add_normals_to_rows", (words, target, rows, deviations), sizes)
    torch.autograd.graph.increment_version(target)
