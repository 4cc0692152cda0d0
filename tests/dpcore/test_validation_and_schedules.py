"""The dynamic probe and the schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpcore import GradSampleModule, PrivacyError
from dpcore.accountants import PLDAccountant
from dpcore.optimizers import DPOptimizer
from dpcore.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from dpcore.validators import check_isolation


class Centred(nn.Module):
    """Mixes examples, and is in no list of classes."""

    def forward(self, x):
        return x - x.mean(0)


class Counting(nn.Module):
    """Treats examples apart, but keeps their sum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += x.sum(0)
        return x


def test_the_probe_names_the_layer_that_mixes_examples():
    x = torch.randn(4, 3)
    with pytest.raises(PrivacyError, match=r"1 \(Centred\)"):
        check_isolation(nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2)), x)
    with pytest.raises(PrivacyError, match="BatchNorm1d"):
        check_isolation(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), x)
    counting = Counting()
    with pytest.raises(PrivacyError, match="buffer total"):
        check_isolation(counting, x)
    assert not counting.total.any()


def test_the_probe_lets_sound_modules_pass_and_leaves_them_alone():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Dropout(0.5), nn.LayerNorm(12), nn.Linear(12, 2))
    ids = torch.randint(0, 7, (4, 3))
    before = torch.get_rng_state()
    check_isolation(model, ids)
    assert torch.equal(before, torch.get_rng_state())
    check_isolation(nn.LSTM(3, 2, batch_first=True), torch.randn(4, 5, 3))
    check_isolation(nn.Bilinear(3, 3, 2), torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match="at least 2"):
        check_isolation(nn.Linear(3, 2), torch.randn(1, 3))


def _optimizer(clip=2.0) -> DPOptimizer:
    model = nn.Linear(3, 2)
    return DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=GradSampleModule(model),
        noise_multiplier=4.0,
        max_grad_norm=clip,
        expected_batch_size=4,
    )


@pytest.mark.parametrize(
    ("make", "attribute", "values"),
    [
        (lambda o: ExponentialNoise(o, gamma=0.5), "noise_multiplier", [4, 2, 1, 0.5]),
        (lambda o: StepNoise(o, step_size=2, gamma=0.5), "noise_multiplier", [4, 4, 2, 2]),
        (lambda o: LambdaNoise(o, noise_lambda=lambda k: 1 + k), "noise_multiplier", [4, 8, 12, 16]),
        (lambda o: ExponentialGradClip(o, gamma=0.5), "max_grad_norm", [2, 1, 0.5, 0.25]),
        (lambda o: StepGradClip(o, step_size=3, gamma=0.5), "max_grad_norm", [2, 2, 2, 1]),
        (lambda o: LambdaGradClip(o, scheduler_function=lambda k: 1 / (1 + k)), "max_grad_norm", [2, 1, 2 / 3, 0.5]),
    ],
)
def test_schedules(make, attribute, values):
    optimizer = _optimizer()
    scheduler = make(optimizer)
    seen = []
    for _ in values:
        seen.append(getattr(optimizer, attribute))
        scheduler.step()
    assert seen == pytest.approx(values)
    other = _optimizer()
    resumed = make(other)
    resumed.load_state_dict(scheduler.state_dict())
    assert getattr(other, attribute) == getattr(optimizer, attribute)


def test_the_accountant_and_the_clipping_follow_the_schedule():
    optimizer = _optimizer([0.3, 0.4])
    accountant = PLDAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(0.1))
    noise, clip = ExponentialNoise(optimizer, gamma=0.5), ExponentialGradClip(optimizer, gamma=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (100 * optimizer.module(torch.randn(4, 3))).square().mean().backward()
        optimizer.clip_and_accumulate()
        bounds = optimizer.max_grad_norm
        sums = [float(p.summed_grad.norm()) for p in optimizer.module.parameters()]
        assert all(0 < s <= 4 * c for s, c in zip(sums, bounds, strict=True))
        optimizer.discard()
        optimizer.module(torch.zeros(0, 3)).sum().backward()
        optimizer.step()
        noise.step()
        clip.step()
    assert accountant.history == [(4.0, 0.1, 1), (2.0, 0.1, 1)]
    assert optimizer.max_grad_norm == pytest.approx([0.003, 0.004])
    with pytest.raises(ValueError, match="must be above 0"):
        LambdaNoise(optimizer, noise_lambda=lambda k: 0.0)
