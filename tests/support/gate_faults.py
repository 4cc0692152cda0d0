"""The faults that honest authors make and earlier gates admitted, in numpy, each with the check that names it now.

``python -m tests.support.gate_faults`` prints the table of docs/gate-faults.md, which a test compares with that file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.contract import Setting
from harness.tasks import Task
from tests.support.gate_numpy import Exact, Values, total

PIECE = 64
SHIFTS = "noise: independent at all shifts"
STEPS = "noise: independent steps"
SPREAD = "noise: standard deviation sigma C / B"
LARGE_NOISE = "noise: on a large batch"
LATE = "update: 40 steps"
LARGE = "update: large batch"
PLACES = "update: some clipped"


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


@dataclass(frozen=True)
class Fault:
    """``before``: what the gate of October said of it. ``check``: what rejects it now. ``only``: with right updates."""

    what: str
    mutant: type[Exact]
    check: str
    task: str = "logreg"
    before: str = "passed"


FAULTS = (
    Fault("noise clamped at 3.3 sigma", NoiseClamped, "noise: tails"),
    Fault("noise of 0.993 sigma", NoiseSevenPerMilleSmall, SPREAD, "ffnn"),
    Fault("noise of 65 steps, repeated in a cycle", NoiseCycle, STEPS),
    Fault("noise of 8 steps, repeated in a cycle", NoiseCycleOfEight, STEPS),
    Fault("noise from a table of 2^20 values at random places", NoiseFromTable, SHIFTS, "ffnn"),
    Fault("second half of the noise: the first reversed, negated", NoiseMirrored, SHIFTS),
    Fault("all tensors read one stream, shifted by one value each", NoiseShiftedByOne, SHIFTS, "ffnn"),
    Fault("noise depends on the seed modulo 3", SeedModuloThree, "noise: fresh per seed"),
    Fault("noise depends on 16 bits of the seed", SeedOfSixteenBits, "noise: fresh per seed", before="not tried"),
    Fault("noise once per piece of 64 rows", NoisePerPiece, LARGE_NOISE),
    Fault("no noise for a batch of more than one piece", NoNoiseInPieces, LARGE_NOISE),
    Fault("noise halves every 16 steps", NoiseHalves, SPREAD),
    Fault("one coordinate of each matrix without noise", OneCoordinateWithoutNoise, SPREAD, "ffnn", before="passed¹"),
    Fault("three tenths of a step's noise in the next one's", NoiseKept, STEPS, before="passed¹"),
    Fault(
        "each value of the noise serves two random coordinates",
        NoiseServesTwo,
        STEPS,
        "ffnn",
        before="passed¹",
    ),
    Fault("a short last piece is left out, pieces of 64 rows", DropsAShortPiece, LARGE, before="passed¹"),
    Fault("learning rate halves after 9 steps", RateHalves, LATE),
    Fault("last bias frozen after 9 steps", FrozenLater, LATE),
    Fault("momentum 0.5 after 10 steps", MomentumLater, LATE),
    Fault("every tenth step skipped", SkipsSteps, LATE),
    Fault("batches cut at 400 rows", CutsAt400, LARGE),
    Fault("half-precision gradients above 384 rows", HalfPrecisionAbove384, LARGE),
    Fault("row numbers in a type that is too short", ShortRowNumbers, PLACES),
    Fault("1,000 rows placed, row numbers modulo 1,000", PlacesAThousand, PLACES),
    Fault("wrong beyond row 511", WrongFarDown, PLACES),
    Fault("last row of the data forgotten", ForgetsTheLastRow, PLACES, before="not tried"),
    Fault("row 0 taken for padding", ForgetsRowZero, PLACES, before="not tried"),
)


def table() -> str:
    """The lines of docs/gate-faults.md between its two marks."""
    rows = [f"| {fault.what} | {fault.before} | rejected | `{fault.check}` |" for fault in FAULTS]
    return "\n".join(["| fault | before | now | caught by |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
