"""The experiment that shows whether a criterion mixes the examples of a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpcore.errors import PrivacyError
from dpcore.example_isolation.check import ALWAYS, RATE
from dpcore.example_isolation.measurements import HALF_ROUNDING
from dpcore.example_isolation.rows import half_of_rows, replace_rows, without_graph
from dpcore.example_isolation.trial import REMEDY
from dpcore.tree import flatten


class CriterionCheck:
    """The same experiments on a criterion alone, which is called with the model's outputs and the targets."""

    def __init__(self) -> None:
        self._calls = 0
        self._random = random.Random()

    def __call__(self, criterion: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """PrivacyError where one of the ``criterion``'s losses [B] depends on the row of another example.

        Nothing is checked where the losses are not one per row of the arguments, and beyond the first calls rarely.
        """
        self._calls += 1
        if self._calls > ALWAYS and self._random.random() >= RATE:
            return
        batch = without_graph((args, kwargs))
        sizes = {
            len(leaf) for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim()
        }
        if len(sizes) != 1 or (size := sizes.pop()) < 2:
            return

        def losses_of(batch: Any) -> tuple[Tensor, list[Tensor]]:
            batch = without_graph(batch)
            losses = criterion(*batch[0], **batch[1])
            return losses, _wanting(batch)

        with torch.enable_grad():
            losses, leaves = losses_of(batch)
            if losses.shape[:1] != (size,) or not losses.requires_grad:
                return
            rows, beside = half_of_rows(size, self._random)
            others = torch.ones(size, dtype=torch.bool)
            others[rows] = False
            found = torch.autograd.grad(losses[~others.to(losses.device)].sum(), leaves, allow_unused=True)
            reached = any(bool((g[others.to(g.device)] != 0).any()) for g in found if g is not None)
            changed, _ = losses_of(replace_rows(batch, size, rows, torch.full_like(rows, beside)))
            before, after = losses.detach()[others.to(losses.device)], changed.detach()[others.to(losses.device)]
        if reached or not torch.allclose(before, after, rtol=HALF_ROUNDING / 10, atol=1e-6, equal_nan=True):
            raise PrivacyError(f"The criterion's loss of one example depends on other examples in the batch. {REMEDY}")


def _wanting(batch: Any) -> list[Tensor]:
    """The tensors of a batch that need a gradient."""
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
