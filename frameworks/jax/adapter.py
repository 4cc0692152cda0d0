"""DP-SGD in plain JAX: per-example gradients by ``jit(vmap(grad))``, and its non-private twin.

A step is one compiled function of padded index lists. Inside it a ``lax.scan`` walks over micro-batches, so that the
per-example gradients of one fit the cache and memory does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from frameworks import jax_models
from harness import tasks
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task

MICRO_BATCH = {"cifar10-cnn": 4, "imdb-lstm": 8}
MICRO_BATCH_ELSEWHERE = 16
"""Examples per scan step, tuned on a CPU: what they leave behind should stay in the cores' own caches."""

Tree = dict[str, jax.Array]
ClippedSum = Callable[[Tree, jax.Array, jax.Array, jax.Array, jax.Array], Tree]


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``vmap``, ``textbook`` or ``non-private``."""
    return Jax(variant)


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is put to XLA.

    ``patches``: convolutions as matrix products. ``rows``: an embedding's gradient as that of the rows looked up,
    [T, dim], never as a table per example. ``micro_batch``: examples per scan step; None takes the whole batch.
    """

    patches: bool
    rows: bool
    micro_batch: int | None


def formulation(variant: str, task: Task, platform: str) -> Formulation:
    """What was fastest on a CPU (NOTES.md); ``textbook``, and any other platform, as the paper has it."""
    if variant == "textbook":
        return Formulation(patches=False, rows=False, micro_batch=None)
    private = variant == "vmap"
    rows = private and isinstance(task.layers[0], tasks.Embedding)
    convolves = any(isinstance(layer, tasks.Conv2d) for layer in task.layers)
    if platform != "cpu" or (convolves and not private):
        return Formulation(patches=False, rows=rows, micro_batch=None)
    return Formulation(convolves, rows, MICRO_BATCH.get(task.name, MICRO_BATCH_ELSEWHERE if private else None))


class Jax(Adapter):
    """Data and weights stay on the device; the step donates the weights; hyper-parameters are traced scalars, so that
    another setting of the same task needs no compilation."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.task: Task | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != (self.variant != "non-private"):
            raise Unsupported(f"The variant {self.variant} is {'not ' * setting.private}private; use the other one.")
        if setting.precision not in ("float32", "tf32"):
            raise Unsupported(f"precision {setting.precision!r}: this adapter trains in float32 or tf32.")
        try:
            self.device = jax.devices(setting.device)[0]
        except RuntimeError as error:
            raise Unsupported(f"JAX finds no device {setting.device!r} here ({error}).") from None
        precision = "highest" if setting.precision == "float32" else "tensorfloat32"
        jax.config.update("jax_default_matmul_precision", precision)
        if task != self.task:
            self.update = _compiled(task, formulation(self.variant, task, setting.device), setting.private)
        self.task = task
        self.params = jax_models.parameters(task, initial, self.device)
        rate = setting.learning_rate / setting.batch_size
        hyper = (rate, setting.max_grad_norm, setting.noise_multiplier * setting.max_grad_norm)
        self.hyper = jax.device_put(np.array(hyper, np.float32), self.device)
        self.key = jax.device_put(jax.random.key(setting.seed), self.device)
        self.steps = 0

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = jax.device_put(x, self.device), jax.device_put(y, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        mask = np.ones(len(indices), bool) if mask is None else mask
        step = np.uint32(self.steps)
        rows = indices.astype(np.int32)
        self.params = self.update(self.params, self.x, self.y, rows, mask, self.hyper, self.key, step)
        self.steps += 1

    def synchronize(self) -> None:
        jax.block_until_ready(self.params)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {name: np.array(value) for name, value in self.params.items()}

    def peak_memory(self) -> Memory:
        counted = self.device.memory_stats() or {}
        return Memory({"jax_peak_in_use": counted["peak_bytes_in_use"]} if "peak_bytes_in_use" in counted else {})


def _compiled(task: Task, form: Formulation, private: bool) -> Callable[..., Tree]:
    """The step: (params, all x, all y, rows [k], mask [k], (rate, C, sigma*C), key, number of the step) -> params."""
    summed = _clipped_sum(task, form) if private else _sum(task, form)

    def update(params, x, y, rows, mask, hyper, key, number):
        rate, bound, deviation = hyper
        pieces = _pieces(len(rows), form.micro_batch)
        excess = -len(rows) % pieces
        rows = jnp.pad(rows, (0, excess)).reshape(pieces, -1)
        mask = jnp.pad(mask, (0, excess)).reshape(pieces, -1)

        def accumulate(total: Tree, piece: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
            chosen, kept = piece
            return summed(params, total, x[chosen], y[chosen], kept, bound), None

        total = jax.tree.map(jnp.zeros_like, params)
        if pieces == 1:  # XLA's CPU backend runs a convolution inside a loop on one thread and without its fast kernel
            total, _ = accumulate(total, (rows[0], mask[0]))
        else:
            total, _ = lax.scan(accumulate, total, (rows, mask))
        if private:
            total = _add_noise(total, deviation, jax.random.fold_in(key, number))
        return jax.tree.map(lambda value, change: value - rate * change, params, total)

    return jax.jit(update, donate_argnums=0)


def _pieces(size: int, micro_batch: int | None) -> int:
    """Number of micro-batches; as equal as they can be, so that padding stays below one row each."""
    return -(-size // (micro_batch or max(size, 1))) if size else 1


def _add_noise(total: Tree, deviation: jax.Array, key: jax.Array) -> Tree:
    keys = jax.random.split(key, len(total))
    return {
        name: value + deviation * jax.random.normal(k, value.shape)
        for (name, value), k in zip(total.items(), keys, strict=True)
    }


def _sum(task: Task, form: Formulation):
    """total + the sum of the gradients of the examples that ``mask`` keeps."""

    def losses(params, x, y, mask):
        one = jax.vmap(lambda x, y: jax_models.loss(task, jax_models.logits(task, params, x, form.patches), y))
        return jnp.sum(one(x, y) * mask)

    def summed(params, total, x, y, mask, bound):
        return jax.tree.map(jnp.add, total, jax.grad(losses)(params, x, y, mask))

    return summed


def _clipped_sum(task: Task, form: Formulation):
    """total + sum_i m_i min(1, C/|g_i|) g_i over a micro-batch."""
    table = f"{task.layers[0].name}.weight" if form.rows else None

    def example_loss(params, x, y):
        return jax_models.loss(task, jax_models.logits(task, params, x, form.patches), y)

    def squared_norm(tree: Tree) -> jax.Array:
        return sum(jnp.sum(g * g) for g in jax.tree.leaves(tree))

    def dense(params, total, x, y, mask, bound):
        def one(x, y):
            gradient = jax.grad(example_loss)(params, x, y)
            return gradient, squared_norm(gradient)

        gradients, norms2 = jax.vmap(one)(x, y)
        return _weighted(total, gradients, _factors(norms2, mask, bound))

    def by_rows(params, total, tokens, y, mask, bound):
        others = {name: value for name, value in params.items() if name != table}

        def one(tokens, looked_up, y):
            gradient, by_position = jax.grad(example_loss, (0, 1))(others, looked_up, y)
            return gradient, by_position, squared_norm(gradient) + _squared_norm_by_token(tokens, by_position)

        gradients, by_position, norms2 = jax.vmap(one)(tokens, params[table][tokens], y)
        factors = _factors(norms2, mask, bound)
        rest = _weighted({name: total[name] for name in others}, gradients, factors)
        return {**rest, table: total[table].at[tokens].add(by_position * factors[:, None, None])}

    return by_rows if form.rows else dense


def _factors(norms2: jax.Array, mask: jax.Array, bound: jax.Array) -> jax.Array:
    return mask * jnp.minimum(1.0, bound / jnp.sqrt(norms2))


def _weighted(total: Tree, gradients: Tree, factors: jax.Array) -> Tree:
    """total + sum_i f_i g_i as a contraction, which reads the gradients once and stores no scaled copy of them."""
    return {name: total[name] + jnp.tensordot(factors, gradients[name], 1) for name in total}


def _squared_norm_by_token(tokens: jax.Array, gradient: jax.Array) -> jax.Array:
    """|g|^2 of an embedding table's gradient from the gradient by position, [T, dim]: positions of one token add up."""
    order = jnp.argsort(tokens)
    new = jnp.diff(tokens[order], prepend=tokens[order[:1]]) != 0
    by_token = jax.ops.segment_sum(gradient[order], jnp.cumsum(new), len(tokens), indices_are_sorted=True)
    return jnp.sum(by_token * by_token)
