"""Bilinear and EmbeddingBag, and the layers under Opacus' names."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpcore
from dpcore import clipped_sum
from dpcore.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, RNNLinear, SequenceBias
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


class Bilinear(nn.Module):
    def __init__(self, p, q, d, bias, time_first=False):
        super().__init__()
        self.left, self.right = nn.Linear(2, p), nn.Linear(2, q)
        self.layer = nn.Bilinear(p, q, d, bias)
        self.time_first = time_first

    def forward(self, x):
        left, right = self.left(x).tanh(), self.right(x).sin()
        if self.time_first:
            return self.layer(left.transpose(0, 1), right.transpose(0, 1)).transpose(0, 1)
        return self.layer(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 4),
    middle=st.lists(st.integers(1, 5), max_size=2),
    p=st.integers(1, 6),
    q=st.integers(1, 6),
    d=st.integers(1, 6),
    bias=st.booleans(),
)
def test_bilinear(dtype, batch, middle, p, q, d, bias):
    torch.manual_seed(0)
    model = Bilinear(p, q, d, bias).to(dtype)
    x = torch.randn(batch, *middle, 2, dtype=dtype)
    check(model, x, labels(batch), clipped_sum)
    assert has_rules(model, x, labels(batch))


@pytest.mark.parametrize(("p", "steps"), [(30, 3), (2, 30)])
def test_bilinear_by_either_norm(p, steps):
    """Wide layers on short sequences take the ghost norm, narrow ones on long sequences the per-sample gradient."""
    torch.manual_seed(0)
    for time_first in (False, True):
        model = Bilinear(p, p, 4, True, time_first).double()
        check(model, torch.randn(3, steps, 2, dtype=torch.float64), labels(3), clipped_sum)
    check_private(Bilinear(p, p, 4, True).double(), torch.randn(3, steps, 2, dtype=torch.float64), labels(3))


class Bags(nn.Module):
    """ids [B, N] as bags: rows, or flat with offsets (the last bag in [B, N] short where ``ragged``)."""

    def __init__(self, form, weighted, rows=9, **options):
        super().__init__()
        self.form = form
        self.bag = nn.EmbeddingBag(rows, 4, include_last_offset=form == "last offset", **options)
        self.weigh = nn.Embedding(rows, 1) if weighted else None
        self.out = nn.Linear(4, 3)

    def forward(self, ids):
        weights = None if self.weigh is None else self.weigh(ids).squeeze(-1).tanh()
        if self.form == "rows":
            return self.out(self.bag(ids, None, weights).tanh())
        width = ids.shape[1]
        # Bags of different lengths, some of them empty: example i has as many ids as its first one says.
        lengths = ids[:, 0] % (width + 1)
        kept = torch.arange(width) < lengths.unsqueeze(1)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        offsets = offsets if self.form == "last offset" else offsets[:-1]
        return self.out(self.bag(ids[kept], offsets, None if weights is None else weights[kept]).tanh())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 5),
    width=st.integers(1, 6),
    rows=st.integers(1, 9),
    form=st.sampled_from(["rows", "offsets", "last offset"]),
    weighted=st.booleans(),
    padding_idx=st.sampled_from([None, 0, -1]),
)
def test_embedding_bag(dtype, mode, batch, width, rows, form, weighted, padding_idx):
    torch.manual_seed(0)
    weighted = weighted and mode == "sum" and form == "rows"
    model = Bags(form, weighted, rows, mode=mode, padding_idx=padding_idx).to(dtype)
    ids = torch.randint(0, rows, (batch, width))
    check(model, ids, labels(batch), clipped_sum)
    assert has_rules(model, ids, labels(batch))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_in_the_two_line_use(mode):
    torch.manual_seed(0)
    check_private(Bags("offsets", False, mode=mode).double(), torch.randint(0, 9, (5, 4)), labels(5))


class Text(nn.Module):
    """Flat ids and offsets as they come from a loader."""

    def __init__(self, last):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode="mean", include_last_offset=last)
        self.out = nn.Linear(4, 3)

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets).tanh())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offsets", [[0, 3, 4, 9], [0, 0, 5, 11], [0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
def test_flat_ids_and_offsets_as_inputs_of_a_private_module(last, offsets):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (11,))
    starts = torch.tensor([*offsets, 11] if last else offsets)
    check_private_call(Text(last).double(), (ids, starts), labels(len(offsets)))


def test_embedding_bag_with_weights_for_flat_ids():
    torch.manual_seed(0)
    check_by_autograd(Bags("offsets", True, mode="sum").double(), torch.randint(0, 9, (5, 4)), labels(5))


@pytest.mark.parametrize(("mode", "length"), [("sum", 31), ("sum", 32), ("mean", 31), ("mean", 7)])
def test_an_id_that_fills_its_bag_does_not_pass_the_bound_by_rounding(mode, length):
    """Equal numbers are added again and again, so that all of them may round the same way."""
    torch.manual_seed(0)
    model, ids, bound = nn.EmbeddingBag(5, 16, mode=mode), torch.full((1, length), 2), 0.1
    for _ in range(100):
        y = torch.full((1, 16), 1.0 + torch.rand(()).item())
        sums = clipped_sum(model, lambda outputs, y: (outputs * y).sum(1), ids, y, bound).sums
        norm = sums["weight"].double().norm().item()
        assert bound * (1.0 - 2e-5) < norm <= bound


def test_a_hostile_example_in_an_embedding_bag():
    torch.manual_seed(0)
    for mode in ("sum", "mean", "max"):
        model = Bags("offsets", False, mode=mode)
        ids = torch.randint(1, 8, (5, 4))
        ids[2] = 8
        with torch.no_grad():
            model.bag.weight[8] = float("nan")
        result = clipped_sum(model, odd_loss, ids, labels(5), 0.5)
        others = [0, 1, 3, 4]
        rest = clipped_sum(model, odd_loss, ids[others], labels(5)[others], 0.5)
        assert result.nonfinite == 1
        assert relative_error(result.sums, rest.sums) < 1e-5


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_what_an_embedding_bag_must_not_do(option):
    with pytest.raises(dpcore.UnsupportedError, match=next(iter(option))):
        clipped_sum(Bags("rows", False, **option), odd_loss, torch.randint(0, 9, (3, 2)), labels(3), 1.0)


class Biased(nn.Module):
    def __init__(self, width, batch_first):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layer = SequenceBias(width, batch_first)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.layer(x) if self.layer.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 5), steps=st.integers(1, 5), width=st.integers(1, 5))
def test_sequence_bias(batch_first, batch, steps, width):
    torch.manual_seed(0)
    model = Biased(width, batch_first).double()
    x = torch.randn(batch, steps, 3, dtype=torch.float64)
    check(model, x, labels(batch), clipped_sum)
    assert model(x).shape == (batch, steps + 1, width)
    torch.testing.assert_close(model(x)[:, -1], model.layer.bias.expand(batch, -1))
    assert has_rules(model, x, labels(batch))


PAIRS = {
    "rnn": (DPRNN, nn.RNN, {"nonlinearity": "relu"}),
    "gru": (DPGRU, nn.GRU, {}),
    "lstm": (DPLSTM, nn.LSTM, {"proj_size": 2}),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_are_torchs(kind, bias):
    torch.manual_seed(0)
    ours_kind, torchs_kind, extra = PAIRS[kind]
    options = {"num_layers": 2, "bias": bias, "batch_first": True, "dropout": 0.3, "bidirectional": True} | extra
    ours, torchs = ours_kind(3, 4, **options), torchs_kind(3, 4, **options)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(2, 5, 3)
    torch.manual_seed(1)
    expected = torchs(x)[0]
    torch.manual_seed(1)
    assert torch.equal(ours(x)[0], expected)
    torchs.load_state_dict(copy.deepcopy(ours).state_dict())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ours

        def forward(self, x):
            return self.layer(x)[0]

    check(Model().double().eval(), x.double(), labels(2), clipped_sum)


def test_positional_arguments_are_in_opacus_order():
    """Opacus has proj_size before the nonlinearity, torch the nonlinearity before the bias."""
    layer = DPRNN(3, 4, 1, False, True, 0.0, True, 0, "relu")
    assert (layer.bias, layer.batch_first, layer.bidirectional, layer.nonlinearity) == (False, True, True, "relu")
    for kind in (DPRNN, DPGRU):
        with pytest.raises(ValueError, match="proj_size is 2"):
            kind(3, 4, proj_size=2)


def test_rnn_linear_is_used_at_every_step():
    torch.manual_seed(0)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.ih, self.hh = RNNLinear(3, 4), RNNLinear(4, 4, bias=False)

        def forward(self, x):
            h = torch.zeros(len(x), 4, dtype=x.dtype)
            for t in range(x.shape[1]):
                h = (self.ih(x[:, t]) + self.hh(h)).tanh()
            return h

    check(Loop().double(), torch.randn(4, 5, 3, dtype=torch.float64), labels(4), clipped_sum)


@pytest.mark.parametrize("kdim", [None, 3])
def test_attention_loads_torchs_and_opacus_weights(kdim):
    torch.manual_seed(0)
    options = {"add_bias_kv": True, "kdim": kdim, "vdim": kdim, "batch_first": True}
    ours, torchs = DPMultiheadAttention(4, 2, **options), nn.MultiheadAttention(4, 2, **options)
    ours.load_state_dict(torchs.state_dict())
    x, z = torch.randn(2, 5, 4), torch.randn(2, 3, kdim or 4)
    expected = torchs(x, z, z)[0]
    torch.testing.assert_close(ours(x, z, z)[0], expected)
    torchs.load_state_dict(ours.state_dict())

    # The names of Opacus' parts, as its layers within a model save them.
    state = {f"inner.{name}": value for name, value in torchs.state_dict().items()}
    weights = (
        [state.pop(f"inner.{n}_proj_weight") for n in "qkv"] if kdim else state.pop("inner.in_proj_weight").chunk(3)
    )
    biases = state.pop("inner.in_proj_bias").chunk(3)
    for name, weight, bias in zip(("qlinear", "klinear", "vlinear"), weights, biases, strict=True):
        state[f"inner.{name}.weight"], state[f"inner.{name}.bias"] = weight, bias
    for name in ("bias_k", "bias_v"):
        state[f"inner.seq_{name}.bias"] = state.pop(f"inner.{name}").squeeze()
    fresh = nn.ModuleDict({"inner": DPMultiheadAttention(4, 2, **options)})
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh["inner"](x, z, z)[0], expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({name: value for name, value in state.items() if "klinear" not in name})


def test_attention_under_opacus_name_is_trained_by_the_rule():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = DPMultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
            nn.init.normal_(self.layer.in_proj_bias)

        def forward(self, x):
            return self.layer(x, x, x)[0]

    model, x = Model().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    check(model, x, labels(3), clipped_sum)
    assert has_rules(model, x, labels(3))


@pytest.mark.parametrize("name", ["DPRNN", "DPGRU", "DPLSTM", "DPMultiheadAttention"])
def test_weights_go_to_opacus_layers_and_come_back(name):
    theirs_of = pytest.importorskip("opacus.layers")
    import dpcore.layers as ours_of

    torch.manual_seed(0)
    attention = name == "DPMultiheadAttention"
    arguments = (4, 2) if attention else (3, 4, 2)
    options = {"add_bias_kv": True} if attention else {"batch_first": True, "bidirectional": True}
    ours = nn.ModuleDict({"layer": getattr(ours_of, name)(*arguments, **options)})
    theirs = nn.ModuleDict({"layer": getattr(theirs_of, name)(*arguments, **options)})
    ours.load_state_dict(theirs.state_dict())
    inputs = [torch.randn(2, 5, 4)] * 3 if attention else [torch.randn(2, 5, 3)]
    torch.testing.assert_close(ours["layer"](*inputs)[0], theirs["layer"](*inputs)[0])
    fresh = getattr(theirs_of, name)(*arguments, **options)
    fresh.load_state_dict(dict(ours["layer"].state_dict()))
    torch.testing.assert_close(fresh(*inputs)[0], theirs["layer"](*inputs)[0])


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_the_first_state_has_opacus_name_too(kind):
    layer, x = kind(3, 4, batch_first=True), torch.randn(5, 2, 3)
    h = torch.randn(1, 5, 4)
    state = (h, torch.randn(1, 5, 4)) if kind is DPLSTM else h
    torch.testing.assert_close(layer(x, state_init=state)[0], layer(x, state)[0])
    with pytest.raises(ValueError, match="two names of the first state"):
        layer(x, state, state_init=state)
