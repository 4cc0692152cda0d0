"""Normalisations, and layers without a rule of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpcore
from dpcore import Engine, clipped_sum, reference
from dpcore.rules import convolution, products
from tests.dpcore.comparison import (
    check,
    check_by_autograd,
    check_private,
    has_rules,
    labels,
    odd_loss,
    relative_error,
)

DTYPES = [torch.float64, torch.float32]


def _randomised(model: nn.Module) -> nn.Module:
    """Weights of ones and biases of zeros would hide a wrong rule."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn_like(p) + 0.1)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm((4, 6)),
        lambda: nn.LayerNorm(6, bias=False),
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        lambda: nn.RMSNorm(6),
        lambda: nn.RMSNorm((4, 6), elementwise_affine=False),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.GroupNorm(2, 4, affine=False),
        lambda: nn.InstanceNorm1d(4, affine=True),
        lambda: nn.InstanceNorm1d(4),
    ],
)
def test_norms(dtype, layer):
    model = _randomised(nn.Sequential(nn.Conv1d(3, 4, 1), layer(), nn.Tanh())).to(dtype)
    check(model, torch.randn(5, 3, 6, dtype=dtype), labels(5), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2, "padding": 1}, {"dilation": 2}])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_large_examples(dims, options, dtype, monkeypatch):
    """Their inputs are not unfolded."""
    monkeypatch.setattr(convolution, "MOST_UNFOLDED", 1)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = _randomised(nn.Sequential(conv(4, 6, 3, **options), nn.Tanh())).to(dtype)
    check(model, torch.randn(3, 4, *[7] * dims, dtype=dtype), labels(3), clipped_sum)


@pytest.mark.parametrize("dims", [2, 3])
def test_instance_and_group_norm_of_images(dims):
    conv, norm = ((nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))[dims - 2]
    model = _randomised(nn.Sequential(conv(2, 4, 2), norm(4, affine=True), nn.ReLU(), nn.GroupNorm(2, 4))).double()
    x = torch.randn(3, 2, *[4] * dims, dtype=torch.float64)
    check(model, x, labels(3), clipped_sum)


class Positions(nn.Module):
    """A table of positions without a batch dimension, and a raw parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.positions = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.fc = nn.Linear(4, 2)

    def forward(self, ids):
        return self.fc((self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))) * self.scale)


class Rows(nn.Module):
    """Examples and positions folded into rows."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.fc(x.reshape(-1, 3)).tanh().view(len(x), -1, 4))


class TimeFirst(nn.Module):
    """Time first inside: with as many steps as examples the lengths cannot tell."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(x.transpose(0, 1)).tanh().transpose(0, 1)


class Wrapped(nn.Module):
    """Some layer with two inputs or several outputs, between two linear ones."""

    def __init__(self, layer, call):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layer = layer
        self.call = call

    def forward(self, x):
        return self.call(self.layer, self.first(x).tanh())


class Pooled(nn.Module):
    """[T, B, 4] -> [B, 4], so that nothing but the batch says which example is which."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, h):
        return (h * self.scale).sin().sum(0)


OTHERS = {
    "prelu": lambda: Wrapped(nn.PReLU(), lambda m, h: m(h)),
    "transposed convolution": lambda: Wrapped(nn.ConvTranspose1d(4, 2, 2), lambda m, h: m(h.transpose(1, 2))),
    "time first, batch first behind it": lambda: Wrapped(Pooled(), lambda m, h: m(h.transpose(0, 1))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_layers_without_a_rule(dtype, name):
    model = _randomised(OTHERS[name]()).to(dtype)
    check(model, torch.randn(5, 5, 3, dtype=dtype), labels(5), clipped_sum)


MASK = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
ATTENTIONS = {
    "averaged weights": {},
    "no weights": {"need_weights": False},
    "causal": {"attn_mask": MASK, "need_weights": False},
    "causal with weights": {"attn_mask": MASK},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ATTENTIONS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(dtype, options, batch_first):
    layer = nn.MultiheadAttention(4, 2, bias=batch_first, batch_first=batch_first)

    def call(m, h):
        out = m(h, h, h, **ATTENTIONS[options])[0] if batch_first else None
        return out if batch_first else m(*[h.transpose(0, 1)] * 3, **ATTENTIONS[options])[0].transpose(0, 1)

    model = _randomised(Wrapped(layer, call)).to(dtype)
    check(model, torch.randn(3, 5, 3, dtype=dtype), labels(3), clipped_sum)


def test_self_attention_has_a_rule_and_its_values_are_torchs():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    padding = (torch.arange(5) > 3).unsqueeze(0)
    seen = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = seen["out"] = self.layer(x, x, x, key_padding_mask=padding.expand(len(x), 5), attn_mask=MASK)
            return out[0]

    model = Model()
    engine = Engine(model, odd_loss)
    engine.clipped_sum(x, labels(3))
    taped = [t.detach() for t in seen["out"]]
    assert "vmap" not in engine.explain()
    for a, b in zip(taped, layer(x, x, x, key_padding_mask=padding.expand(3, 5), attn_mask=MASK), strict=True):
        torch.testing.assert_close(a, b.detach())


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_layer(norm_first):
    def layer(dropout):
        return nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True, norm_first=norm_first)

    model = _randomised(Wrapped(layer(0.0), lambda m, h: m(h))).double()
    check(model, torch.randn(3, 5, 3, dtype=torch.float64), labels(3), clipped_sum)
    with_dropout = Wrapped(layer(0.1), lambda m, h: m(h))
    engine = Engine(with_dropout, odd_loss)
    assert engine.clipped_sum(torch.randn(3, 5, 3), labels(3)).norms.isfinite().all()
    assert "vmap" not in engine.explain()


@pytest.mark.parametrize("kind", [Rows, TimeFirst])
def test_layouts_that_hide_the_batch(kind):
    check(_randomised(kind()).double(), torch.randn(4, 4, 3, dtype=torch.float64), labels(4), clipped_sum)


def test_positions_without_a_batch_dimension():
    model = _randomised(Positions()).double()
    for batch in (3, 5):
        check(model, torch.randint(0, 9, (batch, 5)), labels(batch), clipped_sum)
    engine = Engine(model, odd_loss)
    engine.clipped_sum(torch.randint(0, 9, (4, 5)), labels(4))
    assert "no rule, by vmap" not in engine.explain()


class Tables(nn.Module):
    """Positions by a layer on ids without a batch, by a parameter, and a bias of one's own, with dropout behind."""

    def __init__(self, kind, dropout=0.0):
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(9, 4)
        self.positions = nn.Embedding(5, 4)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=kind != "time first")

    def forward(self, ids):
        steps = ids.shape[1]
        if self.kind == "time first":
            h = self.tokens(ids.t()) + self.positions(torch.arange(steps).unsqueeze(1))
            return self.layer(self.bias + h).transpose(0, 1)
        h = self.tokens(ids)
        if self.kind == "layer":
            h = self.positions(torch.arange(steps)) + h
        elif self.kind == "layer with one row":
            h = h + self.positions(torch.arange(steps).unsqueeze(0))
        elif self.kind == "parameter":
            h = torch.add(self.table, h)
        return self.layer(h + self.bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "layer with one row", "parameter", "time first"])
def test_what_is_added_to_every_example(dtype, kind):
    for batch in (1, 3, 4, 5, 7):
        model = _randomised(Tables(kind)).to(dtype)
        ids = torch.randint(0, 9, (batch, 5))
        check(model, ids, labels(batch), clipped_sum)
        assert has_rules(model, ids, labels(batch))
    check_by_autograd(_randomised(Tables(kind, 0.3)).to(dtype), ids, labels(7))
    check_private(_randomised(Tables(kind)).to(dtype), ids, labels(7))


def test_a_parameter_is_expanded_to_as_many_positions_as_there_are_examples():
    """Masked tokens, the sinks of attention: a batch of the length of another dimension comes up sooner or later."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.sink = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(2, 1, 1))
            self.queries = nn.Embedding(3, 4)
            self.first, self.fc = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            queries = self.queries.weight.unsqueeze(1).repeat(1, len(x), 1).transpose(0, 1)
            h = torch.cat([self.first(x) + queries, self.token.expand(len(x), 3, 4)], 1).tanh()
            scores = torch.cat([h.view(-1, 6, 2, 2).transpose(1, 2), self.sink.expand(len(x), 2, 6, 1)], -1)
            return self.fc((scores.softmax(-1)[..., :2].transpose(1, 2).flatten(2) * h).mean(1))

    model = _randomised(Masked()).double()
    engine = Engine(model, odd_loss, max_grad_norm=1e9)
    for batch in (4, 3, 6, 1, 2):
        x = torch.randn(batch, 3, 4, dtype=torch.float64)
        sums = engine.clipped_sum(x, labels(batch)).sums
        truth = reference.clipped_sum(model, odd_loss, x, labels(batch), 1e9).clipped
        assert relative_error(sums, truth) < 1e-10
    assert "no rule, by vmap" not in engine.explain()


def test_a_table_of_tokens_and_of_fixed_ids():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.fc = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.fc(self.tokens(ids) + self.tokens(torch.tensor([2, 3, 3])))

    for batch in (2, 3):
        check(_randomised(Prompted()).double(), torch.randint(0, 9, (batch, 3)), labels(batch), clipped_sum)


def test_what_is_shared_in_other_ways_is_still_right():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(5, 4)
            self.fc = nn.Linear(4, 2)

        def forward(self, ids):
            return self.fc(self.tokens(ids) * self.positions(torch.arange(5)) + self.positions(torch.arange(5)))

    for batch in (3, 5):
        check(_randomised(Scaled()).double(), torch.randint(0, 9, (batch, 5)), labels(batch), clipped_sum)


def test_a_hostile_example_in_a_layer_without_a_rule():
    model = _randomised(Wrapped(nn.PReLU(), lambda m, h: m(h)))
    x = torch.randn(4, 2, 3)
    x[1] = float("nan")
    result = clipped_sum(model, odd_loss, x, labels(4), 0.5)
    rest = clipped_sum(model, odd_loss, x[[0, 2, 3]], labels(4)[[0, 2, 3]], 0.5)
    assert result.nonfinite == 1
    for name, summed in rest.sums.items():
        torch.testing.assert_close(result.sums[name], summed)


def test_a_layer_without_a_rule_that_mixes_examples_is_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, h):
            return torch.addcmul(-h.sum(0, keepdim=True), h, self.scale)

    model = Wrapped(Centred(), lambda m, h: m(h))
    with pytest.raises(dpcore.UnsupportedError, match="depends on the others"):
        clipped_sum(model, odd_loss, torch.randn(3, 2, 3), labels(3), 1.0)


def test_time_first_layers_have_rules_and_hide_no_example():
    """As many examples as time steps: the lengths cannot tell. The weights are shared with a batch-first use."""

    class Model(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.tokens = nn.Embedding(9, 3)
            self.fc, self.norm, self.out = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
            self.tied = tied

        def forward(self, ids):
            h = self.norm(self.fc(self.tokens(ids.t())).tanh()).transpose(0, 1)
            return self.fc(h) if self.tied else self.out(h)

    ids = torch.randint(0, 9, (4, 4))
    model = _randomised(Model(False)).double()
    check(model, ids, labels(4), clipped_sum)
    engine = Engine(model, odd_loss)
    engine.clipped_sum(ids, labels(4))
    assert "vmap" not in engine.explain()
    model = _randomised(Model(True)).double()
    check(model, ids[:3], labels(3), clipped_sum)
    with pytest.raises(dpcore.UnsupportedError, match="in different places"):
        clipped_sum(model, odd_loss, ids, labels(4), 1.0)


class StandardisedByBatchNorm(nn.Module):
    """A kernel that torch's function for batch norms standardises, as in NFNets, beside a layer that is trained."""

    def __init__(self, frozen):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 2, 3))
        self.gain = nn.Parameter(torch.rand(4) + 1.0)
        self.head = nn.Linear(4, 3)
        for param in (self.kernel, self.gain):
            param.requires_grad_(not frozen)

    def forward(self, x):
        kernel = F.batch_norm(self.kernel.reshape(1, 4, -1), None, None, weight=self.gain, training=True)
        return self.head(F.conv1d(x, kernel.reshape(self.kernel.shape)).mean(2))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_kernel_that_a_batch_norm_standardises_holds_no_example(frozen):
    model, x, y = StandardisedByBatchNorm(frozen).double(), torch.randn(5, 2, 8).double(), torch.arange(5) % 3
    losses = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    truth = reference.clipped_sum(copy.deepcopy(model), losses, x, y, 0.1).clipped
    sums = Engine(model, losses, max_grad_norm=0.1).clipped_sum(x, y).sums
    assert relative_error(sums, {name: truth[name] for name in sums}) < 1e-10


def test_a_batch_norm_of_examples_that_lie_beside_a_frozen_weight_is_refused():
    class Mixes(StandardisedByBatchNorm):
        def forward(self, x):
            return super().forward(F.batch_norm(x, None, None, training=True))

    with pytest.raises(dpcore.UnsupportedError, match="A batch norm in training mode"):
        Engine(Mixes(True), lambda outputs, y: outputs.sum(1), max_grad_norm=1.0).clipped_sum(
            torch.randn(5, 2, 8), torch.zeros(5)
        )


class Plus(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        out += x
        return out


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the products are oneDNN's")
@pytest.mark.parametrize("middle", [lambda: (nn.Linear(256, 256), nn.ReLU(inplace=True)), lambda: (Plus(256, 256),)])
def test_a_large_product_is_changed_in_place(middle, monkeypatch):
    """On whatever processor: elsewhere than on AMD's with AVX-512 these products are torch's own."""
    monkeypatch.setattr(products, "_AVAILABLE", True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), *middle(), nn.Linear(256, 3))
    x, y = torch.randn(64, 6), labels(64)
    check(model, x, y, clipped_sum)
    check_private(model, x, y)
