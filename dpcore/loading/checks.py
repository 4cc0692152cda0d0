"""Checks of loaders and data sets: a batch must hold an example at most once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.loading.units import Views


def check_whole(loader: DataLoader[Any], distributed: bool) -> None:
    """UnsupportedError where a loader's own choice of examples would be lost in a Poisson sample of the whole data."""
    if not loader._auto_collation:
        raise UnsupportedError(
            "The loader has batch_size=None: it hands on what the data set returns, in which examples cannot be "
            "counted or drawn one by one. Let the data set return single examples, and give the loader a batch_size."
        )
    given = loader.batch_size is None  # then the loader was built with a batch_sampler=
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None) if given and type(batches) is BatchSampler else loader.sampler
    chosen: Any = batches if given and type(batches) is not BatchSampler else sampler
    size = len(loader.dataset)  # type: ignore[arg-type]
    of_accelerate = isinstance(chosen, RandomSampler) and type(chosen).__module__.startswith("accelerate.")  # an order
    whole = of_accelerate or type(chosen) in (SequentialSampler, RandomSampler, DistributedSampler)
    source = getattr(chosen, "dataset" if type(chosen) is DistributedSampler else "data_source", None)
    share = type(chosen) is DistributedSampler and chosen.num_replicas > 1 and not distributed
    if whole and len(source) == size and not share:  # type: ignore[arg-type]
        return
    part = f" (of {len(source)} of {size} examples)" if whole and len(source) != size else ""  # type: ignore[arg-type]
    raise UnsupportedError(
        f"The loader's {type(chosen).__name__}{part} would be replaced by Poisson sampling of the whole data set, also "
        "of examples that it leaves out. Choose the examples with torch.utils.data.Subset, give each the same chance, "
        "or pass poisson_sampling=False with a sample_rate that bounds every example's chance."
    )


def check_data_set(dataset: Any) -> None:
    """PrivacyError where an example stands at several places of a data set, as far as its classes tell.

    These are torch's own and ``datasets.Dataset``.
    """
    found: dict[Any, list[np.ndarray]] = {}
    for part, places in _parts(dataset, None):
        if part is dataset:
            return  # as it is, of one part, whose length may not be known
        if places is None:
            places = np.arange(len(part))
        elif hasattr(part, "__len__"):
            places = np.where(places < 0, places + len(part), places)
        found.setdefault(part if isinstance(part, _Memory) else id(part), []).append(places)
    for several in found.values():
        most = int(np.unique(np.concatenate(several), return_counts=True)[1].max(initial=0))
        if most > 1:
            raise PrivacyError(
                f"The {type(dataset).__name__} holds an example {most} times (parts of a ConcatDataset overlap, a "
                "Subset or select() has an index several times, or interleave_datasets() has repeated a part), and "
                "each copy is drawn and clipped by itself: the example moves "
                f"the sum by {most} times max_grad_norm. Give every example one place; train for more epochs, or weigh "
                "the losses of rare examples, instead of repeating them."
            )


@dataclass(frozen=True)
class _Memory:
    """Where rows of an Arrow table lie: two of the same memory and number are one."""

    addresses: tuple[int, ...]


def _parts(dataset: Any, places: np.ndarray | None) -> Iterator[tuple[Any, np.ndarray | None]]:
    """Yield the data sets behind Views, Subset and ConcatDataset, and which of their places are used; None: all."""
    if isinstance(dataset, Subset):
        chosen = np.array([int(i) for i in dataset.indices], dtype=np.int64)
        yield from _parts(dataset.dataset, chosen if places is None else chosen[places])
    elif isinstance(dataset, ConcatDataset):
        places = np.arange(len(dataset)) if places is None else np.where(places < 0, places + len(dataset), places)
        start = 0
        for part, stop in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            yield from _parts(part, places[(places >= start) & (places < stop)] - start)
            start = stop
    elif isinstance(dataset, Views):
        yield from _parts(dataset.dataset, places)
    elif type(dataset).__module__ == "datasets.arrow_dataset":
        yield from _rows_in_memory(dataset, places)
    else:
        yield dataset, places


def _rows_in_memory(dataset: Any, places: np.ndarray | None) -> Iterator[tuple[_Memory, np.ndarray]]:
    """Yield where the rows of a ``datasets.Dataset`` lie: select() lists numbers, concatenate_datasets() copies none.

    (map() does, and nothing is known of its copies.)
    """
    places = np.arange(len(dataset)) if places is None else np.where(places < 0, places + len(dataset), places)
    if dataset._indices is not None:
        places = dataset._indices.column(0).to_numpy().astype(np.int64)[places]
    places, start = np.sort(places), 0
    for batch in dataset.data.table.to_batches():
        offsets = [column.offset for column in batch.columns]
        buffers = [buffer for column in batch.columns for buffer in column.buffers()]
        addresses = [buffer.address for buffer in buffers if buffer is not None]
        first, last = np.searchsorted(places, [start, start + len(batch)])
        here = places[first:last] - start
        start += len(batch)
        if addresses:
            yield _Memory((*addresses, *(offset - offsets[0] for offset in offsets))), here + offsets[0]


def check_ordinary(loader: DataLoader[Any]) -> None:
    """Refuse a loader without Poisson sampling that may draw an example several times.

    Raises:
        PrivacyError: its sampler draws with replacement.
        TypeError: it is no loader of torch's.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader is of type {type(loader).__name__}, of which it is unknown what it draws; pass a "
            "torch.utils.data.DataLoader."
        )
    if getattr(loader.sampler, "replacement", False):
        raise PrivacyError(
            f"The loader's {type(loader.sampler).__name__} draws with replacement: an example that is in a batch twice "
            "is clipped in each of its rows and moves the sum by twice max_grad_norm. Use poisson_sampling=True with "
            "an ordinary loader, or a sampler without replacement."
        )


def check_once_a_round(loader: DataLoader[Any]) -> None:
    """Refuse a sampler that draws an example several times a round, where the rate is to be that of once.

    Raises:
        PrivacyError: the accountant would count too small a rate.
    """
    given = loader.batch_size is None  # then the loader was built with a batch_sampler=
    sampler: Any = getattr(loader.batch_sampler, "sampler", None) if given else loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not hasattr(sampler, "__len__"):
        return
    drawn, size = len(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if drawn > size:
        raise PrivacyError(
            f"The loader's {type(sampler).__name__} draws {drawn} times a round from {size} examples, so an example is "
            f"in several of its {len(loader)} batches, and the sample rate is not 1 / {len(loader)}. Draw each once a "
            "round and train for more rounds, or pass the sample_rate that bounds every example's chance to be in a "
            "batch."
        )
