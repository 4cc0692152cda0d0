"""Data sets whose items are privacy units of several rows: views of an example, or examples of a user.

``__getitems__`` returns the rows of all units that are asked for, one after the other. Torch's loaders collate what it
returns, so that every loader over such a data set has units of K rows in its batches, whatever its collate_fn.
"""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from dpcore.arguments import check_number, number_of
from dpcore.errors import UnsupportedError


class UnitDataset(Dataset[Any]):
    """Units of ``rows_per_unit`` rows of ``dataset``."""

    def __init__(self, dataset: Any, rows_per_unit: Any) -> None:
        rule = "it must be a whole number, at least 1"
        self.rows_per_unit = int(check_number("K", rows_per_unit, lambda k: k >= 1 and k % 1 == 0, rule))
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "The data set is a DataLoader, which hands out batches, and units are made of single rows; pass "
                "loader.dataset, and give the result to a new DataLoader."
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UnsupportedError(
                f"The data set, of type {type(dataset).__name__}, has no length, and units are drawn by number; use a "
                "map-style data set, with __len__ and __getitem__."
            )
        if _units(dataset) is not None:
            raise UnsupportedError(
                f"The data set is one of units already, {dataset!r}, and a unit is no row. Make units of the rows "
                "themselves: dpcore.users of them, and several views of a row in the model."
            )
        self.dataset = dataset

    def __repr__(self) -> str:
        return f"{number_of(len(self), 'unit')}: each {self.words}"

    @abstractmethod
    def __len__(self) -> int:
        """Return how many units there are."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Say what a unit is."""

    @abstractmethod
    def __getitem__(self, number: int) -> list[Any]:
        """The rows of one unit."""

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The rows of several units, one after the other."""
        return [row for number in numbers for row in self[number]]


class Views(UnitDataset):
    """``rows_per_unit`` views of each example."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any] | None, rows_per_unit: Any) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(
                f"transform is {transform!r}; it must be a function that makes a view of an example, or None, which "
                "reads the example K times: dpcore.views(dataset, transform, K)."
            )
        super().__init__(dataset, rows_per_unit)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def words(self) -> str:
        return f"one example, by {self.rows_per_unit} views"

    def __getitem__(self, number: int) -> list[Any]:
        if self.transform is None:
            return [self.dataset[number] for _ in range(self.rows_per_unit)]
        example = self.dataset[number]
        return [self._view(example, self.transform) for _ in range(self.rows_per_unit)]

    def _view(self, example: Any, transform: Callable[[Any], Any]) -> Any:
        return (transform(example[0]), *example[1:]) if isinstance(example, tuple) else transform(example)


class Users(UnitDataset):
    """``rows_per_unit`` rows of each user, whose rows' numbers are ``rows``."""

    def __init__(self, dataset: Any, user_id: Sequence[Hashable], rows_per_unit: Any, sample: bool) -> None:
        super().__init__(dataset, rows_per_unit)
        is_list = hasattr(user_id, "__iter__") and not isinstance(user_id, str | bytes | Mapping | Set)
        if not is_list or getattr(user_id, "ndim", 1) == 0:
            # A container's ids are people's: none goes into a log.
            shown = repr(user_id) if user_id is None or isinstance(user_id, str) else f"a {type(user_id).__name__}"
            raise TypeError(
                f"user_id is {shown}; it must be a list, an array or a tensor that says whose each row of the data "
                "set is, an entry for every row."
            )
        ids = user_id.tolist() if isinstance(user_id, Tensor | np.ndarray) else list(user_id)
        if len(ids) != len(dataset):
            raise ValueError(
                f"user_id has {len(ids)} entries for {len(dataset)} rows of the data set; give one for every row, in "
                "their order."
            )
        ids = [user.item() if isinstance(user, Tensor | np.ndarray) and not user.ndim else user for user in ids]
        missing = next((row for row, user in enumerate(ids) if _is_missing(user)), None)
        if missing is not None:
            raise ValueError(
                f"user_id of row {missing} is {ids[missing]!r}, so that nobody knows whose it is: as a unit of its "
                "own it would split a person. Give every row an id (a number or a text), or leave such rows out."
            )
        self.sample = sample
        rows: dict[Hashable, list[int]] = {}
        for number, user in enumerate(ids):
            rows.setdefault(user, []).append(number)
        self.rows = list(rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        """Tell data sets apart whose users have other rows: a run that goes on with those has other batches."""
        found = hashlib.sha256(f"{self.sample}".encode())
        for rows in self.rows:
            found.update(np.array([-1, *rows], dtype=np.int64).tobytes())
        return found.hexdigest()[:16]

    @property
    def words(self) -> str:
        return f"one user, by {self.rows_per_unit} rows"

    def __getitem__(self, number: int) -> list[Any]:
        rows = self.rows[number]
        order = torch.randperm(len(rows)).numpy() if self.sample else np.arange(len(rows))
        return [self.dataset[rows[i]] for i in np.resize(order, self.rows_per_unit)]


def _is_missing(user: Any) -> bool:
    """Return whether an id is none: None, NaN, or nothing that is found again by its value."""
    if isinstance(user, int | str | bytes):
        return False
    try:
        # Objects that are equal to themselves alone (a tensor, one without __eq__) would be a user for every row.
        return user is None or bool(user != user) or {user} != {copy.deepcopy(user)}
    except Exception:  # whatever an object of the user's says to this
        return True


def views(dataset: Any, transform: Callable[[Any], Any] | None, K: int) -> Dataset[Any]:
    """Make every example of a data set a unit of K views, which are clipped as one.

    A loader over the result draws examples, and its batches have K rows for each, one after the other. make_private
    sees that; an Engine needs ``group=K``.

    Args:
        dataset: A map-style data set.
        transform: Makes a view, with random numbers of its own: ``transform(x)`` of an example that is a tuple
            (x, y, ...), whose other entries stay, or of the whole of any other example. None: each view is
            ``dataset[i]`` once more, of a data set that changes its examples itself, or for a model that does.
        K: How many views, at least 1.

    Returns:
        A data set of as many units as there are examples.

    Raises:
        UnsupportedError: the data set has no length.
        TypeError: the data set is a loader, or ``transform`` no function.
        ValueError: K is no whole number of at least 1.
    """
    return Views(dataset, transform, K)


def users(dataset: Any, user_id: Sequence[Hashable], K: int, *, sample: bool = True) -> Dataset[Any]:
    """Make every user of a data set a unit of K of the user's rows, which are clipped as one: user-level privacy.

    A loader over the result draws users, none twice in a batch, and its batches have K rows for each, one after the
    other; the sample rate, epsilon and the number of examples are those of users. make_private sees that; an Engine
    needs ``group=K``. A user with fewer rows has some of them again, as evenly as K allows, and no one else's.

    Args:
        dataset: A map-style data set.
        user_id: Whose each row is: a list, array or tensor with an entry for every row of the data set. Ids are equal
            by value.
        K: How many rows of a user are in a batch, at least 1.
        sample: Whether these are drawn anew each time, at random and without replacement; False: the user's first ones.

    Returns:
        A data set of as many units as there are users.

    Raises:
        UnsupportedError: the data set has no length.
        TypeError: the data set is a loader, or ``user_id`` no list.
        ValueError: K is no whole number of at least 1, or ``user_id`` has another length than the data set.
    """
    return Users(dataset, user_id, K, sample)


def rows_per_unit(dataset: Any) -> int | None:
    """Return how many rows of a batch an item of ``dataset`` has; None: it is one example."""
    units = _units(dataset)
    return None if units is None else units.rows_per_unit


def unit_words(dataset: Any) -> str | None:
    """Return what an item of ``dataset`` is, in words; None: one example."""
    units = _units(dataset)
    return None if units is None else units.words


def users_digest(dataset: Any) -> str | None:
    """Return what tells whose rows are whose; None where no item of ``dataset`` is a user."""
    units = _units(dataset)
    return units.digest if isinstance(units, Users) else None


def _units(dataset: Any) -> UnitDataset | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset) and any(_units(part) is not None for part in dataset.datasets):
        raise UnsupportedError(
            "A ConcatDataset of units of several rows hands them out as single examples. Join the data first, then "
            "make the views or users of the whole: dpcore.views(ConcatDataset([...]), transform, K)."
        )
    return dataset if isinstance(dataset, UnitDataset) else None
