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

Of large examples, whose passes take long, one batch of a kind goes through 1 and 2 with the other example as an
outlier, and the next one through 1, 2 and 6, in turn; every second batch of new kinds goes through 6, too. What 6 finds
is lost to training; it never is in a release.

Outputs are all tensors with a gradient in what the forward pass returns, also within objects of unknown classes, and
those that it leaves in attributes of modules.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.example_isolation import sums
from dpcore.example_isolation.measurements import HALF_ROUNDING, ROUNDING, Measurements, what_moved
from dpcore.example_isolation.rows import enlarged, half_of_rows, replace_rows, selected, shaken
from dpcore.example_isolation.trial import REMEDY, Run, Subject, Trial
from dpcore.microbatch import ragged
from dpcore.microbatch.layout import FEWEST_AT_FIRST, TRIES, Layout
from dpcore.microbatch.memory import give_back_everything, ran_out
from dpcore.numerics.precision import is_lowered
from dpcore.privacy_unit import rows_of
from dpcore.rerun.heap import give_back, keep_pages
from dpcore.rerun.snapshot import draw_on, preserved, same_values, without_dropout
from dpcore.tree import flatten, has_rows

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

    def __init__(self, model: nn.Module, names: dict[Parameter, str], layout: Layout, group: int = 1) -> None:
        """``group``: rows of a unit, which may mix; the examples here are units."""
        self.subject = Subject(model, names, layout, group)
        self.enabled = True
        self._most = EXAMPLES
        self._kinds: Counter[Any] = Counter()
        self._passes = 0
        self._checks = 0
        # Of its own and unpredictable: it must neither shift the user's random numbers nor miss what repeats.
        self._random = random.Random()
        keep_pages()  # which each of the first passes frees, and the next one asks for

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_random": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _random=random.Random())

    def switch_off(self) -> None:
        """Ends the checks, with a warning."""
        self.enabled = False
        warn_caller(SWITCHED_OFF)

    def due(self, kind: Any, rows: int) -> bool:
        """Return whether this batch of ``rows`` is to be checked.

        Those are the first batches of each kind, and rare random ones later. Those of one example are a kind of their
        own, for they say nothing about mixing.
        """
        if not self.enabled or not rows:
            return False
        self._passes += 1
        new = self._kinds[kind, rows > self.subject.group] < BATCHES or bool(self.subject.layout.unchecked)
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
            batch_size: How many rows there are.
            losses: Whether ``run`` returns one loss per example.
            outputs: Whether a pass without a tensor that has a gradient is a fault.
        """
        self._checks += 1
        several = batch_size > self.subject.group
        turn = self._kinds[kind, several]
        for way in range(TRIES):
            while not self._checked(run, batch, batch_size, losses, outputs, way, turn):
                # Here, where the error and all that its traceback held are gone.
                give_back_everything(next(iter(self.subject.names)).device)
            if not self.subject.layout.unchecked:  # it has gone where only another look has been
                break
        self._kinds[kind, several] += 1
        if turn + 1 >= BATCHES:  # the next one asks for the same pages
            give_back()

    def _checked(
        self,
        run: Run,
        batch: Any,
        batch_size: int,
        losses: bool,
        outputs: bool,
        way: int,
        turn: int,
        whole: bool = False,
    ) -> bool:
        """Make all experiments; False where memory ran out, and fewer examples are to be tried.

        ``turn``: how many batches of the kind have been checked. ``whole``: the first experiment alone, on the batch as
        it is.
        """
        group = self.subject.group
        whole, given = whole or ragged.is_ragged(self.subject.model, batch), (batch, batch_size)
        if not whole:
            layout = self.subject.layout
            batch, batch_size = _few(batch, batch_size, layout, group, self._most, self._random)
        try:
            with preserved(self.subject.model) as state, torch.enable_grad():
                state.watch_parameters()
                draw_on(way)
                trial = Trial(self.subject, state, run, batch_size, losses, outputs)
                row = self._random.randrange(batch_size // group)
                alone = whole or batch_size < FEWEST * group
                short = trial.large and turn % 2 == 0 and not alone
                # By all checks: batches may each be of a kind of their own, of which none would have a second.
                trial.adds_up = not short or self._checks % 2 == 0
                if alone:
                    trial.measure(batch, torch.arange(0), alone=row)
                else:
                    self._exchange(trial, batch, row, short)
                if trial.adds_up:
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
                return self._checked(run, *given, losses, outputs, way, turn, whole=True)
            if batch_size < FEWEST * group:
                return True  # of one example the pass itself will tell
            if whole or batch_size <= FEWEST * group:
                error.add_note(
                    f"dpcore had {batch_size // group} examples in work, to see whether the model keeps examples "
                    f"apart, which takes {'whole batches' if whole else 'two'}."
                )
                raise
            self._most = max(FEWEST, batch_size // (2 * group))
            return False
        return True

    def _exchange(self, trial: Trial, batch: Any, alone: int, short: bool) -> None:
        """All experiments but the sum; ``alone``: the example whose outputs may not reach others. ``short``: with other
        examples that are outliers, unless the model fails on these or no finite gradient is left.
        """
        group, count = self.subject.group, trial.batch_size
        units, beside = half_of_rows(count // group, self._random)
        dropped = _dropped(batch, count // group, group)
        if dropped + len(units) >= count // group:
            units = units[1 + dropped - count // group :]
        # The same rows are compared in all experiments, so that one pass is the measure of them.
        left_out = torch.cat([torch.arange(dropped), units]).unique()
        kept = [unit for unit in range(count // group) if unit not in left_out]
        rows, others, excluded = (rows_of(of, group) for of in (units, torch.full_like(units, beside), left_out))
        dropped *= group
        before = trial.measure(batch, excluded, kept[0] if len(kept) == 1 else alone)
        written = trial.written
        given = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and has_rows(leaf, count)]
        floating = any(leaf.is_floating_point() for leaf in given)
        strangers = replace_rows(batch, count, rows, others, enlarged) if short else None
        if strangers is None or not floating or not self._compare_outliers(trial, before, batch, strangers, excluded):
            neighbours = replace_rows(batch, count, rows, others)
            try:
                self._compare(trial, before, batch, neighbours, excluded)
            except UnsupportedError as error:
                error.add_note(
                    "dpcore had put other examples of the batch in the place of some, to see whether the model keeps "
                    "examples apart; a model that fails on that depends on several examples at a time."
                )
                raise
        _check_same_buffers(written, trial.written)
        if floating and not trial.large:
            outliers = replace_rows(batch, count, rows, rows, enlarged)
            self._compare_outliers(trial, before, batch, outliers, excluded)
        if dropped:
            self._compare_fewer(trial, before, batch, dropped, excluded)
            self._compare_counts(trial, written, batch, dropped, excluded)

    def _compare_outliers(self, trial: Trial, before: Measurements, batch: Any, outliers: Any, rows: Tensor) -> bool:
        """Experiment 3; return whether it could be made: the model may well refuse such values, which were ours."""
        try:
            after = self._compare(trial, before, batch, outliers, rows)
        except PrivacyError:
            raise
        except Exception as error:
            if ran_out(error):
                raise
            return False
        return bool(after) and all(bool(m.norms_sq.isfinite().all()) for m in after.values())

    def _compare_fewer(self, trial: Trial, before: Measurements, batch: Any, dropped: int, excluded: Tensor) -> None:
        """Experiment 5: PrivacyError where a gradient depends on the place in the batch or on the batch's length."""
        count = trial.batch_size
        # A batch of another length goes through other kernels, whose rounding cancellation may enlarge.
        rounding = HALF_ROUNDING
        fewer = selected(batch, count, torch.arange(dropped, count))
        try:
            after = trial.measure(fewer, excluded, dropped=dropped)
            if what_moved(before, after, rounding) is None:
                return
            with without_dropout(self.subject.model):
                before, again = (trial.measure(of, excluded) for of in (batch, shaken(batch)))
                after = trial.measure(fewer, excluded, dropped=dropped)
        except Exception as error:  # a model may well be made for batches of one length
            if ran_out(error):
                raise
            return
        moved = what_moved(before, after, rounding)
        if moved is None or trial.drew or what_moved(before, again, rounding / 4) is not None:
            return
        raise PrivacyError(
            f"The {self._what(moved)} for an example depends on the number of examples in the batch, or on "
            f"its place there: it changed when {dropped // self.subject.group} before it were left out. A table of "
            "positions that is cut to the batch's length instead of the sequence's does that, or a division by "
            f"len(x). {REMEDY}"
        )

    def _compare_counts(
        self, trial: Trial, written: dict[str, Tensor], batch: Any, dropped: int, excluded: Tensor
    ) -> None:
        """PrivacyError where the pass of fewer examples that was just made wrote something else than ``written``."""
        now = trial.written
        if trial.drew and now.keys() & written.keys():
            fewer = selected(batch, trial.batch_size, torch.arange(dropped, trial.batch_size))
            try:
                with without_dropout(self.subject.model):
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

    def _compare(self, trial: Trial, before: Measurements, batch: Any, changed: Any, rows: Tensor) -> Measurements:
        """Return what ``changed`` gives.

        PrivacyError where it is another gradient than that of ``batch``, for which ``before`` was measured, in a row
        that is not among ``rows``.
        """
        after = trial.measure(changed, rows, changed=True)
        if what_moved(before, after, self._rounding()) is None:
            return after
        # Dropout of what is packed hits other elements as soon as a length changes: compared without it.
        with without_dropout(self.subject.model):
            before, again = (trial.measure(of, rows) for of in (batch, shaken(batch)))
            after = trial.measure(changed, rows, changed=True)
        moved = what_moved(before, after, self._rounding())
        if moved is None:
            return after
        if what_moved(before, again, self._rounding() / 4) is not None:
            warn_caller(UNREPEATABLE.format(what="whether the model mixes examples"))
            return after
        raise PrivacyError(
            f"The {self._what(moved)} for an example depends on the other examples in the batch: it "
            f"changed when those were replaced. {REMEDY}"
        )

    def _compare_sums(self, trial: Trial, batch: Any) -> None:
        """Experiment 6: UnsupportedError where the first pass has not recorded all of a parameter's gradient."""
        half = self._rounding() == HALF_ROUNDING or trial.rounds or is_lowered()
        try:
            found = trial.ordinary(batch)
        except Exception as error:
            if ran_out(error):
                raise
            warn_caller(
                f"An ordinary pass of the model fails where a recorded one does not ({type(error).__name__}: {error}), "
                "so it cannot be checked whether all of each gradient is recorded."
            )
            return
        if found is None or sums.differs(trial.recorded, found, half) is None:
            return
        trial.without_left_behind()
        with without_dropout(self.subject.model):  # which recurrent layers draw in another order
            trial.measure(batch, torch.arange(0), alone=0)
            found, again = trial.ordinary(batch), trial.ordinary(shaken(batch))
        param = None if found is None else sums.differs(trial.recorded, found, half)
        if found is None or again is None or param is None:
            return
        recorded = trial.recorded.get(param, sums.Recorded()).projection
        off, noise = (abs(found.get(param, 0.0) - other) for other in (recorded, again.get(param, 0.0)))
        if noise > off / 4 or trial.drew:
            warn_caller(UNREPEATABLE.format(what="whether all of each gradient is recorded"))
            return
        raise UnsupportedError(
            f"The gradients by example of {self.subject.names[param]} do not add up to its ordinary gradient: the "
            "model uses it, or changes what it gave, in a way that dpcore does not see. Make operations in place "
            "behind that layer out-of-place, or freeze it with requires_grad_(False); and please report the model. "
            "If the layer has a rule of yours, ask check_per_sample_gradients_are_correct about it first."
        )

    def _what(self, moved: Parameter | int) -> str:
        return f"output number {moved + 1}" if isinstance(moved, int) else f"gradient of {self.subject.names[moved]}"

    def _rounding(self) -> float:
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.subject.names)
        device = next(iter(self.subject.names)).device.type
        return HALF_ROUNDING if half or torch.is_autocast_enabled(device) else ROUNDING


def _check_same_buffers(before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Experiment 4: PrivacyError where a pass of other examples wrote something else."""
    for name in before.keys() | now.keys():
        if name not in before or name not in now or not same_values(before[name], now[name]):
            raise PrivacyError(
                f"The buffer {name} depends on the examples of a batch and would be released without noise, in "
                "state_dict() and through what is computed from it. Keep such statistics out of the model, or "
                "compute them from public data."
            )


def _dropped(batch: Any, count: int, group: int) -> int:
    """Return how many of the first examples, of ``group`` rows each, experiment 5 leaves out.

    It is one, so that every place changes, or a few where the rest would be as many as another dimension has; 0 where
    too few examples are left to tell.
    """
    taken = {n for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) for n in leaf.shape[1:]}
    return next((k for k in (1, 3, 2) if count - k >= 3 and (count - k) * group not in taken), 0)


def _few(batch: Any, rows: int, layout: Layout, group: int, at_once: int, generator: random.Random) -> tuple[Any, int]:
    """A few random examples, and how many rows they have: not as many as another dimension, which could pass for the
    batch. ``at_once``: the most examples.
    """
    count, most = rows // group, max(FEWEST, layout.at_first(at_once * group) // group)
    if count <= most:
        return batch, rows
    taken = {n for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) for n in leaf.shape[1:]}
    # Rather more than so few that an experiment sees too little.
    fewest, at_most = min(most, FEWEST_AT_FIRST), min(at_once, count)
    numbers = (*range(most, fewest - 1, -1), *range(most + 1, at_most + 1), *range(fewest - 1, 1, -1))
    number = next((n for n in numbers if n * group not in taken), most)
    index = rows_of(torch.tensor(sorted(generator.sample(range(count), number))), group)
    return selected(batch, rows, index), len(index)
