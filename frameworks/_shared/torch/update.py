"""Clipping and update for contestants on PyTorch that only bring per-example gradients: sum, noise, optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from frameworks._shared.torch import optimizers
from harness.contract import Setting


class NoisyUpdate:
    """The optimizer's step with (clipped sum + sigma*C*N(0, I)) / B; of plain SGD the divisor is in the rate."""

    def __init__(self, parameters: Sequence[nn.Parameter], setting: Setting, device: torch.device) -> None:
        self.parameters = parameters
        self.deviation = setting.noise_multiplier * setting.max_grad_norm
        self.generator = torch.Generator(device).manual_seed(setting.seed)
        of_sum = optimizers.takes_sums(setting)
        self.divisor = 1 if of_sum else setting.batch_size
        self.optimizer = optimizers.make(parameters, setting, of_sum)

    @torch.no_grad()
    def step(self, sums: Sequence[torch.Tensor]) -> None:
        """``sums``: the clipped sum of each parameter, of the parameter's shape; overwritten with the noisy one."""
        for parameter, total in zip(self.parameters, sums, strict=True):
            if self.deviation > 0:
                # As a plain vector: the generator fills an ordinary layout fastest, and every order is as random.
                noise = torch.randn(total.numel(), generator=self.generator, device=total.device, dtype=total.dtype)
                total.add_(noise.view(total.shape), alpha=self.deviation)
            parameter.grad = total
        if self.divisor > 1:
            torch._foreach_div_(list(sums), float(self.divisor))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def piece_size(rows: int, limit: int) -> int:
    """Rows of each piece of a batch of ``rows`` that is cut into as few equal pieces as ``limit`` allows."""
    return -(-rows // max(1, -(-rows // limit)))


def clipped_sums(
    gradients: Sequence[torch.Tensor], max_grad_norm: float | torch.Tensor, mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Of every parameter the sum of its per-example gradients [k, ...], each example's clipped as a whole (flat).

    ``mask``: bool [k], examples that count.
    """
    rows = [g.flatten(1) for g in gradients]
    norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(r, dim=1) for r in rows]), dim=0)
    factors = (max_grad_norm / norms).clamp(max=1.0)
    if mask is not None:
        factors = factors * mask
    return [(factors @ r).view(g.shape[1:]) for r, g in zip(rows, gradients, strict=True)]
