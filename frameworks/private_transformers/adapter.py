"""DP-SGD by private-transformers' engine on an ordinary model: per-sample gradients, or ghost clipping."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from private_transformers import PrivacyEngine
from private_transformers.supported_layers_grad_samplers import _supported_layers_grad_samplers
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task

ONE_HOT_ROWS = 16
"""Examples of a piece where ``default`` trains an embedding: its rule makes one-hot vectors (NOTES.md)."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, one of the engine's flat clipping modes: ``default`` or ``ghost``."""
    return PrivateTransformers(variant)


def with_rules_for_rms_norm(model: nn.Module) -> None:
    """Puts T5's norm, the same function and the one that it has a rule for, where PyTorch's ``nn.RMSNorm`` is."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.RMSNorm):
                replacement = T5LayerNorm(norm.normalized_shape[0], norm.eps)
                replacement.weight = norm.weight
                setattr(parent, name, replacement)


class PrivateTransformers(TorchAdapter):
    """Its optimiser's ``step`` takes the examples' losses and does the rest."""

    optimizers = optimizers.NAMES
    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=None, views=False)

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("private-transformers is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        with_rules_for_rms_norm(self.model)
        if self.mode == "ghost" and task.trains_tied_table:
            raise Unsupported("private-transformers refuses it: ghost clipping does not support parameter sharing.")
        for module in self.model.modules():
            trains = any(p.requires_grad for p in module.parameters(recurse=False))
            if trains and type(module) not in _supported_layers_grad_samplers:
                raise Unsupported(f"private-transformers has no rule for {type(module).__name__}.")
        self.losses = torch_models.loss_fn(task)
        self.trained = torch_models.trained_parameters(self.model)
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
        one_hot = self.mode == "default" and bool(tables)
        self.rows = ONE_HOT_ROWS if one_hot else setting.dataset_size
        torch.manual_seed(setting.seed)  # its noise comes from the global generator
        self.optimizer = optimizers.make(self.trained, setting, of_sum=False)  # the engine divides by the batch size
        self.engine = PrivacyEngine(
            self.model,
            batch_size=setting.batch_size,
            sample_size=setting.dataset_size,
            epochs=1,
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            clipping_mode=self.mode,
            record_snr=False,
            skip_checks=True,  # they only let Hugging Face's classes in
        )
        self.engine.attach(self.optimizer)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices):
            x, y = self.batch(indices)
            *before, last = zip(x.split(self.rows), y.split(self.rows), strict=True)
            for piece, labels in before:
                self.optimizer.virtual_step(loss=self.losses(self.model(piece), labels))
            self.optimizer.step(loss=self.losses(self.model(last[0]), last[1]))
        else:  # its hooks fail on an empty batch: noise and update by themselves
            for p in self.trained:
                p.summed_grad = torch.zeros_like(p)
            with torch.no_grad():
                self.engine._create_noisy_clipped_gradient()
            self.optimizer.original_step()
            self.engine.unlock()
        self.optimizer.zero_grad()

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        self.engine.target_delta = delta
        return float(self.engine.get_privacy_spent(steps=steps)["eps_rdp"])
