"""Checks of ``ranks.py`` on sharded models alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine
from dpcore.noise import grid_spacing
from tests.dpcore.ranks import CLIP, WORLD, data, model, noted, private, refusal, sharding, step, weights


def rounded_in_mixed_precision(sigma: float) -> float:
    """Return the share of bfloat16 numbers in what a model with float32 shards that computes in bfloat16 releases."""
    _, module, optimizer, _ = private(sigma, torch.float32, how="narrow", check_batches=False)
    released: list[torch.Tensor] = []
    optimizer.scale_grad = partial(noted, released, optimizer, optimizer.scale_grad)
    x, y = data(torch.float32)[:8][:2]
    optimizer.zero_grad()
    F.cross_entropy(module(x).float(), y).backward()
    optimizer.step()
    assert released[0].dtype == torch.float32
    found = released[0][released[0] != 0]
    return float((found == found.bfloat16().float()).float().mean())


def moved_at_a_rate_of_0(of_private: bool) -> float:
    """Return how far a step goes at a rate that a schedule made 0: one of the private optimizer, or of the user's."""
    _, module, optimizer, _ = private(1.0, how="sharded", check_batches=False)
    x, y = data()[: dist.get_rank()][:2]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if of_private else optimizer.original_optimizer.inner, 1, 0.0)
    step(module, optimizer, x, y)
    before = weights(module)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    step(module, optimizer, x, y)
    return float((weights(module) - before).abs().max())


class Positions(nn.Module):
    """A layer at all positions; outputs [B, 2], the mean over positions with signs that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signs = 1.0 - 2.0 * (torch.arange(x.shape[1]) % 2)
        return (self.layer(x) * signs[:, None]).mean(1).unflatten(1, (2, 96)).mean(2)


def cancelling_inputs(length: int) -> torch.Tensor:
    """Return eight examples [8, length, 192] whose positions cancel more and more, one of them with huge numbers."""
    noise = torch.randn(8, length, 192, generator=torch.Generator().manual_seed(2))
    same = torch.randn(8, 1, 192, generator=torch.Generator().manual_seed(3))
    x = same + noise * torch.tensor([1.0, 0.3, 0.1, 1e-2, 1e-3, 1e-5, 1.0, 1.0])[:, None, None]
    x[6] *= 1e25
    return x


def extremes(length: int, how: str) -> torch.Tensor:
    """Return what a step moves on examples whose positions cancel more and more, one of them with huge numbers."""
    torch.manual_seed(0)
    module: nn.Module = Positions()
    start = weights(module)
    if how != "alone":
        fully_shard(module, **sharding(how))
    x = cancelling_inputs(length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private_module, optimizer, _ = PrivacyEngine(seed=7).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1e4),
            data_loader=DataLoader(TensorDataset(x), batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=0.01,
            expected_batch_size=1,
            check_batches=False,
        )
    mine = torch.arange(8)[slice(None) if how == "alone" else slice(dist.get_rank(), None, WORLD)]
    F.cross_entropy(private_module(x[mine]), mine % 2).backward()
    optimizer.step()
    return weights(module) - start


class Words(nn.Module):
    """A table in the unit that is left over for the root; weights that are used by way of what is computed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.last = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.places, self.scale, self.turned = nn.Embedding(5, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words) * self.places(torch.arange(5)) + self.places(torch.arange(5))
        x = self.layer(x.flatten(0, 1)).view_as(x) * (1 + self.scale)
        x = x.view(*words.shape, -1, 4).flip(2).reshape(*words.shape, -1)  # ambiguous where there are none
        return self.last((x @ (0.5 * self.turned.weight.t().tril()) + self.turned.bias).tanh().mean(1))


def of_words(how: str) -> torch.Tensor:
    """Return the weights behind two steps on words of which rank 0 has all: an empty share passes for a mask."""
    torch.manual_seed(0)
    module, words = Words(), torch.randint(2, 20, (6, 5))
    if how != "alone":
        for part in (module.layer, module.places, module):
            fully_shard(part, **sharding(how))
    private_module, optimizer, _ = PrivacyEngine(seed=7).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(words), batch_size=3),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        check_batches=False,
    )
    mine = words if how == "alone" or not dist.get_rank() else words[:0]
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(private_module(mine), mine[:, 0] % 3).backward()
        optimizer.step()
    return weights(module)


class Derived(nn.Module):
    """A layer whose weight is computed by ``way``."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.eye(3)), way
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.way(self.weight, self.frozen)


def _scaled_in_part(weight: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    scaled = weight.clone()
    scaled[:2].mul_(frozen[:2])
    return scaled


READ_BACK: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda weight, frozen: weight / weight.norm(),
    lambda weight, frozen: weight * frozen,
    _scaled_in_part,
]
"""Ways whose gradients read numbers of a parameter, which are gathered once more for the step."""


def of_derived(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], how: str) -> torch.Tensor:
    """Return the weights behind a step of a layer whose weight is computed by ``way``."""
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(Derived(way), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    if how != "alone":
        fully_shard(module, **sharding(how))
    private_module, optimizer, _ = PrivacyEngine(seed=7).make_private(
        module=module, optimizer=torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(x)), noise_multiplier=1.0, max_grad_norm=1.0,
        sample_rate=0.2, expected_batch_size=1, check_batches=False, loss_reduction="sum",
    )  # fmt: skip
    private_module(x[slice(None) if how == "alone" else slice(dist.get_rank(), None, WORLD)]).sum().backward()
    optimizer.step()
    return weights(module)


def refused_in_shards() -> dict[str, Any]:
    """What an ordinary gradient of a shard, noise without addresses and sums of a loop's own meet."""
    found = {}
    for name in ("ordinary", "no addresses", "own sums", "added"):
        _, module, optimizer, _ = private(1.0, how="sharded", check_batches=False)
        x, y = data()[:4][:2]
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if name == "ordinary":
            shard = next(module._module.module.parameters())
            shard.grad = torch.ones_like(shard)
        if name == "no addresses":
            optimizer.noise.version = 1
        if name == "own sums":
            for param in module.parameters():
                param.summed_grad = torch.ones(param.shape)
        if name == "added":
            extra = nn.Parameter(torch.zeros(2))
            extra.grad = torch.ones(2)
            optimizer.original_optimizer.inner.param_groups[0]["params"].append(extra)
        before = weights(module)
        found[name] = refusal(optimizer.step)
        assert torch.equal(weights(module), before)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        private(1.0, how="one group")
    found["one group"] = " ".join(str(one.message) for one in warned)
    return found


def released_securely(how: str) -> torch.Tensor:
    """Return what a step releases in secure mode, in units of the grid."""
    engine = PrivacyEngine(secure_mode=True)
    module: nn.Module = model()
    for layer in (module[4], module):  # type: ignore[index]
        fully_shard(layer, **sharding(how))
    module, optimizer, _ = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10), noise_multiplier=0.7, max_grad_norm=CLIP, check_batches=False,
    )  # fmt: skip
    released: list[torch.Tensor] = []
    optimizer.scale_grad = partial(noted, released, optimizer, optimizer.scale_grad)
    step(module, optimizer, *data()[:6][:2])
    return released[0] / grid_spacing(0.7 * CLIP)
