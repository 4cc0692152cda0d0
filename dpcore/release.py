"""One private release of a sum: the noise of its step, before the sum or behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpcore.correlated import Correlation
from dpcore.noise import GaussianNoise


class Sums(Protocol):
    """The sums of parameters, whole or in shards: one after the other, and in parts of one run of addresses each."""

    @property
    def flat(self) -> Tensor: ...

    def by_address(self) -> Iterator[tuple[int, Tensor]]:
        """Give the parts in the order of ``flat``, each with the address of its first number, row-major."""
        ...


class WholeSums(Sums, Protocol):
    """The sums of whole parameters, so that an address is a place in ``flat`` but for the order of dimensions."""

    def turn_round(self) -> None:
        """Bring what was written to ``flat`` in the order of addresses into the order of memory."""
        ...


@dataclass(frozen=True)
class Release:
    """Noise of standard deviation ``std``, of the step's number, for the sums of all parameters.

    The two orders of noise and sum round differently, and each stays what it is: :meth:`begin` is for sums that are
    added to the noise (:class:`dpcore.engine.engine.Engine`), :meth:`add` for sums that are there.
    """

    noise: GaussianNoise
    std: float
    step: int
    correlation: Correlation | None = None
    """Ties the noise of a step to that of others, if anything does."""

    @classmethod
    def by(cls, user: Any, std: float, correlation: Correlation | None = None) -> Release:
        """Return the next release of ``user``, an engine or an optimizer; PrivacyError where its noise is another's."""
        user.noise.serve(user)
        if correlation is not None:
            step = correlation.release(user.noise)
            return cls(user.noise, std, step, correlation if correlation.mechanism.taken_back else None)
        return cls(user.noise, std, user.steps)

    def begin(self, sums: WholeSums) -> None:
        """Set the sums to what is added to: the noise, or zeros where it depends on them.

        Also where memory runs out and a batch starts anew: a step's noise is the same however often it is drawn.
        """
        if self.noise.has_addresses:
            self.noise.fill_(sums.flat, self.std, self.step)  # all at once: its numbers are in the order of addresses
            sums.turn_round()
        elif self.noise.may_come_first:
            self.noise.fill_(sums.flat, self.std, self.step)
        else:
            sums.flat.zero_()

    def add(self, sums: Sums) -> None:
        """Add all of the noise."""
        if self.noise.has_addresses:
            self.add_share(sums, 0, 1)
        else:
            self.noise.add_(sums.flat, self.std, self.step)

    def add_share(self, sums: Sums, rank: int, size: int) -> None:
        """Add the noise of the numbers of ``sums`` that are number ``rank`` of ``size`` shares of them."""
        count = len(sums.flat)
        first, last = rank * count // size, (rank + 1) * count // size
        passed = 0
        for start, part in sums.by_address():
            at, end = (min(max(place - passed, 0), part.numel()) for place in (first, last))
            passed += part.numel()
            if at == end:
                continue
            if part.dim() == 1:
                self._add_to(part[at:end], start + at)
            else:
                noise = torch.zeros(part.numel(), dtype=part.dtype, device=part.device)
                self._add_to(noise[at:end], start + at)
                part.add_(noise.view(part.shape))

    def _add_to(self, numbers: Tensor, start: int) -> None:
        """Add the noise of the addresses from ``start`` on to ``numbers`` [n]."""
        if self.correlation is None:
            self.noise.add_(numbers, self.std, self.step, start)
        else:
            numbers.add_(self.correlation.noise_of(self.noise, self.step, start, numbers), alpha=self.std)
