"""The kernels for GPUs, by Triton's interpreter on the CPU, beside float64; and compiled ahead of time for two GPUs.

    make test-gpu-kernels

Triton lies in a folder of its own: beside torch it would change what torch.compile does.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

triton = pytest.importorskip("triton", reason="no Triton: make test-gpu-kernels brings it")
if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("DPCORE_TRITON") != "1":
    pytest.skip("run by make test-gpu-kernels, which sets the interpreter", allow_module_level=True)

import triton.language as tl  # noqa: E402

from dpcore import Engine, GaussianNoise, PrivacyEngine, gpu, normals, reference  # noqa: E402
from dpcore.errors import PrivacyError  # noqa: E402
from dpcore.gpu import contraction, convolution, tuned  # noqa: E402
from dpcore.gpu import noise as noise_kernel  # noqa: E402
from dpcore.gpu.tuned import Sizes  # noqa: E402
from dpcore.gpu.windows import Windows  # noqa: E402
from dpcore.microbatch.accumulator import Accumulator  # noqa: E402
from dpcore.noise import SecureNoise  # noqa: E402
from dpcore.numerics.rounding import gamma  # noqa: E402

EXAMPLES = 3
sizes = st.integers(1, 80)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def operands(steps: int, d: int, p: int, dtype: torch.dtype, strided: bool = False) -> tuple[Tensor, Tensor]:
    """Return random output gradients [B, T, d] and inputs [B, T, p]."""
    generator = torch.Generator().manual_seed(steps + 100 * d + 10_000 * p)
    g, x = (torch.randn(EXAMPLES, n, steps, generator=generator).to(dtype).transpose(1, 2) for n in (d, p))
    return (g, x) if strided else (g.contiguous(), x.contiguous())


def gradients(g: Tensor, x: Tensor) -> Tensor:
    """[B, d, p] in float64."""
    return torch.einsum("btd,btp->bdp", g.double(), x.double())


def added(g: Tensor, x: Tensor, limits: Tensor | None) -> Tensor:
    """[B, d, p] in float64: what the kernel adds for each example alone, at a factor of 1."""
    each = []
    for i in range(len(g)):
        out = torch.zeros(g.shape[2], x.shape[2])
        of = None if limits is None else limits[i : i + 1]
        gpu.contraction_clipped_sum(g[i : i + 1], x[i : i + 1], torch.ones(1), out, of)
        each.append(out.double())
    return torch.stack(each)


@pytest.mark.parametrize("tiled", [True, False])
@settings(max_examples=10, deadline=None)
@given(steps=sizes, d=sizes, p=sizes, dtype=dtypes, strided=st.booleans(), cancels=st.floats(0, 1))
def test_a_norm_is_within_its_own_error_and_so_is_what_is_added(tiled, steps, d, p, dtype, strided, cancels):
    g, x = operands(steps, d, p, dtype, strided)
    x = x - cancels * x.mean(1, keepdim=True)
    g = (g - cancels * g.mean(1, keepdim=True)).to(dtype)
    true = gradients(g, x).square().sum((1, 2))
    terms = (g.double().norm(dim=2) * x.double().norm(dim=2)).sum(1).square()

    found, limits = contraction.tiled_norm_sq(g, x) if tiled else (contraction.gram_norm_sq(g, x), None)

    assert (found.scale is None) == tiled
    upper = found.value + found.error * (found.value if found.scale is None else found.scale)
    assert bool((added(g, x, limits).square().sum((1, 2)) <= upper * (1 + 1e-7) + 1e-30).all())
    assert bool(((found.value - true).abs() <= 4 * gamma(steps + 140, torch.float32) * terms + 1e-30).all())
    assert found.error < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [16, 64, 256])
def test_bounds_are_tight_for_sequences_of_unrelated_positions(steps, dtype):
    """There S = (Σ_t |x_t||g_t|)² is about T times the squared norm. No example of them is left to float64."""
    g, x = operands(steps, 24, 40, dtype)

    found, _ = gpu.contraction_norm_sq(g, x)

    true = gradients(g, x).square().sum((1, 2))
    upper = found.value + found.error * (found.value if found.scale is None else found.scale)
    assert bool((upper <= true * (1 + (1e-3 if dtype == torch.float32 else 8e-3))).all())
    assert found.scale is None or bool((found.scale <= found.tolerated * found.value).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_positions_that_cancel_keep_to_what_was_measured(dtype):
    """Terms of 1e4 leave a sum of rounding errors: what is added must not be larger than what was measured of it."""
    half = torch.randn(EXAMPLES, 128, 20), torch.randn(EXAMPLES, 128, 30)
    order = torch.randperm(256)
    g = 100 * torch.cat([half[0], -half[0] * (1 + 2.0**-9)], 1)[:, order].to(dtype)
    x = 100 * torch.cat([half[1], half[1]], 1)[:, order].to(dtype)

    found, limits = contraction.tiled_norm_sq(g, x)

    sizes_added = added(g, x, limits).square().sum((1, 2))
    assert bool((sizes_added <= found.value * (1 + found.error)).all())
    assert bool((sizes_added >= found.value * (1 - 1e-5)).all())


@pytest.mark.parametrize("share", [1.0, 0.81, 1e-12, 0.0])
def test_a_tile_never_exceeds_its_limit_whatever_the_sum_computes(share):
    """As if the sum's kernel had rounded otherwise than the norm's: the limits are lower than what it finds."""
    g, x = operands(9, 70, 70, torch.float32)
    _, limits = contraction.tiled_norm_sq(g, x)
    whole = gradients(g, x)

    small = added(g, x, limits * share)

    for rows in (slice(0, 64), slice(64, 70)):
        for columns in (slice(0, 64), slice(64, 70)):
            one, other = small[:, rows, columns], whole[:, rows, columns]
            limit = share * other.square().sum((1, 2))
            assert bool((one.square().sum((1, 2)) <= limit * (1 + 1e-5)).all())
            torch.testing.assert_close(one, share**0.5 * other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
def test_a_tile_that_is_no_number_where_a_limit_was_finite_is_left_out(value):
    g, x = operands(4, 5, 6, torch.float32)
    _, limits = contraction.tiled_norm_sq(g, x)
    g[1, 0, 0] = value

    small = added(g, x, limits)

    assert bool((small[1] == 0).all())
    torch.testing.assert_close(small[[0, 2]], gradients(g, x)[[0, 2]], rtol=1e-5, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(steps=sizes, d=sizes, p=sizes, dtype=dtypes, examples=st.integers(0, 5))
def test_clipped_sums_are_those_of_float64(steps, d, p, dtype, examples):
    generator = torch.Generator().manual_seed(examples)
    g, x = (torch.randn(examples, steps, n, generator=generator).to(dtype) for n in (d, p))
    factors, out = torch.rand(examples, generator=generator), torch.ones(p, d).t()
    true = 1.0 + torch.einsum("b,bdp->dp", factors.double(), gradients(g, x))

    gpu.contraction_clipped_sum(g, x, factors, out)

    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)


def test_examples_at_factor_zero_leave_nothing_even_if_they_are_infinite():
    g, x = operands(4, 5, 6, torch.float32)
    g[1, 0, 0] = torch.inf
    factors, out = torch.tensor([0.5, 0.0, 0.25]), torch.zeros(5, 6)

    gpu.contraction_clipped_sum(g, x, factors, out)

    others = gradients(g[[0, 2]], x[[0, 2]])
    torch.testing.assert_close(out.double(), 0.5 * others[0] + 0.25 * others[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [3, 70, 256])
def test_an_engine_with_the_kernels_is_exact_and_no_example_exceeds_the_bound(monkeypatch, dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 9)).to(dtype)
    x, y = torch.randn(4, steps, 20).to(dtype), torch.randint(0, 9, (4, steps))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        signs = 1.0 - 2.0 * (torch.arange(steps) % 2)  # the positions' gradients partly cancel
        of = nn.functional.cross_entropy(outputs.float().transpose(1, 2), labels, reduction="none")
        return (signs * of).mean(1).to(outputs.dtype)

    calls = []
    monkeypatch.setattr(gpu, "contraction_norm_sq", lambda *a, f=gpu.contraction_norm_sq: calls.append(a) or f(*a))
    alone_in_float64 = []
    monkeypatch.setattr(
        Accumulator, "_add_singly", lambda *a, f=Accumulator._add_singly: alone_in_float64.append(a) or f(*a)
    )
    bound = 0.01
    result = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False).clipped_sum(x, y)
    assert len(calls) >= 2
    assert all(operand.dtype == dtype for operand in calls[0])

    for i in range(len(x)):
        alone = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False)
        parts = alone.clipped_sum(x[i : i + 1], y[i : i + 1]).sums
        size = sum(part.double().square().sum() for part in parts.values()).sqrt()
        assert bound * (1 - 2e-3) < size <= bound * (1 + 1e-6)
    if dtype == torch.float32:
        truth = reference.clipped_sum(model, loss, x, y, bound).clipped
        for name, expected in truth.items():
            assert (result.sums[name] - expected).norm() <= 1e-4 * expected.norm()
    assert not alone_in_float64


def test_positions_that_cancel_are_left_to_float64():
    """Σ_t g_t x_tᵀ is 2^-10 of its terms, whose products are rounded: in float32 it would be off by 6e-5."""
    model = nn.Linear(40, 30, bias=False)
    x = torch.randn(2, 1, 40).repeat(1, 2, 1)
    weights = torch.randint(-100, 100, (2, 30)).float()

    def loss(outputs: Tensor, of: Tensor) -> Tensor:
        return ((outputs[:, 0] - (1.0 - 2.0**-10) * outputs[:, 1]) * of).sum(1)

    result = Engine(model, loss, max_grad_norm=1e-3, check_isolation=False).clipped_sum(x, weights)
    true = reference.clipped_sum(model, loss, x, weights, 1e-3).clipped["weight"]

    assert float((result.sums["weight"] - true).norm()) <= 1e-5 * float(true.norm())


@settings(max_examples=12, deadline=None)
@given(steps=st.integers(2, 80), d=sizes, dtype=dtypes, words=st.integers(1, 40), padding=st.sampled_from([None, 0]))
def test_lookups_are_those_of_float64_and_keep_to_their_limits(steps, d, dtype, words, padding):
    generator = torch.Generator().manual_seed(steps)
    ids = torch.randint(0, words, (EXAMPLES, steps), generator=generator)
    g = torch.randn(EXAMPLES, steps, d, generator=generator).to(dtype)
    g[:, steps // 2 :] -= g[:, : steps - steps // 2]  # equal ids partly cancel
    counted = g.double() if padding is None else g.double() * (ids != padding).unsqueeze(2)
    rows = torch.zeros(EXAMPLES, words, d, dtype=torch.float64).scatter_add_(
        1, ids.unsqueeze(2).expand(-1, -1, d), counted
    )
    factors = torch.tensor([0.5, 0.0, 2.0])
    out = torch.ones(d, words).t()

    norms, limits = gpu.lookup_norm_sq(ids, g, padding)
    gpu.lookup_clipped_sum(ids, g, padding, factors, out, limits)

    torch.testing.assert_close(norms.value, rows.square().sum((1, 2)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        out.double(), 1 + torch.einsum("b,bvd->vd", factors.double(), rows), rtol=1e-4, atol=1e-4
    )
    small = torch.zeros(words, d)
    gpu.lookup_clipped_sum(ids[:1], g[:1], padding, torch.ones(1), small, 0.25 * limits[:1])
    torch.testing.assert_close(small.double(), 0.5 * rows[0], rtol=1e-4, atol=1e-4)
    assert float(small.double().square().sum()) <= 0.25 * float(norms.value[0]) * (1 + norms.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_with_a_table_is_exact_by_the_kernels(monkeypatch, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 20, padding_idx=0), nn.Linear(20, 9)).to(dtype)
    ids, y = torch.randint(0, 12, (5, 17)), torch.randint(0, 9, (5, 17))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        of = nn.functional.cross_entropy(outputs.float().transpose(1, 2), labels, reduction="none")
        return of.mean(1).to(outputs.dtype)

    calls = []
    monkeypatch.setattr(gpu, "lookup_clipped_sum", lambda *a, f=gpu.lookup_clipped_sum: calls.append(a) or f(*a))
    bound = 0.01
    result = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False).clipped_sum(ids, y)
    assert calls and calls[0][1].dtype == dtype
    assert not result.sums["0.weight"][0].any()  # the padding's row
    for i in range(len(ids)):
        alone = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False)
        parts = alone.clipped_sum(ids[i : i + 1], y[i : i + 1]).sums
        size = sum(part.double().square().sum() for part in parts.values()).sqrt()
        assert bound * (1 - 5e-3) < size <= bound * (1 + 1e-6)
    if dtype == torch.float32:
        for name, expected in reference.clipped_sum(model, loss, ids, y, bound).clipped.items():
            assert (result.sums[name] - expected).norm() <= 1e-3 * expected.norm()


def test_other_sizes_give_the_same_values_and_limits_of_other_tiles_are_refused():
    g, x = operands(20, 50, 40, torch.float32)
    small = Sizes(tile=16, depth=16)
    norm, limits = contraction.tiled_norm_sq(g, x, small)
    factors, out = torch.tensor([0.5, 0.0, 2.0]), torch.zeros(50, 40)

    contraction.add_clipped_sum(g, x, factors, out, limits, small)

    true = gradients(g, x)
    torch.testing.assert_close(norm.value, true.square().sum((1, 2)), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(contraction.gram_norm_sq(g, x, small).value, norm.value, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(out.double(), torch.einsum("b,bdp->dp", factors.double(), true), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="other tiles"):
        contraction.add_clipped_sum(g, x, factors, out, limits)


def test_a_limit_that_is_no_number_lets_nothing_through():
    g, x = torch.randn(EXAMPLES, 9, 20), torch.randn(EXAMPLES, 9, 17)
    _, limits = contraction.tiled_norm_sq(g, x)
    limits[1] = torch.nan
    for factors in (torch.ones(EXAMPLES), torch.tensor([1.0, 0.0, 1.0])):
        out = torch.zeros(20, 17)
        gpu.contraction_clipped_sum(g, x, factors, out, limits)
        torch.testing.assert_close(out.double(), gradients(g[::2], x[::2]).sum(0), rtol=1e-5, atol=1e-5)


# ---- convolutions


@st.composite
def convolutions(draw) -> tuple[Windows, Tensor, Tensor]:
    """A convolution in one to three dimensions, output gradients and inputs of any memory layout."""
    dims = draw(st.integers(1, 3))
    of_dims = lambda least, most: tuple(draw(st.integers(least, most)) for _ in range(dims))  # noqa: E731
    kernel, stride = of_dims(1, 5 - dims), of_dims(1, 3)
    padding, dilation, out = of_dims(0, 2), of_dims(1, 2), of_dims(1, (80, 9, 4)[dims - 1])
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    # Rows of the input that no window reaches may be left over at the end.
    size = tuple(
        max(1, (o - 1) * s + span - 2 * p) + draw(st.integers(0, s - 1))
        for o, s, span, p in zip(out, stride, spans, padding, strict=True)
    )
    groups = draw(st.integers(1, 3))
    windows = Windows(kernel, stride, padding, dilation, groups, groups == 1 and draw(st.booleans()))
    channels, rows = draw(st.integers(1, 5)), draw(st.integers(1, 70 // groups))
    dtype = draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(EXAMPLES, groups * channels, *size, generator=generator).to(dtype)
    shape = F_CONV[dims](x.float(), torch.zeros(groups * rows, channels, *kernel), None, *rest(windows)).shape
    g = torch.randn(shape, generator=generator).to(dtype)
    return windows, *(laid_out(t, draw(st.sampled_from(["plain", "channels last", "cut", "turned"]))) for t in (g, x))


F_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def rest(windows: Windows) -> tuple:
    return windows.stride, windows.padding, windows.dilation, windows.groups


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; "turned": rows of positions that do not follow each other."""
    if layout == "channels last":
        return t.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "cut":
        return torch.cat([t, t], 1)[:, : t.shape[1]]
    return t.transpose(2, -1).contiguous().transpose(2, -1) if layout == "turned" else t


def weight_gradients(g: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """[B, d, c / groups, *kernel] in float64, by torch's own backward pass."""
    weight = torch.zeros(g.shape[1], x.shape[1] // windows.groups, *windows.kernel, dtype=torch.float64)
    weight.requires_grad_()
    call = F_CONV[x.dim() - 2]
    each = [
        torch.autograd.grad(call(one[None].double(), weight, None, *rest(windows)), weight, of[None].double())[0]
        for one, of in zip(x, g, strict=True)
    ]
    return torch.stack(each)


@settings(max_examples=20, deadline=None)
@given(of=convolutions(), share=st.sampled_from([1.0, 0.25]))
def test_convolutions_are_those_of_float64_and_keep_to_their_limits(of, share):
    windows, g, x = of
    true, terms = weight_gradients(g, x, windows), weight_gradients(g.abs(), x.abs(), windows)
    squares = true.square().sum(tuple(range(1, true.dim())))
    off = 2 * gamma(g[0, 0].numel() + 8, torch.float32)
    factors, out = torch.tensor([0.5, 0.0, 2.0]), torch.ones(true.shape[1:])

    norms, limits = gpu.convolution_norm_sq(g, x, windows)
    gpu.convolution_clipped_sum(g, x, windows, factors, out, limits)

    every = terms.square().sum(tuple(range(1, true.dim())))
    assert bool(((norms.value - squares).abs() <= norms.error * squares + 4 * off * every + 1e-30).all())
    clipped, rounding = (torch.einsum("b,b...->...", factors.double(), t) for t in (true, off * terms))
    assert bool(((out.double() - 1.0 - clipped).abs() <= rounding + 1e-6 * (1.0 + clipped.abs())).all())
    for i in range(EXAMPLES):
        alone = torch.zeros(true.shape[1:])
        part = slice(i, i + 1)
        gpu.convolution_clipped_sum(g[part], x[part], windows, torch.ones(1), alone, share * limits[part])
        limit = share * float(norms.value[i]) * (1 + norms.error)
        assert float(alone.double().square().sum()) <= limit * (1 + 1e-7) + 1e-30
        torch.testing.assert_close(alone.double(), share**0.5 * true[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_positions_that_cancel_keep_to_what_was_measured(dtype):
    """Terms of 1e4 leave a sum of rounding errors: what is added must not be larger than what was measured of it."""
    windows = Windows((1,), (1,), (0,), (1,))
    half = torch.randn(EXAMPLES, 20, 128), torch.randn(EXAMPLES, 30, 128)
    order = torch.randperm(256)
    g = 100 * torch.cat([half[0], -half[0] * (1 + 2.0**-9)], 2)[:, :, order].to(dtype)
    x = 100 * torch.cat([half[1], half[1]], 2)[:, :, order].to(dtype)

    norms, limits = gpu.convolution_norm_sq(g, x, windows)

    for i in range(EXAMPLES):
        alone, part = torch.zeros(20, 30, 1), slice(i, i + 1)
        gpu.convolution_clipped_sum(g[part], x[part], windows, torch.ones(1), alone, limits[part])
        size = float(alone.double().square().sum())
        assert float(norms.value[i]) * (1 - 1e-5) <= size <= float(norms.value[i]) * (1 + norms.error)


def test_convolutions_leave_out_examples_at_factor_zero_and_need_limits_of_their_tiles():
    windows = Windows((3, 3), (1, 1), (1, 1), (1, 1))
    g, x = torch.randn(EXAMPLES, 20, 6, 6), torch.randn(EXAMPLES, 9, 6, 6)
    _, limits = gpu.convolution_norm_sq(g, x, windows)
    g[1, 0, 0, 0] = torch.inf
    factors, out = torch.tensor([0.5, 0.0, 0.25]), torch.zeros(20, 9, 3, 3)
    gpu.convolution_clipped_sum(g, x, windows, factors, out)
    others = weight_gradients(g[[0, 2]], x[[0, 2]], windows)
    torch.testing.assert_close(out.double(), 0.5 * others[0] + 0.25 * others[1], rtol=1e-5, atol=1e-5)

    within = torch.zeros(20, 9, 3, 3)
    gpu.convolution_clipped_sum(g, x, windows, torch.ones(EXAMPLES), within, limits)
    torch.testing.assert_close(within.double(), others.sum(0), rtol=1e-5, atol=1e-5)  # infinite tiles are left out

    small = Sizes(tile=16, depth=16)
    _, of_small = convolution.norm_sq(g[:1], x[:1], windows, small)
    alone = torch.zeros(20, 9, 3, 3)
    convolution.add_clipped_sum(g[:1], x[:1], windows, torch.ones(1), alone, of_small, small)
    torch.testing.assert_close(alone.double(), others[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="other tiles"):
        gpu.convolution_clipped_sum(g[:1], x[:1], windows, torch.ones(1), alone, of_small)


def far_apart(count: int, length: int, start: int, memory: Tensor) -> Tensor:
    """Random numbers [1, count, length], rows 2^30 and more apart in memory that is not touched in between."""
    found = memory.as_strided((1, count, length), (1, 2**30 + 64, 1), start)
    return found.copy_(torch.randn(1, count, length))


def test_products_of_strides_have_64_bits():
    """Each stride fits 32 bits; twice a stride does not."""
    memory = torch.empty(2 * (2**30 + 64) + 64, dtype=torch.bfloat16)
    long, short = far_apart(3, 9, 0, memory), far_apart(3, 8, 32, memory)

    windows = Windows((2,), (1,), (0,), (1,))
    of_windows, limits = gpu.convolution_norm_sq(short, long, windows)
    true = weight_gradients(short, long, windows)
    torch.testing.assert_close(of_windows.value, true.square().sum((1, 2, 3)), rtol=1e-5, atol=0.0)
    out = torch.zeros(3, 3, 2)
    gpu.convolution_clipped_sum(short, long, windows, torch.ones(1), out, limits)
    torch.testing.assert_close(out.double(), true[0], rtol=1e-5, atol=1e-6)

    for norms in (contraction.tiled_norm_sq(short, long)[0], contraction.gram_norm_sq(short, long)):
        true = gradients(short, long).square().sum((1, 2))
        torch.testing.assert_close(norms.value, true, rtol=1e-5, atol=0.0)

    norms, _ = gpu.lookup_norm_sq(torch.tensor([[0, 1, 0]]), short, None)
    rows = torch.stack([short[0, 0].double() + short[0, 2].double(), short[0, 1].double()])
    torch.testing.assert_close(norms.value, rows.square().sum()[None], rtol=1e-5, atol=0.0)


class Pictures(nn.Module):
    """Two convolutions of pictures and one in groups of what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 20, 3, 2, 1), nn.Conv2d(20, 32, 3, dilation=2, bias=False)
        self.third = nn.Conv1d(32, 32, 3, padding="same", groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh().flatten(2)).flatten(1)


def picture_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(outputs.shape[1]) % 2)  # the positions' gradients partly cancel
    return ((outputs.float() - labels).square() * signs).mean(1).to(outputs.dtype)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_with_convolutions_is_exact_and_no_example_exceeds_the_bound(monkeypatch, dtype, layout):
    torch.manual_seed(0)
    model = Pictures().to(dtype).to(memory_format=layout)
    x, y = torch.randn(3, 3, 13, 13).to(dtype).to(memory_format=layout), torch.randn(3, 1)
    calls = []
    monkeypatch.setattr(
        gpu, "convolution_clipped_sum", lambda *a, f=gpu.convolution_clipped_sum: calls.append(a) or f(*a)
    )
    bound = 0.01

    result = Engine(copy.deepcopy(model), picture_loss, max_grad_norm=bound, check_isolation=False).clipped_sum(x, y)

    assert len(calls) == 3
    assert all(of[0].dtype == of[1].dtype == dtype and of[5] is not None for of in calls)
    for i in range(len(x)):
        alone = Engine(copy.deepcopy(model), picture_loss, max_grad_norm=bound, check_isolation=False)
        parts = alone.clipped_sum(x[i : i + 1], y[i : i + 1]).sums
        size = sum(part.double().square().sum() for part in parts.values()).sqrt()
        assert bound * (1 - 5e-3) < size <= bound * (1 + 1e-6)
    if dtype == torch.float32:
        for name, expected in reference.clipped_sum(model, picture_loss, x, y, bound).clipped.items():
            assert (result.sums[name] - expected).norm() <= 1e-4 * expected.norm()


def test_an_example_whose_norm_overflows_goes_through_float64_and_leaves_the_others_theirs():
    torch.manual_seed(0)
    model, x, y = nn.Conv2d(3, 20, 3, padding=1), torch.randn(3, 3, 6, 6), torch.randn(3, 1)
    x[1] *= 1e25

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.flatten(1) * labels).sum(1)

    sums = Engine(copy.deepcopy(model), loss, max_grad_norm=1.0, check_isolation=False).clipped_sum(x, y).sums

    for name, expected in reference.clipped_sum(model, loss, x, y, 1.0).clipped.items():
        assert (sums[name] - expected).norm() <= 1e-4 * expected.norm()


def test_convolutions_that_would_leave_tiles_nearly_empty_go_the_ordinary_way():
    g, x = torch.randn(2, 30, 5), torch.randn(2, 4, 5)
    assert gpu.serves_convolution(g, x, Windows((1,), (1,), (0,), (1,)))
    assert not gpu.serves_convolution(g, x, Windows((1,), (1,), (0,), (1,), groups=2))
    assert not gpu.serves_convolution(g, x.bfloat16(), Windows((1,), (1,), (0,), (1,)))
    assert not gpu.serves_convolution(g.double(), x.double(), Windows((1,), (1,), (0,), (1,)))


# ---- noise


@triton.jit
def _pairs_of_words(words, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first, second = tl.load(words + at), tl.load(words + BLOCK + at)
    x, y = noise_kernel._pair(first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True))
    tl.store(out + at, x)
    tl.store(out + BLOCK + at, y)


def test_pairs_are_float64s_at_every_edge_of_their_words():
    rng = np.random.default_rng(0)
    ends = [0, 1, 2**23, 2**24 + 1, 2**29, 2**30, 2**31, 3 * 2**30, 2**32, 0xB504F333, 2**30 + 2**29, 7 * 2**29]
    edges = np.array([(end + step) % 2**32 for end in ends for step in range(-2, 3)])
    first = np.concatenate([np.repeat(edges, 60), (2.0 ** (32 * rng.random(30_000))), rng.integers(0, 2**32, 2**15)])
    second = np.concatenate([np.tile(edges, 60), rng.integers(0, 2**32, 30_000 + 2**15)])
    words = np.stack([first[: 2**16], second[: 2**16]]).astype(np.uint32)
    out = torch.empty(2, 2**16)

    _pairs_of_words[(1,)](torch.from_numpy(words.view(np.int32)), out, BLOCK=2**16)

    radii, angles = (words.astype(np.float64) + 0.5) * 2.0**-32
    radii, angles = np.sqrt(-2.0 * np.log(radii)), 2.0 * np.pi * angles
    true = torch.from_numpy(np.stack([radii * np.cos(angles), radii * np.sin(angles)]))
    assert float(true.abs().max()) > 6.76
    assert float((out - true).abs().max()) < normals.LARGEST_ERROR


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(1, 5000),
    start=st.sampled_from([0, 1, 16, 1024, 1500, 2**34 - 700]),
    name=st.binary(min_size=16, max_size=16),
    std=st.floats(0.01, 100.0),
)
def test_the_kernel_of_noise_draws_float64s_stream(count, start, name, std):
    before = torch.randn(count)
    added, written = before.clone(), before.clone()
    version = added._version

    gpu.draw_normals(added, std, name, start, add=True)
    gpu.draw_normals(written, std, name, start, add=False)

    true = std * normals.normals(name, count, start)
    assert float((written - true).abs().max()) <= std * normals.LARGEST_ERROR
    torch.testing.assert_close(added, before + written, rtol=1e-6, atol=1e-6 * std)
    assert added._version > version


def test_noise_by_the_kernel_is_standard_normal_and_belongs_to_seed_step_and_rank():
    def draw(noise: GaussianNoise, step: int) -> Tensor:
        return noise.add_(torch.zeros(100, 200), 1.0, step)

    first = draw(GaussianNoise(5), 3)
    assert torch.equal(first, draw(GaussianNoise(5), 3))
    assert torch.equal(first, GaussianNoise(5).fill_(torch.ones(100, 200), 1.0, 3))
    assert stats.kstest(first.flatten().double(), "norm").pvalue > 1e-4
    assert abs(float(first.double().pow(4).mean()) - 3.0) < 5 * (96 / 20_000) ** 0.5
    others = [GaussianNoise(6), GaussianNoise(5, rank=1), GaussianNoise(5 + 2**32), GaussianNoise()]
    drawn = [draw(GaussianNoise(5), 4), *(draw(noise, 3) for noise in others)]
    for other in (*drawn, first.flatten().roll(1), torch.randn(20_000)):
        both = torch.stack([first.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 20_000**0.5
        assert not torch.equal(*both)


def test_other_sources_of_noise_keep_theirs(monkeypatch):
    monkeypatch.setattr(gpu, "draw_normals", lambda *_, **__: pytest.fail("drawn from the seed"))

    class Own(GaussianNoise):
        def generator(self, step, device="cpu"):
            return torch.Generator(device).manual_seed(step)

    expected = torch.empty(40).normal_(generator=torch.Generator().manual_seed(7))
    assert torch.equal(Own(0).add_(torch.zeros(40), 1.0, 7), expected)
    assert torch.equal(Own(0).fill_(torch.zeros(40), 1.0, 7), expected)
    SecureNoise().add_(torch.zeros(40), 1.0, 0)
    GaussianNoise(0).add_(torch.zeros(40, dtype=torch.float64), 1.0, 0)
    GaussianNoise(0).add_(torch.zeros(40), 0.0, 0)


def test_a_kernel_that_draws_anything_else_is_refused_before_it_is_used(monkeypatch):
    monkeypatch.setattr(noise_kernel, "normals", lambda *args: normals.normals(*args) * (1 + 1e-5))
    noise_kernel.check.cache_clear()
    target = torch.ones(50)
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"off by .* DPCORE_TRITON=0"):
            GaussianNoise(0).add_(target, 1.0, 0)
    assert bool((target == 1).all())
    monkeypatch.undo()
    GaussianNoise(0).add_(target, 1.0, 0)
    assert not bool((target == 1).any())


def test_no_noise_is_drawn_into_a_captured_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    target = torch.ones(50)
    for draw in (GaussianNoise(0).add_, GaussianNoise(0).fill_):
        with pytest.raises(PrivacyError, match="outside of the graph"):
            draw(target, 1.0, 0)
    assert bool((target == 1).all())


def test_steps_release_the_kernels_noise_once_for_each_step():
    noise, size = GaussianNoise(3), 4 * 8 + 8
    model = nn.Linear(4, 8)
    engine = Engine(
        model,
        lambda outputs, y: outputs.sum(1),
        max_grad_norm=0.5,
        noise_multiplier=2.0,
        expected_batch_size=4,
        noise=GaussianNoise(3),
    )
    for step in range(3):
        engine.privatize(torch.zeros(0, 4), torch.zeros(0))
        released = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(released, noise.add_(torch.zeros(size), 0.25, step))


def test_the_two_line_loop_adds_the_kernels_noise(monkeypatch):
    calls = []
    monkeypatch.setattr(gpu, "draw_normals", lambda *a, f=gpu.draw_normals, **k: calls.append((a[0], k)) or f(*a, **k))
    model = nn.Linear(4, 8)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 8))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(private(x), y).backward()
        optimizer.step()
    assert [options for _, options in calls] == [{"add": True}] * 2
    assert all(target.numel() == 40 for target, _ in calls)


# ---- what was measured


def test_tuning_writes_data_that_says_it_is_simulated_and_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    done = subprocess.run(
        [sys.executable, "-m", "dpcore.gpu.tune", "--out", str(path)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(path.read_text())
    assert made["simulated"] and not any("failed" in row for row in made["tried"])
    assert all(set(made[kind]) == {"float32", "half"} for kind in tuned.KINDS)
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    with pytest.raises(ValueError, match="make one on a GPU"):
        tuned.chosen("tiles", torch.float32)

    real = tmp_path / "real.json"
    real.write_text(json.dumps(made | {"simulated": False, "windows": {"float32": {"tile": 16, "depth": 16}}}))
    monkeypatch.setenv(tuned.VARIABLE, str(real))
    windows = Windows((3,), (1,), (0,), (1,))
    g, x = torch.randn(2, 20, 7).half(), torch.randn(2, 5, 9).half()
    norms, limits = gpu.convolution_norm_sq(g, x, windows)
    assert limits.shape == (2, 2)
    # Limits of a half-precision batch hold for its rows in float32.
    out = torch.zeros(20, 5, 3)
    gpu.convolution_clipped_sum(g[:1].float(), x[:1].float(), windows, torch.ones(1), out, limits[:1])
    torch.testing.assert_close(out.double().square().sum(), norms.value[0], rtol=1e-4, atol=0.0)


AHEAD_OF_TIME = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from dpcore.gpu import contraction, convolution, lookup, noise
from dpcore.gpu.tuned import Sizes

SIZES = {"TILE": Sizes().tile, "DEPTH": Sizes().depth, "WIDEN": False}
FLAGS = {"LIMITED": True, "ADD": True}
DOUBLES = dict.fromkeys(("limits", "products", "lengths", "values", "scales"), "*fp64")
REALS = dict.fromkeys(("largest", "of_gram", "of_sum"), "fp32")
GEOMETRY = {"KERNEL": (1, 3, 3), "STRIDE": (1, 2, 2), "PADDING": (0, 1, 1), "DILATION": (1, 1, 1)}
WINDOWS = SIZES | GEOMETRY | {"CHANNELS_LAST": True}
KERNELS = [
    (contraction._tile_squares, "fp64", SIZES),
    (contraction._tile_sums, "fp32", SIZES | FLAGS),
    (contraction._gram_blocks, "", SIZES),
    (contraction._gram_totals, "", {"WIDTH": 256}),
    (lookup._row_squares, "fp64", SIZES),
    (lookup._row_sums, "fp32", SIZES | {"LIMITED": True}),
    (convolution._window_squares, "fp64", WINDOWS),
    (convolution._window_sums, "fp32", WINDOWS | {"LIMITED": True}),
]


def compile(kernel, types, fixed):
    signature = {a: "constexpr" if a in fixed else types.get(a, "i32") for a in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
    assert len(made.asm["cubin"]) > 1000
    print(made.metadata.shared)


# Strides of 2^31 and more come in 64 bits; one type of operands is compiled so.
STRIDES = dict.fromkeys(("g_b", "g_t", "g_d", "x_b", "x_t", "x_p", "x_c", "x_n", "out_s", "out_d", "out_p"), "i64")
for operand in ("fp32", "bf16", "fp16"):
    wide = STRIDES if operand == "fp16" else {}
    for kernel, result, fixed in KERNELS:
        pointers = {"ids": "*i64", "g": f"*{operand}", "x": f"*{operand}", "factors": "*fp32", "out": f"*{result}"}
        compile(kernel, pointers | DOUBLES | REALS | wide, fixed)
for add in (False, True):
    compile(noise._normals, {"target": "*fp32", "deviation": "fp32", "first": "i64"}, {"ADD": add, "GROUPS": 256})
"""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_ahead_of_time_without_a_gpu(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AHEAD_OF_TIME, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = [int(line) for line in done.stdout.split()]
    assert len(shared) == 26 and max(shared) <= 160 * 1024  # an A100 has 163 KiB of shared memory for a block
