"""Noise streams, and the whole step."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import nn

from dpcore import Engine, GaussianNoise
from tests.dpcore.comparison import odd_loss


def _draw(noise: GaussianNoise, step: int, size: int = 20_000) -> torch.Tensor:
    return noise.add_(torch.zeros(size), 1.0, step)


def test_a_stream_depends_on_seed_step_and_rank_only():
    first = _draw(GaussianNoise(5), 3)
    again = GaussianNoise(5)
    _draw(again, 2)
    assert torch.equal(first, _draw(again, 3))
    others = [
        (GaussianNoise(6), 3),
        (GaussianNoise(5), 4),
        (GaussianNoise(5, rank=1), 3),
        (GaussianNoise(5 + 2**32), 3),
    ]
    for other, step in others:
        drawn = _draw(other, step)
        assert not torch.equal(first, drawn)
        assert abs(float(torch.corrcoef(torch.stack([first, drawn]))[0, 1])) < 5 / 20_000**0.5


def test_noise_without_a_seed_never_repeats():
    assert not torch.equal(_draw(GaussianNoise(), 0), _draw(GaussianNoise(), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal_across_coordinates_and_steps(dtype):
    noise = GaussianNoise(7)
    target = torch.ones(1000, dtype=dtype)
    drawn = torch.stack([noise.add_(target.clone(), 2.0, step) for step in range(100)])
    assert stats.kstest((drawn.flatten() - 1.0).double() / 2.0, "norm").pvalue > 1e-4
    per_coordinate = drawn.double().var(0)
    assert float(per_coordinate.mean()) == pytest.approx(4.0, rel=0.03)
    neighbours = torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 5 / drawn.numel() ** 0.5


def _engine(**options) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    settings = {"max_grad_norm": 0.5, "expected_batch_size": 4, "noise": GaussianNoise(1)} | options
    return Engine(model, odd_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_a_step_without_noise_is_the_clipped_sum_over_the_expected_batch_size():
    engine = _engine()
    x, y = torch.randn(7, 4), torch.arange(7) % 2
    before = {n: p.detach().clone() for n, p in engine.parameters.items()}
    sums = {n: s.clone() for n, s in engine.clipped_sum(x, y).sums.items()}
    engine.step(x, y)
    for name, param in engine.parameters.items():
        torch.testing.assert_close(param.detach(), before[name] - 0.1 * sums[name] / 4)


def test_an_empty_batch_is_a_noisy_step_of_the_right_size():
    engine = _engine(noise_multiplier=3.0)
    draws = []
    for _ in range(400):
        engine.privatize(torch.zeros(0, 4), torch.zeros(0))
        draws.append(torch.cat([p.grad.flatten() for p in engine.parameters.values()]).clone())
    drawn = torch.stack(draws).double()
    assert engine.steps == 400
    assert stats.kstest(drawn.flatten() / (3.0 * 0.5 / 4), "norm").pvalue > 1e-4
    consecutive = torch.corrcoef(torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()]))[0, 1]
    assert abs(float(consecutive)) < 5 / drawn.numel() ** 0.5


def test_the_same_seed_gives_the_same_training_run():
    runs = []
    for _ in range(2):
        engine = _engine(noise_multiplier=1.0)
        torch.manual_seed(3)
        for _ in range(5):
            engine.step(torch.randn(5, 4), torch.arange(5) % 2)
        runs.append([p.detach().clone() for p in engine.parameters.values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_step_needs_a_public_divisor():
    with pytest.raises(ValueError, match="expected_batch_size"):
        _engine(expected_batch_size=None).step(torch.randn(5, 4), torch.arange(5) % 2)
