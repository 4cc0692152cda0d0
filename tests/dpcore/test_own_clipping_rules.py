"""A clipping rule of the user's own: its factors are looked at before anything is added to a parameter."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpcore import Engine, PrivacyError
from dpcore.clipping import automatic_factors, clip_factors, factors_of_own_rule
from tests.dpcore.private_setup import losses, make, small_data, small_model, step

BOUND = 0.5
GRAPH = "aot_eager"
"""A backend of torch.compile that compiles nothing, so that tests of graphs are fast."""


def _nan(norms: Tensor, c: float) -> Tensor:
    return torch.full_like(norms, math.nan)


def _negative(norms: Tensor, c: float) -> Tensor:
    return -clip_factors(norms, c)


def _infinite(norms: Tensor, c: float) -> Tensor:
    return torch.full_like(norms, math.inf)


def _too_long(norms: Tensor, c: float) -> Tensor:
    return 1.001 * c / norms


def _none(norms: Tensor, c: float) -> Tensor:
    return torch.ones_like(norms)


def _deceiving(norms: Tensor, c: float) -> Tensor:
    """Change the norms by which the factors would be judged."""
    return torch.full_like(norms.mul_(1e-6), 1e3)


def _of_the_batch(norms: Tensor, c: float) -> Tensor:
    """Keep every contribution within C, by a factor that depends on all examples."""
    return torch.full_like(norms, 1e-3) * c / norms.mean()


WRONG = {
    "nan": (_nan, "returned the factor nan"),
    "negative": (_negative, "returned the factor -"),
    "infinite": (_infinite, "returned the factor inf"),
    "too long": (_too_long, "the noise does not hide the example"),
    "no clipping": (_none, "returned the factor 1 "),
    "deceiving": (_deceiving, "returned the factor 1000 "),
    "of the batch": (_of_the_batch, "must depend on its own example's norm"),
}


def data(count: int = 12, scale: float = 30.0) -> tuple[Tensor, Tensor]:
    x, y = small_data()[:count]
    return x * scale, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compile", [False, GRAPH])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_factors_are_refused_and_nothing_is_released(wrong: str, compile: Any, dtype: torch.dtype) -> None:
    rule, message = WRONG[wrong]
    model = small_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    now = [clip_factors]
    engine = Engine(
        model,
        losses,
        max_grad_norm=BOUND,
        noise_multiplier=1.0,
        expected_batch_size=12,
        optimizer=optimizer,
        factors=lambda norms, c: now[0](norms, c),
        compile=compile,
    )
    x, y = data()
    x = x.to(dtype)
    engine.step(x, y)
    now[0] = rule
    before = copy.deepcopy(model.state_dict())
    fresh = Engine(model, losses, max_grad_norm=BOUND, factors=rule, compile=compile)
    for refused in (lambda: fresh.clipped_sum(x, y), lambda: fresh.clipped_sum(x, y)):
        with pytest.raises(PrivacyError, match=message):
            refused()
    if not compile:  # a graph keeps the Python values of its first call
        with pytest.raises(PrivacyError, match=message):
            engine.step(x, y)
        assert engine.steps == 1 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "options", [{}, {"clipping": "per_layer", "max_grad_norm": [BOUND] * 4}, {"clipping": "adaptive"}]
)
def test_a_step_with_wrong_factors_is_neither_made_nor_counted(wrong: str, options: dict[str, Any]) -> None:
    rule, message = WRONG[wrong]
    model = small_model()
    options = {"noise_multiplier": 1.0, "max_grad_norm": BOUND, "check_batches": False} | options
    engine, wrapped, optimizer, _ = make(model, factors=rule, **options)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(PrivacyError, match=message):
            step(wrapped, optimizer, *data())
    assert len(engine.accountant) == 0 and optimizer.steps == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.accumulator.flat.any()


class Sequences(nn.Module):
    """A large weight over several positions, whose gradients are added example by example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.head = nn.Linear(256, 256), nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.large(x)).mean(1))


def test_factors_of_gradients_that_are_added_in_turn() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 200, 256), torch.arange(6) % 3
    plain = Engine(Sequences(), losses, max_grad_norm=0.1)
    expected = {name: total.clone() for name, total in plain.clipped_sum(x, y).sums.items()}
    assert "large.weight: turn" in plain.explain()
    own = Engine(Sequences(), losses, max_grad_norm=0.1, factors=lambda norms, c: (c / norms).clamp(max=1.0))
    for name, total in own.clipped_sum(x, y).sums.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-7)
    for rule, message in (WRONG["too long"], WRONG["nan"]):
        with pytest.raises(PrivacyError, match=message):
            Engine(Sequences(), losses, max_grad_norm=0.1, factors=rule).clipped_sum(x, y)


def _of_its_own_bound(norms: Tensor, c: float) -> Tensor:
    """Take C from outside, where it is not lowered by what rounding may hide."""
    return (BOUND / norms).clamp(max=1.0)


RIGHT = {
    "as dpcore's": lambda norms, c: (c / norms).clamp(max=1.0),
    "automatic": lambda norms, c: automatic_factors(norms, c, 0.1),
    "its own bound": _of_its_own_bound,
    "a millionth longer": lambda norms, c: (1.0 + 5e-7) * _of_its_own_bound(norms, c),
    "leaves out what is long": lambda norms, c: norms <= c,
    "nothing": lambda norms, c: torch.zeros_like(norms),
    "float64": lambda norms, c: (c / norms.double()).clamp(max=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RIGHT)
def test_right_factors_pass_and_no_example_contributes_more_than_the_bound(rule: str, dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    x, y = data(9, 5.0)
    engine = Engine(model, losses, max_grad_norm=BOUND, factors=RIGHT[rule])
    whole = engine.clipped_sum(x.to(dtype), y)
    norms, factors = whole.norms.double(), whole.factors.double()
    given = RIGHT[rule](norms, BOUND).double()
    torch.testing.assert_close(factors, given, rtol=3e-5, atol=0.0)
    for i in range(len(x)):
        alone = engine.clipped_sum(x[i : i + 1].to(dtype), y[i : i + 1]).sums.values()
        assert math.sqrt(sum(float(part.double().square().sum()) for part in alone)) <= BOUND


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_examples_without_a_finite_gradient_contribute_nothing_whatever_the_rule_says(value: float) -> None:
    def rule(norms: Tensor, c: float) -> Tensor:
        return torch.where(norms.isfinite(), c / norms, 1.0)

    def scaled(outputs: Tensor, y: Tensor) -> Tensor:
        return losses(outputs, y % 3) * torch.where(y < 3, 1.0, value)

    x, y = data(8)
    y = y.clone()
    y[3] += 3
    model = small_model().float()
    found = Engine(model, scaled, max_grad_norm=BOUND, factors=rule, check_isolation=False).clipped_sum(x.float(), y)
    assert all(total.isfinite().all() for total in found.sums.values())
    contributions = (found.norms * found.factors)[found.norms.isfinite()]
    torch.testing.assert_close(contributions, torch.full_like(contributions, BOUND), rtol=1e-4, atol=0.0)
    assert float(found.factors[3]) == 0.0 or value == 1e30


def test_a_norm_of_zero() -> None:
    """A rule may divide by it if it returns a number; infinity is none."""
    model = nn.Linear(4, 2, bias=False)
    x, y = torch.randn(3, 4), torch.tensor([0.0, 1.0, 2.0])

    def weighted(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.sum(1) * y

    safe = Engine(model, weighted, max_grad_norm=1.0, factors=lambda norms, c: c / (norms + 1e-3))
    found = safe.clipped_sum(x, y)
    assert float(found.norms[0]) == 0.0 and found.sums["weight"].isfinite().all()
    with pytest.raises(PrivacyError, match="returned the factor inf for an example whose gradient has the norm 0;"):
        Engine(model, weighted, max_grad_norm=1.0, factors=lambda norms, c: c / norms).clipped_sum(x, y)


def test_digits_that_float32_loses_of_a_tiny_gradient_do_not_count_a_million_times() -> None:
    """1e-25 squared is 0 in float32, and a factor that makes every gradient as long as C would be 1e12."""
    model = nn.Linear(4, 1, bias=False)
    engine = Engine(
        model,
        lambda outputs, y: outputs[:, 0] * y,
        max_grad_norm=1.0,
        factors=lambda norms, c: torch.where(norms > 0, c / norms, 1e30),
        check_isolation=False,
    )
    for size in (1e-25, 1e-22, 1e-12, 1e-3, 1.0):
        engine.clipped_sum(torch.ones(1, 4), torch.tensor([size]))
        assert float(engine.accumulator.flat.double().norm()) <= 1.0


@pytest.mark.parametrize("rule", [lambda norms, c: 0.5, lambda norms, c: torch.ones(1), lambda norms, c: norms[None]])
def test_a_rule_returns_one_factor_for_each_norm(rule: Any) -> None:
    with pytest.raises(ValueError, match="one factor for each norm"):
        Engine(small_model(), losses, max_grad_norm=BOUND, factors=rule).clipped_sum(*data(6))


def test_a_rule_of_ones_own_beside_a_way_of_clipping_that_is_one() -> None:
    with pytest.raises(ValueError, match="factors"):
        make(clipping="automatic", factors=clip_factors)


@pytest.mark.parametrize("of", [torch.amax, torch.amin, torch.mean, lambda norms: norms[0], lambda norms: norms[-1]])
@pytest.mark.parametrize("place", range(5))
def test_a_factor_by_anothers_norm_is_wrong_wherever_that_one_stands(of: Any, place: int) -> None:
    def rule(norms: Tensor, c: float) -> Tensor:
        return (0.1 * c / of(norms)).expand(len(norms))

    norms = torch.arange(1.0, 6.0).square().roll(place)  # of which no half has the mean of all
    _, wrong = factors_of_own_rule(rule, norms, BOUND, BOUND)
    assert bool(wrong.any())
    _, wrong = factors_of_own_rule(lambda norms, c: 0.1 * c / norms, norms, BOUND, BOUND)
    assert not bool(wrong.any())


def test_a_rule_that_counts_its_calls_is_told_so() -> None:
    """It is asked several times for a batch, so that its warm-up would run ahead; it was told of other examples."""

    class WarmUp:
        calls = 0

        def __call__(self, norms: Tensor, c: float) -> Tensor:
            self.calls += 1
            return clip_factors(norms, c * min(1.0, self.calls / 100))

    engine, model, optimizer, loader = make(factors=WarmUp())
    with pytest.raises(PrivacyError, match="nor on what the rule has counted or remembered"):
        step(model, optimizer, *next(iter(loader)))
    assert not engine.accountant.history
