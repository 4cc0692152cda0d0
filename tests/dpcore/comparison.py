"""Comparing an engine's clipped sum with the float64 truth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import ClippedSum, Engine, PrivacyEngine, reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

MARGIN = {torch.float64: 0.0, torch.float32: 2e-5}
"""By how much more a clipped sum may differ: a ghost norm's factor is lower by what rounding may hide of it."""


def labels(batch: int) -> Tensor:
    """[B] of three classes."""
    return torch.arange(batch) % 3


def odd_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """[B] from outputs [B, ...] and y [B]: neither quadratic nor zero at zero, so that a zero row has a gradient."""
    flat = outputs.flatten(1)
    weights = torch.linspace(-1.0, 1.3, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return ((flat + 0.3).sin() * weights).sum(1) + (flat * 0.7).exp().mean(1) * (1.0 + y)


def relative_error(sums: Any, truth: Any) -> float:
    """L2 error of named tensors over all of them together, relative to the truth."""
    assert set(sums) == set(truth)
    error = sum(float((sums[n].double() - truth[n].double()).square().sum()) for n in truth)
    size = sum(float(truth[n].double().square().sum()) for n in truth)
    return (error / size) ** 0.5 if size else error**0.5


def check(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    clip: Callable[..., ClippedSum],
    loss_fn: Callable[[Any, Tensor], Tensor] = odd_loss,
) -> None:
    """The clipped sums of ``clip(model, loss_fn, x, y, C)`` for C clipping all, some and none of the examples.

    Whether the model mixes examples does not depend on C, and to look takes longer than the sum: ``clip`` looks once,
    and for other C an engine as new as ``clip``'s own does not.
    """
    gradients = list(reference.example_gradients(model, loss_fn, x, y))
    norms = torch.stack([reference.norm(g) for g in gradients])
    dtype = next(model.parameters()).dtype
    summed = clip
    for bound in sorted({float(norms.min()) * 0.5, float(norms.median()), float(norms.max()) * 2.0}):
        factors = [reference.clip_factor(norm, bound) for norm in norms]
        truth = {n: sum(f * g[n] for f, g in zip(factors, gradients, strict=True)) for n in gradients[0]}
        result = summed(model, loss_fn, x, y, bound)
        assert relative_error(result.sums, truth) < TOLERANCE[dtype] + MARGIN[dtype]
        torch.testing.assert_close(result.norms.double(), norms, rtol=TOLERANCE[dtype], atol=0)
        assert result.sensitivity == bound
        summed = _without_a_look


def _unlooking(model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor], bound: float = 1.0) -> Engine:
    """A new engine that does not look whether the model mixes examples."""
    engine = Engine(model, loss_fn, max_grad_norm=bound)
    engine.isolation.enabled = False
    return engine


def _without_a_look(
    model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor], x: Tensor, y: Tensor, bound: float
) -> ClippedSum:
    return _unlooking(model, loss_fn, bound).clipped_sum(x, y)


def _private(model: nn.Module, bound: float, data: TensorDataset, batch: int) -> Any:
    return PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        sample_rate=0.5,
        expected_batch_size=1,
        check_batches=False,
    )


def check_private(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step of the two-line use without noise: the clipped sum is what an ordinary backward pass leaves behind."""
    norms = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 1.0).norms
    bound = float(norms.median())
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, bound)
    private, optimizer, _ = _private(model, bound, TensorDataset(x, y), len(x))
    odd_loss(private(x), y).mean().backward()
    optimizer.step()
    expected = {f"_module.{n}": g for n, g in truth.clipped.items()}
    sums = {n: p.grad for n, p in private.named_parameters() if p.requires_grad}
    assert relative_error(sums, expected) < TOLERANCE[next(model.parameters()).dtype]


def by_autograd(model: nn.Module, x: Any, y: Tensor) -> tuple[float, Tensor, dict[str, Tensor]]:
    """(median norm as a bound, norms [B], clipped sums) from the gradients of each loss of one ordinary batch: right
    for batches that cannot be cut into examples, and where random numbers are drawn."""
    losses = odd_loss(_call(model, x), y)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    norms = torch.stack([torch.stack([g.square().sum() for g in grads]).sum().sqrt() for grads in each])
    bound = float(norms.median())
    factors = [reference.clip_factor(n, bound) for n in norms]
    sums = {
        name: torch.stack([f * grads[k] for f, grads in zip(factors, each, strict=True)]).sum(0)
        for k, name in enumerate(named)
    }
    return bound, norms, sums


def _call(model: nn.Module, x: Any) -> Tensor:
    return model(*x) if type(x) is tuple else model(x)


def check_by_autograd(model: nn.Module, x: Any, y: Tensor) -> None:
    """As :func:`check`, against :func:`by_autograd` with the same random numbers."""
    torch.manual_seed(5)
    bound, norms, truth = by_autograd(model, x, y)
    engine = Engine(model, odd_loss, max_grad_norm=bound, physical_batch_size=len(y))
    torch.manual_seed(5)
    result = engine.clipped_sum(x, y)
    torch.testing.assert_close(result.norms, norms, rtol=TOLERANCE[norms.dtype], atol=0)
    assert relative_error(result.sums, truth) < TOLERANCE[norms.dtype]


def check_private_call(model: nn.Module, x: Any, y: Tensor) -> None:
    """As :func:`check_private`, for inputs that are no tensor of examples."""
    bound, _, truth = by_autograd(model, x, y)
    private, optimizer, _ = _private(model, bound, TensorDataset(y), len(y))
    odd_loss(_call(private, x), y).mean().backward()
    optimizer.step()
    sums = {n.removeprefix("_module."): p.grad for n, p in private.named_parameters() if p.requires_grad}
    assert relative_error(sums, truth) < TOLERANCE[next(model.parameters()).dtype]


def has_rules(model: nn.Module, x: Any, y: Tensor) -> bool:
    """Whether nothing in the model needs the fallback."""
    engine = _unlooking(model, odd_loss)
    engine.clipped_sum(x, y)
    return "vmap" not in engine.explain()
