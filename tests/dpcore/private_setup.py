"""A small private training run for tests of the two-line use."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine, reference

EXAMPLES = 60


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 3)).double()


def small_data(n: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, dtype=torch.float64, generator=generator), torch.arange(n) % 3)


def make(model: nn.Module | None = None, engine: PrivacyEngine | None = None, **options: Any) -> tuple[Any, ...]:
    """(engine, module, optimizer, loader) with sample rate 1/6 and divisor 10; σ = 0 and C = 0.5 unless told."""
    model = small_model() if model is None else model
    engine = PrivacyEngine(seed=7) if engine is None else engine
    settings = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        "data_loader": DataLoader(small_data(), batch_size=10),
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.5,
        "sample_rate": 1 / 6,
        "expected_batch_size": 10,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine, *engine.make_private(module=model, **(settings | options))


def whole_batch(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> tuple[Any, ...]:
    """(module, optimizer, loader), in ghost mode with the criterion, whose one batch holds every example; no noise."""
    settings = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=len(x)),
        "noise_multiplier": 0.0,
        "poisson_sampling": False,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="poisson_sampling=False")
        return PrivacyEngine().make_private(module=model, **(settings | options))


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One ordinary training step."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def truth(model: nn.Module, x: Tensor, y: Tensor, bound: float = 0.5) -> dict[str, Tensor]:
    """The clipped sum by the float64 reference, by name."""
    return reference.clipped_sum(copy.deepcopy(model), losses, x, y, bound).clipped
