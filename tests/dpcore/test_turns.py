"""Gradients that are formed for one example after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine, reference
from dpcore.errors import UnsupportedError
from dpcore.microbatch import planner
from dpcore.rules import convolution
from tests.dpcore.comparison import odd_loss, relative_error


class Words(nn.Module):
    """A tied table, a layer by its transposed weight, one without bias, one that is used twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=2)
        self.turned = nn.Parameter(torch.randn(6, 9) * 0.3)
        self.bias = nn.Parameter(torch.randn(9) * 0.1)
        self.down = nn.Linear(9, 6, bias=False)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.down(torch.addmm(self.bias, h.reshape(-1, 6), self.turned).tanh().view(*ids.shape, 9))
        h = self.norm(self.twice(self.twice(h).tanh()))
        return F.linear(h, self.table.weight)


def losses(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), ids, reduction="none").mean(1)


@pytest.fixture(autouse=True)
def in_turn() -> Iterator[None]:
    """Also small gradients are."""
    with mock.patch.object(planner, "FEWEST_IN_TURN", 1):
        yield


def build() -> nn.Module:
    torch.manual_seed(3)
    return Words()


def test_what_is_formed_in_turn() -> None:
    engine, ids = Engine(build(), losses), torch.randint(11, (3, 16))
    engine.clipped_sum(ids, ids)
    plan = dict(line.split(": ", 1) for line in engine.explain().splitlines())
    assert {name for name, method in plan.items() if method == "turn"} == {
        *("table.weight", "turned", "down.weight", "twice.weight")
    }


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_the_sum_is_the_loops(size: int, length: int, seed: int, share: float, masked: bool) -> None:
    model = build()
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (size, length), generator=numbers)
    mask = torch.rand(size, generator=numbers) < 0.6 if masked else torch.ones(size, dtype=torch.bool)
    gradients = list(reference.example_gradients(copy.deepcopy(model), losses, ids, ids))
    norms = torch.stack([reference.norm(g) for g in gradients])
    bound = share * float(norms.median())
    result = Engine(model, losses, max_grad_norm=bound, check_isolation=False).clipped_sum(ids, ids, mask)
    torch.testing.assert_close(result.norms[mask].double(), norms[mask], rtol=1e-5, atol=0)
    assert bool((result.factors.double() <= mask * (bound / norms).clamp(max=1.0) * (1 + 1e-6)).all())
    assert bool((result.factors.double() >= mask * (bound / norms).clamp(max=1.0) * (1 - 1e-4)).all())
    truth = {n: sum(f * g[n] for f, g in zip(result.factors.double(), gradients, strict=True)) for n in gradients[0]}
    assert relative_error(result.sums, truth) < 1e-5


@pytest.mark.parametrize("share", [0.5, 0.999, 1.0])
def test_no_example_adds_more_than_the_bound(share: float) -> None:
    model, ids = build(), torch.randint(11, (1, 16))
    (gradient,) = reference.example_gradients(copy.deepcopy(model), losses, ids, ids)
    bound = share * float(reference.norm(gradient))
    sums = Engine(model, losses, max_grad_norm=bound, check_isolation=False).clipped_sum(ids, ids).sums
    assert float(reference.norm({name: value.double() for name, value in sums.items()})) <= bound * (1 + 1e-6)


def test_examples_without_a_finite_gradient_add_nothing_and_change_no_other() -> None:
    model, ids = build(), torch.randint(11, (4, 16))

    def some_infinite(scores: Tensor, ids: Tensor) -> Tensor:
        return losses(scores, ids) * torch.tensor([1.0, float("inf"), 1.0, float("nan")])[: len(ids)]

    def one(ids: Tensor) -> dict[str, Tensor]:
        engine = Engine(model, losses, max_grad_norm=0.5, check_isolation=False)
        return {name: value.clone() for name, value in engine.clipped_sum(ids, ids).sums.items()}

    engine = Engine(model, some_infinite, max_grad_norm=0.5, check_isolation=False)
    result = engine.clipped_sum(ids, ids)
    assert result.nonfinite == 2
    assert result.factors[[1, 3]].tolist() == [0.0, 0.0]
    assert relative_error(result.sums, one(ids[[0, 2]])) < 1e-5


def test_each_group_of_parameters_has_its_bound() -> None:
    model, ids = build(), torch.randint(11, (3, 16))
    bounds = [0.05 * (k + 1) for k, _ in enumerate(model.parameters())]
    sums = Engine(model, losses, max_grad_norm=bounds, check_isolation=False).clipped_sum(ids, ids).sums
    gradients = list(reference.example_gradients(copy.deepcopy(model), losses, ids, ids))
    truth = {}
    for (name, _), bound in zip(model.named_parameters(), bounds, strict=True):
        each = [g[name] for g in gradients]
        truth[name] = sum(min(1.0, bound / float(g.norm())) * g for g in each)
    assert relative_error(sums, truth) < 1e-4


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_turn(groups: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3, padding=1, groups=groups).to(memory_format=memory_format)
    x, y = torch.randn(3, 4, 9, 9).to(memory_format=memory_format), torch.arange(3.0)
    with mock.patch.multiple(convolution, FEWEST_IN_TURN=1, FEWEST_IN_TURN_BY_ROWS=1):
        engine = Engine(model, odd_loss, max_grad_norm=0.5)
        sums = engine.clipped_sum(x, y).sums
    assert engine.explain().startswith("weight: turn")
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 0.5)
    assert relative_error(sums, truth.clipped) < 2e-5


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(16, 7))
    x = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    return model, x, torch.arange(4) % 3


def test_sums_follow_parameters_that_are_turned_in_memory() -> None:
    model, x, y = convolutions()
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 1.0).clipped
    private, optimizer, _ = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        expected_batch_size=1,
        check_batches=False,
    )
    for turn in (False, True):
        if turn:
            model.to(memory_format=torch.channels_last)
            model[3].weight.data = model[3].weight.data.t().contiguous().t()
        optimizer.zero_grad()
        odd_loss(private(x), y).mean().backward()
        optimizer.step()
        assert relative_error({n: p.grad for n, p in model.named_parameters()}, truth) < 2e-5
    optimizer.signal_skip_step()
    for memory_format in (torch.channels_last, torch.contiguous_format):
        model.to(memory_format=memory_format)
        optimizer.zero_grad()
        odd_loss(private(x), y).mean().backward()
        refused = memory_format is torch.contiguous_format
        with pytest.raises(UnsupportedError, match="between the pieces") if refused else nullcontext():
            optimizer.step()


def test_an_engines_sums_follow_too() -> None:
    model, x, y = convolutions()
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 1.0).clipped
    engine = Engine(model, odd_loss)
    assert relative_error(engine.clipped_sum(x, y).sums, truth) < 2e-5
    model.to(memory_format=torch.channels_last)
    model[3].weight.data = model[3].weight.data.t().contiguous().t()
    assert relative_error(engine.clipped_sum(x, y).sums, truth) < 2e-5


class Wide(nn.Module):
    """10^8 weights, used twice, so that their norm has cross terms and no ghost norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


@pytest.mark.slow
@pytest.mark.parametrize("lowered", [False, True], ids=["float32", "bfloat16"])
def test_no_example_adds_more_than_the_bound_at_a_hundred_million_weights(lowered: bool) -> None:
    torch.manual_seed(0)
    model, x = Wide(10_000), torch.randn(1, 96, 10_000)

    def loss(out: Tensor, x: Tensor) -> Tensor:
        return (out.float() * x.roll(1, -1)).sum((1, 2))

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            return Wide.forward(model, x)

    model.forward = forward  # type: ignore[method-assign]
    engine = Engine(model, loss, max_grad_norm=1.0, check_isolation=False)
    measured = engine.clipped_sum(x, x)
    assert engine.explain().startswith("layer.weight: turn")
    adds = norm(measured.sums["layer.weight"])
    print(f"norm {float(measured.norms):.4g}: adds {adds - 1:+.2e} of C")
    assert 1 - 1e-4 <= adds <= 1 + 1e-6
    assert adds == pytest.approx(float(measured.factors) * float(measured.norms), rel=1e-5)


def norm(tensor: Tensor) -> float:
    """The norm in float64, some rows at a time."""
    return sum(float(rows.double().square().sum()) for rows in tensor.split(1000)) ** 0.5
