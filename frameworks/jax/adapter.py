"""DP-SGD in plain JAX: per-example gradients by ``jit(vmap(grad))``, its non-private twin, and what each of the three
transformations is worth.

A step is one compiled function of padded index lists. Inside it a ``lax.scan`` walks over micro-batches, so that the
per-example gradients of one fit the cache and memory does not grow with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from frameworks._shared.jax import models as jax_models
from frameworks._shared.jax import optimizers
from frameworks._shared.jax.adapter import JaxAdapter, Tree, Update, in_pieces
from frameworks._shared.jax.models import Form
from frameworks.jax import tables as first_tables
from harness.contract import Adapter
from harness.tasks import BFLOAT16, FLOAT32, Task

MICRO_BATCH = {"cifar10-cnn": 4, "imdb-lstm": 8, "gpt2-lm": 2, "llama-lora": 2, "vit": 4} | {"llama-full": 2}
MICRO_BATCH_PRIVATE = MICRO_BATCH | {"wrn-16-2": 4, "recsys": 16}
MICRO_BATCH_PRIVATE |= {"encoder-full": 2, "encoder-lora": 2, "encoder-bias": 2, "wrn-16-4": 4}
MICRO_BATCH_PRIVATE |= {"wrn-16-4-k4": 1, "wrn-16-4-k16": 1}
MICRO_BATCH_ELSEWHERE = 16
"""Examples per scan step, tuned on a CPU: what they leave behind should stay in the cores' own caches. Those
of the lines with ``|=``, and ``llama-full``, are by analogy, not tuned."""

MICRO_BATCH |= {"small-gpt2": 2, "small-llama": 2, "small-vit": 4}  # so that the gate judges pieces without DP, too

WHOLE_BATCH, WHOLE_BATCH_ELSEWHERE = {"cifar10-cnn": 128, "vit": 0, "small-vit": 0}, 640
"""Without DP, a batch of images up to this size is convolved whole on a CPU: XLA's own kernel is the fastest until what
it leaves behind outgrows the caches. Never a transformer's, whose patches are the least of its work."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, one of those in framework.toml."""
    return Jax(variant)


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is put to XLA.

    ``rows``: the gradients of the first layer's tables as those of the rows looked up, never as tables per example.
    ``micro_batch``: examples per scan step; None takes the whole batch. ``vmap``: False takes one example at a time.
    """

    model: Form = jax_models.PLAIN
    rows: bool = False
    micro_batch: int | None = None
    vmap: bool = True


TEXTBOOK = {"textbook": Formulation(), "unrolled": Formulation(model=Form(unroll=True)), "no-jit": Formulation()}
TEXTBOOK |= {"no-vmap": Formulation(micro_batch=1, vmap=False)}


def formulation(variant: str, task: Task, platform: str, size: int) -> Formulation:
    """The paper's program for the variants in TEXTBOOK, else what was fastest on a CPU for ``size`` examples
    (NOTES.md). Any other platform takes the whole batch."""
    if variant in TEXTBOOK:
        return TEXTBOOK[variant]
    private = variant == "vmap"
    rows = private and bool(first_tables.of(task))
    model = jax_models.fastest_on(platform, task)
    is_whole = model.patches and not private and size <= WHOLE_BATCH.get(task.name, WHOLE_BATCH_ELSEWHERE)
    if platform != "cpu" or is_whole:
        return Formulation(rows=rows)
    elsewhere = MICRO_BATCH_ELSEWHERE if private or model.patches else None
    tuned = MICRO_BATCH_PRIVATE if private else MICRO_BATCH
    return Formulation(model, rows, tuned.get(task.name, elsewhere))


class Jax(JaxAdapter):
    """Noise of each step from a fresh half of the key, which the step splits. The state is the key and what the
    optimizer remembers."""

    optimizers = optimizers.NAMES
    precisions = (FLOAT32, BFLOAT16)

    def noise_state(self, key: jax.Array):
        trained = {name: self.params[name] for name in self.task.trained_parameters}
        return key, jax.device_put(optimizers.memory(self.setting, trained), self.device)

    def numbers(self) -> np.ndarray:
        return np.concatenate([super().numbers(), optimizers.constants(self.setting)])

    def update(self, task: Task, platform: str) -> Update:
        variant, private = self.variant, self.private

        def update(params, state, x, y, rows, mask, hyper):
            form = formulation(variant, task, platform, len(rows))
            return _update(task, form, private)(params, state, x, y, rows, mask, hyper)

        # "no-jit" runs the textbook's program operation by operation.
        return update if variant == "no-jit" else jax.jit(update, donate_argnums=(0, 1))


def _update(task: Task, form: Formulation, private: bool) -> Update:
    summed = _clipped_sum(task, form) if private else _sum(task, form)

    def update(params, state, x, y, rows, mask, hyper):
        (key, kept), (rate, bound, multiplier) = state, hyper[:3]
        trained = {name: params[name] for name in task.trained_parameters}
        rows, mask, pieces = in_pieces(rows, mask, form.micro_batch)
        rows, mask = rows.reshape(pieces, -1), mask.reshape(pieces, -1)

        def accumulate(total: Tree, piece: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
            chosen, real = piece
            return summed(params, total, x[chosen], y[chosen], real, bound), None

        total = jax.tree.map(jnp.zeros_like, trained)
        if pieces == 1:  # XLA's CPU backend runs a convolution inside a loop on one thread and without its fast kernel
            total, _ = accumulate(total, (rows[0], mask[0]))
        else:
            total, _ = lax.scan(accumulate, total, (rows, mask))
        if private:
            key, fresh = jax.random.split(key)
            total = _add_noise(total, multiplier * bound, fresh)
        if kept is None:
            trained = jax.tree.map(lambda value, change: value - rate * change, trained, total)
        else:
            trained, kept = optimizers.adamw(trained, total, kept, hyper[3:])
        return {**params, **trained}, (key, kept)

    return update


SMALL = 2**14  # values of a tensor up to which its noise is drawn with that of others: XLA compiles every draw anew


def _add_noise(total: Tree, deviation: jax.Array, key: jax.Array) -> Tree:
    large = {name: value for name, value in total.items() if value.size > SMALL}
    flat, apart = ravel_pytree({name: value for name, value in total.items() if name not in large})
    first, *keys = jax.random.split(key, 1 + len(large))
    noise = {name: jax.random.normal(k, value.shape) for (name, value), k in zip(large.items(), keys, strict=True)}
    noise |= apart(jax.random.normal(first, flat.shape))
    return {name: value + deviation * noise[name] for name, value in total.items()}


def _sum(task: Task, form: Formulation):
    """total + the sum of the gradients of the examples that ``mask`` keeps."""

    def losses(trained, params, x, y, mask):
        one = jax.vmap(jax_models.example_loss(task, form.model), (None, 0, 0))
        return jnp.sum(one({**params, **trained}, x, y) * mask)

    def summed(params, total, x, y, mask, bound):
        trained = {name: params[name] for name in total}
        return jax.tree.map(jnp.add, total, jax.grad(losses)(trained, params, x, y, mask))

    return summed


def _clipped_sum(task: Task, form: Formulation):
    """total + sum_i m_i min(1, C/|g_i|) g_i over a micro-batch."""
    first, tables = task.layers[0], first_tables.of(task)
    example_loss = jax_models.example_loss(task, form.model)

    def squared_norm(tree: Tree) -> jax.Array:
        return sum(jnp.sum(g * g) for g in jax.tree.leaves(tree))

    def dense(params, total, x, y, mask, bound):
        def trained_loss(trained, x, y):
            return example_loss({**params, **trained}, x, y)

        def one(x, y):
            gradient = jax.grad(trained_loss)({name: params[name] for name in total}, x, y)
            return gradient, squared_norm(gradient)

        if form.vmap:
            gradients, norms2 = jax.vmap(one)(x, y)
            return _weighted(total, gradients, _factors(norms2, mask, bound))
        gradient, norm2 = one(x[0], y[0])
        factor = _factors(norm2, mask[0], bound)
        return jax.tree.map(lambda value, g: value + factor * g, total, gradient)

    def by_rows(params, total, x, y, mask, bound):
        trained = {name: params[name] for name in total if name not in tables}

        def loss_after_first(trained, output, y):
            return example_loss({**params, **trained}, output, y)

        def one(x, output, y):
            gradient, of_output = jax.grad(loss_after_first, (0, 1))(trained, output, y)
            return gradient, of_output, squared_norm(gradient) + first_tables.squared_norm(first, x, of_output)

        outputs = jax.vmap(lambda x: jax_models.first_output(task, params, x))(x)
        gradients, of_outputs, norms2 = jax.vmap(one)(x, outputs, y)
        factors = _factors(norms2, mask, bound)
        rest = _weighted({name: total[name] for name in trained}, gradients, factors)
        of_tables = {name: total[name] for name in tables}
        return {**rest, **first_tables.added(first, of_tables, x, of_outputs, factors)}

    return by_rows if form.rows else dense


def _factors(norms2: jax.Array, mask: jax.Array, bound: jax.Array) -> jax.Array:
    return mask * jnp.minimum(1.0, bound / jnp.sqrt(norms2))


def _weighted(total: Tree, gradients: Tree, factors: jax.Array) -> Tree:
    """total + sum_i f_i g_i as a contraction, which reads the gradients once and stores no scaled copy of them."""
    return {name: total[name] + jnp.tensordot(factors, gradients[name], 1) for name in total}
