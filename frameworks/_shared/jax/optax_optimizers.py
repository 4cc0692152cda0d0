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
    rate, size = given[:2]
    if len(given) == 2:
        optimizer = optax.sgd(rate)
    else:
        beta1, beta2, eps, decay, warm_up = given[2:]
        optimizer = optax.adamw(_rising(rate, warm_up), beta1, beta2, eps, weight_decay=decay)
    changes, state = optimizer.update(jax.tree.map(lambda g: g / size, total), state, params)
    return optax.apply_updates(params, changes), state
