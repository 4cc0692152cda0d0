"""DP-SGD by JAX Privacy: ``clipped_grad`` with its micro-batches, ``gaussian_privatizer``, its accountant."""

from __future__ import annotations

from typing import Any

import jax
import jax_privacy
import numpy as np
import optax
from dp_accounting import NeighboringRelation
from jax_privacy import batch_selection, noise_addition, sharding_utils
from jax_privacy.accounting import accountants, analysis

from frameworks._shared.jax import models as jax_models
from frameworks._shared.jax import optax_optimizers, optimizers
from frameworks._shared.jax.adapter import JaxAdapter, Update, in_pieces
from harness.contract import Adapter
from harness.tasks import Task

MICRO_BATCH = {"mnist-cnn": 16}
MICRO_BATCH_ELSEWHERE = 1
"""``microbatch_size`` on a CPU, tuned per task (NOTES.md); any other platform takes the whole batch."""

PADDING_MULTIPLE = 32
"""Of the library's own example scripts, for batches of its own sampler: few sizes to compile, little padding."""

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``clipped-grad``."""
    return JaxPrivacy(variant)


class JaxPrivacy(JaxAdapter):
    """The library's parts are made where the step is traced, so that rate, C and sigma need no compilation of their
    own."""

    optimizers = optax_optimizers.NAMES

    def noise_state(self, key: jax.Array) -> Any:
        trained = {name: self.params[name] for name in self.task.trained_parameters}
        return _privatizer(1.0, key).init(trained), optax_optimizers.initial_state(self.setting, trained)

    def numbers(self) -> np.ndarray:
        return np.concatenate([super().numbers(), optimizers.constants(self.setting)])

    def update(self, task: Task, platform: str) -> Update:
        example_loss = jax_models.example_loss(task, jax_models.fastest_on(platform, task))
        largest = MICRO_BATCH.get(task.name, MICRO_BATCH_ELSEWHERE) if platform == "cpu" else None
        names = task.trained_parameters

        def update(params, state, x, y, rows, mask, hyper):
            _, bound, multiplier, *_ = hyper
            noise_state, optimizer_state = state
            trained = {name: params[name] for name in names}
            frozen = {name: value for name, value in params.items() if name not in trained}
            rows, mask, micro_batch = _arranged(rows, mask, largest)
            clipped = jax_privacy.clipped_grad(
                lambda trained, x, y: example_loss({**trained, **frozen}, x, y),
                l2_clip_norm=bound,
                batch_argnums=(1, 2),
                keep_batch_dim=False,
                microbatch_size=micro_batch,
            )
            total = clipped(trained, x[rows], y[rows], is_padding_example=~mask)
            noise = _privatizer(multiplier * clipped.sensitivity(ADD_OR_REMOVE), noise_state[0])
            noisy, noise_state = noise.update(total, noise_state)
            trained, optimizer_state = optax_optimizers.apply(trained, noisy, optimizer_state, hyper[3:])
            return {**frozen, **trained}, (noise_state, optimizer_state)

        return jax.jit(update, donate_argnums=(0, 1))

    def epoch(self, seed: int) -> int:
        """Batches of ``CyclicPoissonSampling`` with a cycle of one, which is Poisson sampling, padded as the library's
        example scripts pad them. A size that has not occurred yet is compiled inside the clock."""
        setting = self.setting
        steps = -(-setting.dataset_size // setting.batch_size)
        sampler = batch_selection.CyclicPoissonSampling(sampling_prob=setting.sample_rate, iterations=steps)
        for chosen in sampler.batch_iterator(setting.dataset_size, rng=seed):
            rows = batch_selection.pad_to_multiple_of(chosen, PADDING_MULTIPLE)
            self.step(np.maximum(rows, 0), rows >= 0)
        return steps

    def epsilon(self, steps: int, delta: float) -> float:
        accountant = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
        setting = self.setting
        params = analysis.DpParams(
            noise_multipliers=setting.noise_multiplier,
            num_samples=setting.dataset_size,
            delta=delta,
            batch_size=setting.batch_size,
        )
        return float(accountant.compute_epsilon(steps, params))


def _privatizer(deviation: Any, key: jax.Array) -> optax.GradientTransformation:
    return noise_addition.gaussian_privatizer(stddev=deviation, prng_key=key)


def _arranged(rows: jax.Array, mask: jax.Array, largest: int | None) -> tuple[jax.Array, jax.Array, int | None]:
    """(rows, mask, micro-batch size): padded to a multiple of it, in the library's order that leaves all padding to the
    last micro-batches, which it then skips."""
    if largest is None:
        return rows, mask, None
    rows, mask, pieces = in_pieces(rows, mask, largest)
    micro_batch = len(rows) // pieces
    order = sharding_utils.compute_early_stopping_order(len(rows), micro_batch)
    return rows[order], mask[order], micro_batch
