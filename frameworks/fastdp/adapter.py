"""DP-SGD by fastDP's hook-based engine, in its exact flat clipping (``Abadi``, ``all-layer``), not its default."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from fastDP import PrivacyEngine
from fastDP.supported_layers_grad_samplers import _create_or_extend_private_grad

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Embedding, Task

ONE_HOT_ROWS = 4
"""Examples of a piece where there is an embedding: its rule makes one-hot vectors (NOTES.md)."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``flat``, or ``automatic``, the library's default."""
    return FastDP("automatic" if variant == "automatic" else "Abadi")


class FastDP(TorchAdapter):
    """Its engine hooks the model; ``backward`` leaves clipped and noisy sums behind, which its optimiser takes."""

    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=None)

    def __init__(self, clipping: str) -> None:
        self.clipping = clipping

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("fastDP is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        self.losses = torch_models.loss_fn(task)
        has_embedding = any(isinstance(layer, Embedding) for layer in task.layers)
        self.rows = ONE_HOT_ROWS if has_embedding else setting.dataset_size
        torch.manual_seed(setting.seed)  # its noise comes from the global generator
        # Under a summed loss the engine divides by nothing; the divisor sits in the rate.
        rate = setting.learning_rate / setting.batch_size
        self.trained = torch_models.trained_parameters(self.model)  # the engine will freeze most of them
        self.optimizer = torch.optim.SGD(self.trained, lr=rate)
        first = [f"{next(iter(self.model.named_children()))[0]}.{name}" for name in ("bias", "weight")]
        self.engine = PrivacyEngine(
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
            # Only this parameter gets an ordinary gradient too (its documentation's ghost differentiation).
            origin_params=[name for name in first if name in dict(self.model.named_parameters())][:1],
        )
        self.engine.attach(self.optimizer)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices):
            x, y = self.batch(indices)
            for piece, labels in zip(x.split(self.rows), y.split(self.rows), strict=True):
                self.losses(self.model(piece), labels).sum().backward()  # sums accumulate, noise comes with the first
        else:  # its hooks would leave no sums behind; this function adds the noise
            for p in self.trained:
                _create_or_extend_private_grad(p, torch.zeros_like(p))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        self.engine.target_delta = delta
        return float(self.engine.get_privacy_spent(steps=steps)["eps_rdp"])
