"""Norms by Gram matrices that are too large to be formed at once: by stripes of positions and by groups of examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcore import Engine, native
from dpcore.numerics import costs
from dpcore.numerics.rounding import SquaredNorm, gamma
from dpcore.rules import convolution, gram
from dpcore.rules.linear import add_contraction, contraction_norm_sq
from tests.dpcore.exactness import aligned

pytestmark = pytest.mark.filterwarnings("ignore:check_isolation=False")


@pytest.fixture(autouse=True)
def by_gram_matrices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The pure path, on a processor that the planner takes for one whose products cost nothing."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"planner": {"flops_per_kept_float": 1e9, "fewest_in_turn": 1e9}}))
    monkeypatch.setenv(costs.VARIABLE, str(path))
    with native.disabled():
        yield


@contextmanager
def limits(size: int, stripe: int = gram.STRIPE) -> Iterator[None]:
    with mock.patch.multiple(gram, CACHED_BYTES=size, STRIPE=stripe):
        yield


def rows(shape: tuple[int, ...], seed: int, apart: float) -> Tensor:
    """Positions that have a direction in common, and something of their own."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn((shape[0], 1, shape[2]), generator=generator)
    return common + apart * torch.randn(shape, generator=generator)


def norms(g: Tensor, x: Tensor) -> SquaredNorm:
    with native.disabled():
        return contraction_norm_sq(g, x)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9000),
    st.integers(1, 50),
    st.integers(0, 10**6),
    st.floats(0, 3),
)
def test_blocks_keep_to_the_bound_of_whole_matrices(
    batch: int, steps: int, p: int, d: int, size: int, stripe: int, seed: int, apart: float
) -> None:
    """Beside float64, at every remainder of positions and examples."""
    x, g = rows((batch, steps, p), seed, apart), rows((batch, steps, d), seed + 1, apart)
    whole = norms(g, x)
    with limits(size, stripe):
        found = norms(g, x)
    assert found.error == whole.error and found.value.dtype == whole.value.dtype == torch.float64
    assert whole.scale is not None and found.scale is not None
    torch.testing.assert_close(found.scale, whole.scale, rtol=1e-5, atol=0.0)
    true = torch.bmm(g.double().transpose(1, 2), x.double()).square().sum((1, 2))
    assert bool(((found.value - true).abs() <= found.error * found.scale).all())
    upper = (found.value + found.error * found.scale) * (1.0 + gamma(8, torch.float32))
    assert bool((true <= upper).all())
    for i in range(batch):
        added = torch.zeros(d, p)
        with native.disabled():
            add_contraction(g, x, torch.eye(batch)[i], added)
        assert float(added.double().square().sum()) <= float(upper[i])


def test_what_fits_is_formed_at_once_as_before() -> None:
    x, g = torch.randn(3, 20, 7), torch.randn(3, 20, 9)
    found, expected = norms(g, x), gram.matrices_norm_sq(x @ x.transpose(1, 2), g @ g.transpose(1, 2), 16)
    assert torch.equal(found.value, expected.value) and found.error == expected.error
    assert found.scale is not None and expected.scale is not None and torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("at", [0, 1, 2, 29])
def test_an_overflow_or_an_infinite_row_in_any_stripe_is_its_own_example_s_alone(at: int) -> None:
    """float64 has to take it, in whichever block it is found."""
    x, g = rows((3, 30, 6), 1, 0.1), rows((3, 30, 6), 2, 0.1)
    x[1, at] *= 1e25
    with limits(512, 4):
        found = norms(g, x)
    assert found.value.isinf().tolist() == [False, True, False]
    x[1, at] = torch.nan
    with limits(512, 4):
        found = norms(g, x)
    assert found.value.isfinite().tolist() == [True, False, True]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator has made."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found = max(self.found, result.nbytes)
        return result


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return Engine(model, aligned, max_grad_norm=0.5, check_isolation=False).clipped_sum(x, y)


@pytest.mark.parametrize(("examples", "steps"), [(1, 2000), (300, 100)])
def test_no_tensor_of_a_step_is_as_large_as_the_matrices(examples: int, steps: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 8, bias=False), rows((examples, steps, 16), 1, 0.1)
    y = rows((examples, steps, 8), 2, 0.1)
    whole = 4 * examples * steps**2
    with limits(whole), Largest() as before:
        expected = clipped(model, x, y)
    with Largest() as largest:
        found = clipped(model, x, y)
    assert before.found > 0.9 * whole  # the first examples are probed by themselves
    assert largest.found <= max(gram.CACHED_BYTES, x.nbytes) < whole / 2
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found.sums["weight"], expected.sums["weight"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("examples", [1, 2])
def test_a_single_sequence_beyond_the_limit(examples: int) -> None:
    """It has stripes of fewer positions."""
    x, g = rows((examples, 1000, 2), 1, 0.1), rows((examples, 1000, 3), 2, 0.1)
    with limits(9 * 4 * 1000), Largest() as largest:
        found = norms(g, x)
    assert largest.found <= 9 * 4 * 1000
    true = torch.bmm(g.double().transpose(1, 2), x.double()).square().sum((1, 2))
    torch.testing.assert_close(found.value, true, rtol=1e-5, atol=0.0)


class Pair(nn.Module):
    """A bilinear layer of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.tanh())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bilinear": (Pair, (7, 23, 8)),
    "convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), (7, 64, 4, 4)),
    "convolution with strides": (lambda: nn.Conv1d(64, 64, 5, stride=2, dilation=2, bias=False), (7, 64, 20)),
    "convolution in groups": (lambda: nn.Conv2d(64, 64, 3, groups=2, padding=1, bias=False), (7, 64, 4, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_other_layers_by_blocks(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(costs.VARIABLE)
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    model, x = make(), 1.0 + 0.1 * torch.randn(shape)
    y = 1.0 + 0.1 * torch.randn_like(model(x))
    formed: list[int] = []

    def watched(*rows: Tensor, of: Callable[..., Tensor] = gram.gram) -> Tensor:
        matrix = of(*rows)
        formed.append(matrix.nbytes)
        return matrix

    monkeypatch.setattr(gram, "gram", watched)
    monkeypatch.setattr(convolution, "gram", watched)
    whole = clipped(model, x, y)
    largest = max(formed)
    formed.clear()
    with limits(largest // 3, 6):
        found = clipped(model, x, y)
    assert max(formed) <= largest // 3
    expected = clipped(model.double(), x.double(), y.double())
    for other in (whole, expected):
        torch.testing.assert_close(found.norms.double(), other.norms.double(), rtol=1e-4, atol=0.0)
    for name, total in found.sums.items():
        torch.testing.assert_close(total.double(), expected.sums[name], rtol=1e-4, atol=1e-6)
