"""DP-SGD by TensorFlow Privacy: its DPModel or its vectorised Keras optimiser, fed with the harness's batches."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import numpy as np
import tensorflow as tf

from frameworks._shared import channels_last
from frameworks._shared.tensorflow import models as tf_models
from harness import tasks
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task

# TensorFlow Privacy 0.9's package import asks for the Estimator interface, which TensorFlow no longer has; its own
# switch leaves that out, and the modules that are wanted are imported by name.
sys.skip_tf_privacy_import = True
from tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib import compute_dp_sgd_privacy  # noqa: E402
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry  # noqa: E402
from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPModel  # noqa: E402
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (  # noqa: E402
    VectorizedDPKerasSGDOptimizer,
)

keras = tf.keras
Train = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], None]


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``dpmodel``, ``optimizer`` or ``non-private``."""
    return Tfp(variant)


class Lookup(keras.layers.Layer):
    """An embedding by ``tf.gather``: Keras' own fails inside ``tf.vectorized_map``, where DPModel puts it."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = self.add_weight("table", (rows, dim))

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, tokens)


class TimeLoop(keras.layers.Layer):
    """An LSTM [B, T, features] -> [B, T, hidden] as a loop over Keras' own cell: ``tf.vectorized_map`` cannot
    differentiate Keras' recurrent layers by their input, and unrolled, 256 time steps take minutes to trace."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = keras.layers.LSTMCell(hidden)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        length = x.shape[1]
        start = tf.zeros([tf.shape(x)[0], self.hidden])
        outputs = tf.TensorArray(tf.float32, length, element_shape=[None, self.hidden])

        def turn(t, h, c, outputs):
            y, (h, c) = self.cell(x[:, t], (h, c))
            return t + 1, h, c, outputs.write(t, y)

        state = (0, start, start, outputs)
        *_, outputs = tf.while_loop(lambda t, *_: t < length, turn, state, maximum_iterations=length)
        return tf.transpose(outputs.stack(), [1, 0, 2])


def bags(layer: tasks.Bags, vectorised: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the tables of a recommender as layers of their own, which the library's registry knows."""
    lookup = Lookup if vectorised else keras.layers.Embedding
    tables = [lookup(table.num_embeddings, table.dim) for table in layer.maps]

    def call(x: tf.Tensor) -> tf.Tensor:
        counts, fields = x[:, : layer.counts], x[:, layer.counts :]
        found = [tf.math.log1p(tf.cast(counts, tf.float32))]
        for i, table in enumerate(tables):
            found.append(tf.reduce_sum(table(fields[:, i * layer.ids : (i + 1) * layer.ids]), 1))
        return tf.concat(found, 1)

    return call


def layers(task: Task, vectorised: bool) -> list[Callable[[tf.Tensor], tf.Tensor]]:
    """The task's network as Keras layers; trained variables come in the order of ``task.parameters``."""
    found = []
    for layer in task.layers:
        match layer:
            case tasks.Conv2d(_, _, channels, kernel, stride, padding):
                found.append(keras.layers.Conv2D(channels, kernel, stride, "same" if padding else "valid"))
            case tasks.Linear(_, _, size):
                found.append(keras.layers.Dense(size))
            case tasks.Embedding(_, rows, dim):
                found.append(Lookup(rows, dim) if vectorised else keras.layers.Embedding(rows, dim))
            case tasks.Bags():
                found.append(bags(layer, vectorised))
            case tasks.Lstm(_, _, hidden):
                found.append(TimeLoop(hidden) if vectorised else keras.layers.LSTM(hidden, return_sequences=True))
            case tasks.ReLU():
                found.append(keras.layers.ReLU())
            case tasks.MaxPool2d(kernel, stride):
                found.append(keras.layers.MaxPool2D(kernel, stride))
            case tasks.AvgPool2d(kernel, stride):
                found.append(keras.layers.AvgPool2D(kernel, stride))
            case tasks.Flatten():
                found.append(keras.layers.Flatten())
            case tasks.MeanOverSpace():
                found.append(keras.layers.GlobalAveragePooling2D())
            case tasks.MeanOverTime():
                found.append(keras.layers.GlobalAveragePooling1D())
            case _:
                raise Unsupported(f"there is no Keras layer for the layer {type(layer).__name__}.")
    return found


def network(task: Task, variant: str) -> keras.Model:
    """The task's network as a Keras model."""
    inputs = outputs = keras.Input(channels_last.input_shape(task), dtype=task.input_dtype)
    recurrent = any(isinstance(layer, tasks.Lstm) for layer in task.layers)
    for layer in layers(task, vectorised=variant == "optimizer" or (variant != "non-private" and recurrent)):
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


class Tfp(Adapter):
    """The library divides by the length of the batch; a learning rate of lr * length / B makes that the expected B."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.task: Task | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != (self.variant != "non-private"):
            raise Unsupported(f"The variant {self.variant} is {'not ' * setting.private}private; use the other one.")
        self.device = tf_models.device(setting)
        self.setting = setting
        with tf.device(self.device):
            if task != self.task:
                self.task = task
                self.network = network(task, self.variant)
                self.updates: dict[tuple[float, float, bool], Callable[..., None]] = {}
                self.own: dict[tuple[float, ...], keras.Model] = {}
                self.rate = tf.Variable(0.0, trainable=False)
                self.seed = tf.Variable([0, 0], trainable=False, dtype=tf.int64)
            values = channels_last.parameters(task, initial)
            for name, variable in zip(task.parameters, self.network.trainable_variables, strict=True):
                variable.assign(values[name])
            self.seed.assign([setting.seed, 0])

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        # Keras' binary loss would broadcast labels [B] against one logit each, [B, 1].
        labels = y[:, None] if self.task.loss == "binary_cross_entropy" else y
        self.host = channels_last.data(self.task, x), labels
        self.x, self.y = tf_models.placed(*self.host, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if mask is not None:
            indices, mask = indices[mask], None
        if len(indices) == 0:  # the library would divide by zero, and must add its noise
            indices, mask = np.zeros(1, np.int64), np.zeros(1, bool)
        rate = np.float32(self.setting.learning_rate * len(indices) / self.setting.batch_size)
        with tf.device(self.device):
            kept = [] if mask is None else [tf.constant(mask.astype(np.float32))]
            self._update(bool(kept))(self.x, self.y, tf.constant(indices.astype(np.int32)), tf.constant(rate), *kept)

    def epoch(self, seed: int) -> int:
        """``fit`` on the arrays in host memory: a new order every epoch, the last batch smaller; noise as the library
        draws it."""
        s = self.setting
        key = (s.noise_multiplier, s.max_grad_norm, s.learning_rate)
        with tf.device(self.device):
            is_new = key not in self.own
            if is_new:
                self.own[key] = self._own_model()
            if is_new or not s.private:  # once, as a user does: another time, the noise of `fit` would start again
                keras.utils.set_random_seed(seed)
            self.own[key].fit(*self.host, s.batch_size, verbose=0)
        return -(-len(self.host[1]) // s.batch_size)

    def epsilon(self, steps: int, delta: float) -> float | None:
        s = self.setting
        if steps == 0 or s.noise_multiplier == 0:
            return None
        # The library takes epochs and rounds the number of steps up.
        epochs = (steps - 0.5) * s.batch_size / s.dataset_size
        return float(compute_dp_sgd_privacy(s.dataset_size, s.batch_size, s.noise_multiplier, epochs, delta)[0])

    def synchronize(self) -> None:
        tf.test.experimental.sync_devices()

    def parameters(self) -> Mapping[str, np.ndarray]:
        variables = zip(self.task.parameters, self.network.trainable_variables, strict=True)
        return channels_last.canonical(self.task, {name: value.numpy() for name, value in variables})

    def peak_memory(self) -> Memory:
        return tf_models.peak_memory(self.device)

    def _update(self, masked: bool) -> Callable[..., None]:
        """The step: (all x, all y, rows [k], learning rate, and mask [k] where ``masked``) -> None.

        The library takes sigma and C as numbers when it is traced, so each pair has a function of its own.
        """
        mechanism = (self.setting.max_grad_norm, self.setting.noise_multiplier)
        if (*mechanism, masked) in self.updates:
            return self.updates[*mechanism, masked]
        take = self._optimizer_step if self.variant == "optimizer" else self._train_step
        train = take(*mechanism)

        def update(x, y, rows, rate, mask=None):
            self.seed.assign_add([0, 1])
            with stateless_normals(self.seed):
                train(tf.gather(x, rows), tf.gather(y, rows), mask, rate)

        signature = [
            tf.TensorSpec([None, *channels_last.input_shape(self.task)], self.task.input_dtype),
            tf.TensorSpec([None, *self.host[1].shape[1:]], tf.int32),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ]
        self.updates[*mechanism, masked] = tf.function(update, signature[: 4 + masked], autograph=False)
        return self.updates[*mechanism, masked]

    def _model(self, max_grad_norm: float, noise_multiplier: float) -> keras.Model:
        """The network, or the DPModel around the same layers."""
        inputs, outputs = self.network.inputs, self.network.outputs
        if self.variant == "optimizer" or not self.setting.private:
            return keras.Model(inputs, outputs)
        # With its registry the library needs no per-example gradients where it knows every layer that has weights.
        registry = layer_registry.make_default_layer_registry()
        return DPModel(
            max_grad_norm, noise_multiplier, use_xla=False, layer_registry=registry, inputs=inputs, outputs=outputs
        )

    def _own_model(self) -> keras.Model:
        """As the library's user compiles it for ``fit``."""
        s = self.setting
        model = self._model(s.max_grad_norm, s.noise_multiplier)
        if self.variant == "optimizer":
            optimizer = VectorizedDPKerasSGDOptimizer(
                s.max_grad_norm, s.noise_multiplier, learning_rate=s.learning_rate
            )
            model.compile(optimizer, loss(self.task, reduction="none"))
        else:
            model.compile(keras.optimizers.SGD(s.learning_rate), loss(self.task))
        return model

    def _train_step(self, max_grad_norm: float, noise_multiplier: float) -> Train:
        """The train step of the model."""
        model = self._model(max_grad_norm, noise_multiplier)
        # Keras' legacy SGD adds a repeated row's gradients to the weight one by one, each with its rounding.
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, loss(self.task))

        def train(x, y, mask, rate):
            optimizer.learning_rate.assign(rate)
            model.train_step((x, y) if mask is None else (x, y, mask))

        return train

    def _optimizer_step(self, max_grad_norm: float, noise_multiplier: float) -> Train:
        losses = loss(self.task, reduction="none")
        optimizer = VectorizedDPKerasSGDOptimizer(max_grad_norm, noise_multiplier, learning_rate=self.rate)

        def train(x, y, mask, rate):
            self.rate.assign(rate)
            with tf.GradientTape() as tape:
                each = losses(y, self.network(x, training=True), mask)
            optimizer.minimize(each, self.network.trainable_variables, tape=tape)

        return train


def loss(task: Task, **options: str) -> keras.losses.Loss:
    if task.loss == "binary_cross_entropy":
        return keras.losses.BinaryCrossentropy(from_logits=True, **options)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


@contextlib.contextmanager
def stateless_normals(seed: tf.Tensor) -> Iterator[None]:
    """What the library draws by ``tf.random.normal`` while it is traced comes from a stateless generator keyed by
    ``seed``, so that a step's noise depends on nothing else."""
    draws = itertools.count()

    def normal(shape, mean=0.0, stddev=1.0):
        key = tf.random.experimental.stateless_fold_in(seed, next(draws))
        return tf.random.stateless_normal(shape, key, mean, stddev)

    with mock.patch.object(tf.random, "normal", normal):
        yield
