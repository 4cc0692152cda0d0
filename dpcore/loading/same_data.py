"""Whether all ranks draw from the same data set.

A rank draws an example by its number, and no other rank draws that number. Where ranks hold their data in different
orders, one person's example has two numbers, may be in two ranks' shares of one batch, and moves the sum by 2 C. Where
each holds a part of the data, numbers of other ranks' parts are never drawn.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError
from dpcore.tree import flatten

LOOKED_AT = 8
"""Examples, spread over the data set."""


def check_same_data(data_set: Any, ranks: Ranks) -> None:
    """Refuse data sets whose examples are others on other ranks.

    Examples that are not the same when they are read twice (random changes of pictures, say) tell nothing, and those
    that cannot be read here fail where the loader reads them.

    Args:
        data_set: A rank's data set, with ``__len__`` and ``__getitem__``.
        ranks: All of them call this.

    Raises:
        PrivacyError: a rank has another number of examples, or an example has other contents there.
    """
    ranks.agree({"the number of examples": len(data_set)})
    everyone = ranks.gather(_digests(data_set))
    for digests in zip(*everyone, strict=True):
        if len({digest for digest in digests if digest is not None}) > 1:
            raise PrivacyError(
                "The ranks' data sets differ: the same number is another example on another rank, so that one example "
                "may be in the shares of two ranks, or is never drawn. Give every rank the whole data set in the same "
                "order (split and shuffle it with the same seed on all ranks); each rank draws a share of its own."
            )


def _digests(data_set: Any) -> list[str | None]:
    """Digests of some examples; None of those that tell nothing."""
    length = len(data_set)
    numbers = sorted({i * (length - 1) // max(LOOKED_AT - 1, 1) for i in range(LOOKED_AT)}) if length else []
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            return [_digest(data_set, number) for number in numbers]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _digest(data_set: Any, number: int) -> str | None:
    try:
        first, second = (_contents(data_set[number]) for _ in range(2))
    except Exception:  # whatever it is, the loader will say so where it reads the example
        return None
    return first if first == second else None


def _contents(example: Any) -> str:
    """A digest of the numbers and texts in an example; of other objects nothing is taken."""
    digest = hashlib.sha256()
    for leaf in flatten(example)[0]:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes() if leaf.dtype != object else b"")
        elif isinstance(leaf, str | bytes | int | float | bool):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
