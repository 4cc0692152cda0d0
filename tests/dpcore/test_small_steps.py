"""Steps of small models, of whose time Python takes a good part: how many functions run, and what was made shorter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpcore
from dpcore import Engine, GaussianNoise, reference
from dpcore.clipping import clip_factors
from dpcore.grad_sample import GradSampleModule
from dpcore.native.parts import clip_factors as by_kernel
from dpcore.optimizers import DPOptimizer
from tests.dpcore.comparison import relative_error
from tests.dpcore.test_native import pytestmark  # noqa: F401

HERE = str(Path(dpcore.__file__).parent)
LOSS = nn.CrossEntropyLoss(reduction="none")


def calls_of_dpcore(run: Callable[[], object]) -> int:
    """How many of dpcore's own functions, with their comprehensions, a call runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HERE)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def network() -> nn.Module:
    torch.manual_seed(0)
    features = nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*features, nn.Linear(8 * 16, 16), nn.ReLU(), nn.Linear(16, 10))
    return model.to(memory_format=torch.channels_last)


def engine_step(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise = GaussianNoise(1)
    return Engine(model, LOSS, noise_multiplier=1.0, expected_batch_size=8, optimizer=optimizer, noise=noise).step


def loop_step(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    wrapped = GradSampleModule(model, ordinary_grad=False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=8,
        noise=GaussianNoise(1),
    )

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        LOSS(wrapped(x), y).mean().backward()
        optimizer.step()

    return step


def calls_of_a_step(make: Callable[[nn.Module], Callable[[Tensor, Tensor], object]]) -> int:
    """The fewest calls of five steps, behind the looks and experiments of the first ones."""
    step = make(network())
    x, y = torch.randn(8, 1, 16, 16), torch.arange(8)
    for _ in range(12):
        step(x, y)
    return min(calls_of_dpcore(lambda: step(x, y)) for _ in range(5))


@pytest.mark.parametrize(("name", "most"), [("engine_step", 440), ("loop_step", 710)])
def test_a_step_of_a_small_network_runs_few_functions(name, most):
    # In a process of its own: what other tests have left alive is asked about in every step.
    code = f"from tests.dpcore import test_small_steps as t; print(t.calls_of_a_step(t.{name}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(HERE).parent, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= most


class _Tied(nn.Module):
    """Two layers of one shape, of which the first may take the place of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied = False

    def forward(self, x: Tensor) -> Tensor:
        return (self.first if self.tied else self.second)(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def test_choices_are_remembered_by_which_uses_share_a_parameter():
    """A layer that is used twice has cross terms, which norms by the single uses' shapes would leave out."""
    torch.manual_seed(0)
    model = _Tied()
    engine = Engine(model, LOSS, max_grad_norm=0.1, check_isolation=False)
    for tied in (False, True, False, True):
        model.tied = tied
        x, y = 3.0 * torch.randn(9, 6), torch.arange(9) % 6
        found, true = engine.clipped_sum(x, y), reference.clipped_sum(model, LOSS, x, y, 0.1)
        assert relative_error(found.sums, true.clipped) < 1e-5


def test_factors_by_the_kernel_have_the_bits_of_torchs():
    special = torch.tensor([0.0, math.inf, math.nan, 1e-45, 1e-38, 3e38])
    norms = torch.cat([3.0 * torch.rand(10_000), special]).unsqueeze(0)
    for part, below in ((norms, False), (norms[:, :17], True)):
        factors, scaled, all_below = by_kernel(part.contiguous(), 0.99, 1 / 15)
        assert torch.equal(factors[0], clip_factors(part[0], 0.99)) and torch.equal(scaled, factors * (1 / 15))
        assert all_below == below


def test_noise_in_one_draw_is_that_of_each_parameters_addresses():
    """A channels-last kernel lies in memory in another order than its noise is numbered."""
    model, noise = network(), GaussianNoise(3)
    engine = Engine(model, LOSS, noise_multiplier=2.0, expected_batch_size=1, noise=noise)
    engine.privatize(torch.randn(0, 1, 16, 16), torch.arange(0))
    start = 0
    for param in model.parameters():
        expected = torch.empty(param.shape)
        GaussianNoise(3).fill_(expected, 2.0, 0, start)
        assert param.grad is not None and torch.equal(param.grad, expected)
        start += param.numel()
