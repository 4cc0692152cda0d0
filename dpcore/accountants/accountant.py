"""Accountants: a history of (noise multiplier, sample rate, steps), and a way to read an epsilon off it."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from dpcore.arguments import check_number, number_of
from dpcore.errors import UnsupportedError

Rate = float | tuple[str, int]
"""Of steps on Poisson batches the sample rate; of epochs of balls in bins ("bins", how many)."""

History = list[tuple[float, Rate, int]]
BINS = "bins"
DELTA_RULE = "it must be a number in (0, 1), and well below 1 / (number of examples)"


class IAccountant(ABC):
    """The base of all accountants.

    ``history``: (noise multiplier, sample rate, steps) of consecutive steps; equal neighbours are counted together. An
    epoch of balls in bins stands as (noise multiplier, ("bins", batches), 1), which its first step has brought, and its
    other steps at the rate 0, for they cost nothing more.

    ``takes_bins``: whether ``_epsilon`` knows such epochs.

    ``failure_probability``: the sum over all steps, see :meth:`add_failure_probability`.

    One of your own defines :meth:`mechanism`, and ``_epsilon(history, delta)`` or, as in Opacus, ``step``,
    ``get_epsilon`` and ``__len__``; its ``step`` need not take ``steps``.
    """

    failure_probability = 0.0
    takes_bins = False

    def __init__(self) -> None:
        self.history: History = []

    def step(self, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Count steps of the Poisson-subsampled Gaussian mechanism.

        Args:
            noise_multiplier: σ, the noise's standard deviation over the sensitivity; at least 0.
            sample_rate: q, the chance of an example to be in the batch, in [0, 1].
            steps: How many such steps.

        Raises:
            ValueError: a number is out of its range.
        """
        _check_entry(noise_multiplier, sample_rate, steps)
        self._append(noise_multiplier, sample_rate, steps)

    def count_epochs(self, *, noise_multiplier: float, bins: int, epochs: int = 1) -> None:
        """Count epochs in each of which every unit was put into one of so many batches, uniformly and independently.

        An epoch that was begun counts whole, and so it does for each of several noises: the least of its steps is a
        bound already.

        Args:
            noise_multiplier: σ of each batch's sum, the noise's standard deviation over the sensitivity.
            bins: T, how many batches an epoch has.
            epochs: How many epochs.

        Raises:
            ValueError: a number is out of its range.
            UnsupportedError: this accountant knows no bound for such epochs.
        """
        _check_entry(noise_multiplier, (BINS, bins), epochs)
        self._check_takes((BINS, bins))
        # One batch is the whole data set, at every step.
        self._append(noise_multiplier, 1.0 if bins == 1 else (BINS, int(bins)), epochs)

    def _check_takes(self, rate: Rate) -> None:
        if isinstance(rate, tuple) and not self.takes_bins:
            raise UnsupportedError(
                f"The accountant {self.mechanism()!r} knows no bound for balls in bins, and would say that of another "
                'sampler; use PrivacyEngine(accountant="prv"), or sampling="poisson".'
            )

    def _append(self, noise_multiplier: float, sample_rate: Rate, steps: int) -> None:
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps += self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps))

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Return the epsilon of the whole history.

        Args:
            delta: δ, in (0, 1) and well below 1 / (number of examples).
            **options: Options of the accountant.

        Returns:
            Epsilon for adding or removing one example: 0 without steps, infinity where a step had no noise.

        Raises:
            ValueError: delta is not in (0, 1).
        """
        check_number("delta", delta, lambda d: 0.0 < d < 1.0, DELTA_RULE)
        released = released_of(self.history)
        for _, rate, _ in released:
            self._check_takes(rate)
        if not released:
            return 0.0
        if any(noise == 0.0 for noise, _, _ in released):
            return float("inf")
        if not self.failure_probability:
            return self._epsilon(released, delta, **options)
        return self._with_failures(released, delta, options)

    def add_failure_probability(self, probability: float) -> None:
        """A chance of at most ``probability`` that a step counted here moved by more than its sensitivity.

        With P and Q the run with and without an example, and P' the run in which no step fails, P and P' differ by at
        most the sum F of all such chances. The worse of the two directions is Q(S) <= e^ε P'(S) + δ' <= e^ε P(S) + e^ε
        F + δ', so ε holds at δ = δ' + e^ε F.
        """
        if type(self).get_epsilon is not IAccountant.get_epsilon:
            raise UnsupportedError(
                f"{type(self).__name__} has a get_epsilon of its own, which charges no failure probability, so its "
                "epsilon would be too small. Define _epsilon(history, delta) in its place."
            )
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"A failure probability of {probability} is none; it must lie in [0, 1].")
        self.failure_probability += probability

    def _with_failures(self, released: History, delta: float, options: dict[str, Any]) -> float:
        """The smallest fixed point of ε = ε'(δ - e^ε F), approached from below; infinity where there is none."""
        epsilon = 0.0
        while math.exp(min(600.0, epsilon)) * self.failure_probability < delta:
            left = delta - math.exp(min(600.0, epsilon)) * self.failure_probability
            needed = self._epsilon(released, left, **options)
            if needed <= epsilon:
                return epsilon
            # Overshoots the fixed point by 1e-6 at most, so that the search ends.
            epsilon = needed + 1e-6
        return math.inf

    def __repr__(self) -> str:
        counted = totals(entry for entry in self.history if entry[1] != 0.0)  # other steps are of epochs among these
        steps = ", ".join(
            f"{number_of(count, 'epoch')} of {rate[1]} bins at noise {noise:.6g}"
            if isinstance(rate, tuple)
            else f"{count} at noise {noise:.6g}, rate {rate:.6g}"
            for (noise, rate), count in [*counted.items()][-4:]
        )
        earlier = "..., " if len(counted) > 4 else ""
        return f"{type(self).__name__}({number_of(len(self), 'step')}: {earlier}{steps or 'none yet'})"

    def _epsilon(self, history: History, delta: float, **options: Any) -> float:
        """The epsilon of a non-empty history with positive noise multipliers and sample rates."""
        raise NotImplementedError(f"{type(self).__name__} defines neither get_epsilon nor _epsilon.")

    @classmethod
    @abstractmethod
    def mechanism(cls) -> str:
        """The name under which the accountant is registered."""

    def __len__(self) -> int:
        """Number of steps so far."""
        return sum(steps for _, _, steps in self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """A hook for ``DPOptimizer.attach_step_hook``: counts every step at the noise multiplier of its release.

        k batches accumulated into one step may contain the same example k times. Their noise, N(0, σ²), is the sum of k
        draws of N(0, σ²/k), so the step is what k steps with noise σ/√k release, or less.
        """

        def hook(optimizer: Any) -> None:
            k = max(1, optimizer.logical_batch.batches)  # none where it is called behind a step
            count(self, optimizer.logical_batch.noise_multiplier / k**0.5, sample_rate, k)

        return hook

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return history and mechanism, to be saved.

        Args:
            destination: A dictionary to fill, in place of a new one.
        """
        destination = {} if destination is None else destination
        destination["history"] = deepcopy(self.history)
        destination["mechanism"] = self.mechanism()
        if self.failure_probability:
            destination["failure_probability"] = self.failure_probability
        return destination

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the history.

        Raises:
            ValueError: the state is another accountant's, or one of its numbers is out of its range.
        """
        if state_dict.get("mechanism") != self.mechanism():
            raise ValueError(
                f"The state is of the accountant {state_dict.get('mechanism')!r}, this one is "
                f"{self.mechanism()!r}; create "
                "the accountant under the name that the state was saved with."
            )
        for noise, rate, steps in state_dict["history"]:
            _check_entry(noise, rate, steps)
        probability = state_dict.get("failure_probability", 0.0)
        check_number("failure_probability", probability, lambda p: p >= 0.0, "it must be at least 0")
        self.history = [(float(noise), _rate(rate), int(steps)) for noise, rate, steps in state_dict["history"]]
        self.failure_probability = float(probability)


def totals(history: Iterable[tuple[float, Rate, int]]) -> Counter[tuple[float, Rate]]:
    """Return how many steps there are of each (noise multiplier, sample rate); their order does not matter."""
    found: Counter[tuple[float, Rate]] = Counter()
    for noise, rate, steps in history:
        found[noise, rate] += steps
    return found


def charged_of(history: History) -> History:
    """Return the entries of which something was released that no other one has counted."""
    return [entry for entry in history if entry[1] != 0.0 and entry[2] > 0]


def released_of(history: History) -> History:
    """Return what was released, by steps of different noise on all examples as one: they are Gaussian together."""
    charged = charged_of(history)
    whole = [entry for entry in charged if entry[1] == 1.0 and entry[0] > 0.0]
    if len({noise for noise, _, _ in whole}) < 2:
        return charged
    # Downwards, as far as the sum may be rounded.
    joined = math.fsum(steps / noise**2 for noise, _, steps in whole) ** -0.5 * (1 - 1e-12)
    return [(joined, 1.0, 1), *(entry for entry in charged if entry not in whole)]


def poisson_steps(history: History) -> list[tuple[float, float, int]] | None:
    """Return the history where all of it is steps on Poisson batches, and else None."""
    steps = [(sigma, rate, count) for sigma, rate, count in history if not isinstance(rate, tuple)]
    return steps if len(steps) == len(history) else None


def rate_words(rate: Rate) -> str:
    """Return a sample rate, or how else batches were drawn, in words."""
    return f"epochs of {rate[1]} bins" if isinstance(rate, tuple) else f"rate {rate:.6g}"


def _rate(value: Any) -> Rate:
    """Return a history's rate as it is here, of a file whose tuples may have become lists."""
    return (BINS, int(value[1])) if isinstance(value, list | tuple) else float(value)


def _check_entry(noise_multiplier: Any, sample_rate: Any, steps: Any) -> None:
    """ValueError where one of these is not what a history may hold."""
    rule = "it must be a number, finite and at least 0"
    check_number("noise_multiplier", noise_multiplier, lambda sigma: 0.0 <= sigma < math.inf, rule)
    if isinstance(sample_rate, list | tuple):
        kind, bins = sample_rate if len(sample_rate) == 2 else (None, None)
        if kind != BINS:
            raise ValueError(f"The history holds steps at the rate {sample_rate!r}; it is a number, or ('bins', T).")
        check_number(
            "bins", bins, lambda t: 1.0 <= t < math.inf and t % 1 == 0, "it must be a whole number, at least 1"
        )
    else:
        rule = "it is a probability, so it must lie in [0, 1]"
        check_number("sample_rate", sample_rate, lambda q: 0.0 <= q <= 1.0, rule)
    rule = "it must be a whole number, at least 0: what was released cannot be taken back"
    check_number("steps", steps, lambda n: 0.0 <= n < math.inf and n == math.floor(n), rule)


def count(accountant: IAccountant, noise_multiplier: float, sample_rate: Rate, steps: int) -> None:
    """Count ``steps`` equal steps, one by one where the accountant's own ``step`` takes no number of steps."""
    if isinstance(sample_rate, tuple):
        accountant.count_epochs(noise_multiplier=noise_multiplier, bins=sample_rate[1], epochs=steps)
        return
    given: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
    # Of one step, as nearly always, the signature need not be looked at, which takes as long as a small layer.
    if steps > 1 and "steps" in inspect.signature(accountant.step).parameters:
        accountant.step(**given, steps=steps)
        return
    for _ in range(steps):
        accountant.step(**given)
