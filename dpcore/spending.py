"""Count what an engine's steps have spent, run by run: whoever goes on from a run's state has spent it, too."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.accountants import IAccountant
from dpcore.accountants.accountant import BINS, DELTA_RULE, History, Rate, count, totals
from dpcore.accountants.utils import customary_delta, rounded_up
from dpcore.arguments import check_number
from dpcore.budget import Budget
from dpcore.data_loader import DPDataLoader
from dpcore.errors import PrivacyError, warn_caller
from dpcore.loading.epoch_sampler import EpochSampler
from dpcore.loading.ledger import Unused
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers.claims import private_optimizers

Runs = dict[str, History]
"""Histories, by the names of the runs."""


@dataclass(frozen=True)
class Made:
    """Says how a run was made: its settings, whether dpcore drew its batches, and whether its seed was chosen.

    ``is_poisson``: None where it is not known. ``is_examined``: whether experiments have looked for examples that mix.
    """

    setting: Mapping[str, Any]
    is_poisson: bool | None
    is_chosen: bool
    is_examined: bool = True

    @classmethod
    def by(cls, optimizer: DPOptimizer) -> Made:
        """Return what is known of the run of ``optimizer``."""
        run = optimizer.run
        checked = None if run.ledger is None or not run.ledger.checks else True
        poisson = checked if isinstance(run.loader, DPDataLoader) else False
        return cls(run.setting, poisson, optimizer.noise.is_chosen, optimizer.module.isolation.enabled)


class Spending:
    """The steps that ``accountant`` has counted, by the names of their runs, and the budget that they stay within.

    ``unused``: the batches that they may still use. ``ancestors``: of each run, those in the file that it went on from.
    """

    def __init__(self, accountant: IAccountant) -> None:
        self._accountant = accountant
        self.budget: Budget | None = None
        self.unused = Unused()
        self.dataset: Any = None
        self.ancestors: dict[str, set[str]] = {}
        self._name = secrets.token_hex(16)  # of the steps that were counted by hand
        self._runs: Runs = {}
        self._taken_over: set[str] = set()  # runs that an optimizer's state has told of
        self._epochs: dict[str, float] = {}  # dealt epochs that were counted, and the least noise of their steps
        self._made: dict[str, Made] = {}  # those whose steps were counted here

    @property
    def accountant(self) -> IAccountant:
        """The accountant; another one may take its place if it knows of all steps."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: IAccountant) -> None:
        forgotten = steps_of(_unknown_steps(self._accountant.history, accountant.history))
        if forgotten:
            raise PrivacyError(
                f"This engine has counted {forgotten} steps that the new accountant does not know of: epsilon would "
                "forget them. To read it by another accountant, give that the same history (other.history = "
                "list(engine.accountant.history)); for another run use a new PrivacyEngine."
            )
        if not accountant.takes_bins and any(isinstance(rate, tuple) for _, rate, _ in accountant.history):
            self.check_takes(BINS, accountant)
        charged = self._accountant.failure_probability - accountant.failure_probability
        if charged > 0.0:
            accountant.add_failure_probability(min(1.0, charged))
        self._accountant = accountant

    def use(self, dataset: Any) -> None:
        """Note the data set whose examples the steps to come use, with a warning where it was another one before."""
        if self.dataset is not None and self.dataset is not dataset:
            warn_caller(
                "This engine has made another data set private before; its accountant adds up the steps on both, which "
                "is the epsilon of their union. Use one PrivacyEngine per data set.",
            )
        self.dataset = dataset

    def check_takes(self, sampling: str, accountant: IAccountant | None = None) -> None:
        """Refuse a sampler of which the accountant, this one or another, knows no bound, before anything is done."""
        accountant = accountant or self.accountant
        if sampling == BINS and not accountant.takes_bins:
            accountant.count_epochs(noise_multiplier=1.0, bins=2)  # raises the error that says so

    # ---- epsilon and the budget

    @property
    def _examples(self) -> int | None:
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def check_delta(self, delta: float) -> None:
        """Warn where a promise at ``delta`` allows to publish a person."""
        examples = self._examples
        if examples is not None and delta > 1 / examples:
            warn_caller(
                f"delta is {delta:g}, above 1 / {examples} (the number of examples): a mechanism that publishes one "
                f"example whole may keep such a promise. Use {customary_delta(examples):g} or less.",
            )

    def get_epsilon(self, delta: float | None) -> float:
        """Return the epsilon that was spent so far; TypeError without a delta."""
        if delta is None:
            raise TypeError(
                "get_epsilon() was called without delta, and there is no epsilon without one. Choose it well below "
                f"1 / (number of examples): get_epsilon(delta={customary_delta(self._examples or 10**5 - 1):g})."
            )
        delta = check_number("delta", delta, lambda d: 0.0 < d < 1.0, DELTA_RULE)
        self.check_delta(delta)
        epsilon = self.accountant.get_epsilon(delta)
        if epsilon == 0 and self.dataset is not None and not getattr(self.accountant, "history", True):
            warn_caller(
                "No private step was taken, so epsilon is 0. If you have trained already, it was without privacy: "
                "train with the model, optimizer and loader that make_private returned."
            )
        return epsilon

    @property
    def delta(self) -> float:
        """The budget's δ, or else the customary one, below 1 / (number of examples)."""
        return self.budget.delta if self.budget else customary_delta(self._examples or 10**5 - 1)

    def parts(self) -> list[str]:
        """Return what an engine shows of itself: what was spent, and the budget."""
        examples, budget, delta = self._examples, self.budget, self.delta
        # Nobody asked for this delta: another one has another epsilon.
        origin = f" (below 1 / {examples} examples)" if examples and not budget else ""
        spent = f"epsilon={rounded_up(self.accountant.get_epsilon(delta))} at {delta=:g}{origin}"
        parts = [f"accountant={self.accountant!r}", spent if self.accountant.history else "no private step yet"]
        return [*parts, f"budget={budget.epsilon:g}"] if budget else parts

    def set_budget(
        self, epsilon: float | None, delta: float | None, fits: Sequence[Any] = (), failing: float = 0.0
    ) -> None:
        """Refuse steps beyond a budget, in which the steps ``fits`` are known to fit; None lifts it.

        ``failing``: the chance of failures with which they fit, too.
        """
        budget = None if epsilon is None else Budget.checked(epsilon, delta, fits, failing)
        if budget is not None:
            self.check_delta(budget.delta)
        self.budget = budget

    def within_budget(self, optimizer: DPOptimizer) -> bool:
        """Return whether one more step of ``optimizer``, on one batch, fits the budget."""
        loader, history = optimizer.run.loader, self.accountant.history
        rate: Rate = loader.sample_rate if isinstance(loader, DPDataLoader) else history[-1][1] if history else 0.0
        failure = min(1.0, 2.0 * loader.sampler_state.overflow) if isinstance(loader, DPDataLoader) else 0.0
        if isinstance(loader, DPDataLoader) and isinstance(sampler := loader.sampler_state, EpochSampler):
            following = sampler.drawn - 1 if loader.waiting else sampler.following(loader.rounds.newest is not None)
            if (correlation := optimizer.run.correlation) is not None:
                cost = correlation.cost(following)
                return self._epsilon_beyond(*_of_round(optimizer.noise_multiplier, cost), failure) is None
            begins = not loader.waiting and not following % sampler.steps
            name = sampler.epoch_of(sampler.drawn - 1)
            own = self._uncounted(sampler.begun if name is None else [name], optimizer.noise_multiplier)
            rate = sampler.rate_of_epoch if begins or own else 0.0
        return self._epsilon_beyond(optimizer.noise_multiplier, rate, 1, failure) is None

    def check_budget(self, optimizer: DPOptimizer, rate: float, failure: float = 0.0) -> None:
        """BudgetError where the step at hand would exceed the budget; ``failure``: the chance that a batch was cut."""
        noise, costs, steps = self._entries(optimizer, rate)[0][0]  # a second entry costs nothing
        failure = min(1.0, failure * optimizer.logical_batch.batches / steps)
        spent = self._epsilon_beyond(noise, costs, steps, failure)
        if spent is not None and self.budget is not None:
            raise self.budget.refusal(spent)

    def _epsilon_beyond(self, noise_multiplier: float, rate: Rate, steps: int, failure: float) -> float | None:
        """Epsilon after these steps where it exceeds the budget, None where it does not."""
        if self.budget is None:
            return None
        spent, self.budget = self.budget.after(self.accountant, noise_multiplier, rate, steps, failure)
        return spent

    # ---- what was spent, run by run

    def optimizers(self) -> list[DPOptimizer]:
        """Return the optimizers whose steps are counted here."""
        return [optimizer for optimizer in private_optimizers() if optimizer.engine is self]

    def count(self, optimizer: DPOptimizer, rate: float, failure: float = 0.0) -> None:
        """Count a step, whose batches were drawn at ``rate`` and each cut at most so often, and under which name.

        Of a loader that deals epochs a step brings the epochs of its batches, those that no step has brought before.
        """
        entries, begun = self._entries(optimizer, rate)
        if begun is None:
            self.accountant.get_optimizer_hook_fn(rate)(optimizer)
        else:
            for entry in entries:
                count(self.accountant, *entry)
            if optimizer.run.correlation is not None:
                optimizer.run.correlation.count()  # behind it: what was interrupted is counted by the next step
            self._epochs.update(dict.fromkeys(begun, entries[0][0]))
        self._made[optimizer.run.name] = Made.by(optimizer)
        if failure:
            self.accountant.add_failure_probability(min(1.0, optimizer.logical_batch.batches * failure))
        for entry in entries:
            _add(self._runs.setdefault(optimizer.run.name, []), entry)

    def _entries(self, optimizer: DPOptimizer, rate: float) -> tuple[History, list[str] | None]:
        """Return what the step at hand adds to a history, and the epochs that it brings; None where none are dealt.

        Where it is not known which batches it has used, all epochs count of which it may have used one. A batch that
        was used before, or of which nothing is known, is a step of all examples: an epoch covers each batch once.
        """
        k, loader = optimizer.logical_batch.batches, optimizer.run.loader
        of_step = optimizer.logical_batch.noise_multiplier  # the optimizer's may be that of the next step already
        noise = of_step / k**0.5
        sampler = loader.sampler_state if isinstance(loader, DPDataLoader) else None
        if not isinstance(sampler, EpochSampler):
            return [(noise, rate, k)], None
        if (correlation := optimizer.run.correlation) is not None:
            return [_of_round(of_step, correlation.cost(correlation.step))], []
        ledger = optimizer.run.ledger
        used = () if ledger is None else ledger.used
        again = any(batch.is_again for batch in used) or (not used and sampler.source in self.unused.came_again)
        if ledger is None or ledger.is_foreign or again:
            return [(noise, 1.0, k)], []
        names = [batch.epoch for batch in used if batch.epoch is not None]
        if len(names) < k or len(names) < len(used):
            names = [*sampler.begun, *self.unused.epochs[sampler.source]]
        begun = self._uncounted(names, noise)
        entries: History = [(noise, sampler.rate_of_epoch, len(begun))] if begun else []
        if k > len(begun):
            entries.append((noise, 0.0, k - len(begun)))
        return entries, begun

    def _uncounted(self, epochs: Sequence[str], noise: float) -> list[str]:
        """Return those of the epochs of which no step was counted, or none with as little noise."""
        return [name for name in dict.fromkeys(epochs) if self._epochs.get(name, math.inf) > noise]

    def epoch_at(self, loader: Any, draw: int) -> dict[str, str]:
        """Return what a file tells of the epoch of a draw, so that a run which goes on within it does not count it."""
        sampler = getattr(loader, "sampler_state", None)
        name = sampler.name_at(draw) if isinstance(sampler, EpochSampler) else None
        return {"epoch": name, "epoch's noise": repr(self._epochs[name])} if name in self._epochs else {}

    def go_on_in_epoch(self, position: Mapping[str, Any]) -> None:
        """Note the epoch that :meth:`epoch_at` has told of; one of another seed or of other data has another name."""
        if "epoch" in position:
            self._epochs[position["epoch"]] = float(position["epoch's noise"])
            self.unused.go_on_at(position["epoch"], int(position["drawn"]))

    def made(self) -> list[Made]:
        """Return how the runs were made whose steps are counted here, past and to come, as far as it is known."""
        by_hand = [Made({}, None, False)] if self.runs().get(self._name) else []
        return [*({o.run.name: Made.by(o) for o in self.optimizers()} | self._made).values(), *by_hand]

    def runs(self) -> Runs:
        """Return all steps by the names of their runs; those counted by hand have a name of their own."""
        for step in _unknown_steps(self.accountant.history, [step for run in self._runs.values() for step in run]):
            _add(self._runs.setdefault(self._name, []), step)
        for optimizer in self.optimizers():
            self._runs.setdefault(optimizer.run.name, [])
        return self._runs

    def spent(self) -> dict[str, Any]:
        """Return what was spent, for the states of optimizers: whoever goes on with them has spent it."""
        return {"runs": copy.deepcopy(self.runs()), "failure_probability": self.accountant.failure_probability}

    def take_over(self, spent: Mapping[str, Any], optimizer: DPOptimizer) -> None:
        """Count what :meth:`spent` told, as far as it is not counted yet, before ``optimizer`` goes on.

        A seed of the user's would begin anew, so that its noise and its batches would be those of that run's steps.

        Args:
            spent: What was spent where the optimizer's new state was saved.
            optimizer: One of those counted here.

        Raises:
            UnsupportedError: the batches would be those of that run.
        """
        told, found = dict[str, History](spent["runs"]), False
        for run, history in told.items():
            known = steps_of(self.runs().get(run, []))
            for noise, rate, steps in history:
                new, known = max(0, steps - known), max(0, known - steps)
                if new:
                    count(self.accountant, noise, rate, new)
                    _add(self._runs.setdefault(run, []), (noise, rate, new))
                    self._taken_over.add(run)
                    found = True
        others = self._taken_over & told.keys()
        if found:  # of which of their steps it is not known: all of it, though some may be counted
            self.accountant.failure_probability += spent.get("failure_probability", 0.0)
        if others - optimizer.run.resumed:
            steps = sum(map(steps_of, told.values()))
            if isinstance(optimizer.run.loader, DPDataLoader):
                optimizer.run.loader.sampler_state.reseed("resumed", steps)
            optimizer.run.resumed |= others
            optimizer.noise.branch("resumed", steps, known=True)

    def check_continues(self, saved: Runs) -> None:
        """Refuse a file behind which this process has made steps, with noise that would be drawn again.

        Args:
            saved: What the file tells. Steps of runs that it has nothing to do with may stay counted.

        Raises:
            PrivacyError: steps of one of the file's runs, or of one that went on from them, are not in the file.
        """
        forgotten = sum(
            max(0, steps_of(history) - steps_of(saved.get(run, [])))
            for run, history in self.runs().items()
            if {run, *self.ancestors.get(run, ())} & saved.keys()
        )
        if forgotten:
            raise PrivacyError(
                f"This engine has counted {forgotten} steps that are not in the checkpoint: epsilon would forget them, "
                "and training on would use their noise again, on other gradients, whose difference it would lay bare. "
                "To return to the checkpoint's weights, load its 'module_state_dict' into the module alone; the "
                "accountant and the noise then go on. To look at the run as it was, use a new PrivacyEngine."
            )

    def go_on(self, accountant: Mapping[str, Any], saved: Runs) -> None:
        """Go on from a file: its steps, and those of runs that it has nothing to do with, are what was spent.

        Args:
            accountant: The accountant's state in the file.
            saved: The runs that the file tells of.
        """
        others = {run: steps for run, steps in self.runs().items() if run not in saved}
        failing = self.accountant.failure_probability if others else 0.0  # of which of them is not known
        self.accountant.load_state_dict(dict(accountant))
        self.accountant.failure_probability += failing
        for noise, rate, steps in (step for run in others.values() for step in run):
            count(self.accountant, noise, rate, steps)
        self._runs, self._taken_over = copy.deepcopy(dict(saved)) | others, set()
        for optimizer in self.optimizers():
            self.ancestors[optimizer.run.rename()] = set(saved)


def _of_round(noise: float, cost: float) -> tuple[float, Rate, int]:
    """Return the step of all examples that costs as much as a round of correlated noise; no cost is no release."""
    return (noise / cost**0.5, 1.0, 1) if cost else (noise, 0.0, 1)


def steps_of(history: Sequence[Sequence[Any]]) -> int:
    """Return the number of steps."""
    return int(sum(steps for _, _, steps in history))


def _unknown_steps(counted: History, known: History) -> History:
    """Return those of the steps ``counted`` that are not in the history ``known``."""
    left = totals(counted)
    left.subtract(totals(known))
    return [(noise, rate, steps) for (noise, rate), steps in left.items() if steps > 0]


def _add(history: History, step: tuple[float, Rate, int]) -> None:
    """Add steps to a history, in which equal neighbours are counted together."""
    if history and tuple(history[-1][:2]) == step[:2]:
        step = (*step[:2], step[2] + history.pop()[2])
    history.append(step)
