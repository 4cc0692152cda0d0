"""DP-SGD by fastDP's hook-based engine, in its exact flat clipping (``Abadi``, ``all-layer``), not its default."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from fastDP import PrivacyEngine

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``flat``, or ``automatic``, the library's default."""
    return FastDP("automatic" if variant == "automatic" else "Abadi")


class FastDP(TorchAdapter):
    """UNTESTED: the pinned commit could not be fetched (NOTES.md)."""

    memory_format = torch.contiguous_format

    def __init__(self, clipping: str) -> None:
        self.clipping = clipping

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("fastDP is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        self.losses = torch_models.loss_fn(task)
        torch.manual_seed(setting.seed)  # its noise comes from the global generator
        # Under a summed loss the engine divides by nothing; the divisor sits in the rate.
        rate = setting.learning_rate / setting.batch_size
        self.optimizer = torch.optim.SGD(torch_models.trained_parameters(self.model), lr=rate)
        engine = PrivacyEngine(
            self.model,
            batch_size=setting.batch_size,
            sample_size=setting.dataset_size,
            epochs=1,
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            clipping_fn=self.clipping,
            clipping_mode="MixOpt",
            clipping_style="all-layer",
            loss_reduction="sum",
        )
        engine.attach(self.optimizer)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices):
            x, y = self.batch(indices)
            self.losses(self.model(x), y).sum().backward()
        else:  # its hooks would leave nothing to add the noise to
            for p in torch_models.trained_parameters(self.model):
                p.summed_clipped_grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
