"""The bounds of every fast path's error, and of what one example releases: exactness.py says what is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpcore import clipped_sum
from tests.dpcore.exactness import PATHS, Path, WeightedBag, aligned, measure

NORMS = 5e-7
SUMS = 1e-6
# Per degree: a gradient that is added up in float32 loses this much of what cancels.
FORMED = 3e-7

CASES = [pytest.param(p, d, id=f"{p.name}-{'random' if d is None else f'{d:g}'}") for p in PATHS for d in p.degrees]


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize(("path", "degree"), CASES)
def test_errors_are_bounded_and_no_example_releases_more_than_its_share(
    path: Path, degree: float | None, compiled: bool
) -> None:
    if path.compiled and not compiled:
        pytest.skip("no C++ compiler here to build the kernels with")
    errors = measure(path, degree)
    lost = FORMED * degree if path.formed and degree is not None else 0.0
    assert errors.overshoot <= 0.0
    assert errors.norms <= NORMS + lost
    assert errors.sum <= SUMS + lost


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, torch.ones_like(x))


def _bag_of(value: float) -> Tensor:
    return torch.stack([torch.arange(8.0), torch.full((8,), value)]).unsqueeze(0)


TINY: dict[str, tuple[Callable[[], nn.Module], Callable[[float], Tensor]]] = {
    "one position": (lambda: nn.Linear(64, 1, bias=False), lambda v: torch.full((1, 64), v)),
    "ghost norm": (lambda: nn.Linear(64, 48, bias=False), lambda v: torch.full((1, 2, 64), v)),
    "convolution": (lambda: nn.Conv2d(16, 32, 3, bias=False), lambda v: torch.full((1, 16, 4, 4), v)),
    "bag": (lambda: WeightedBag(9, 4), _bag_of),
    "bilinear": (Squared, lambda v: torch.full((1, 8), v)),
    "bilinear, ghost norm": (Squared, lambda v: torch.full((1, 2, 8), v)),
}


@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize(("inputs", "gradient"), [(2e-23, 1e18), (1e18, 2e-23), (3e-22, 1e17)])
def test_a_square_that_is_too_small_for_float32_does_not_hide_the_norm(
    case: str, inputs: float, gradient: float
) -> None:
    """|x|² |g|² is not small where only one of the two is."""
    make, data = TINY[case]
    model, x = make(), data(inputs)
    y = torch.full_like(model(x), gradient)
    sums = clipped_sum(model, aligned, x, y, 1e-6).sums
    assert 0.9e-6 < sum(float(s.double().square().sum()) for s in sums.values()) ** 0.5 <= 1e-6
