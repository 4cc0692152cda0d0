"""One private release of a sum: its noise, and the ranks that have a part of the sum each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpcore.distributed import Ranks
from dpcore.noise import GaussianNoise, SecureNoise


class Sums(Protocol):
    """The sums of all parameters: one after the other, and by their addresses, each row-major."""

    @property
    def flat(self) -> Tensor: ...

    def by_address(self) -> Iterator[tuple[int, Tensor]]: ...


@dataclass(frozen=True)
class Release:
    """Noise of standard deviation ``std``, of the step's number, for the sums of all parameters.

    The two orders of noise and sum round differently, and each stays what it is: :meth:`begin` is for sums that are
    added to the noise (:class:`dpcore.engine.engine.Engine`), :meth:`finish` for sums that are there.
    """

    noise: GaussianNoise
    std: float
    step: int
    ranks: Ranks | None = None

    @classmethod
    def by(cls, user: Any, std: float) -> Release:
        """Return the next release of ``user``, an engine or an optimizer; PrivacyError where its noise is another's."""
        user.noise.serve(user)
        return cls(user.noise, std, user.steps, getattr(user, "ranks", None))

    def begin(self, sums: Sums) -> None:
        """Set the sums to what is added to: the noise, or zeros where it depends on them.

        Also where memory runs out and a batch starts anew: a step's noise is the same however often it is drawn.
        """
        if self.noise.has_addresses:
            for start, part in sums.by_address():
                self.noise.fill_(part, self.std, self.step, start)
        elif self.noise.may_come_first:
            self.noise.fill_(sums.flat, self.std, self.step)
        else:
            sums.flat.zero_()

    def finish(self, sums: Sums) -> None:
        """Add up the sums of all ranks, with noise: each rank draws a share of it, where its numbers have addresses."""
        flat = sums.flat
        if self.ranks is not None and isinstance(self.noise, SecureNoise):
            # Its release lies on a grid, which another rank's sum would undo: so the noise comes after the sums, and
            # the second reduction, to which the other ranks add zeros, hands it out.
            self.ranks.sum_(flat)
            if self.ranks.rank:
                flat.zero_()
        if self.noise.has_addresses:
            self._add_share(sums)
        elif self.ranks is None or self.ranks.rank == 0:
            self.noise.add_(flat, self.std, self.step)
        if self.ranks is not None:
            self.ranks.sum_(flat)

    def _add_share(self, sums: Sums) -> None:
        """Add the noise of this rank's addresses."""
        count = len(sums.flat)
        rank, size = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        first, last = rank * count // size, (rank + 1) * count // size
        for start, part in sums.by_address():
            at, end = (min(max(place - start, 0), part.numel()) for place in (first, last))
            if at == end:
                continue
            if part.dim() == 1:
                self.noise.add_(part[at:end], self.std, self.step, start + at)
            else:
                noise = torch.zeros(part.numel(), dtype=part.dtype, device=part.device)
                self.noise.fill_(noise[at:end], self.std, self.step, start + at)
                part.add_(noise.view(part.shape))
