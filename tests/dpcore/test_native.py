"""The compiled kernels against the float64 truth and against their pure torch twins."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.grad import conv2d_weight

from dpcore import Engine, native
from dpcore.functional import clipped_sum
from tests.dpcore.comparison import check, odd_loss, relative_error

LAST = torch.channels_last

pytestmark = pytest.mark.skipif(
    not any(shutil.which(c) for c in native.COMPILERS), reason="no C++ compiler here to build the kernels with"
)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """The kernels, built into a cache of their own and in use for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("DPCORE_NATIVE")
        native.reload()
        assert not native.available()
        native.build()
        assert native.available()
        yield
    native.reload()


def _count(monkeypatch, name):
    calls = []
    kernel = getattr(native, name)
    monkeypatch.setattr(native, name, lambda *args: calls.append(name) or kernel(*args))
    return calls


class Recurrent(nn.Module):
    """x [B, T, p] -> [B, T, H or 2H]; a linear layer before it, so that the gradient at the input matters."""

    def __init__(self, features, hidden, bidirectional):
        super().__init__()
        self.first = nn.Linear(features, features)
        self.lstm = nn.LSTM(features, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        return self.lstm(self.first(x))[0]


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 40), st.booleans(), st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_the_lstm_loop_equals_float64_for_all_heights_and_widths(batch, steps, hidden, bidirectional, seed):
    torch.manual_seed(seed)
    model, x = Recurrent(3, hidden, bidirectional), torch.randn(batch, steps, 3)
    check(model, x, torch.arange(batch) % 3, clipped_sum)


@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 40),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_the_convolution_equals_float64_for_all_channels_kernels_strides_and_paddings(
    batch, channels, out_channels, kernel, stride, padding, seed
):
    torch.manual_seed(seed)
    x = torch.randn(batch, channels, 7, 6).to(memory_format=LAST)
    weight = torch.zeros(out_channels, channels, *kernel, dtype=torch.float64)
    grad = torch.randn_like(nn.functional.conv2d(x, weight.float(), None, stride, padding))
    found = native.conv2d_grad_sample(x, grad, kernel, stride, padding)
    for i in range(batch):
        truth = conv2d_weight(x[i : i + 1].double(), weight.shape, grad[i : i + 1].double(), stride, padding)
        assert (found[i] - truth).norm() < 1e-5 * truth.norm() + 1e-12


def test_both_kernels_are_in_use_and_do_what_their_twins_do(monkeypatch):
    convolutions, forward, backward = (
        _count(monkeypatch, name) for name in ("conv2d_grad_sample", "lstm_forward", "lstm_backward")
    )
    torch.manual_seed(1)
    for model, x in (
        (nn.Conv2d(3, 20, 5, 2, 1).to(memory_format=LAST), torch.randn(9, 3, 12, 12)),
        (Recurrent(6, 33, True), torch.randn(9, 8, 6)),
    ):
        y = torch.arange(9) % 3
        fast = clipped_sum(model, odd_loss, x, y, 0.5)
        with native.disabled():
            assert not native.available()
            slow = clipped_sum(model, odd_loss, x, y, 0.5)
        assert relative_error(fast.sums, slow.sums) < 2e-6
        torch.testing.assert_close(fast.norms, slow.norms, rtol=2e-6, atol=0)
    assert convolutions and forward and len(backward) == 2


def test_large_pre_activations_saturate_and_nan_stays_nan():
    torch.manual_seed(2)
    model = Recurrent(3, 5, False)
    x = torch.randn(4, 3, 3)
    x[1] *= 1e4
    x[2, 1, 0] = float("nan")
    result = clipped_sum(model, odd_loss, x, torch.zeros(4), 1.0)
    with native.disabled():
        twin = clipped_sum(model, odd_loss, x, torch.zeros(4), 1.0)
    assert result.nonfinite == twin.nonfinite == 1
    torch.testing.assert_close(result.norms, twin.norms, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert relative_error(result.sums, twin.sums) < 1e-5


def test_threads_do_not_change_a_bit():
    torch.manual_seed(3)
    weight, x, grad = torch.randn(80, 20) * 0.1, torch.randn(13, 3, 8, 8), torch.randn(13, 9, 6, 6)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            z = torch.linspace(-3.0, 3.0, 5 * 13 * 80).view(5, 13, 80)
            gates, tanh_c = torch.empty(5, 13, 80), torch.empty(5, 13, 20)
            h, c = torch.zeros(6, 13, 20), torch.zeros(6, 13, 20)
            native.lstm_forward(z, weight, gates, h, c, tanh_c, False)
            grads = native.lstm_backward(gates, c, tanh_c, weight, h[1:], c[0], False)
            samples = native.conv2d_grad_sample(x, grad, (3, 3), (1, 1), (0, 0))
            found.append((gates, tanh_c, h, c, *grads, samples))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


def test_other_dtypes_and_forms_take_the_pure_path(monkeypatch):
    calls = _count(monkeypatch, "conv2d_grad_sample")
    torch.manual_seed(4)
    for layer, dtype in (
        (nn.Conv2d(4, 8, 3, groups=2), torch.float32),
        (nn.Conv2d(4, 8, 3, dilation=2), torch.float32),
        (nn.Conv2d(4, 8, 3), torch.float64),
    ):
        x = torch.randn(3, 4, 6, 6, dtype=dtype)
        check(layer.to(dtype=dtype, memory_format=LAST), x, torch.arange(3), clipped_sum)
    assert not calls


def test_an_engine_says_whether_kernels_are_in_use():
    engine = Engine(nn.Linear(2, 1), odd_loss, max_grad_norm=1.0)
    assert "compiled kernels: in use" in engine.explain()
    with native.disabled():
        assert "python -m dpcore.native" in engine.explain()


def test_without_a_compiler_the_build_says_so_and_nothing_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.reload()
    try:
        with pytest.raises(native.NativeBuildError, match="No C\\+\\+ compiler"):
            native.build()
        assert not native.available() and not list(tmp_path.iterdir())
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(native.NativeBuildError, match="failed"):
            native.build()
        assert not native.path().exists()
    finally:
        monkeypatch.undo()
        native.reload()
    assert native.available()
