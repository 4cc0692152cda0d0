"""Balls in bins of a stream: which bin a unit is in is a function of its id and of a key that nobody knows.

The key is new in every epoch, so a unit's places are uniform and independent of the others' and of other epochs', as
far as keyed BLAKE2 is a random function, and as the accountant's bound for bins assumes. No list of units is needed.
"""

from __future__ import annotations

import hashlib
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dpcore.accountants.accountant import IAccountant
from dpcore.arguments import check_number
from dpcore.errors import PrivacyError

Unit = TypeVar("Unit")
RULE = "it must be a whole number, at least 1"


def bins_of_stream(
    stream: Iterable[Unit],
    unit_id: Callable[[Unit], int | str | bytes],
    *,
    bins: int,
    accountant: IAccountant,
    noise_multiplier: float,
    at_once: int = 1,
) -> Iterator[list[Unit]]:
    """Yield the batches of one epoch of a stream, each unit in one of them, for a loop over an :class:`dpcore.Engine`.

    The epoch is counted when its first batch is asked for. A batch may be empty, and is a step all the same; the
    divisor is a public number, for the stream's length is not known. The stream is read bins / at_once times.

    Args:
        stream: What can be read several times and begins anew each time (an ``IterableDataset``, say), one item for
            every privacy unit.
        unit_id: Tells a unit's id, which no other unit has and which does not change.
        bins: T, how many batches an epoch has; a public number.
        accountant: Of the run; "prv" alone knows of bins.
        noise_multiplier: The smallest σ of the epoch's steps.
        at_once: How many batches are kept in memory in one reading.

    Yields:
        Lists of items; ``bins`` of them.

    Raises:
        PrivacyError: two items of a batch have one id, or the ids are others when the stream is read again.
        TypeError: the stream can be read once only, or an id is of another type.
        ValueError: a number is out of its range.
        UnsupportedError: the accountant does not know of bins.
    """
    bins, at_once = (
        int(check_number(name, value, lambda n: n >= 1 and n % 1 == 0, RULE))
        for name, value in (("bins", bins), ("at_once", at_once))
    )
    if isinstance(stream, Iterator):
        raise TypeError(
            f"stream is of type {type(stream).__name__}, which can be read once; pass what begins anew with every "
            "for loop, as an IterableDataset does."
        )
    if not isinstance(accountant, IAccountant):
        raise TypeError(
            f"accountant is of type {type(accountant).__name__}; pass an accountant, engine.accountant say."
        )
    return _batches(stream, unit_id, bins, at_once, accountant, noise_multiplier)


def _batches(
    stream: Iterable[Unit],
    unit_id: Callable[[Unit], int | str | bytes],
    bins: int,
    at_once: int,
    accountant: IAccountant,
    noise_multiplier: float,
) -> Iterator[list[Unit]]:
    accountant.count_epochs(noise_multiplier=noise_multiplier, bins=bins)
    key, everyone = secrets.token_bytes(32), None
    for first in range(0, bins, at_once):
        kept: list[dict[bytes, Unit]] = [{} for _ in range(min(at_once, bins - first))]
        ids = 0
        for unit in stream:
            name = _name(unit_id(unit))
            # 128 bits modulo the number of bins: no bin is likelier than another by more than 2**-128.
            number = int.from_bytes(hashlib.blake2b(name, key=key, digest_size=16).digest())
            ids, place = ids + number, number % bins - first
            if 0 <= place < len(kept):
                if name in kept[place]:
                    raise PrivacyError(
                        f"Two items of the stream have the id {unit_id(unit)!r}, and both are in one batch: the unit "
                        "is clipped in each and moves the sum by twice max_grad_norm. Give every unit one item, with "
                        "all of its rows."
                    )
                kept[place][name] = unit
        everyone = ids if everyone is None else everyone
        if ids != everyone:
            raise PrivacyError(
                "The ids of the stream's items were others when it was read again: a unit may be in several batches, "
                "or in none. Give a stream that begins anew with the same items each time, in whatever order, and ids "
                "that stay."
            )
        for batch in kept:
            yield [*batch.values()]


def _name(given: object) -> bytes:
    """Return the bytes of an id; two ids of different types are two."""
    if isinstance(given, bytes):
        return b"bytes " + given
    if isinstance(given, str):
        return b"text " + given.encode()
    try:
        return b"number %d" % operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"The id of a unit is {given!r}, of type {type(given).__name__}; it must be a whole number, a text or "
            "bytes."
        ) from None
