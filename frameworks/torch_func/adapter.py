"""DP-SGD by ``torch.func``: vmap(grad) for per-example gradients, eager and compiled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import COMPILERS, PRECISIONS, TorchAdapter
from frameworks._shared.torch.update import NoisyUpdate, clipped_sums, piece_size
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Lstm, Task

torch._dynamo.config.recompile_limit = 64

GRADIENT_BYTES = 256 * 2**20
"""Per-example gradients of one piece of a batch."""
LSTM_ROWS = 16
"""The tape of a vmapped LSTM takes about 90 MB for each example (NOTES.md)."""
ROWS = {"gpt2-lm": 8, "llama-lora": 8, "vit": 16, "wrn-16-2": 16}
ROWS |= {"llama-full": 8, "encoder-lora": 8, "encoder-bias": 8, "wrn-16-4": 8, "wrn-16-4-k4": 2, "wrn-16-4-k16": 1}
"""Examples of a piece, tuned on a CPU (NOTES.md); those of the second line are by analogy, not tuned."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``eager`` or ``compiled``."""
    return TorchFunc(compiled=variant == "compiled")


class TorchFunc(TorchAdapter):
    """vmap(grad(loss of one example)) over pieces of the batch, then clipping, noise and SGD."""

    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=torch.nn.Embedding)
    optimizers = optimizers.NAMES
    precisions = PRECISIONS

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.task = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("torch.func's per-example gradients are for DP; its non-private twin is pytorch.")
        if self.compiled and setting.device == "cpu" and not any(map(shutil.which, COMPILERS)):
            raise Unsupported(
                f"torch.compile on a CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here."
            )
        known = self.task is not None and self.task == task and self.setting.device == setting.device
        self.configure(task, setting)
        if known:  # the compiled function holds on to this very model
            torch_models.load_parameters(self.model, task, initial)
        else:
            self.model = self.network(initial)
            self.sums = torch.compile(self._sums(), dynamic=False) if self.compiled else self._sums()
        named = dict(self.model.named_parameters())
        self.trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
        self.frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
        self.update = NoisyUpdate([named[name] for name in self.trained], setting, self.device)
        # A tensor, since a number would be compiled in.
        self.norm = torch.tensor(setting.max_grad_norm, device=self.device)
        self.limit = ROWS.get(task.name, max(1, GRADIENT_BYTES // task.weight_bytes))
        if any(isinstance(layer, Lstm) for layer in task.layers):
            self.limit = min(self.limit, LSTM_ROWS)

    def _sums(self):
        model, losses = self.model, torch_models.loss_fn(self.task)

        def loss(trained: dict, frozen: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with self.autocast():
                return losses(functional_call(model, (trained, frozen), (x[None],)), y[None])[0]

        gradients = vmap(grad(loss), in_dims=(None, None, 0, 0))

        def sums(trained, frozen, x, y, mask, max_grad_norm):
            return clipped_sums(list(gradients(trained, frozen, x, y).values()), max_grad_norm, mask)

        return sums

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        total = [torch.zeros_like(p) for p in self.trained.values()]
        size = piece_size(len(indices), self.limit)
        if mask is not None and len(indices) % size:  # every piece has the compiled shape
            missing = -len(indices) % size
            indices, mask = np.pad(indices, (0, missing)), np.pad(mask, (0, missing))
        if len(indices):
            x, y = self.batch(indices)
            kept = None if mask is None else torch.from_numpy(mask).to(self.device, non_blocking=True)
            for start in range(0, len(indices), size):
                piece = slice(start, start + size)
                kept_here = None if kept is None else kept[piece]
                torch._foreach_add_(
                    total, self.sums(self.trained, self.frozen, x[piece], y[piece], kept_here, self.norm)
                )
        self.update.step(total)
