"""One private release of a sum: its noise, and the ranks that have a part of the sum each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpcore.distributed import Ranks
from dpcore.noise import GaussianNoise, SecureNoise


@dataclass(frozen=True)
class Release:
    """Noise of standard deviation ``std``, of the step's number, for a flat sum of all parameters.

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

    def begin(self, flat: Tensor) -> None:
        """Set ``flat`` to what the sums are added to: the noise, or zeros where it depends on them.

        Also where memory runs out and a batch starts anew: a step's noise is the same however often it is drawn.
        """
        if self.noise.may_come_first:
            self.noise.fill_(flat, self.std, self.step)
        else:
            flat.zero_()

    def finish(self, flat: Tensor) -> None:
        """Add up the sums of all ranks, with the noise of the first."""
        if self.ranks is not None and isinstance(self.noise, SecureNoise):
            # Its release lies on a grid, which another rank's sum would undo: so the noise comes after the sums, and
            # the second reduction, to which the other ranks add zeros, hands it out.
            self.ranks.sum_(flat)
            if self.ranks.rank:
                flat.zero_()
        if self.ranks is None or self.ranks.rank == 0:
            self.noise.add_(flat, self.std, self.step)
        if self.ranks is not None:
            self.ranks.sum_(flat)
