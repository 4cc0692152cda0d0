"""Layers in Opacus: its own modules without DP, and every gradient mode of its GradSampleModule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import opacus.layers
import torch
from opacus.grad_sample import wrap_model
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from frameworks._shared.torch.layers import TorchLayer, canonical
from harness.layer_contract import LayerAdapter, Unsupported

OWN = {
    "MultiheadAttention": opacus.layers.DPMultiheadAttention,
    "RNN": opacus.layers.DPRNN,
    "GRU": opacus.layers.DPGRU,
    "LSTM": opacus.layers.DPLSTM,
}


def create(variant: str) -> LayerAdapter:
    """``module``: Opacus' own layer without DP; else a gradient mode."""
    return OwnModule() if variant == "module" else GradSample(variant)


class OwnModule(TorchLayer):
    """Opacus' own layer where it has one, else that of ``torch.nn``; forward and backward without DP."""

    def module(self) -> nn.Module:
        if self.layer.kind not in OWN:
            return super().module()
        return OWN[self.layer.kind](**self.layer.options, batch_first=not self.layer.time_first)

    def load(self, initial: Mapping[str, np.ndarray]) -> None:
        if self.layer.kind != "MultiheadAttention":
            super().load(initial)
            return
        with torch.no_grad():
            for name, parts in self._attention().items():
                pieces = np.split(np.asarray(initial[name]), len(parts))
                for parameter, piece in zip(parts, pieces, strict=True):
                    parameter.copy_(torch.from_numpy(piece))

    def _attention(self) -> dict[str, list[nn.Parameter]]:
        """Opacus has one linear layer each for query, key and value where torch has one matrix."""
        module = self.model.module
        thirds = (module.qlinear, module.klinear, module.vlinear)
        return {
            "in_proj_weight": [part.weight for part in thirds],
            "in_proj_bias": [part.bias for part in thirds],
            "out_proj.weight": [module.out_proj.weight],
            "out_proj.bias": [module.out_proj.bias],
        }

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        self.forget()
        self.losses(self.model(*inputs), labels).sum().backward()

    def left_behind(self) -> Mapping[str, Tensor]:
        return self._by_name("grad")

    def _by_name(self, attribute: str) -> dict[str, Tensor]:
        dim = 1 if attribute == "grad_sample" else 0
        if self.layer.kind == "MultiheadAttention":
            return {
                name: torch.cat([getattr(p, attribute) for p in parts], dim)
                if len(parts) > 1
                else getattr(parts[0], attribute)
                for name, parts in self._attention().items()
            }
        return {name: getattr(p, attribute) for name, p in canonical(self.model.module, self.layer).items()}


class _Criterion(nn.Module):
    """The losses with the attribute by which Opacus' ghost mode asks for single ones."""

    def __init__(self, losses, reduction: str = "sum") -> None:
        super().__init__()
        self.losses = losses
        self.reduction = reduction

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        values = self.losses(outputs, labels)
        return values if self.reduction == "none" else getattr(values, self.reduction)()


class GradSample(OwnModule):
    """Per-sample gradients by the wrapped model; clipping and sum by the piece of Opacus' ``optimizer.step`` that does
    it, without noise and update. In the ghost mode the clipped sum is ``p.grad`` once the backward pass has ended."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def wrap(self) -> None:
        if self.mode == "ew" and self.layer.time_first:
            raise Unsupported("Opacus' expanded weights take inputs with the batch first only.")
        extra = {"max_grad_norm": self.setting.max_grad_norm} if self.mode == "ghost" else {}
        self.wrapped = wrap_model(
            self.model, self.mode, batch_first=not self.layer.time_first, loss_reduction="sum", **extra
        )
        self.criterion = _Criterion(self.losses)
        if self.setting.passes == "clipped":
            self.optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=self.mode)(
                torch.optim.SGD(self.parameters, lr=0.0),
                noise_multiplier=0.0,
                max_grad_norm=self.setting.max_grad_norm,
                expected_batch_size=1,
                loss_reduction="sum",
            )
            if self.mode == "ghost":
                self.criterion = DPLossFastGradientClipping(
                    self.wrapped, self.optimizer, self.criterion, loss_reduction="sum"
                )

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        clips = self.setting.passes == "clipped"
        if clips:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.wrapped.zero_grad(set_to_none=True)
        self.criterion(self.wrapped(*inputs), labels).backward()
        if clips and self.mode != "ghost":
            self.optimizer.clip_and_accumulate()

    def left_behind(self) -> Mapping[str, Tensor]:
        if self.setting.passes == "per_sample":
            return self._by_name("grad_sample")
        return self._by_name("grad" if self.mode == "ghost" else "summed_grad")
