"""The criterion of the fast-clipping mode.

One backward pass does everything here, so the loss is an ordinary tensor; what the criterion adds is that no example's
loss is divided by a number that depends on the other examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpcore.errors import UnsupportedError
from dpcore.example_isolation.criterion import CriterionCheck
from dpcore.grad_sample.hooks import AbstractGradSampleHooks


class DPLossFastGradientClipping:
    """``criterion(outputs, targets)`` -> the mean or sum over the batch of losses that each belong to one example.

    A mean is Σ losses / number of losses, also where the criterion itself would divide by a sum of class weights or by
    the number of targets that are not ignored: those depend on the other examples. ``shape`` [B, T, ...] says that the
    losses are of B sequences with T positions each; every sequence's loss is then the mean (or sum) over its own
    positions. With ``reduction="batchmean"`` (:class:`torch.nn.KLDivLoss`) the losses of a row are one example's and
    are added up. An empty batch has loss 0.
    """

    def __init__(
        self,
        module: AbstractGradSampleHooks,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
    ) -> None:
        check_criterion(criterion, loss_reduction)
        if not hasattr(criterion, "reduction"):
            raise UnsupportedError(
                f"The criterion {type(criterion).__name__} has no attribute 'reduction', so its losses cannot be taken "
                "one by one; use a torch loss, or a class that returns one loss per example for reduction='none'."
            )
        if module.loss_reduction != loss_reduction:
            raise ValueError(
                f"loss_reduction is {loss_reduction!r} for the criterion and {module.loss_reduction!r} for the module; "
                "give both the same."
            )
        self.module = module
        self.optimizer = optimizer
        self.criterion = criterion
        self.loss_reduction = loss_reduction
        self._check = CriterionCheck()

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        reduction = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            if self.module.isolation.enabled:
                self._check(self.criterion, args, kwargs)
            losses = self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = reduction
        if shape is not None and losses.shape[:1] == (shape[0] * shape[1],):
            losses = self._by_sequence(losses.view(shape[0], shape[1]), args, kwargs)
        if reduction == "batchmean" and losses.dim() > 1:
            losses = losses.flatten(1).sum(1)
        if self.loss_reduction == "sum":
            return losses.sum()
        return losses.mean() if losses.numel() else losses.sum()

    def _by_sequence(self, losses: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """[B] from [B, T]."""
        if self.loss_reduction == "sum":
            return losses.sum(1)
        targets = kwargs.get("target", args[1] if len(args) > 1 else None)
        ignored = getattr(self.criterion, "ignore_index", None)
        if ignored is None or not isinstance(targets, Tensor):
            return losses.mean(1)
        counted = (targets.view(losses.shape) != ignored).sum(1).clamp(min=1)
        return losses.sum(1) / counted.to(torch.promote_types(losses.dtype, torch.float32))


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """ValueError where the criterion says that it reduces otherwise than declared."""
    found = getattr(criterion, "reduction", None)
    reduction = "mean" if found == "batchmean" else found
    if reduction in ("mean", "sum") and reduction != loss_reduction:
        raise ValueError(
            f"The criterion's reduction is {found!r} and loss_reduction is {loss_reduction!r}: every gradient "
            "would be too large or too small by the batch's length before it is clipped. Give both the same."
        )
