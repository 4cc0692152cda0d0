"""The clipped sum against float64 micro-batches: layers, shapes, masks, micro-batches, hard examples."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dpcore
from dpcore import Engine, GaussianNoise, clipped_sum, reference
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample import GradSampleModule, mean_loss
from tests.dpcore.comparison import check, check_private, labels, odd_loss, relative_error

DTYPES = [torch.float64, torch.float32]


class First(nn.Module):
    """The first of a recurrent layer's outputs."""

    def forward(self, outputs):
        return outputs[0]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 5),
    middle=st.lists(st.integers(1, 6), max_size=3),
    p=st.integers(1, 7),
    d=st.integers(1, 7),
    bias=st.booleans(),
)
def test_linear_of_any_rank(dtype, batch, middle, p, d, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(p, d, bias=bias), nn.Tanh(), nn.Linear(d, 3)).to(dtype)
    check(model, torch.randn(batch, *middle, p, dtype=dtype), labels(batch), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 3),
    batch=st.integers(1, 4),
    groups=st.integers(1, 3),
    inside=st.integers(1, 2),
    outside=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["valid", "same"])),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
)
def test_convolution(dtype, dims, batch, groups, inside, outside, kernel, stride, dilation, padding, mode, bias):
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    stride = 1 if padding == "same" else stride
    channels = inside * groups, outside * groups
    layer = kind(*channels, kernel, stride, padding, dilation, groups, bias=bias, padding_mode=mode)
    model = nn.Sequential(layer, nn.Tanh()).to(dtype)
    size = (7, 6, 5)[:dims]
    check(model, torch.randn(batch, channels[0], *size, dtype=dtype), labels(batch), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "size"), [(1, 4), (2, 4), (1, 12), (2, 12), (2, 40)])
def test_small_and_large_convolutions_behind_each_other(dtype, memory_format, channels, size):
    """At size 4 the second layer's norm is a ghost norm, at 12 it is instantiated, at 40 by a product per example."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, 1, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 24, 3, 2, 1, 1, 2),
        nn.Flatten(),
    ).to(dtype=dtype, memory_format=memory_format)
    x = torch.randn(5, channels, size, size, dtype=dtype).to(memory_format=memory_format)
    check(model, x, labels(5), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooled", [True, False])
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 5),
    shape=st.lists(st.integers(1, 6), max_size=2),
    rows=st.integers(1, 9),
    padding_idx=st.sampled_from([None, 0, -1]),
)
def test_embedding_with_repeated_tokens(dtype, pooled, batch, shape, rows, padding_idx):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(rows, 3, padding_idx=padding_idx)
            self.fc = nn.Linear(3, 2)

        def forward(self, ids):
            vectors = self.embedding(ids)
            return self.fc(vectors.flatten(1, -2).mean(1) if pooled and ids.dim() > 1 else vectors.tanh())

    ids = torch.randint(0, rows, (batch, *shape))
    check(Model().to(dtype), ids, labels(batch), clipped_sum)


class Averaged(nn.Module):
    """Ids [B, T] -> [B, 3], by the mean of the vectors of 9 tokens; ``time_first`` inside."""

    def __init__(self, padding_idx=None, time_first=False):
        super().__init__()
        self.time_first = time_first
        self.embedding = nn.Embedding(9, 4, padding_idx=padding_idx)
        self.fc = nn.Linear(4, 3)

    def forward(self, ids):
        return self.fc(self.embedding(ids.t()).mean(0) if self.time_first else self.embedding(ids).mean(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", ["", "embedding", "fc"])
@pytest.mark.parametrize("time_first", [False, True])
def test_averaged_embeddings(dtype, frozen, time_first):
    torch.manual_seed(0)
    model = Averaged(time_first=time_first).to(dtype)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    check(model, torch.randint(0, 9, (5, 7)), labels(5), clipped_sum)
    check(model, torch.randint(0, 9, (1, 7), dtype=torch.int32), labels(1), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_averaged_embeddings_by_scipys_public_product(dtype, monkeypatch):
    monkeypatch.setattr("dpcore.rules.embedding._csc_matvecs", lambda: None)
    torch.manual_seed(0)
    check(Averaged(padding_idx=2).to(dtype), torch.randint(0, 9, (5, 7)), labels(5), clipped_sum)


class Looked(nn.Module):
    """Averages its vectors, and does with them what ``look`` says."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.fc = nn.Linear(4, 3)
        self.look = lambda vectors: None

    def forward(self, ids):
        vectors = self.embedding(ids)
        assert vectors.shape == (*ids.shape, 4)
        other = self.look(vectors)
        mean = torch.mean(vectors, dim=1)
        return self.fc(mean if other is None else mean * other)


def _count_bags(monkeypatch):
    calls, whole = [], torch.embedding_bag
    monkeypatch.setattr(torch, "embedding_bag", lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs))
    return calls


class _OwnMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors):
        ctx.shape = vectors.shape
        return vectors.mean(1)

    @staticmethod
    def backward(ctx, grad):
        return (grad / ctx.shape[1]).unsqueeze(1).expand(ctx.shape)


def _scripted(vectors: torch.Tensor) -> torch.Tensor:
    return (vectors * vectors).sum(1)


LOOKS = {
    "a sum": lambda vectors: vectors.sum(1),
    "a function": lambda vectors: vectors.tanh().sum(1),
    "in a list": lambda vectors: torch.stack([vectors, vectors]).sum((0, 2)).sin(),
    "in place": lambda vectors: vectors.mul_(2.0).amax(1),
    "without gradient": lambda vectors: vectors.detach().sum(1),
    "no_grad": lambda vectors: torch.no_grad()(lambda: vectors.mean(1))(),
    # Where no torch function mode sees it:
    "scripted": lambda vectors: torch.jit.script(_scripted)(vectors),
    "vmap": lambda vectors: torch.vmap(lambda rows: rows.tanh().sum(0))(vectors),
    "autograd function": _OwnMean.apply,
}


@pytest.mark.parametrize("look", LOOKS)
def test_vectors_that_are_not_only_averaged_are_formed(look, monkeypatch):
    """Also where that could not be known from the first batch of the kind."""
    torch.manual_seed(0)
    model, ids, y = Looked(), torch.randint(0, 9, (5, 7)), labels(5)
    model.look = LOOKS[look]
    check(model, ids, y, clipped_sum)
    engine = Engine(model, odd_loss, max_grad_norm=0.5)
    model.look = lambda vectors: None
    engine.clipped_sum(ids, y)
    calls = _count_bags(monkeypatch)
    engine.clipped_sum(ids, y)
    assert calls
    model.look = LOOKS[look]
    truth = reference.clipped_sum(model, odd_loss, ids, y, 0.5)
    assert relative_error(engine.clipped_sum(ids, y).sums, truth.clipped) < 1e-5


def test_vectors_that_were_kept_have_their_values_afterwards(monkeypatch):
    torch.manual_seed(0)
    model, ids, kept = Looked(), torch.randint(0, 9, (5, 7)), []
    model.look = kept.append
    calls = _count_bags(monkeypatch)
    clipped_sum(model, odd_loss, ids, labels(5), 0.5)
    assert calls and torch.equal(kept[-1], model.embedding(ids))


def test_ids_that_change_before_their_vectors_are_averaged_are_refused():
    torch.manual_seed(0)
    model, ids = Looked(), torch.randint(0, 8, (5, 7))
    engine = Engine(model, odd_loss, max_grad_norm=0.5, check_isolation=False)
    engine.clipped_sum(ids, labels(5))

    def change(vectors):
        ids.add_(1)

    model.look = change
    with pytest.raises(dpcore.UnsupportedError, match="changed in place"):
        engine.clipped_sum(ids, labels(5))


def test_averaged_embeddings_in_the_two_line_use():
    torch.manual_seed(0)
    check_private(Averaged(padding_idx=0), torch.randint(0, 9, (6, 7)), labels(6))


def test_hostile_masked_and_empty_examples_of_an_averaged_embedding():
    torch.manual_seed(0)
    model, ids = Averaged(padding_idx=0), torch.randint(0, 9, (6, 7))
    ids[3] = 0
    y = torch.zeros(6)
    y[1], y[4] = 1e30, float("inf")
    mask = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)
    result = clipped_sum(model, odd_loss, ids, y, 0.2, mask=mask)
    assert result.nonfinite == 1
    truth = reference.clipped_sum(model, odd_loss, ids[[0, 1, 2, 3]], y[[0, 1, 2, 3]], 0.2)
    assert relative_error(result.sums, truth.clipped) < 1e-5
    assert not result.sums["embedding.weight"][0].any()
    for rows, kept in ((slice(0, 0), None), (slice(None), torch.zeros(6, dtype=torch.bool))):
        nothing = clipped_sum(model, odd_loss, ids[rows], y[rows], 0.2, mask=kept)
        assert all(not s.any() for s in nothing.sums.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opposite_gradients_of_one_token_cancel_before_the_norm(dtype):
    """Its rows are summed before they are squared: the norm is that of the small rest."""

    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)

        def forward(self, ids):
            vectors = self.embedding(ids)
            return 64.0 * vectors[:, 0] - 63.75 * vectors[:, 1]

    torch.manual_seed(0)
    check(Difference().to(dtype), torch.tensor([[2, 2], [2, 3], [4, 4]]), labels(3), clipped_sum, _mild_loss)


def _mild_loss(outputs, y):
    return (outputs * 0.01).sin().sum(1) * (1.0 + y)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 4),
    steps=st.integers(1, 5),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    frozen=st.booleans(),
    batch_first=st.booleans(),
)
def test_lstm(dtype, batch, steps, layers, bidirectional, bias, frozen, batch_first):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, layers, bias, batch_first, bidirectional=bidirectional)

        def forward(self, x):
            out, (h, c) = self.lstm(x if batch_first else x.transpose(0, 1))
            out = out if batch_first else out.transpose(0, 1)
            return torch.cat([out.flatten(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], 1)

    model = Model().to(dtype)
    if bias and frozen:
        model.lstm.bias_hh_l0.requires_grad_(False)
    check(model, torch.randn(batch, steps, 3, dtype=dtype), labels(batch), clipped_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_wide_lstm(dtype):
    """Large enough for a product per example."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.LSTM(40, 48, batch_first=True), First()).to(dtype)
    ids = torch.randint(0, 50, (3, 150))
    check(model, ids, labels(3), clipped_sum, lambda out, y: odd_loss(out.mean(1), y))


def _text_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 5), nn.LSTM(5, 4, batch_first=True), First(), nn.Flatten(), nn.Linear(24, 3)
    ).to(dtype)


def test_the_physical_batch_size_does_not_change_the_sum():
    model, ids, y = _text_model(), torch.randint(0, 11, (7, 6)), labels(7)
    truth = reference.clipped_sum(model, odd_loss, ids, y, 0.5)
    for size in (1, 2, 3, 7, 100):
        result = clipped_sum(model, odd_loss, ids, y, 0.5, physical_batch_size=size)
        assert relative_error(result.sums, truth.clipped) < 1e-12
        assert result.norms.shape == result.factors.shape == result.losses.shape == (7,)


@pytest.mark.parametrize(
    ("batch_size", "width", "pieces"),
    [(150, 8192, [150]), (300, 8192, [150, 150]), (450, 8192, [150, 150, 150]), (450, 64, [450])],
    ids=["small", "halves", "thirds", "next to nothing"],
)
def test_a_large_batch_goes_through_in_pieces_so_that_it_needs_less_than_ordinary_training(batch_size, width, pieces):
    torch.manual_seed(0)
    model, seen = nn.Linear(width, 3), []
    x, y = torch.randn(batch_size, width), labels(batch_size)
    whole = clipped_sum(model, odd_loss, x, y, 0.5, physical_batch_size=batch_size).sums
    engine = Engine(model, odd_loss, max_grad_norm=0.5)
    engine.clipped_sum(x, y)  # the first batch begins with few examples, to see what they leave behind
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    assert relative_error(engine.clipped_sum(x, y).sums, whole) < 1e-6
    assert seen == pieces


def test_masked_examples_and_an_empty_batch_contribute_nothing():
    model, ids, y = _text_model(), torch.randint(0, 11, (7, 6)), labels(7)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    truth = reference.clipped_sum(model, odd_loss, ids[mask], y[mask], 0.5)
    masked = clipped_sum(model, odd_loss, ids, y, 0.5, mask=mask, physical_batch_size=3)
    assert relative_error(masked.sums, truth.clipped) < 1e-12
    empty = clipped_sum(model, odd_loss, ids[:0], y[:0], 0.5)
    assert empty.norms.shape == (0,) and all(not s.any() for s in empty.sums.values())
    nobody = clipped_sum(model, odd_loss, ids, y, 0.5, mask=torch.zeros(7, dtype=torch.bool))
    assert all(not s.any() for s in nobody.sums.values())


@pytest.mark.parametrize("mask", [2 * torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(5, dtype=torch.bool)])
def test_a_mask_is_no_weight(mask):
    with pytest.raises(ValueError, match="must be bool, one entry per example"):
        clipped_sum(nn.Linear(3, 2), odd_loss, torch.randn(4, 3), labels(4), 0.5, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "options", [{"stride": 5}, {"stride": 4, "padding": 2}, {"stride": 5, "dilation": (1, 2)}], ids=str
)
def test_a_convolution_with_few_windows(dtype, memory_format, options):
    """Its norm comes from the Gram matrix of what every output position saw."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 64, 5, **options).to(dtype, memory_format=memory_format)
    x = torch.randn(4, 3, 17, 20, dtype=dtype)
    engine = Engine(model, odd_loss)
    engine.clipped_sum(x, labels(4))
    assert "weight: ghost" in engine.explain()
    check(model, x, labels(4), clipped_sum)


def test_small_gradients_are_summed_side_by_side():
    """Beside each other they are what each is alone, and for per-layer bounds each has its own norm."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model, x = nn.Sequential(*layers), torch.randn(6, 4, 3)
    check(model, x, labels(6), clipped_sum)
    bounds = [0.1 * (k + 1) for k, _ in enumerate(model.parameters())]
    result = Engine(model, odd_loss, max_grad_norm=bounds).clipped_sum(x, labels(6))
    for k, (name, bound) in enumerate(zip(result.sums, bounds, strict=True)):
        alone = copy.deepcopy(model)
        for other, p in alone.named_parameters():
            p.requires_grad_(other == name)
        truth = reference.clipped_sum(alone, odd_loss, x, labels(6), bound)
        assert relative_error({name: result.sums[name]}, truth.clipped) < 3e-5
        torch.testing.assert_close(result.norms[k].double(), truth.norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_hostile_example_is_bounded_and_harms_no_other(value):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(5, 1, 3, 3), labels(5)
    x[2] = value

    def loss(outputs, y):
        return nn.functional.cross_entropy(outputs, y, reduction="none")

    result = clipped_sum(model, loss, x, y, 0.1)
    truth = reference.clipped_sum(model, loss, x, y, 0.1)
    assert all(s.isfinite().all() for s in result.sums.values())
    assert relative_error(result.sums, truth.clipped) < 1e-5
    assert result.nonfinite == int((~truth.norms.isfinite()).sum()) == (0 if value == 1e30 else 1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 100.0))
def test_one_example_moves_the_sum_by_at_most_the_sensitivity(seed, scale):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x, y = scale * torch.randn(4, 1, 4, 4), labels(4)
    engine = Engine(model, odd_loss, max_grad_norm=0.3)
    with_all = {n: s.clone() for n, s in engine.clipped_sum(x, y).sums.items()}
    without = engine.clipped_sum(x[:-1], y[:-1])
    moved = sum(float((with_all[n].double() - s.double()).square().sum()) for n, s in without.sums.items()) ** 0.5
    assert moved <= without.sensitivity * (1 + 1e-5)


class EverySecond(nn.Module):
    def forward(self, x):
        return x[::2].unsqueeze(1)


def test_what_cannot_be_told_apart_by_example_is_refused():
    x, y = torch.randn(4, 3), labels(4)
    with pytest.raises(dpcore.UnsupportedError, match="not the batch of"):
        clipped_sum(nn.Sequential(nn.Flatten(0), EverySecond(), nn.Linear(1, 2)), odd_loss, x, y, 1.0)
    with pytest.raises(dpcore.UnsupportedError, match="batch norm"):
        clipped_sum(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), odd_loss, x, y, 1.0)
    with pytest.raises(dpcore.PrivacyError, match="one loss per example"):
        clipped_sum(nn.Linear(3, 2), lambda out, y: out.mean(), x, y, 1.0)
    with pytest.raises(dpcore.UnsupportedError, match="max_norm"):
        clipped_sum(nn.Embedding(5, 2, max_norm=1.0), odd_loss, torch.ones(4, 2, dtype=torch.long), y, 1.0)
    with pytest.raises(dpcore.UnsupportedError, match="scale_grad_by_freq"):
        clipped_sum(nn.Embedding(5, 2, scale_grad_by_freq=True), odd_loss, torch.ones(4, 2, dtype=torch.long), y, 1.0)


def test_an_input_changed_in_place_after_its_use_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            x = x * 1.0
            out = self.fc(x)
            x.add_(1.0)
            return out

    with pytest.raises(dpcore.UnsupportedError, match="changed in place"):
        clipped_sum(Late(), odd_loss, torch.randn(4, 3), labels(4), 1.0)


def test_reused_and_unused_layers_and_frozen_parameters():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.shared = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            hidden = self.embedding(ids)
            hidden = self.frozen(self.shared(input=self.shared(hidden).tanh()).tanh())
            return self.head(hidden)

    model = Model().double()
    check(model, torch.randint(0, 7, (4, 5)), labels(4), clipped_sum)


class Empty(nn.Module):
    """Parameters without numbers, as a rank, a number of prompts or a width of zero make them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)
        self.down, self.up, self.table = nn.Linear(6, 0), nn.Linear(0, 4), nn.Embedding(3, 0)
        self.prompts, self.scale = nn.Parameter(torch.empty(1, 0, 4)), nn.Parameter(torch.empty(0))

    def forward(self, x):
        h = self.first(x) + self.up(
            self.down(x) * self.scale + self.scale + self.table(torch.zeros_like(x[:, 0]).long())
        )
        return self.second(torch.cat([self.prompts.expand(len(x), -1, -1), h[:, None]], 1).tanh().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_without_numbers(dtype):
    torch.manual_seed(0)
    model, x, y = Empty().to(dtype), torch.randn(5, 6, dtype=dtype), labels(5)
    check(model, x, y, clipped_sum)
    check_private(model, x, y)
    recorded = GradSampleModule(Empty().to(dtype))
    odd_loss(recorded(x), y).mean().backward()
    assert all(p.grad_sample.shape == (5, *p.shape) for p in recorded.parameters())


def test_per_layer_bounds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), labels(6)
    bounds = [0.3, 0.1, 0.5, 0.2]
    result = Engine(model, odd_loss, max_grad_norm=bounds).clipped_sum(x, y)
    assert result.sensitivity == pytest.approx(sum(c * c for c in bounds) ** 0.5)
    assert result.norms.shape == (4, 6)
    expected = dict.fromkeys(result.sums, 0)
    for grads in reference.example_gradients(model, odd_loss, x, y):
        for bound, (name, grad) in zip(bounds, grads.items(), strict=True):
            expected[name] = expected[name] + grad * min(1.0, bound / float(grad.norm()))
    assert relative_error(result.sums, expected) < 1e-10


def test_norms_are_taken_in_full_precision_under_autocast():
    torch.manual_seed(0)
    engine = Engine(nn.Linear(64, 48, bias=False), odd_loss, max_grad_norm=0.2)
    x, y = torch.randn(8, 4, 64), labels(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(8):
            assert engine.clipped_sum(x, y, torch.arange(8) == i).sums["weight"].double().norm() <= 0.2


def test_a_pickled_engine_releases_noisy_sums():
    """Pickled views have memory of their own: noise in the buffer must still reach what is released."""
    torch.manual_seed(0)
    engine = Engine(
        nn.Linear(6, 3),
        odd_loss,
        max_grad_norm=0.2,
        noise_multiplier=1e3,
        expected_batch_size=8,
        noise=GaussianNoise(1),
    )
    x, y = torch.randn(8, 6), labels(8)
    engine.privatize(x, y)
    first = engine.model.weight.grad.clone()
    for copied in (pickle.loads(pickle.dumps(engine)), copy.deepcopy(engine)):
        assert copied.steps == 1
        copied.privatize(x, y)
        twice = copied.model.weight.grad
        # 25 is the noise's standard deviation; two steps share none of it.
        assert 10.0 < float((twice - first).std()) < 100.0
        assert twice.data_ptr() == copied.accumulator.flat.data_ptr()


def test_a_replaced_parameter_or_layer_is_refused():
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), labels(8)

    def layers():
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    def parameter(model):
        model[0].weight = nn.Parameter(torch.randn(5, 6))

    def layer(model):
        model[1] = nn.Linear(5, 3)

    def loaded(model):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    for change in (parameter, layer, loaded):
        model = layers()
        engine = Engine(model, odd_loss, max_grad_norm=0.2)
        engine.clipped_sum(x, y)
        change(model)
        with pytest.raises(PrivacyError, match="replaced by another object"):
            engine.clipped_sum(x, y)


class WithDerivatives(nn.Module):
    """Outputs beside their own derivative at the input, taken in the way that ``derive(f, x)`` has."""

    def __init__(self, derive):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.derive = derive

    def forward(self, x):
        return torch.cat(self.derive(self.layers, x), 1)


def _by_autograd(create_graph):
    def derive(f, x):
        x = x.detach().requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(out.sum(), x, create_graph=create_graph, retain_graph=True)[0]

    return derive


def _by_backward(backward):
    def derive(f, x):
        x = x.detach().requires_grad_()
        out = f(x)
        backward(out.sum())
        return out, x.grad

    return derive


SEEN = pytest.mark.skipif(
    "torch_function" not in inspect.getsource(torch.autograd.backward),
    reason="this torch does not show calls of torch.autograd.backward to anybody (docs/dpcore-refusals.md)",
)


def _by_forward_mode(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))


@pytest.mark.parametrize(
    "derive",
    [
        _by_autograd(create_graph=True),
        _by_backward(lambda out: out.backward(create_graph=True)),
        pytest.param(_by_backward(lambda out: torch.autograd.backward(out, create_graph=True)), marks=SEEN),
        pytest.param(_by_backward(lambda out: torch.autograd.backward(out, None, None, True)), marks=SEEN),
        lambda f, x: (f(x), torch.func.grad(lambda v: f(v).sum())(x)),
        lambda f, x: (f(x), torch.func.vmap(torch.func.grad(lambda v: f(v).sum()))(x)),
        lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
        _by_forward_mode,
    ],
    ids=[
        "grad",
        "backward",
        "autograd.backward",
        "autograd.backward by position",
        "func.grad",
        "vmap of func.grad",
        "jvp",
        "forward mode",
    ],
)
@pytest.mark.parametrize("after_half_precision", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_derivatives_of_its_own_are_refused_where_weights_would_be_lost(derive, after_half_precision):
    """The weights are constants of the recorded graph: their sums lacked what comes through the derivative.

    A mean loss in half precision replaces ``torch.autograd.backward`` for the process.
    """
    if after_half_precision:
        mean_loss.install()
    with pytest.raises(UnsupportedError, match="derivatives of its own"):
        clipped_sum(WithDerivatives(derive), lambda out, y: out.square().sum(1), torch.randn(5, 3), torch.zeros(5), 1.0)


class Descent(nn.Module):
    """Goes down an energy of its own for two steps, and returns what it has there."""

    def __init__(self, layers, checkpointed):
        super().__init__()
        self.layers, self.checkpointed = layers, checkpointed

    def forward(self, x):
        for _ in range(2):
            at = x.detach().requires_grad_()
            energy = checkpoint(self.layers, at, use_reentrant=False) if self.checkpointed else self.layers(at)
            x = at - 0.1 * torch.autograd.grad(energy.square().sum(), at)[0]
        return self.layers(x.detach())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(3, 3), lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), lambda: nn.PReLU(3)]
)
def test_derivatives_that_are_constants_are_taken(layer, checkpointed):
    """Gradients within the forward pass are none of the loss; they were added to it."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 3
    for model in (
        WithDerivatives(_by_autograd(create_graph=False)),
        Descent(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), layer()), checkpointed),
    ):
        check(model.double(), x, y, clipped_sum)
        check_private(model, x, y)


def _step_within(h, layer):
    (gradient,) = torch.autograd.grad(layer(h).square().sum(), layer.weight, allow_unused=True, materialize_grads=True)
    return F.linear(h, layer.weight - 0.1 * gradient)


def _backward_within(h, layer):
    noise = torch.zeros_like(h, requires_grad=True)
    layer(h.detach() + noise).square().sum().backward()
    return layer(h + noise.grad)


@pytest.mark.parametrize("way", [_step_within, _backward_within])
def test_gradients_of_parameters_within_the_model_are_refused(way):
    """The weights are constants of the recorded graph: torch took them for unused."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return way(torch.tanh(self.first(x)), self.second)

    x, y = torch.randn(5, 3), torch.arange(5) % 3
    with pytest.raises(UnsupportedError, match="gradients of trained parameters within its forward pass"):
        clipped_sum(Model(), odd_loss, x, y, 1.0)
    with pytest.raises(UnsupportedError, match="gradients of trained parameters within its forward pass"):
        check_private(Model(), x, y)


def test_a_part_in_inference_mode_is_a_constant():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            with torch.inference_mode():
                own = self.second(torch.tanh(self.first(x)))
            return self.second(torch.tanh(self.first(x))) + 0.1 * own.clone()

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(5, 3, dtype=torch.float64)
    check(model, x, labels(5), clipped_sum)
    check_private(model, x, labels(5))


class Reversible(torch.autograd.Function):
    """Runs a layer again in the backward pass, whose weights get their gradients there."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), grad)
        return x.grad, None


@pytest.mark.parametrize("check_isolation", [False, True])
def test_a_backward_pass_within_the_backward_pass_is_refused(check_isolation):
    """The engine's sum lacked the gradients of that layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            return Reversible.apply(self.first(x), self.second)

    engine = Engine(Model(), odd_loss, check_isolation=check_isolation)
    with pytest.raises(UnsupportedError, match=r"second\.weight gets a gradient by a backward pass within"):
        engine.clipped_sum(torch.randn(5, 3), labels(5))


def test_values_that_are_the_negatives_of_what_memory_holds():
    """``z.conj().imag`` is a view with a sign of its own, which whoever reads the memory does not see."""
    torch.manual_seed(0)
    z = torch.randn(4, 40, dtype=torch.complex64)
    x = z.conj().imag.unsqueeze(-1)
    assert x.is_neg()
    check(nn.Linear(1, 5), x, torch.arange(4) % 3, clipped_sum)


@pytest.mark.parametrize("batch", [3, 5])
@pytest.mark.parametrize("frozen", [lambda layer: [layer.weight], lambda layer: [layer.bias]])
def test_a_frozen_weight_has_as_many_rows_as_there_are_examples(frozen, batch):
    """Biases alone are trained (BitFit), in a layer with as many outputs as the batch has examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for param in frozen(model[0]):
        param.requires_grad_(False)
    x = torch.randn(batch, 8, dtype=torch.float64)
    check(model, x, torch.arange(batch) % 3, clipped_sum)
    check_private(model, x, torch.arange(batch) % 3)
