"""Seeds that nobody chose, of which no two processes may have the same.

``os.fork()`` copies them, and with them the noise and the batches to come: two processes that train on would release
gradients whose difference has no noise. So the child draws its own. Seeds that a user chose stay what they are.
"""

from __future__ import annotations

import hashlib
import operator
import os
import secrets
import weakref
from typing import Any, Protocol


class Seeded(Protocol):
    """An object whose random numbers follow from its seed."""

    seed: int


_DRAWN: weakref.WeakSet[Seeded] = weakref.WeakSet()


def draw_seed(for_whom: Seeded) -> None:
    """Set the seed of ``for_whom`` to 128 secret bits, and to others in every process that is forked."""
    for_whom.seed = secrets.randbits(128)
    _DRAWN.add(for_whom)


def check_seed(seed: Any) -> int:
    """Return a seed that a user chose; ValueError unless it is a whole number, at least 0."""
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"seed is {seed!r}; it must be a whole number, at least 0, or None for a secret one.")
    return number


def derived_seed(seed: int, *names: Any) -> int:
    """Return 128 bits that follow from ``seed`` and the texts of ``names``, and tell nothing of other such seeds."""
    return int.from_bytes(hashlib.sha256(f"dpcore branch {seed} {names!r}".encode()).digest()[:16], "little")


def _draw_anew() -> None:
    for owner in list(_DRAWN):
        owner.seed = secrets.randbits(128)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_draw_anew)
