"""One batch, one step: the pieces of a logical batch, and the one release of their sum.

The accountant counts one Poisson batch per step. So whatever a step releases must come from one batch of the loader,
each example in one piece, and all pieces must be clipped at the bound for which the noise is drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.loading.ledger import Ledger
from dpcore.microbatch.accumulator import Accumulator


@dataclass(frozen=True)
class Piece:
    """The name of a part of a batch: which batch (two are one where ``batch`` is equal), and which place in it.

    ``rows``: how many examples a loader has put into it; None where a loop has announced it by a signal. ``drawn``: how
    many batches the loader had handed out at that signal. ``tensors``: what a loader has put into it.
    """

    batch: Any
    rows: int | None
    first: bool
    goes_on: bool
    drawn: int | None = None
    tensors: tuple[ref[Tensor], ...] = field(default=(), compare=False, repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its batch."""
        return self.first and not self.goes_on


class LogicalBatch:
    """The batch that an optimiser is adding up: begin, add_piece (once or more), step, end.

    :meth:`hand_out` and :meth:`signal` announce pieces, in the order of their steps. :meth:`begin` and
    :meth:`add_piece` stand around the addition of the one that is next. :meth:`stepping` is open while the sum's update
    is made. :meth:`end` follows a step, and :meth:`fail` or :meth:`discard` where the sum is forgotten. :meth:`leave`
    says that a loop has ended.

    Without pieces, every backward pass is a batch of its own, and a step may add up several (``batches``).
    """

    def __init__(self, accumulator: Accumulator, noise_multiplier: float) -> None:
        self.accumulator = accumulator
        self.followed: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose schedules wait while the batch goes on."""
        self.is_stepping = False
        """True while the wrapped optimiser may step."""
        self.pieces = 0
        """How many were added in all."""
        self.noise_multiplier = noise_multiplier
        """That in force at the first piece of the newest batch, and at its release."""
        self._signalled = 0  # batches whose pieces were announced by signals
        self.discard()
        self._reset()

    def discard(self) -> None:
        """Forget what was announced."""
        self._waiting: deque[Piece] = deque()  # announced, and not added yet
        self._handed_out = False  # whether a loop over a loader's pieces is under way
        self._ahead = False  # whether it draws pieces before the steps of those before them
        self._begins = True  # whether the next signal is of a batch's first piece
        self._signalled += 1

    def _reset(self) -> None:
        self.batches = 0
        """Number of batches in the sum."""
        self.unfinished = False
        """True while the sum holds pieces of a batch that goes on."""
        self._piece: Piece | None = None  # the newest of them
        self._left = False  # whether no more of its pieces can come
        self._rows = 0  # of its pieces so far
        self._bounds: tuple[float, ...] | None = None  # at which the sum was clipped
        self._drawn = 0  # how many batches the loader had handed out at the last piece

    @property
    def goes_on(self) -> bool:
        """True where more pieces of the same batch follow the next one."""
        return bool(self._waiting) and self._waiting[0].goes_on

    @property
    def is_of_a_loader(self) -> bool:
        """True where a loader has handed out the newest piece of the batch that goes on."""
        return self._piece is not None and self._piece.rows is not None

    @property
    def announced(self) -> list[Piece]:
        """The pieces whose steps are to come, as far as they are known."""
        return list(self._waiting)

    def hand_out(self, piece: Piece) -> None:
        """Announce a loader's piece, which is on its way to the next :meth:`add_piece`.

        Whole batches may be fetched ahead or left out; which one a step uses is the ledger's matter. Where others are
        fetched ahead, pieces are told by their tensors, which the module must be called with as they are.
        """
        self._ahead |= bool(self._waiting)
        self._waiting.append(piece)
        self._handed_out, self._left = True, False

    def signal(self, goes_on: bool, drawn: int) -> None:
        """Announce a piece of the loop's own, behind those that were announced before.

        Args:
            goes_on: Whether it is not its batch's last.
            drawn: How many batches the loader has handed out.
        """
        self._waiting.append(Piece(self._signalled, None, self._begins, goes_on, drawn))
        self._begins = not goes_on
        self._signalled += self._begins

    @property
    def schedules_wait(self) -> bool:
        """Whether a schedule that is stepped now stays where it is, since it is stepped at the batch's last piece too.

        Not where the loop over the pieces was left within the batch, which never ends then: whoever steps a schedule
        after that loop counts rounds.
        """
        return self.unfinished and not self._left

    def leave(self) -> None:
        """Note that the loop over pieces has ended, and that a batch that it left within goes on no more.

        The sum stays: the batch can still not be released, and the next loop forgets it.
        """
        self._left = self.unfinished and not self._waiting
        self._handed_out = False

    def begin(self, noise_multiplier: float) -> None:
        """Prepare the sum for a piece.

        Raises:
            PrivacyError: bounds or noise are not those of the batch's earlier pieces.
            UnsupportedError: a parameter was turned in memory since those were added.
        """
        self.check(noise_multiplier)
        if not self.batches and not self.unfinished:
            self.accumulator.follow()
        elif self.accumulator.lies_otherwise:
            raise UnsupportedError(
                "A parameter's order in memory was changed between the pieces of a batch "
                "(model.to(memory_format=torch.channels_last) does so), and their sum has the former one; change it "
                "between optimizer steps."
            )

    def check(self, noise_multiplier: float) -> None:
        """Refuse noise and bounds other than those of the batch's first piece.

        Raises:
            PrivacyError: one of them was changed.
        """
        self._check_bounds()
        self._check_noise(noise_multiplier)

    def _check_bounds(self) -> None:
        """Refuse bounds other than those by which the sum was clipped: the noise is that of the bounds in force."""
        if self._bounds is not None and self._bounds != self.accumulator.bounds:
            raise PrivacyError(
                f"max_grad_norm was changed from {self._bounds} to {self.accumulator.bounds} within a logical "
                "batch: examples clipped at one bound would get the noise of another. Change it between optimizer "
                "steps, so call a schedule's step() once per logical batch and not once per piece."
            )
        self._bounds = self.accumulator.bounds

    def _check_noise(self, noise_multiplier: float) -> None:
        """Refuse noise by the number of pieces: it would tell how long the batch is, which the accountant ignores."""
        if (self.batches or self.unfinished) and self.noise_multiplier != noise_multiplier:
            raise PrivacyError(
                f"noise_multiplier was changed from {self.noise_multiplier:.6g} to {noise_multiplier:.6g} within a "
                "logical batch: the noise would depend on the batch's length, which is private. Change it between "
                "optimizer steps, so call a schedule's step() once per logical batch and not once per piece."
            )
        self.noise_multiplier = noise_multiplier

    def add_piece(self, sizes: Sequence[int], ledger: Ledger | None, drawn: int, given: Sequence[Tensor]) -> None:
        """Count a piece that was added to the sum.

        Args:
            sizes: examples of every backward pass since the last piece.
            ledger: where the batch is taken from the loader's unused ones; None: it is not known.
            drawn: how many batches the loader has handed out.
            given: what it was called with since the last piece.

        Raises:
            PrivacyError: there was no backward pass; pieces of several batches would be one batch, or one piece would
                be in it twice; or the batch is none of the ledger's.
        """
        if not sizes:
            raise PrivacyError(
                "optimizer.step() found no backward pass of the wrapped module since the last step; stepping now would "
                "release noise for a batch that was never seen. Call loss.backward() on the module's output first."
            )
        checks = ledger is not None and ledger.checks
        piece = self._next_piece(sum(sizes), checks, given)
        self.pieces += 1
        if (ledger is None or checks) and piece.rows is None and not piece.is_whole:
            self._check_one_batch(piece, drawn)
        if ledger is not None:
            self._rows += sum(sizes)
            if not piece.goes_on:
                ledger.use([self._rows] if self.unfinished else sizes)
                self._rows = 0
        # All pieces of a logical batch count as one batch; without pieces every backward pass is a batch of its own.
        self.batches += len(sizes) if not (piece.goes_on or self.unfinished) else int(not self.unfinished)
        self.unfinished, self._piece = piece.goes_on, piece

    def _is_certain(self, rows: int, given: Sequence[Tensor]) -> bool:
        """Return whether the piece of a step goes into the batch of the one that is announced next.

        It is one of those that wait, since a step takes one of them away and leaves its own or later ones. So those of
        a loop's own, which have no other name, must be of one batch, or the next one of them a batch by itself. Those
        of a loader are told by their tensors, past whole batches that the loop has left out.
        """
        if not self._waiting:
            return True
        first = self._waiting[0]
        if first.rows is None:
            return (first.is_whole and not self.unfinished) or all(p.batch == first.batch for p in self._waiting)
        if self._ahead:
            places = [i for i, piece in enumerate(self._waiting) if _is_of(piece, rows, given)]
            before = [*self._waiting][: places[0] if places else None]
            if (self.unfinished and before) or not all(piece.is_whole for piece in before):
                return False
            for _ in before if places else ():
                self._waiting.popleft()
        return not self._waiting[0].rows or bool(rows)

    def _next_piece(self, rows: int, checks: bool, given: Sequence[Tensor]) -> Piece:
        """Return the piece that was announced for this step, of ``rows`` rows; without one it is a batch's last."""
        if not self._is_certain(rows, given):
            raise PrivacyError(
                "A piece of a batch was handed out before optimizer.step() was called for the one before it, and it "
                "cannot be told which one this step is for: where one was left out, pieces of two batches would be "
                "added up as one, and an example in both would move the sum by twice max_grad_norm. Call step() for "
                "every piece before the next one is fetched, and leave no piece out; where a loop of your own fetches "
                "ahead, call signal_skip_step() right before the step() of its piece. BatchMemoryManager's pieces may "
                "be fetched ahead where the module is called with their tensors as they are. optimizer.discard() "
                "forgets pieces that were left out."
            )
        last = self._piece if self.unfinished else None
        if not self._waiting and ((self._handed_out and checks) or (last is not None and last.rows is not None)):
            raise PrivacyError(
                "optimizer.step() was called again on a piece of a batch that a step has used: an example of it would "
                "move the sum by twice max_grad_norm, or be released without being counted. Make one step for every "
                "piece; for several updates on one batch (PPO's epochs, a GAN's critic) draw a fresh batch for each."
            )
        if not self._waiting:
            self._begins = True
            self._signalled += 1
            return Piece(last.batch if last is not None else self._signalled, None, last is None, False)
        piece = self._waiting.popleft()
        if piece.first != (last is None) or (last is not None and piece.batch != last.batch):
            raise PrivacyError(
                "This piece does not go on with the batch at hand: its batch's first pieces were dropped, because "
                "another loop over the loader was begun within it (next(iter(loader)), say) or a step has failed, and "
                "they would be released without being counted or together with another batch, in which an example "
                "could be, too. Begin another loop only where optimizer.batch_goes_on is False, or leave "
                "max_physical_batch_size and BatchMemoryManager out, whose whole batches may be fetched within a loop."
            )
        if checks and piece.rows is not None and not piece.is_whole and piece.rows != rows:
            raise PrivacyError(
                f"{rows} rows went through the backward passes of this step, and the piece of a batch that it is for "
                f"has {piece.rows} examples: an example in several rows is clipped in each. Call backward() once for "
                "every piece, on its examples alone, or pass check_batches=False if every example is in one row only."
            )
        return piece

    def _check_one_batch(self, piece: Piece, drawn: int) -> None:
        """The pieces of a logical batch must come from one batch of the loader: they are accounted for as one."""
        if not self.unfinished:  # of signals given ahead nothing tells, once the next batch was drawn, what this one is
            self._drawn = drawn if piece.drawn is None or not self._waiting else piece.drawn
        if drawn != self._drawn:
            raise PrivacyError(
                f"A piece of a logical batch may be of {drawn - self._drawn + 1} batches of the loader, drawn since "
                "signal_skip_step() announced the first: an example in several of them would move the sum by several "
                "times max_grad_norm, and one step would be counted. Draw the next batch when all pieces are used, "
                "accumulate without signal_skip_step(), or cut larger batches with BatchMemoryManager."
            )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the wrapped optimiser step on the gradient that was released."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def end(self) -> None:
        """Forget the sum and what was counted of it. A piece that was announced since stays announced."""
        self._reset()
        self.accumulator.clear()

    def fail(self) -> None:
        """Forget a loader's pieces, after an error of a step; those of the loop's own stay announced."""
        if self._handed_out:
            self._waiting.clear()


def _is_of(piece: Piece, rows: int, given: Sequence[Tensor]) -> bool:
    """Return whether passes of ``rows`` rows, for which the module was called with ``given``, are those of a piece."""
    return rows == 0 if not piece.rows else any(a is b() for a in given for b in piece.tensors)
