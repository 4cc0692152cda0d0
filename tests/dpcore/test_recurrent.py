"""LSTM, GRU and RNN in all their forms, against float64 micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import dpcore
from dpcore import Engine, GradSampleModule, PrivacyError, clipped_sum, reference
from dpcore.validators import check_isolation
from tests.dpcore.comparison import (
    check,
    check_by_autograd,
    check_private,
    check_private_call,
    has_rules,
    labels,
    odd_loss,
    relative_error,
)

DTYPES = [torch.float64, torch.float32]
LAYOUT = (False, True)
"""Packed, sorted by no one; the batch first."""
slow = pytest.mark.slow
KINDS = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *args, **kwargs: nn.LSTM(*args, proj_size=2, **kwargs),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}


def _joined(out: torch.Tensor, state) -> torch.Tensor:
    """[B, everything]: outputs [B, ...] beside the last states [layers, B, ...]."""
    states = state if isinstance(state, tuple) else (state,)
    return torch.cat([out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


class Sequences(nn.Module):
    """A linear layer, so that gradients at the input matter, then a recurrent one. x [B, T, 4]: three features, and a
    length in the last. ``packed``: None for padded input, else ``enforce_sorted``."""

    def __init__(self, layer, packed=None, learned=None):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layer = layer
        self.packed = packed
        self.learned = learned
        rows = layer.num_layers * (2 if layer.bidirectional else 1)
        self.widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
        if learned == "parameter":
            self.states = nn.ParameterList([torch.randn(rows, 1, width) for width in self.widths])
        elif learned == "layer":
            self.states = nn.ModuleList([nn.Linear(3, rows * width) for width in self.widths])

    def state(self, x):
        rows, batch = self.layer.num_layers * (2 if self.layer.bidirectional else 1), len(x)
        if self.learned == "parameter":
            states = [p.expand(-1, batch, -1).contiguous() for p in self.states]
        else:
            states = [
                make(x[:, 0]).tanh().view(batch, rows, width).transpose(0, 1).contiguous()
                for make, width in zip(self.states, self.widths, strict=True)
            ]
        return tuple(states) if isinstance(self.layer, nn.LSTM) else states[0] + states[1]

    def forward(self, x):
        batch_first = self.layer.batch_first
        x, lengths, steps = x[..., :3], x[:, 0, 3].long(), x.shape[1]
        state = self.state(x) if self.learned else None
        x = first = self.first(x).tanh()
        x = x if batch_first else x.transpose(0, 1)
        if self.packed is not None:
            x = pack_padded_sequence(x, lengths, batch_first, self.packed)
        out, last = self.layer(x, state) if self.learned else self.layer(input=x)
        if self.packed is not None:
            out, _ = pad_packed_sequence(out, batch_first, total_length=steps)
        # The first layer's output too: a ReLU network may be dead, and an example without a gradient tests little.
        return torch.cat([_joined(out if batch_first else out.transpose(0, 1), last), first.flatten(1)], 1)


def batch_of(batch: int, steps: int, dtype, descending: bool = False) -> torch.Tensor:
    """x [B, T, 4] with lengths that differ, the longest neither first nor last unless ``descending``."""
    lengths = torch.tensor([(3 * i + 1) % steps + 1 for i in range(batch)])
    lengths[batch // 2] = steps
    if descending:
        lengths = lengths.sort(descending=True).values
    return torch.cat(
        [torch.randn(batch, steps, 3, dtype=dtype), lengths.to(dtype).view(-1, 1, 1).expand(-1, steps, 1)], 2
    )


def _sharp(model: nn.Module) -> nn.Module:
    """Larger weights than torch's, so that gates are not all alike."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.7)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 4),
    steps=st.integers(1, 5),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    packed=st.sampled_from([None, True, False]),
    learned=st.sampled_from([None, None, "parameter", "layer"]),
)
def test_every_form(dtype, kind, batch, steps, layers, bidirectional, bias, batch_first, packed, learned):
    torch.manual_seed(0)
    options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    model = _sharp(Sequences(KINDS[kind](3, 4, layers, **options), packed, learned)).to(dtype)
    x = batch_of(batch, steps, dtype, bool(packed))
    check(model, x, labels(batch), clipped_sum)
    assert has_rules(model, x, labels(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_examples_as_steps_and_time_first(kind):
    """The lengths cannot tell which dimension is the batch; three layers, all kinds of packing."""
    torch.manual_seed(0)
    for packed in (None, False):
        model = Sequences(KINDS[kind](3, 4, 3, bidirectional=True), packed).double()
        check(model, batch_of(5, 5, torch.float64), labels(5), clipped_sum)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [None, False])
def test_frozen_parts(kind, packed):
    torch.manual_seed(0)
    x, y = batch_of(4, 5, torch.float64), labels(4)
    for names in (["weight_ih_l0"], ["weight_hh_l0", "bias_ih_l0"], ["weight_ih_l0", "bias_ih_l0"], ["weight_hr_l0"]):
        model = Sequences(KINDS[kind](3, 4, 2, batch_first=True), packed).double()
        for name in names:
            if hasattr(model.layer, name):
                getattr(model.layer, name).requires_grad_(False)
        check(model, x, y, clipped_sum)
    layer = KINDS[kind](3, 4, 2, batch_first=True).requires_grad_(False)
    check(Sequences(layer, packed).double(), x, y, clipped_sum)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "packed", "batch_first"),
    [
        # The order in which numbers are drawn hangs on the layout, not on the precision: one of float32 is enough.
        pytest.param(dtype, packed, first, marks=[] if dtype is torch.float64 or (packed, first) == LAYOUT else slow)
        for dtype in DTYPES
        for packed in (None, True, False)
        for first in (True, False)
    ],
)
def test_dropout_between_layers_draws_what_torch_draws(dtype, kind, packed, batch_first):
    torch.manual_seed(0)
    for bidirectional in (False, True):
        layer = KINDS[kind](3, 4, 3, dropout=0.4, batch_first=batch_first, bidirectional=bidirectional)
        model = Sequences(layer, packed).to(dtype)
        x = batch_of(5, 4, dtype, bool(packed))
        check_by_autograd(model, x, labels(5))
        model.eval()
        check_by_autograd(model, x, labels(5))


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_line_use(kind):
    torch.manual_seed(0)
    for packed, batch_first in ((None, False), (False, True)):
        model = Sequences(KINDS[kind](3, 4, 2, batch_first=batch_first, bidirectional=True), packed, "layer").double()
        check_private(model, batch_of(4, 5, torch.float64), labels(4))


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_in_physical_batches_and_hostile_examples(kind):
    torch.manual_seed(0)
    model = Sequences(KINDS[kind](3, 6, 2, batch_first=True), False)
    x, y = batch_of(7, 40, torch.float32), labels(7)
    whole = clipped_sum(model, odd_loss, x, y, 0.5, physical_batch_size=7)
    pieces = clipped_sum(model, odd_loss, x, y, 0.5, physical_batch_size=3)
    assert relative_error(pieces.sums, whole.sums) < 1e-5
    x[2, :, :3] = float("nan")
    others = [0, 1, 3, 4, 5, 6]
    hostile = clipped_sum(model, odd_loss, x, y, 0.5)
    rest = clipped_sum(model, odd_loss, x[others], y[others], 0.5)
    assert hostile.nonfinite == 1
    assert relative_error(hostile.sums, rest.sums) < 1e-5


def test_batch_and_time_swapped_is_refused():
    """Time runs through the examples: each of them reaches the outputs of those behind it."""
    for layer in (nn.LSTM(3, 4), nn.GRU(3, 4), nn.RNN(3, 4)):

        class Swapped(nn.Module):
            def __init__(self, layer=layer):
                super().__init__()
                self.layer = layer

            def forward(self, x):
                return self.layer(x)[0]

        with pytest.raises(dpcore.UnsupportedError, match="batch_first=True"):
            clipped_sum(Swapped(), odd_loss, torch.randn(4, 5, 3), labels(4), 1.0)


def test_a_functional_call_with_packed_sequences_is_refused():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 4)

        def forward(self, x):
            packed = pack_padded_sequence(x, torch.full((len(x),), 5), batch_first=True)
            state = torch.zeros(1, len(x), 4)
            weights = list(self.layer.parameters())
            return torch.gru(packed.data, packed.batch_sizes, state, weights, True, 1, 0.0, True, False)[1][0]

    with pytest.raises(dpcore.UnsupportedError, match="functional call"):
        clipped_sum(Functional(), odd_loss, torch.randn(4, 5, 3), labels(4), 1.0)


class Cells(nn.Module):
    """A loop over time of the user's own."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.start = nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = self.start.expand(len(x), 4)
        state = (h, h.sin()) if isinstance(self.cell, nn.LSTMCell) else h
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        # The start too: a ReLU cell may be dead, and an example without a gradient tests little.
        return torch.cat([h, *(state if isinstance(state, tuple) else (state,))], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_cells(dtype, bias, kind):
    torch.manual_seed(0)
    cells = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
    cell = cells[kind](3, 4, bias) if kind in cells else nn.RNNCell(3, 4, bias, kind)
    model = _sharp(Cells(cell)).to(dtype)
    x = torch.randn(4, 5, 3, dtype=dtype)
    check(model, x, labels(4), clipped_sum)
    assert has_rules(model, x, labels(4))


def test_the_outputs_are_torchs_in_evaluation_and_training():
    torch.manual_seed(0)
    seen = {}

    class Model(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, state = self.layer(packed)
            seen["out"] = [*out[:2], *(state if isinstance(state, tuple) else [state])]
            assert isinstance(out, PackedSequence)
            return pad_packed_sequence(out, batch_first=True)[0]

    x, lengths = torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 5])
    for kind in KINDS.values():
        model = Model(kind(3, 4, 2, bidirectional=True))
        model(x, lengths)
        plain = seen["out"]
        Engine(model, odd_loss, physical_batch_size=4).clipped_sum((x, lengths), labels(4))
        for a, b in zip(seen["out"], plain, strict=True):
            torch.testing.assert_close(a.detach(), b.detach())


def test_a_batch_that_the_model_reorders_is_found_by_experiment():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            order = x[:, 0, 0].argsort()
            return self.layer(x[order])[1][0][order.argsort()]

    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)
    x[:, 0, 0] = torch.tensor([0.1, 0.4, 0.3, 0.2])
    with pytest.raises(PrivacyError, match="layer"):
        check_isolation(Sorted(), x)


class Packed(nn.Module):
    """Takes and hands on a PackedSequence."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, packed):
        out, state = self.layer(packed)
        return _joined(pad_packed_sequence(out, True, total_length=5)[0], state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_as_the_input_of_a_private_module(kind, enforce_sorted):
    torch.manual_seed(0)
    model = Packed(KINDS[kind](3, 4, 2, bidirectional=True)).double()
    lengths = torch.tensor([5, 5, 3, 2] if enforce_sorted else [2, 5, 3, 5])
    x, y = torch.randn(4, 5, 3, dtype=torch.float64), labels(4)
    packed = pack_padded_sequence(x, lengths, True, enforce_sorted)
    check_private_call(model, packed, y)


def test_a_packed_sequence_in_a_layer_without_a_rule_is_refused():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, packed):
            padded, _ = pad_packed_sequence(packed, True)
            return torch.addcmul(torch.zeros_like(padded), padded, self.scale).sum(1)

    packed = pack_padded_sequence(torch.randn(4, 5, 3), torch.full((4,), 5), True)
    with pytest.raises(dpcore.UnsupportedError, match="PackedSequence"):
        dpcore.GradSampleModule(Custom())(packed)


@pytest.mark.parametrize("function", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 7, 5), (1, 6, 4), (1, 6, 6)])
def test_a_functional_call_with_states_of_another_shape_is_refused(function, shape):
    """The modules check it; the compiled loops would go past the ends of what they read and write."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = {"lstm": nn.LSTM, "gru": nn.GRU}.get(function, nn.RNN)(3, 5)

        def forward(self, x):
            states = torch.zeros(shape), torch.zeros(1, len(x), 5)
            state = states if function == "lstm" else states[0]
            weights = list(self.layer.parameters())
            return getattr(torch, function)(x, state, weights, True, 1, 0.0, True, False, True)[0]

    with pytest.raises(ValueError, match="first states of the shapes"):
        clipped_sum(Functional(), odd_loss, torch.randn(6, 4, 3), labels(6), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_leaves_the_recurrence_in_full(kind):
    torch.manual_seed(0)
    model = Sequences(KINDS[kind](3, 4, 2, batch_first=True), False)
    x, y = batch_of(4, 5, torch.float32), labels(4)
    truth = reference.clipped_sum(model, odd_loss, x, y, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        result = clipped_sum(model, lambda out, y: odd_loss(out.float(), y), x, y, 0.5)
    assert 0 < relative_error(result.sums, truth.clipped) < 0.02


@pytest.mark.parametrize("projected", [False, True])
def test_a_graph_that_is_kept_can_be_gone_through_again(projected):
    """The backward pass writes over the gates, unless another one may follow. By hooks, in float64, to rounding."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5, proj_size=2 if projected else 0, batch_first=True).double()
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    weights = torch.randn(4, 6, 2 if projected else 5, dtype=torch.float64)
    check_kept_graph(lstm, x, weights, rtol=1e-12)


def check_kept_graph(lstm, x, weights, rtol):
    """Two backward passes through one forward pass against twice the gradients of one."""
    once, twice = GradSampleModule(copy.deepcopy(lstm)), GradSampleModule(lstm)
    once.isolation.enabled = twice.isolation.enabled = False  # their passes are counted
    (once(x)[0] * weights).sum().backward()
    loss = (twice(x)[0] * weights).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for one, two in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(two.grad_sample, 2 * one.grad_sample, rtol=rtol, atol=rtol)


def test_a_graph_that_is_not_kept_is_gone():
    """What was written over the gates cannot be taken for them."""
    module = GradSampleModule(nn.LSTM(3, 5, batch_first=True))
    loss = module(torch.randn(4, 6, 3))[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
