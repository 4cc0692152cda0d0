"""The clipped sum of a batch of which every rank has a share, and a shard of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpcore.engine import checks
from dpcore.engine.batch_sums import BatchSums, ClippedSum, LossFn
from dpcore.engine.checks import length_of
from dpcore.engine.plans import Kind
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.grad_sample_module import GradSampleModule
from dpcore.microbatch.accumulator import Accumulator
from dpcore.microbatch.pieces import cut
from dpcore.microbatch.planner import choose, micro_batches
from dpcore.microbatch.sharded_sums import ShardedSums
from dpcore.rerun.batch_start import BatchStart
from dpcore.sharded_module import ShardedModule
from dpcore.tree import flatten

_FAILED = 2**62
"""In place of how many examples a rank has left, where its own part of a batch has failed."""


class SumsInShards(BatchSums):
    """Adds the clipped sums of all ranks to their shards, in pieces through which the ranks go in step.

    A rank that has no more examples goes on with empty pieces, since every pass exchanges parameters.
    """

    model: ShardedModule
    accumulator: ShardedSums

    def __init__(
        self,
        model: ShardedModule,
        loss_fn: LossFn,
        accumulator: Accumulator,
        *,
        physical_batch_size: int | None,
        compile: bool | str,
        check_isolation: bool,
        group: int,
        keep_gathered: bool | None,
    ) -> None:
        """Take what :class:`BatchSums` takes; experiments on isolation, which ranks cannot make alone, are left out."""
        if compile:
            raise UnsupportedError(
                f"compile is {compile!r}, and the passes of a sharded model exchange parameters, which no graph of one "
                "rank does; leave it out."
            )
        sizes = {"physical_batch_size": physical_batch_size, "group": group}
        super().__init__(model, loss_fn, accumulator, compile=False, check_isolation=False, **sizes)  # type: ignore[arg-type]
        self._recorder = GradSampleModule(model, loss_reduction="sum", ordinary_grad=False, group=group)
        self.goes_on = False
        """Whether any rank has examples behind the piece under way."""
        self._error: Exception | None = None
        self._has_begun = False
        model.ranks.agree({"keep_gathered": keep_gathered})
        self._kept = model.reduction.gathering.kept
        model.reduction.keep(keep_gathered, self)

    def settle(self) -> None:
        self._kept.end()
        self.model.reduction.gathering.let_go()

    def add(self, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]) -> ClippedSum:
        self._error, self._has_begun = None, False
        try:
            return super().add(x, y, mask, scale, begin)
        except Exception as error:
            if not self._has_begun:
                self._error = error
                self._any_has(0)
            raise
        finally:
            self._error = None  # with all that its traceback holds

    def _any_has(self, left: int) -> bool:
        """Return whether any rank has examples left; all raise where one has failed, that one its own error."""
        self._has_begun = True
        most = self.model.ranks.largest(left if self._error is None else _FAILED)
        if self._error is not None:
            raise self._error
        if most == _FAILED:
            raise PrivacyError(
                "The step failed on another rank, which says why: nothing was released, on no rank. Where all ranks go "
                "on with their next batches, the next step has the number and the noise of this one."
            )
        return bool(most)

    def _prepare(self, kind: Kind, x: Any, y: Any, batch_size: int) -> None:
        self.plans.note(kind, batch_size)

    def _add_pieces(
        self, kind: Kind, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        begin()
        self._recorder.forget()
        batch_size, start, parts = self._rows // self.group, 0, []
        as_found: BatchStart | None = None
        self.goes_on = self._any_has(batch_size)
        try:
            while self.goes_on:
                stop = start + (self._next_size(kind, batch_size, batch_size - start) if start < batch_size else 0)
                rows = slice(start * self.group, stop * self.group)
                self.goes_on = self._any_has(batch_size - stop)
                if as_found is not None:
                    as_found.restore()
                elif self.goes_on:
                    as_found = BatchStart(self.model)
                inputs, targets = cut((x, y), rows, self._rows)
                parts.append(self._accumulate(inputs, targets, None if mask is None else mask[rows], scale, kind, 0))
                start = stop
            self._any_has(0)  # behind the last loss
        except BaseException:
            self.settle()
            raise
        return parts

    def explain(self) -> str:
        return f"{super().explain()}\n{self.model.reduction.explained(self.accumulator)}"

    def _accumulate_eagerly(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, kind: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            outputs = checks.call(self._recorder, x)
            try:
                losses = self.loss_fn(outputs, y)
                checks.check_losses(losses, length_of(x), self._rows)
                # The recorder takes an example's gradient for that of the mean of its rows' losses.
                loss = (self._weights(losses, mask) * losses * self.group).sum()
            except Exception as error:
                found = [t.sum() for t in flatten(outputs)[0] if isinstance(t, Tensor) and t.requires_grad]
                if not found:
                    raise
                self._error, losses = error, torch.zeros(length_of(x), device=self.accumulator.device)
                loss = torch.stack(found).sum()
            loss.backward()  # the other ranks wait for this one on its way, also where its loss has failed
        groups, held = len(self.accumulator.bounds), self.accumulator
        norms = factors = torch.zeros((groups, 0), dtype=held.dtype, device=held.device)
        with torch.no_grad():
            for uses, count in self._recorder.take():
                if count and kind not in self.plans.of:
                    choices = choose(uses)
                    self._methods = [(self.accumulator.names[c.param], c.method) for c in choices]
                    self.plans.of[kind] = micro_batches(choices, uses, count, self.accumulator.device)
                if count:
                    of_units = None if mask is None else self._units(mask)
                    norms, factors = self.accumulator.add(uses, count, of_units, scale)
            self.accumulator.reduce()
        return norms, factors, self._by_unit(losses.detach(), mask)
