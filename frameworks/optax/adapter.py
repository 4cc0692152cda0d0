"""DP-SGD by Optax: ``optax.contrib.differentially_private_aggregate`` over a batch's per-example gradients."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import DifferentiallyPrivateAggregateState, differentially_private_aggregate

from frameworks._shared.jax import models as jax_models
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

    def noise_state(self, key: jax.Array) -> Any:
        return DifferentiallyPrivateAggregateState(rng_key=key)

    def update(self, task: Task, platform: str) -> Update:
        example_loss = jax_models.example_loss(task, jax_models.fastest_on(platform, task))
        micro_batch = MICRO_BATCH.get(task.name) if platform == "cpu" else None

        def example_gradients(params, examples, pieces):
            def one(example):
                x, y, kept = example
                # The loss of padding is 0, and a gradient of zero passes through the clipping as it is.
                return jax.grad(lambda params: kept * example_loss(params, x, y))(params)

            size = len(examples[0]) // pieces
            return jax.vmap(one)(examples) if pieces == 1 else jax.lax.map(one, examples, batch_size=size)

        def update(params, state, x, y, rows, mask, hyper):
            rate, bound, multiplier = hyper
            aggregate = differentially_private_aggregate(bound, multiplier, state.rng_key)
            rows, mask, pieces = in_pieces(rows, mask, micro_batch)
            gradients = example_gradients(params, (x[rows], y[rows], mask), pieces)
            mean, state = aggregate.update(gradients, state)
            # The aggregate divides by the rows it was given, padding included; the update divides by B.
            sgd = optax.sgd(rate * len(rows))
            changes, _ = sgd.update(mean, sgd.init(params))
            return optax.apply_updates(params, changes), state

        return jax.jit(update, donate_argnums=(0, 1))
