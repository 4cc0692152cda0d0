"""Where a run stands among its loader's batches, and under which name its noise goes on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dpcore.loading.ledger import Batch, Source
from dpcore.noise import GaussianNoise


class NextBatch(NamedTuple):
    """The batches of a step: ``batches`` draws, from ``draw`` on, of a loader of this process."""

    loader: int
    draw: int
    batches: int

    @classmethod
    def of(cls, used: Sequence[Batch]) -> NextBatch | None:
        """Return the batches that a step has used, None where they are not known or do not follow each other."""
        draws = [batch.draw for batch in used if batch.draw is not None and batch.loader == used[0].loader]
        if not used or len(draws) < len(used) or draws != [*range(draws[0], draws[0] + len(draws))]:
            return None
        return cls(used[0].loader, draws[0], len(draws))

    def following(self) -> NextBatch:
        """Return those of the next step, where nothing changes."""
        return self._replace(draw=self.draw + self.batches)


UNKNOWN = NextBatch(-1, -1, 0)
"""No batch of this process."""


@dataclass
class Course:
    """The course of an optimiser's run.

    ``run``: the name under which its steps are counted; another one after a checkpoint was loaded. ``resumed``: runs
    whose noise and batches this one leaves to them, though it goes on from their state. ``next_batch``: what another
    run of the same checkpoint uses for the noise of the next step; None: there is no such run. ``batches_seen``: how
    many batches the loader had handed out with that of the last step, which used ``batches_a_step``.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(16))
    resumed: set[str] = field(default_factory=set)
    next_batch: NextBatch | None = None
    batches_seen: int = 0
    batches_a_step: int = 1

    def name_noise(self, noise: GaussianNoise, step: int, used: Sequence[Batch], rate: Source) -> None:
        """Name a step's noise by what decides its batch, as far as another run may use it for another one.

        Args:
            noise: The run's.
            step: The step's number.
            used: Its batches; none where they are not known.
            rate: At which they were drawn; None where it is that of the run's settings.
        """
        # A run that goes on without this one's schedule of the rate would draw other batches.
        noise.also = "" if rate is None else f" {rate!r}"
        if self.next_batch is None:
            return
        found = NextBatch.of(used)
        if found != self.next_batch:
            noise.branch(step, [batch.draw for batch in used], known=found is not None)
        self.next_batch = None if found is None else found.following()

    def expect(self, noise: GaussianNoise, step: int, following: NextBatch) -> None:
        """Let ``noise`` go on with batches that another run may use for it, too."""
        if self.next_batch not in (None, following):
            noise.branch(step, following[1:], known=True)
        self.next_batch = following

    def rename(self) -> str:
        """Return the run's new name: another run that goes on from the same file has the same steps before."""
        name, _, loads = self.run.partition(".")
        self.run = f"{name}.{int(loads or 0) + 1}"
        return self.run
