"""How many batches and examples the private loaders of this process have handed out, and how many were used.

The accountant assumes that every step uses one Poisson batch, each example once. Data from elsewhere is not seen as
such, but it shows as steps without a drawn batch, or as more rows than examples were drawn.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.tree import batch_length


@dataclass
class Count:
    batches: int = 0
    examples: int = 0
    unknown: int = 0
    """Batches without a tensor, strings, say, that the loop turns into tensors: their examples are not counted."""


# By sample rate and not by loader: a trainer may build its own private loader over the same data at the same rate.
_DRAWN: defaultdict[float, Count] = defaultdict(Count)


def count_drawn(sample_rate: float, batch: Any) -> None:
    """A private loader at ``sample_rate`` has handed out ``batch``."""
    drawn = _DRAWN[sample_rate]
    drawn.batches += 1
    try:
        drawn.examples += batch_length(batch)
    except UnsupportedError:
        drawn.unknown += 1


class Ledger:
    """What was used of the batches drawn at ``rate()`` since the ledger was opened, by one optimiser or, with
    ``shared``, by it and those of that ledger: two models of one accountant must not be trained on the same batch."""

    def __init__(self, rate: Callable[[], float], shared: Ledger | None = None) -> None:
        self.rate = rate
        self._before: defaultdict[float, Count] = copy.deepcopy(_DRAWN) if shared is None else shared._before
        self._used: defaultdict[float, Count] = defaultdict(Count) if shared is None else shared._used

    def use(self, rows: int | None, passes: int, piece: bool, goes_on: bool) -> None:
        """PrivacyError where ``rows`` more examples (None: not known) by ``passes`` backward passes, or one step more,
        are more than was drawn. ``piece``: they are a part of a logical batch, which ``goes_on`` or ends with a step.
        """
        rate = self.rate()
        before, used, drawn = self._before[rate], self._used[rate], _DRAWN[rate]
        known = rows is not None and drawn.unknown == before.unknown
        steps = 0 if goes_on else 1
        if not known and not piece:
            # Rows cannot tell whether a batch was used twice, so every pass takes a batch of its own.
            steps = passes
        batches, examples = used.batches + steps, used.examples + (rows or 0)
        if batches > drawn.batches - before.batches:
            raise PrivacyError(
                f"This is step {batches} on {drawn.batches - before.batches} batches of the private data loader: "
                "the data came from elsewhere, or a batch was used twice (by two optimizers of one engine, say). "
                "The accountant counts on a fresh Poisson sample at every step and would understate what leaks. "
                "Iterate over the loader that make_private returned, one batch per step, or pass check_batches=False "
                "if your own batches are drawn at the accounted rate."
            )
        if known and examples > drawn.examples - before.examples:
            raise PrivacyError(
                f"{examples} rows went through the backward passes, but the private data loader has drawn "
                f"{drawn.examples - before.examples} examples: some example is in several rows and clipped in each, "
                "so that it could move the sum by several times max_grad_norm, or the data came from elsewhere. "
                "Average the loss over an example's copies inside one row, or pass check_batches=False if every "
                "example is in one row only."
            )
        used.batches, used.examples = batches, examples
