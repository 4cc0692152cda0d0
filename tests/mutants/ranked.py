"""One exact adapter of several processes, and a variant of it for each fault that only several can have."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from frameworks._shared.torch.ranks import Lead, Rank
from tests.mutants.exact import Exact, Sums


class Joined(Exact, Rank):
    """Right: every rank clips its own examples, rank 0 draws the noise, and the sum is divided by B."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.update(self.share(indices))

    def noise(self, examples: int) -> Sums:
        noise = super().noise(examples)
        return noise if self.draws() else {name: torch.zeros_like(part) for name, part in noise.items()}

    def draws(self) -> bool:
        return dist.get_rank() == 0

    def update(self, rows: np.ndarray) -> None:
        sums = self.clipped_sum(rows)
        for name, noise in self.noise(len(rows)).items():
            sums[name] = sums[name] + noise
        for name, parameter in self.trained.items():
            dist.all_reduce(sums[name])
            parameter.grad = sums[name] / self.divisor(len(rows))
        self.optimizer.step()


class DrawsOnEveryRank(Joined):
    """Every rank adds the whole noise, of one seed: W times too much."""

    def draws(self) -> bool:
        return True


class DividesByItsShare(Joined):
    """Divides the joined sum by one rank's share of the batch."""

    def divisor(self, examples: int) -> int:
        return super().divisor(examples) // dist.get_world_size()


VARIANTS = {"joined": Joined, "draws-on-every-rank": DrawsOnEveryRank, "divides-by-its-share": DividesByItsShare}


def create(variant: str) -> Lead:
    """The adapter of ``variant``: ``joined`` is right, every other one has the fault it is named after."""
    return Lead(__file__, variant, VARIANTS[variant]())
