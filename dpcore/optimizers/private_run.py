"""A private run: what make_private joins, where it stands among its batches, and the name of its noise."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpcore.correlated import Correlation
from dpcore.loading.counting_loader import CountingDataLoader
from dpcore.loading.ledger import Batch, Ledger, Source, loaders
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


@dataclass(eq=False)
class PrivateRun:
    """Holds what make_private joins to an optimizer, and the course of the optimizer's steps.

    ``setting``: what must not differ when a checkpoint is resumed; schedules move the optimizer's attributes, not
    these. ``loader``: the private one. ``ledger``: takes the batches of a step from the unused ones; None: they are not
    known. ``counter()``: what counts the steps, and knows what they have spent; None where there is nothing.
    ``count()``: counts a step of an optimizer there.

    ``name``: under which the steps are counted; another one after a checkpoint was loaded. ``resumed``: runs whose
    noise and batches this one leaves to them, though it goes on from their state. ``next_batch``: what another run of
    the same checkpoint uses for the noise of the next step; None: there is no such run. ``batches_a_step``: of the last
    step. ``correlation``: of its noise over steps; None: each step's is its own.
    """

    setting: dict[str, Any]
    loader: Any = None
    ledger: Ledger | None = None
    counter: Callable[[], Any] = lambda: None
    count: Callable[[Any], None] = lambda of: None
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    resumed: set[str] = field(default_factory=set)
    next_batch: NextBatch | None = None
    batches_a_step: int = 1
    correlation: Correlation | None = None

    @property
    def handed_out(self) -> int:
        """How many batches the loader has handed out so far, where it counts them; without one, how many any has."""
        return Ledger.poisson_batches if self.loader is None else getattr(self.loader, "handed_out", 0)

    @property
    def _used(self) -> tuple[Batch, ...]:
        """The batches of the step at hand, as far as they are known."""
        return () if self.ledger is None else self.ledger.used

    @property
    def _other_rate(self) -> Source:
        """The rate at which they were drawn, None where it is that of the settings."""
        rate = self._used[0].source if self._used else getattr(self.loader, "source", None)
        return None if rate == self.setting.get("sample_rate") else rate

    def name_noise(self, noise: GaussianNoise, step: int) -> None:
        """Name the noise of a step by what decides its batch, as far as another run may use it for another one."""
        # A run that goes on without this one's schedule of the rate would draw other batches.
        noise.also = "" if self._other_rate is None else f" {self._other_rate!r}"
        if self.next_batch is None:
            return
        found = NextBatch.of(self._used)
        if found != self.next_batch:
            noise.branch(step, [batch.draw for batch in self._used], known=found is not None)
        self.next_batch = None if found is None else found.following()

    def conclude(self, batches: int) -> None:
        """Note that a step on so many batches was made."""
        self.batches_a_step = batches
        # Where it is not known which they were, of any loader: that of another optimizer, say.
        newest = {batch.loader: batch.number for batch in self._used}
        for name, loader in loaders().items():
            if isinstance(loader, CountingDataLoader) and (name in newest or not newest or loader is self.loader):
                loader.see(newest.get(name, loader.handed_out))

    def expect(self, noise: GaussianNoise, step: int, following: NextBatch) -> None:
        """Let ``noise`` go on with batches that another run may use for it, too."""
        if self.next_batch not in (None, following):
            noise.branch(step, following[1:], known=True)
        self.next_batch = following

    def rename(self) -> str:
        """Return the run's new name: another run that goes on from the same file has the same steps before."""
        name, _, loads = self.name.partition(".")
        self.name = f"{name}.{int(loads or 0) + 1}"
        return self.name
