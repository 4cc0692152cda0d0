"""Gradients of the tables in a network's first layer, as the few rows that an example looked up.

The gradient of a table under ``vmap(grad)`` is a table per example, nearly all of it zeros. Everything that clipping
needs is in the gradient of the layer's output and the ids: the norm, and where the scaled gradient is to be added.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from harness import tasks
from harness.tasks import Task

Tree = dict[str, jax.Array]


def of(task: Task) -> tuple[str, ...]:
    """Names of the first layer's tables where all their gradients are of rows looked up; else none: a frozen table has
    no gradient, and that of a table which is the head as well is dense."""
    first = task.layers[0]
    match first:
        case tasks.Embedding():
            found = (f"{first.name}.weight",)
        case tasks.Bags():
            found = tuple(f"{table.name}.weight" for table in first.maps)
        case _:
            return ()
    return found if set(found) <= task.trained_parameters.keys() and not task.trains_tied_table else ()


def squared_norm(layer: tasks.Layer, x: jax.Array, gradient: jax.Array) -> jax.Array:
    """|g|^2 over all tables of ``layer`` for one example, from its ids and the gradient of the layer's output.

    An id that occurs twice has one row, in which both gradients add up before the square.
    """
    if isinstance(layer, tasks.Bags):
        # Every id of a bag has the gradient d of the bag's sum: a row with n of them gets n d. So |g|^2 is |d|^2 times
        # the sum of n^2, which is the number of pairs of places with equal ids.
        ids = _ids(layer, x)
        pairs = jnp.sum(ids[:, :, None] == ids[:, None, :], (1, 2))
        return jnp.sum(pairs * jnp.sum(jnp.square(_by_bag(layer, gradient)), 1))
    order = jnp.argsort(x)
    new = jnp.diff(x[order], prepend=x[order[:1]]) != 0
    by_token = jax.ops.segment_sum(gradient[order], jnp.cumsum(new), len(x), indices_are_sorted=True)
    return jnp.sum(by_token * by_token)


def added(layer: tasks.Layer, total: Tree, x: jax.Array, gradients: jax.Array, factors: jax.Array) -> Tree:
    """``total`` of the tables + sum_i f_i g_i over a batch, from its ids and the gradients of the layer's output."""
    if isinstance(layer, tasks.Bags):
        ids = jax.vmap(lambda one: _ids(layer, one))(x)
        scaled = jax.vmap(lambda one, factor: factor * _by_bag(layer, one))(gradients, factors)
        names = [f"{table.name}.weight" for table in layer.maps]  # a tree that JAX handed on has an order of its own
        return {name: total[name].at[ids[:, i]].add(scaled[:, i, None, :]) for i, name in enumerate(names)}
    ((name, value),) = total.items()
    return {name: value.at[x].add(gradients * factors[:, None, None])}


def _ids(layer: tasks.Bags, x: jax.Array) -> jax.Array:
    """[fields, ids] of one example."""
    return x[layer.counts :].reshape(-1, layer.ids)


def _by_bag(layer: tasks.Bags, output: jax.Array) -> jax.Array:
    """[fields, dim] of the layer's output, or of its gradient."""
    return output[layer.counts :].reshape(-1, layer.dim)
