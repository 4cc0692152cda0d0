"""Whether the per-sample gradients of a module are those of one example at a time: the check for a new rule."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpcore.functional import clipped_sum
from dpcore.grad_sample.grad_sample_module import GradSampleModule
from dpcore.tree import batch_length, flatten


def compute_microbatch_grad_sample(
    x: Any, module: nn.Module, batch_first: bool = True, loss_reduction: str = "mean"
) -> dict[str, Tensor]:
    """Name -> [B, *param.shape]: the gradient of each example's loss, from a batch of that example alone.

    ``x``: a tensor [B, ...] or a tuple of them. The module and its gradients are left as they are.
    """
    args = _args(x, batch_first)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows: list[list[Tensor]] = []
    for i in range(batch_length(args)):
        losses = _losses(module(*(t[i : i + 1] for t in args)))
        grads = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(grads, trained.values(), strict=True)])
    return {name: torch.stack(column) for name, column in zip(trained, zip(*rows, strict=True), strict=True)}


def compute_grad_sample(
    x: Any, module: nn.Module, batch_first: bool = True, loss_reduction: str = "mean"
) -> dict[str, Tensor]:
    """The same by dpcore's rules and by registered samplers, from one batch."""
    args = _args(x, batch_first)
    wrapped = GradSampleModule(copy.deepcopy(module).train(module.training), loss_reduction=loss_reduction)
    wrapped.isolation.enabled = False  # a rule that mixes examples is to be measured here, not refused
    losses = _losses(wrapped(*args))
    (losses.mean() if loss_reduction == "mean" else losses.sum()).backward()
    return {name: p.grad_sample.detach() for name, p in wrapped.trained.items()}  # type: ignore[attr-defined]


def check_per_sample_gradients_are_correct(
    x: Any,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Whether per-sample gradients (mean and sum losses), their norms and the clipped sum agree with one example at a
    time, for inputs x: a tensor [B, ...] or a tuple of them. The norms and the sum go through registered norm samplers.

    ``grad_sample_mode`` is accepted for compatibility: all modes share one engine. ValueError for an empty batch.
    """
    args = _args(x, batch_first)
    if not batch_length(args):
        raise ValueError("The batch is empty; the check needs examples to compare.")
    truth = compute_microbatch_grad_sample(args, module)
    for reduction in ("mean", "sum"):
        found = compute_grad_sample(args, module, loss_reduction=reduction)
        if not all(torch.allclose(found[name], truth[name], atol=atol, rtol=rtol) for name in truth):
            return False
    norms = torch.stack([g.flatten(1).square().sum(1) for g in truth.values()]).sum(0).sqrt()
    bound = float(norms.median()) or 1.0
    engine_args = args if len(args) > 1 else args[0]
    result = clipped_sum(copy.deepcopy(module), lambda outputs, _: _losses(outputs), engine_args, args[0], bound)
    factors = (bound / norms).clamp(max=1.0)
    sums = {name: torch.tensordot(factors, g, dims=1) for name, g in truth.items()}
    return torch.allclose(result.norms, norms.to(result.norms.dtype), atol=atol, rtol=rtol) and all(
        torch.allclose(result.sums[name], sums[name].to(result.sums[name].dtype), atol=atol, rtol=rtol) for name in sums
    )


def _args(x: Any, batch_first: bool) -> tuple[Tensor, ...]:
    if not batch_first:
        raise ValueError("The batch must be the first dimension; transpose inside the module.")
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _losses(outputs: Any) -> Tensor:
    """[B] losses of any outputs [B, ...]: not quadratic, not zero at zero, different for every coordinate."""
    total: Any = 0.0
    for output in flatten(outputs)[0]:
        if isinstance(output, Tensor) and output.is_floating_point():
            flat = output.flatten(1) if output.dim() > 1 else output.unsqueeze(1)
            weights = torch.linspace(-1.0, 1.3, flat.shape[1], dtype=flat.dtype, device=flat.device)
            total = total + ((flat + 0.3).sin() * weights).sum(1) + (0.5 * flat).exp().mean(1)
    return total
