"""Noise streams, and the whole step."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from dpcore import Engine, GaussianNoise, PrivacyError
from dpcore.grad_sample import GradSampleModule
from dpcore.noise import SecureNoise, grid_spacing
from dpcore.optimizers import DPOptimizer
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


def test_a_loss_that_clears_gradients_leaves_the_noise():
    """p.grad was the buffer that already held the next step's noise: in-place zeros there released bare sums."""
    engines = _engine(noise_multiplier=3.0), _engine(noise_multiplier=3.0)

    def clearing(outputs, y):
        engines[0].optimizer.zero_grad(set_to_none=False)
        return odd_loss(outputs, y)

    engines[0].loss_fn = clearing
    for _ in range(3):
        x, y = torch.randn(5, 4), torch.arange(5) % 2
        for engine in engines:
            engine.privatize(x, y)
    for one, other in zip(*(e.parameters.values() for e in engines), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("after", ["clipped_sum", "failed noise", "failed loss"])
def test_no_gradient_shows_sums_without_noise(after):
    class Failing(SecureNoise):
        broken = False

        def add_(self, target, std, step):
            if self.broken:
                raise KeyboardInterrupt
            return super().add_(target, std, step)

    noise = Failing()
    engine = _engine(noise_multiplier=3.0, noise=noise, physical_batch_size=2)
    x, y = torch.randn(5, 4), torch.arange(5) % 2
    engine.privatize(x, y)
    grads = [p.grad for p in engine.parameters.values()]
    if after == "clipped_sum":
        engine.clipped_sum(x, y)
    else:
        noise.broken = after == "failed noise"
        calls = iter([False, after == "failed loss", False])

        def failing(outputs, y):
            if next(calls):
                raise KeyboardInterrupt
            return odd_loss(outputs, y)

        engine.loss_fn = failing
        engine.isolation.enabled = False  # its calls of the loss would be counted, too
        with pytest.raises(KeyboardInterrupt):
            engine.privatize(x, y)
        assert engine.steps == 1 and not any(g.any() for g in grads)
    assert all(p.grad is None for p in engine.parameters.values())


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


def _released(engine: Engine, steps: int) -> torch.Tensor:
    """[steps, parameters] of standard normals: the noise of ``steps`` empty batches."""
    rows = []
    for _ in range(steps):
        engine.privatize(torch.zeros(0, 4), torch.zeros(0))
        rows.append(torch.cat([p.grad.flatten() for p in engine.parameters.values()]).double())
    return torch.stack(rows) * 4 / (engine.noise_multiplier * 0.5)


def test_noise_is_independent_across_parameters_steps_ranks_and_resumes():
    """1e5 values from two ranks, with a resume in the middle: normal, of variance one, uncorrelated in every direction.

    Each bound is five standard errors; a right generator misses one of them once in some 1e5 runs.
    """
    ranks = []
    for rank in (0, 1):
        before = _engine(noise_multiplier=3.0, noise=GaussianNoise(1, rank))
        first = _released(before, 450)
        after = _engine(noise_multiplier=3.0, noise=GaussianNoise())
        after.noise.load_state_dict(before.noise.state_dict())
        after.steps = before.steps
        ranks.append(torch.cat([first, _released(after, 450)]))
    drawn = torch.stack(ranks)
    assert drawn.unique().numel() > 0.99 * drawn.numel()
    assert stats.kstest(drawn.flatten(), "norm").pvalue > 1e-5
    count = drawn.numel()
    assert abs(float(drawn.mean())) < 5 / count**0.5
    assert abs(float(drawn.var()) - 1) < 5 * (2 / count) ** 0.5
    per_parameter = drawn.var(1)
    assert bool(((per_parameter - 1).abs() < 5 * (2 / 900) ** 0.5).all())
    pairs = {
        "ranks": (drawn[0], drawn[1]),
        "steps": (drawn[:, 1:], drawn[:, :-1]),
        "the two sides of the resume": (drawn[:, 450:], drawn[:, :450]),
        "neighbouring parameters": (drawn[:, :, 1:], drawn[:, :, :-1]),
        "layers": (drawn[:, :, :10], drawn[:, :, -10:]),
    }
    for name, (a, b) in pairs.items():
        correlation = float((a * b).mean()) * a.numel() ** 0.5
        assert abs(correlation) < 5, name
        # Independence is more than a correlation of zero: sizes must not be related either.
        sizes = float(((a**2 - 1) * (b**2 - 1)).mean()) / 2 * a.numel() ** 0.5
        assert abs(sizes) < 6, name


def test_a_resume_repeats_no_noise_and_skips_none():
    whole = _released(_engine(noise_multiplier=1.0), 6)
    first = _engine(noise_multiplier=1.0)
    start = _released(first, 3)
    resumed = _engine(noise_multiplier=1.0, noise=GaussianNoise())
    resumed.noise.load_state_dict(first.noise.state_dict())
    resumed.steps = first.steps
    assert torch.equal(torch.cat([start, _released(resumed, 3)]), whole)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_number_of_steps_that_was_set_back_is_refused(seed):
    """The noise hid one gradient, and would hide another one: their difference has none."""
    engine = _engine(noise_multiplier=1.0, noise=GaussianNoise(seed))
    _released(engine, 3)
    for number in (0, 2):
        engine.steps = number
        with pytest.raises(PrivacyError, match=f"This is step {number}, and step 2 of the same run was made"):
            _released(engine, 1)
    engine.steps = 3
    with pytest.raises(ValueError, match="mask"):  # an attempt that fails comes again under its number
        engine.step(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2))
    _released(engine, 1)


def test_an_optimizer_whose_number_of_steps_was_set_back_is_refused():
    module = GradSampleModule(nn.Linear(2, 1), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=None,
        generator=torch.Generator().manual_seed(3),
    )

    def step():
        optimizer.zero_grad()
        module(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    step()
    before = [p.clone() for p in module.parameters()]
    optimizer.steps = 0
    with pytest.raises(PrivacyError, match="steps was set back"):
        step()
    assert all(map(torch.equal, module.parameters(), before))
    optimizer.steps = 1
    step()


def test_a_chosen_seed_may_be_repeated_by_a_new_source_or_from_a_state():
    engine = _engine(noise_multiplier=1.0)
    state = engine.noise.state_dict()
    whole = _released(engine, 3)
    engine.noise.load_state_dict(state)
    engine.steps = 0
    assert torch.equal(_released(engine, 3), whole)
    engine.noise, engine.steps = GaussianNoise(int(state["seed"])), 0
    assert torch.equal(_released(engine, 3), whole)


def test_secure_noise_is_normal_fresh_and_independent():
    """It has no seed: a right generator misses one of these bounds once in 1e9 runs."""
    noise = SecureNoise()
    drawn = torch.stack([noise.add_(torch.zeros(100_000, dtype=torch.float64), 1.0, 0) for _ in range(2)])
    assert stats.kstest(drawn.flatten(), "norm").pvalue > 1e-10
    assert abs(float(drawn.var()) - 1) < 7 * (2 / drawn.numel()) ** 0.5
    for a, b in ((drawn[0], drawn[1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[:, :50_000], drawn[:, 50_000:])):
        assert abs(float((a * b).mean())) * a.numel() ** 0.5 < 7
    noise.load_state_dict(noise.state_dict())
    assert not torch.equal(noise.add_(torch.zeros(100), 1.0, 0), noise.add_(torch.zeros(100), 1.0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [0.37, 1e-4, 1e5])
def test_secure_releases_lie_on_one_grid_whatever_the_sum(dtype, std):
    """What Mironov's attack reads, the low bits, is the same for every sum: none."""
    spacing = grid_spacing(std)
    assert std / 2**21 < spacing <= std / 2**20
    for sum_ in (0.0, std / 3, std * math.pi):
        released = SecureNoise().add_(torch.full((40_000,), sum_, dtype=dtype), std, 0).double()
        assert torch.equal(released, (released / spacing).round() * spacing)
        assert float(released.std()) == pytest.approx(std, rel=0.03)
        assert float(released.mean()) == pytest.approx(sum_, abs=7 * std / 40_000**0.5)


def test_secure_noise_keeps_shape_layout_and_pieces(monkeypatch):
    monkeypatch.setattr("dpcore.noise._PIECE", 7)
    target = torch.full((3, 5), 100.0).t()
    released = SecureNoise().add_(target, 1e-3, 0)
    assert released is target
    torch.testing.assert_close(target, torch.full((5, 3), 100.0), atol=0.01, rtol=0)
    assert target.unique().numel() > 10
    assert torch.equal(SecureNoise().add_(torch.ones(3), 0.0, 0), torch.ones(3))
