"""Models and losses that mix the examples of a batch are refused at the first batch, and honest ones never are."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, GradSampleModule, PrivacyEngine, PrivacyError
from dpcore.errors import UnsupportedError
from dpcore.example_isolation import check as isolation
from dpcore.example_isolation import trial


class Between(nn.Module):
    """Linear, a function of the whole batch, Linear."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Before(Between):
    """A function of the whole batch, then all trained layers."""

    def forward(self, x):
        return self.b(torch.tanh(self.a(self.function(x))))


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.full((8,), 0.3))

    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * self.g + self.b


class Frozen(nn.Module):
    """A frozen encoder whose batch_first was forgotten, and a trained head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class SortsByLength(nn.Module):
    """Packs by hand, and restores the order: the outputs are right, the rows inside belong to others."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(torch.tanh(self.cell(x[order]))[order.argsort()])


class Picks(nn.Module):
    """The head sees chosen tokens only, here as many as there are examples."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        tokens = torch.stack([x, x + 1], 1)
        chosen = torch.zeros(len(x), 2, dtype=torch.bool)
        chosen[:, 0] = x[:, 0] > x[:, 0].median()
        chosen[:, 1] = chosen[:, 0]
        flat = tokens[chosen]
        return self.head(flat if len(flat) == len(x) else torch.cat([flat, tokens[~chosen]])[: len(x)])


class Remembers(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.linear, self.write = nn.Linear(6, 3), write
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.write(self, x.detach())
        return self.linear(x)


def attend(x):
    return (x @ x.t()).softmax(-1) @ x


torch.manual_seed(0)  # the models below have the same weights whatever ran before
MIXING = {
    "centred": Between(lambda x: x - x.mean(0)),
    "own batch norm": Between(OwnNorm()),
    "largest value": Between(lambda x: x / x.abs().max()),
    "largest value by column": Between(lambda x: x / x.abs().amax(0)),
    "normalised over the batch": Between(lambda x: F.normalize(x, dim=0)),
    "softmax over the batch": Between(lambda x: x.softmax(0)),
    "attention between examples": Between(attend),
    "rolled": Between(lambda x: x + x.roll(1, 0)),
    "cumulated": Between(lambda x: x.cumsum(0)),
    "flipped": Between(lambda x: x.flip(0)),
    "count": Between(lambda x: x / (x.detach() > 0).sum()),
    "centred before": Before(lambda x: x - x.mean(0)),
    "largest before": Before(lambda x: x / x.abs().max()),
    "mixed up before": Before(lambda x: 0.6 * x + 0.4 * x[torch.randperm(len(x))]),
    "ranked before": Before(lambda x: x.argsort(0).argsort(0).float()),
    "frozen encoder": Frozen(),
    "sorted and restored": SortsByLength(),
    "picked tokens": Picks(),
    "running mean": Remembers(lambda m, x: m.mean.copy_(x.mean(0))),
    "buffer set anew": Remembers(lambda m, x: setattr(m, "mean", x.mean(0))),
    "examples counted": Remembers(lambda m, x: m.mean.add_(len(x))),
    "examples counted behind dropout": nn.Sequential(nn.Dropout(0.5), Remembers(lambda m, x: m.mean.add_(len(x)))),
    "weights written": Remembers(lambda m, x: m.linear.weight.data.add_(1e-3 * x.sum())),
}

HONEST = {
    "linear": nn.Linear(6, 3),
    "relu": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "layer norm": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    "square root at zero": Between(lambda x: x.relu().sqrt()),
    "group norm of one number": nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    "counter": Remembers(lambda m, x: m.mean.add_(1.0)),
    "own noise": Between(lambda x: x + torch.randn_like(x)),
    "python's and numpy's noise": Between(lambda x: x * random.random() + float(np.random.rand())),
    "drops rows": Between(lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.5)),
    "rows as time": Between(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "argmax of a row": Between(lambda x: x * (x == x.amax(1, keepdim=True))),
}


def data(n=14):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.arange(n) % 3


def train(model, **options):
    """One step of the two lines; the private module."""
    x, y = data()
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine(seed=1).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=14),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            **options,
        )
    for _ in range(isolation.BATCHES):
        for a, b in loader:
            F.cross_entropy(private(a), b).backward()
            optimizer.step()
    return private


def engine_for(model, loss=None, **options):
    loss = loss or (lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"))
    return Engine(copy.deepcopy(model), loss, max_grad_norm=1.0, expected_batch_size=14, **options)


def several(engine):
    for _ in range(isolation.BATCHES):
        engine.privatize(*data())


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_models_that_mix_are_refused_by_the_two_lines(name, mode):
    with pytest.raises((PrivacyError, UnsupportedError)):
        train(MIXING[name], grad_sample_mode=mode)


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_are_refused_by_the_engine(name):
    with pytest.raises((PrivacyError, UnsupportedError)):
        several(engine_for(MIXING[name]))


class _OverLargest(torch.autograd.Function):
    """Divides gradients by the largest one of the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.abs().max())


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        # One example less is as many as an example has numbers.
        (lambda: nn.Sequential(Function(lambda x: x + 0.1 * x[-1:]), nn.Linear(5, 3)), (6, 5)),
        # As many examples as classes.
        (lambda: nn.Sequential(nn.Linear(5, 3), Function(_OverLargest.apply), nn.Linear(3, 3)), (3, 5)),
    ],
)
def test_sizes_that_meet_hide_no_mixing(model, shape, large, monkeypatch):
    """Neither was found, however often."""
    monkeypatch.setattr(trial, "LARGE_BYTES", -1 if large else trial.LARGE_BYTES)
    found = 0
    for seed in range(8):
        wrapped = GradSampleModule(model())
        wrapped.isolation._random.seed(seed)
        try:
            for _ in range(isolation.BATCHES):
                wrapped(torch.randn(shape))
        except PrivacyError:
            found += 1
    assert found > 1


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("n", [2, 3, 14, 40])
def test_honest_models_are_never_refused(name, n):
    for _ in range(3):
        engine = engine_for(HONEST[name])
        engine.privatize(*data(n))
        assert engine.isolation._checks == 1
    train(HONEST[name])


MIXING_LOSSES = {
    "contrastive": lambda z, y: F.cross_entropy(z @ z.t(), torch.arange(len(z)), reduction="none"),
    "divided by all targets": lambda z, y: F.cross_entropy(z, y, reduction="none") / (y > 0).sum(),
    "hardest half": lambda z, y: (e := F.cross_entropy(z, y, reduction="none")) * (e >= e.median()),
    "mean, expanded": lambda z, y: F.cross_entropy(z, y).expand(len(y)),
    "batch's weights": lambda z, y: F.cross_entropy(z, y, reduction="none") * y.bincount(minlength=3)[y],
    "decorrelated": lambda z, y: (z - z.mean(0)).square().sum(1),
}


@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_losses_that_mix_are_refused_by_the_engine(name):
    with pytest.raises(PrivacyError):
        several(engine_for(nn.Linear(6, 3), MIXING_LOSSES[name]))


class Criterion(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.reduction, self.function = "mean", function

    def forward(self, z, y):
        losses = self.function(z, y)
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize("name", sorted(MIXING_LOSSES.keys() - {"mean, expanded"}))
def test_a_criterion_that_mixes_is_refused_in_the_ghost_mode(name):
    _, _, criterion, _ = ghost(Criterion(MIXING_LOSSES[name]))
    with pytest.raises(PrivacyError, match="criterion's loss of one example"):
        for _ in range(3):
            criterion(torch.randn(14, 3).requires_grad_(), data()[1])


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(ignore_index=1), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_torchs_criteria_keep_examples_apart(criterion):
    _, _, criterion, _ = ghost(criterion)
    for _ in range(8):
        criterion(torch.randn(14, 3).requires_grad_(), data()[1])


def ghost(criterion):
    model = nn.Linear(6, 3)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=14),
        criterion=criterion,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        sample_rate=1.0,
        expected_batch_size=14,
    )


def test_nothing_moves_by_a_check():
    """Weights, buffers, dropout's random numbers and those of numpy and Python are as without it."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.b(self.drop(self.a(x)) * random.random() * float(np.random.rand()))

    ends = []
    model = Noisy()
    for options in ({}, {"check_isolation": False}):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        private = train(model, **options)
        ends.append(([*private.parameters(), private.count], random.random(), np.random.rand(), torch.rand(3).tolist()))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True)) and ends[0][1:] == ends[1][1:]


def test_a_counter_counts_once():
    assert train(HONEST["counter"]).mean.eq(float(isolation.BATCHES)).all()


def test_a_check_can_be_switched_off_by_name_with_a_warning():
    with pytest.warns(UserWarning, match="check_isolation=False"):
        engine = engine_for(MIXING["centred"], check_isolation=False)
    engine.privatize(*data())
    model = MIXING["centred"]
    with pytest.warns(UserWarning, match="check_isolation=False"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data()), batch_size=14),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            check_isolation=False,
        )[0].to_standard_module()


def test_later_batches_are_checked_too(monkeypatch):
    """A model that begins to mix is found by the rare random checks."""
    model = Between(lambda x: x)
    engine = engine_for(model)
    several(engine)
    engine.model.function = lambda x: x - x.mean(0)
    monkeypatch.setattr(isolation, "RATE", 1.0)
    with pytest.raises(PrivacyError, match="mixes the examples"):
        engine.privatize(*data())


def test_checks_are_rare_and_few_where_kinds_are_many():
    check = engine_for(nn.Linear(6, 3)).isolation
    due = 0
    for kind in range(50_000):
        if check.due(kind, 16):
            due += 1
            check._checks += 1
    assert due < 50_000 / 200, "twice the rate, and the first ones"
    assert not check.due("one example", 1)


def test_sorted_and_packed_sequences_are_no_mixing():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, 2, batch_first=True, dropout=0.3), nn.Linear(4, 3)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(self.lstm(packed)[1][0][-1])

    x, lengths = torch.randn(8, 9, 3), torch.tensor([9, 9, 7, 6, 6, 5, 2, 1])
    for _ in range(5):
        engine_for(Packed()).privatize((x, lengths), torch.arange(8) % 3)


@pytest.mark.parametrize("name", [*MIXING, *HONEST])
def test_the_shorter_experiments_of_large_examples_find_the_same(name, monkeypatch):
    """The model is taken for one whose graph is too large to be kept for a second look."""
    monkeypatch.setattr(trial, "LARGE_BYTES", -1)
    with pytest.raises((PrivacyError, UnsupportedError)) if name in MIXING else nullcontext():
        several(engine_for((MIXING | HONEST)[name]))


def test_sums_of_large_examples_are_compared_though_every_batch_is_of_a_new_kind(monkeypatch):
    monkeypatch.setattr(trial, "LARGE_BYTES", -1)
    compared = []
    ordinary = trial.Trial.ordinary
    monkeypatch.setattr(trial.Trial, "ordinary", lambda *of: compared.append(len(of)) or ordinary(*of))
    engine = engine_for(nn.Linear(6, 3), lambda outputs, y: outputs.square().sum((1, 2)))
    for length in (2, 3, 4, 5):
        engine.clipped_sum(torch.randn(14, length, 6), torch.zeros(14))
    assert len(compared) == 2


def test_large_examples_go_through_fewer_passes(monkeypatch):
    """The model is called less often in three batches; the sum is compared at the second of them."""

    def calls():
        seen = []
        several(engine_for(Between(lambda z: (seen.append(len(z)), torch.tanh(z))[1])))
        return len(seen)

    small = calls()
    monkeypatch.setattr(trial, "LARGE_BYTES", -1)
    assert calls() < small


class Wide(nn.Module):
    """An example's graph takes some 16 MB."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.wide, self.head = nn.Linear(1, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.function(self.wide(x.unsqueeze(-1)))).mean(1))


def test_large_examples_are_few_at_once_until_a_plan_is_made():
    seen = []

    def noted(z: Tensor) -> Tensor:
        seen.append(len(z))
        return z

    engine = Engine(Wide(noted), lambda out, y: F.cross_entropy(out, y, reduction="none"))
    engine.clipped_sum(torch.randn(16, 30_000), torch.arange(16) % 3)
    *before, planned = seen
    assert seen[0] == 7 and len(before) > 4 and max(before[1:]) == 6 and planned == 10  # 7: the probe's copies


@pytest.mark.parametrize("function", [lambda z: z - z.mean(0), lambda z: z.roll(1, 0), lambda z: z / z.detach().norm()])
def test_mixing_is_seen_among_few_large_examples(function):
    engine = Engine(Wide(function), lambda out, y: F.cross_entropy(out, y, reduction="none"))
    with pytest.raises(PrivacyError, match="other examples"):
        engine.clipped_sum(torch.randn(16, 30_000), torch.arange(16) % 3)


def test_a_sparse_gradient_is_checked_like_any_other(recwarn):
    net = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    engine = Engine(net, lambda out, y: F.cross_entropy(out, y, reduction="none"))
    engine.clipped_sum(torch.arange(48).reshape(16, 3) % 20, torch.arange(16) % 3)
    assert not list(recwarn)


class Graph(nn.Module):
    """Signals at the nodes of a graph, [B, 5, 4], whose edges are a buffer."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.edges @ self.a(x).transpose(0, 1).reshape(5, -1)
        return self.b(torch.tanh(beside.view(5, len(x), 3))).mean(0)


@pytest.mark.parametrize("kind", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc])
def test_a_graph_in_a_sparse_buffer_is_that_of_a_dense_one(kind, recwarn):
    edges, x, y = torch.eye(5).roll(1, 0) + torch.eye(5), torch.randn(6, 5, 4), torch.arange(6) % 2
    sums = [
        Engine(Graph(e), lambda out, y: F.cross_entropy(out, y, reduction="none"), physical_batch_size=4)
        .clipped_sum(x, y)
        .sums
        for e in (edges, kind(edges))
    ]
    assert all(torch.allclose(sums[0][name], value, atol=1e-6) for name, value in sums[1].items())
