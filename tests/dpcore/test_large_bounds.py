"""Bounds and noise that the parameters' precision cannot hold are refused, where they are set."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from dpcore import Engine
from dpcore.optimizers import DPOptimizer
from dpcore.schedulers import LambdaGradClip, LambdaNoise
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import losses, make, small_data, small_model, step, truth

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOO_LARGE = {torch.float16: 1e300, torch.bfloat16: 1e300, torch.float32: 1e300, torch.float64: 1.7e308}


def _engine(model: Any, **options: Any) -> Engine:
    return Engine(model, losses, **({"expected_batch_size": 10} | options))


@pytest.mark.parametrize("way", ["make_private", "engine"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bound_that_sums_cannot_hold(dtype: torch.dtype, way: str) -> None:
    """max_grad_norm=1e300 with noise made every float32 weight a NaN, without a word."""
    model = small_model().to(dtype)
    bound = TOO_LARGE[dtype]
    for each in ([], [0.5] * 3):
        given = [*each, bound] if each else bound
        options = {"clipping": "per_layer"} if each and way == "make_private" else {}
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"max_grad_norm is 1.*; it must be at most .*torch.float.*pass 1e30"):
            (make if way == "make_private" else _engine)(model, max_grad_norm=given, **options)
        assert before.keys() == model.state_dict().keys()
        make(model, noise_multiplier=0.0)[1].cleanup()  # nothing was changed


@pytest.mark.parametrize("way", ["make_private", "engine"])
@pytest.mark.parametrize(
    ("dtype", "sigma", "bound"),
    [
        (torch.float16, 10.0, 1e6),
        (torch.bfloat16, 1e10, 1e29),
        (torch.float32, 1e10, 1e29),
        (torch.float32, 1e300, 1.0),
        (torch.float64, 1e300, 1e300),
    ],
)
def test_noise_that_parameters_cannot_hold(way: str, dtype: torch.dtype, sigma: float, bound: float) -> None:
    model = small_model().to(dtype)
    with pytest.raises(ValueError, match=f"noise has the standard deviation .* the parameters are {dtype}"):
        (make if way == "make_private" else _engine)(model, noise_multiplier=sigma, max_grad_norm=bound)


@pytest.mark.parametrize("sigma", [math.nan, math.inf, -1.0, "1", None, 10**400])
def test_a_noise_multiplier_that_is_no_number(sigma: Any) -> None:
    for build in (make, lambda **options: _engine(small_model(), **options)):
        with pytest.raises(ValueError, match=r"noise_multiplier is .*; it must be a number, at least 0"):
            build(noise_multiplier=sigma)
    _, _, optimizer, _ = make(noise_multiplier=1.0)
    engine = _engine(small_model(), noise_multiplier=1.0)
    for of in (optimizer, engine):
        with pytest.raises(ValueError, match=r"noise_multiplier is .*; it must be a number, at least 0"):
            of.noise_multiplier = sigma
        assert of.noise_multiplier == 1.0


@pytest.mark.parametrize("size", [math.nan, math.inf, 0, -3.0])
def test_a_divisor_that_is_no_number(size: Any) -> None:
    for build in (make, lambda **options: _engine(small_model(), **options)):
        with pytest.raises(ValueError, match=r"expected_batch_size is .*; it must be a positive, public number"):
            build(expected_batch_size=size)
    engine = _engine(small_model().float(), noise_multiplier=1.0)
    engine.expected_batch_size = size
    with pytest.raises(ValueError, match=r"expected_batch_size is .*; it must be a positive, public number"):
        engine.privatize(*(part.float() if k == 0 else part for k, part in enumerate(small_data()[:5])))
    assert engine.steps == 0


@pytest.mark.filterwarnings("ignore")
def test_what_is_set_later_is_refused_and_the_former_value_stays() -> None:
    model = small_model().float()
    _, wrapped, optimizer, _ = make(model, noise_multiplier=1.0, max_grad_norm=0.5, check_batches=False)
    assert isinstance(optimizer, DPOptimizer)
    for value in (1e300, math.inf, math.nan, 1e38, 0.0, [0.5] * 3):
        with pytest.raises(ValueError, match="max_grad_norm"):
            optimizer.max_grad_norm = value
        assert optimizer.max_grad_norm == 0.5 and optimizer.accumulator.sensitivity == 0.5
    with pytest.raises(ValueError, match="the noise has the standard deviation"):
        optimizer.noise_multiplier = 1e38
    clip = LambdaGradClip(optimizer, scheduler_function=lambda k: 10.0 ** (30 * k))
    with pytest.raises(ValueError, match="max_grad_norm is"):
        for _ in range(3):
            clip.step()
    noise = LambdaNoise(optimizer, noise_lambda=lambda k: 10.0 ** (30 * k))
    with pytest.raises(ValueError, match="the noise has the standard deviation"):
        for _ in range(3):
            noise.step()
    x, y = small_data()[:10]
    optimizer.max_grad_norm, optimizer.noise_multiplier = 0.5, 1.0
    step(wrapped, optimizer, x.float(), y)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_bound_that_clips_nothing_stays() -> None:
    """1e30 is what users write for no clipping; without noise it is ordinary training."""
    model = small_model()
    x, y = small_data()[:10]
    expected = truth(model, x, y, bound=1e30)
    for dtype in (torch.float64, torch.float32):
        found = _engine(copy.deepcopy(model).to(dtype), max_grad_norm=1e30).clipped_sum(x.to(dtype), y)
        assert relative_error(found.sums, expected) < 1e-5
        assert torch.equal(found.factors, torch.ones_like(found.factors))


def test_a_model_that_is_brought_to_a_narrower_precision_later() -> None:
    model = small_model()
    _, wrapped, optimizer, _ = make(model, noise_multiplier=0.0, max_grad_norm=1e200, check_batches=False)
    x, y = small_data()[:10]
    step(wrapped, optimizer, x, y)
    model.float()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"max_grad_norm is 1e\+200; it must be at most"):
        step(wrapped, optimizer, x.float(), y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_clipbound": 1e-12}, "min_clipbound is 1e-12"),
        ({"max_clipbound": math.inf}, "max_clipbound inf"),
        ({"unclipped_num_std": math.nan}, "unclipped_num_std is nan"),
        ({"unclipped_num_std": -5.0}, "unclipped_num_std is -5.0"),
        ({"clipbound_learning_rate": math.nan}, "clipbound_learning_rate is nan"),
    ],
)
def test_settings_of_adaptive_clipping_that_would_fail_within_a_step(options: dict[str, Any], message: str) -> None:
    """A bound below 1e-8 ended a step whose noisy gradient was there and not counted yet."""
    with pytest.raises(ValueError, match=message):
        make(clipping="adaptive", noise_multiplier=1.0, **options)


def test_adaptive_bounds_stay_where_every_step_is_made_and_counted() -> None:
    for dtype, rate in ((torch.float16, -200.0), (torch.float32, -200.0), (torch.float32, 200.0)):
        model = small_model().to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, wrapped, optimizer, _ = make(
                model,
                clipping="adaptive",
                noise_multiplier=1.0,
                max_clipbound=1e37,
                clipbound_learning_rate=rate,
                target_unclipped_quantile=0.0,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                check_batches=False,
            )
            for _ in range(6):
                step(wrapped, optimizer, small_data()[:10][0].to(dtype), small_data()[:10][1])
        assert sum(count for *_, count in engine.accountant.history) == 6
