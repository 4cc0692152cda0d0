"""Check that a library of kernels computes on this processor what torch computes: a few milliseconds when it is loaded.

The sizes fill whole vectors and parts of them, at every width. What is checked here are the compiler and the processor;
the kernels' own tests compare every shape with float64.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dpcore import normals
from dpcore.numerics.precision import full_precision

TOLERANCE = 1e-4
"""Largest difference over the largest value: sums of float32 in another order differ by some 1e-6."""

Call = Callable[..., None]
Numbers = Callable[..., Tensor]


def fault(library: ctypes.CDLL) -> str | None:
    """Return which kernel of the library is wrong; None where all are right."""

    def call(name: str, tensors: Sequence[Tensor], *sizes: int, numbers: Sequence[float] = ()) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        getattr(library, name)(*pointers, *map(ctypes.c_int64, sizes), *map(ctypes.c_double, numbers))

    # Not the user's default type, device or precision; and no graph, mode or hook of theirs.
    modes = torch.autocast("cpu", enabled=False), full_precision(), torch._C._DisableTorchDispatch()
    with torch.no_grad(), torch.device("cpu"), modes[0], modes[1], modes[2]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            for name, found, true in _pairs(call, torch.Generator().manual_seed(0)):
                scale = float(true.abs().max())
                if not float((found - true).abs().max()) <= TOLERANCE * scale:
                    return f"{name} is wrong on this processor"
        except (AttributeError, RuntimeError) as error:  # a kernel is missing, or the check cannot run here
            return str(error)
        finally:
            torch.set_default_dtype(before)
    return None


def _pairs(call: Call, own: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(kernel, what it computes, what torch computes) of every kernel; the numbers come from ``own``."""
    randn = functools.partial(torch.randn, generator=own)
    yield from _contraction(call, randn)
    yield from _convolution(call, randn)
    yield from _tokens(call, randn)
    yield from _normals(call)
    yield from _lstm(call, randn)
    yield from _gru(call, randn)
    yield from _rnn(call, randn)
    yield from _cross_entropy(call, randn)
    yield from _parts(call, randn)
    yield from _products(call, randn)
    yield from _max_pool(call, randn)
    yield from _gelu(call, randn)


def _contraction(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    g, x = randn(2, 5, 21), randn(2, 5, 37)
    sizes = 2, 5, 21, 37, 105, 21, 185, 37
    true = torch.einsum("btd,btp->bdp", g, x)
    out, squares = torch.full((2, 21, 37), float("nan")), torch.full((2,), float("nan"), dtype=torch.float64)
    call("dpcore_contraction_grad_sample", (g, x, out, squares), *sizes, 1)
    yield "contraction", out, true
    true_squares = true.double().square().sum((1, 2))
    yield "contraction's squares", squares, true_squares
    norms, scales, largest = torch.full((3, 2), float("nan"), dtype=torch.float64)
    call("dpcore_contraction_norms", (g, x, norms, scales, largest), *sizes, 1)
    yield "contraction_norms", norms, true_squares
    of_x, of_g = x.double().square().sum(2), g.double().square().sum(2)
    yield "contraction_norms' scales", scales, (of_x * of_g).sqrt().sum(1).square()
    yield "contraction_norms' largest", largest, torch.maximum(of_x, of_g).sum(1)
    out, factors = torch.ones(21, 37), torch.tensor([0.5, 2.0])
    call("dpcore_contraction_clipped_sum", (g, x, out, factors), *sizes, 37, 1)
    yield "contraction_clipped_sum", out, 1.0 + torch.einsum("b,bdp->dp", factors, true)


def _convolution(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, g = randn(2, 6, 7, 5), randn(2, 6, 7, 19)
    sizes = 2, 6, 7, 5, 19, 3, 3, 1, 1, 1, 1, 6, 7
    out = torch.full((2, 19, 3, 3, 5), float("nan"))
    call("dpcore_conv2d_grad_sample", (x, g, out), *sizes, 0, 1)
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    windows = padded.unfold(1, 3, 1).unfold(2, 3, 1)  # [B, oh, ow, c, kh, kw]
    true = torch.einsum("bhwd,bhwckl->bdklc", g, windows)
    yield "convolution", out, true
    out = torch.full((2, 19, 5, 3, 3), float("nan"))
    first = [t.permute(0, 3, 1, 2).contiguous() for t in (x, g)]
    call("dpcore_conv2d_grad_sample", (*first, out), *sizes, 1, 1)
    yield "convolution, channels first", out, true.movedim(-1, 2)


def _tokens(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    ids = torch.tensor([[3, 1, 3, 0], [2, 2, 2, 5]])
    tokens, counts = torch.zeros(8, dtype=torch.int32), torch.zeros(8)
    starts, squares = torch.zeros(3, dtype=torch.int32), torch.zeros(2)
    call("dpcore_count_tokens", (ids, tokens, counts, starts, squares), 2, 4, 6, 0)  # token 0 does not count
    yield "count_tokens", squares, torch.tensor([5.0, 10.0])
    vectors, out = randn(2, 19), torch.zeros(6, 19)
    call("dpcore_add_by_token", (tokens, counts, starts, vectors, out), 2, 6, 19, 1)
    one_hot = torch.nn.functional.one_hot(ids, 6).sum(1).float()
    one_hot[:, 0] = 0.0
    yield "add_by_token", out, one_hot.T @ vectors


def _normals(call: Call) -> Iterator[tuple[str, Tensor, Tensor]]:
    name, start, count = bytes(range(normals.NAME_BYTES)), normals.BLOCK - 300, 1000
    words, true = torch.tensor(list(name), dtype=torch.uint8), normals.normals(name, count, start)
    for kind, found in (("add_normals", torch.zeros(count)), ("fill_normals", torch.full((count,), float("nan")))):
        call(f"dpcore_{kind}", (words, found), start, count, 1, numbers=(1.0,))
        yield kind, found, true
    rows, deviations, found = torch.tensor([0, 2, 3, 41]), torch.tensor([1.0, 0.5, 2.0, 3.0]), torch.zeros(4, 19)
    call("dpcore_add_normals_to_rows", (words, found, rows, deviations), 4, 19, 300, 1)
    of_rows = torch.zeros(4, 19)
    normals.add_to_rows(of_rows, deviations, name, rows, 300)
    yield "add_normals_to_rows", found, of_rows
    names = [name, name[::-1], name[8:] + name[:8]]
    words = torch.tensor(list(b"".join(names)), dtype=torch.uint8)
    z, factors = torch.stack([normals.normals(one, count, start) for one in names]), torch.tensor([-0.5, -0.25])
    for feeds_back in (0, 1):
        found, second = torch.full((2, count), float("nan")), z[1] - 0.5 * z[0]
        call("dpcore_fill_mixed", (words, factors, found), 3, 2, 2, count, start, feeds_back, 0, 1)
        third = z[2] - 0.5 * (second if feeds_back else z[1]) - 0.25 * z[0]
        yield "fill_mixed", found, torch.stack([second, third])


def _lstm(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    steps, batch, hidden = 3, 5, 19
    z, weight = randn(steps, batch, 4 * hidden), randn(4 * hidden, hidden)
    h, c = torch.zeros(steps + 1, batch, hidden), torch.zeros(steps + 1, batch, hidden)
    gates, tanh_c = torch.empty_like(z), torch.empty(steps, batch, hidden)
    call("dpcore_lstm_forward", (z, weight, gates, h, c, tanh_c), steps, batch, hidden, 0, 1)
    state, cell = torch.zeros(batch, hidden), torch.zeros(batch, hidden)
    states, kept = [], []
    for t in range(steps):
        i, f, g, o = (z[t] + state @ weight.T).chunk(4, 1)
        i, f, g, o, before = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), cell
        cell = f * cell + i * g
        state = o * cell.tanh()
        states.append(state)
        kept.append((i, f, g, o, before, cell.tanh()))
    yield "lstm_forward", h[1:], torch.stack(states)
    # By hand, for the first use of autograd in a process takes half a second.
    grad = randn(steps, batch, hidden)
    true, grad_h, grad_c = torch.empty_like(z), torch.zeros(batch, hidden), torch.zeros(batch, hidden)
    for t in reversed(range(steps)):
        i, f, g, o, before, tanh = kept[t]
        grad_h = grad_h + grad[t]
        grad_c = grad_c + grad_h * o * (1 - tanh**2)
        parts = (grad_c * g * i * (1 - i), grad_c * before * f * (1 - f), grad_c * i * (1 - g**2))
        true[t] = torch.cat((*parts, grad_h * tanh * o * (1 - o)), 1)
        grad_h, grad_c = true[t] @ weight, grad_c * f
    delta, dh, dc = torch.empty_like(z), torch.zeros(batch, hidden), torch.zeros(batch, hidden)
    call("dpcore_lstm_backward", (gates, c, tanh_c, weight, grad, delta, dh, dc), steps, batch, hidden, 0, 1)
    yield "lstm_backward", delta, true


def _gru(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    steps, batch, hidden = 3, 5, 19
    z, weight, bias = randn(steps, batch, 3 * hidden), randn(3 * hidden, hidden), randn(3 * hidden)
    h, gates, of_n = torch.zeros(steps + 1, batch, hidden), torch.empty_like(z), torch.empty(steps, batch, hidden)
    call("dpcore_gru_forward", (z, weight, bias, gates, of_n, h), steps, batch, hidden, 0, 1)
    state, states, kept = torch.zeros(batch, hidden), [], []
    for t in range(steps):
        (z_r, z_u, z_n), (r, u, m) = z[t].chunk(3, 1), (state @ weight.T + bias).chunk(3, 1)
        r, u = (z_r + r).sigmoid(), (z_u + u).sigmoid()
        n = (z_n + r * m).tanh()
        kept.append((r, u, n, m, state))
        state = (1 - u) * n + u * state
        states.append(state)
    yield "gru_forward", h[1:], torch.stack(states)
    grad, grad_h = randn(steps, batch, hidden), torch.zeros(batch, hidden)
    true, true_recurrent = torch.empty_like(z), torch.empty_like(z)
    for t in reversed(range(steps)):
        r, u, n, m, before = kept[t]
        grad_h = grad_h + grad[t]
        to_n = grad_h * (1 - u) * (1 - n**2)
        first = to_n * m * r * (1 - r), grad_h * (before - n) * u * (1 - u)
        true[t], true_recurrent[t] = torch.cat((*first, to_n), 1), torch.cat((*first, to_n * r), 1)
        grad_h = true_recurrent[t] @ weight + grad_h * u
    delta, recurrent, dh = torch.empty_like(z), torch.empty_like(z), torch.zeros(batch, hidden)
    call("dpcore_gru_backward", (gates, of_n, h, weight, grad, delta, recurrent, dh), steps, batch, hidden, 0, 1)
    yield "gru_backward", delta, true
    yield "gru_backward's recurrent part", recurrent, true_recurrent
    yield "gru_backward's end", dh, grad_h


def _rnn(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    steps, batch, hidden = 3, 5, 83  # a panel of whole vectors and a part of one, at every width
    z, weight, grad = randn(steps, batch, hidden), randn(hidden, hidden) / 8, randn(steps, batch, hidden)
    for relu in (0, 1):
        h, state, states = torch.zeros(steps + 1, batch, hidden), torch.zeros(batch, hidden), []
        call("dpcore_rnn_forward", (z, weight, h), relu, steps, batch, hidden, 0, 1)
        for t in range(steps):
            state = z[t] + state @ weight.T
            state = state.relu() if relu else state.tanh()
            states.append(state)
        yield "rnn_forward", h[1:], torch.stack(states)
        true, grad_h = torch.empty_like(z), torch.zeros(batch, hidden)
        for t in reversed(range(steps)):
            # Of the kernel's own states, or the least rounding could set another unit to zero.
            true[t] = (grad_h + grad[t]) * ((h[t + 1] > 0).float() if relu else 1 - h[t + 1] ** 2)
            grad_h = true[t] @ weight
        delta, dh = torch.empty_like(z), torch.zeros(batch, hidden)
        call("dpcore_rnn_backward", (h, weight, grad, delta, dh), relu, steps, batch, hidden, 0, 1)
        yield "rnn_backward", delta, true
        yield "rnn_backward's end", dh, grad_h


def _cross_entropy(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, classes = 3, 151
    z, labels, grad = 5.0 * randn(rows, classes), torch.tensor([0, 150, -1]), randn(rows)
    losses, shifts, found = torch.empty(rows), torch.empty(2, rows), torch.empty(rows, classes)
    call("dpcore_cross_entropy_forward", (z, labels, losses, shifts), rows, rows, classes, 0, classes, -1, 1)
    logs = z.double().log_softmax(1)
    true = torch.stack([-logs[0, 0], -logs[1, 150], torch.zeros((), dtype=torch.float64)])
    yield "cross_entropy", losses, true
    call("dpcore_cross_entropy_backward", (z, labels, grad, shifts, found), rows, rows, classes, 0, classes, -1, 1)
    true = logs.exp()
    true[0, 0] -= 1.0
    true[1, 150] -= 1.0
    true[2] = 0.0
    yield "cross_entropy_grad", found, grad[:, None] * true


def _parts(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, positions, left, right = randn(3, 83), randn(3, 70, 21), randn(3, 19), randn(3, 37)
    bags, ids = randn(3, 21), torch.tensor([[4, 1, 4, 4], [0, 2, 1, 0], [3, 3, 3, 3]])
    made, outs = torch.empty(3, 21), (torch.ones(83), torch.ones(21), torch.ones(19, 37), torch.ones(5, 21))
    table = [
        (0, rows.data_ptr(), 83, 83, 0, 0, 0, 0, 0, 0, outs[0].data_ptr(), 0),
        (1, positions.data_ptr(), 70 * 21, 21, 70, 21, made.data_ptr(), 0, 0, 0, outs[1].data_ptr(), 0),
        (2, left.data_ptr(), 19, 19, 0, 0, 0, right.data_ptr(), 37, 37, outs[2].data_ptr(), 37),
        (3, bags.data_ptr(), 21, 21, 4, 0, 0, ids.data_ptr(), 4, 5, outs[3].data_ptr(), 21),
    ]
    parts = torch.tensor(table, dtype=torch.int64)
    norms = torch.ones(3)
    call("dpcore_add_norms_of_parts", (parts, norms), 4, 3, 1)
    of_bags = torch.nn.functional.one_hot(ids, 5).sum(1).float()[:, :, None] * bags[:, None]
    gradients = rows, positions.sum(1), left[:, :, None] * right[:, None], of_bags
    found = torch.empty(2, 2)
    call("dpcore_clip_factors", (torch.tensor([0.5, 4.0]), *found), 2, numbers=(2.0, 0.5))
    yield "clip_factors", found, torch.tensor([[1.0, 0.5], [0.5, 0.25]])
    yield "add_norms_of_parts", norms, 1.0 + torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    factors = torch.tensor([0.5, 0.0, 2.0])
    call("dpcore_add_parts", (parts, factors), 4, 3, 1)
    for out, g in zip(outs, gradients, strict=True):
        yield "add_parts", out, 1.0 + torch.tensordot(factors, g, dims=1)


def _products(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    pairs = [(randn(2, 5, 21), randn(2, 5, 37)), (randn(2, 3, 19), randn(2, 3, 83))]
    outs = [torch.full((g.shape[2], x.shape[2]), float("nan")) for g, x in pairs]
    sums = [torch.ones_like(out) for out in outs]
    table = [
        (g.data_ptr(), x.data_ptr(), g.shape[1], g.shape[2], x.shape[2], *g.stride()[:2], *x.stride()[:2], *ends)
        for (g, x), *ends in zip(pairs, (o.data_ptr() for o in outs), (s.data_ptr() for s in sums), strict=True)
    ]
    products, squares = torch.tensor(table, dtype=torch.int64), torch.full((2,), float("nan"), dtype=torch.float64)
    call("dpcore_form_products", (products, squares), 2, 1, 1)
    true = [torch.einsum("tn,tm->nm", g[1], x[1]) for g, x in pairs]
    yield "form_products", squares, torch.stack([t.double().square().sum() for t in true])
    factors = torch.tensor([0.5, 2.0])
    call("dpcore_add_products", (products, factors), 2, 1)
    for out, summed, t, factor in zip(outs, sums, true, factors, strict=True):
        yield "form_products", out, t
        yield "add_products", summed, 1.0 + factor * t
    norms, found, added = torch.tensor([1.0, 1e9]), torch.zeros(2), torch.zeros(2)
    for summed in sums:
        summed.zero_()
    call("dpcore_clip_products", (products, squares, added, norms, found), 2, 2, 1, numbers=(3.0, 2.0))
    gradients = [torch.einsum("btn,btm->bnm", g, x) for g, x in pairs]
    true_norms = torch.tensor([1.0, 1e9]) + torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    yield "clip_products", norms, true_norms
    yield "clip_products' factors", found, (3.0 / true_norms.sqrt()).clamp(max=1.0)
    for summed, g in zip(sums, gradients, strict=True):
        yield "clip_products' sums", summed, torch.tensordot(2.0 * found, g, dims=1)


def _max_pool(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    for stride in (1, 2):
        x, size = randn(2, 3, 21, 37), (21, 37) if stride == 1 else (11, 19)
        grad, window = randn(2, 3, *size), ([3, 3], [stride, stride], [1, 1], [1, 1], False)
        true, places = torch.ops.aten.max_pool2d_with_indices(x, *window)
        true_grad = torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *window, places)
        sizes = (21, 37, *size, 3, 3, stride, stride, 1, 1)
        for last, order in (("", (0, 1, 2, 3)), ("_last", (0, 2, 3, 1))):
            of_x, of_grad = (t.permute(order).contiguous() for t in (x, grad))
            out, codes, found = of_grad.new_empty(of_grad.shape), of_grad.byte(), torch.zeros_like(of_x)
            count = (6,) if not last else (2, 3)
            call(f"dpcore_max_pool_forward{last}", (of_x, out, codes), *sizes, *count, 1)
            call(f"dpcore_max_pool_backward{last}", (of_grad, codes, found), *sizes, *count, 1)
            yield f"max_pool{last}", out, true.permute(order)
            yield f"max_pool_grad{last}", found, true_grad.permute(order)


def _gelu(call: Call, randn: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad = 3.0 * randn(83), randn(83)
    out, found = torch.empty(83), torch.empty(83)
    call("dpcore_gelu_forward", (x, out), 83, 1)
    call("dpcore_gelu_backward", (x, grad, found), 83, 1)
    yield "gelu", out, torch.nn.functional.gelu(x, approximate="tanh")
    yield "gelu_grad", found, torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
