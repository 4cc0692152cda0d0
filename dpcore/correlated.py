"""Noise that is correlated over steps (DP-FTRL, the matrix mechanism): what a step adds, later steps partly take back.

Step t gets z_t + w_1 z_(t-1) + ... + w_(p-1) z_(t-p+1), with independent z and weights w <= 0: the noise C⁻¹z of a
lower triangular Toeplitz matrix C⁻¹, whose first column is (1, w_1, ...). Or C has the bands (1, c_1, ..., c_(p-1)),
and step t gets y_t = z_t - c_1 y_(t-1) - ... - c_(p-1) y_(t-p+1). Noise has addresses here (:mod:`dpcore.noise`) and
does not depend on the data, so that it is made for some steps at once, in a cache, where z of a few earlier ones is
drawn again. Only noise is kept, never a gradient; of several ranks each keeps that of its share of the addresses.

What it costs. A run is one Gaussian mechanism for C x, x the clipped sums of all its steps, also where they depend on
what was released before (Denisov et al. 2022, arXiv:2202.08312, Theorem 2.1). Batches are those of a fixed cycle: every
round has the same b batches in the same order, so that an example is in batches of the numbers s, s + b, s + 2b, ...
and no others. The entries of C are not negative, so the sum moves most where all its gradients point the same way
(Choquette-Choo et al. 2023, arXiv:2211.06530, Corollary 2.1), and most of all for s = 0: by v_t at step t, with
v = C (1, 0, ..., 0, 1, 0, ...), ones at the multiples of b. Round r costs as much as one Gaussian step of all examples
whose noise is smaller by the root of S_r, the sum of v_t^2 over its steps. Batches of which nothing was released cost
no more, for whichever s: what an example would have added there is free, so let it be what makes the move d of C x zero
there; then d_t <= v_(t-s) elsewhere by induction, for d_t = x_t - w_1 d_(t-1) - ... and no -w is negative, and
v_(t+b) >= v_t lets a round, shifted by s, cost no more than itself. Ranks have disjoint parts of one process's batches,
whose sums add up to that process's: an example moves x as it does there.

Where C is banded, a round must have p batches or more. Then no two gradients of an example meet in a row of C x, which
moves by the root of the sum of their squares times ‖c‖ (Choquette-Choo et al. 2023, arXiv:2306.08153): S_r is ‖c‖². And
batches of which nothing was released cost nothing: let what is added there be zero.

Weights: Kalinin, Upadhyay and Lampert 2025 (arXiv:2505.12128) for :meth:`CorrelatedNoise.square_root`, Kalinin and
Lampert 2024 (arXiv:2405.13763) for :meth:`CorrelatedNoise.banded`, which finds its own where it is told the steps
(:mod:`dpcore.bands`).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpcore import native
from dpcore.arguments import check_number
from dpcore.bands import least_noise
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.loading.epoch_sampler import CYCLE
from dpcore.loading.ledger import Batch, name_of
from dpcore.noise import GaussianNoise, check_not_captured

MOST_BANDS, MOST_STEPS = 1000, 10**6
_PIECE = {"cpu": 2**15, "cuda": 2**22}


@dataclass(frozen=True)
class CorrelatedNoise:
    """A mechanism for ``make_private(mechanism=...)``.

    Args:
        weights: 1, and by how much of the noise of the step before, of the one before that and so on a step's noise is
            less: none is positive, and they add up to 0 or more.
        is_banded: Whether the weights are the bands of C in place of its inverse: each is less than the one before and
            above 0, and a round has as many batches at least.
        recipe: The call that has optimised the weights, if one has. On another machine it may find others by a digit: a
            run goes on with the weights of its checkpoint where the call was the same.

    Raises:
        ValueError: they are no such numbers.
    """

    weights: tuple[float, ...]
    is_banded: bool = False
    recipe: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            weights = tuple(float(weight) for weight in self.weights)
        except (TypeError, ValueError):
            weights = ()
        if self.is_banded:
            # So that all roots of the recursion lie inside the unit circle (Eneström and Kakeya), and no noise grows.
            if weights[:1] != (1.0,) or not all(a > b > 0.0 for a, b in itertools.pairwise(weights)):
                raise ValueError(
                    f"The weights are {self.weights}; of a banded matrix the first one must be 1 and each of the "
                    "others less than the one before and above 0. CorrelatedNoise.banded(8) makes such weights."
                )
        elif not weights or weights[0] != 1.0 or not all(-1.0 <= w <= 0.0 for w in weights[1:]) or sum(weights) < 0.0:
            raise ValueError(
                f"The weights are {self.weights}; the first one must be 1, the others must lie in [-1, 0], and their "
                "sum must not be below 0. CorrelatedNoise.previous(0.9) and .square_root(4) make such weights."
            )
        object.__setattr__(self, "weights", weights)

    @classmethod
    def previous(cls, share: float) -> CorrelatedNoise:
        """Take back a share of the noise of the step before.

        Args:
            share: In [0, 1); 0 is independent noise.

        Raises:
            ValueError: it is not.
        """
        rule = "it is the share of the last step's noise that is taken back, so it must lie in [0, 1)"
        return cls((1.0, -check_number("share", share, lambda s: 0.0 <= s < 1.0, rule)))

    @classmethod
    def square_root(cls, bands: int) -> CorrelatedNoise:
        """Return the first ``bands`` weights of the inverse square root of the prefix sums, (1 - x)^(1/2).

        Args:
            bands: Of how many steps each noise is made, 1 to 1000.

        Raises:
            ValueError: it is no such number.
        """
        rule = f"it must be a whole number from 1 to {MOST_BANDS}: a step draws the noise of so many"
        count = int(check_number("bands", bands, lambda p: 1 <= p <= MOST_BANDS and p % 1 == 0, rule))
        return cls(_series(0.5, count))

    @classmethod
    def banded(cls, bands: int, steps: int | None = None, momentum: float = 0.0) -> CorrelatedNoise:
        """Return a banded matrix: that of least noise for a run of ``steps``, which is optimised in milliseconds.

        Least is the mean variance, over all steps, of the noise in the weights of SGD with a constant learning rate, at
        equal epsilon. Without ``steps`` the bands are the first weights of the square root of the prefix sums,
        (1 - x)^(-1/2), which have more noise. Epsilon is that of the bands, also where another run has them.

        Args:
            bands: 1 to 1000, and no more than a round has batches. The noise of so many steps is kept, less one.
            steps: Of the whole run, epochs * len(data_loader).
            momentum: That of SGD, in [0, 1).

        Raises:
            ValueError: one is no such number.
        """
        rule = f"it must be a whole number from 1 to {MOST_BANDS}: the noise of so many steps is kept, less one"
        count = int(check_number("bands", bands, lambda p: 1 <= p <= MOST_BANDS and p % 1 == 0, rule))
        rule = "it is that of SGD, for whose bands steps= is needed, too, and must lie in [0, 1)"
        beta = check_number("momentum", momentum, lambda m: 0.0 <= m < 1.0 and (m == 0.0 or steps is not None), rule)
        formula = _series(-0.5, count)
        if steps is None:
            return cls(formula, is_banded=True)
        rule = f"it must be a whole number, that of the run's steps, from bands, {count}, to {MOST_STEPS:,}"
        run = int(check_number("steps", steps, lambda n: count <= n <= MOST_STEPS and n % 1 == 0, rule))
        recipe = f"CorrelatedNoise.banded({count}, steps={run}, momentum={beta})"
        return cls(least_noise(formula, run, beta), is_banded=True, recipe=recipe)

    @property
    def taken_back(self) -> tuple[float, ...]:
        """Factors of what the last steps have drawn, the latest first, or, if banded, of the noise that they had."""
        return tuple(-weight if self.is_banded else weight for weight in self.weights[1:])

    def responses(self, cycle: int, steps: int) -> list[float]:
        """Return v, how far the sums of the steps move in C x for an example of the batches 0, b, 2b and so on.

        Args:
            cycle: b, the batches of a round.
            steps: How many steps.
        """
        if self.is_banded:
            return [math.fsum(self.weights[t % cycle : t + 1 : cycle]) for t in range(steps)]
        moved: list[float] = []
        for t in range(steps):
            back = sum(-w * moved[t - j] for j, w in enumerate(self.weights[1 : t + 1], 1))
            moved.append((t % cycle == 0) + back)
        return moved

    def costs(self, cycle: int, rounds: int) -> list[float]:
        """Return S_r of each round: the square of its noise over that of the one Gaussian step which costs as much.

        Args:
            cycle: The batches of a round.
            rounds: How many rounds.

        Raises:
            UnsupportedError: the matrix has more bands than a round has batches.
        """
        if self.is_banded and cycle < len(self.weights):
            raise UnsupportedError(
                f"The mechanism has {len(self.weights)} bands, and a round {cycle} batches: what banded noise costs is "
                "known where a round has as many batches at least. Take fewer bands, or smaller batches."
            )
        moved = self.responses(cycle, cycle * rounds)
        # Upwards, as far as the sums of many numbers may be rounded.
        return [math.fsum(v * v for v in moved[r * cycle : (r + 1) * cycle]) * (1 + 1e-12) for r in range(rounds)]


def _series(power: float, count: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^power."""
    return tuple(itertools.accumulate(range(1, count), lambda last, k: last * (k - 1 - power) / k, initial=1.0))


@dataclass
class Correlation:
    """The correlated noise of one run: which number its steps have, and what its rounds cost.

    A step has the number of its batch among all that were drawn, so that a batch of which nothing was released leaves a
    gap and moves no other one.
    """

    mechanism: CorrelatedNoise
    cycle: int
    last: int = -1
    """The number of the last release."""
    step: int = -1
    """That of the step at hand."""
    batches: str | None = None
    """The name of the cycle, by all that decides its batches."""
    counted: int = -1
    """The last round that was counted."""
    _stream: bytes | None = None
    _ahead: dict[int, tuple[int, Tensor]] = field(default_factory=dict, repr=False)
    """By address: noise over its deviation that was made at once, a row for each step from the number before it on."""
    _costs: list[float] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # Noise of steps to come is as secret as its seed, which a file or a copy does not get either.
        return {**self.__dict__, "_ahead": {}}

    def check(self, optimizer: Any) -> None:
        """Look at the step at hand before anything of it is released, and number it; on all ranks, which call this.

        Raises:
            PrivacyError: on some rank it is not certain that its batch is the next one of the cycle, or noise or bound
                were changed; or the ranks are at different steps, or have made others.
        """
        run, used, ranks = optimizer.run, optimizer.run.ledger.used, optimizer.ranks
        refused = self._refusal(optimizer)
        if ranks is not None:
            ranks.raise_together(refused)
        elif refused is not None:
            raise refused
        batches = run.loader.sampler_state.name_at(0)
        if ranks is not None:
            made = self.mechanism.weights, self.mechanism.is_banded, self.cycle, self.last, self.counted, self._stream
            ranks.agree({"the steps of correlated noise": (*made, optimizer.noise.rank, used[0].draw, batches)})
        self.step, self.batches = used[0].draw, batches

    def _refusal(self, optimizer: Any) -> PrivacyError | None:
        """Return why this process refuses the step at hand, if it does."""
        run, used = optimizer.run, optimizer.run.ledger.used
        if not self._is_next(used, run.loader):
            return PrivacyError(
                "Correlated noise needs one batch of the private loader for every step, in their order, and the batch "
                "of this step is another one, or it is not known which, after one that was fetched and not used, say: "
                "nothing was released. Loop over the loader itself, with one optimizer.step() for each batch, by one "
                "optimizer for each loader; go on by engine.load_checkpoint, or make the model private anew."
            )
        sampler = run.loader.sampler_state
        if self.batches not in (None, sampler.name_at(0)) or used[0].epoch != sampler.name_at(used[0].draw):
            return PrivacyError(
                "Every round must have the same batches where noise is correlated, and the loader's are others since a "
                "step was made: its seed, its data set's length or its batch size was changed. Nothing was released. "
                "Go on by engine.load_checkpoint, or make the model private anew."
            )
        now = {name: getattr(optimizer, name) for name in ("noise_multiplier", "max_grad_norm")}
        if changed := [name for name, value in now.items() if value != run.setting[name]]:
            return PrivacyError(
                f"{changed[0]} is {now[changed[0]]} and was {run.setting[changed[0]]} at first: what correlated noise "
                "costs is known where noise and bound stay as they are. Take away the schedule, or mechanism=."
            )
        return None

    def _is_next(self, used: Sequence[Batch], loader: Any) -> bool:
        if len(used) != 1 or used[0].draw is None:
            return False
        return used[0].loader == name_of(loader) and used[0].draw > self.last

    def release(self, noise: GaussianNoise) -> int:
        """Return the number of the step at hand, which gets noise of this source.

        Raises:
            PrivacyError: earlier noise was of another stream, or cannot be drawn again.
        """
        stream = noise.name(0) if noise.has_addresses else None
        if stream is None or (self.last >= 0 and stream != self._stream):
            raise PrivacyError(
                "Correlated noise takes back what earlier steps have added, and the noise of this optimizer is not "
                "theirs any more: it was copied, given another source of noise, or resumed without its checkpoint. "
                "Nothing was released. Go on by engine.load_checkpoint, or make the model private anew."
            )
        self._stream, self.last = stream, self.step
        return self.step

    def noise_of(self, noise: GaussianNoise, step: int, start: int, like: Tensor) -> Tensor:
        """Return the noise of a step over its deviation: [n], for the numbers from the address ``start`` on.

        The same bits whatever was made before: where nothing is left of it, all is made again.
        """
        check_not_captured()
        factors, is_banded = self.mechanism.taken_back, self.mechanism.is_banded
        first, rows = self._ahead.pop(start, (0, None))
        kind = like.numel(), like.dtype, like.device
        if rows is not None and (step < first or (rows.shape[1], rows.dtype, rows.device) != kind):
            rows = None
        if rows is None or step >= first + len(rows):
            goes_on = is_banded and rows is not None
            begin = first + len(rows) if goes_on and rows is not None else 0 if is_banded else step - len(factors)
            if rows is None:
                rows = like.new_empty((len(factors) if is_banded else _rows_for(like, len(factors)), like.numel()))
            _fill(rows, noise, range(max(0, begin), step + len(rows)), start, factors, is_banded, goes_on)
            first = step
        self._ahead[start] = first, rows
        return rows[step - first]

    def cost(self, step: int) -> float:
        """Return what the step adds: what all rounds cost, up to its own, that were not counted before.

        Of rounds between them something may have been released whose count was interrupted.
        """
        round_ = step // self.cycle
        if round_ >= len(self._costs):
            self._costs = self.mechanism.costs(self.cycle, 2 * round_ + 1)
        return math.fsum(self._costs[self.counted + 1 : round_ + 1])

    def count(self) -> None:
        """Note that the step at hand was counted, and with it its round."""
        self.counted = max(self.counted, self.step // self.cycle)

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on has to know, optimised weights among it."""
        own = {"weights": list(self.mechanism.weights)} if self.mechanism.recipe else {}
        return {"last": self.last, "batches": self.batches, **own}

    def go_on(self, state: Mapping[str, Any], noise: GaussianNoise) -> None:
        """Go on behind the steps of a state, of a run whose noise is ``noise``, with that run's weights."""
        if self.mechanism.recipe:
            self.mechanism = replace(self.mechanism, weights=tuple(state["weights"]))
            self._costs = self.mechanism.costs(self.cycle, 1)
        self.last, self.batches = state["last"], state["batches"]
        self.counted, self._stream = self.last // self.cycle, noise.name(0)
        self._ahead.clear()


def _rows_for(like: Tensor, back: int) -> int:
    """Return for how many steps to make noise at once, ``back`` of which are drawn again: a quarter of free memory.

    At most twice as many as are drawn again: more save few draws, and wait longer for memory. Processes that may be on
    one machine share its memory.
    """
    most, bytes_ = 2 * back, max(1, like.numel() * like.element_size())
    if like.is_cuda:
        free = torch.cuda.mem_get_info(like.device)[0]
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        sharers = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharers
    else:
        free = 4 * most * bytes_
    return max(1, min(most, free // 4 // bytes_))


def _fill(
    rows: Tensor,
    noise: GaussianNoise,
    steps: range,
    start: int,
    factors: Sequence[float],
    is_banded: bool,
    goes_on: bool,
) -> None:
    """Set the rows to the noise of the last ``steps``; before them there is none, or it ``goes_on`` behind the rows."""
    if native.serves(rows):
        names = b"".join(map(noise.name, steps))
        return native.fill_mixed(rows, names, factors, start, is_banded, goes_on)
    piece = _PIECE.get(rows.device.type, _PIECE["cpu"])
    for at in range(0, rows.shape[1], piece):
        part = rows[:, at : at + piece]
        past = list(part[-len(factors) :].clone()) if goes_on else []
        for step in steps:
            fresh = noise.fill_(torch.empty_like(part[0]), 1.0, step, start + at)
            mixed = fresh.clone()
            for factor, before in zip(factors, reversed(past), strict=False):
                mixed.add_(before, alpha=factor)
            past = [*past, mixed if is_banded else fresh][-len(factors) :]
            if step >= steps.stop - len(rows):
                part[step - steps.stop].copy_(mixed)
    return None


def correlate(optimizer: Any, mechanism: CorrelatedNoise | None, cycle: int) -> None:
    """Let the steps of ``optimizer`` have correlated noise, over a round of so many batches."""
    if mechanism is not None:
        mechanism.costs(cycle, 1)  # or an error
        ranks, loader = optimizer.ranks, optimizer.run.loader
        if ranks is not None and ranks.deals and not loader.is_dealt:
            raise UnsupportedError(
                "The loader's batches are not those of one process that are dealt out to the ranks: it was copied, "
                "say. Give make_private an ordinary loader over the whole data set, on all ranks."
            )
        optimizer.run.setting["mechanism"] = mechanism.recipe or repr(mechanism)
        optimizer.run.correlation = Correlation(mechanism, cycle)
        optimizer.attach_step_guard(optimizer.run.correlation.check)


def check_correlated(settings: Mapping[str, Any], secure: bool) -> None:
    """Refuse what correlated noise does not go with, before anything is done.

    Raises:
        TypeError: the mechanism is none.
        UnsupportedError: it does not go with another setting.
    """
    mechanism = settings["mechanism"]
    if mechanism is None:
        return
    if not isinstance(mechanism, CorrelatedNoise):
        raise TypeError(
            f"mechanism is {mechanism!r}; it must be a dpcore.CorrelatedNoise, CorrelatedNoise.previous(0.9) for "
            "instance, or None for independent noise."
        )
    against = {
        "secure_mode, whose noise cannot be drawn again": secure,
        f"clipping={settings['clipping']!r}": settings["clipping"] not in ("flat", "automatic"),
        f"grad_sample_mode={settings['grad_sample_mode']!r}": settings["grad_sample_mode"] in ("ghost", "no_op"),
        "check_batches=False": not settings["check_batches"],
        "poisson_sampling=False": not settings["poisson_sampling"],
        f"sampling={settings['sampling']!r}": settings["sampling"] not in (None, CYCLE),
        "max_batch_size": settings["max_batch_size"] is not None,
    }
    if found := [what for what, is_there in against.items() if is_there]:
        raise UnsupportedError(
            f"Correlated noise does not go with {found[0]}: its epsilon is that of a run which uses every batch of a "
            "fixed cycle in its order. Leave one of the two out."
        )
