"""Passes over a few examples that are compared with each other: what each of them records and measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.example_isolation import sums
from dpcore.example_isolation.measurements import Measured, Measurements
from dpcore.example_isolation.rows import dim_of_rows, ways_of_rows, without_graph
from dpcore.microbatch.accumulator import kept_gradient, weighted_sum
from dpcore.microbatch.in_turn import example_gradient
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.planner import Choice, choose
from dpcore.numerics.precision import full_precision
from dpcore.rerun.side_effects import SideEffects, left_behind, tensors_in
from dpcore.rerun.snapshot import ModelState, RandomNumbers
from dpcore.rules.linear import wide
from dpcore.rules.vmap import ModuleUse
from dpcore.tape import own_passes
from dpcore.tape.checkpointing import unrecorded
from dpcore.tape.deferred_lookups import SeenOtherwise
from dpcore.tape.tape import Tape
from dpcore.tape.uses import FormedUse, UnitUse, Use, in_units

Run = Callable[[Any], Any]
"""A batch -> the model's outputs, or [B] losses."""

LARGE_BYTES = 32 * 2**20
"""Bytes of a graph beyond which it is made anew rather than kept: one more forward pass."""
LARGE_AT_ONCE = 8
"""Gradients that are formed at once where examples are large."""
REMEDY = (
    "Clipping an example's gradient would then not bound its influence. Treat examples apart (GroupNorm for statistics "
    "of the batch, one loss per example, no sums, sorting or attention over dimension 0; a tensor that is left in an "
    "attribute of a module counts as an output, so detach() what is only logged), or pass "
    "check_isolation=False if you can prove that each example's gradient depends on that example alone."
)


class Subject:
    """The model that is examined, and what is known of it."""

    def __init__(self, model: nn.Module, names: dict[Parameter, str], layout: Layout, group: int) -> None:
        self.model = model
        self.names = names
        self.layout = layout
        self.group = group
        """Rows of an example, of which only the gradient of all is looked at."""
        self.compiled = False
        """True where torch.compile made a part of the graph (a loss function): one backward pass can go through it."""


class Trial:
    """Passes over batches of ``batch_size`` rows, with the same random numbers and the same weights of the outputs."""

    def __init__(
        self, subject: Subject, state: ModelState, run: Run, batch_size: int, losses: bool, outputs: bool
    ) -> None:
        self.subject = subject
        self.state = state
        self._run = run
        self.batch_size = batch_size
        self.losses = losses
        self._needs_outputs = outputs
        self.random, self._effects = RandomNumbers(subject.model), SideEffects(subject.model)
        self.large = batch_size * subject.layout.example_bytes > LARGE_BYTES
        self.shapes: list[torch.Size] | None = None
        self._way: int | None = None  # by which of several outputs have their examples, as experiment 1 has found
        self.drew = False
        """True where the last pass drew random numbers."""
        self.written: dict[str, Tensor] = {}
        """The buffers that the last pass wrote; they are restored after each."""
        self.recorded: dict[Parameter, sums.Recorded] = {}
        """What the last pass with an example ``alone`` has recorded of all examples."""
        self.rounds = False
        """Whether something was computed in half precision there."""
        self.adds_up = True
        """True where such a pass notes that."""
        self._counts_left_behind = True

    @property
    def group(self) -> int:
        """Rows of an example."""
        return self.subject.group

    def without_left_behind(self) -> None:
        """Take what the model leaves in attributes for no output from now on: the loss need not come from it."""
        self._counts_left_behind, self.shapes = False, None

    def measure(
        self, batch: Any, excluded: Tensor, alone: int | None = None, changed: bool = False, dropped: int = 0
    ) -> Measurements:
        """Return the gradients of all rows but the ``excluded``; nothing where the outputs have other shapes than
        before.

        Args:
            batch: The batch to run.
            excluded: [k] rows whose gradients are not measured.
            alone: An example the gradient of whose outputs must reach no other (experiment 1), by its number.
            changed: Whether the outputs of the ``excluded`` get larger gradients.
            dropped: How many of the first rows are left out in ``batch``; outputs without rows then count for nothing.

        Raises:
            PrivacyError: that gradient reaches another example.
        """
        if self.large and alone is not None and not self.adds_up and len(excluded) + self.group == self.batch_size:
            found: Measurements = {}
            self._pass(batch, 0, lambda tape, of: found.update(self._look_joined(tape, of, excluded, alone)))
            if found:
                return found
        return self._measure(batch, excluded, alone, changed, dropped)

    def _measure(self, batch: Any, excluded: Tensor, alone: int | None, changed: bool, dropped: int) -> Measurements:
        found: Measurements = {}

        def look_alone(tape: Tape, outputs: list[Tensor]) -> None:
            if alone is not None:
                self._check_alone(tape, outputs, alone)

        def look_at_all(tape: Tape, outputs: list[Tensor]) -> None:
            weights = self._all_weights(outputs, excluded if changed else None, dropped)
            if weights is not None:
                raw = own_passes.pull(tape, outputs, weights, keep=False, guarded=not self._counts_left_behind)
                record = alone is not None and self.adds_up
                if record:
                    self.rounds = tape.rounds
                    self.recorded = {param: sums.Recorded.of(param, grad) for param, grad in raw.items()}
                found.update(self._found(tape, outputs, weights, excluded, dropped, record))

        if alone is None or not (self.large or self.subject.compiled):
            try:
                self._pass(batch, dropped, look_alone, look_at_all)
                return found
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
                self.subject.compiled = True
        self._pass(batch, dropped, look_alone)
        self._pass(batch, dropped, look_at_all)
        return found

    def _look_joined(self, tape: Tape, outputs: list[Tensor], excluded: Tensor, row: int) -> Measurements:
        """Experiment 1 and the measurements of ``row`` by the gradient of its outputs, where its alone are wanted."""
        weights = self._all_weights(outputs, None, 0)
        if weights is None or any(output.shape[:1] != (self.batch_size,) for output in outputs):
            return {}
        for weight in weights:
            weight[: row * self.group], weight[(row + 1) * self.group :] = 0.0, 0.0
        own_passes.pull(tape, outputs, weights, keep=False, guarded=not self._counts_left_behind)
        if self._reaches_others(tape, row) is not None:
            return {}
        self._way = 0
        return self._found(tape, outputs, weights, excluded, 0, record=False)

    def _found(
        self, tape: Tape, outputs: list[Tensor], weights: list[Tensor], excluded: Tensor, dropped: int, record: bool
    ) -> Measurements:
        """The measurements of a pass whose gradients are there; ``record``: whether the sums are to be noted."""
        found: Measurements = {}
        assert self.shapes is not None
        with _without_autocast(self.subject.names), full_precision():
            for choice in choose(in_units(tape.uses, self.group)):
                found[choice.param] = self._measured(choice, excluded, dropped, record)
            for k, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
                dim = dim_of_rows(self.shapes[k], self.batch_size, self._way)
                if dim is not None:
                    rows, theirs = (t.movedim(dim, 0) for t in (output, weight))
                    found[k] = _values(rows, theirs, self._kept(excluded, dropped, output.device))
        return found

    def ordinary(self, batch: Any) -> dict[Parameter, float] | None:
        """Return the projections of the ordinary gradients; None where the outputs are others than before."""
        with unrecorded():  # in the backward pass, too, which may run functions again
            outputs = self._outputs(batch, nullcontext())
            weights = self._all_weights(outputs, None, 0)
            return sums.ordinary(outputs, weights, list(self.subject.names)) if weights and outputs else None

    def _all_weights(self, outputs: list[Tensor], larger: Tensor | None, dropped: int) -> list[Tensor] | None:
        """Gradients at the outputs: the same for the same example whatever is ``dropped``; None where the shapes are
        not those of the first pass.
        """
        if self.shapes is None:
            self.shapes = [output.shape for output in outputs]
        if len(outputs) != len(self.shapes):
            return None
        weights = []
        for output, first in zip(outputs, self.shapes, strict=True):
            weight = output.new_ones(first) if self.losses else _weights(output.new_empty(first))
            dim = dim_of_rows(first, self.batch_size, self._way)
            if larger is not None and dim is not None:
                weight.index_copy_(dim, larger.to(weight.device), 3.0 * weight.index_select(dim, larger))
            if dropped:
                if dim is None:
                    return None
                weight = weight.narrow(dim, dropped, self.batch_size - dropped)
            if weight.shape != output.shape:
                return None
            weights.append(weight)
        return weights

    def _pass(self, batch: Any, dropped: int, *looks: Callable[[Tape, list[Tensor]], None]) -> None:
        """Every ``look(tape, outputs that need a gradient)`` after one forward pass."""
        while True:
            tape = self.subject.layout.tape(self.subject.names, self.batch_size - dropped)
            outputs = self._outputs(batch, self.subject.layout.recording(tape))
            self.subject.layout.unchecked -= tape.uses.met
            if not outputs and tape.attached and self._needs_outputs and not self.losses:
                raise UnsupportedError(
                    "In what the forward pass returned no tensor with a gradient was found, nor in the attributes of "
                    "its modules, so it cannot be checked whether the model mixes the examples of a batch. Return the "
                    "tensors that the loss needs."
                )
            try:
                for look in looks if outputs else ():
                    look(tape, outputs)
                return
            except SeenOtherwise:
                continue  # which does without one more deferred lookup

    def _outputs(self, batch: Any, recording: AbstractContextManager[None]) -> list[Tensor]:
        """The outputs that need a gradient, of a forward pass under ``recording``."""
        self.random.restore()
        self._effects.restore()
        before = {id(tensor) for tensor in self._left_behind()}
        with recording:
            returned = self._run(without_graph(batch))
        self.drew = not RandomNumbers(self.subject.model).same(self.random)
        self.written = self.state.written()
        left = [t for t in self._left_behind() if id(t) not in before]
        return list({id(t): t for t in (*tensors_in(returned), *left) if t.requires_grad}.values())

    def _left_behind(self) -> Iterable[Tensor]:
        return left_behind(self.subject.model) if self._counts_left_behind else ()

    def _kept(self, excluded: Tensor, dropped: int, device: torch.device) -> Tensor:
        kept = torch.ones(self.batch_size, dtype=torch.bool, device=device)
        kept[excluded.to(device)] = False
        return kept[dropped:]

    def _measured(self, choice: Choice, excluded: Tensor, dropped: int, record: bool) -> Measured:
        kept = self._kept(excluded, dropped, choice.param.device)[:: self.group]
        dtype = torch.promote_types(choice.param.dtype, torch.float32)
        numbers = torch.Generator().manual_seed(choice.param.numel())
        rows = torch.randn(self.batch_size // self.group, generator=numbers)
        rows = rows[dropped // self.group :].to(kept.device, dtype) * kept
        # The sum over the rows that are compared, each at a weight of its own, and the sum over all rows.
        weights = [rows, torch.ones_like(rows)] if record else [rows]
        totals = [torch.zeros(choice.param.shape, dtype=dtype, device=choice.param.device) for _ in weights]
        if choice.method == "ghost":
            norms_sq, scale = _norms_sq(choice)
            for weight, total in zip(weights, totals, strict=True):
                weighted_sum(choice, weight, total)
        else:
            norms_sq = scale = rows.new_zeros(len(rows))
            for index, gradients in self._formed(choice, kept, record, dtype):
                norms_sq[index] = _squares(gradients)
                for weight, total in zip(weights, totals, strict=True):
                    total += torch.tensordot(weight[index], gradients.to(dtype), dims=1)
        if record:
            more = sums.Recorded.of(choice.param, totals[1], norms_sq, scale)
            self.recorded[choice.param] = self.recorded.get(choice.param, sums.Recorded()).with_more(more)
        direction = torch.randn(totals[0].shape, generator=numbers).to(kept.device, dtype)
        return Measured(norms_sq[kept], scale[kept], float(totals[0].mul_(direction).sum()))

    def _formed(
        self, choice: Choice, kept: Tensor, record: bool, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows' numbers and their gradients, each formed once: of the rows ``kept``, or of all of them; one after
        the other where an example is large.
        """
        wanted = (kept | record).nonzero().flatten()
        if choice.method == "turn":
            for i in wanted:
                yield i.unsqueeze(0), example_gradient(choice, int(i), dtype).unsqueeze(0)
        elif self.large:
            for index in wanted.split(LARGE_AT_ONCE):
                yield index, kept_gradient(replace(choice, uses=tuple(use.rows(index, dtype) for use in choice.uses)))
        else:
            yield torch.arange(len(kept), device=kept.device), kept_gradient(choice)

    def _check_alone(self, tape: Tape, outputs: list[Tensor], row: int) -> None:
        """Experiment 1; its graph is not kept for another look where it is large.

        An output with the batch's length in two dimensions may have its examples in either.
        """
        by_row = [(o, ways) for o in outputs if (ways := ways_of_rows(o.shape, self.batch_size))]
        reached: Parameter | None = None
        possible = max((len(ways) for _, ways in by_row), default=0)
        for way in range(0 if self.subject.compiled and possible > 1 else possible):
            weights = []
            for output, ways in by_row:
                dim, owners = ways[min(way, len(ways) - 1)]
                theirs = (owners // self.group == row).nonzero().flatten().to(output.device)
                weight = torch.zeros_like(output)
                weights.append(weight.index_copy_(dim, theirs, _weights(output).index_select(dim, theirs)))
            spent = way + 1 == possible and (self.large or self.subject.compiled)
            own_passes.pull(tape, [output for output, _ in by_row], weights, keep=not spent)
            found = self._reaches_others(tape, row)
            if found is None:
                self._way = way
                return
            reached = found if reached is None else reached
        if reached is not None:
            what = "loss" if self.losses else "output"
            raise PrivacyError(
                f"The {what} of one example has a gradient at {self.subject.names[reached]} in the rows of other "
                f"examples: the model mixes the examples of a batch. {REMEDY}"
            )

    def _reaches_others(self, tape: Tape, row: int) -> Parameter | None:
        with _without_autocast(self.subject.names):
            for choice in choose(in_units(tape.uses, self.group)):
                if all(_is_zero_beside(use, row) for use in choice.uses):
                    continue
                others, _ = _norms_sq(choice)
                others[row] = 0.0
                # A derivative that is infinite gives 0 * inf in its own row: no sign of another example.
                if bool((others.isfinite() & (others != 0.0)).any()):
                    return choice.param
        return None


def _values(output: Tensor, weight: Tensor, kept: Tensor) -> Measured:
    """Return the values of the rows of an output that are ``kept``."""
    norms_sq, projection = wide(output.detach()[:1]).abs().new_zeros(len(output)), 0.0
    # One after the other: the logits of a language model are as large as all the rest together.
    for i in kept.nonzero().flatten().tolist():
        row = wide(output[i].detach())
        norms_sq[i] = row.abs().square().sum()
        projection += float((row * weight[i]).real.sum())
    return Measured(norms_sq[kept], norms_sq[kept], projection, output[:1].numel())


def _is_zero_beside(use: Use, row: int) -> bool:
    """Return whether the gradient at a use's output is zero in all rows but one, so that those of parameters are."""
    if use.grad is None or isinstance(use, FormedUse | ModuleUse | UnitUse):
        return False
    return not bool(use.grad[:row].any()) and not bool(use.grad[row + 1 :].any())


def _norms_sq(choice: Choice) -> tuple[Tensor, Tensor]:
    """[B] squared norms of a parameter's per-sample gradients, and [B] scale of their rounding errors."""
    if choice.method == "ghost":
        found = choice.uses[0].norm_sq(choice.param)
        return found.value.detach().clone(), found.value if found.scale is None else found.scale
    if choice.method == "turn":
        grad = choice.uses[0].grad
        assert grad is not None
        examples = range(len(grad))
        dtype = torch.promote_types(choice.param.dtype, torch.float32)
        norms_sq = torch.stack([example_gradient(choice, i, dtype).square().sum() for i in examples])
        return norms_sq, norms_sq
    norms_sq = _squares(kept_gradient(choice))
    return norms_sq, norms_sq


def _squares(gradients: Tensor) -> Tensor:
    """[B] squared norms of [B, ...]."""
    return gradients.unsqueeze(-1).flatten(1).square().sum(1)


@contextmanager
def _without_autocast(names: dict[Parameter, str]) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(next(iter(names)).device.type, enabled=False):
        yield


def _weights(output: Tensor) -> Tensor:
    """Fixed weights of an output's elements, none of them zero and hardly any two alike."""
    n = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return n.mul_(1.7).sin_().mul_(0.5).add_(1.0).reshape(output.shape).to(output.dtype)
