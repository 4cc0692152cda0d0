"""PyTorch's optimizers by the setting's data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from harness.contract import Setting
from harness.optimizer import SGD, AdamW

NAMES = (SGD.name, AdamW.name)


def make(parameters: Sequence[nn.Parameter], setting: Setting, of_sum: bool) -> torch.optim.Optimizer:
    """``of_sum``: its gradients are sums over the batch, whose divisor B goes into the rate: plain SGD only, which it
    spares a pass over the gradients."""
    chosen, rate = setting.optimizer, setting.learning_rate
    if isinstance(chosen, AdamW):
        if of_sum:
            raise ValueError("Adam's update does not depend on the scale of its gradients: divide them by B first.")
        return torch.optim.AdamW(
            parameters,
            lr=rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(parameters, lr=rate / setting.batch_size if of_sum else rate, fused=True)


def takes_sums(setting: Setting) -> bool:
    """Whether the divisor may go into the rate."""
    return isinstance(setting.optimizer, SGD)
