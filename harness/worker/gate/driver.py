"""Holds what the gate drives, and how far rounding may move it: an adapter with the gate's data, through ``build``,
``place``, ``step``, ``synchronize`` and ``parameters`` only, so that what is checked is what is timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections.abc import Mapping

import numpy as np

from harness.contract import Adapter, Setting, require
from harness.optimizer import Optimizer
from harness.tasks import FLOAT32, Task
from harness.worker import sampling
from harness.worker.clock import Batch
from harness.worker.gate import cases as gate_cases
from harness.worker.gate.cases import BATCH, TOLERANCE, Case
from harness.worker.reading import transparent

NOISE_MULTIPLIER = 1.5
"""Not the 1.1 of the protocols, lest a constant pass."""
NOISE_SEED_BITS = 30
NOISE_RATE = 1 / 1024
"""Over the batch size: so small that the examples with p = 1 keep it while the weights wander."""
EPOCH_STEPS = 13
"""Steps of an epoch where many are looked at, so that some epochs end meanwhile."""

TENSOR_SLACK = 20.0
TENSOR_FLOOR = 1e-3
"""A parameter tensor whose share of the update is smaller than this is measured against this share."""
SENSITIVITY_MARGIN = 1e-4


class Driver:
    """An adapter with the gate's data; measures displacements as flat float64 vectors over all trained parameters."""

    def __init__(
        self,
        adapter: Adapter,
        task: Task,
        setting: Setting,
        static: bool,
        reference: Mapping[str, np.ndarray],
        entropy: int | None,
    ) -> None:
        require(adapter, setting)
        self.rng = np.random.default_rng(secrets.randbits(NOISE_SEED_BITS) if entropy is None else entropy)
        self.adapter = adapter
        self.task = task
        self.setting = setting
        self.static = static
        self.reference = reference
        self.cases = {case.name: case for case in gate_cases.cases(task, reference, setting.private)}
        self.norm = gate_cases.clipping_norm(reference)
        self.slices: dict[str, slice] = {}
        end = 0
        for name, shape in task.trained_parameters.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = self.slices[name].stop
        self.starts = {key: self._flat(gate_cases.starting_weights(task, key)) for key in (False, True)}
        self.updates: dict[bytes, np.ndarray] = {}
        """Measured displacements of single steps at the gate's ordinary setting, by their rows."""
        self.placed = False
        self.seed, self.other_seed = (int(seed) for seed in self.rng.integers(1, 2**NOISE_SEED_BITS, 2))
        some = self.cases["some clipped"].batches[0]
        self.layout = gate_cases.Layout(task, (int(some[0]), int(some[1])), self.rng)

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """Those that batches are padded to where shapes are static."""
        return BATCH, gate_cases.large_rows(self.task)

    def _flat(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(values[name], dtype=np.float64).ravel() for name in self.slices])

    def weights(self) -> np.ndarray:
        return self._flat(self.adapter.parameters())

    def build(
        self,
        batch_size: int = BATCH,
        learning_rate: float = float(BATCH),
        max_grad_norm: float | None = None,
        noise_multiplier: float = 0.0,
        seed: int | None = None,
        saturated: bool = False,
        optimizer: Optimizer | None = None,
        initial: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Back to the starting weights, which it returns, or to ``initial``. Without an ``optimizer`` one of the task's
        kind whose update is the rate times the gradient that it gets: the privatised gradient is what all the checks
        look at."""
        setting = dataclasses.replace(
            self.setting,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_grad_norm=self.norm if max_grad_norm is None else max_grad_norm,
            noise_multiplier=noise_multiplier,
            seed=self.seed if seed is None else seed,
            padded_sizes=self.sizes if self.static else (),
        )
        if optimizer is None:
            setting = transparent(setting, learning_rate)
        else:
            setting = dataclasses.replace(setting, optimizer=optimizer)
        self.adapter.build(self.task, setting, initial or gate_cases.starting_weights(self.task, saturated))
        if not self.placed:
            self.adapter.place(*self.layout.data())
            self.placed = True
        return self.starts[saturated]

    def build_own(self, saturated: bool = False) -> Setting:
        """Build with what the cell itself has, the epoch's length aside, and return that setting."""
        own = self.setting
        self.build(
            self.short_epochs,
            own.learning_rate,
            own.max_grad_norm,
            own.noise_multiplier,
            saturated=saturated,
            optimizer=own.optimizer,
        )
        return dataclasses.replace(own, batch_size=self.short_epochs)

    def build_noise(self, seed: int) -> tuple[np.ndarray, float, float]:
        """Return (starting weights, displacement by a gradient of 1, standard deviation of the noise)."""
        size = self.short_epochs
        before = self.build(size, NOISE_RATE * size, noise_multiplier=NOISE_MULTIPLIER, seed=seed, saturated=True)
        return before, NOISE_RATE, NOISE_MULTIPLIER * self.norm

    def sum_at(self, weights: Mapping[str, np.ndarray], batch: Batch, max_grad_norm: float) -> np.ndarray:
        """Return the adapter's own clipped sum of a batch at any weights."""
        self.build(max_grad_norm=max_grad_norm, initial=weights)
        self.adapter.step(*batch)
        self.adapter.synchronize()
        return self._flat(weights) - self.weights()

    def batch(self, rows: np.ndarray, repeats: int = 1) -> Batch:
        """Copies of these rows of the pool as the adapter gets them."""
        placed = self.layout.rows(rows, repeats)
        return sampling.pad(placed, self.sizes) if self.static else (placed, None)

    def step(self, rows: np.ndarray, repeats: int = 1) -> None:
        self.adapter.step(*self.batch(rows, repeats))
        self.adapter.synchronize()

    def displacement(self, case: Case) -> np.ndarray:
        """Starting minus final weights of a case, without noise."""
        divisor = case.batch_size * case.repeats
        start = self.build(
            divisor, case.learning_rate, case.max_grad_norm, saturated=case.saturated, optimizer=case.optimizer
        )
        for rows in case.batches:
            self.step(rows, case.repeats)
        return start - self.weights()

    def truth(self, case: Case) -> np.ndarray:
        """The displacement that a right adapter makes."""
        name = gate_cases.truth_name(case, self.setting.private)
        return self._flat(gate_cases.unpack(name, self.task, self.reference))

    @property
    def short_epochs(self) -> int:
        """The expected batch size with which an epoch has EPOCH_STEPS steps."""
        return -(-self.setting.dataset_size // EPOCH_STEPS)

    def single_step(self, rows: np.ndarray) -> np.ndarray:
        """Displacement of one step at the ordinary setting, where it is the (clipped) sum itself."""
        key = rows.tobytes()
        if key not in self.updates:
            self.updates[key] = self.displacement(Case("", (rows,), self.norm))
        return self.updates[key]

    def note(self, case: Case, moved: np.ndarray) -> None:
        """Keep the displacement of a case that is one step at the ordinary setting."""
        is_ordinary = dataclasses.replace(case, name="", batches=(), stored="", slack=1.0) == Case("", (), self.norm)
        if is_ordinary and len(case.batches) == 1:
            self.updates[case.batches[0].tobytes()] = moved


class Room:
    """Holds what float32, and a task's lower precision, may move; of a reference, in the gate's own units."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def limit(self, case: Case, expected: np.ndarray, readings: int = 0) -> float:
        """On the relative L2 error of a case, given its displacement."""
        rounding = self._rounding(case, expected, readings or len(case.batches))
        size = float(np.linalg.norm(expected))
        return case.slack * TOLERANCE + float(np.linalg.norm(rounding)) / size + self._arithmetic(case, size)

    def _arithmetic(self, case: Case, size: float) -> float:
        """Return what the task's precision may move the update of a case by, over its length ``size``; in float32
        nothing, but for many steps near kinks. Where it is not known of a case by itself, it is the largest share of
        any single step."""
        known = self.by_tensor(case)
        if known is not None:
            return float(np.linalg.norm(known)) / size
        return 0.0 if self.driver.task.precision == FLOAT32 else self._largest_arithmetic

    @functools.cached_property
    def _single_steps(self) -> list[Case]:
        """Those that move the weights, and of which it is known what the task's precision rounds away."""
        cases = [*self.driver.cases.values(), *gate_cases.size_cases(self.driver.task, self.driver.reference)]
        known = [case for case in cases if len(case.batches) == 1 and self.by_tensor(case) is not None]
        return [case for case in known if self.driver.truth(case).any()]

    @functools.cached_property
    def _largest_arithmetic(self) -> float:
        return max(
            self._arithmetic(case, float(np.linalg.norm(self.driver.truth(case)))) for case in self._single_steps
        )

    @functools.cached_property
    def _largest_shares(self) -> np.ndarray:
        """What the task's precision may move each trained tensor by, over the length of the whole update: the largest
        of all single steps, for the rounding of a few values is one draw of them, and differs by half an order of
        magnitude from step to step."""
        shares = [np.zeros(len(self.driver.slices))]
        for case in self._single_steps:
            known = self.by_tensor(case)
            assert known is not None
            shares.append(known / np.linalg.norm(self.driver.truth(case)))
        return np.stack(shares).max(0)

    def by_tensor(self, case: Case) -> np.ndarray | None:
        """Return how far each trained tensor may be moved: by the task's precision, or in many steps of float32 by what
        a single update may be off by. None where it is not known, as of most cases in float32."""
        known = self.driver.reference.get(gate_cases.rounding_name(case, self.driver.setting.private))
        if known is None:
            return None
        return known if self.driver.task.precision == FLOAT32 else gate_cases.ROUNDING_FACTOR * known

    def _rounding(self, case: Case, expected: np.ndarray, steps: int) -> np.ndarray:
        """The float32 rounding of the weights that move, at most half a unit in the last place in every step."""
        return steps * 2.0**-24 * np.where(expected != 0, self.driver.starts[case.saturated], 0.0)

    def tensor_limits(self, case: Case, expected: np.ndarray) -> dict[str, tuple[float, float]]:
        """Return name -> (length, limit on the error over this length) of each trained tensor."""
        rounding = self._rounding(case, expected, 1)
        floor = TENSOR_FLOOR * float(np.linalg.norm(expected))
        lowered = self._largest_shares * float(np.linalg.norm(expected))
        found = {}
        for (name, part), share in zip(self.driver.slices.items(), lowered, strict=True):
            size = max(floor, float(np.linalg.norm(expected[part])))
            found[name] = size, TENSOR_SLACK * TOLERANCE + float(np.linalg.norm(rounding[part]) + share) / size
        return found

    def of_one_example(self, sums: int) -> float:
        """How far one example may move the weights, over C: each of so many sums carries the float32 rounding of the
        weights."""
        start = float(np.linalg.norm(self.driver.starts[False]))
        return 1.0 + SENSITIVITY_MARGIN + sums * 2.0**-24 * start / self.driver.norm
