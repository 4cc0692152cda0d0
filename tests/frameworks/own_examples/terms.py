"""The terms that an example and an adapter share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.optimizer import Optimizer
from harness.tasks import Task


@dataclass(frozen=True)
class Terms:
    """The training of one batch.

    Attributes:
        task: network and loss.
        initial: the weights to start from, under the canonical names.
        x: the batch's inputs, [B, ...].
        y: the batch's labels, [B, ...].
        noise_multiplier: sigma.
        max_grad_norm: C.
        learning_rate: lr.
        optimizer: SGD or AdamW with its constants.
    """

    task: Task
    initial: Mapping[str, np.ndarray]
    x: np.ndarray
    y: np.ndarray
    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    optimizer: Optimizer

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.x)


class Example(ABC):
    """A library's own loop, cut into the drawing of a batch, which is not timed, and the rest of its body."""

    @abstractmethod
    def draw(self) -> Any:
        """Return the batch as the loop gets it."""

    @abstractmethod
    def step(self, batch: Any) -> None:
        """Make one update, and wait for it."""

    @abstractmethod
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Return the current weights under the canonical names."""
