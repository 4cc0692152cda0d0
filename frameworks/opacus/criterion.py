"""The task's loss as Opacus' modes ask for it."""

from __future__ import annotations

import torch

from frameworks._shared.torch import models as torch_models
from harness.tasks import Task


class Criterion(torch.nn.Module):
    """The task's loss with the attribute by which Opacus' ghost mode asks for single losses."""

    def __init__(self, task: Task, reduction: str = "sum") -> None:
        super().__init__()
        self.losses = torch_models.loss_fn(task)
        self.reduction = reduction

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = self.losses(logits, labels)
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()
