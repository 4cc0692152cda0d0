"""A task as data: its network, starting weights, loss, training settings, and its physical floor.

Standard library and numpy only; adapters import all of it from :mod:`harness.tasks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cache
from hashlib import sha256
from inspect import getsource
from typing import Any

import numpy as np

from harness.network import (
    LORA_SCALE,
    Bags,
    Embedding,
    GroupNorm,
    Layer,
    LayerNorm,
    Product,
    RMSNorm,
    TiedHead,
    Views,
    cost,
    fan_in,
    parameter_shapes,
    walk,
)
from harness.optimizer import PLAIN, Optimizer

FLOAT_BYTES = 4
NORMS = GroupNorm | LayerNorm | RMSNorm
TOKEN_LOSS = "token_cross_entropy"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
PRECISION_BYTES = {FLOAT32: 4, BFLOAT16: 2}
"""Of a value that a product puts out, by the precision of the products."""
NOT_OWN = -1
"""Label of a position that is none of an example's own tokens: padding, or a prompt."""


@dataclass(frozen=True)
class Task:
    """A task: network, data set, loss and size. ``loss`` is ``cross_entropy`` on logits [classes],
    ``binary_cross_entropy`` on one logit with labels in {0, 1}, or ``token_cross_entropy`` on logits [T, classes] with
    labels [T]: the mean over the positions whose label is not NOT_OWN, zero where there are none. Each example's own
    loss; no mean over examples inside.

    ``trained``: patterns (as of file names) of the parameters that training changes; the others are frozen.
    ``initial_deviation``: of the normal starting weights of all matrices (transformers: 0.02), with zeros for biases
    and for lora_b; None: uniform by fan-in. Norms start with ones and zeros.
    ``pretrained``: whether training starts from published weights, which the data set brings along
    (:mod:`harness.data.pretrained`); what they do not name, such as a head, starts as ``initial_deviation`` says.
    ``judged_as``: the task of the gate that is judged in its place, where the gate needs more memory and time than two
    cores have: it holds some forty steps of noise on all trained parameters at once. "": itself.
    ``precision``: of what goes into the products of the forward and the backward pass, and comes out of them. Weights,
    losses, norms, clipped sums, noise and the optimizer are float32 whatever it is."""

    name: str
    title: str
    dataset: str
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    loss: str
    layers: tuple[Layer, ...]
    train_size: int
    test_size: int
    learning_rate: float = 0.15
    in_paper: bool = True
    optimizer: Optimizer = PLAIN
    trained: tuple[str, ...] = ("*",)
    initial_deviation: float | None = None
    pretrained: bool = False
    judged_as: str = ""
    precision: str = FLOAT32

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Canonical parameter names and shapes, frozen ones included, in the order of the layers."""
        return {name: shape for layer in walk(self.layers) for name, shape in parameter_shapes(layer).items()}

    @property
    def trained_parameters(self) -> dict[str, tuple[int, ...]]:
        """Those that training changes: over them an example's gradient is clipped, and they alone get noise."""
        return {n: s for n, s in self.parameters.items() if any(fnmatch(n, pattern) for pattern in self.trained)}

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def trained_count(self) -> int:
        return sum(math.prod(shape) for shape in self.trained_parameters.values())

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Return the shape of one example's labels."""
        return self.input_shape if self.loss == TOKEN_LOSS else ()

    @property
    def views(self) -> int:
        """Return how many rows an example has, whose gradients are averaged before they are clipped."""
        return self.layers[0].count if isinstance(self.layers[0], Views) else 1

    @property
    def tokens(self) -> int | None:
        """Positions of one example, padding included; None where inputs are not tokens."""
        return self.input_shape[0] if isinstance(self.layers[0], Embedding) else None

    @property
    def trains_tied_table(self) -> bool:
        """Whether a trained table has two uses."""
        tables = {f"{layer.table}.weight" for layer in walk(self.layers) if isinstance(layer, TiedHead)}
        return bool(tables & self.trained_parameters.keys())

    @property
    def forward_flops(self) -> int:
        """Multiply-adds count as two; contractions only, of one example's forward pass."""
        return sum(product.flops for product in self._walk()[0])

    @property
    def training_flops(self) -> int:
        """Floor of one example's forward and backward: 3 x forward, less the gradients of frozen matrices and the
        input gradient of the first layer with weights, which nobody needs (an embedding multiplies nothing)."""
        products, trained = self._walk()[0], self.trained_parameters
        first_is_fed_by_data = not isinstance(self.layers[0], Embedding | Bags)
        first = products[0].flops if products and first_is_fed_by_data else 0
        return sum(p.flops * (3 if p.parameter is None or p.parameter in trained else 2) for p in products) - first

    @property
    def activation_bytes(self) -> int:
        """Bytes of the outputs of all layers for one example, in the task's precision: what must move through memory at
        least once forward and once backward."""
        return PRECISION_BYTES[self.precision] * self._walk()[1]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, which are float32 in every precision."""
        return FLOAT_BYTES * self.parameter_count

    def _walk(self) -> tuple[list[Product], int]:
        """(contractions, output elements) of all layers."""
        shape: tuple[int, ...] = self.input_shape
        products: list[Product] = []
        size = 0
        for layer in self.layers:
            more, elements, shape = cost(layer, shape)
            products, size = products + more, size + elements
        products = [replace(product, flops=self.views * product.flops) for product in products]
        return products, self.views * size


def with_views(task: Task, count: int, name: str) -> Task:
    """Return the task on ``count`` views of every example."""
    title = f"{task.title}, {count} views of an example, clipped as one"
    return replace(task, name=name, title=title, layers=(Views(count), *task.layers))


def initial_parameters(task: Task, seed: int) -> dict[str, np.ndarray]:
    """Canonical float32 random weights, the same for every framework: uniform in +-1/sqrt(fan_in) (an LSTM: in
    +-1/sqrt(hidden)), standard normal embeddings, ones and zeros for norms; or as ``task.initial_deviation`` says.
    Those of a pretrained task are :func:`harness.data.pretrained.starting_parameters`."""
    rng = np.random.default_rng([seed, 0x1A17])
    values: dict[str, np.ndarray] = {}
    for layer in walk(task.layers):
        for name, shape in parameter_shapes(layer).items():
            if task.initial_deviation is not None:
                value = _transformer_start(layer, name, shape, task.initial_deviation, rng)
            elif isinstance(layer, Embedding):
                value = rng.standard_normal(shape)
            elif isinstance(layer, NORMS):
                value = _norm_start(name, shape)
            else:
                value = rng.uniform(-1.0, 1.0, shape) / math.sqrt(fan_in(layer))
            values[name] = value.astype(np.float32)
    return values


def _transformer_start(
    layer: Layer, name: str, shape: tuple[int, ...], deviation: float, rng: np.random.Generator
) -> np.ndarray:
    if isinstance(layer, NORMS):
        return _norm_start(name, shape)
    if name.endswith((".lora_b", ".bias")):
        return np.zeros(shape)
    if name.endswith(".lora_a"):
        return rng.uniform(-1.0, 1.0, shape) / math.sqrt(shape[1])
    return deviation * rng.standard_normal(shape)


def _norm_start(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape) if name.endswith(".bias") else np.ones(shape)


@cache
def definition_hash(task: Task) -> str:
    """Return a hash of what makes the task what it is: its data, shapes, layers, optimizer, and how its weights start.
    No other task is in it, so that one that comes or goes changes no verdict and no record of this one."""
    parts = [_written(task), repr(task.parameters), repr((LORA_SCALE, NOT_OWN)), getsource(type(task.optimizer))]
    parts += [getsource(part) for part in (initial_parameters, _transformer_start, _norm_start)]
    # Adapters may use what a layer's class computes.
    parts += [getsource(kind) for kind in dict.fromkeys(type(layer) for layer in walk(task.layers))]
    if task.initial_deviation is None:
        weighted = [layer for layer in walk(task.layers) if parameter_shapes(layer)]
        parts += [str(fan_in(layer)) for layer in weighted if not isinstance(layer, Embedding | NORMS)]
    return sha256("\0".join(parts).encode()).hexdigest()[:12]


def _written(value: Any) -> str:
    """Return data as text. Fields at their defaults are left out: a new one changes no task that does not use it."""
    if isinstance(value, tuple | list):
        return f"({','.join(map(_written, value))})"
    if not is_dataclass(value):
        return repr(value)
    given = ((f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default)
    return f"{type(value).__name__}({','.join(f'{name}={_written(item)}' for name, item in given)})"


def check_parameters(task: Task, values: Mapping[str, np.ndarray]) -> str | None:
    """One sentence about the first way in which ``values`` are not this task's weights, or None."""
    expected = task.parameters
    if set(values) != set(expected):
        return f"{task.name}: parameter names are {sorted(values)}, the task has {sorted(expected)}."
    for name, shape in expected.items():
        if tuple(values[name].shape) != shape:
            return f"{task.name}: {name} has shape {tuple(values[name].shape)}, the task has {shape}."
    return None
