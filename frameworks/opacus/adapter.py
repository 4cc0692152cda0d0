"""DP-SGD by Opacus: its wrapped model, its optimiser, its accountant, fed with the harness's batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from opacus.accountants import PRVAccountant
from opacus.grad_sample import wrap_model
from opacus.layers import DPLSTM
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

from frameworks import torch_models
from frameworks.torch_adapter import TorchAdapter
from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import Task


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, one of Opacus' gradient modes: ``hooks``, ``functorch``, ``ew`` or ``ghost``."""
    return Opacus(variant)


class _Criterion(torch.nn.Module):
    """The task's loss with the attribute by which Opacus' ghost mode asks for single losses."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.losses = torch_models.loss_fn(task)
        self.reduction = "sum"

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = self.losses(logits, labels)
        return losses.sum() if self.reduction == "sum" else losses


class Opacus(TorchAdapter):
    """The pieces that ``PrivacyEngine.make_private`` puts together, with the exact expected batch size.

    Losses are summed and the division by B sits in the learning rate, which spares Opacus' two passes of scaling.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("Opacus only trains with differential privacy; its non-private twin is pytorch.")
        self.configure(task, setting)
        model = torch_models.build_model(task, initial, lstm=DPLSTM).to(self.device)
        extra = {"max_grad_norm": setting.max_grad_norm} if self.mode == "ghost" else {}
        self.wrapped = wrap_model(model, self.mode, batch_first=True, loss_reduction="sum", **extra)
        self.model = model
        sgd = torch.optim.SGD(
            torch_models.trained_parameters(model), lr=setting.learning_rate / setting.batch_size, fused=True
        )
        self.optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=self.mode)(
            sgd,
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            expected_batch_size=setting.batch_size,
            loss_reduction="sum",
            generator=torch.Generator(self.device).manual_seed(setting.seed),
        )
        self.loss = _Criterion(task)
        if self.mode == "ghost":
            self.loss = DPLossFastGradientClipping(self.wrapped, self.optimizer, self.loss, loss_reduction="sum")

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        x, y = self.batch(indices)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.wrapped(x), y).backward()
        self.optimizer.step()

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        accountant = PRVAccountant()
        accountant.history = [(self.setting.noise_multiplier, self.setting.sample_rate, steps)]
        return float(accountant.get_epsilon(delta))
