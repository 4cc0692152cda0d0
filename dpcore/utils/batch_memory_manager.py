"""Large logical batches in small physical pieces, for loops that call ``backward`` themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.data import DataLoader

from dpcore.data_loader import DPDataLoader
from dpcore.errors import UnsupportedError
from dpcore.loading.ledger import name_of
from dpcore.loading.units import rows_per_unit
from dpcore.microbatch.layout import FEWEST_AT_FIRST
from dpcore.microbatch.pieces import cut
from dpcore.microbatch.planner import MicroBatches
from dpcore.optimizers.logical_batch import Piece
from dpcore.optimizers.optimizer import DPOptimizer
from dpcore.privacy_unit import units_in
from dpcore.tree import batch_length, flatten

AUTO = "auto"
FIRST_PIECE = FEWEST_AT_FIRST
"""Examples of a kind that is not known yet: what they leave behind is what the next pieces are planned by."""


class PiecewiseLoader:
    """Iterates over pieces of a loader's batches; the optimiser is told with each piece whether its batch goes on.

    ``max_physical_batch_size`` "auto": pieces of the size at which a step takes the least time and memory, planned by
    what the first ones leave behind. ``in_step``: all ranks get equally many pieces, empty ones where they have fewer
    examples, for loops in which every pass may exchange something. ``counts_batches``: the length is the number of
    batches, as with "auto", and not that of the pieces to expect.

    Schedules of torch's and dpcore's classes may be stepped for every piece: they move at a batch's last one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        max_physical_batch_size: int | str,
        optimizer: DPOptimizer,
        in_step: bool = False,
        counts_batches: bool = False,
    ) -> None:
        self.loader = loader
        self.size = max_physical_batch_size
        self.optimizer = optimizer
        ranks = optimizer.ranks
        # Every pass of a sharded module gathers parameters from all ranks.
        self._in_step = ranks if ranks is not None and (in_step or ranks.sharded) else None
        self._counts_batches = counts_batches or max_physical_batch_size == AUTO
        self._plans: dict[Any, MicroBatches] = {}
        self._batches = itertools.count()
        self._rows = rows_per_unit(getattr(loader, "dataset", None)) or 1  # of an example, in a batch
        optimizer.plans_pieces = max_physical_batch_size == AUTO

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pieces of {self.size!r} of {self.loader!r})"

    def __iter__(self) -> Iterator[Any]:
        # A loop that was left within a batch must not add its pieces to another batch's.
        self.optimizer.discard()
        try:
            for batch in self.loader:
                yield from self.pieces_of(batch)
        finally:
            # Reached as soon as a loop lets go of the iterator, by a break or an error too.
            self.optimizer.logical_batch.leave()

    def pieces_of(self, batch: Any) -> Iterator[Any]:
        """Hand out one batch; ``step()`` has to be called for every piece before the next one is fetched."""
        name = name_of(self), next(self._batches)
        return self._planned_pieces(batch, name) if isinstance(self.size, str) else self._pieces(batch, name, self.size)

    def _planned_pieces(self, batch: Any, name: Any) -> Iterator[Any]:
        kind = tuple((leaf.shape[1:], leaf.dtype) for leaf in flatten(batch)[0] if isinstance(leaf, Tensor))
        length, start = self._length(batch), 0
        first = True
        while True:
            rest = length - start
            plan = self._plans.get(kind)
            pieces = self._of_all_ranks(max(1, -(-rest // (plan.size(length) if plan else FIRST_PIECE))))
            stop = start + -(-rest // pieces)
            yield self._hand_out(batch, slice(start, stop), name, first, pieces > 1)
            if plan is None and self.optimizer.piece_plan is not None:
                self._plans[kind] = self.optimizer.piece_plan
            start, first = stop, False
            if pieces == 1:
                return

    def _of_all_ranks(self, pieces: int) -> int:
        """The number of pieces that the rank with the most needs, where all go in step; else this one's."""
        return pieces if self._in_step is None else self._in_step.largest(pieces)

    def _pieces(self, batch: Any, name: Any, size: int) -> Iterator[Any]:
        length = self._length(batch)
        pieces = self._of_all_ranks(max(1, -(-length // size)))
        for k in range(pieces):
            examples = slice(k * length // pieces, (k + 1) * length // pieces)
            yield self._hand_out(batch, examples, name, k == 0, k + 1 < pieces)

    def _length(self, batch: Any) -> int:
        return units_in(batch_length(batch), self._rows)

    def _hand_out(self, batch: Any, examples: slice, name: Any, first: bool, goes_on: bool) -> Any:
        """Return a piece; its name is announced with it."""
        piece = cut(batch, slice(examples.start * self._rows, examples.stop * self._rows))
        tensors = tuple(ref(leaf) for leaf in flatten(piece)[0] if isinstance(leaf, Tensor) and leaf.dim())
        self.optimizer.hand_out(Piece(name, examples.stop - examples.start, first, goes_on, tensors=tensors))
        return piece

    def __len__(self) -> int:
        """The number of pieces to expect, for progress bars; the batches' lengths are random.

        For :meth:`PrivacyEngine.make_private`, and with "auto", the number of batches: how often a schedule moves.
        """
        if self._counts_batches or isinstance(self.size, str):
            return len(self.loader)
        whole = self.loader.batch_size
        if isinstance(self.loader, DPDataLoader):
            whole = self.loader.sample_rate * len(self.loader.dataset)  # type: ignore[arg-type]
            if self.optimizer.ranks is not None:
                whole /= self.optimizer.ranks.shares
        return math.ceil(len(self.loader) * max(1.0, (whole or 1) / self.size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class BatchMemoryManager:
    """A context manager whose loader cuts logical batches into pieces that fit the memory.

    ``with BatchMemoryManager(data_loader=, max_physical_batch_size=, optimizer=) as loader:`` iterates over pieces. The
    result equals that of whole batches to rounding; noise is added and steps are counted once per logical batch. A loop
    that is abandoned midway leaves no flag and no part of a sum behind.

    Args:
        data_loader: The loader that make_private returned.
        max_physical_batch_size: The most examples of a piece, at least 1; or "auto", which plans the pieces by time
            and memory. Schedules of torch's and dpcore's classes move once per batch, at its last piece; what else
            changes a setting within a batch is refused.
        optimizer: The optimizer that make_private returned.

    Raises:
        ValueError: the size is below 1.
        TypeError: the optimizer is not private.
        UnsupportedError: the module's inputs are time first.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int | str, optimizer: DPOptimizer
    ) -> None:
        if not isinstance(optimizer, DPOptimizer):
            raise TypeError(
                f"optimizer is of type {type(optimizer).__name__}, which would step on every piece; pass the "
                "optimizer that make_private returned."
            )
        check_pieces(max_physical_batch_size, optimizer.module.batch_first)
        self.data_loader, self.optimizer, self.max_physical_batch_size = data_loader, optimizer, max_physical_batch_size
        self.loader = PiecewiseLoader(data_loader, max_physical_batch_size, optimizer)

    def __enter__(self) -> PiecewiseLoader:
        return self.loader

    def __exit__(self, *exception: Any) -> None:
        self.optimizer.discard()
        self.optimizer.plans_pieces = False


def whole_batches(loader: Any) -> Any:
    """Return the loader of which ``loader`` hands out pieces, or ``loader`` itself: what a checkpoint has to hold."""
    return loader.loader if isinstance(loader, PiecewiseLoader) else loader


WHOLE = "_dpcore_iterated_by"


def iterate_whole(loader: Any, who: str) -> None:
    """Mark a loader over which ``who`` iterates, so that nobody else's pieces of its batches would be used."""
    setattr(loader, WHOLE, who)


def check_iterated(loader: Any, size: int | str) -> None:
    """UnsupportedError where pieces would be made for nobody: see :func:`iterate_whole`."""
    who = getattr(loader, WHOLE, None)
    if who is not None:
        raise UnsupportedError(
            f"max_physical_batch_size is {size!r}, but {who} iterates over whole batches and would never see the "
            "pieces; leave it out, and choose the loader's batch size, which is that of the logical batch, so that it "
            "fits the memory (dpcore.accelerate and dpcore.transformers cut batches into pieces)."
        )


def check_pieces(size: int | str, batch_first: bool) -> None:
    """ValueError or UnsupportedError where batches cannot be cut into pieces of ``size``, a number or "auto"."""
    number = isinstance(size, int) and not isinstance(size, bool)
    if not (size >= 1 if number else size == AUTO):  # type: ignore[operator]
        raise ValueError(f"max_physical_batch_size is {size!r}; it must be at least 1, or {AUTO!r}.")
    if not batch_first:
        raise UnsupportedError(
            "With batch_first=False a batch may be time-first, and pieces would be cut from its time steps: every "
            "piece would hold all examples, each clipped once per piece. Build the module batch first."
        )
