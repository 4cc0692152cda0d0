"""One exact adapter, a loop over single examples: what every mutant is a variant of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import PRECISIONS, TorchAdapter
from harness.contract import Setting
from harness.tasks import Task

Sums = dict[str, torch.Tensor]


class Exact(TorchAdapter):
    """Right, and slow: every example by itself."""

    optimizers = optimizers.NAMES
    precisions = PRECISIONS

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        self.configure(task, setting)
        self.model = torch_models.build_model(task, initial).to(self.device)
        known = torch_models.canonical_parameters(self.model, task)
        self.trained = {name: known[name] for name in task.trained_parameters}
        self.optimizer = optimizers.make(list(self.trained.values()), setting, of_sum=False)
        self.losses = torch_models.loss_fn(task)
        self.generator = torch.Generator(self.device).manual_seed(setting.seed)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.update(indices if mask is None else indices[mask])

    def update(self, rows: np.ndarray) -> None:
        sums = self.clipped_sum(rows)
        if self.setting.private:
            for name, noise in self.noise(len(rows)).items():
                sums[name] = sums[name] + noise
        for name, parameter in self.trained.items():
            parameter.grad = sums[name] / self.divisor(len(rows))
        self.optimizer.step()

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for row in rows:
            gradients = self.gradients(row)
            for name, gradient in (self.clip(gradients) if self.setting.private else gradients).items():
                sums[name] += gradient
        return sums

    def gradients(self, row: int) -> Sums:
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.losses(self.model(self.x[row : row + 1]), self.y[row : row + 1])
        loss.sum().backward()
        return {name: p.grad for name, p in self.trained.items()}

    def clip(self, gradients: Sums) -> Sums:
        factor = self.factor(norm_of(gradients), self.setting.max_grad_norm)
        return {name: factor * gradient for name, gradient in gradients.items()}

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        return (max_grad_norm / norm).clamp(max=1.0)

    def noise(self, examples: int) -> Sums:
        deviation = self.setting.noise_multiplier * self.setting.max_grad_norm
        return {name: deviation * self.normal(p) for name, p in self.trained.items()}

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.generator, device=self.device)

    def divisor(self, examples: int) -> int:
        return self.setting.batch_size


def norm_of(gradients: Sums) -> torch.Tensor:
    return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
