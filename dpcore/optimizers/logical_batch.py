"""One batch, one step: the pieces of a logical batch, and the one release of their sum.

The accountant counts one Poisson batch per step. So whatever a step releases must come from one batch of the loader,
each example in one piece, and all pieces must be clipped at the bound for which the noise is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.loading.ledger import Ledger
from dpcore.microbatch.accumulator import Accumulator


class LogicalBatch:
    """The batch that an optimiser is adding up: begin, add_piece (once or more), step, end.

    :meth:`hand_out` and ``goes_on`` announce the next piece; they say whether it is its batch's last. :meth:`begin` and
    :meth:`add_piece` stand around the addition of that piece. :meth:`stepping` is open while the sum's update is made.
    :meth:`end` follows a step. :meth:`leave` says that a loop has ended. :meth:`discard` forgets everything, after an
    error or before another loop.

    Without pieces, every backward pass is a batch of its own, and a step may add up several (``batches``).
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator
        self.is_stepping = False
        """True while the wrapped optimiser may step."""
        self.goes_on = False
        """True where more pieces of the same batch follow the next one."""
        self._waiting = 0  # rows of a piece that was handed out and not added yet
        self._overtaken = False  # whether a piece was handed out while another one was waiting
        self._reset()

    def _reset(self) -> None:
        self.batches = 0
        """Number of batches in the sum."""
        self.unfinished = False
        """True while the sum holds pieces of a batch that goes on."""
        self._left = False  # whether no more of its pieces can come
        self._rows = 0  # of its pieces so far
        self._bounds: tuple[float, ...] | None = None  # at which the sum was clipped
        self._noise_multiplier: float | None = None  # in force at its first piece
        self._drawn = 0  # how many batches the loader had handed out at the last piece

    def hand_out(self, rows: int, goes_on: bool) -> None:
        """Announce a piece of ``rows`` examples, which is on its way to the next :meth:`add_piece`.

        If the previous piece was not added yet, forget that it continues: otherwise pieces of different batches would
        be added up as one batch. :meth:`add_piece` then refuses.
        """
        if self._waiting and (self.goes_on or goes_on):
            self._overtaken = True
        self._waiting = rows
        self._left = False
        self.goes_on = goes_on

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
        self._left = self.unfinished

    def begin(self, noise_multiplier: float) -> None:
        """Prepare the sum for a piece.

        Raises:
            PrivacyError: bounds or noise are not those of the batch's earlier pieces.
            UnsupportedError: a parameter was turned in memory since those were added.
        """
        self.check_bounds()
        self.check_noise(noise_multiplier)
        if not self.batches and not self.unfinished:
            self.accumulator.follow()
        elif self.accumulator.lies_otherwise:
            raise UnsupportedError(
                "A parameter's order in memory was changed between the pieces of a batch "
                "(model.to(memory_format=torch.channels_last) does so), and their sum has the former one; change it "
                "between optimizer steps."
            )

    def check_bounds(self) -> None:
        """Refuse bounds other than those by which the sum was clipped: the noise is that of the bounds in force."""
        if self._bounds is not None and self._bounds != self.accumulator.bounds:
            raise PrivacyError(
                f"max_grad_norm was changed from {self._bounds} to {self.accumulator.bounds} within a logical "
                "batch: examples clipped at one bound would get the noise of another. Change it between optimizer "
                "steps, so call a schedule's step() once per logical batch and not once per piece."
            )
        self._bounds = self.accumulator.bounds

    def check_noise(self, noise_multiplier: float) -> None:
        """Refuse noise by the number of pieces: it would tell how long the batch is, which the accountant ignores."""
        if self._noise_multiplier not in (None, noise_multiplier):
            raise PrivacyError(
                f"noise_multiplier was changed from {self._noise_multiplier:.6g} to {noise_multiplier:.6g} within a "
                "logical batch: the noise would depend on the batch's length, which is private. Change it between "
                "optimizer steps, so call a schedule's step() once per logical batch and not once per piece."
            )
        self._noise_multiplier = noise_multiplier

    def add_piece(self, sizes: Sequence[int], ledger: Ledger | None, drawn: int) -> None:
        """Count a piece that was added to the sum.

        Args:
            sizes: examples of every backward pass since the last piece.
            ledger: where the batch is taken from the loader's unused ones; None: batches are not checked.
            drawn: how many batches the loader has handed out.

        Raises:
            PrivacyError: there was no backward pass; pieces of several batches would be one batch; or the batch is none
                of the ledger's.
        """
        if not sizes:
            raise PrivacyError(
                "optimizer.step() found no backward pass of the wrapped module since the last step; stepping now would "
                "release noise for a batch that was never seen. Call loss.backward() on the module's output first."
            )
        if self._overtaken or (self._waiting and not sum(sizes)):
            raise PrivacyError(
                "A piece of a batch was handed out before optimizer.step() was called for the one before it, so pieces "
                "of different batches would be added up as one, and an example in two of them would move the sum by "
                "twice max_grad_norm. Call step() for every piece before the next one is fetched: no prefetching of "
                "BatchMemoryManager's pieces, and no piece left out."
            )
        self._waiting = 0
        if ledger is not None:
            self._check_one_batch(drawn)
            self._rows += sum(sizes)
            if not self.goes_on:
                ledger.use([self._rows] if self.unfinished else sizes)
                self._rows = 0
        # All pieces of a logical batch count as one batch; without pieces every backward pass is a batch of its own.
        self.batches += len(sizes) if not (self.goes_on or self.unfinished) else int(not self.unfinished)
        self.unfinished = self.goes_on

    def _check_one_batch(self, drawn: int) -> None:
        """The pieces of a logical batch must come from one batch of the loader: they are accounted for as one."""
        if self.unfinished and drawn != self._drawn:
            raise PrivacyError(
                f"One logical batch was put together from {drawn - self._drawn + 1} batches of the private data "
                "loader by signal_skip_step(): an example in several of them would move the sum by several times "
                "max_grad_norm, and the accountant would count one step. Accumulate without signal_skip_step(), which "
                "is counted, or draw larger batches and cut them with BatchMemoryManager."
            )
        self._drawn = drawn

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

    def discard(self) -> None:
        """Forget the sum, and what was announced."""
        self.goes_on = False
        self._waiting, self._overtaken = 0, False
        self.end()
