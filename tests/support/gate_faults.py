"""The faults that honest authors make and earlier gates admitted, in numpy, each with the check that names it now.

``python -m tests.support.gate_faults`` prints them beside their checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from harness.contract import Setting
from harness.tasks import Task
from harness.worker.gate.driver import EPOCH_STEPS
from tests.support.gate_numpy import Exact, Values, gradients, norm, total

PIECE = 64
SHIFTS = "noise: independent at all shifts"
STEPS = "noise: independent steps"
SPREAD = "noise: standard deviation sigma C / B"
LARGE_NOISE = "noise: on a large batch"
REAL_NOISE = "noise: on real batches"
FINE = "noise: fine enough"
AGAIN = "noise: no step comes again"
LATE = "update: many steps"
LARGE = "update: large batch"
PLACES = "update: some clipped"
SIZES = "update: sizes"
ALIKE = "noise: no coordinates alike"


class Counting(Exact):
    """Knows how many steps it has made since the last build."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.count = 0

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.count += 1
        super().step(indices, mask)


class NoiseClamped(Exact):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.clip(super().normal(shape), -3.3, 3.3)


class NoiseSevenPerMilleSmall(Exact):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return 0.993 * super().normal(shape)


class NoiseCycle(Counting):
    period = 65

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.rng = np.random.default_rng([self.setting.seed, self.count % self.period])
        super().step(indices, mask)


class NoiseCycleOfEight(NoiseCycle):
    period = 8


class NoiseFromTable(Exact):
    """A table drawn once, a random place in it for every step."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.table = self.rng.standard_normal(2**20)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.at = int(self.rng.integers(len(self.table) - sum(w.size for w in self.weights.values())))
        super().step(indices, mask)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        start, self.at = self.at, self.at + int(np.prod(shape))
        return self.table[start : self.at].reshape(shape)


class WholeVector(Exact):
    """Makes the noise of a step as one vector, by :meth:`vector`."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        size = sum(w.size for w in self.weights.values())
        self.flat, self.at = self.vector(size), 0
        super().step(indices, mask)

    def vector(self, size: int) -> np.ndarray:
        return self.rng.standard_normal(size)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        start, self.at = self.at, self.at + int(np.prod(shape))
        return self.flat[start : self.at].reshape(shape)


class NoiseMirrored(WholeVector):
    def vector(self, size: int) -> np.ndarray:
        half = self.rng.standard_normal(-(-size // 2))
        return np.concatenate([half, -half[: size // 2][::-1]])


class NoiseShiftedByOne(WholeVector):
    """All tensors read one stream, each from one value later."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        start, self.at = self.at, self.at + 1
        return self.flat[start : start + int(np.prod(shape))].reshape(shape)

    def vector(self, size: int) -> np.ndarray:
        return super().vector(size + len(self.weights))


class SeedModuloThree(Exact):
    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.rng = np.random.default_rng(setting.seed % 3)


class SeedOfSixteenBits(Exact):
    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.rng = np.random.default_rng(setting.seed & 0xFFFF)


class InPieces(Exact):
    """Takes a batch in pieces; :meth:`noises` says how often a step adds noise."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        rows = indices if mask is None else indices[mask]
        self.pieces = max(1, -(-len(rows) // PIECE))
        super().step(indices, mask)

    def noises(self) -> int:
        return 1

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return sum((super(InPieces, self).normal(shape) for _ in range(self.noises())), np.zeros(shape))


class NoisePerPiece(InPieces):
    def noises(self) -> int:
        return self.pieces


class NoNoiseInPieces(InPieces):
    def noises(self) -> int:
        return int(self.pieces == 1)


class NoiseHalves(Counting):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return 0.5 ** ((self.count - 1) // 16) * super().normal(shape)


class OneCoordinateWithoutNoise(Exact):
    """The first value of every matrix has none."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        drawn = super().normal(shape)
        if len(shape) > 1:
            drawn.flat[0] = 0.0
        return drawn


class NoiseKept(Exact):
    """Three tenths of a step's noise are in the next one's, and the deviation is right."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.last: list[np.ndarray] = []

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.drawn: list[np.ndarray] = []
        super().step(indices, mask)
        self.last = self.drawn

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        fresh = super().normal(shape)
        self.drawn.append(fresh)
        if not self.last:
            return fresh
        return (fresh + 0.3 * self.last[len(self.drawn) - 1]) / np.sqrt(1.09)


class NoiseServesTwo(WholeVector):
    """Every value serves two coordinates, at random places."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        size = sum(w.size for w in self.weights.values())
        self.owner = np.random.default_rng(7).permutation(size) // 2

    def vector(self, size: int) -> np.ndarray:
        return super().vector(size)[self.owner]


class DropsAShortPiece(Exact):
    """Takes whole pieces of 64 rows only, once there is one."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        rows = indices if mask is None else indices[mask]
        super().step(rows[: len(rows) // PIECE * PIECE] if len(rows) > PIECE else rows, None)


class RateHalves(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        before = dict(self.weights)
        super().step(indices, mask)
        if self.count > 9:
            self.weights = {n: ((before[n] + w) / 2).astype(np.float32) for n, w in self.weights.items()}


class FrozenLater(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        last = list(self.weights)[-1]
        before = self.weights[last]
        super().step(indices, mask)
        if self.count > 9:
            self.weights[last] = before


class MomentumLater(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        before = dict(self.weights)
        super().step(indices, mask)
        if self.count > 10:
            self.weights = {n: (w + 0.5 * self.moved[n]).astype(np.float32) for n, w in self.weights.items()}
        self.moved = {n: w - before[n] for n, w in self.weights.items()}


class SkipsSteps(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if self.count % 10 == 9:
            self.count += 1
        else:
            super().step(indices, mask)


class CutsAt400(Exact):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices[:400], None if mask is None else mask[:400])


class HalfPrecisionAbove384(Exact):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices) > 384:
            exact = self.weights
            self.weights = {n: w.astype(np.float16) for n, w in exact.items()}
            sums = total(self.task, self.weights, self.x[indices], self.y[indices], self.setting.max_grad_norm)
            rate = self.setting.learning_rate / self.setting.batch_size
            self.weights = {n: (exact[n] - rate * sums[n]).astype(np.float32) for n in exact}
        else:
            super().step(indices, mask)


class ShortRowNumbers(Exact):
    """Row numbers in a type that ends at 16,383."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices & 0x3FFF, mask)


class PlacesAThousand(Exact):
    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        super().place(x[:1000], y[:1000])

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices % 1000, mask)


class WrongFarDown(Exact):
    """Right for the first 512 rows of the data only."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(np.minimum(indices, 511), mask)


class ForgetsTheLastRow(Exact):
    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        super().place(np.append(x[:-1], x[:1], 0), np.append(y[:-1], y[:1], 0))


class ForgetsRowZero(Exact):
    """Takes row 0 for padding, which points to it."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices[indices > 0], None)


class BiasLikeAColumn(Exact):
    """A bias gets the noise of one column of its layer's weights."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return self.matrix[:, 3]
        self.matrix = super().normal(shape)
        return self.matrix


class NoiseFollowsTheBatch(Exact):
    """Noise times :meth:`factor` of the batch."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        rows = indices if mask is None else indices[mask]
        self.times = self.factor(rows) if len(rows) else 1.0
        super().step(indices, mask)

    def clipped_norms(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(norms before, after) clipping, over C."""
        each = zip(self.x[rows], self.y[rows], strict=True)
        norms = np.array([norm(gradients(self.task, self.weights, x, int(y))) for x, y in each])
        norms /= self.setting.max_grad_norm
        return norms, np.minimum(norms, 1.0)

    def factor(self, rows: np.ndarray) -> float:
        raise NotImplementedError

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.times * super().normal(shape)


class NoiseByTheLargestNorm(NoiseFollowsTheBatch):
    def factor(self, rows: np.ndarray) -> float:
        return float(self.clipped_norms(rows)[1].max()) or 1.0


class NoiseByTheMeanFactor(NoiseFollowsTheBatch):
    def factor(self, rows: np.ndarray) -> float:
        before, after = self.clipped_norms(rows)
        return float((after / np.maximum(before, 1e-30)).mean()) if before.any() else 1.0


class NoiseOverTheLargerCount(NoiseFollowsTheBatch):
    def factor(self, rows: np.ndarray) -> float:
        return self.setting.batch_size / max(len(rows), self.setting.batch_size)


class NoNoiseAtTheEndOfAnEpoch(Counting):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        drawn = super().normal(shape)
        epoch = -(-self.setting.dataset_size // self.setting.batch_size)
        return np.zeros(shape) if self.count % epoch == 0 else drawn


class StaleEvery64th(Counting):
    """Every 64th gradient is of the weights one step before."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.before = self.weights

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        now, late = self.weights, self.before
        self.before = dict(now)
        if self.count % 64 == 63:
            self.weights = dict(late)
            super().step(indices, mask)
            self.weights = {n: (now[n] + (self.weights[n] - late[n])).astype(np.float32) for n in now}
        else:
            super().step(indices, mask)


class DropsTheLastOf32(Exact):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        rows = indices if mask is None else indices[mask]
        super().step(rows[:31] if len(rows) == 32 else rows, None)


class CountsThreePaddings(Exact):
    """Takes the padding for examples where there are three rows of it."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        assert mask is not None
        super().step(indices, None if (~mask).sum() == 3 else mask)


class NoiseInHalfPrecision(Exact):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return super().normal(shape).astype(np.float16).astype(np.float64)


class NoiseFromQuantiles(Exact):
    """The normal quantiles of 16 random bits."""

    table = np.array([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)])

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.table[self.rng.integers(2**16, size=shape)]


class NoiseFromShortUniforms(Exact):
    """Box and Muller's noise from uniforms of 16 bits: none beyond 4.71."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        one, other = self.rng.integers(1, 2**16 + 1, size=(2, *shape)) / 2**16
        return np.sqrt(-2 * np.log(one)) * np.cos(2 * math.pi * other)


class BiasTenPerCentSmall(Exact):
    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return (0.9 if len(shape) == 1 else 1.0) * super().normal(shape)


class NoiseRepeatsEveryEpoch(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        epoch = -(-self.setting.dataset_size // self.setting.batch_size)
        self.rng = np.random.default_rng([self.setting.seed, self.count % epoch])
        super().step(indices, mask)


class LastBatchOfAnEpochLeftOut(Counting):
    """Its noise is added, its gradient is not."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        epoch = -(-self.setting.dataset_size // self.setting.batch_size)
        is_last = self.count % epoch == epoch - 1
        rows = indices if mask is None else indices[mask]
        super().step(rows[:0] if is_last else rows, None)


class BiasKeepsItsNoise(Counting):
    """The noise of a bias is drawn anew in every second step only."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.kept: dict[tuple[int, ...], np.ndarray] = {}

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        drawn = super().normal(shape)
        if len(shape) == 1 and self.count % 2 == 0 and shape in self.kept:
            return self.kept[shape]
        self.kept[shape] = drawn
        return drawn


class NoiseByTheClippedShare(NoiseFollowsTheBatch):
    """Less noise the fewer examples were clipped."""

    def factor(self, rows: np.ndarray) -> float:
        return 0.8 + 0.2 * float((self.clipped_norms(rows)[0] > 1).mean())


class BiasLikeTheMeanOfColumns(BiasLikeAColumn):
    """A bias gets the sum of four columns' noise, halved: the right deviation, and nothing of its own."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return self.matrix[:, :4].sum(1) / 2
        return super().normal(shape)


class NoiseFromTheStartAgain(Counting):
    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if self.count == 100:
            self.rng = np.random.default_rng(self.setting.seed)
        super().step(indices, mask)


class SeedPlusTensor(Exact):
    """Every tensor has a stream of its own, whose seed is the next one's of the tensor before."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.streams = {w.shape: np.random.default_rng(setting.seed + i) for i, w in enumerate(initial.values())}

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.streams[shape].standard_normal(shape)


class Correlated(WholeVector):
    """Right: of every step's noise later ones take back a half, an eighth and a sixteenth (DP-FTRL)."""

    stated: tuple[float, ...] = (1.0, -0.5, -0.125, -0.0625)
    used: tuple[float, ...] = stated

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.ring: list[np.ndarray] = []
        self.made = 0

    def vector(self, size: int) -> np.ndarray:
        self.made += 1
        self.ring = [self.fresh(size), *self.ring][: len(self.used)]
        return sum((w * z for w, z in zip(self.used, self.ring, strict=False)), np.zeros(size))

    def fresh(self, size: int) -> np.ndarray:
        return super().vector(size)

    def noise_factor(self, steps: int) -> np.ndarray | None:
        column = np.zeros(steps)
        for t in range(steps):
            back = sum(-w * column[t - j] for j, w in enumerate(self.stated[1 : t + 1], 1))
            column[t] = (t == 0) + back
        return column


class FactorForItsInverse(Correlated):
    """The strategy's own coefficients, where those of its inverse belong."""

    used = (1.0, 0.5, 0.375, 0.3125)


class RingBackwards(Correlated):
    """The oldest noise is taken back most."""

    used = (1.0, -0.0625, -0.125, -0.5)


class RingTooShort(Correlated):
    used = Correlated.stated[:3]


class RingTooLong(Correlated):
    used = (*Correlated.stated, -0.0390625)


class RingLost(Correlated):
    """Every epoch begins without the noise of the steps before."""

    def fresh(self, size: int) -> np.ndarray:
        if self.made % EPOCH_STEPS == 1:
            self.ring = []
        return super().fresh(size)


class MultiplierLost(Correlated):
    """A run that goes on after 20 steps has 0.9 of its noise."""

    def vector(self, size: int) -> np.ndarray:
        drawn = super().vector(size)
        return 0.9 * drawn if self.made > 20 else drawn


class RingForgottenOnGradients(Correlated):
    """Steps with a gradient add fresh noise alone."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        rows = indices if mask is None else indices[mask]
        sums = total(self.task, self.weights, self.x[rows], self.y[rows], self.setting.max_grad_norm)
        if max(np.abs(value).max() for value in sums.values()) > 1e-3:
            self.ring = []
        super().step(indices, mask)


class KeysCollide(Correlated):
    """The i-th tensor's key in a step is that of the tensor before in the next one."""

    def fresh(self, size: int) -> np.ndarray:
        streams = [np.random.default_rng([self.setting.seed, self.made + i]) for i in range(len(self.weights))]
        return np.concatenate([s.standard_normal(w.size) for s, w in zip(streams, self.weights.values(), strict=True)])


class SaysNothing(Correlated):
    """Its noise is correlated, and it does not say so."""

    def noise_factor(self, steps: int) -> np.ndarray | None:
        return None


class OnlySaysSo(Correlated):
    """Its noise is independent, and it says that it is correlated."""

    used = (1.0,)


class Unlooked(Counting):
    """Knows how many steps were made since somebody waited for them."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.synchronize()

    def synchronize(self) -> None:
        self.known, self.count = self.weights, 0


class NoiseOfFewSteps(Unlooked):
    """From the tenth step on that nobody looks at, there is none."""

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return super().normal(shape) * (self.count <= 9)


class StaleInAStretch(Unlooked):
    """From the tenth step on that nobody looks at, gradients are of the weights before them all."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        now = self.weights
        if self.count >= 9:
            self.weights = self.known
        before = self.weights
        super().step(indices, mask)
        self.weights = {name: now[name] + (w - before[name]) for name, w in self.weights.items()}


@dataclass(frozen=True)
class Fault:
    """Holds ``check``, which rejects the mutant. ``static``: in an adapter whose batches are padded."""

    what: str
    mutant: type[Exact]
    check: str
    task: str = "logreg"
    static: bool = False


FAULTS = (
    Fault("noise clamped at 3.3 sigma", NoiseClamped, "noise: tails"),
    Fault("noise of 0.993 sigma", NoiseSevenPerMilleSmall, SPREAD, "ffnn"),
    Fault("noise of 65 steps, repeated in a cycle", NoiseCycle, STEPS),
    Fault("noise of 8 steps, repeated in a cycle", NoiseCycleOfEight, STEPS),
    Fault("noise from a table of 2^20 values at random places", NoiseFromTable, SHIFTS, "ffnn"),
    Fault("second half of the noise: the first reversed, negated", NoiseMirrored, SHIFTS),
    Fault("all tensors read one stream, shifted by one value each", NoiseShiftedByOne, SHIFTS, "ffnn"),
    Fault("noise depends on the seed modulo 3", SeedModuloThree, "noise: fresh per seed"),
    Fault("noise depends on 16 bits of the seed", SeedOfSixteenBits, "noise: fresh per seed"),
    Fault("noise once per piece of 64 rows", NoisePerPiece, LARGE_NOISE),
    Fault("no noise for a batch of more than one piece", NoNoiseInPieces, LARGE_NOISE),
    Fault("noise halves every 16 steps", NoiseHalves, SPREAD),
    Fault("one coordinate of each matrix without noise", OneCoordinateWithoutNoise, SPREAD, "ffnn"),
    Fault("three tenths of a step's noise in the next one's", NoiseKept, STEPS),
    Fault(
        "each value of the noise serves two random coordinates",
        NoiseServesTwo,
        STEPS,
        "ffnn",
    ),
    Fault("a short last piece is left out, pieces of 64 rows", DropsAShortPiece, LARGE),
    Fault("learning rate halves after 9 steps", RateHalves, LATE),
    Fault("last bias frozen after 9 steps", FrozenLater, LATE),
    Fault("momentum 0.5 after 10 steps", MomentumLater, LATE),
    Fault("every tenth step skipped", SkipsSteps, LATE),
    Fault("batches cut at 400 rows", CutsAt400, LARGE),
    Fault("half-precision gradients above 384 rows", HalfPrecisionAbove384, LARGE),
    Fault("row numbers in a type that is too short", ShortRowNumbers, PLACES),
    Fault("1,000 rows placed, row numbers modulo 1,000", PlacesAThousand, PLACES),
    Fault("wrong beyond row 511", WrongFarDown, PLACES),
    Fault("last row of the data forgotten", ForgetsTheLastRow, PLACES),
    Fault("row 0 taken for padding", ForgetsRowZero, PLACES),
    Fault("a bias gets the noise of one column of its weights", BiasLikeAColumn, ALIKE),
    Fault("the same, in a larger network", BiasLikeAColumn, ALIKE, "ffnn"),
    Fault("noise times the largest clipped norm of the batch", NoiseByTheLargestNorm, REAL_NOISE),
    Fault("noise divided by the larger of n and B", NoiseOverTheLargerCount, REAL_NOISE),
    Fault("noise times the mean clip factor", NoiseByTheMeanFactor, REAL_NOISE),
    Fault("noise of a bias is 10 % too small", BiasTenPerCentSmall, SPREAD),
    Fault("the last step of each epoch has no noise", NoNoiseAtTheEndOfAnEpoch, SPREAD),
    Fault("every 64th gradient is of the weights before", StaleEvery64th, LATE),
    Fault("steps beyond nine that nobody looks at have no noise", NoiseOfFewSteps, SPREAD),
    Fault("steps beyond nine that nobody looks at have the gradients of old weights", StaleInAStretch, LATE),
    Fault("the last row of 32 is dropped", DropsTheLastOf32, SIZES),
    Fault("three rows of padding are taken for examples", CountsThreePaddings, SIZES, static=True),
    Fault("noise drawn in float16", NoiseInHalfPrecision, FINE),
    Fault("normal quantiles of 16 random bits", NoiseFromQuantiles, FINE),
    Fault("noise repeats itself every epoch", NoiseRepeatsEveryEpoch, STEPS),
    Fault("the last batch of each epoch has no gradient", LastBatchOfAnEpochLeftOut, LATE),
    Fault("the noise of a bias stays for two steps", BiasKeepsItsNoise, STEPS),
    Fault("less noise the fewer examples are clipped", NoiseByTheClippedShare, REAL_NOISE),
    Fault("a bias gets the noise of four columns, halved", BiasLikeTheMeanOfColumns, ALIKE),
    Fault("noise from uniforms of 16 bits, none beyond 4.71", NoiseFromShortUniforms, "noise: tails", "ffnn"),
    Fault("the generator starts again at step 100", NoiseFromTheStartAgain, AGAIN),
    Fault("the i-th tensor has the stream of seed + i", SeedPlusTensor, "noise: fresh per seed", "ffnn"),
    Fault("correlated noise: the factor in place of its inverse", FactorForItsInverse, STEPS),
    Fault("correlated noise: the ring is read backwards", RingBackwards, STEPS),
    Fault("correlated noise: the ring is one step too short", RingTooShort, STEPS),
    Fault("correlated noise: the ring is one step too long", RingTooLong, STEPS),
    Fault("correlated noise: the ring is lost after each epoch", RingLost, STEPS),
    Fault("correlated noise: the multiplier is lost on resume", MultiplierLost, SPREAD),
    Fault("correlated noise: none is taken back beside gradients", RingForgottenOnGradients, REAL_NOISE),
    Fault("correlated noise: the keys of two tensors collide", KeysCollide, STEPS, "ffnn"),
    Fault("correlated noise that is not stated", SaysNothing, STEPS),
    Fault("correlated noise that is only stated", OnlySaysSo, STEPS),
)


def table() -> str:
    """The lines of a table: each check, and the faults that end at it."""
    checks = {fault.check: [one.what for one in FAULTS if one.check == fault.check] for fault in FAULTS}
    rows = [f"| `{check}` | {'; '.join(faults)} |" for check, faults in checks.items()]
    return "\n".join(["| caught by | fault |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
