"""The tasks' networks of Keras' own layers, put together by its functional interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import keras
import numpy as np
from keras import ops

from frameworks._shared import channels_last
from harness import tasks
from harness.contract import Unsupported
from harness.network import LORA_SCALE, walk
from harness.tasks import NOT_OWN, TOKEN_LOSS, Task

CANONICAL = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "scale": "weight",
    "beta": "bias",
    "bias": "bias",
}
"""Last part of a parameter's canonical name by what Keras calls the variable."""

CANONICAL_OF_LSTM = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh", "bias": "bias"}

Tensor = Any
"""A symbolic tensor of Keras."""


def network(task: Task) -> keras.Model:
    """Return the task's network, in which nothing else is trained than what the task trains.

    Raises:
        Unsupported: Keras' layers do not have one of the task's.
    """
    inputs = keras.Input(channels_last.input_shape(task), dtype=task.input_dtype)
    tables = _tables(task)
    outputs = reduce(lambda value, layer: _apply(layer, value, tables), task.layers, inputs)
    model = keras.Model(inputs, outputs)
    for name, variable in variables(task, model).items():
        variable.trainable = name in task.trained_parameters
    return model


def variables(task: Task, model: keras.Model) -> dict[str, keras.Variable]:
    """Return the variables of :func:`network` by their canonical names, in the order of ``task.parameters``."""
    found = {}
    for layer in model.layers:
        names = CANONICAL_OF_LSTM if isinstance(layer, keras.layers.LSTM) else CANONICAL
        for name, part in _parts(layer):
            for variable in part.weights:
                is_adapter = name.endswith((".lora_a", ".lora_b"))
                found[name if is_adapter else f"{name}.{names[variable.name]}"] = variable
    return {name: found[name] for name in task.parameters}


def give(task: Task, model: keras.Model, initial: Mapping[str, np.ndarray]) -> None:
    """Put canonical weights into the variables of :func:`network`."""
    values = channels_last.parameters(task, initial)
    for name, variable in variables(task, model).items():
        variable.assign(values[name].reshape(variable.shape))


def loss(task: Task) -> keras.losses.Loss:
    """Return the task's loss, whose mean over a batch is that of the examples' own losses."""
    if task.loss == TOKEN_LOSS:
        return MeanOverOwnTokens()
    if task.loss == "binary_cross_entropy":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class MeanOverOwnTokens(keras.losses.Loss):
    """An example's own loss is the mean over its own tokens.

    Keras' ``SparseCategoricalCrossentropy(ignore_class=-1)`` takes the mean over all of a batch's, which is the same
    for batches of one alone.
    """

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """[B, T] and [B, T, words] to [B]."""
        labels = ops.cast(y_true, "int32")
        is_own = ops.cast(ops.not_equal(labels, NOT_OWN), y_pred.dtype)
        chosen = ops.take_along_axis(y_pred, ops.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        summed = ops.sum((ops.logsumexp(y_pred, axis=-1) - chosen) * is_own, axis=-1)
        return summed / ops.maximum(ops.sum(is_own, axis=-1), 1)


class Rows(keras.layers.Layer):
    """Adds rows of a trained table to [B, T, dim]: one each to the positions, or the first one to all of them."""

    def __init__(self, rows: int, used: int, name: str) -> None:
        super().__init__(name=name)
        self.rows, self.used = rows, used

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make the table."""
        self.embeddings = self.add_weight(shape=(self.rows, input_shape[-1]), name="embeddings")

    def call(self, x: Tensor) -> Tensor:
        """[B, T, dim] to [B, T, dim]."""
        return x + self.embeddings[: self.used]


def _parts(layer: keras.layers.Layer) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yield (canonical name, layer) of a layer, or of those inside of it that have the variables."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        yield f"{layer.name}.query", layer.query_dense
        yield f"{layer.name}.key", layer.key_dense
        yield f"{layer.name}.value", layer.value_dense
        yield f"{layer.name}.output", layer.output_dense
    else:
        yield layer.name, layer


def _tables(task: Task) -> dict[str, keras.layers.Embedding]:
    """Return the embeddings by their names."""
    found = list(walk(task.layers))
    tied = {layer.table for layer in found if isinstance(layer, tasks.TiedHead)}
    kinds = {True: keras.layers.ReversibleEmbedding, False: keras.layers.Embedding}
    return {
        layer.name: kinds[layer.name in tied](layer.num_embeddings, layer.dim, name=layer.name)
        for layer in found
        if isinstance(layer, tasks.Embedding)
    }


def _apply(layer: tasks.Layer, x: Tensor, tables: Mapping[str, keras.layers.Embedding]) -> Tensor:
    """Return what the layer makes of ``x``; ``tables``: the embeddings by their names."""
    match layer:
        case tasks.Embedding(name):
            return tables[name](x)
        case tasks.TiedHead(table):
            return tables[table](x, reverse=True)
        case tasks.Residual(layers, shortcut):
            body, beside = (
                reduce(lambda value, inner: _apply(inner, value, tables), part, x) for part in (layers, shortcut)
            )
            return keras.layers.Add()([beside, body])
        case tasks.Linear():
            return _linear(layer, x)
        case tasks.Conv2d():
            return _convolved(layer, x)
        case tasks.Attention():
            return _attention(layer, x)
        case tasks.SwiGLU():
            gate, up, down = layer.maps
            return _linear(down, ops.silu(_linear(gate, x)) * _linear(up, x))
        case tasks.Bags():
            return _bags(layer, x, tables)
    return _layer(layer, x.shape)(x)


def _layer(layer: tasks.Layer, shape: tuple[int | None, ...]) -> keras.layers.Layer:
    """Return what Keras has for a layer; ``shape``: of its inputs."""
    match layer:
        case tasks.SpaceAsTime():
            return keras.layers.Reshape((-1, shape[-1]))
        case tasks.Positions(name, length, _):
            return Rows(length, shape[1] or length, name)
        case tasks.TokenTypes(name, kinds, _):
            return Rows(kinds, 1, name)
        case tasks.GroupNorm(name, groups, _, eps):
            return keras.layers.GroupNormalization(groups, epsilon=eps, name=name)
        case tasks.LayerNorm(name, _, eps):
            return keras.layers.LayerNormalization(epsilon=eps, name=name)
        case tasks.RMSNorm(name, _, eps):
            return keras.layers.RMSNormalization(epsilon=eps, name=name)
        case tasks.SiLU():
            return keras.layers.Activation(keras.activations.silu)
        case tasks.GELU(exact):
            return keras.layers.Activation(lambda x: keras.activations.gelu(x, approximate=not exact))
    return _layer_of_2021(layer)


def _layer_of_2021(layer: tasks.Layer) -> keras.layers.Layer:
    match layer:
        case tasks.Lstm(name, _, hidden):
            return keras.layers.LSTM(hidden, return_sequences=True, name=name)
        case tasks.ReLU():
            return keras.layers.ReLU()
        case tasks.MaxPool2d(kernel, stride):
            return keras.layers.MaxPooling2D(kernel, stride)
        case tasks.AvgPool2d(kernel, stride):
            return keras.layers.AveragePooling2D(kernel, stride)
        case tasks.Flatten():
            return keras.layers.Flatten()
        case tasks.MeanOverSpace():
            return keras.layers.GlobalAveragePooling2D()
        case tasks.MeanOverTime():
            return keras.layers.GlobalAveragePooling1D()
    raise Unsupported(f"its adapter has no Keras layer for {type(layer).__name__}.")


def _linear(layer: tasks.Linear, x: Tensor) -> Tensor:
    """A layer, and the adapter beside it as two of them.

    Keras' own ``enable_lora`` adds the adapter's product to the kernel and gives the same, but then each example's
    gradient of a whole kernel is formed first (NOTES.md).
    """
    outputs = keras.layers.Dense(layer.out_features, use_bias=layer.bias, name=layer.name)(x)
    if not layer.lora:
        return outputs
    narrow = keras.layers.Dense(layer.lora, use_bias=False, name=f"{layer.name}.lora_a")(x)
    beside = keras.layers.Dense(layer.out_features, use_bias=False, name=f"{layer.name}.lora_b")(narrow)
    return outputs + LORA_SCALE * beside


def _convolved(layer: tasks.Conv2d, x: Tensor) -> Tensor:
    """Return the convolution; Keras' padding ``same`` where it is the task's: it puts an odd row behind alone."""
    size, kernel, stride = x.shape[1], layer.kernel, layer.stride
    is_same = (-(-size // stride) - 1) * stride + kernel - size == 2 * layer.padding
    if layer.padding and not is_same:
        x = keras.layers.ZeroPadding2D(layer.padding)(x)
    padding = "same" if layer.padding and is_same else "valid"
    return keras.layers.Conv2D(layer.out_channels, kernel, stride, padding, name=layer.name)(x)


def _attention(layer: tasks.Attention, x: Tensor) -> Tensor:
    """Keras' layer of it, or where there are adapters, rotary positions or fewer keys than queries its operation.

    Keras' layer with fewer keys turns no positions, and its adapters are of another shape: one factor for each head.
    """
    if not (layer.lora or layer.rotary or layer.groups != layer.heads):
        attend = keras.layers.MultiHeadAttention(layer.heads, layer.head_dim, use_bias=layer.bias, name=layer.name)
        return attend(x, x, use_causal_mask=layer.causal)
    split = [keras.layers.Reshape((x.shape[1], -1, layer.head_dim))(_linear(part, x)) for part in layer.maps[:3]]
    query, key, value = split
    if layer.rotary:
        query, key = _rotated(layer, query), _rotated(layer, key)
    mixed = ops.dot_product_attention(query, key, value, is_causal=layer.causal)
    return _linear(layer.maps[3], keras.layers.Reshape((x.shape[1], -1))(mixed))


def _rotated(layer: tasks.Attention, x: Tensor) -> Tensor:
    """[B, T, heads, head] with the pairs (first half, second half) of every head turned by their angles."""
    half = layer.head_dim // 2
    angles = np.arange(x.shape[1])[:, None] * layer.rotary ** (-np.arange(half) / half)
    cos, sin = (np.asarray(f(angles), np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _bags(layer: tasks.Bags, x: Tensor, tables: Mapping[str, keras.layers.Embedding]) -> Tensor:
    """Integers [B, counts + fields * ids] to [B, counts + fields * dim]."""
    found = [ops.log1p(ops.cast(x[:, : layer.counts], "float32"))]
    for i, table in enumerate(layer.maps):
        start = layer.counts + i * layer.ids
        found.append(ops.sum(tables[table.name](x[:, start : start + layer.ids]), axis=1))
    return keras.layers.Concatenate()(found)
