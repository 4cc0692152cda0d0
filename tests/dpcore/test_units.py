"""Units of several rows: their gradients are clipped once, in every rule and mode, beside a float64 loop over units."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpcore import Engine, GradSampleModule, PrivacyError, UnsupportedError, reference
from dpcore.rules.custom import GRAD_SAMPLERS, register_grad_sampler
from tests.dpcore.comparison import MARGIN, TOLERANCE, odd_loss, relative_error
from tests.dpcore.private_setup import small_model

K = 4


class Of(nn.Module):
    """Named parts, and a function (parts, x) as the forward pass."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def vectors(rows):
    return torch.randn(rows, 6)


def sequences(rows):
    return torch.randn(rows, 5, 6)


def pictures(rows):
    return torch.randn(rows, 3, 6, 6)


def tokens(rows):
    return torch.randint(0, 11, (rows, 7))


class Scaled(nn.Module):
    """A layer with a rule of the user's."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return torch.addcmul(torch.zeros_like(x), x, self.g)


def table(*shape):
    return nn.Parameter(torch.randn(shape) * 0.5)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), vectors),
    "large linear": (lambda: nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 200)), vectors),
    "linear at positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), sequences),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)), sequences),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)),
        pictures,
    ),
    "large convolution": (lambda: nn.Sequential(nn.Conv2d(3, 64, 5), nn.Tanh(), nn.Conv2d(64, 400, 2)), pictures),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()), pictures),
    "channels last": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last), pictures),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 5, padding_idx=0), nn.Tanh(), nn.Linear(5, 3)), tokens),
    "averaged embedding": (
        lambda: Of(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Embedding(11, 5), b=nn.Linear(5, 3)),
        tokens,
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 5), nn.Linear(5, 3)), tokens),
    "largest of a bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 5, mode="max"), nn.Linear(5, 3)), tokens),
    "large embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(7000, 5), nn.Linear(5, 3)), tokens),
    "lstm": (
        lambda: Of(lambda m, x: m.b(m.a(x)[0][:, -1]), a=nn.LSTM(6, 5, batch_first=True), b=nn.Linear(5, 3)),
        sequences,
    ),
    "gru": (lambda: Of(lambda m, x: m.a(x)[0], a=nn.GRU(6, 5, 2, batch_first=True, bidirectional=True)), sequences),
    "attention": (lambda: Of(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(6, 2, batch_first=True)), sequences),
    "attention to others": (
        lambda: Of(lambda m, x: m.a(x[:, :2], x, x.flip(1))[0], a=nn.MultiheadAttention(6, 2, batch_first=True)),
        sequences,
    ),
    "tied": (lambda: Of(lambda m, x: F.linear(m.a(x), m.a.weight), a=nn.Embedding(11, 5)), tokens),
    "used twice": (lambda: Of(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(6, 6)), sequences),
    "transposed": (
        lambda: Of(lambda m, x: (x @ m.w.t().mul(2.0) + m.b) * m.s, w=table(5, 6), b=table(5), s=table(5)),
        sequences,
    ),
    "bilinear": (lambda: Of(lambda m, x: m.a(x, x.flip(1)), a=nn.Bilinear(6, 6, 3)), sequences),
    "positions": (lambda: Of(lambda m, x: m.a(x + m.p), a=nn.Linear(6, 3), p=table(5, 6)), sequences),
    "flattened": (lambda: Of(lambda m, x: m.a(x.reshape(-1, 6)).view(len(x), -1), a=nn.Linear(6, 3)), sequences),
    "without a rule": (lambda: Of(lambda m, x: m.b(m.a(x)), a=Scaled(), b=nn.Linear(6, 3)), vectors),
    "checkpointed": (
        lambda: Of(
            lambda m, x: checkpoint(lambda h: m.b(torch.tanh(m.a(h))), x * m.s, use_reentrant=False),
            a=nn.Linear(6, 5), b=nn.Linear(5, 3), s=table(6),
        ),
        sequences,
    ),
    "rows of a unit meet": (
        lambda: Of(
            lambda m, x: m.b(torch.tanh(h := m.a(x)) + h.view(-1, K, 5).mean(1).repeat_interleave(K, 0)),
            a=nn.Linear(6, 5), b=nn.Linear(5, 3),
        ),
        vectors,
    ),
}  # fmt: skip


def made(name, dtype=torch.float64, units=5, rows=K):
    torch.manual_seed(2)
    make, data = MODELS[name]
    model, x = make().to(dtype), data(units * rows)
    return model, x.to(dtype) if x.is_floating_point() else x, torch.arange(units * rows) % 3


def truth(model, x, y, rows=K):
    """(C, the float64 reference)."""
    bound = float(reference.clipped_sum(model, odd_loss, x, y, 1.0, rows).norms.median())
    return bound, reference.clipped_sum(model, odd_loss, x, y, bound, rows)


def agree(sums, norms, expected, dtype):
    assert relative_error(sums, expected.clipped) < TOLERANCE[dtype] + MARGIN[dtype]
    torch.testing.assert_close(norms.double(), expected.norms, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_clips_units(name, dtype):
    model, x, y = made(name, dtype)
    bound, expected = truth(model, x, y)
    for pieces in (None, 2):
        engine = Engine(model, odd_loss, max_grad_norm=bound, physical_batch_size=pieces, group=K)
        for _ in range(2):
            found = engine.clipped_sum(x, y)
            agree(found.sums, found.norms, expected, dtype)
        assert found.factors.shape == found.losses.shape == (5,)
        torch.testing.assert_close(found.losses, odd_loss(model(x), y).detach().view(-1, K).mean(1))
    assert found.sensitivity == bound


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_example_are_those_of_units(name, reduction):
    model, x, y = made(name)
    _, expected = truth(model, x, y)
    each = list(reference.example_gradients(model, odd_loss, x, y, K))
    ordinary = copy.deepcopy(model)
    private = GradSampleModule(model, loss_reduction=reduction, group=K)
    for module in (ordinary, private):
        getattr(odd_loss(module(x), y), reduction)().backward()
    for param, (of, plain) in zip(private.parameters(), ordinary.named_parameters(), strict=True):
        torch.testing.assert_close(param.grad_sample, torch.stack([gradients[of] for gradients in each]))
        torch.testing.assert_close(param.grad, plain.grad)
    assert expected.norms.shape == (5,)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("lstm", "gru", "checkpointed", "largest of a bag")]
)
def test_a_graph_clips_units(name):
    model, x, y = made(name, torch.float32)
    bound, expected = truth(model, x, y)
    engine = Engine(model, odd_loss, max_grad_norm=bound, group=K, compile="eager")
    for _ in range(2):
        found = engine.clipped_sum(x, y)
        agree(found.sums, found.norms, expected, torch.float32)
    assert engine.clipped_sum(x[: 3 * K], y[: 3 * K]).norms.shape == (3,)  # by the same graph, filled up
    rows = torch.arange(5 * K) % K < 2
    if "meet" not in name:  # there a row that is left out is still seen by others
        masked = reference.clipped_sum(model, odd_loss, x[rows], y[rows], bound, 2)
        found = engine.clipped_sum(x, y, rows)
        agree(found.sums, found.norms, masked, torch.float32)


@given(
    st.sampled_from(["linear", "linear at positions", "convolution", "embedding", "lstm", "tied", "without a rule"]),
    st.integers(1, 6),
    st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_any_number_of_rows_and_units(name, rows, units):
    model, x, y = made(name, units=units, rows=rows)
    bound, expected = truth(model, x, y, rows) if units else (1.0, reference.clipped_sum(model, odd_loss, x, y, 1.0))
    found = Engine(model, odd_loss, max_grad_norm=bound, group=rows).clipped_sum(x, y)
    assert found.norms.shape == (units,)
    agree(found.sums, found.norms, expected, torch.float64)


def test_a_rule_of_the_users():
    register_grad_sampler(Scaled)(lambda layer, inputs, grads: {layer.g: grads * inputs[0]})
    try:
        model, x, y = made("without a rule")
        bound, expected = truth(model, x, y)
        found = Engine(model, odd_loss, max_grad_norm=bound, group=K).clipped_sum(x, y)
        agree(found.sums, found.norms, expected, torch.float64)
    finally:
        del GRAD_SAMPLERS[Scaled]


def test_random_numbers_without_a_rule_go_by_the_graph_of_the_batch():
    class Noisy(Scaled):
        def forward(self, x):
            return super().forward(x) + 0.1 * torch.rand_like(x) * self.g

    torch.manual_seed(1)
    model, x, y = nn.Sequential(Noisy(), nn.Linear(6, 3)).double(), vectors(3 * K).double(), torch.arange(3 * K) % 3
    engine = Engine(model, odd_loss, max_grad_norm=1e6, group=K)
    engine.clipped_sum(x, y)
    torch.manual_seed(7)
    found = engine.clipped_sum(x, y)
    torch.manual_seed(7)
    (odd_loss(model(x), y).sum() / K).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.sums[name], param.grad)


# ---- masks


def test_a_mask_leaves_out_units_or_rows_exactly():
    model, x, y = made("linear at positions")
    engine = Engine(model, odd_loss, max_grad_norm=0.5, group=K)
    units = torch.tensor([True, False, True, True, False])
    with_mask = {n: s.clone() for n, s in engine.clipped_sum(x, y, units).sums.items()}
    kept = units.repeat_interleave(K)
    assert relative_error(with_mask, reference.clipped_sum(model, odd_loss, x[kept], y[kept], 0.5, K).clipped) < 1e-10

    rows = torch.ones(len(x), dtype=torch.bool)
    rows[[1, 2, 3]] = False  # one row is left of the first unit, which is its mean
    found = engine.clipped_sum(x, y, rows)
    sums, norms = {n: s.clone() for n, s in found.sums.items()}, found.norms
    alone = reference.clipped_sum(model, odd_loss, x[:1], y[:1], 0.5)
    torch.testing.assert_close(norms[:1], alone.norms)
    changed = torch.where(rows.view(-1, 1, 1), x, 3.0 * x + 1.0)
    again = engine.clipped_sum(changed, y, rows)
    assert all(torch.equal(sums[name], again.sums[name]) for name in sums)
    torch.testing.assert_close(found.losses[0], odd_loss(model(x), y)[0])


def test_a_mask_of_another_length_is_refused():
    model, x, y = made("linear")
    with pytest.raises(ValueError, match="one entry per example"):
        Engine(model, odd_loss, group=K).clipped_sum(x, y, torch.ones(7, dtype=torch.bool))


# ---- what is refused


def test_rows_that_are_no_whole_units_are_refused():
    model, x, y = made("linear")
    sentence = "18 rows, and with group=4 every 4 rows that follow each other are one unit, which 18 is no multiple of"
    with pytest.raises(UnsupportedError, match=sentence):
        Engine(model, odd_loss, group=K).clipped_sum(x[:18], y[:18])
    private = GradSampleModule(model, group=K)
    with pytest.raises(UnsupportedError, match=sentence):
        private(x[:18])
    assert private.eval()(x[:18]).shape == (18, 3)


@pytest.mark.parametrize("group", [0, -1, 1.5, "4", None])
def test_a_group_that_is_no_number_of_rows_is_refused(group):
    with pytest.raises(ValueError, match=r"group is .*; it must be a whole number, at least 1"):
        Engine(small_model(), odd_loss, group=group)


def mixing(across):
    """A model whose rows meet within units of 4, or across units of 2 then."""
    within = across // K
    return Of(
        lambda m, x: m.b(torch.tanh(h := m.a(x)) + h.view(-1, within * K, 5).mean(1).repeat_interleave(within * K, 0)),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    )


@pytest.mark.parametrize("by_engine", [True, False])
def test_units_that_mix_are_refused_though_rows_may(by_engine):
    torch.manual_seed(0)
    x, y = vectors(8 * K), torch.arange(8 * K) % 3
    for across, group in ((K, K), (2 * K, K), (K, 1), (K, 2)):
        model = mixing(across)

        def run(model=model, group=group):
            if by_engine:
                Engine(model, odd_loss, group=group).clipped_sum(x, y)
            else:
                odd_loss(GradSampleModule(model, group=group)(x), y).mean().backward()

        if across == group:
            run()
        else:
            with pytest.raises(PrivacyError, match="in the rows of other examples"):
                run()


def test_a_loss_may_compare_rows_of_a_unit_and_not_units():
    torch.manual_seed(0)
    x = vectors(8 * K)

    def spread(outputs, rows):
        views = outputs.view(-1, rows, 3)
        return (views - views.mean(1, keepdim=True)).square().mean(1).exp().sum(1).mean()

    for rows, group in ((K, K), (8 * K, K), (8 * K, 1)):
        private = GradSampleModule(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), group=group)
        if rows == group:
            for _ in range(3):
                spread(private(x), rows).backward()
            continue
        with pytest.raises(PrivacyError, match="The loss compares"):
            spread(private(x), rows).backward()


def test_time_first_inputs():
    torch.manual_seed(3)
    model = Of(lambda m, x: m.b(m.a(x)[0][-1]), a=nn.LSTM(6, 5), b=nn.Linear(5, 3)).double()
    x, y = torch.randn(7, 3 * K, 6).double(), torch.arange(3 * K) % 3
    private = GradSampleModule(model, batch_first=False, group=K)
    odd_loss(private(x), y).mean().backward()
    found = [torch.stack([p.grad_sample[u] for u in range(3)]) for p in private.parameters()]
    private.to_standard_module()
    for unit in range(3):
        rows = slice(unit * K, (unit + 1) * K)
        loss = odd_loss(model(x[:, rows]), y[rows]).mean()
        for mine, grad in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(mine[unit], grad)
