"""Plain ``torch.nn`` layers: the baseline of every factor, eager and compiled."""

from __future__ import annotations

import shutil

import torch
from torch import Tensor

from frameworks._shared.torch.adapter import COMPILERS
from frameworks._shared.torch.layers import TorchLayer
from harness.layer_contract import LayerAdapter, Unsupported


def create(variant: str) -> LayerAdapter:
    """``eager`` or ``compiled``."""
    return Compiled() if variant == "compiled" else Plain()


class Plain(TorchLayer):
    """Forward, the sum of the losses, backward."""

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        self.forget()
        self.loss(inputs, labels).backward()

    def loss(self, inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        return self.losses(self.model(*inputs), labels).sum()


class Compiled(Plain):
    """Forward, loss and backward by ``torch.compile``."""

    def wrap(self) -> None:
        if self.device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
            raise Unsupported(
                f"torch.compile on a CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here."
            )
        self.loss = torch.compile(super().loss, dynamic=False)
