"""The loops of the libraries on Keras, each in our own words after the page that its function names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from frameworks._shared import channels_last
from harness.tasks import Task
from tests.frameworks.own_examples.terms import Example, Terms


class Loop(Example):
    """``train_on_batch`` of a compiled model: one step of what the pages do by ``fit``, without what ``fit`` does
    around an epoch."""

    def __init__(self, terms: Terms, model: Any) -> None:
        self.task, self.model = terms.task, model
        self.batch = channels_last.data(terms.task, terms.x), terms.y

    def draw(self) -> Any:
        return self.batch

    def step(self, batch: Any) -> None:
        self.model.train_on_batch(*batch)

    def parameters(self) -> Mapping[str, np.ndarray]:
        values = zip(self.task.parameters, self.model.trainable_variables, strict=True)
        return channels_last.canonical(self.task, {name: np.array(value) for name, value in values})


def _give(model: Any, task: Task, initial: Mapping[str, np.ndarray]) -> None:
    values = channels_last.parameters(task, initial)
    for name, variable in zip(task.parameters, model.trainable_variables, strict=True):
        variable.assign(values[name])


def keras_non_private(terms: Terms) -> Example:
    """The loop without DP, beside which :mod:`lines` counts what a user changes: compile, then fit."""
    import keras

    from frameworks.keras.networks import network

    model = network(terms.task)
    model.compile(
        optimizer=keras.optimizers.SGD(terms.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    _give(model, terms.task, terms.initial)
    return Loop(terms, model)


def keras_make_private(terms: Terms) -> Example:
    """JAX Privacy's page on Keras: DPKerasConfig, make_private, compile, fit."""
    import keras
    from jax_privacy import keras_api

    from frameworks.keras.networks import network

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
    model.compile(
        optimizer=keras.optimizers.SGD(terms.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    _give(model, terms.task, terms.initial)
    return Loop(terms, model)


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
    _give(model, terms.task, terms.initial)
    return Loop(terms, model)
