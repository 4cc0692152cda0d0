"""Large logical batches in small physical pieces, for loops that call ``backward`` themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from dpcore.data_loader import DPDataLoader
from dpcore.errors import UnsupportedError
from dpcore.optimizers.optimizer import DPOptimizer
from dpcore.tree import batch_length


def cut(batch: Any, rows: slice) -> Any:
    """The examples ``rows`` of a batch, in the same structure."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {key: cut(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, rows) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(cut(value, rows) for value in batch)
    return batch


class PiecewiseLoader:
    """Iterates over pieces of a loader's batches; the optimiser is told with each piece whether its batch goes on."""

    def __init__(self, loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        self.loader = loader
        self.size = max_physical_batch_size
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[Any]:
        # A loop that was left within a batch must not add its pieces to another batch's.
        self.optimizer.discard()
        for batch in self.loader:
            length = batch_length(batch)
            pieces = max(1, -(-length // self.size))
            ranks = self.optimizer.ranks
            if ranks is not None and ranks.sharded:
                # Every pass gathers parameters from all ranks: those with fewer examples take part with empty pieces.
                pieces = ranks.largest(pieces)
            for k in range(pieces):
                # The flag travels with the piece: it is set when the piece is handed out, and for that piece only.
                rows = slice(k * length // pieces, (k + 1) * length // pieces)
                self.optimizer.hand_out(rows.stop - rows.start, k + 1 < pieces)
                yield cut(batch, rows)

    def __len__(self) -> int:
        """The number of pieces to expect, for progress bars; the batches' lengths are random."""
        whole = self.loader.batch_size
        if isinstance(self.loader, DPDataLoader):
            whole = self.loader.sample_rate * len(self.loader.dataset)  # type: ignore[arg-type]
            if self.optimizer.ranks is not None:
                whole /= self.optimizer.ranks.size
        return math.ceil(len(self.loader) * max(1.0, (whole or 1) / self.size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class BatchMemoryManager:
    """``with BatchMemoryManager(data_loader=, max_physical_batch_size=, optimizer=) as loader:`` iterates over pieces.

    The result equals that of whole batches to rounding; noise is added and steps are counted once per logical batch. A
    loop that is abandoned midway leaves no flag and no part of a sum behind.
    """

    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size is {max_physical_batch_size}; it must be at least 1.")
        if not isinstance(optimizer, DPOptimizer):
            raise TypeError(
                f"optimizer is of type {type(optimizer).__name__}, which would step on every piece; pass the "
                "optimizer that make_private returned."
            )
        if not optimizer.module.batch_first:
            raise UnsupportedError(
                "With batch_first=False a batch may be time-first, and pieces would be cut from its time steps: every "
                "piece would hold all examples, each clipped once per piece. Build the module batch first."
            )
        self.loader = PiecewiseLoader(data_loader, max_physical_batch_size, optimizer)

    def __enter__(self) -> PiecewiseLoader:
        return self.loader

    def __exit__(self, *exception: Any) -> None:
        self.loader.optimizer.discard()
