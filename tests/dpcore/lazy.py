"""A model with two tables, and engines that train it, for the tests of lazy tables."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F

from dpcore import Engine, GaussianNoise
from dpcore.lazy_tables import LazyEngine

ROWS, WIDTH, DIVISOR = 50, 8, 6


class Model(nn.Module):
    """A dense part, and a table of each kind."""

    def __init__(self, kind="embedding", rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.kind = kind
        if kind in ("embedding", "padded"):
            self.items = nn.Embedding(rows, WIDTH, padding_idx=3 if kind == "padded" else None)
        else:
            self.items = nn.EmbeddingBag(rows, WIDTH, mode="mean" if kind == "mean" else "sum")
        self.users = nn.Embedding(20, 2)
        self.out = nn.Linear(WIDTH + 4 + 2, 2)

    def forward(self, ids, x, users):
        if self.kind in ("embedding", "padded"):
            items = self.items(ids).mean(1)
        elif self.kind == "weights":
            items = self.items(ids, per_sample_weights=torch.cos(ids.float()))
        else:
            items = self.items(ids)
        return self.out(torch.cat([items, torch.tanh(self.first(x)), self.users(users)], 1))


def losses(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def engine(model, *, lazy=("items", "users"), decay=0.0, momentum=0.0, lr=0.3, seed=5, **options):
    usual = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay, momentum=momentum)
    optimizer = options.pop("optimizer", None) or usual
    given = {"noise": GaussianNoise(seed), "max_grad_norm": 0.7, "noise_multiplier": 1.1}
    given |= {"expected_batch_size": DIVISOR, "physical_batch_size": 4, "check_isolation": False}
    given |= {"optimizer": optimizer} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LazyEngine(model, losses, tables=lazy, **given) if lazy else Engine(model, losses, **given)


def batch(chance, size=None, rows=ROWS):
    size = int(torch.randint(0, 8, (), generator=chance)) if size is None else size
    ids = torch.randint(0, rows, (size, 3), generator=chance)
    users = torch.randint(0, 20, (size,), generator=chance)
    return (ids, torch.randn(size, 3, generator=chance), users), torch.randint(0, 2, (size,), generator=chance)


def train(one, steps=12, seed=1, lr=0.3):
    chance = torch.Generator().manual_seed(seed)
    for step in range(steps):
        one.optimizer.param_groups[0]["lr"] = lr / (1 + step)
        one.step(*batch(chance))
    return one.model.state_dict() | momenta(one)


def momenta(one):
    """Return every parameter's, as the optimizer saves it."""
    states = one.optimizer.state_dict()["state"]
    return {
        str(number): found["momentum_buffer"]
        for number, found in states.items()
        if found.get("momentum_buffer") is not None
    }


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
