"""Weights that must be the same on several ranks, compared where one of these may have changed its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.distributed import Ranks, fingerprint
from dpcore.errors import PrivacyError
from dpcore.reduction import Reduction


class SameWeights:
    """What a rank knows of the others' weights: whether they were compared, and what has changed its own since.

    Every step writes to the weights as often on all ranks; a load, or another write in place, on one of them alone is
    seen by torch's count of writes. One through ``.data`` is not.
    """

    def __init__(self) -> None:
        self.known = False
        self._now: tuple[int, object] = 0, None
        self._noted: tuple[int, object] = self._now

    def told(self, params: Iterable[Any], optimizer: Any) -> tuple[int, int]:
        """Return what to tell the other ranks: whether all were the same, and how often this one has written since."""
        self._now = sum(map(_writes, params)), getattr(optimizer, "state", None)
        self.known = self.known and self._now[1] is self._noted[1]
        return int(self.known), self._now[0] - self._noted[0] if self.known else 0

    def note(self) -> None:
        """Note that all ranks had the same when this one was last asked."""
        self.known, self._noted = True, self._now

    def agree(
        self, values: dict[str, Any], ranks: Ranks, reduction: Reduction, params: Iterable[Parameter], optimizer: Any
    ) -> None:
        """Compare ``values`` on all ranks, and where a rank may have others the weights and the optimizer's state.

        Raises:
            PrivacyError: they differ, or one of the ranks that hold different shards has loaded or written its own
                alone. On all ranks.
        """
        params = [*params]
        told = ranks.agree(values, self.told([reduction.shards.get(p, p) for p in params], optimizer))
        if reduction.holds_others:
            check_none_alone(told)
        if may_differ(told):
            self.known = False
            alike = [*reduction.alike(params)]
            states = (part for p in alike for part in _state_of(optimizer, reduction.shards.get(p, p)))
            ranks.agree({"the weights": fingerprint(alike), "the optimizer's state": fingerprint(states)})
            reduction.check_weights(params)
        self.note()


def may_differ(told: Sequence[Sequence[int]]) -> bool:
    """Return whether weights must be compared."""
    return any(of != told[0] for of in told) or not told[0][0]


def check_none_alone(told: Sequence[Sequence[int]]) -> None:
    """PrivacyError where one of the ranks that hold different shards has changed its own alone."""
    if any(of != told[0] for of in told):
        raise PrivacyError(
            "A rank has loaded or written its shards of the weights or of the optimizer's state, and others have not: "
            "the model would be one of two runs. Load the states of module and optimizer on all ranks "
            "(load_checkpoint() does); and write to weights on all ranks or on none."
        )


def _state_of(optimizer: Any, param: Any) -> list[Tensor]:
    """Return the tensors that an optimizer keeps of a parameter, of this rank."""
    states = getattr(optimizer, "state", None)
    kept = states.get(param) if isinstance(states, Mapping) else None
    found = [kept[name] for name in sorted(kept, key=str)] if isinstance(kept, Mapping) else []
    return [_local(value) for value in found if isinstance(value, Tensor) and value.layout == torch.strided]


def _writes(tensor: Any) -> int:
    """Return how often a tensor was written; of a DTensor an operation counts for itself or for what is here of it."""
    here = _local(tensor)
    return here._version if here is tensor else here._version + tensor._version


def _local(tensor: Any) -> Tensor:
    """Return a tensor as it is, or what this rank has of it."""
    return getattr(tensor, "_local_tensor", tensor)
