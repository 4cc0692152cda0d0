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
        made = torch.optim.AdamW(
            parameters,
            lr=rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            fused=True,
        )
        if chosen.warm_up:
            made.register_step_pre_hook(Warmup(rate, chosen))
        return made
    return torch.optim.SGD(parameters, lr=rate / setting.batch_size if of_sum else rate, fused=True)


class Warmup:
    """The rate of the next step, set before it: a hook of the optimizer, so that libraries which wrap it need none."""

    def __init__(self, rate: float, chosen: AdamW) -> None:
        self.rate, self.chosen, self.made = rate, chosen, 0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.made += 1
        if self.made <= self.chosen.warm_up:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * self.chosen.share(self.made)


def takes_sums(setting: Setting) -> bool:
    """Whether the divisor may go into the rate."""
    return isinstance(setting.optimizer, SGD)
