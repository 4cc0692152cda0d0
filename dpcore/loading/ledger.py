"""The ledger: which batches this process's private loaders have handed out, by name, and which of them were used.

The accountant assumes that every step uses one batch of its loader, each example in one row. Whatever else a step used
shows in its number of rows: data from elsewhere, copies of an example, a part of a batch, a batch for the second time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dpcore.errors import PrivacyError, trainer_hint

Source = float | tuple[str, int] | None
"""A Poisson loader's sample rate; of a loader that deals epochs how, and into how many; None for all others."""

LOOKED_AT = 1024
"""Only so many of the newest unused batches may still be used, which bounds the search."""


@dataclass(frozen=True)
class Batch:
    """The name of a batch: two are the same one where all of this is equal.

    ``loader``: its loader's name in this process. ``number``: how many batches the loader has handed out with it.
    ``source``: the rate at which it was drawn. ``draw``: its number among the draws of the loader's sampler, None where
    that is not known. ``examples``: how many it is made of. ``epoch``: the name of the dealt epoch that it is of, None
    where none is dealt or it is not known. ``is_again``: whether it was handed out before, or its epoch by another
    loader, as those of one seed do: what is counted for the epoch does not cover it.
    """

    loader: int
    number: int
    source: Source
    draw: int | None
    examples: int
    epoch: str | None = None
    is_again: bool = False


class Unused:
    """The batches that the steps of one accountant may still use, by their source, the newest last."""

    def __init__(self) -> None:
        self.of: defaultdict[Source, deque[Batch]] = defaultdict(partial(deque, maxlen=LOOKED_AT))
        self.epochs: defaultdict[Source, dict[str, int]] = defaultdict(dict)  # of all batches, and whose they are
        self.came_again: set[Source] = set()
        self._next: dict[str, int] = {}  # of each epoch the draw behind the newest that was handed out
        _ALL.add(self)

    def add(self, batch: Batch) -> None:
        """Note a batch that was handed out."""
        if (epoch := batch.epoch) is not None:
            owner = self.epochs[batch.source].setdefault(epoch, batch.loader)
            if owner != batch.loader or batch.draw is None or batch.draw < self._next.get(epoch, 0):
                batch = replace(batch, is_again=True)
                self.came_again.add(batch.source)
            else:
                self._next[epoch] = batch.draw + 1
        self.of[batch.source].append(batch)

    def go_on_at(self, epoch: str, draw: int) -> None:
        """Note that a run goes on within an epoch, whose batches before this one were handed out."""
        self._next[epoch] = max(draw, self._next.get(epoch, 0))


_ALL: WeakSet[Unused] = WeakSet()
_OWNERS: WeakKeyDictionary[Any, WeakSet[Unused]] = WeakKeyDictionary()
"""Loaders that were made private -> for whom. Any other one (a trainer may build its own over the same data) tells all,
and is told from others by its rate."""
_NAMES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_NEXT_NAME = itertools.count()


def name_of(loader: Any) -> int:
    """Return the name of a loader, which no other one of this process has or had."""
    if loader not in _NAMES:
        _NAMES[loader] = next(_NEXT_NAME)
    return _NAMES[loader]


def loaders() -> dict[int, Any]:
    """Return the loaders of this process that have names, by name."""
    return {name: loader for loader, name in _NAMES.items()}


def give(loader: Any, owner: Unused) -> None:
    """Let the batches of ``loader`` be those of ``owner``, and of nobody to whom it was not given."""
    _OWNERS.setdefault(loader, WeakSet()).add(owner)


def hand_out(
    loader: Any, number: int, source: Source, draw: int | None, examples: int, epoch: str | None = None
) -> None:
    """Note that ``loader`` has handed out a batch made of ``examples`` examples of its data set."""
    Ledger.poisson_batches += source is not None
    batch = Batch(name_of(loader), number, source, draw, examples, epoch)
    for unused in list(_OWNERS.get(loader, _ALL)):
        unused.add(batch)


class Ledger:
    """What an optimiser has used of the batches of ``source()`` that were handed out and are not used yet.

    Optimisers of one accountant share ``unused``: two models must not be trained on the same batch. ``checks`` False:
    the user's own batches are used, and none is refused. ``group``: how many rows an example has.
    """

    poisson_batches = 0
    """How many this process's loaders have handed out; each is a sample by itself."""

    def __init__(self, source: Callable[[], Source], unused: Unused, checks: bool = True, group: int = 1) -> None:
        self.source = source
        self.unused = unused
        self.checks = checks
        self.group = group
        self.used: tuple[Batch, ...] = ()
        """The batches of the last step; none where it is not certain which they are."""
        self.is_foreign = False
        """Whether the last step used batches that no loader has handed out for it, which ``checks`` refuses."""
        self._steps = 0
        self._pieces: float | None = None  # passes for each batch, at all steps so far

    def use(self, sizes: Sequence[int]) -> None:
        """Take the batches of one step from the unused ones.

        Args:
            sizes: The number of units of every backward pass; one number for the pieces of one batch together.

        Raises:
            PrivacyError: no unused batches, one to a pass or one in all, have just as many examples; or Poisson batches
                go through several passes each, and not through as many at every step.
        """
        key = self.source()
        unused = self.unused.of[key]
        self._steps += 1
        found = self._batches_of(unused, sizes)
        self.used, self.is_foreign = (), not found
        if not found:
            if self.checks:
                self._refuse(unused, sizes)
            return
        chosen = found[0]
        if key is not None and self.checks:
            self._check_pieces(len(sizes) / len(chosen))
        if len(found) == 1:
            self.used = tuple(unused[i] for i in chosen)
        for i in reversed(chosen):
            del unused[i]

    def _refuse(self, unused: Sequence[Batch], sizes: Sequence[int]) -> None:
        if not unused:
            raise PrivacyError(
                f"This is step {self._steps} of this optimizer, and no batch of the private data loader is left that "
                "was not used: the data came from elsewhere (from another engine's loader, say), or a batch was used "
                "twice (by two optimizers of one engine, say). The accountant counts on a fresh batch at every step "
                "and would understate what leaks. Iterate over the loader that make_private returned, one batch per "
                "step, or pass check_batches=False if your own batches are drawn at the accounted "
                f"rate.{trainer_hint()}"
            )
        if self.group > 1:
            raise PrivacyError(
                f"{sum(sizes)} units of group={self.group} rows went through the backward passes of this step, and the "
                f"private data loader has handed out {_list([b.examples for b in unused])} examples for it, each of "
                f"which must be one unit, once. Give every example {self.group} rows that follow each other, as "
                f"dpcore.views(dataset, transform, K={self.group}) does (leave group= out where it has one row), and "
                "call backward() once for every batch."
            )
        raise PrivacyError(
            f"{sum(sizes)} rows went through the backward passes of this step, but the private data loader has "
            f"handed out {_list([b.examples for b in unused])} examples for it: an example in several rows is clipped "
            "in each, so that it could move the sum by several times max_grad_norm, and rows that stand for several "
            "examples are clipped as one. Give every example one row (its copies inside of that row, its loss set to 0 "
            "to leave it out), and call backward() once for every batch: add up several losses of one, as those of a "
            "discriminator, and call (one + other).backward(). torch.autograd.grad through the private module is a "
            "backward pass, too: take gradients at the inputs (for adversarial training, say) in evaluation mode, "
            "between model.eval() and model.train(). Where K rows that follow each other are one example (views, or a "
            "user's rows), pass group=K. Or pass check_batches=False if every example is in one row only."
        )

    def _batches_of(self, unused: Sequence[Batch], sizes: Sequence[int]) -> list[range]:
        """What may be the batches of a step, the likeliest first: one for each pass, else as many as at steps before.

        Empty batches beside others make both the shorter and the longer run have as many rows.
        """
        counts = [batch.examples for batch in unused]
        same = [*_same_runs(counts, sizes)]
        others = [run for run in _runs_of(counts, sum(sizes), len(sizes)) if run not in same] if len(sizes) > 1 else []
        usual = [run for run in others if self._pieces in (None, len(sizes) / len(run))]
        return same + usual + [run for run in others if run not in usual]

    def _check_pieces(self, pieces: float) -> None:
        """Refuse batches that a loop cuts by their length: update and noise are divided by the number of passes."""
        if self._pieces not in (None, pieces):
            raise PrivacyError(
                f"The loop made {pieces:g} backward passes for a batch of the private data loader, and "
                f"{self._pieces:g} for each batch before: the update and its noise are divided by their number, which "
                "would tell how long the batch is, and that is private. Let max_physical_batch_size= of make_private "
                "or BatchMemoryManager cut the batches, or cut all into the same number of pieces."
            )
        self._pieces = pieces


def _same_runs(unused: Sequence[int], sizes: Sequence[int]) -> Iterator[range]:
    """Consecutive batches of these sizes, in any order, the newest first: passes left out are counted last."""
    wanted, count = sorted(sizes), len(sizes)
    for start in range(len(unused) - count, -1, -1):
        if sorted(unused[start : start + count]) == wanted:
            yield range(start, start + count)


def _runs_of(unused: Sequence[int], rows: int, passes: int) -> Iterator[range]:
    """Consecutive batches with ``rows`` examples in all, at most ``passes`` of them; the newest come first."""
    for stop in range(len(unused), 0, -1):
        total = 0
        for start in range(stop - 1, max(stop - passes, 0) - 1, -1):
            total += unused[start]
            if total == rows:
                yield range(start, stop)


def _list(sizes: Sequence[int]) -> str:
    newest = [str(n) for n in sizes[-4:]]
    return ("... or " if len(sizes) > 4 else "") + " or ".join(newest)
