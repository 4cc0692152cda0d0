"""Opake in several processes, as its documentation has it: clipped sums added up, the same noise on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from opake.distributed import sum_gradients

from frameworks._shared.torch.ranks import Rank
from frameworks.opake.adapter import Opake


class Ranked(Opake, Rank):
    """The quick start's step of this rank's share, with one sum between clipping and noise."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(self.share(indices), mask)

    def joined(self, gradient: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return sum_gradients(gradient)
