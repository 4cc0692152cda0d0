"""DP-SGD by BackPACK: per-example gradients (BatchGrad), or their norms (BatchL2Grad) and a second backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from backpack import backpack, extend
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.extensions import BatchGrad, BatchL2Grad
from torch import nn

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.adapter import TorchAdapter
from frameworks._shared.torch.update import NoisyUpdate, clipped_sums, piece_size
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Embedding, Task

GRADIENT_BYTES = 256 * 2**20
"""Per-example gradients of one piece of a batch."""
ONE_HOT_BYTES = 256 * 2**20
"""BackPACK's embedding rule makes a float one-hot table [rows of the embedding, batch, tokens]."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``batch-grad``, or ``two-pass`` (BatchL2Grad)."""
    return TwoPass() if variant == "two-pass" else Backpack()


class Backpack(TorchAdapter):
    """One backward pass with BatchGrad; clip and sum what it leaves in ``grad_batch``.

    The loss is a sum over the examples: under a mean BackPACK's gradients would carry 1/N.
    """

    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=None, views=False)

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("BackPACK is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        network = self.network(initial)
        if any(isinstance(module, nn.GroupNorm) for module in network.modules()):
            raise Unsupported("BackPACK 1.7.1 has no rule for GroupNorm.")  # it would leave no gradients, and no word
        self.model = extend(network)
        self.losses = torch_models.loss_fn(task)
        self.trained = torch_models.trained_parameters(self.model)
        self.update = NoisyUpdate(self.trained, setting, self.device)
        self.limit = max(1, GRADIENT_BYTES // task.weight_bytes)
        for layer in task.layers:
            if isinstance(layer, Embedding):
                one_hot = 4 * layer.num_embeddings * int(np.prod(task.input_shape))
                self.limit = min(self.limit, max(1, ONE_HOT_BYTES // one_hot))

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        total = [torch.zeros_like(p) for p in self.trained]
        if len(indices):
            x, y = self.batch(indices)
            size = piece_size(len(indices), self.limit)
            for piece, labels in zip(x.split(size), y.split(size), strict=True):
                torch._foreach_add_(total, self.sums(piece, labels))
        self.update.step(total)

    def sums(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """The clipped sum of every parameter over the examples (x, y)."""
        # Of BackPACK's two rules for a convolution's weight the one that saves memory is also the faster (NOTES.md).
        with backpack(BatchGrad()), weight_jac_t_save_memory():
            self.losses(self.model(x), y).sum().backward()
        found = clipped_sums([p.grad_batch for p in self.trained], self.setting.max_grad_norm)
        for p in self.trained:
            p.grad = p.grad_batch = None
        return found


class TwoPass(Backpack):
    """A backward pass with BatchL2Grad for the norms, then an ordinary one through the weighted losses."""

    def sums(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        with backpack(BatchL2Grad()), weight_jac_t_save_memory():
            losses = self.losses(self.model(x), y)
            losses.sum().backward(retain_graph=True)
        norms = torch.stack([p.batch_l2 for p in self.trained]).sum(0).sqrt()
        for p in self.trained:
            p.grad = p.batch_l2 = None
        factors = (self.setting.max_grad_norm / norms).clamp(max=1.0)
        return list(torch.autograd.grad((factors * losses).sum(), self.trained))
