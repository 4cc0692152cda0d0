"""DP-SGD by ``jax_privacy.keras_api.make_private`` on a Keras 3 model, and that model without DP."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax_privacy import keras_api
from jax_privacy.accounting import analysis

from frameworks._shared import channels_last
from frameworks._shared.jax.adapter import configure, peak_memory
from frameworks._shared.jax.optimizers import constants
from frameworks.keras import networks, optimizers
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task

MICRO_BATCH = {
    "mnist-cnn": None,
    "cifar10-cnn": None,
    "wrn-16-2": None,
    "wrn-16-4": None,
    "vit": 4,
    "small-vit": 4,
}
MICRO_BATCH_ELSEWHERE = 1
"""``microbatch_size`` on a CPU, tuned per task (NOTES.md); None, and any other platform, takes the whole batch."""

State = tuple[list[jax.Array], list[jax.Array], list[jax.Array], list[jax.Array]]
"""A Keras model's variables: trained, not trained, the optimizer's, the metrics'."""


def create(variant: str) -> Adapter:
    """Return the adapter of ``variant``, ``make-private`` or ``non-private``."""
    return Keras(variant)


def _traced(config: keras_api.DPKerasConfig, bound: jax.Array, multiplier: jax.Array) -> keras_api.DPKerasConfig:
    """Return ``config`` with the values of this call. Its own checks compare numbers, which these are not yet."""
    config = copy.copy(config)
    object.__setattr__(config, "clipping_norm", bound)
    object.__setattr__(config, "noise_multiplier", multiplier)
    return config


class Keras(Adapter):
    """The model's own ``train_step``, which Keras compiles in ``fit``, compiled here over data that lie on the device.

    Weights, the optimizer's memory and the key of the noise are variables of the model; C, sigma and the optimizer's
    constants are arguments of the compiled step, so that another setting of the same B needs no compilation.
    """

    optimizers = optimizers.NAMES

    def __init__(self, variant: str) -> None:
        self.private = variant != "non-private"
        self.task: Task | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != self.private:
            raise Unsupported(f"This variant is {'not ' * setting.private}private; use the other one.")
        self.device = configure(setting)
        if task != self.task:
            self.task, self.models = task, {}
        self.setting = setting
        kind = setting.batch_size, setting.optimizer.name
        if kind not in self.models:
            model = self._model()
            self.models[kind] = model, jax.jit(self._compiled(model), donate_argnums=0)
        self.model, self.compiled = self.models[kind]
        bounds = np.array((setting.max_grad_norm, setting.noise_multiplier), np.float32)
        self.hyper = np.concatenate([bounds, constants(setting)])
        networks.give(task, self.model, initial)
        if self.private:
            noise_key, steps = self.model.non_trainable_variables[:2]
            noise_key.assign(jax.random.PRNGKey(setting.seed))
            steps.assign(np.zeros(1, np.uint32))
        self.state = self._state()

    def _model(self) -> keras.Model:
        setting, model = self.setting, networks.network(self.task)
        if self.private:
            config = keras_api.DPKerasConfig(
                epsilon=math.inf,
                delta=1e-5,
                clipping_norm=setting.max_grad_norm,
                batch_size=setting.batch_size,
                gradient_accumulation_steps=1,
                train_steps=2**31 - 1,
                train_size=setting.dataset_size,
                poisson_sampling_in_fit=True,
                rescale_to_unit_norm=False,
                microbatch_size=self._micro_batch(),
                seed=setting.seed,
            )
            model = keras_api.make_private(model, config)
        model.compile(optimizers.optimizer(setting), networks.loss(self.task))
        model.optimizer.build(model.trainable_variables)
        shape = (1, *channels_last.input_shape(self.task))
        model._symbolic_build(data_batch=(np.zeros(shape, self.task.input_dtype), np.zeros(self._labels(1), np.int32)))
        return model

    def _micro_batch(self) -> int | None:
        if self.setting.device != "cpu":
            return None
        tuned = MICRO_BATCH.get(self.task.name, MICRO_BATCH_ELSEWHERE)
        return tuned and min(self.setting.batch_size, tuned)

    def _labels(self, rows: int) -> tuple[int, ...]:
        """Keras' binary loss would broadcast labels [B] against one logit each, [B, 1]."""
        return (rows, 1) if self.task.loss == "binary_cross_entropy" else (rows, *self.task.label_shape)

    def _compiled(self, model: keras.Model) -> Any:
        largest, size, private = self._micro_batch(), self.setting.batch_size, self.private

        def step(state: State, x: jax.Array, y: jax.Array, rows: jax.Array, mask: jax.Array, hyper: jax.Array) -> State:
            bound, multiplier, *given = hyper
            optimizers.give(model.optimizer, given)
            if private:
                model._dp_params = _traced(model._dp_params, bound, multiplier)
            if private and largest is not None:
                excess = -len(rows) % largest
                rows, mask = jnp.pad(rows, (0, excess)), jnp.pad(mask, (0, excess))
            weights = mask.astype(np.float32)
            # Without DP the loss is a mean over the rows there are; the update divides by B.
            weights = weights if private else weights * (len(rows) / size)
            _, state = model.train_step(state, (x[rows], y[rows], weights))
            return state

        return step

    def _state(self) -> State:
        """The model's variables in memory of their own, which a step may take; put to the device, as a step's are, for
        else the first step would be compiled for itself."""
        model = self.model
        found = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        return tuple(
            [jax.device_put(variable.value, self.device, may_alias=False) for variable in kind] for kind in found
        )

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.host = channels_last.data(self.task, x), y.reshape(self._labels(len(y)))
        self.x, self.y = (jax.device_put(value, self.device) for value in self.host)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        mask = np.ones(len(indices), bool) if mask is None else mask
        if len(indices) == 0:  # there is noise all the same
            indices, mask = np.zeros(1, np.int64), np.zeros(1, bool)
        self.state = self.compiled(self.state, self.x, self.y, indices.astype(np.int32), mask, self.hyper)

    def synchronize(self) -> None:
        jax.block_until_ready(self.state)

    def parameters(self) -> Mapping[str, np.ndarray]:
        variables = self.model.trainable_variables + self.model.non_trainable_variables
        values = dict(zip(map(id, variables), self.state[0] + self.state[1], strict=True))
        found = networks.variables(self.task, self.model).items()
        return channels_last.canonical(self.task, {name: np.array(values[id(variable)]) for name, variable in found})

    def peak_memory(self) -> Memory:
        return peak_memory(self.device)

    def epsilon(self, steps: int, delta: float) -> float | None:
        if not self.private:
            return None
        s = self.setting
        params = analysis.DpParams(
            noise_multipliers=s.noise_multiplier, batch_size=s.batch_size, num_samples=s.dataset_size, delta=delta
        )
        return float(keras_api.DPKerasConfig._accountant.compute_epsilon(steps, params))
