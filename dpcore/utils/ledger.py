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
    examples: float = 0


# By sample rate and not by loader: a trainer may build its own private loader over the same data at the same rate.
_DRAWN: defaultdict[float, Count] = defaultdict(Count)


def count_drawn(sample_rate: float, batch: Any, batch_first: bool = True) -> None:
    """A private loader at ``sample_rate`` has handed out ``batch``."""
    drawn = _DRAWN[sample_rate]
    drawn.batches += 1
    try:
        drawn.examples += batch_length(batch) if batch_first else float("inf")
    except UnsupportedError:
        # Strings, say, that the loop turns into tensors: only batches can be counted.
        drawn.examples = float("inf")


class Ledger:
    """What one optimiser has used of the batches drawn at ``rate()`` since the ledger was opened."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self.rate = rate
        self._before = copy.deepcopy(_DRAWN)
        self._used: defaultdict[float, Count] = defaultdict(Count)

    def use(self, rows: int, steps: int) -> None:
        """PrivacyError where ``rows`` more examples or ``steps`` more steps are more than was drawn."""
        rate = self.rate()
        before, used, drawn = self._before[rate], self._used[rate], _DRAWN[rate]
        used.batches += steps
        used.examples += rows
        if used.batches > drawn.batches - before.batches:
            raise PrivacyError(
                f"This is step {used.batches} on {drawn.batches - before.batches} batches of the private data loader: "
                "the data came from elsewhere, or a batch was used twice. The accountant counts on a fresh Poisson "
                "sample at every step and would understate what leaks. Iterate over the loader that make_private "
                "returned, or pass check_batches=False if your own batches are drawn at the accounted rate."
            )
        if used.examples > drawn.examples - before.examples:
            raise PrivacyError(
                f"{used.examples:g} rows went through the backward passes, but the private data loader has drawn "
                f"{drawn.examples - before.examples:g} examples: some example is in several rows and clipped in each, "
                "so that it could move the sum by several times max_grad_norm, or the data came from elsewhere. "
                "Average the loss over an example's copies inside one row, or pass check_batches=False if every "
                "example is in one row only."
            )
