"""DP-SGD by a plain loop: forward, backward, clip and add, one example at a time; then noise and one update."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import TorchAdapter
from frameworks._shared.torch.update import NoisyUpdate
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``loop``, or ``per-parameter`` with PyVacy's host synchronisations."""
    return PerParameter() if variant == "per-parameter" else Microbatch()


class Microbatch(TorchAdapter):
    """PyVacy's algorithm as well as PyTorch can run it."""

    sparse_embedding = True
    optimizers = optimizers.NAMES

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("The loop over examples is only there for clipping; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        if self.sparse_embedding and not task.trains_tied_table:
            # An example touches at most 256 of 10,004 rows: its dense gradient would be almost all zeros.
            for module in self.model.modules():
                if isinstance(module, nn.Embedding):
                    module.sparse = True
        self.losses = torch_models.loss_fn(task)
        self.trained = torch_models.trained_parameters(self.model)
        self.update = NoisyUpdate(self.trained, setting, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        sums = [torch.zeros_like(p) for p in self.trained]
        if len(indices):
            x, y = self.batch(indices)
            for example, label in zip(x.split(1), y.split(1), strict=True):
                self.add_clipped(sums, self.losses(self.model(example), label))
        self.update.step(sums)

    def add_clipped(self, sums: list[torch.Tensor], loss: torch.Tensor) -> None:
        """Adds min(1, C/|g|) g to ``sums``, g the gradient of one example's ``loss`` [1]."""
        gradients = [g.coalesce() if g.is_sparse else g for g in torch.autograd.grad(loss, self.trained)]
        values = [g.values() if g.is_sparse else g for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
        if self.device.type == "cpu":
            # Reading a number waits for nothing here, and as a number the factor needs no pass of its own.
            factor = min(1.0, self.setting.max_grad_norm / max(norm.item(), sys.float_info.min))
        else:
            torch._foreach_mul_(values, (self.setting.max_grad_norm / norm).clamp(max=1.0))
            factor = 1.0
        dense = []
        for gradient, value, total in zip(gradients, values, sums, strict=True):
            if gradient.is_sparse:
                total.index_add_(0, gradient.indices()[0], value, alpha=factor)
            else:
                dense.append((total, value))
        torch._foreach_add_([total for total, _ in dense], [value for _, value in dense], alpha=factor)


class PerParameter(Microbatch):
    """As PyVacy and the paper's suite have it: the norm of every parameter's dense gradient is read by the host."""

    sparse_embedding = False

    def add_clipped(self, sums: list[torch.Tensor], loss: torch.Tensor) -> None:
        loss.backward()
        squared = 0.0
        for p in self.trained:
            squared += p.grad.norm(2).item() ** 2
        factor = min(1.0, self.setting.max_grad_norm / (squared**0.5 + 1e-6))
        for p, total in zip(self.trained, sums, strict=True):
            total.add_(p.grad.mul(factor))
            p.grad = None
