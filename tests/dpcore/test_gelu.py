"""The kernel of GELU's tanh form beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpcore import Engine, GradSampleModule, native
from dpcore.rules import gelu, pooling
from tests.dpcore.test_native import pytestmark  # noqa: F401


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lets the kernel take what a test can afford."""
    monkeypatch.setattr(pooling, "WORTH_A_KERNEL", 0)


@pytest.fixture
def calls(monkeypatch):
    """Lists the shapes that went through the kernel."""
    found, original = [], native.gelu
    monkeypatch.setattr(native, "gelu", lambda x: found.append(x.shape) or original(x))
    return found


def test_values_and_gradients_are_those_of_float64():
    x = torch.cat([torch.linspace(-13.0, 13.0, 4001), torch.tensor([0.0, -0.0, 1e-30, 50.0, -50.0, 1e6, -1e6])])
    weights = torch.randn(x.shape)
    found = []
    for input in (x, x.double()):
        input.requires_grad_()
        y = gelu._Gelu.apply(input) if input.dtype == torch.float32 else F.gelu(input, approximate="tanh")
        (y * weights).sum().backward()
        found.append((y.detach(), input.grad))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true.float(), rtol=3e-6, atol=3e-6)


def test_values_that_are_not_finite_are_torchs():
    x = torch.tensor([float("nan"), float("inf"), float("-inf")])
    torch.testing.assert_close(native.gelu(x), F.gelu(x, approximate="tanh"), equal_nan=True)
    ones = torch.ones(3)
    of_torch = torch.ops.aten.gelu_backward(ones, x, approximate="tanh")
    torch.testing.assert_close(native.gelu_grad(x, ones), of_torch, equal_nan=True)


def model(approximate="tanh"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.GELU(approximate), nn.Linear(33, 5))


def clipped_sum(net, x):
    y = torch.arange(len(x)) % 5
    return Engine(net, lambda z, y: F.cross_entropy(z, y, reduction="none")).clipped_sum(x, y)


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_clipped_sums_are_those_of_torchs_gelu(calls, turned):
    x = torch.randn(7, 4).t() if turned else torch.randn(4, 7)
    ours = clipped_sum(model(), x)
    assert torch.Size([4, 33]) in calls
    with native.disabled():
        torchs = clipped_sum(model(), x)
    for name, summed in ours.sums.items():
        torch.testing.assert_close(summed, torchs.sums[name], rtol=1e-5, atol=1e-6)


def test_what_the_kernel_does_not_compute_goes_through_torch(calls):
    clipped_sum(model("none"), torch.randn(4, 7))
    clipped_sum(model().double(), torch.randn(4, 7, dtype=torch.float64))
    wrapped = GradSampleModule(model())
    with torch.no_grad():
        wrapped(torch.randn(4, 7))
    wrapped.eval()(torch.randn(4, 7))
    assert calls == []


def test_gradients_of_gradients_and_many_at_once_are_torchs():
    found = []
    for function in (gelu._Gelu.apply, lambda x: F.gelu(x, approximate="tanh")):
        x = torch.linspace(-3.0, 3.0, 9).requires_grad_()
        (slopes,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (curves,) = torch.autograd.grad(slopes.sum(), x)
        many = torch.autograd.grad(function(x), x, torch.eye(9), is_grads_batched=True)[0]
        found.append((curves, many))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)
