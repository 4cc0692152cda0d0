"""Check what an engine is given, and refuse what it cannot train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError


def check_targets(y: Any, batch_size: int) -> None:
    """UnsupportedError where targets have not one row for each example."""
    if isinstance(y, Tensor) and y.dim() and len(y) != batch_size:
        raise UnsupportedError(
            f"y has the shape {tuple(y.shape)} and x {batch_size} examples; y must have one row per example. One "
            "row for all would be spread over the batch, and its example would move what the others contribute. "
            "What belongs to no example goes into the model or the loss, or beside y in a tuple."
        )


def check_losses(losses: Any, batch_size: int, whole: int) -> None:
    """PrivacyError where losses of ``batch_size`` examples, of a batch of ``whole``, are not one for each."""
    if not isinstance(losses, Tensor) or losses.shape != (batch_size,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        piece = f"a piece of {batch_size} examples of " if batch_size != whole else ""
        raise PrivacyError(
            f"loss_fn returned a loss of shape {shape} for {piece}your batch of {whole} examples; it "
            f'must return one loss per example, of shape ({batch_size},) here, so use reduction="none" (a mean '
            "would mix the examples before clipping and leak them)."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, private: Iterable[Parameter]) -> None:
    """PrivacyError where the optimiser would apply a gradient that is none of the engine's (``private``)."""
    known = {id(param) for param in private}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and id(param) not in known:
                raise PrivacyError(
                    f"The optimizer holds a parameter of shape {tuple(param.shape)} that the engine does not train "
                    "and that has a gradient: step() would apply it without clipping and noise. Give the optimizer "
                    "the model's trained parameters only, or set that parameter's grad to None."
                )


def check_mask(mask: Tensor | None, batch_size: int, rows: int) -> None:
    """ValueError where a mask is not bool [B], nor [R] for ``rows`` of units that have several."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape not in ((batch_size,), (rows,))):
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)} for {batch_size} examples; it must be bool, one "
            "entry per example: a weight above 1 would let an example move the sum by more than max_grad_norm."
        )


def structure_of(model: nn.Module) -> list[int]:
    """Return the ids of all modules and parameters (objects that the engine keeps alive)."""
    ids: list[int] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        ids.append(id(module))
        ids.extend(map(id, module._parameters.values()))
        for child in module._modules.values():
            if child is not None:
                waiting.append(child)
    return ids


def call(model: nn.Module, x: Any) -> Any:
    """Return the model's outputs for inputs as :meth:`Engine.clipped_sum` takes them."""
    if type(x) is not Tensor and isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def tensors_of(x: Any) -> list[Tensor]:
    """Return the tensors of inputs."""
    if type(x) is Tensor:
        return [x]
    if isinstance(x, Mapping):
        return list(x.values())
    return list(x) if isinstance(x, tuple) else [x]


def length_of(x: Any) -> int:
    """Return the number of examples."""
    if type(x) is Tensor and x.dim():
        return x.shape[0]
    return len(tensors_of(x)[0])
