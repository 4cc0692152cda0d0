"""The experiments that show, during training, whether a model mixes the examples of a batch.

Clipping bounds an example's influence only where each example's gradient is a function of that example alone. No list
of layer types can tell: a mean over the batch is one line in a forward pass. So the first batches of every kind, and
rare random ones later, go through the model a few times more, and the real pass afterwards finds everything as it was.

1. *One output.* The gradient of one random example's outputs must reach only that example's row in every recorded use
   of a parameter; every other row must be exactly zero. (With losses by example: the gradient of one loss.)
2. *Other inputs.* Half of the examples are replaced by another one; the gradients of the other half may not change.
   This sees examples that mix where no gradient flows: before the first trained layer, by sorting, by a count. The
   gradients at the outputs of the replaced examples are others, too, for what mixes in the backward pass.
3. *Outliers.* As 2, with that half's own floating-point inputs made large, for what only the largest value does.
4. *State.* Buffers must end up the same in 1, 2 and 5, and no parameter may be written.
5. *Fewer.* The first examples are left out; the gradients of the others may not change. This sees what depends on an
   example's place in the batch, or on the number of examples. (Not where random numbers but dropout's are drawn.)
6. *The sum.* The gradients of all examples add up to the ordinary gradient (:mod:`dpcore.example_isolation.sums`). It
   is the one experiment that a batch of one example goes through, too.

Outputs are all tensors with a gradient in what the forward pass returns, also within objects of unknown classes, and
those that it leaves in attributes of modules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.example_isolation import sums
from dpcore.example_isolation.rows import enlarged, half_of_rows, replace_rows, selected, shaken, without_graph
from dpcore.microbatch import ragged
from dpcore.microbatch.accumulator import kept_gradient, weighted_sum
from dpcore.microbatch.in_turn import example_gradient
from dpcore.microbatch.layout import FEWEST_AT_FIRST, TRIES, Layout
from dpcore.microbatch.memory import give_back_everything, ran_out
from dpcore.microbatch.planner import Choice, choose
from dpcore.rerun.heap import give_back
from dpcore.rerun.side_effects import left_behind, tensors_in
from dpcore.rerun.snapshot import ModelState, RandomNumbers, draw_on, preserved, same_values, without_dropout
from dpcore.rules.linear import wide
from dpcore.rules.vmap import ModuleUse
from dpcore.tape.checkpointing import unrecorded
from dpcore.tape.deferred_lookups import SeenOtherwise
from dpcore.tape.tape import Tape
from dpcore.tape.uses import FormedUse, Use
from dpcore.tree import flatten, has_rows

Run = Callable[[Any], Any]
"""A batch -> the model's outputs, or [B] losses."""

EXAMPLES = 16
"""The most examples of a batch that a check takes; fewer of large ones, and once memory has run out."""
FEWEST = 2
"""Examples without which there is no mixing."""
BATCHES = 3
"""Number of first batches of a kind that are checked: one check finds a dependence on a count or a rank only more often
than not."""
ALWAYS = 24
"""Number of checks of new kinds that are always made; later ones while checks are at most RATE of all passes."""
RATE = 1.0 / 1024
"""How often a later batch is checked. A check is at most four passes over its examples, and what they leave behind."""
LARGE_BYTES = 32 * 2**20
"""Bytes of a graph beyond which it is made anew rather than kept: one more forward pass."""
LARGE_AT_ONCE = 8
"""Gradients that are formed at once where examples are large."""
ROUNDING, HALF_ROUNDING = 1e-3, 0.05
"""Relative change of a squared norm that is taken for rounding: another example's length may choose another kernel."""
CANCELLATION = 1e-5
FLOOR, HALF_FLOOR = 1e-9, 1e-4
"""Shares of the squared norm over all parameters: less is rounding, too."""
OUTPUT_FLOOR = 1e-10
"""Squared change of one number of an output that is taken for rounding, where the output may be zero but for it."""

REMEDY = (
    "Clipping an example's gradient would then not bound its influence. Treat examples apart (GroupNorm for statistics "
    "of the batch, one loss per example, no sums, sorting or attention over dimension 0; a tensor that is left in an "
    "attribute of a module counts as an output, so detach() what is only logged), or pass "
    "check_isolation=False if you can prove that each example's gradient depends on that example alone."
)
UNREPEATABLE = (
    "Two passes over the same batch with the same random numbers gave different gradients, so it cannot be checked by "
    "experiment {what}."
)
SWITCHED_OFF = (
    "check_isolation=False: whether the model mixes the examples of a batch is not checked. If it does, one example "
    "moves the sum by more than max_grad_norm and epsilon is too small."
)


class IsolationCheck:
    """The experiments on one model whose trained parameters are ``names``; it decides when a batch is due."""

    def __init__(self, model: nn.Module, names: dict[Parameter, str], layout: Layout) -> None:
        self.model = model
        self.names = names
        self.layout = layout
        self.enabled = True
        self.compiled = False
        """True where torch.compile made a part of the graph (a loss function): one backward pass can go through it."""
        self._most = EXAMPLES
        self._kinds: Counter[Any] = Counter()
        self._passes = 0
        self._checks = 0
        # Of its own and unpredictable: it must neither shift the user's random numbers nor miss what repeats.
        self._random = random.Random()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_random": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _random=random.Random())

    def switch_off(self) -> None:
        """Ends the checks, with a warning."""
        self.enabled = False
        warn_caller(SWITCHED_OFF)

    def due(self, kind: Any, batch_size: int) -> bool:
        """Return whether this batch is to be checked.

        Those are the first batches of each kind, and rare random ones later. Those of one example are a kind of their
        own, for they say nothing about mixing.
        """
        if not self.enabled or not batch_size:
            return False
        self._passes += 1
        new = self._kinds[kind, batch_size > 1] < BATCHES or bool(self.layout.unchecked)
        new = new and self._checks < ALWAYS + RATE * self._passes
        return new or self._random.random() < RATE

    def begin_anew(self) -> None:
        """Take all kinds of batches for new: they have come to a part of the model that did not run before."""
        self._kinds.clear()
        self._checks = min(self._checks, ALWAYS - BATCHES)

    def check(
        self, kind: Any, run: Run, batch: Any, batch_size: int, losses: bool = False, outputs: bool = True
    ) -> None:
        """Raise PrivacyError where ``run(batch)`` mixes the examples of ``batch`` or writes what depends on them.

        Args:
            kind: The batch's shapes; checked from now on.
            run: The forward pass of a batch, called four times, or more often where a gradient has moved.
            batch: Any structure; tensors whose first dimension is ``batch_size`` have one row per example.
            batch_size: How many examples there are.
            losses: Whether ``run`` returns one loss per example.
            outputs: Whether a pass without a tensor that has a gradient is a fault.
        """
        self._checks += 1
        for way in range(TRIES):
            while not self._checked(run, batch, batch_size, losses, outputs, way):
                # Here, where the error and all that its traceback held are gone.
                give_back_everything(next(iter(self.names)).device)
            if not self.layout.unchecked:  # it has gone where only another look has been
                break
        self._kinds[kind, batch_size > 1] += 1
        give_back()

    def _checked(
        self, run: Run, batch: Any, batch_size: int, losses: bool, outputs: bool, way: int, whole: bool = False
    ) -> bool:
        """Make all experiments; False where memory ran out, and fewer examples are to be tried.

        ``whole``: the first one alone, on the batch as it is.
        """
        whole, given = whole or ragged.is_ragged(self.model, batch), (batch, batch_size)
        if not whole:
            batch, batch_size = self._some(batch, batch_size)
        try:
            with preserved(self.model) as state, torch.enable_grad():
                state.watch_parameters()
                draw_on(way)
                trial = _Trial(self, state, run, batch_size, losses, outputs)
                row = self._random.randrange(batch_size)
                if whole or batch_size < FEWEST:
                    trial.measure(batch, torch.arange(0), alone=row)
                else:
                    self._exchange(trial, batch, row)
                self._compare_sums(trial, batch)
        except Exception as error:
            if not ran_out(error):
                if whole or isinstance(error, UnsupportedError | PrivacyError):
                    raise
                warn_caller(
                    f"The model fails on some of a batch's examples, or where others are in their place "
                    f"({type(error).__name__}: {error}). So only the gradients between rows show whether it mixes "
                    "examples; give each input one row per example."
                )
                return self._checked(run, *given, losses, outputs, way, whole=True)
            if batch_size < FEWEST:
                return True  # of one example the pass itself will tell
            if whole or batch_size <= FEWEST:
                error.add_note(
                    f"dpcore had {batch_size} examples in work, to see whether the model keeps examples apart, which "
                    f"takes {'whole batches' if whole else 'two'}."
                )
                raise
            self._most = max(FEWEST, batch_size // 2)
            return False
        return True

    def _some(self, batch: Any, batch_size: int) -> tuple[Any, int]:
        """A few random examples; not as many as another dimension has, which could pass for the batch."""
        most = self.layout.at_first(self._most)
        if batch_size <= most:
            return batch, batch_size
        taken = {n for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) for n in leaf.shape[1:]}
        # Rather more than so few that an experiment sees too little.
        fewest, at_most = min(most, FEWEST_AT_FIRST), min(self._most, batch_size)
        numbers = (*range(most, fewest - 1, -1), *range(most + 1, at_most + 1), *range(fewest - 1, 1, -1))
        count = next((n for n in numbers if n not in taken), most)
        index = torch.tensor(sorted(self._random.sample(range(batch_size), count)))
        return selected(batch, batch_size, index), count

    def _exchange(self, trial: _Trial, batch: Any, alone: int) -> None:
        """All experiments; ``alone``: the example whose outputs may not reach others."""
        count = trial.batch_size
        rows, beside = half_of_rows(count, self._random)
        dropped = _dropped(batch, count)
        if dropped + len(rows) >= count:
            rows, beside = torch.arange(dropped), dropped
        neighbours = replace_rows(batch, count, rows, lambda leaf: leaf[beside], beside)
        outliers = replace_rows(batch, count, rows, lambda leaf: enlarged(leaf[rows.to(leaf.device)]))
        # The same rows are compared in all experiments, so that one pass is the measure of them.
        excluded = torch.cat([torch.arange(dropped), rows]).unique()
        before = trial.measure(batch, excluded, alone)
        written = trial.written
        try:
            self._compare(trial, before, batch, neighbours, excluded)
        except UnsupportedError as error:
            error.add_note(
                "dpcore had put other examples of the batch in the place of some, to see whether the model keeps "
                "examples apart; a model that fails on that depends on several examples at a time."
            )
            raise
        now = trial.written
        for name in written.keys() | now.keys():
            if name not in written or name not in now or not same_values(written[name], now[name]):
                raise PrivacyError(
                    f"The buffer {name} depends on the examples of a batch and would be released without noise, in "
                    "state_dict() and through what is computed from it. Keep such statistics out of the model, or "
                    "compute them from public data."
                )
        if any(isinstance(v, Tensor) and has_rows(v, count) and v.is_floating_point() for v in flatten(batch)[0]):
            try:
                self._compare(trial, before, batch, outliers, excluded)
            except PrivacyError:
                raise
            except Exception as error:  # the model may well refuse such values; they were ours, not the user's
                if ran_out(error):
                    raise
        if dropped:
            self._compare_fewer(trial, before, batch, dropped, excluded)
            self._compare_counts(trial, written, batch, dropped, excluded)

    def _compare_fewer(self, trial: _Trial, before: Measurements, batch: Any, dropped: int, excluded: Tensor) -> None:
        """Experiment 5: PrivacyError where a gradient depends on the place in the batch or on the batch's length."""
        count = trial.batch_size
        # A batch of another length goes through other kernels, whose rounding cancellation may enlarge.
        rounding = HALF_ROUNDING
        fewer = selected(batch, count, torch.arange(dropped, count))
        try:
            after = trial.measure(fewer, excluded, dropped=dropped)
            if _moved(before, after, rounding) is None:
                return
            with without_dropout(self.model):
                before, again = (trial.measure(of, excluded) for of in (batch, shaken(batch)))
                after = trial.measure(fewer, excluded, dropped=dropped)
        except Exception as error:  # a model may well be made for batches of one length
            if ran_out(error):
                raise
            return
        moved = _moved(before, after, rounding)
        if moved is None or trial.drew or _moved(before, again, rounding / 4) is not None:
            return
        raise PrivacyError(
            f"The {self._what(moved)} for an example depends on the number of examples in the batch, or on "
            f"its place there: it changed when {dropped} before it were left out. A table of positions that is cut to "
            f"the batch's length instead of the sequence's does that, or a division by len(x). {REMEDY}"
        )

    def _compare_counts(
        self, trial: _Trial, written: dict[str, Tensor], batch: Any, dropped: int, excluded: Tensor
    ) -> None:
        """PrivacyError where the pass of fewer examples that was just made wrote something else than ``written``."""
        now = trial.written
        if trial.drew and now.keys() & written.keys():
            fewer = selected(batch, trial.batch_size, torch.arange(dropped, trial.batch_size))
            try:
                with without_dropout(self.model):
                    trial.measure(batch, excluded)
                    written = trial.written
                    trial.measure(fewer, excluded, dropped=dropped)
                    now = trial.written
            except Exception as error:  # as above
                if ran_out(error):
                    raise
                return
        for name in () if trial.drew else now.keys() & written.keys():
            if now[name].shape == written[name].shape and not same_values(now[name], written[name]):
                raise PrivacyError(
                    f"The buffer {name} depends on how many examples a batch has, which is drawn at random and would "
                    "be released without noise. Count steps instead, or keep the count out of the model."
                )

    def _compare(self, trial: _Trial, before: Measurements, batch: Any, changed: Any, rows: Tensor) -> None:
        """PrivacyError where ``changed`` gives another gradient than ``batch``, for which ``before`` was measured, in a
        row that is not among ``rows``.
        """
        after = trial.measure(changed, rows, changed=True)
        if _moved(before, after, self._rounding()) is None:
            return
        # Dropout of what is packed hits other elements as soon as a length changes: compared without it.
        with without_dropout(self.model):
            before, again = (trial.measure(of, rows) for of in (batch, shaken(batch)))
            after = trial.measure(changed, rows, changed=True)
        moved = _moved(before, after, self._rounding())
        if moved is None:
            return
        if _moved(before, again, self._rounding() / 4) is not None:
            warn_caller(UNREPEATABLE.format(what="whether the model mixes examples"))
            return
        raise PrivacyError(
            f"The {self._what(moved)} for an example depends on the other examples in the batch: it "
            f"changed when those were replaced. {REMEDY}"
        )

    def _compare_sums(self, trial: _Trial, batch: Any) -> None:
        """Experiment 6: UnsupportedError where the first pass has not recorded all of a parameter's gradient."""
        half = self._rounding() == HALF_ROUNDING or trial.rounds
        found = trial.ordinary(batch)
        if found is None or sums.differs(trial.recorded, found, half) is None:
            return
        with without_dropout(self.model):  # which recurrent layers draw in another order
            trial.measure(batch, torch.arange(0), alone=0)
            found, again = trial.ordinary(batch), trial.ordinary(batch)
        param = None if found is None else sums.differs(trial.recorded, found, half)
        if found is None or again is None or param is None:
            return
        if abs(found.get(param, 0.0) - again.get(param, 0.0)) > 1e-4 * abs(found.get(param, 0.0)) or trial.drew:
            warn_caller(UNREPEATABLE.format(what="whether all of each gradient is recorded"))
            return
        raise UnsupportedError(
            f"The gradients by example of {self.names[param]} do not add up to its ordinary gradient: the model uses "
            "it, or changes what it gave, in a way that dpcore does not see. Make operations in place behind that "
            "layer out-of-place, or freeze it with requires_grad_(False); and please report the model."
        )

    def _what(self, moved: Parameter | int) -> str:
        return f"output number {moved + 1}" if isinstance(moved, int) else f"gradient of {self.names[moved]}"

    def _rounding(self) -> float:
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.names)
        device = next(iter(self.names)).device.type
        return HALF_ROUNDING if half or torch.is_autocast_enabled(device) else ROUNDING


@dataclass(frozen=True)
class _Measured:
    """Measurements of one parameter's gradients, for k rows.

    They are the [k] squared norms of the rows' gradients, the scale of their rounding errors, and the product of a
    weighted sum of these gradients with a fixed random direction, which also sees a change that keeps all norms.
    """

    norms_sq: Tensor
    scale: Tensor
    projection: float
    numbers: int = 0
    """In a row of an output; 0 for parameters."""


Measurements = dict[Parameter | int, _Measured]
"""Measurements by parameter, and of the outputs' own values by their number: a layer that is run again by example has
gradients that are the example's own even where its outputs were not."""


class _Trial:
    """Passes over batches of one size, all with the same random numbers and the same weights of the outputs."""

    def __init__(
        self, check: IsolationCheck, state: ModelState, run: Run, batch_size: int, losses: bool, outputs: bool
    ) -> None:
        self.check = check
        self.state = state
        self._run = run
        self.batch_size = batch_size
        self.losses = losses
        self._needs_outputs = outputs
        self.random = RandomNumbers(check.model)
        self.large = batch_size * check.layout.example_bytes > LARGE_BYTES
        self.shapes: list[torch.Size] | None = None
        self.drew = False
        """True where the last pass drew random numbers."""
        self.written: dict[str, Tensor] = {}
        """The buffers that the last pass wrote; they are restored after each."""
        self.recorded: dict[Parameter, sums.Recorded] = {}
        """What the last pass with an example ``alone`` has recorded of all examples."""
        self.rounds = False
        """Whether something was computed in half precision there."""

    def measure(
        self, batch: Any, excluded: Tensor, alone: int | None = None, changed: bool = False, dropped: int = 0
    ) -> Measurements:
        """Return the gradients of all rows but the ``excluded``; nothing where the outputs have other shapes than
        before.

        Args:
            batch: The batch to run.
            excluded: [k] rows whose gradients are not measured.
            alone: An example the gradient of whose outputs must reach no other (experiment 1).
            changed: Whether the outputs of the ``excluded`` get larger gradients.
            dropped: How many of the first rows are left out in ``batch``; outputs without rows then count for nothing.

        Raises:
            PrivacyError: that gradient reaches another example.
        """
        found: Measurements = {}
        spent = False

        def look_alone(tape: Tape, outputs: list[Tensor]) -> None:
            nonlocal spent
            spent = alone is not None and self._check_alone(tape, outputs, alone)

        def look_at_all(tape: Tape, outputs: list[Tensor]) -> None:
            weights = self._all_weights(outputs, excluded if changed else None, dropped)
            if weights is not None:
                raw = tape.pull(outputs, weights, keep=False)
                if alone is not None:
                    self.rounds = tape.rounds
                    self.recorded = {param: sums.Recorded.of(param, grad) for param, grad in raw.items()}
                found.update(self._found(tape, outputs, weights, excluded, dropped, record=alone is not None))

        def look_both_ways(tape: Tape, outputs: list[Tensor]) -> None:
            look_alone(tape, outputs)
            if not spent:
                look_at_all(tape, outputs)

        if not self.check.compiled:
            try:
                self._pass(batch, dropped, look_both_ways)
                if spent:
                    self._pass(batch, dropped, look_at_all)
                return found
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
                self.check.compiled = True
        self._pass(batch, dropped, look_alone)
        self._pass(batch, dropped, look_at_all)
        return found

    def _found(
        self, tape: Tape, outputs: list[Tensor], weights: list[Tensor], excluded: Tensor, dropped: int, record: bool
    ) -> Measurements:
        """The measurements of a pass whose gradients are there; ``record``: whether the sums are to be noted."""
        found: Measurements = {}
        assert self.shapes is not None
        with _without_autocast(self.check.names):
            for choice in choose(tape.uses):
                found[choice.param] = self._measured(choice, excluded, dropped, record)
            for k, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
                dims = self._batch_dims(self.shapes[k])
                if len(dims) == 1:
                    rows, theirs = (t.movedim(dims[0], 0) for t in (output, weight))
                    found[k] = self._values(rows, theirs, excluded, dropped)
        return found

    def ordinary(self, batch: Any) -> dict[Parameter, float] | None:
        """Return the projections of the ordinary gradients; None where the outputs are others than before."""
        with unrecorded():  # in the backward pass, too, which may run functions again
            outputs = self._outputs(batch, nullcontext())
            weights = self._all_weights(outputs, None, 0)
            return sums.ordinary(outputs, weights, list(self.check.names)) if weights and outputs else None

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
            dims = self._batch_dims(first)
            if larger is not None and len(dims) == 1:
                weight.index_copy_(dims[0], larger.to(weight.device), 3.0 * weight.index_select(dims[0], larger))
            if dropped:
                if len(dims) != 1:
                    return None
                weight = weight.narrow(dims[0], dropped, self.batch_size - dropped)
            if weight.shape != output.shape:
                return None
            weights.append(weight)
        return weights

    def _pass(self, batch: Any, dropped: int, *looks: Callable[[Tape, list[Tensor]], None]) -> None:
        """Every ``look(tape, outputs that need a gradient)`` after one forward pass."""
        while True:
            tape = self.check.layout.tape(self.check.names, self.batch_size - dropped)
            outputs = self._outputs(batch, self.check.layout.recording(tape))
            self.check.layout.unchecked -= tape.uses.counts.keys()
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
        before = {id(tensor) for tensor in left_behind(self.check.model)}
        with recording:
            returned = self._run(without_graph(batch))
        self.drew = not RandomNumbers(self.check.model).same(self.random)
        self.written = self.state.written()
        left = [tensor for tensor in left_behind(self.check.model) if id(tensor) not in before]
        return list({id(t): t for t in (*tensors_in(returned), *left) if t.requires_grad}.values())

    def _batch_dims(self, shape: torch.Size) -> list[int]:
        return [d for d in (0, 1) if shape[d : d + 1] == (self.batch_size,)]

    def _kept(self, excluded: Tensor, dropped: int, device: torch.device) -> Tensor:
        kept = torch.ones(self.batch_size, dtype=torch.bool, device=device)
        kept[excluded.to(device)] = False
        return kept[dropped:]

    def _values(self, output: Tensor, weight: Tensor, excluded: Tensor, dropped: int) -> _Measured:
        """Return the values of the rows of an output that are not excluded."""
        kept = self._kept(excluded, dropped, output.device)
        norms_sq, projection = wide(output.detach()[:1]).abs().new_zeros(len(output)), 0.0
        # One after the other: the logits of a language model are as large as all the rest together.
        for i in kept.nonzero().flatten().tolist():
            row = wide(output[i].detach())
            norms_sq[i] = row.abs().square().sum()
            projection += float((row * weight[i]).real.sum())
        numbers = output[:1].numel()
        return _Measured(norms_sq[kept], norms_sq[kept], projection, numbers)

    def _measured(self, choice: Choice, excluded: Tensor, dropped: int, record: bool) -> _Measured:
        kept = self._kept(excluded, dropped, choice.param.device)
        dtype = torch.promote_types(choice.param.dtype, torch.float32)
        numbers = torch.Generator().manual_seed(choice.param.numel())
        rows = torch.randn(self.batch_size, generator=numbers)[dropped:].to(kept.device, dtype) * kept
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
        return _Measured(norms_sq[kept], scale[kept], float(totals[0].mul_(direction).sum()))

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

    def _check_alone(self, tape: Tape, outputs: list[Tensor], row: int) -> bool:
        """Experiment 1; return whether the graph is spent, which is not kept for another look where it is large.

        An output with the batch's length in two dimensions may have its examples in either.
        """
        dims = [(o, [d for d in (0, 1) if o.shape[d : d + 1] == (self.batch_size,)]) for o in outputs]
        by_row = [(output, fits) for output, fits in dims if fits]
        reached: Parameter | None = None
        possible = max((len(fits) for _, fits in by_row), default=0)
        for last in range(0 if self.check.compiled and possible > 1 else possible):
            weights = []
            for output, fits in by_row:
                dim = fits[-1] if last else fits[0]
                weight = torch.zeros_like(output)
                weight.select(dim, row).copy_(_weights(output).select(dim, row))
                weights.append(weight)
            spent = self.large and last + 1 == possible
            tape.pull([output for output, _ in by_row], weights, keep=not (spent or self.check.compiled))
            found = self._reaches_others(tape, row)
            if found is None:
                return spent
            reached = found if reached is None else reached
        if reached is not None:
            what = "loss" if self.losses else "output"
            raise PrivacyError(
                f"The {what} of one example has a gradient at {self.check.names[reached]} in the rows of other "
                f"examples: the model mixes the examples of a batch. {REMEDY}"
            )
        return False

    def _reaches_others(self, tape: Tape, row: int) -> Parameter | None:
        with _without_autocast(self.check.names):
            for choice in choose(tape.uses):
                if all(_is_zero_beside(use, row) for use in choice.uses):
                    continue
                others, _ = _norms_sq(choice)
                others[row] = 0.0
                # A derivative that is infinite gives 0 * inf in its own row: no sign of another example.
                if bool((others.isfinite() & (others != 0.0)).any()):
                    return choice.param
        return None


def _is_zero_beside(use: Use, row: int) -> bool:
    """Return whether the gradient at a use's output is zero in all rows but one, so that those of parameters are."""
    if use.grad is None or isinstance(use, FormedUse | ModuleUse):
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


def _dropped(batch: Any, count: int) -> int:
    """Return how many of the first rows experiment 5 leaves out.

    It is one, so that every place changes, or a few where the rest would be as many as another dimension has; 0 where
    too few examples are left to tell.
    """
    taken = {n for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) for n in leaf.shape[1:]}
    return next((k for k in (1, 3, 2) if count - k >= 3 and count - k not in taken), 0)


@contextmanager
def _without_autocast(names: dict[Parameter, str]) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(next(iter(names)).device.type, enabled=False):
        yield


def _moved(before: Measurements, after: Measurements, rounding: float) -> Parameter | int | None:
    """The parameter or output with the largest change, None where all is rounding or could not be measured."""
    worst, found = 1.0, None
    total: Tensor | float = _total(before)
    # What a gradient that is zero but for rounding (of a key's bias, say) has of the whole.
    half = rounding >= HALF_ROUNDING / 4
    floor = total * (HALF_FLOOR if half else FLOOR)
    for param in before.keys() | after.keys() if before and after else ():
        # An output may be zero but for rounding, of numbers that are not seen.
        least = before[param].numbers * OUTPUT_FLOOR * (1e5 if half else 1.0) if isinstance(param, int) else floor
        most = _change(before.get(param), after.get(param), rounding, least)
        if most > worst:
            worst, found = most, param
    return found


def _total(measured: Measurements) -> Tensor | float:
    """[k] squared norms over all parameters together; 0 where they have not the same rows."""
    each = [m.norms_sq.double().nan_to_num(0.0, 0.0) for key, m in measured.items() if not isinstance(key, int)]
    return torch.stack(each).sum(0).clamp(min=0.0) if len({n.shape for n in each}) == 1 else 0.0


def _change(before: _Measured | None, after: _Measured | None, rounding: float, floor: Tensor | float) -> float:
    """Return how many times larger than rounding the change between two measurements is."""
    if before is None or after is None:
        present = after if before is None else before
        assert present is not None
        return float("inf") if bool((present.norms_sq > 0).any()) else 0.0
    if before.norms_sq.shape != after.norms_sq.shape:
        return 0.0
    finite = before.norms_sq.isfinite() & after.norms_sq.isfinite()
    old, new = before.norms_sq[finite].double(), after.norms_sq[finite].double()
    if not len(old) or not bool(finite.all()):
        return 0.0
    largest = torch.maximum(old, new).clamp(min=0.0)  # what cancels may be below zero
    scale = torch.maximum(before.scale[finite].double(), after.scale[finite].double()).clamp(min=0.0)
    allowed = rounding * largest + CANCELLATION * scale + 1e-9 * largest.sum() + floor + 1e-300
    by_norm = float(((new - old).abs() / allowed).max())
    size = float((allowed / rounding).sum()) ** 0.5
    by_projection = abs(after.projection - before.projection) / (rounding * size)
    return max(by_norm, by_projection)


def _weights(output: Tensor) -> Tensor:
    """Fixed weights of an output's elements, none of them zero and hardly any two alike."""
    n = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return n.mul_(1.7).sin_().mul_(0.5).add_(1.0).reshape(output.shape).to(output.dtype)
