"""The clipped sum of a logical batch, piece by piece, behind the face of an optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.arguments import check_divisor
from dpcore.errors import PrivacyError, warn_caller
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.microbatch.accumulator import Accumulator
from dpcore.microbatch.planner import MicroBatches, choose, micro_batches
from dpcore.optimizers import checks
from dpcore.optimizers.logical_batch import LogicalBatch, Piece
from dpcore.optimizers.private_run import PrivateRun
from dpcore.optimizers.schedules import watch_torch
from dpcore.optimizers.summed import SummedGrads
from dpcore.optimizers.wrapper import OptimizerWrapper
from dpcore.rerun.batch_start import BatchStart
from dpcore.rerun.heap import give_back

MUCH_KEPT = 256
"""MiB that a whole batch leaves behind, of which the user is told without asking."""


class ClippingOptimizer(OptimizerWrapper):
    """Adds up the clipped gradients of a logical batch; what is released of the sum is a subclass' affair."""

    original_optimizer: Optimizer
    module: AbstractGradSampleHooks
    accumulator: Accumulator
    logical_batch: LogicalBatch
    summed: SummedGrads
    run: PrivateRun
    loss_reduction: str
    expected_batch_size: float | None
    noise_multiplier: float
    plans_pieces = False
    """Whether every piece of a batch leaves a plan of how to cut more of its kind."""
    piece_plan: MicroBatches | None = None
    advice: str | None = None
    """Text on what "auto" would do where whole batches are passed; empty where pieces are, None: not known yet."""
    _settings: Any = None  # in force at the first piece of the batch
    _start: BatchStart | None = None  # of the batch at hand
    _has_cut = False  # whether any batch had several pieces

    @property
    def inner(self) -> Optimizer:
        return self.original_optimizer

    def __getattr__(self, name: str) -> Any:
        if name in ("_is_ready", "accumulator", "logical_batch", "module", "run"):
            raise AttributeError(
                f"{type(self).__name__}.__init__() has not called super().__init__(), by which gradients are clipped, "
                "noised and counted; call it, and set your own attributes beside it.",
                name=name,
                obj=self,
            )
        return super().__getattr__(name)

    @property
    def params(self) -> list[Parameter]:
        """The trained parameters, in the optimiser's order."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def grad_samples(self) -> list[Tensor]:
        """[examples, *p.shape] per parameter, over all batches since the last step."""
        values = [p.grad_sample for p in self.params]  # type: ignore[attr-defined]
        if any(value is None for value in values):
            raise PrivacyError("There are no per-sample gradients; call loss.backward() first.")
        return [torch.cat(value) if isinstance(value, list) else value for value in values]

    @property
    def max_grad_norm(self) -> float | list[float]:
        bounds = self.accumulator.bounds
        return bounds[0] if len(bounds) == 1 else list(bounds)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float]) -> None:
        self.accumulator.set_bounds(value, self.noise_multiplier)

    @property
    def accumulated_iterations(self) -> int:
        """The number of logical batches whose gradients this step adds up.

        It is 1, unless gradients are accumulated without virtual steps.
        """
        return max(1, self.logical_batch.batches)

    @property
    def batch_goes_on(self) -> bool:
        """True after the ``step()`` of a piece whose batch goes on: nothing was updated.

        Schedules of torch's and dpcore's classes wait by themselves; what else counts updates has to look here.
        """
        return self.logical_batch.unfinished

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announce a physical piece of a logical batch: one signal for each ``step()``, in their order.

        All signals of a batch may be given ahead of its steps, those of the next one behind them; whole batches are
        signalled ahead at will. A step without a signal is its batch's last.

        Args:
            do_skip: Whether the piece's step clips and accumulates only, because others of its batch follow.
        """
        watch_torch()
        self.logical_batch.signal(do_skip, self.run.handed_out)
        if self.module.has_passes:  # a loop that gives signals behind the pass: from the next batch on before it
            self._keep_start()

    @property
    def has_batch(self) -> bool:
        """True between a batch's backward pass and its step: examples that were not released yet are at hand."""
        return bool(self.logical_batch.batches or self.logical_batch.unfinished or self.module.has_passes)

    def hand_out(self, piece: Piece) -> None:
        """Announce a piece of a batch that is on its way to the next ``step()``.

        :class:`BatchMemoryManager` calls this.

        Args:
            piece: Its name.
        """
        watch_torch()
        self.logical_batch.hand_out(piece)

    def _keep_start(self) -> None:
        """Before a pass: keep what the module counts by itself, where the pass is the first of a batch that is cut."""
        self._has_cut = self._has_cut or self.logical_batch.goes_on
        if self._has_cut and self._start is None and not self.logical_batch.unfinished:
            self._start = BatchStart(self.module._module)

    def _end_piece(self) -> None:
        """Let the batch's next piece find what its first one has found; what the last piece has written stays."""
        if not self.logical_batch.unfinished:
            self._start = None
        elif self._start is not None:
            self._start.restore()

    def discard(self) -> None:
        """Forgets clipped sums of an unfinished logical batch, and its flag."""
        self._forget(self.logical_batch.discard)

    def _forget(self, announced: Callable[[], None]) -> None:
        """Forget the batch at hand, and by ``announced()`` its pieces to come."""
        self.module.forget()
        announced()
        self._start = None
        self._clear()
        self.summed.forget()

    def _clear(self) -> None:
        """Forgets what was added up for a step."""
        self.logical_batch.end()

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of the backward passes since the last call to ``p.summed_grad``.

        PrivacyError where there was none, or where a parameter received an ordinary gradient: its examples were not
        clipped. An error forgets the whole logical batch: a part of it that stayed in the sum could be added again.

        A subclass may add them up in its own way, from ``p.grad_sample``. That one example moves the sum by no more
        than ``max_grad_norm`` is then its own affair.
        """
        try:
            self._take_piece(self._add_backward_passes)
            self.summed.show()
        except BaseException:
            self._forget(self.logical_batch.fail)
            raise

    def _take_piece(self, add: Callable[[], list[int]]) -> None:
        """Count the piece that ``add()`` adds to the sum; it returns the numbers of examples of its passes."""
        if self.loss_reduction == "mean":
            check_divisor(self.expected_batch_size, checks.MEAN_RULE)  # a schedule may have set it
        checks.check_unchanged(self)
        checks.check_no_ordinary_gradient(self)
        self.logical_batch.begin(self.noise_multiplier)
        if self.logical_batch.batches or self.logical_batch.unfinished:
            self.summed.take_changed()
        if not self.logical_batch.unfinished:
            self._settings = checks.settings_of(self)
        elif self.logical_batch.is_of_a_loader:
            checks.check_settings(self, self._settings)
        given = self.module.given
        self.logical_batch.add_piece(add(), self.run.ledger, self.run.handed_out, given)
        self._end_piece()

    def owns_changed(self) -> bool:
        """Return whether ordinary gradients that were changed by hand are replaced by the step's, not refused."""
        return False

    def _use_own_clipping(self) -> None:
        """Count the piece whose sum a subclass's :meth:`clip_and_accumulate` has formed all by itself."""
        self.summed.check_whole(own=True)
        self._take_piece(lambda: [batch_size for _, batch_size in self.module.take()])
        self.summed.take_changed()

    @torch.no_grad()
    def _add_backward_passes(self) -> list[int]:
        """Adds the clipped gradients of the backward passes that were recorded; returns their numbers of examples."""
        sizes = []
        for uses, batch_size in self.module.take():
            sizes.append(batch_size)
            if batch_size:
                first = self.plans_pieces and self.piece_plan is None
                if self.plans_pieces or self.advice is None:
                    plan = micro_batches(choose(uses), uses, batch_size, self.accumulator.device)
                    if self.plans_pieces:
                        self.piece_plan = plan
                    else:
                        self._advise(plan)
                norms, _ = self.accumulator.add(uses, batch_size)
                self._observe(norms)
                if first:
                    # The pieces that follow are smaller.
                    uses.clear()
                    give_back()
            del uses
        self.accumulator.reduce()
        return sizes

    def _advise(self, plan: MicroBatches) -> None:
        """Say what "auto" would do with batches of the expected size: the drawn one's is the data's secret."""
        self.advice = ""
        if self.logical_batch.announced or self.logical_batch.unfinished:
            return  # the user cuts them already
        ranks = getattr(self, "ranks", None)
        batch = round((self.expected_batch_size or 0) / (1 if ranks is None else ranks.shares))
        if (size := plan.size(batch)) >= batch:
            self.advice = "Whole batches of this model are as good as pieces."
            return
        kept, rest = (number * plan.per_example / 2**20 for number in (batch, size))
        self.advice = (
            f'max_physical_batch_size="auto" would take some {size} of {batch} examples at a time, for which '
            f"{rest:.0f} MiB are kept in place of {kept:.0f}. The update is the same; pass it to make_private. (By the "
            "examples of the first batch: keep it out of what you publish.)"
        )
        if kept >= MUCH_KEPT:
            warn_caller(self.advice)

    def _observe(self, norms: Tensor) -> None:
        """Norms [groups, B] of a batch that is being accumulated, for those who adapt to them."""
