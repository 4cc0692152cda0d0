"""The loops of the libraries on JAX, each in our own words after the page that its function names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from frameworks._shared.jax import models as jax_models
from harness.optimizer import AdamW
from tests.frameworks.own_examples.terms import Example, Terms

Tree = dict[str, jax.Array]
Step = Callable[[Tree, Any, jax.Array, jax.Array], tuple[Tree, Any]]


class Loop(Example):
    """``step`` of (trained weights, state) on a resident batch; the frozen weights are those of the start."""

    def __init__(self, terms: Terms, step: Step, weights: Tree, state: Any) -> None:
        self._step, self.weights, self.state = step, weights, state
        self.frozen = {name: terms.initial[name] for name in terms.task.parameters if name not in weights}
        self.batch = (jnp.asarray(terms.x), jnp.asarray(terms.y))

    def draw(self) -> Any:
        return self.batch

    def step(self, batch: Any) -> None:
        self.weights, self.state = self._step(self.weights, self.state, *batch)
        jax.block_until_ready(self.weights)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return self.frozen | {name: np.array(value) for name, value in self.weights.items()}


def _start(terms: Terms) -> tuple[Callable[..., jax.Array], Tree]:
    """The loss of one example by the trained weights, which closes over the frozen ones, and the trained weights."""
    loss_of = jax_models.example_loss(terms.task)
    frozen = jax_models.parameters(terms.task, terms.initial, jax.devices("cpu")[0])
    trained = {name: frozen.pop(name) for name in terms.task.trained_parameters}

    def loss(weights: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return loss_of({**frozen, **weights}, x, y)

    return loss, trained


def jax_vmap(terms: Terms) -> Example:
    """The script on private SGD in JAX's repository: clip inside vmap, sum, noise for every leaf, divide."""
    loss, weights = _start(terms)
    chosen, rate = terms.optimizer, terms.learning_rate

    def clipped(weights: Tree, x: jax.Array, y: jax.Array) -> Tree:
        gradient = jax.grad(loss)(weights, x, y)
        norm = jnp.linalg.norm(jnp.array([jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(gradient)]))
        divisor = jnp.maximum(norm / terms.max_grad_norm, 1.0)
        return jax.tree.map(lambda g: g / divisor, gradient)

    def private(weights: Tree, key: jax.Array, x: jax.Array, y: jax.Array) -> Tree:
        leaves, tree = jax.tree.flatten(jax.vmap(clipped, (None, 0, 0))(weights, x, y))
        deviation = terms.max_grad_norm * terms.noise_multiplier
        keys = jax.random.split(key, len(leaves))
        noisy = [g.sum(0) + deviation * jax.random.normal(k, g.shape[1:]) for k, g in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, [g / terms.batch_size for g in noisy])

    @jax.jit
    def step(weights: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
        key, first, second, count = state
        key, fresh = jax.random.split(key)
        gradient = private(weights, fresh, x, y)
        count = count + 1
        if not isinstance(chosen, AdamW):
            return jax.tree.map(lambda w, g: w - rate * g, weights, gradient), (key, first, second, count)
        first = jax.tree.map(lambda m, g: chosen.beta1 * m + (1 - chosen.beta1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: chosen.beta2 * v + (1 - chosen.beta2) * g * g, second, gradient)

        def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            way = m / (1 - chosen.beta1**count) / (jnp.sqrt(v / (1 - chosen.beta2**count)) + chosen.eps)
            return w * (1 - rate * chosen.weight_decay) - rate * way

        return jax.tree.map(moved, weights, first, second), (key, first, second, count)

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return Loop(terms, step, weights, (jax.random.key(0), zeros, zeros, jnp.zeros(())))


def _optax(terms: Terms) -> Any:
    import optax

    chosen = terms.optimizer
    if isinstance(chosen, AdamW):
        return optax.adamw(
            terms.learning_rate, chosen.beta1, chosen.beta2, chosen.eps, weight_decay=chosen.weight_decay
        )
    return optax.sgd(terms.learning_rate)


def optax_aggregate(terms: Terms) -> Example:
    """Optax' page on differential privacy: vmap(grad), then the aggregate as the first of a chain."""
    import optax
    from optax.contrib import differentially_private_aggregate

    loss, weights = _start(terms)
    aggregate = differentially_private_aggregate(terms.max_grad_norm, terms.noise_multiplier, jax.random.key(0))
    optimizer = optax.chain(aggregate, _optax(terms))

    @jax.jit
    def step(weights: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
        gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, x, y)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    return Loop(terms, step, weights, optimizer.init(weights))


def jax_privacy_clipped_grad(terms: Terms) -> Example:
    """JAX Privacy's introduction: clipped_grad of the batch's loss, gaussian_privatizer, an optimizer of Optax."""
    import jax_privacy
    import optax
    from jax_privacy.noise_addition import gaussian_privatizer

    loss, weights = _start(terms)

    def batch_loss(weights: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.vmap(loss, (None, 0, 0))(weights, x, y).mean()

    gradient_of = jax_privacy.clipped_grad(
        batch_loss, l2_clip_norm=terms.max_grad_norm, batch_argnums=(1, 2), normalize_by=terms.batch_size
    )
    deviation = terms.noise_multiplier * gradient_of.sensitivity()
    privatizer = gaussian_privatizer(stddev=deviation, prng_key=jax.random.key(0))
    optimizer = _optax(terms)

    @jax.jit
    def step(weights: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
        noise_state, kept = state
        noisy, noise_state = privatizer.update(gradient_of(weights, x, y), noise_state)
        updates, kept = optimizer.update(noisy, kept, weights)
        return optax.apply_updates(weights, updates), (noise_state, kept)

    return Loop(terms, step, weights, (privatizer.init(weights), optimizer.init(weights)))


def jax_privacy_git_trainer(terms: Terms) -> Example:
    """JAX Privacy's DPTrainer as its module's page has it: a plan of one band, `train_step` with a loss of a batch."""
    from jax_privacy import training

    loss, weights = _start(terms)
    size = terms.batch_size

    def batch_loss(weights: Tree, data: Any, key: jax.Array) -> tuple[jax.Array, tuple[()]]:
        return jax.vmap(loss, (None, 0, 0))(weights, *data).mean(), ()

    trainer = training.DPTrainer(
        config=training.BandMFConfig(
            iterations=100,
            expected_participations=1.0,
            strategy=np.ones(1),
            noise_multiplier=terms.noise_multiplier,
            l2_clip_norm=terms.max_grad_norm,
            rescale_to_unit_norm=False,
            normalize_by=size,
        ),
        performance_flags=training.PerformanceFlags(noise_seed=0),
        loss_fn=batch_loss,
        optimizer=_optax(terms),
    )
    key = jax.random.key(0)

    def step(weights: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
        state, _ = trainer.train_step(state, (x, y), jnp.zeros(len(x), bool), key)
        return state.params, state

    return Loop(terms, step, weights, trainer.init(weights))


def objax_private_gradients(terms: Terms) -> Example:
    """Objax' script on private MNIST: PrivateGradValues with micro-batches of one, SGD, one Jit."""
    import objax  # which the adapter has made fit for this JAX

    loss_of = jax_models.example_loss(terms.task)
    names = tuple(terms.task.parameters)
    model = objax.ModuleList([objax.TrainVar(jnp.array(terms.initial[name])) for name in names])
    optimizer = objax.optimizer.SGD(model.vars())

    def read() -> Tree:
        return {name: var.value for name, var in zip(names, model, strict=True)}

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.vmap(loss_of, (None, 0, 0))(read(), x, y).mean()

    gradients_of = objax.privacy.dpsgd.PrivateGradValues(
        loss, model.vars(), terms.noise_multiplier, terms.max_grad_norm, microbatch=1, batch_axis=(0, 0)
    )

    def train(x: jax.Array, y: jax.Array) -> Any:
        found, value = gradients_of(x, y)
        optimizer(terms.learning_rate, found)
        return value

    train_op = objax.Jit(train, gradients_of.vars() + optimizer.vars() + model.vars())

    def step(weights: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
        train_op(x, y)
        return read(), None

    return Loop(terms, step, read(), None)
