"""The compiled kernels against the float64 truth and against the pure torch rules."""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn.grad import conv2d_weight
from torch.utils._python_dispatch import TorchDispatchMode

from dpcore import Engine, GaussianNoise, native, reference
from dpcore.errors import UnsupportedError
from dpcore.functional import clipped_sum
from dpcore.native.library import kernels as loaded
from dpcore.native.parts import Part, Parts
from dpcore.native.products import Product, Products
from dpcore.numerics.rounding import gamma
from dpcore.rules.linear import contraction_norm_sq
from dpcore.rules.recurrent_loops import GruRecurrence, Steps
from tests.dpcore import test_turns
from tests.dpcore.comparison import check, labels, odd_loss, relative_error
from tests.dpcore.test_recurrent import KINDS, Sequences, batch_of, check_kept_graph

LAST = torch.channels_last

pytestmark = [
    pytest.mark.skipif(
        not any(shutil.which(c) for c in native.COMPILERS), reason="no C++ compiler here to build the kernels with"
    ),
    pytest.mark.usefixtures("compiled"),
]


def _count(monkeypatch, name):
    calls = []
    kernel = getattr(native, name)
    monkeypatch.setattr(native, name, lambda *args, **named: calls.append(name) or kernel(*args, **named))
    return calls


LOOPS = {kind: make for kind, make in KINDS.items() if kind != "projected lstm"}
"""Recurrent layers whose loops are compiled."""


class Recurrent(nn.Module):
    """x [B, T, p] -> [B, T, H or 2H]; a linear layer before it, so that the gradient at the input matters."""

    def __init__(self, kind, features, hidden, bidirectional, bias=True):
        super().__init__()
        self.first = nn.Linear(features, features)
        self.loop = LOOPS[kind](features, hidden, batch_first=True, bidirectional=bidirectional, bias=bias)

    def forward(self, x):
        first = self.first(x)
        # The first layer's output too: a ReLU network may be dead, and an example without a gradient tests little.
        return torch.cat([self.loop(first)[0], first.tanh()], 2)


@pytest.mark.parametrize("kind", LOOPS)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 70), st.booleans(), st.booleans(), st.integers(0, 99))
@settings(deadline=None, max_examples=10)
def test_recurrent_loops_equal_float64_for_all_heights_and_widths(
    kind, batch, steps, hidden, bidirectional, bias, seed
):
    torch.manual_seed(seed)
    model, x = Recurrent(kind, 3, hidden, bidirectional, bias), torch.randn(batch, steps, 3)
    check(model, x, torch.arange(batch) % 3, clipped_sum)


@given(
    st.integers(0, 3),
    st.integers(0, 270),
    st.integers(1, 30),
    st.integers(1, 80),
    st.sampled_from("btx"),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_a_contraction_at_many_positions_equals_float64_wherever_they_lie(batch, positions, rows, columns, order, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "b": lambda n: (batch, positions, n),
        "t": lambda n: (positions, batch, n),
        "x": lambda n: (batch, n, positions),
    }
    turned = {"b": lambda t: t, "t": lambda t: t.transpose(0, 1), "x": lambda t: t.transpose(1, 2)}
    g, x = (turned[order](torch.randn(shapes[order](n), generator=generator)) for n in (rows, columns))
    # Memory that is handed out again is not zero.
    torch.full((batch, rows, columns), torch.nan)
    torch.testing.assert_close(
        native.contraction_grad_sample(g, x),
        torch.einsum("btd,btp->bdp", g.double(), x.double()).float(),
        rtol=1e-5,
        atol=2e-5,
    )


@given(
    st.integers(0, 4),
    st.integers(0, 150),
    st.integers(1, 900),
    st.integers(1, 80),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_norms_and_clipped_sums_of_contractions_equal_float64(batch, positions, rows, columns, apart, wider, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (positions, batch) if apart else (batch, positions)
    g, x = (torch.randn(*shape, n, generator=generator) for n in (rows, columns))
    g, x = (t.transpose(0, 1) if apart else t for t in (g, x))
    true = torch.einsum("btd,btp->bdp", g.double(), x.double())
    of_x, of_g = x.double().square().sum(2), g.double().square().sum(2)
    norms, scales, largest = native.contraction_norms(g, x)
    close = {"rtol": 1e-5, "atol": 0.0}
    scale = (of_x * of_g).sqrt().sum(1).square()
    torch.testing.assert_close(scales, scale, **close)
    torch.testing.assert_close(largest, torch.maximum(of_x, of_g).sum(1), **close)
    assert bool(((norms - true.square().sum((1, 2))).abs() <= 1e-6 * scale).all())
    written = torch.full((batch, rows, columns), torch.nan)
    squares = native.contraction_into(g, x, written)
    torch.testing.assert_close(written, true.float(), rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(squares, written.double().square().sum((1, 2)), rtol=3e-6, atol=0.0)
    # Sums may be a part of a wider matrix, beside which nothing is written; an example at a factor of 0 is left out.
    factors = torch.rand(batch, generator=generator)
    factors[1:2] = 0.0
    memory = torch.ones(rows, columns + 5 * wider)
    g = g.clone()
    g[1:2] = torch.nan
    native.contraction_clipped_sum(g, x, factors, memory[:, :columns])
    expected = 1.0 + torch.einsum("b,bdp->dp", factors.double(), true)
    torch.testing.assert_close(memory[:, :columns], expected.float(), rtol=1e-5, atol=1e-4)
    assert bool((memory[:, columns:] == 1.0).all())


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 900), st.integers(1, 80)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_products_of_one_example_after_the_other_equal_float64(batch, sizes, apart, threads, seed):
    generator = torch.Generator().manual_seed(seed)

    def operand(positions, width):
        shape = (positions, batch) if apart else (batch, positions)
        made = torch.randn(*shape, width, generator=generator)
        return made.transpose(0, 1) if apart else made

    of = [Product(operand(t, n), operand(t, m)) for t, n, m in sizes]
    # Between the sums lies memory to which nothing may be written.
    memory = [torch.ones(n * m + 16) for _, n, m in sizes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        products = Products(of, [held[: n * m] for held, (_, n, m) in zip(memory, sizes, strict=True)])
        factors = torch.rand(batch, len(of), generator=generator).float()
        factors[0, 0] = 0.0
        true = [torch.einsum("btn,btm->bnm", p.left.double(), p.right.double()) for p in of]
        for i in range(batch):
            squares = products.form(i)
            wanted = torch.stack([t[i].square().sum() for t in true])
            torch.testing.assert_close(squares, wanted, rtol=1e-5, atol=0.0)
            products.add(factors[i].tolist())
    finally:
        torch.set_num_threads(before)
    for k, (held, (_, n, m)) in enumerate(zip(memory, sizes, strict=True)):
        expected = 1.0 + torch.einsum("b,bnm->nm", factors[:, k].double(), true[k]).flatten()
        torch.testing.assert_close(held[: n * m], expected.float(), rtol=1e-5, atol=1e-4)
        assert bool((held[n * m :] == 1.0).all())


@pytest.mark.parametrize("wrong", [None, torch.inf, torch.nan], ids=str)
def test_products_are_clipped_up_to_the_first_example_without_a_norm(wrong):
    torch.manual_seed(0)
    of = [Product(torch.randn(6, 5, n), torch.randn(6, 5, m)) for n, m in ((21, 8), (3, 90))]
    norms_sq, factors, sums = 1e3 * torch.rand(6), torch.zeros(6), [torch.zeros(21 * 8), torch.zeros(3 * 90)]
    done = 6 if wrong is None else 4
    if wrong is not None:
        of[1].left[4, 2, 0] = wrong
    grads = [torch.einsum("btn,btm->bnm", p.left.double(), p.right.double()).flatten(1) for p in of]
    true = norms_sq + sum(g.square().sum(1) for g in grads)
    kept = torch.where(torch.arange(6) < done, true, norms_sq.double())
    assert Products(of, sums).clip(norms_sq, factors, 15.0, 0.25) == done
    torch.testing.assert_close(norms_sq, kept.float())
    wanted = (15.0 / true[:done].sqrt()).clamp(max=1.0)
    torch.testing.assert_close(factors[:done], wanted.float())
    assert not factors[done:].any()
    for summed, g in zip(sums, grads, strict=True):
        torch.testing.assert_close(summed, (0.25 * wanted @ g[:done]).float(), rtol=1e-5, atol=1e-5)


def test_no_product_is_added_where_no_bound_is_left():
    """A margin that leaves nothing of C, and a norm of zero: zero times infinity is no factor."""
    sums, factors = [torch.zeros(20)], torch.ones(2)
    Products([Product(torch.zeros(2, 3, 4), torch.randn(2, 3, 5))], sums).clip(torch.zeros(2), factors, 0.0, 1.0)
    assert torch.equal(sums[0], torch.zeros(20))


def test_products_that_are_not_numbers_are_not_added_at_a_factor_of_zero():
    left = torch.randn(2, 3, 4)
    left[0] = torch.nan
    out = torch.zeros(20)
    products = Products([Product(left, torch.randn(2, 3, 5))], [out])
    assert bool(products.form(0).isnan().all())
    products.add([0.0])
    assert not out.any()


def test_products_refuse_what_is_not_theirs():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="cannot be added to a sum of shape"):
        Products([Product(left, right)], [torch.zeros(21)])
    with pytest.raises(ValueError, match="must be those of the same examples"):
        Products([Product(left, right[:, :2])], [torch.zeros(20)])
    products = Products([Product(left, right)], [torch.zeros(20)])
    with pytest.raises(IndexError, match="no example 2 of 2"):
        products.form(2)
    with pytest.raises(ValueError, match="2 factors for 1 weights"):
        products.add([1.0, 1.0])
    with pytest.raises(ValueError, match="for 2 examples"):
        products.clip(torch.zeros(3), torch.zeros(3), 1.0, 1.0)
    right.mul_(2.0)
    with pytest.raises(UnsupportedError, match="was changed in place"):
        products.form(0)
    with pytest.raises(UnsupportedError, match="was changed in place"):
        products.clip(torch.zeros(2), torch.zeros(2), 1.0, 1.0)


def test_sums_follow_parameters_that_are_turned_in_memory(monkeypatch):
    monkeypatch.setattr("dpcore.microbatch.planner.FEWEST_IN_TURN", 1)
    test_turns.test_an_engines_sums_follow_too()
    test_turns.test_sums_follow_parameters_that_are_turned_in_memory()


@pytest.mark.parametrize("length", [40, 512, 700])
def test_squares_that_vanish_beside_the_first_ones_stay_within_the_bound(length):
    """Ones in every lane, and then squares just below half a unit of one in the last place: none of them is added."""
    x = torch.full((1, 1, length), (0.999 * 2.0**-24) ** 0.5)
    x[..., : loaded().library.dpcore_lanes()] = 1.0
    found = contraction_norm_sq(x, x)
    true = float(x.double().square().sum() ** 2)
    missing = (true - float(found.value)) / (found.error * float(found.scale))
    assert 0.0 < missing <= 1.0
    # Without what it holds for the released sum, 2 T + 4, too.
    assert true <= float(found.value) * (1.0 + gamma(2 * native.gram_roundings(length), torch.float32))


def test_a_clipped_sum_is_shared_out_over_threads_without_a_bit_of_difference():
    g, x, factors = torch.randn(3, 50, 1333), torch.randn(3, 50, 170), torch.rand(3)
    threads = torch.get_num_threads()
    sums, norms = [], []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            sums.append(torch.zeros(1333, 170))
            native.contraction_clipped_sum(g, x, factors, sums[-1])
            norms.append(native.contraction_norms(g, x)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(sums[0], other) for other in sums)
    assert all(torch.equal(norms[0], other) for other in norms)


class Turned(nn.Module):
    """A linear map by a weight that lies turned in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(30, 21) * 0.1).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("turns", [False, True])
def test_linear_maps_go_through_kernels_wherever_their_weights_lie(monkeypatch, turns):
    if turns:
        calls = []
        clip = Products.clip
        monkeypatch.setattr(Products, "clip", lambda of, *args: calls.append(args) or clip(of, *args))
    else:
        calls = _count(monkeypatch, "contraction_clipped_sum")
    monkeypatch.setattr("dpcore.microbatch.planner.FEWEST_IN_TURN", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 30), Turned())
    x = torch.randn(5, 60 if turns else 3, 19)
    check(model, x, torch.arange(5) % 3, clipped_sum)
    assert len(calls) >= 2


def test_values_that_are_the_negatives_of_what_memory_holds_take_the_pure_path():
    """A kernel would read the memory, and the gradient have the wrong sign."""
    torch.manual_seed(0)
    x = torch.randn(4, 40, dtype=torch.complex64).conj().imag.unsqueeze(-1)
    assert x.is_neg() and not native.serves(x) and native.serves(x.resolve_neg())
    check(nn.Linear(1, 5), x, torch.arange(4) % 3, clipped_sum)


def test_a_contraction_of_expanded_gradients_reads_them_where_they_are():
    g, x = torch.randn(3, 1, 5).expand(3, 7, 5), torch.randn(1, 7, 4).expand(3, 7, 4)
    torch.testing.assert_close(native.contraction_grad_sample(g, x), torch.einsum("btd,btp->bdp", g, x))


@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 40),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(5, 17), st.integers(5, 17)),
    st.booleans(),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_the_convolution_equals_float64_for_all_channels_kernels_strides_and_paddings(
    batch, channels, out_channels, kernel, stride, padding, size, last, seed
):
    torch.manual_seed(seed)
    x = torch.randn(batch, channels, *size).to(memory_format=LAST if last else torch.contiguous_format)
    weight = torch.zeros(out_channels, channels, *kernel, dtype=torch.float64)
    grad = torch.randn_like(nn.functional.conv2d(x, weight.float(), None, stride, padding))
    found = native.conv2d_grad_sample(x, grad, kernel, stride, padding, last)
    assert (found.movedim(2, -1) if last else found).is_contiguous()
    for i in range(batch):
        truth = conv2d_weight(x[i : i + 1].double(), weight.shape, grad[i : i + 1].double(), stride, padding)
        assert (found[i] - truth).norm() < 1e-5 * truth.norm() + 1e-12


class Averaged(nn.Module):
    """Ids [B, T] -> [B, 2] by the mean of their vectors."""

    def __init__(self, rows, columns, padding_idx=None):
        super().__init__()
        self.embedding = nn.Embedding(rows, columns, padding_idx=padding_idx)
        self.fc = nn.Linear(columns, 2)

    def forward(self, ids):
        return self.fc(self.embedding(ids).mean(1))


@given(
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from([None, 0, -1]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_the_averaged_embedding_equals_float64_with_repeated_tokens_and_padding(
    batch, tokens, rows, columns, padding_idx, seed
):
    torch.manual_seed(seed)
    ids = torch.randint(0, rows, (batch, tokens))
    check(Averaged(rows, columns, padding_idx), ids, torch.arange(batch) % 3, clipped_sum)


@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 9), st.sampled_from([None, 0]), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_every_token_is_counted_once_per_example(batch, length, rows, skipped, seed):
    ids = torch.randint(0, rows, (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens, counts, starts, squares = native.count_tokens(ids, rows, skipped)
    for b in range(batch):
        truth = {v: c for v, c in zip(*np.unique(ids[b].numpy(), return_counts=True), strict=True) if v != skipped}
        span = slice(int(starts[b]), int(starts[b + 1]))
        assert dict(zip(tokens[span].tolist(), counts[span].tolist(), strict=True)) == truth
        assert squares[b] == sum(int(c) ** 2 for c in truth.values())


def test_kernels_do_not_follow_the_default_dtype():
    """Counts in the default float64 were written as float32: the norms were nonsense, and nothing was clipped."""
    torch.manual_seed(0)
    model, ids, y = Averaged(40, 21), torch.randint(0, 40, (9, 50)), torch.arange(9) % 3
    expected = clipped_sum(model, odd_loss, ids, y, 0.5)
    try:
        torch.set_default_dtype(torch.float64)
        found = clipped_sum(model, odd_loss, ids, y.float(), 0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found.norms, expected.norms)
    assert relative_error(found.sums, expected.sums) < 2e-6


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 623, 624, 625, 640, 641, 1248, 1249, 1263, 50_000])
def test_noise_is_what_torch_draws_from_the_same_stream(size):
    start = torch.linspace(-1.0, 1.0, size)
    for step in (0, 7):
        found = GaussianNoise(3, rank=1).add_(start.clone(), 2.5, step)
        with native.disabled():
            plain = GaussianNoise(3, rank=1).add_(start.clone(), 2.5, step)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


def test_the_kernels_noise_is_normal_independent_and_fresh_at_every_step():
    noise = GaussianNoise(11)
    drawn = torch.stack([noise.add_(torch.zeros(50_000), 1.0, step) for step in range(4)]).double()
    assert stats.kstest(drawn.flatten(), "norm").pvalue > 1e-4
    assert drawn.unique().numel() > 0.97 * drawn.numel()
    assert abs(float(drawn.var()) - 1) < 5 * (2 / drawn.numel()) ** 0.5
    for a, b in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[:, 8:], drawn[:, :-8])):
        assert abs(float((a * b).mean())) * a.numel() ** 0.5 < 5
        sizes = float(((a**2 - 1) * (b**2 - 1)).mean()) / 2 * a.numel() ** 0.5
        assert abs(sizes) < 6


def test_noise_of_what_a_kernel_cannot_take_comes_from_torch(monkeypatch):
    calls = _count(monkeypatch, "put_normals")
    assert float(GaussianNoise(1).add_(torch.zeros(50, dtype=torch.float64), 1.0, 0).abs().max()) > 0
    assert not calls
    for target in (torch.zeros(4, 5), torch.zeros(20, 3).t(), torch.zeros(3)):
        GaussianNoise(1).add_(target, 1.0, 0)
    assert len(calls) == 3


@pytest.mark.parametrize("size", [16, 31, 624, 1003])
def test_noise_over_what_a_buffer_held_is_the_noise_that_zeros_would_get(monkeypatch, size):
    calls = _count(monkeypatch, "put_normals")
    held = torch.full((size + 8,), float("nan"))
    assert torch.equal(GaussianNoise(3).fill_(held[:size], 0.7, 5), GaussianNoise(3).add_(torch.zeros(size), 0.7, 5))
    assert len(calls) == 2 and bool(held[size:].isnan().all())


def test_noise_of_a_subclass_comes_from_its_own_generator():
    class Own(GaussianNoise):
        def generator(self, step, device="cpu"):
            return torch.Generator(device).manual_seed(5)

    expected = torch.randn(50, generator=torch.Generator().manual_seed(5))
    assert torch.equal(Own(0).add_(torch.zeros(50), 1.0, 0), expected)
    assert torch.equal(Own(0).fill_(torch.ones(50), 1.0, 0), expected)


def test_all_kernels_are_in_use_and_do_what_their_twins_do(monkeypatch):
    loops = [f"{kind}_{way}" for kind in ("lstm", "gru", "rnn") for way in ("forward", "backward")]
    names = ["conv2d_grad_sample", "contraction_grad_sample", *loops, "count_tokens", "add_by_token"]
    calls = {name: _count(monkeypatch, name) for name in names}
    torch.manual_seed(1)
    for model, x in (
        (nn.Conv2d(3, 20, 5, 2, 1).to(memory_format=LAST), torch.randn(9, 3, 12, 12)),
        *((Recurrent(kind, 6, 33, True), torch.randn(9, 80, 6)) for kind in LOOPS),
        (Averaged(40, 21), torch.randint(0, 40, (9, 50))),
    ):
        y = torch.arange(9) % 3
        fast = clipped_sum(model, odd_loss, x, y, 0.5)
        with native.disabled():
            assert not native.available()
            slow = clipped_sum(model, odd_loss, x, y, 0.5)
        assert relative_error(fast.sums, slow.sums) < 2e-6
        torch.testing.assert_close(fast.norms, slow.norms, rtol=2e-6, atol=0)
    assert all(len(calls[name]) >= (2 if name in loops else 1) for name in names)


@pytest.mark.parametrize("kind", LOOPS)
def test_packed_sequences_and_other_precisions_take_the_pure_loops(monkeypatch, kind):
    calls = [_count(monkeypatch, f"{name}_{way}") for name in ("lstm", "gru", "rnn") for way in ("forward", "backward")]
    torch.manual_seed(0)
    for dtype, packed in ((torch.float32, False), (torch.float64, None)):
        check(Sequences(LOOPS[kind](3, 4), packed).to(dtype), batch_of(4, 5, dtype), labels(4), clipped_sum)
    assert not any(calls)


def test_loops_that_changed_between_the_passes_agree():
    """The kernel takes what the pure loop kept, and the other way round."""
    torch.manual_seed(4)
    weight, h0, grad = torch.randn(60, 20) * 0.2, torch.randn(6, 20), torch.randn(5, 6, 20)
    found = []
    for pure in ((False, False), (True, False), (False, True), (True, True)):
        z = torch.linspace(-2.0, 2.0, 5 * 6 * 60).view(5, 6, 60).requires_grad_()
        forward, backward = (native.disabled() if off else nullcontext() for off in pure)
        with forward:
            h, _ = GruRecurrence.apply(z, torch.empty_like(z), weight, None, h0, Steps(5))
        with backward:
            found.append(torch.autograd.grad(h, z, grad)[0])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_the_gru_loop_may_write_over_what_it_reads():
    torch.manual_seed(5)
    weight, bias, z, grad_h = torch.randn(60, 20) * 0.1, torch.randn(60), torch.randn(5, 13, 60), torch.randn(5, 13, 20)
    found = []
    for in_place in (False, True):
        gates = z.clone() if in_place else torch.empty_like(z)
        of_n, h = torch.empty(5, 13, 20), torch.zeros(6, 13, 20)
        native.gru_forward(gates if in_place else z, weight, bias, gates, of_n, h, False)
        delta = gates if in_place else torch.empty_like(gates)
        found.append((of_n, h, *native.gru_backward(gates, of_n, h, weight, grad_h, delta, False), delta))
    for apart, together in zip(*found, strict=True):
        assert torch.equal(apart, together)


def test_the_lstm_loop_may_write_over_what_it_reads():
    torch.manual_seed(5)
    weight, z, grad_h = torch.randn(80, 20) * 0.1, torch.randn(5, 13, 80), torch.randn(5, 13, 20)
    found = []
    for in_place in (False, True):
        gates = z.clone() if in_place else torch.empty_like(z)
        tanh_c, h, c = torch.empty(5, 13, 20), torch.zeros(6, 13, 20), torch.zeros(6, 13, 20)
        native.lstm_forward(gates if in_place else z, weight, gates, h, c, tanh_c, False)
        delta = gates if in_place else torch.empty_like(gates)
        ends = native.lstm_backward(gates, c, tanh_c, weight, grad_h, c[0], delta, False)
        found.append((tanh_c, h, c, delta, *ends))
    for apart, together in zip(*found, strict=True):
        assert torch.equal(apart, together)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_kept_graph_of_the_compiled_loop_can_be_gone_through_again(monkeypatch, kind):
    backward = _count(monkeypatch, f"{kind if kind in ('lstm', 'gru') else 'rnn'}_backward")
    torch.manual_seed(6)
    check_kept_graph(LOOPS[kind](3, 5, batch_first=True), torch.randn(4, 6, 3), torch.randn(4, 6, 5), rtol=1e-5)
    assert len(backward) == 3


@pytest.mark.parametrize("kind", LOOPS)
def test_the_loops_take_what_hooks_of_saved_tensors_bring_back(monkeypatch, kind):
    """It may lie in memory otherwise."""
    backward = _count(monkeypatch, f"{kind if kind in ('lstm', 'gru') else 'rnn'}_backward")
    torch.manual_seed(7)

    class Turned(Recurrent):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.mT.contiguous() if t.dim() > 1 else t, lambda t: t.mT if t.dim() > 1 else t
            ):
                return super().forward(x)

    def unexamined(model, loss_fn, x, y, bound):  # torch's own loop takes memory that lies otherwise for wrong numbers
        return Engine(model, loss_fn, max_grad_norm=bound, check_isolation=False).clipped_sum(x, y)

    check(Turned(kind, 3, 9, True), torch.randn(6, 4, 3), labels(6), unexamined)
    assert backward


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_large_pre_activations_saturate_and_nan_stays_nan(kind):
    torch.manual_seed(2)
    model = Recurrent(kind, 3, 5, False)
    x = torch.randn(4, 3, 3)
    x[1] *= 1e4
    x[2, 1, 0] = float("nan")
    result = clipped_sum(model, odd_loss, x, torch.zeros(4), 1.0)
    with native.disabled():
        plain = clipped_sum(model, odd_loss, x, torch.zeros(4), 1.0)
    assert result.nonfinite == plain.nonfinite == 1
    torch.testing.assert_close(result.norms, plain.norms, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert relative_error(result.sums, plain.sums) < 1e-5


def test_threads_do_not_change_a_bit():
    torch.manual_seed(3)
    weight, x, grad = torch.randn(80, 20) * 0.1, torch.randn(13, 30, 38, 38), torch.randn(13, 25, 36, 36)
    ids = torch.randint(0, 5000, (13, 200))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            z = torch.linspace(-3.0, 3.0, 5 * 13 * 80).view(5, 13, 80)
            gates, tanh_c = torch.empty(5, 13, 80), torch.empty(5, 13, 20)
            h, c = torch.zeros(6, 13, 20), torch.zeros(6, 13, 20)
            native.lstm_forward(z, weight, gates, h, c, tanh_c, False)
            delta = torch.empty_like(gates)
            grads = native.lstm_backward(gates, c, tanh_c, weight, h[1:], c[0], delta, False)
            of_n, states, at_z = torch.empty(5, 13, 20), torch.zeros(6, 13, 20), torch.empty(5, 13, 60)
            native.gru_forward(z[..., :60].contiguous(), weight[:60], None, at_z, of_n, states, True)
            others = native.gru_backward(at_z.clone(), of_n, states, weight[:60], h[1:], at_z, True)
            native.rnn_forward(z[..., :20], weight[:20], states, True, False)
            plain = native.rnn_backward(states, weight[:20], h[1:], True, False)
            samples = native.conv2d_grad_sample(x, grad, (3, 3), (1, 1), (0, 0))
            first = native.conv2d_grad_sample(x, grad, (3, 3), (1, 1), (0, 0), False)
            table = torch.zeros(5000, 20)
            tokens, counts, starts, _ = native.count_tokens(ids, len(table), None)
            native.add_by_token(table, tokens, counts, starts, samples.reshape(13, -1)[:, :20])
            pixels = (t.flatten(2).transpose(1, 2)[:, :1296] for t in (x, grad))
            contracted = native.contraction_grad_sample(*pixels)
            loops = (gates, tanh_c, h, c, delta, *grads, of_n, at_z, *others, states, *plain)
            found.append((*loops, samples, first, contracted, table))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


def test_compiled_graphs_call_the_convolution_kernel(monkeypatch):
    calls = _count(monkeypatch, "conv2d_grad_sample")
    torch.manual_seed(1)
    model, x = nn.Conv2d(3, 20, 5, 2, 1).to(memory_format=LAST), torch.randn(9, 3, 12, 12)
    y = torch.arange(9) % 3
    engine = Engine(model, odd_loss, max_grad_norm=0.5, compile="aot_eager", check_isolation=False)
    first = {name: s.clone() for name, s in engine.clipped_sum(x, y).sums.items()}
    assert len(calls) == 1  # the eager pass that comes first
    assert relative_error(engine.clipped_sum(x, y).sums, first) < 1e-5
    assert len(calls) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("form", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("layer", [(3, 20, 3), (24, 10, 3, 2, 1), (40, 24, 3), (40, 8, 1, 2)])
def test_convolutions_go_through_the_kernel_however_their_channels_lie(monkeypatch, form, layer):
    calls = _count(monkeypatch, "conv2d_grad_sample")
    torch.manual_seed(7)
    model = nn.Conv2d(*layer).to(memory_format=form)
    check(model, torch.randn(5, layer[0], 7, 9), torch.arange(5), clipped_sum)
    assert calls


def test_other_dtypes_and_forms_take_the_pure_path(monkeypatch):
    calls = _count(monkeypatch, "conv2d_grad_sample")
    torch.manual_seed(4)
    for layer, dtype in (
        (nn.Conv2d(4, 8, 3, groups=2), torch.float32),
        (nn.Conv2d(4, 8, 3, dilation=2), torch.float32),
        (nn.Conv2d(4, 8, 3), torch.float64),
    ):
        x = torch.randn(3, 4, 6, 6, dtype=dtype)
        for form in (LAST, torch.contiguous_format):
            check(layer.to(dtype=dtype, memory_format=form), x, torch.arange(3), clipped_sum)
    assert not calls


def test_an_engine_says_whether_kernels_are_in_use():
    engine = Engine(nn.Linear(2, 1), odd_loss, max_grad_norm=1.0)
    assert "compiled kernels: in use" in engine.explain()
    with native.disabled():
        assert "python -m dpcore.native" in engine.explain()


def test_without_a_compiler_the_build_says_so_and_nothing_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.reload()
    try:
        with pytest.raises(native.NativeBuildError, match="No C\\+\\+ compiler"):
            native.build()
        assert not native.available() and not list(tmp_path.iterdir())
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(native.NativeBuildError, match="failed"):
            native.build()
        assert not native.path().exists()
    finally:
        monkeypatch.undo()
        native.reload()
    assert native.available()


def test_one_examples_rows_are_shared_out_over_threads_without_a_bit_of_difference():
    g, x = torch.randn(1, 150, 1333), torch.randn(1, 150, 170)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(native.contraction_grad_sample(g, x))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[0], torch.einsum("btd,btp->bdp", g, x), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def _kernels_with_two_threads():
    torch.manual_seed(0)
    return native.contraction_grad_sample(torch.randn(8, 90, 170), torch.randn(8, 90, 150))


def _threads_seen_during_kernels(enough=1, most_seconds=0.0):
    """Return the ids of threads that this process had only while kernels ran on two threads.

    The kernels run 40 times; as often again where fewer than ``enough`` were seen, for up to ``most_seconds``.
    """
    g, x = torch.randn(64, 200, 170), torch.randn(64, 200, 150)
    deadline = time.monotonic() + most_seconds
    seen = set()
    while True:
        kernels = threading.Thread(target=lambda: [native.contraction_grad_sample(g, x) for _ in range(40)])
        kernels.start()
        while kernels.is_alive():
            seen.update(os.listdir("/proc/self/task"))
        kernels.join()
        only = seen - set(os.listdir("/proc/self/task"))
        if len(only) >= enough or time.monotonic() > deadline:
            return only


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has no OpenMP threads")
def test_kernels_run_on_torchs_threads():
    """Threads beside torch's, which spin for a while after each operator, would wait for a processor."""
    threads = torch.get_num_threads()
    found = loaded()
    assert found is not None
    library = found.library
    try:
        torch.set_num_threads(2)
        # A thread that calls OpenMP has a team of its own: two ids, that of the caller and that of its helper.
        own = len(_threads_seen_during_kernels())
        library.dpcore_use_team(None)
        fresh = len(_threads_seen_during_kernels(enough=3, most_seconds=120.0))
    finally:
        library.dpcore_use_team(ctypes.CDLL(None).GOMP_parallel)
        torch.set_num_threads(threads)
    assert own <= 2
    assert fresh > 2  # a thread for every call, of which a busy machine shows one now and then


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_fork_after_the_kernels_ran_can_run_them_again(tmp_path):
    """A forked child has none of torch's threads; its kernels start their own."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        before = _kernels_with_two_threads()
        child = os.fork()
        if child == 0:
            try:
                np.save(tmp_path / "found.npy", _kernels_with_two_threads().numpy())
            finally:
                os._exit(0)
        for _ in range(600):
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(np.load(tmp_path / "found.npy"), before.numpy())


class Threads(torch.utils.data.Dataset):
    """Each item: into how many threads a kernel splits its work in the process that loads it."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with mock.patch.object(native, "_call", wraps=native._call) as call:
            _kernels_with_two_threads()
        return call.call_args.args[2][-1]


def test_the_kernels_of_a_loaders_worker_start_no_thread():
    """Or every worker would take as many processors as the training process."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert Threads()[0] == 2
        loader = torch.utils.data.DataLoader(Threads(), num_workers=1, multiprocessing_context="fork")
        assert [int(n) for n in loader] == [1, 1]
    finally:
        torch.set_num_threads(threads)


class Operators(TorchDispatchMode):
    """Counts the operators of torch that are started."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def small_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 9)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(9, 3)).to(memory_format=LAST)


def test_norms_and_sums_of_many_small_parameters_take_few_operators():
    """On small batches the starts of operators are the price of privacy."""
    x, y = torch.randn(6, 1, 14, 14), torch.arange(6) % 3
    counts, found = [], []
    for kernels in (True, False):
        with pytest.warns(UserWarning, match="mixes"):  # of the experiments only the first batches have any
            engine = Engine(small_model(), odd_loss, max_grad_norm=0.5, expected_batch_size=6, check_isolation=False)
        with nullcontext() if kernels else native.disabled():
            engine.privatize(x, y)
            with Operators() as operators:
                found.append(engine.privatize(x, y))
        counts.append(operators.count)
    assert counts[0] < 0.65 * counts[1]
    torch.testing.assert_close(found[0].norms, found[1].norms, rtol=2e-6, atol=0)
    assert relative_error(found[0].sums, found[1].sums) < 2e-6


def test_an_example_beyond_float32_and_one_that_is_not_finite_do_not_reach_the_others():
    def loss(outputs, weights):
        return outputs.sum(1) * weights

    x, weights = torch.randn(6, 1, 14, 14), torch.tensor([1.0, 1e25, 0.0, 2.0, torch.nan, 1e-25])
    kept = torch.tensor([0, 2, 3, 5])
    whole = clipped_sum(small_model(), loss, x, weights, 0.5)
    mask = torch.ones(6, dtype=torch.bool)
    mask[1] = False
    masked = Engine(small_model(), loss, max_grad_norm=0.5).clipped_sum(x, weights, mask)
    alone = clipped_sum(small_model(), loss, x[kept], weights[kept], 0.5)
    assert not whole.norms[4].isfinite() and whole.factors[4] == 0.0 and 0.0 < whole.factors[1] < 1e-24
    torch.testing.assert_close(whole.norms[kept], alone.norms, rtol=1e-6, atol=0)
    assert relative_error(masked.sums, alone.sums) < 1e-6


def test_a_clipping_rule_that_changes_what_was_measured_is_refused():
    x, y = torch.randn(6, 1, 14, 14), torch.arange(6) % 3
    model = small_model()
    seen = []
    model[6].register_forward_hook(lambda module, args, output: seen.append(output.detach()))

    def rule(norms, bound):
        seen[-1].mul_(1000.0)
        return (bound / norms).clamp(max=1.0)

    engine = Engine(model, odd_loss, max_grad_norm=0.5, factors=rule, check_isolation=False)
    with pytest.raises(UnsupportedError, match="changed in place"):
        engine.clipped_sum(x, y)


class Negative(nn.Module):
    """Its input is the negative of what its memory holds, which kernels do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 30), nn.Linear(30, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(torch.complex(x, x).conj().imag))).mean(1)


def test_an_example_without_a_gradient_leaves_the_others_where_kernels_then_take_them(monkeypatch):
    """By itself neither weight is large enough for turns; both are, and copies of the other examples' inputs serve."""
    monkeypatch.setattr("dpcore.microbatch.planner.FEWEST_IN_TURN", 1000)
    torch.manual_seed(0)
    model, x, y = Negative(), torch.randn(4, 40, 30), torch.arange(4) % 3
    x[1, 0, 0] = torch.nan
    true = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 0.5).clipped
    sums = Engine(model, odd_loss, max_grad_norm=0.5, check_isolation=False).clipped_sum(x, y).sums
    assert relative_error(sums, true) < 2e-5


@pytest.mark.parametrize("factors", [lambda norms, bound: torch.ones(1), lambda norms, bound: torch.ones(7)])
def test_a_clipping_rule_returns_one_factor_for_each_example(factors):
    x, y = torch.randn(6, 1, 14, 14), torch.arange(6) % 3
    engine = Engine(small_model(), odd_loss, max_grad_norm=0.5, factors=factors, check_isolation=False)
    with pytest.raises((ValueError, RuntimeError)):
        engine.clipped_sum(x, y)


@pytest.mark.parametrize("bound", [9.588e-7, 1e-6, 1.0])
@pytest.mark.parametrize("huge", ["input", "gradient"])
def test_a_huge_number_times_a_tiny_one_stays_within_the_bound(bound, huge):
    """A tiny clip factor has few digits left in float32, and the other of the two numbers shows what was lost."""
    model = nn.Linear(20, 1, bias=False) if huge == "gradient" else nn.Linear(1, 20, bias=False)
    x = torch.full((1, model.in_features), 1e-20 if huge == "gradient" else 3e38)
    weight = 3e38 if huge == "gradient" else 1e-20
    with torch.no_grad():
        model.weight.div_(10.0)
    for expected in (1, 10_000):
        engine = Engine(
            model,
            lambda outputs, weights: (outputs * weights[:, None]).sum(1),
            max_grad_norm=bound,
            expected_batch_size=expected,
            noise_multiplier=0.0,
            check_isolation=False,
        )
        engine.privatize(x, torch.tensor([weight]))
        added = model.weight.grad.double().norm().item() * expected
        assert added <= bound * (1.0 + 1e-6)


@pytest.mark.parametrize(
    ("g", "x", "out"),
    [((5, 3), None, (3,)), ((4, 3), (5, 2), (3, 2)), ((4, 3), None, (2,)), ((4, 3), (4, 2), (2, 3))],
)
def test_kernels_of_many_parameters_read_and_write_no_more_than_there_is(g, x, out):
    part = Part.rows(torch.ones(g)) if x is None else Part.outer(torch.ones(g), torch.ones(x))
    with pytest.raises(ValueError, match=r"one per example, and of the sum's size"):
        Parts([part], [torch.zeros(out)], 4)
