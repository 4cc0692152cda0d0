"""The loops of the libraries on Keras, each in our own words after the page that its function names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from frameworks._shared import channels_last
from harness.optimizer import AdamW
from tests.frameworks.own_examples.terms import Example, Terms


class Loop(Example):
    """``train_on_batch`` of a compiled model: one step of what the pages do by ``fit``, without what ``fit`` does
    around an epoch."""

    def __init__(self, terms: Terms, model: Any, variables: Mapping[str, Any]) -> None:
        """``variables``: the model's, by their canonical names; they get the weights of the start."""
        self.task, self.model, self.variables = terms.task, model, variables
        self.batch = channels_last.data(terms.task, terms.x), terms.y
        values = channels_last.parameters(terms.task, terms.initial)
        for name, variable in variables.items():
            variable.assign(values[name].reshape(variable.shape))

    def draw(self) -> Any:
        return self.batch

    def step(self, batch: Any) -> None:
        self.model.train_on_batch(*batch)

    def parameters(self) -> Mapping[str, np.ndarray]:
        values = {name: np.array(variable) for name, variable in self.variables.items()}
        return channels_last.canonical(self.task, values)


def _optimizer(terms: Terms) -> Any:
    """The task's optimizer: Keras' own SGD, or the adapter's AdamW, which is Keras' with the paper's epsilon.

    With Keras' epsilon three steps of the gate's vision transformer are 0.1 of their length off.
    """
    import keras

    from frameworks.keras.optimizers import AdamWithBareEpsilon

    chosen = terms.optimizer
    if not isinstance(chosen, AdamW):
        return keras.optimizers.SGD(terms.learning_rate)
    return AdamWithBareEpsilon(
        terms.learning_rate,
        weight_decay=chosen.weight_decay,
        beta_1=chosen.beta1,
        beta_2=chosen.beta2,
        epsilon=chosen.eps,
    )


def keras_make_private(terms: Terms) -> Example:
    """JAX Privacy's page on Keras: DPKerasConfig, make_private, compile, fit."""
    import keras
    from jax_privacy import keras_api

    from frameworks.keras.networks import network, variables

    model = network(terms.task)
    config = keras_api.DPKerasConfig(
        epsilon=math.inf,
        delta=1e-5,
        clipping_norm=terms.max_grad_norm,
        batch_size=terms.batch_size,
        gradient_accumulation_steps=1,
        train_steps=1000,
        train_size=100 * terms.batch_size,
        rescale_to_unit_norm=False,  # which would change the rate
    )
    # Given to the constructor it would be checked for its epsilon, and 0 is refused.
    object.__setattr__(config, "noise_multiplier", terms.noise_multiplier)
    model = keras_api.make_private(model, config)
    model.compile(optimizer=_optimizer(terms), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return Loop(terms, model, variables(terms.task, model))


def tfp_dpmodel(terms: Terms) -> Example:
    """The docstring of ``DPModel``: a Keras model with its class, a standard optimizer and loss, compile, fit."""
    import keras  # which tf.keras is
    from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPModel

    from frameworks.tfp.adapter import network

    plain = network(terms.task, "dpmodel")
    model = DPModel(
        l2_norm_clip=terms.max_grad_norm,
        noise_multiplier=terms.noise_multiplier,
        inputs=plain.inputs,
        outputs=plain.outputs,
    )
    model.compile(
        optimizer=keras.optimizers.SGD(terms.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return Loop(terms, model, dict(zip(terms.task.parameters, model.trainable_variables, strict=True)))
