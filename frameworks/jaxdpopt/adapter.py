"""DP-SGD by jaxdpopt: masked physical batches of one size, as its examples put its functions together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jaxdpopt import dp_accounting_utils
from jaxdpopt import jax_mask_efficient as library

from frameworks._shared.jax import models as jax_models
from frameworks._shared.jax import optax_optimizers, optimizers
from frameworks._shared.jax.adapter import JaxAdapter, Tree, Update
from harness.contract import Adapter
from harness.tasks import Task

PHYSICAL_BATCH = {"logreg": 32, "small-gpt2": 8}
PHYSICAL_BATCH_ELSEWHERE = 1
"""Examples of a physical batch on a CPU (NOTES.md); any other platform takes the whole batch."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``masked``."""
    return Jaxdpopt(variant)


class Loss(library.LossFunction):
    """The loss of one example, in the form that the library differentiates."""

    def __init__(self, example_loss: Callable[..., jax.Array], frozen: Tree) -> None:
        super().__init__(state=None, num_classes=0)
        self.example_loss, self.frozen = example_loss, frozen

    def __call__(self, params: Tree, X: jax.Array, y: jax.Array) -> jax.Array:
        return self.example_loss({**params, **self.frozen}, X, y)


class Jaxdpopt(JaxAdapter):
    """The train state is made where the step is traced, so that rate, C and sigma need no compilation of their own."""

    optimizers = optax_optimizers.NAMES

    def noise_state(self, key: jax.Array) -> Any:
        trained = {name: self.params[name] for name in self.task.trained_parameters}
        return key, _optimizer(optimizers.constants(self.setting)).init(trained)

    def numbers(self) -> np.ndarray:
        return np.concatenate([super().numbers(), optimizers.constants(self.setting)])

    def update(self, task: Task, platform: str) -> Update:
        self.size = PHYSICAL_BATCH.get(task.name, PHYSICAL_BATCH_ELSEWHERE) if platform == "cpu" else None
        logical = self.logical = _on_logical_batch(task, platform)

        def update(params, state, x, y, rows, mask, hyper):
            size = self.size or max(1, len(rows))
            excess = -len(rows) % size
            rows, mask = jnp.pad(rows, (0, excess)), jnp.pad(mask, (0, excess))
            needed = (jnp.sum(mask) + size - 1) // size
            return logical(params, state, x[rows], y[rows], mask, needed, size, hyper)

        return jax.jit(update, donate_argnums=(0, 1))

    def epoch(self, seed: int) -> int:
        """Batches as the library's examples draw them: their size first, of a binomial, then that many examples."""
        setting = self.setting
        steps = -(-setting.dataset_size // setting.batch_size)
        size = self.size or setting.batch_size
        step = jax.jit(self.logical, static_argnums=6, donate_argnums=(0, 1))
        for key in jax.random.split(jax.random.key(seed), steps):
            batch_key, size_key = jax.random.split(key)
            drawn = library.poisson_sample_logical_batch_size(size_key, setting.dataset_size, setting.sample_rate)
            masks, needed = library.setup_physical_batches(drawn, size)
            x, y = library.get_padded_logical_batch(batch_key, len(masks), self.x, self.y)
            self.params, self.state = step(self.params, self.state, x, y, masks, needed, size, self.hyper)
        return steps

    def epsilon(self, steps: int, delta: float) -> float:
        setting = self.setting
        found, _ = dp_accounting_utils.compute_epsilon(setting.noise_multiplier, setting.sample_rate, steps, delta)
        return float(found)


def _on_logical_batch(task: Task, platform: str) -> Update:
    """The step on a padded logical batch: the first ``needed`` physical batches of ``size`` examples, noise, update."""
    example_loss = jax_models.example_loss(task, jax_models.fastest_on(platform, task))
    names = task.trained_parameters

    def step(params, state, batch_x, batch_y, mask, needed, size, hyper):
        _, bound, multiplier, *_ = hyper
        key, of_optimizer = state
        frozen = {name: value for name, value in params.items() if name not in names}
        loss = Loss(example_loss, frozen)
        train_state = TrainState(
            step=0,
            apply_fn=None,
            params={name: params[name] for name in names},
            tx=_optimizer(hyper[3:]),
            opt_state=of_optimizer,
        )

        def on_physical_batch(number: jax.Array, total: Tree) -> Tree:
            x, y, kept = (
                jax.lax.dynamic_slice_in_dim(whole, number * size, size) for whole in (batch_x, batch_y, mask)
            )
            gradients = library.compute_per_example_gradients_physical_batch(train_state, x, y, loss)
            clipped = library.clip_physical_batch(gradients, bound)
            return library.add_trees(total, library.accumulate_physical_batch(clipped, kept))

        zeros = jax.tree.map(jnp.zeros_like, train_state.params)
        total = jax.lax.fori_loop(0, needed, on_physical_batch, zeros)
        key, fresh = jax.random.split(key)
        noisy = library.add_Gaussian_noise(fresh, total, multiplier, bound)
        after = library.update_model(train_state, noisy)
        return {**frozen, **after.params}, (key, after.opt_state)

    return step


def _optimizer(given: Any) -> optax.GradientTransformation:
    """Return what makes an update of the noisy sum; ``given``: what ``optimizers.constants`` returns."""
    return optax.chain(optax.scale(1 / given[1]), optax_optimizers.optimizer(given))
