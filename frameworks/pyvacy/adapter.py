"""PyVacy 0.0.32, used as its README says: a mean loss, one backward pass, its DPSGD."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pyvacy import analysis, optim

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task


def create(variant: str) -> Adapter:
    """The adapter of the only variant, ``release``."""
    return Pyvacy()


class Pyvacy(TorchAdapter):
    """Clips the gradient of the batch, not of each example (NOTES.md), which the gate must find."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("PyVacy only trains with differential privacy; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        self.losses = torch_models.loss_fn(task)
        self.trained = torch_models.trained_parameters(self.model)
        torch.manual_seed(setting.seed)  # its noise comes from the global generator
        self.optimizer = optim.DPSGD(
            l2_norm_clip=setting.max_grad_norm,
            # Its normal distribution refuses a standard deviation of zero.
            noise_multiplier=max(setting.noise_multiplier, 1e-30),
            batch_size=setting.batch_size,
            params=self.trained,
            lr=setting.learning_rate,
        )

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.optimizer.zero_grad()
        if len(indices):
            x, y = self.batch(indices)
            (self.losses(self.model(x), y).sum() / self.setting.batch_size).backward()
        else:
            for p in self.trained:
                p.grad = torch.zeros_like(p)
        self.optimizer.step()

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        return float(
            analysis.moments_accountant(
                N=self.setting.dataset_size,
                batch_size=self.setting.batch_size,
                noise_multiplier=self.setting.noise_multiplier,
                epochs=steps * self.setting.sample_rate,
                delta=delta,
            )
        )
