"""Loaders that tell the ledger how many examples of their data set each batch is made of."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, IterableDataset

from dpcore.errors import PrivacyError
from dpcore.loading.ledger import Source, hand_out
from dpcore.loading.units import rows_per_unit
from dpcore.privacy_unit import units_in
from dpcore.tree import batch_length


class _Made(NamedTuple):
    """A collated batch, and how many rows it is made of.

    (torch pins the memory of a named tuple's parts.)
    """

    batch: Any
    rows: int


class _Counted:
    """A ``collate`` that hands on how many rows a batch is made of, from a worker process too."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: Any) -> _Made:
        return _Made(self.collate(examples), len(examples))


class _Distinct:
    """The index lists of ``sampler``; PrivacyError where one holds an index twice.

    ``sizes``: of those drawn in this round whose batches were not handed out yet.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        for batch in self.sampler:
            batch = list(batch)
            numbers = [operator.index(i) if hasattr(i, "__index__") else i for i in batch]  # equal tensors are two
            if len(set(numbers)) < len(batch):
                most = max(Counter(numbers).values())
                raise PrivacyError(
                    f"The loader's {type(self.sampler).__name__} has put an example into one batch {most} times: it is "
                    "clipped in each of its rows and moves the sum by as many times max_grad_norm. Draw every batch "
                    "without replacement."
                )
            self.sizes.append(len(batch))
            yield batch


class CountingDataLoader(DataLoader[Any]):
    """A loader that tells the ledger of how many examples every batch is that it hands out."""

    handed_out = 0
    """Number of batches so far."""
    _seen: int | None = None

    def see(self, number: int) -> None:
        """Note that steps need none of the first ``number`` batches any more."""
        self._seen = max(number, self._seen or 0)

    @property
    def waiting(self) -> int:
        """How many batches were handed out behind the newest that a step has used, of whichever optimizer."""
        return 0 if self._seen is None else self.handed_out - self._seen

    @property
    def source(self) -> Source:
        """Under which number batches are counted."""
        return None

    def _begin(self) -> Any:
        """Return what :meth:`_take` and :meth:`_end` are given in the round that begins."""

    def _end(self, begun: Any) -> None:
        """Note that a round has ended or was left."""

    def _take(self, begun: Any) -> int | None:
        """Count a batch of a round; return its number among the sampler's draws, None where that is not known."""
        self.handed_out += 1
        return None

    def __iter__(self) -> Any:
        begun = self._begin()
        try:
            yield from self._round(begun, super().__iter__)
        finally:
            self._end(begun)

    def _round(self, begun: Any, make: Any) -> Iterator[Any]:
        collate, sampler = self.collate_fn, self.batch_sampler
        # An iterator takes both when it is made. Neither may be seen by those who build a loader of their own of them,
        # nor by a class that changes batches in an __iter__ of its own.
        if self._auto_collation and make.__func__ is DataLoader.__iter__:  # type: ignore[attr-defined]
            self.collate_fn = _Counted(collate)
            if not isinstance(self.dataset, IterableDataset):
                vars(self)["batch_sampler"] = _Distinct(sampler)
        try:
            made = make()
        finally:
            self.collate_fn, vars(self)["batch_sampler"] = collate, sampler
        # Persistent workers go on with the iterator of the first round.
        drawn = getattr(made, "_index_sampler", None)
        each, epoch_of = rows_per_unit(self.dataset) or 1, getattr(sampler, "epoch_of", lambda draw: None)
        for batch in made:
            rows = None
            if isinstance(batch, _Made):
                batch, rows = batch
            if isinstance(drawn, _Distinct) and getattr(self, "in_order", True):
                _check_data_set(drawn.sizes.popleft() * each, rows)
            draw = self._take(begun)
            rows = batch_length(batch) if rows is None else rows
            hand_out(self, self.handed_out, self.source, draw, units_in(rows, each), epoch_of(draw))
            yield batch


def _check_data_set(wanted: int, rows: int | None) -> None:
    if wanted != rows:
        raise PrivacyError(
            f"The data set gave {rows} examples for {wanted} indices, so an index stands for several rows, each "
            "of which would be clipped by itself. Let __getitem__ and __getitems__ return one example for every index."
        )


def counted(loader: DataLoader[Any]) -> CountingDataLoader:
    """``loader`` itself, from now on of a class that counts: loops go on with the object that they have."""
    if not isinstance(loader, CountingDataLoader):
        kind = type(loader)
        loader.__class__ = type(f"Counting{kind.__name__}", (CountingDataLoader, kind), {"__module__": kind.__module__})
    return cast(CountingDataLoader, loader)
