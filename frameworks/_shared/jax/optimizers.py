"""AdamW as a pure function whose constants are traced, so that others of the same task need no compilation."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from harness.contract import Setting
from harness.optimizer import SGD, AdamW

NAMES = (SGD.name, AdamW.name)

Tree = Mapping[str, jax.Array]
Memory = tuple[jax.Array, Tree, Tree]
"""Steps made, means, squares."""


def constants(setting: Setting) -> np.ndarray:
    """Learning rate, B, beta1, beta2, eps, weight decay and the steps of the warm-up, at least one; of plain descent
    the first two."""
    found = [setting.learning_rate, setting.batch_size]
    if isinstance(setting.optimizer, AdamW):
        chosen = setting.optimizer
        found += [chosen.beta1, chosen.beta2, chosen.eps, chosen.weight_decay, max(1, chosen.warm_up)]
    return np.array(found, np.float32)


def memory(setting: Setting, params: Tree) -> Memory | None:
    """Return what the update remembers at the start; plain descent remembers nothing."""
    if isinstance(setting.optimizer, SGD):
        return None
    means, squares = ({name: jnp.zeros_like(value) for name, value in params.items()} for _ in range(2))
    return jnp.zeros((), jnp.float32), means, squares


def adamw(params: Tree, total: Tree, kept: Memory, given: jax.Array) -> tuple[dict[str, jax.Array], Memory]:
    """(weights, memory) after a step with the sum ``total``, whose mean over B is the gradient; ``given``: what
    :func:`constants` returns."""
    rate, size, beta1, beta2, eps, decay, warm_up = given
    step = kept[0] + 1
    rate = rate * jnp.minimum(1.0, step / warm_up)
    gradients = {name: value / size for name, value in total.items()}
    means = {name: beta1 * kept[1][name] + (1 - beta1) * g for name, g in gradients.items()}
    squares = {name: beta2 * kept[2][name] + (1 - beta2) * g * g for name, g in gradients.items()}
    mean_share, square_share = 1 - beta1**step, 1 - beta2**step
    found = {
        name: value * (1 - rate * decay)
        - rate * (means[name] / mean_share) / (jnp.sqrt(squares[name] / square_share) + eps)
        for name, value in params.items()
    }
    return found, (step, means, squares)
