"""The ledger: how many examples each batch of this process's private loaders has, and which batches were used.

The accountant assumes that every step uses one batch of its loader, each example in one row. Whatever else a step used
shows in its number of rows: data from elsewhere, copies of an example, a part of a batch, a batch for the second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from dpcore.errors import PrivacyError, trainer_hint

Source = float | None
"""A Poisson loader's sample rate; None for loaders without Poisson sampling."""

# By sample rate and not by loader: a trainer may build its own private loader over the same data at the same rate.
_HANDED_OUT: defaultdict[Source, list[int]] = defaultdict(list)

LOOKED_AT = 1024
"""Only so many of the newest unused batches may still be used, which bounds the search."""


def count_drawn(source: Source, examples: int) -> None:
    """Notes that a loader has handed out a batch made of ``examples`` examples of its data set."""
    _HANDED_OUT[source].append(examples)


class Ledger:
    """The batches of ``source()`` that were handed out since the ledger was opened, and not used yet.

    They are used by one optimiser or, with ``shared``, by it and those of that ledger: two models of one accountant
    must not be trained on the same batch.
    """

    def __init__(self, source: Callable[[], Source], shared: Ledger | None = None) -> None:
        self.source = source
        opened = {key: len(sizes) for key, sizes in _HANDED_OUT.items()}
        self._read: defaultdict[Source, int] = defaultdict(int, opened) if shared is None else shared._read
        self._unused: defaultdict[Source, list[int]] = defaultdict(list) if shared is None else shared._unused
        self._steps = 0
        self._pieces: float | None = None  # passes for each batch, at all steps so far

    def use(self, sizes: Sequence[int]) -> None:
        """Takes the batches of one step from the unused ones.

        Args:
            sizes: the number of rows of every backward pass; one number for the pieces of one batch together.

        Raises:
            PrivacyError: where no unused batches, one to a pass or one in all, have just as many examples; or where
                Poisson batches go through several passes each, and not through as many at every step.
        """
        key = self.source()
        unused, handed_out = self._unused[key], _HANDED_OUT[key]
        unused.extend(handed_out[self._read[key] :])
        self._read[key] = len(handed_out)
        del unused[:-LOOKED_AT]
        self._steps += 1
        if not unused:
            raise PrivacyError(
                f"This is step {self._steps} of this optimizer, and no batch of the private data loader is left that "
                "was not used: the data came from elsewhere, or a batch was used twice (by two optimizers of one "
                "engine, say). The accountant counts on a fresh batch at every step and would understate what leaks. "
                "Iterate over the loader that make_private returned, one batch per step, or pass check_batches=False "
                f"if your own batches are drawn at the accounted rate.{trainer_hint()}"
            )
        found = self._batches_of(unused, sizes)
        if found is None:
            raise PrivacyError(
                f"{sum(sizes)} rows went through the backward passes of this step, but the private data loader has "
                f"handed out {_list(unused)} examples for it: an example in several rows is clipped in each, so that "
                "it could move the sum by several times max_grad_norm, and rows that stand for several examples are "
                "clipped as one. Give every example one row (its copies inside of that row, its loss set to 0 to leave "
                "it out), and call backward() once for every batch. torch.autograd.grad through the private module is "
                "a backward pass, too: take gradients at the inputs (for adversarial training, say) in evaluation "
                "mode, between model.eval() and model.train(). Or pass check_batches=False if every example is in one "
                "row only."
            )
        if key is not None:
            self._check_pieces(len(sizes) / (found.stop - found.start))
        del unused[found]

    def _batches_of(self, unused: Sequence[int], sizes: Sequence[int]) -> slice | None:
        """The batches of a step: one for each pass, or else, if there are such, as many pieces each as at steps before.

        Empty batches beside others make both the shorter and the longer run have as many rows.
        """
        found = _same_run(unused, sizes)
        if found is not None:
            return found
        first = None
        for run in _runs_of(unused, sum(sizes), len(sizes)):
            if self._pieces in (None, len(sizes) / (run.stop - run.start)):
                return run
            first = run if first is None else first
        return first

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


def _same_run(unused: Sequence[int], sizes: Sequence[int]) -> slice | None:
    """The newest consecutive batches of these sizes, in any order: passes that were left out are counted last."""
    wanted, count = sorted(sizes), len(sizes)
    for start in range(len(unused) - count, -1, -1):
        if sorted(unused[start : start + count]) == wanted:
            return slice(start, start + count)
    return None


def _runs_of(unused: Sequence[int], rows: int, passes: int) -> Iterator[slice]:
    """Consecutive batches with ``rows`` examples in all, at most ``passes`` of them; the newest come first."""
    for stop in range(len(unused), 0, -1):
        total = 0
        for start in range(stop - 1, max(stop - passes, 0) - 1, -1):
            total += unused[start]
            if total == rows:
                yield slice(start, stop)


def _list(sizes: Sequence[int]) -> str:
    newest = [str(n) for n in sizes[-4:]]
    return ("... or " if len(sizes) > 4 else "") + " or ".join(newest)
