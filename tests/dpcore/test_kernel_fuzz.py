"""The kernels on what nobody plans for: nothing at all, unaligned memory, huge values, NaN. `make fuzz-kernels` drives
these and the tests of test_native.py with many more examples, compiled with AddressSanitizer and UBSan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcore import native
from dpcore.errors import UnsupportedError
from dpcore.native.parts import Part, Parts
from dpcore.native.products import Product, Products
from dpcore.rules.recurrent_loops import GruRecurrence, RnnRecurrence, Steps
from tests.dpcore.test_native import pytestmark  # noqa: F401

VALUES = st.sampled_from(["normal", "huge", "tiny", "nan", "inf"])
WILD = {"huge": 3e38, "tiny": 1e-45, "nan": float("nan"), "inf": float("inf")}


def tensor(shape, values, offset, seed):
    """A tensor whose memory begins ``offset`` floats after an aligned place, some of its values as ``values`` says."""
    generator = torch.Generator().manual_seed(seed)
    size = 1
    for length in shape:
        size *= length
    flat = torch.randn(size + offset, generator=generator)[offset:]
    if values in WILD and size:
        flat[torch.randint(0, size, (1 + size // 7,), generator=generator)] = WILD[values]
    return flat.view(shape)


def same(found, true, values):
    """Finite values agree, and NaN is where it belongs; of sums of huge values only the shape can be told."""
    assert found.shape == true.shape
    if values in ("normal", "tiny"):
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)
    elif values == "nan":
        assert torch.equal(found.isnan(), true.isnan())


@given(st.integers(0, 4), st.integers(0, 140), st.integers(1, 70), st.integers(1, 70), VALUES, st.integers(0, 3))
@settings(max_examples=25)
def test_contractions(batch, positions, rows, columns, values, offset):
    g, x = tensor((batch, positions, rows), values, offset, 1), tensor((batch, positions, columns), "normal", offset, 2)
    true = torch.einsum("btd,btp->bdp", g, x)
    same(native.contraction_grad_sample(g, x), true, values)
    written = tensor((batch, rows, columns), "normal", offset, 3)
    squares = native.contraction_into(g, x, written)
    same(written, true, values)
    norms, scales, _ = native.contraction_norms(g, x)
    finite = true.isfinite().all(2).all(1)
    # What is not finite must not pass for a norm.
    assert not squares[~finite].isfinite().any() and not norms[~finite].isfinite().any()
    memory = torch.zeros(rows * columns + offset + 8)
    in_turn = Products([Product(g, x)], [memory[offset : offset + rows * columns]])
    for i in range(batch):
        assert bool(in_turn.form(i).isfinite()) == bool(squares[i].isfinite())
        in_turn.add([0.5])
    same(memory[offset : offset + rows * columns].view(rows, columns), 0.5 * true.sum(0), values)
    assert not memory[:offset].any() and not memory[offset + rows * columns :].any()
    memory.zero_()
    out = memory[offset : offset + rows * columns].view(rows, columns)
    native.contraction_clipped_sum(g, x, torch.full((batch,), 0.5), out)
    same(out, 0.5 * true.sum(0), values)
    assert not memory[:offset].any() and not memory[offset + rows * columns :].any()
    if values in ("normal", "tiny"):
        of_true = true.double().square().sum((1, 2))
        torch.testing.assert_close(squares, of_true, rtol=1e-4, atol=1e-6)
        assert bool(((norms - of_true).abs() <= 1e-5 * scales + 1e-12).all())


@given(
    st.tuples(*[st.integers(1, n) for n in (3, 9, 9, 9, 40, 3, 3, 2, 2)]),
    st.integers(0, 1),
    VALUES,
    st.integers(0, 3),
)
@settings(max_examples=25)
def test_convolutions(sizes, padding, values, offset):
    batch, height, width, channels, out_channels, kh, kw, sh, sw = sizes
    kh, kw = min(kh, height), min(kw, width)
    x = tensor((batch, channels, height, width), "normal", offset, 1)
    oh, ow = (height + 2 * padding - kh) // sh + 1, (width + 2 * padding - kw) // sw + 1
    g = tensor((batch, out_channels, oh, ow), values, offset, 2)
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    windows = padded.unfold(2, kh, sh).unfold(3, kw, sw)[:, :, :oh, :ow]
    true = torch.einsum("bdhw,bchwkl->bdckl", g, windows)
    for last in (True, False):
        same(native.conv2d_grad_sample(x, g, (kh, kw), (sh, sw), (padding, padding), last), true, values)


@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 40), VALUES, st.integers(0, 3))
@settings(max_examples=25)
def test_tokens(batch, length, rows, width, values, offset):
    ids = torch.randint(0, rows, (batch, length), generator=torch.Generator().manual_seed(length))
    tokens, counts, starts, _ = native.count_tokens(ids, rows, None)
    vectors = tensor((batch, width), values, offset, 3)
    out = torch.zeros(rows * width + offset)[offset:].view(rows, width)
    native.add_by_token(out, tokens, counts, starts, vectors)
    one_hot = torch.nn.functional.one_hot(ids, rows).sum(1).float() if batch else torch.zeros(0, rows)
    if values in ("normal", "tiny"):
        torch.testing.assert_close(out, one_hot.T @ vectors, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 2000), st.integers(0, 3), st.sampled_from([0.0, 1.0, 3e38]), st.integers(0, 2000))
@settings(max_examples=25)
def test_noise(size, offset, deviation, start):
    name = bytes(range(16))
    memory = torch.zeros(size + offset + 8)
    target = memory[offset : offset + size]
    native.put_normals(target, deviation, name, start, add=True)
    assert not memory[:offset].any() and not memory[offset + size :].any(), "nothing beside the target is written"
    assert bool(target.any()) == bool(deviation)
    added = target.clone()
    native.put_normals(target, deviation, name, start, add=False)
    assert not memory[:offset].any() and not memory[offset + size :].any(), "nothing beside the target is written"
    assert torch.equal(target, added), "what the target held does not count"


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 40), VALUES, st.integers(0, 3), st.booleans())
@settings(max_examples=25)
def test_lstm_loops(steps, batch, hidden, values, offset, reverse):
    z, weight = tensor((steps, batch, 4 * hidden), values, offset, 1), tensor((4 * hidden, hidden), "normal", 0, 2)
    h, c = (torch.zeros(steps + 1, batch, hidden) for _ in range(2))
    gates, tanh_c = torch.empty(steps, batch, 4 * hidden), torch.empty(steps, batch, hidden)
    native.lstm_forward(z, weight, gates, h, c, tanh_c, reverse)
    grad, last = tensor((steps, batch, hidden), "normal", offset, 3), torch.zeros(batch, hidden)
    delta = torch.empty_like(gates)
    dh, dc = native.lstm_backward(gates, c, tanh_c, weight, grad, last, delta, reverse)
    if values != "nan":
        assert gates.isfinite().all() and (gates.abs() <= 1.0).all(), "gates saturate"
    elif batch:
        assert gates.isnan().any() and delta.isnan().any(), "a NaN is not lost"
    assert dh.shape == dc.shape == (batch, hidden)


def through(kind, sizes, values, offset, reverse):
    """The states of a loop, and the gradients at its inputs, through memory of all kinds."""
    steps, batch, hidden = sizes
    rows = hidden * (3 if kind == "gru" else 1)
    z, weight = tensor((steps, batch, rows), values, offset, 1), tensor((hidden, rows), "normal", offset, 2).t()
    h0, grad = tensor((hidden, batch), "normal", offset, 3).t(), tensor((batch, steps, hidden), "normal", offset, 4)
    inputs, constant, order = [z.requires_grad_(), h0.requires_grad_()], weight / hidden**0.5, Steps(steps, reverse)
    if kind == "gru":
        inputs.append(torch.empty_like(z, requires_grad=True))
        bias = tensor((rows,), "normal", offset, 5)
        states, _ = GruRecurrence.apply(z, inputs[2], constant, bias, h0, order)
    else:
        states, _ = RnnRecurrence.apply(z, constant, h0, kind == "relu", order)
    return [states.detach(), *torch.autograd.grad(states, inputs, grad.transpose(0, 1))]


@given(
    st.sampled_from(["gru", "tanh", "relu"]),
    st.tuples(st.integers(1, 5), st.integers(0, 30), st.integers(1, 70)),
    VALUES,
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=40)
def test_gru_and_plain_loops(kind, sizes, values, offset, reverse):
    found = through(kind, sizes, values, offset, reverse)
    with native.disabled():
        twins = through(kind, sizes, values, offset, reverse)
    for one, twin in zip(found, twins, strict=True):
        same(one, twin, values)
    if values in ("huge", "inf") and kind != "relu":
        assert found[0].isfinite().all(), "gates saturate"


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_nothing_is_nothing(shape):
    g, x = torch.zeros(shape), torch.zeros(shape)
    assert not native.contraction_grad_sample(g, x).any()


@given(
    st.integers(0, 20),
    st.integers(0, 140),
    st.integers(1, 150),
    st.integers(1, 70),
    VALUES,
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=25)
def test_parts_of_many_parameters(batch, positions, width, columns, values, offset, data):
    turned, apart = data.draw(st.booleans()), data.draw(st.integers(0, 5))
    rows = tensor((batch, width + apart), values, offset, 1)[:, :width]
    summed = tensor((batch, positions, width + apart), "normal", offset, 2)[..., :width]
    g, x = tensor((batch, width), "normal", offset, 3), tensor((batch, columns), "normal", offset, 4)
    memory = torch.zeros(2 * width + width * columns + offset + 8)
    used = memory[offset : offset + 2 * width + width * columns]
    outs = list(used.split([width, width, width * columns]))
    outs[2] = outs[2].view(columns, width).t() if turned else outs[2].view(width, columns)
    parts = Parts([Part.rows(rows), Part.sums(summed), Part.outer(g, x)], outs, batch)
    norms_sq = torch.zeros(batch)
    below = parts.add_norms(norms_sq)
    gradients = rows, summed.sum(1), g[:, :, None] * x[:, None]
    true = sum(part.double().flatten(1).square().sum(1) for part in gradients)
    finite = rows.isfinite().all(1)
    assert not norms_sq[~finite].isfinite().any() and below == bool((norms_sq < torch.inf).all())
    if values in ("normal", "tiny"):
        torch.testing.assert_close(norms_sq.double(), true, rtol=1e-5, atol=1e-6)
    factors = torch.where(finite, 0.5, 0.0)
    parts.add_sums(factors)
    for out, part in zip(outs, gradients, strict=True):
        same(out, 0.5 * part[finite].sum(0), "normal" if values == "nan" else values)
    assert not memory[:offset].any() and not memory[offset + len(used) :].any()


@given(st.integers(0, 20), st.integers(1, 32), st.integers(1, 70), st.integers(1, 9), VALUES, st.integers(0, 3))
@settings(max_examples=25)
def test_bags_of_ids(batch, length, width, rows, values, offset):
    g = tensor((batch, width), values, offset, 1)
    ids = torch.randint(rows, (batch, length), generator=torch.Generator().manual_seed(batch))
    memory = torch.zeros(rows * width + offset + 8)
    out = memory[offset : offset + rows * width].view(rows, width)
    parts, norms_sq = Parts([Part.bags(g, ids)], [out], batch), torch.zeros(batch)
    below = parts.add_norms(norms_sq)
    gradients = torch.nn.functional.one_hot(ids, rows).sum(1)[:, :, None].double() * g.double()[:, None]
    finite = g.isfinite().all(1)
    assert not norms_sq[~finite].isfinite().any() and below == bool((norms_sq < torch.inf).all())
    if values in ("normal", "tiny"):
        torch.testing.assert_close(norms_sq.double(), gradients.flatten(1).square().sum(1), rtol=1e-5, atol=1e-6)
    parts.add_sums(torch.where(finite, 0.5, 0.0))
    same(out, 0.5 * gradients[finite].sum(0).float(), "normal" if values == "nan" else values)
    assert not memory[:offset].any() and not memory[offset + rows * width :].any()


def test_ids_that_became_no_rows_are_refused_and_touch_nothing():
    ids, out = torch.tensor([[0, 2], [1, 1]]), torch.zeros(3, 5)
    parts = Parts([Part.bags(torch.ones(2, 5), ids)], [out], 2)
    parts.add_norms(torch.zeros(2))
    ids.numpy()[1] = -1, 3  # which no tensor counts
    with pytest.raises(UnsupportedError, match="2 ids of an embedding bag are no rows of its table any more"):
        parts.add_sums(torch.ones(2))
    torch.testing.assert_close(out, torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, 5))
