"""DP-SGD by fastDP's hook-based engine, in its exact flat clipping (``Abadi``, ``all-layer``), not its default."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from fastDP import PrivacyEngine
from fastDP.supported_layers_grad_samplers import (
    _create_or_extend_private_grad,
    _supported_layers_norm_sample_AND_clipping,
)
from torch import nn

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task

ONE_HOT_ELEMENTS = 4 * 256 * 10_004
"""Most one-hot numbers of a piece, which a trained table's rule makes: 4 examples of imdb-embedding (NOTES.md)."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``flat``, or ``automatic``, the library's default."""
    return FastDP("automatic" if variant == "automatic" else "Abadi")


def with_contiguous_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Make gradients contiguous: of a batch of one the engine leaves transposed strides, which PyTorch 2.13's fused
    optimizers read as if they were the parameter's (NOTES.md)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.grad.contiguous()


class FastDP(TorchAdapter):
    """Its engine hooks the model; ``backward`` leaves clipped and noisy sums behind, which its optimiser takes."""

    optimizers = optimizers.NAMES
    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=None, views=False)

    def __init__(self, clipping: str) -> None:
        self.clipping = clipping

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("fastDP is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        for module in self.model.modules():
            trains = any(p.requires_grad for p in module.parameters(recurse=False))
            if trains and type(module) not in _supported_layers_norm_sample_AND_clipping:
                raise Unsupported(f"fastDP has no rule for {type(module).__name__}: it leaves its weights untrained.")
        self.losses = torch_models.loss_fn(task)
        tables = [name for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)]
        self.rows = self._piece(tables)
        torch.manual_seed(setting.seed)  # its noise comes from the global generator
        # Under a summed loss the engine divides by nothing, under a mean by the nominal batch size.
        self.reduction = "sum" if optimizers.takes_sums(setting) else "mean"
        self.trained = torch_models.trained_parameters(self.model)  # the engine will freeze most of them
        self.optimizer = optimizers.make(self.trained, setting, of_sum=self.reduction == "sum")
        self.optimizer.register_step_pre_hook(with_contiguous_gradients)
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
            loss_reduction=self.reduction,
            origin_params=self._origins(tables),
        )
        self.engine.attach(self.optimizer)

    def _piece(self, tables: list[str]) -> int:
        """How many examples go through the network at once."""
        trained = [m for m in map(self.model.get_submodule, tables) if m.weight.requires_grad]
        # Without tokens a table is one of positions, each of which is looked up once.
        of_one = max((m.num_embeddings * (self.task.tokens or m.num_embeddings) for m in trained), default=1)
        return max(1, min(ONE_HOT_ELEMENTS // of_one, self.setting.dataset_size))

    def _origins(self, tables: list[str]) -> list[str] | None:
        """The parameters that get an ordinary gradient too (its documentation's ghost differentiation): one of the
        first layer, and every table, whose hook would not be called otherwise. None where the first layer is frozen:
        then all trained ones do, since no single one keeps the whole graph alive."""
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        first = next(iter(self.model.named_children()))[0]
        of_first = [name for name in (f"{first}.bias", f"{first}.weight") if name in trained]
        others = [f"{name}.weight" for name in tables if name != first and f"{name}.weight" in trained]
        return of_first[:1] + others if of_first else None

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices):
            x, y = self.batch(indices)
            for piece, labels in zip(x.split(self.rows), y.split(self.rows), strict=True):
                losses = self.losses(self.model(piece), labels)
                getattr(losses, self.reduction)().backward()  # sums accumulate, noise comes with the first
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
