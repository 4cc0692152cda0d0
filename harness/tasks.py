"""The tasks as data: networks, canonical weights and layouts, training settings, and the physical floor of each.

Facts from the public suite that the paper builds on. Layouts are PyTorch's: NCHW images, OIHW kernels, [out, in]
matrices, LSTM gates in the order i, f, g, o with ONE bias vector. Standard library and numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Conv2d:
    """2-D convolution with bias; weight [out, in, kernel, kernel], zero padding."""

    name: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True)
class Linear:
    """y = W x + b; weight [out, in]."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Embedding:
    """Token ids [T] to vectors [T, dim]; weight [num_embeddings, dim]. Every row is trained, row 0 included."""

    name: str
    num_embeddings: int
    dim: int


@dataclass(frozen=True)
class Lstm:
    """One-layer LSTM over [T, in], zero initial state, returns [T, hidden].

    weight_ih [4H, in], weight_hh [4H, H], bias [4H] (one vector), gate order i, f, g, o.
    """

    name: str
    in_features: int
    hidden: int


@dataclass(frozen=True)
class ReLU:
    """max(x, 0)."""


@dataclass(frozen=True)
class MaxPool2d:
    """Maximum over windows, no padding."""

    kernel: int
    stride: int


@dataclass(frozen=True)
class AvgPool2d:
    """Mean over windows, no padding."""

    kernel: int
    stride: int


@dataclass(frozen=True)
class Flatten:
    """[C, H, W] to [C*H*W]."""


@dataclass(frozen=True)
class MeanOverSpace:
    """[C, H, W] to [C]."""


@dataclass(frozen=True)
class MeanOverTime:
    """[T, d] to [d]; padding positions count."""


Layer = Conv2d | Linear | Embedding | Lstm | ReLU | MaxPool2d | AvgPool2d | Flatten | MeanOverSpace | MeanOverTime


@dataclass(frozen=True)
class Task:
    """What is trained: network, data set, loss and size. ``loss`` is ``cross_entropy`` on logits [classes], or
    ``binary_cross_entropy`` on one logit with labels in {0, 1}. Each example's own loss; no mean inside."""

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

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Canonical parameter names and shapes, in the order of the layers."""
        return {name: shape for layer in self.layers for name, shape in _parameter_shapes(layer).items()}

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def forward_flops(self) -> int:
        """Multiply-adds count as two; contractions only, of one example's forward pass."""
        return sum(flops for flops, _ in self._walk())

    @property
    def training_flops(self) -> int:
        """Floor of one example's forward and backward: 3 x forward, less the input gradient of the first layer with
        weights, which nobody needs (an embedding multiplies nothing)."""
        forward = [flops for flops, _ in self._walk()]
        first = next((f for f in forward if f), 0)
        first_is_fed_by_data = not isinstance(self.layers[0], Embedding)
        return 3 * sum(forward) - (first if first_is_fed_by_data else 0)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the float32 outputs of all layers for one example: what must move through memory at least once
        forward and once backward."""
        return FLOAT_BYTES * sum(size for _, size in self._walk())

    @property
    def weight_bytes(self) -> int:
        return FLOAT_BYTES * self.parameter_count

    def _walk(self) -> list[tuple[int, int]]:
        """(forward FLOPs, output elements) of every layer."""
        shape: tuple[int, ...] = self.input_shape
        costs = []
        for layer in self.layers:
            flops, shape = _cost(layer, shape)
            costs.append((flops, math.prod(shape)))
        return costs


def _parameter_shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    match layer:
        case Conv2d(name, c_in, c_out, k):
            return {f"{name}.weight": (c_out, c_in, k, k), f"{name}.bias": (c_out,)}
        case Linear(name, n_in, n_out):
            return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}
        case Embedding(name, rows, dim):
            return {f"{name}.weight": (rows, dim)}
        case Lstm(name, n_in, h):
            return {f"{name}.weight_ih": (4 * h, n_in), f"{name}.weight_hh": (4 * h, h), f"{name}.bias": (4 * h,)}
    return {}


def _cost(layer: Layer, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(forward FLOPs, output shape) of a layer on one example of ``shape``."""

    def window(size: int, kernel: int, stride: int, padding: int = 0) -> int:
        return (size + 2 * padding - kernel) // stride + 1

    match layer:
        case Conv2d(_, c_in, c_out, k, stride, padding):
            out = (c_out, window(shape[1], k, stride, padding), window(shape[2], k, stride, padding))
            return 2 * c_in * k * k * math.prod(out), out
        case Linear(_, n_in, n_out):
            return 2 * n_in * n_out * math.prod(shape[:-1]), (*shape[:-1], n_out)
        case Embedding(_, _, dim):
            return 0, (*shape, dim)
        case Lstm(_, n_in, h):
            return 2 * shape[0] * 4 * h * (n_in + h), (shape[0], h)
        case MaxPool2d(k, stride) | AvgPool2d(k, stride):
            return 0, (shape[0], window(shape[1], k, stride), window(shape[2], k, stride))
        case Flatten():
            return 0, (math.prod(shape),)
        case MeanOverSpace():
            return 0, (shape[0],)
        case MeanOverTime():
            return 0, (shape[1],)
    return 0, shape


def initial_parameters(task: Task, seed: int) -> dict[str, np.ndarray]:
    """Canonical float32 starting weights, the same for every framework: uniform in +-1/sqrt(fan_in) (an LSTM: in
    +-1/sqrt(hidden)), standard normal embeddings."""
    rng = np.random.default_rng([seed, 0x1A17])
    values: dict[str, np.ndarray] = {}
    for layer in task.layers:
        for name, shape in _parameter_shapes(layer).items():
            if isinstance(layer, Embedding):
                value = rng.standard_normal(shape)
            else:
                value = rng.uniform(-1.0, 1.0, shape) / math.sqrt(_fan_in(layer))
            values[name] = value.astype(np.float32)
    return values


def _fan_in(layer: Layer) -> int:
    match layer:
        case Conv2d(_, c_in, _, k):
            return c_in * k * k
        case Linear(_, n_in, _):
            return n_in
        case Lstm(_, _, hidden):
            return hidden
    raise TypeError(f"{type(layer).__name__} has no fan-in.")


def check_parameters(task: Task, values: Mapping[str, np.ndarray]) -> str | None:
    """One sentence about the first way in which ``values`` are not this task's weights, or None."""
    expected = task.parameters
    if set(values) != set(expected):
        return f"{task.name}: parameter names are {sorted(values)}, the task has {sorted(expected)}."
    for name, shape in expected.items():
        if tuple(values[name].shape) != shape:
            return f"{task.name}: {name} has shape {tuple(values[name].shape)}, the task has {shape}."
    return None


VOCABULARY = 10_004
TOKENS = 256


def _cifar_layers() -> tuple[Layer, ...]:
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    layers: list[Layer] = []
    for i, (c_in, c_out) in enumerate(widths):
        layers += [Conv2d(f"conv{i + 1}", c_in, c_out, 3, 1, 1), ReLU()]
        if i % 2:
            layers.append(AvgPool2d(2, 2))
    return (
        *layers,
        Conv2d("conv7", 128, 256, 3, 1, 1),
        ReLU(),
        Conv2d("conv8", 256, 10, 3, 1, 1),
        MeanOverSpace(),
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="mnist-cnn",
            title="MNIST CNN",
            dataset="mnist",
            input_shape=(1, 28, 28),
            input_dtype="float32",
            classes=10,
            loss="cross_entropy",
            layers=(
                Conv2d("conv1", 1, 16, 8, 2, 3),
                ReLU(),
                MaxPool2d(2, 1),
                Conv2d("conv2", 16, 32, 4, 2, 0),
                ReLU(),
                MaxPool2d(2, 1),
                Flatten(),
                Linear("fc1", 512, 32),
                ReLU(),
                Linear("fc2", 32, 10),
            ),
            train_size=60_000,
            test_size=10_000,
        ),
        Task(
            name="cifar10-cnn",
            title="CIFAR-10 CNN",
            dataset="cifar10",
            input_shape=(3, 32, 32),
            input_dtype="float32",
            classes=10,
            loss="cross_entropy",
            layers=_cifar_layers(),
            train_size=50_000,
            test_size=10_000,
        ),
        Task(
            name="imdb-embedding",
            title="IMDb embedding",
            dataset="imdb",
            input_shape=(TOKENS,),
            input_dtype="int32",
            classes=2,
            loss="cross_entropy",
            layers=(Embedding("embedding", VOCABULARY, 16), MeanOverTime(), Linear("fc", 16, 2)),
            train_size=25_000,
            test_size=25_000,
        ),
        Task(
            name="imdb-lstm",
            title="IMDb LSTM",
            dataset="imdb",
            input_shape=(TOKENS,),
            input_dtype="int32",
            classes=2,
            loss="cross_entropy",
            layers=(
                Embedding("embedding", VOCABULARY, 100),
                Lstm("lstm", 100, 100),
                MeanOverTime(),
                Linear("fc", 100, 2),
            ),
            train_size=25_000,
            test_size=25_000,
        ),
        Task(
            name="logreg",
            title="Logistic regression on Adult",
            dataset="adult",
            input_shape=(104,),
            input_dtype="float32",
            classes=2,
            loss="binary_cross_entropy",
            layers=(Linear("fc", 104, 1),),
            train_size=30_162,
            test_size=15_060,
            in_paper=False,
        ),
        Task(
            name="ffnn",
            title="Feed-forward network on Adult",
            dataset="adult",
            input_shape=(104,),
            input_dtype="float32",
            classes=2,
            loss="cross_entropy",
            layers=(Linear("fc1", 104, 50), ReLU(), Linear("fc2", 50, 2)),
            train_size=30_162,
            test_size=15_060,
            in_paper=False,
        ),
    )
}

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_paper)
PAPER_BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
