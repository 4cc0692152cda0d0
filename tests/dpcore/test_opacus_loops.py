"""Loops that were written for Opacus and change ``p.grad`` before the step, which releases a sum of its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.opacus_names.alias import installed
from dpcore.optimizers import DPOptimizer

pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")


def _private(net: nn.Module) -> tuple[Any, Any]:
    from opacus.grad_sample.utils import prepare_module
    from opacus.optimizers import DPOptimizer as Private

    recorder = prepare_module(net, grad_sample_mode="hooks", wrap_model=False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return recorder, Private(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)


def _clips_before_steps() -> list[torch.Tensor]:
    """Train as transformers' Trainer does, which clips p.grad before the last piece of a batch is stepped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    recorder, optimizer = _private(net)
    for _ in range(3):
        for goes_on in (True, False):
            net(torch.randn(6, 4)).square().sum(1).mean().backward()
            optimizer.signal_skip_step(goes_on)
            nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    recorder.cleanup()
    return [p.detach() for p in net.parameters()]


def test_clipped_gradients_are_replaced_as_opacus_does():
    theirs = _clips_before_steps()
    with installed(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = _clips_before_steps()
    torch.testing.assert_close(ours, theirs)
    assert len([one for one in told if "That has no effect: step() replaces it" in str(one.message)]) == 1


class Scaled(nn.Linear):
    """A layer with a parameter of one number."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


CHANGES = {
    "values clipped": lambda net: nn.utils.clip_grad_value_(net.parameters(), 1e-2),
    "a penalty": lambda net: (0.01 * net.weight.square().sum()).backward(),
    "another number for each": lambda net: [p.grad.mul_(0.5 + 0.1 * p.dim()) for p in net.parameters()],
    "enlarged": lambda net: [p.grad.mul_(2.0) for p in net.parameters()],
    "zeroed": lambda net: [p.grad.zero_() for p in net.parameters()],
    "one number": lambda net: net.factor.grad.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_that_were_changed_otherwise_are_refused(change):
    with installed():
        net = Scaled()
        _, optimizer = _private(net)
        net(torch.randn(6, 4)).square().sum(1).mean().backward()
        change(net)
        with pytest.raises(PrivacyError, match="changed by hand"):
            optimizer.step()


def test_an_empty_batch_has_a_loss_that_can_be_scaled_in_place():
    """transformers' Trainer does so with the loss that its model returns."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    with installed():
        _, optimizer = _private(net)
        before = net.weight.detach().clone()
        loss = net(torch.randn(0, 4))
        loss *= 2.0
        loss.sum().backward()
        optimizer.step()
        assert optimizer.steps == 1 and torch.equal(net.weight, before)


@pytest.mark.parametrize("name", ["grad_samples", "params", "_get_flat_grad_sample"])
def test_what_only_opacus_clipping_reads_is_refused_by_name(name):
    with installed():
        with pytest.raises(UnsupportedError, match=f"Mine overrides {name}, from which"):
            type("Mine", (DPOptimizer,), {name: None})
        type("Mine", (DPOptimizer,), {name: None, "clip_and_accumulate": lambda self: None})
    type("Mine", (DPOptimizer,), {name: None})
