"""Checks of ``ranks.py`` on sharded layers whose gradients by example need whole parameters once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.noise import GaussianNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.ranks import CLIP, DIVISOR, RATE, data, noted, refusal, sharding, step, ways, weights

STEPS, SIGMA = 3, 0.5


class Attention(nn.Module):
    """T5's: scores with a table of relative positions, which the first block looks up and hands on."""

    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.heads = nn.Linear(6, 18, bias=False)
        self.table = nn.Embedding(11, 2) if has_table else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            places = torch.arange(6)
            bias = self.table(places - places[:, None] + 5).permute(2, 0, 1).unsqueeze(0)  # type: ignore[misc]
        q, k, v = self.heads(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        found = (q @ k.mT + bias).softmax(-1) @ v
        return x + found.transpose(1, 2).flatten(2), bias


class Centres(nn.Module):
    """Distances from points, an operation without a rule; with ``draws`` of random numbers, which change nothing."""

    def __init__(self, draws: bool = False, inner: nn.Module | None = None, mixes: bool = False) -> None:
        super().__init__()
        self.centres, self.shift = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6), requires_grad=False)
        self.draws, self.inner, self.mixes = draws, inner or nn.Identity(), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) / (len(x) if self.mixes else 1)
        return torch.cdist(x, self.centres) * self.shift + (0 * torch.rand(()) if self.draws else 0)


class Dora(nn.Module):
    """A frozen weight with a change of low rank, normalised, and scaled by a trained magnitude."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.magnitude = nn.Parameter(torch.rand(6, 1) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.frozen.weight + self.up @ self.down
        return F.linear(x, self.magnitude * weight / weight.norm(dim=1, keepdim=True), self.frozen.bias)


class Layers(nn.Module):
    """One layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(True), Attention(False)
        self.rest = nn.Sequential(Centres(), Centres(draws=True), Dora(), weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.first(x.flatten(1, 2))
        x, _ = self.second(x, bias)
        return self.rest(x).mean(1)  # type: ignore[no-any-return]


def held(how: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = Layers().to(dtype)
    if how != "alone":
        for part in (module.first, module.second, *module.rest, module):
            fully_shard(part, **sharding(how))
    return module


def private(module: nn.Module, sigma: float, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, ...]:
    return PrivacyEngine(seed=7).make_private(
        module=module,
        optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5, momentum=0.5),
        data_loader=DataLoader(data(dtype), batch_size=10),
        noise_multiplier=sigma,
        max_grad_norm=CLIP,
        sample_rate=RATE,
        expected_batch_size=DIVISOR,
        **options,
    )


def trained(how: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Return the weights after every step, in pieces of at most ``size`` examples."""
    module = held(how, dtype)
    history = [weights(module)]
    module, optimizer, loader = private(module, SIGMA, dtype)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as pieces:
        for x, y, _ in pieces:
            before = optimizer.steps
            step(module, optimizer, x, y)
            if optimizer.steps > before:
                history.append(weights(module))
            if optimizer.steps == STEPS:
                break
    return torch.stack(history)


def noise_is_of_one_process(how: str) -> bool:
    module, optimizer, _ = private(held(how), 1.0, check_batches=False)
    released: list[torch.Tensor] = []
    optimizer.scale_grad = lambda divide=optimizer.scale_grad: noted(released, optimizer, divide)
    step(module, optimizer, *data()[:0][:2])
    return torch.equal(released[0], GaussianNoise(7).add_(torch.zeros_like(released[0]), CLIP, 0))


def refused(layer: Callable[[], nn.Module]) -> str:
    """Return what a sharded ``layer`` meets, whose inner one is a unit by itself."""
    module: nn.Module = nn.Sequential(layer(), nn.Linear(6, 3)).double()
    inner = module[0].inner  # type: ignore[index,union-attr]
    for part in (*([inner] if [*inner.parameters()] else []), module[0], module):  # type: ignore[index]
        fully_shard(part, **sharding("sharded"))
    private_module, _, _ = private(module, 1.0)
    return refusal(lambda: private_module(data()[:4][0].flatten(1, 2)))


def found() -> dict[str, Any]:
    """Return how far from one process the ways to hold the model end, as a part of the way travelled."""
    distances = {}
    for dtype, sizes in ((torch.float64, {"sharded": 2, "hybrid": 3}), (torch.float32, {"sharded": 40})):
        alone = trained("alone", dtype, size=40)
        moved = (alone[1:] - alone[0]).norm(dim=1)
        for how in ways()[1:]:
            if how in sizes:
                apart = (trained(how, dtype, sizes[how])[1:] - alone[1:]).norm(dim=1)
                distances[f"{how}, {dtype}"] = float((apart / moved).max())
    return {
        "distances": distances,
        "noise": noise_is_of_one_process("sharded"),
        "unit within": refused(lambda: Centres(inner=nn.Linear(6, 6))),
        "mixes": refused(lambda: Centres(mixes=True)),
    }
