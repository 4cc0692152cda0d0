"""DP-SGD by Optax: ``optax.contrib.differentially_private_aggregate`` over a batch's per-example gradients."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from optax.contrib import DifferentiallyPrivateAggregateState, differentially_private_aggregate

from frameworks._shared.jax import models as jax_models
from frameworks._shared.jax import optax_optimizers, optimizers
from frameworks._shared.jax.adapter import JaxAdapter, Update, in_pieces
from harness.contract import Adapter
from harness.tasks import Task

MICRO_BATCH = {"mnist-cnn": 16, "cifar10-cnn": 4, "imdb-lstm": 8}
"""Examples whose gradients are computed at a time on a CPU (NOTES.md). Other tasks and platforms: all at once."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``aggregate``."""
    return Optax(variant)


class Optax(JaxAdapter):
    """The optimiser is made where the step is traced, so that rate, C and sigma need no compilation of their own."""

    optimizers = optax_optimizers.NAMES

    def noise_state(self, key: jax.Array) -> Any:
        trained = {name: self.params[name] for name in self.task.trained_parameters}
        optimizer_state = optax_optimizers.initial_state(self.setting, trained)
        return DifferentiallyPrivateAggregateState(rng_key=key), optimizer_state

    def numbers(self) -> np.ndarray:
        return np.concatenate([super().numbers(), optimizers.constants(self.setting)])

    def update(self, task: Task, platform: str) -> Update:
        example_loss = jax_models.example_loss(task, jax_models.fastest_on(platform, task))
        micro_batch = MICRO_BATCH.get(task.name) if platform == "cpu" else None
        names = task.trained_parameters

        def example_gradients(trained, frozen, examples, pieces):
            def one(example):
                x, y, kept = example
                # The loss of padding is 0, and a gradient of zero passes through the clipping as it is.
                return jax.grad(lambda trained: kept * example_loss({**trained, **frozen}, x, y))(trained)

            size = len(examples[0]) // pieces
            return jax.vmap(one)(examples) if pieces == 1 else jax.lax.map(one, examples, batch_size=size)

        def update(params, state, x, y, rows, mask, hyper):
            _, bound, multiplier, *_ = hyper
            noise_state, optimizer_state = state
            trained = {name: params[name] for name in names}
            frozen = {name: value for name, value in params.items() if name not in trained}
            aggregate = differentially_private_aggregate(bound, multiplier, noise_state.rng_key)
            rows, mask, pieces = in_pieces(rows, mask, micro_batch)
            gradients = example_gradients(trained, frozen, (x[rows], y[rows], mask), pieces)
            mean, noise_state = aggregate.update(gradients, noise_state)
            # The aggregate divides by the rows it was given, padding included; the update divides by B.
            total = jax.tree.map(lambda value: value * len(rows), mean)
            trained, optimizer_state = optax_optimizers.apply(trained, total, optimizer_state, hyper[3:])
            return {**frozen, **trained}, (noise_state, optimizer_state)

        return jax.jit(update, donate_argnums=(0, 1))
