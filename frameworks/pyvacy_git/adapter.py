"""PyVacy at the paper's commit, used as its tutorial does: one example at a time through ``microbatch_step``."""

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
    """The adapter of the only variant, ``microbatch``."""
    return PyvacyGit()


class PyvacyGit(TorchAdapter):
    """Its tutorial's loop: zero, backward and clip for each example, then one step."""

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
            noise_multiplier=setting.noise_multiplier,
            minibatch_size=setting.batch_size,
            microbatch_size=1,
            params=self.trained,
            lr=setting.learning_rate,
        )

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.optimizer.zero_grad()
        if len(indices):
            x, y = self.batch(indices)
            for example, label in zip(x.split(1), y.split(1), strict=True):
                self.optimizer.zero_microbatch_grad()
                self.losses(self.model(example), label).sum().backward()
                self.optimizer.microbatch_step()
        else:
            for p in self.trained:
                p.grad = torch.zeros_like(p)
        self.optimizer.step()

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        setting = self.setting
        return float(analysis.epsilon(setting.dataset_size, setting.batch_size, setting.noise_multiplier, steps, delta))
