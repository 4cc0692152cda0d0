"""The float64 truth of DP-SGD's clipped sum: one example at a time, so that there is nothing to get wrong.

Slow on purpose. Tests and the admission gate compare faster engines with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]
"""Parameter name -> float64 tensor of the parameter's shape, for every parameter with ``requires_grad``."""

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(outputs [1, ...], labels [1, ...]) -> the loss of that one example, a scalar or [1]."""


@dataclass(frozen=True)
class ClippedSum:
    """``clipped``: sum_i min(1, C/|g_i|) g_i. ``plain``: sum_i g_i. ``norms``: |g_i| over all trained parameters, [n].

    An example whose norm is not finite adds nothing to ``clipped``: otherwise its presence would show in every weight.
    ``plain`` knows no privacy and takes it as it is; ``norms`` reports it as inf or nan.
    """

    clipped: Gradients
    plain: Gradients
    norms: Tensor


def example_gradients(model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor, group: int = 1) -> Iterator[Gradients]:
    """The gradient of each example's own loss, for x [n, ...] and y [n, ...], from a batch of that example alone.

    Works on a float64 copy in the model's own mode; the model is left as it is. Floating-point inputs become float64.
    ``group``: so many rows that follow each other are one example, whose loss is the mean of theirs.
    """
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for i in range(0, len(x), group):
        model.zero_grad(set_to_none=True)
        loss_fn(model(x[i : i + group]), y[i : i + group]).sum().div(group).backward()
        yield {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def norm(gradients: Gradients) -> Tensor:
    """L2 norm over all parameters together."""
    return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()


def clip_factor(gradient_norm: Tensor, max_grad_norm: float) -> float:
    """min(1, C/|g|); 1 for a zero gradient and 0 for one that is not finite."""
    if not torch.isfinite(gradient_norm):
        return 0.0
    return min(1.0, max_grad_norm / float(gradient_norm)) if gradient_norm > 0 else 1.0


def clipped_sum(
    model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor, max_grad_norm: float, group: int = 1
) -> ClippedSum:
    """Clipped and plain sums and the norms for the batch x [n, ...], y [n, ...]; zeros for an empty batch.

    ``group``: rows of an example. Raises ValueError unless ``max_grad_norm`` > 0.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}; a clipping norm must be positive.")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    clipped = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained.items()}
    plain = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained.items()}
    norms = []
    for gradients in example_gradients(model, loss_fn, x, y, group):
        norms.append(norm(gradients))
        factor = clip_factor(norms[-1], max_grad_norm)
        for name, gradient in gradients.items():
            plain[name] += gradient
            if factor > 0:  # 0 * nan would still be nan
                clipped[name] += factor * gradient
    return ClippedSum(clipped, plain, torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64))
