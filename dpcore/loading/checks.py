"""Which loaders and data sets keep the assumption that a batch holds an example at most once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from dpcore.errors import PrivacyError, UnsupportedError


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
    whole = type(chosen) in (SequentialSampler, RandomSampler, DistributedSampler)
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
    """PrivacyError where an example stands at several places of a data set, as far as torch's own classes tell."""
    while isinstance(dataset, Subset):
        indices = [int(i) for i in dataset.indices]
        if len(set(indices)) < len(indices):
            raise PrivacyError(
                f"The Subset holds an example {max(Counter(indices).values())} times, and each copy is drawn and "
                "clipped by itself: the example moves the sum by as many times max_grad_norm. Give every index once."
            )
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        if len({id(part) for part in dataset.datasets}) < len(dataset.datasets):
            raise PrivacyError(
                "The ConcatDataset holds one data set several times, and each copy of an example is drawn and clipped "
                "by itself: it moves the sum by several times max_grad_norm. Train for more epochs instead."
            )
        for part in dataset.datasets:
            check_data_set(part)


def check_ordinary(loader: DataLoader[Any]) -> None:
    """PrivacyError where a loader without Poisson sampling may draw an example several times; TypeError where it is no
    loader of torch's."""
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
