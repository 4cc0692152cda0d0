"""Max-pooling by the kernel is torch's, to the last bit: values, places of equal numbers and NaN, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpcore import Engine, native, reference
from dpcore.rules import pooling
from dpcore.rules.pooling import _ByKernel, _outputs, _places
from tests.dpcore.comparison import relative_error
from tests.dpcore.test_native import pytestmark  # noqa: F401

few = st.integers(1, 3)


@settings(max_examples=80)
@given(
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    kernel=st.tuples(few, few),
    stride=st.tuples(few, few),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    ceil_mode=st.booleans(),
    special=st.sampled_from([None, math.nan, -math.inf]),
    threads=st.sampled_from([1, 2]),
    channels=st.sampled_from([1, 3, 16, 21]),
    layout=st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_the_kernel_is_torchs(sides, kernel, stride, padding, ceil_mode, special, threads, channels, layout):
    assume(all(2 * p <= k for p, k in zip(padding, kernel, strict=True)))
    assume(all(s + 2 * p >= k for s, p, k in zip(sides, padding, kernel, strict=True)))
    torch.manual_seed(sides[0])
    x = torch.randint(-3, 4, (2, channels, *sides)).float()  # many are equal
    if special is not None:
        x[x < 1] = special
    x = x.contiguous(memory_format=layout).requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, places = F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode, True)
        window = (*kernel, *stride, *padding)
        size = [_outputs(*of, 1, ceil_mode) for of in zip(sides, kernel, stride, padding, strict=True)]
        assert size == [*expected.shape[-2:]]
        found = _ByKernel.apply(x, window, size)
        grad = torch.randn(expected.shape)
        assert found.is_contiguous(memory_format=layout), "what comes next is as fast as behind torch's"
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(
            _places(native.max_pool(x.detach(), window, expected.shape[-2:])[1], x.shape, window), places
        )
        (true,) = torch.autograd.grad(expected, x, grad)
        (ours,) = torch.autograd.grad(found, x, grad, retain_graph=True)
        assert torch.equal(ours, true) and ours.is_contiguous(memory_format=layout)
        (again,) = torch.autograd.grad(found, x, grad.requires_grad_(), create_graph=True)
        torch.testing.assert_close(again, true)
        torch.testing.assert_close(torch.autograd.grad(again.sum(), grad)[0], torch.ones_like(grad))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(2, 1), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2)]
)
def test_a_network_with_it_has_the_exact_clipped_sum(monkeypatch, layer):
    monkeypatch.setattr(pooling, "WORTH_A_KERNEL", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), layer, nn.Conv2d(3, 4, 2), layer, nn.Flatten(), nn.LazyLinear(5)
    )
    x, y = torch.randn(7, 1, 19, 17), torch.arange(7) % 5
    model(x)
    loss = nn.CrossEntropyLoss(reduction="none")
    found = Engine(model, loss, max_grad_norm=0.5).clipped_sum(x, y)
    true = reference.clipped_sum(model, loss, x, y, 0.5)
    assert relative_error(found.sums, true.clipped) < 1e-5


def test_the_step_keeps_a_byte_for_an_output(monkeypatch):
    kept = []
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 256, 2))
    engine = Engine(model, nn.CrossEntropyLoss(reduction="none"), check_isolation=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        engine.clipped_sum(x.detach(), torch.zeros(8, dtype=torch.int64))
    assert any(t.dtype == torch.uint8 for t in kept)
    assert not [t for t in kept if t.dtype == torch.int64 and t.shape == (8, 16, 16, 16)]


def test_the_users_default_device_is_not_the_kernels(monkeypatch):
    monkeypatch.setattr(pooling, "WORTH_A_KERNEL", 0)
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    places = _places(native.max_pool(x.detach(), (2, 2, 1, 1, 0, 0), [8, 8])[1], x.shape, (2, 2, 1, 1, 0, 0))
    with torch.device("meta"):
        codes = native.max_pool(x.detach(), (2, 2, 1, 1, 0, 0), [8, 8])[1]
        assert codes.device == x.device and torch.equal(_places(codes, x.shape, (2, 2, 1, 1, 0, 0)), places)
