"""Optax's own optimizers with traced constants, so that others of the same task need no compilation."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from harness.contract import Setting
from harness.optimizer import SGD, AdamW

NAMES = (SGD.name, AdamW.name)

Tree = Mapping[str, jax.Array]


def initial_state(setting: Setting, params: Tree) -> optax.OptState:
    """Return what the setting's optimizer remembers before its first step on ``params``."""
    chosen = setting.optimizer
    return (optax.adamw(_rising(1.0, 1.0)) if isinstance(chosen, AdamW) else optax.sgd(1.0)).init(params)


def _rising(rate: jax.Array | float, warm_up: jax.Array | float) -> optax.Schedule:
    """The rate of a step, by how many were made before it."""
    return lambda count: rate * jnp.minimum(1.0, (count + 1) / warm_up)


def apply(params: Tree, total: Tree, state: optax.OptState, given: jax.Array) -> tuple[Tree, optax.OptState]:
    """(weights, state) after a step.

    Args:
        params: the trained weights.
        total: the noisy sum of clipped gradients; over B it is the gradient.
        state: as :func:`initial_state` or the last step returned it.
        given: what :func:`frameworks._shared.jax.optimizers.constants` returns, as an array.
    """
    changes, state = optimizer(given).update(jax.tree.map(lambda g: g / given[1], total), state, params)
    return optax.apply_updates(params, changes), state


def optimizer(given: jax.Array) -> optax.GradientTransformation:
    """Return what makes an update of the gradient, a mean over B; ``given``: as in :func:`apply`."""
    rate = given[0]
    if len(given) == 2:
        return optax.sgd(rate)
    beta1, beta2, eps, decay, warm_up = given[2:]
    return optax.adamw(_rising(rate, warm_up), beta1, beta2, eps, weight_decay=decay)
