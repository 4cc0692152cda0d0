"""Layers as data: configuration, shapes, canonical weights, and the bytes that the memory law is made of.

All shapes are those of ONE example and without a batch dimension; arrays carry the batch first, whatever layout a
contestant then gives them. Parameters have the names and layouts of ``torch.nn`` (gate order i, f, g, o and r, z, n).
A layer is trained on the cross-entropy of its output, along ``class_axis``, with random targets of the output's shape;
an example's own loss is the mean over the output's other axes. Standard library and numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from harness.errors import BadInput, did_you_mean

FLOAT_BYTES = 4
TOKEN_BYTES = 8
"""Token ids are int64 on the device, as PyTorch's users have them."""

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Input:
    """One input of a layer. ``vocabulary``: token ids below it; None for normal float32 values. ``is_state``: a
    recurrent layer's initial state, which has no time axis."""

    name: str
    shape: Shape
    vocabulary: int | None = None
    is_state: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * (FLOAT_BYTES if self.vocabulary is None else TOKEN_BYTES)


@dataclass(frozen=True)
class Layer:
    """``options``: what the constructor in ``torch.nn`` of this ``kind`` takes. ``time_first``: contestants on PyTorch
    lay sequences out as (time, batch, features), as the paper did. ``paper_row``: the row of the paper's tables."""

    name: str
    kind: str
    options: Mapping[str, int | bool]
    inputs: tuple[Input, ...]
    output: Shape
    parameters: Mapping[str, Shape] = field(hash=False)
    class_axis: int = -1
    time_first: bool = False
    paper_row: str | None = None

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def parameter_bytes(self) -> int:
        """The memory law's L."""
        return self.parameter_count * FLOAT_BYTES

    @property
    def input_bytes(self) -> int:
        """Bytes of one example, all inputs together."""
        return sum(i.bytes for i in self.inputs)

    @property
    def output_bytes(self) -> int:
        return math.prod(self.output) * FLOAT_BYTES

    @property
    def label_bytes(self) -> int:
        """Targets have the output's shape."""
        return self.output_bytes

    @property
    def example_bytes(self) -> int:
        """The memory law's C: input, label and output of one example."""
        return self.input_bytes + self.label_bytes + self.output_bytes

    @property
    def description(self) -> str:
        """``Linear(in_features=512, out_features=512), input (512)``."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        shapes = ", ".join(f"{i.name} {i.shape}" for i in self.inputs)
        return f"{self.kind}({options}), {shapes}{', time first' if self.time_first else ''}"


def linear(name: str, n_in: int, n_out: int, *axes: int) -> Layer:
    """y = W x + b at every position of ``axes``."""
    return Layer(
        name,
        "Linear",
        {"in_features": n_in, "out_features": n_out},
        (Input("x", (*axes, n_in)),),
        (*axes, n_out),
        {"weight": (n_out, n_in), "bias": (n_out,)},
    )


def conv2d(name: str, channels_in: int, channels_out: int, kernel: int, height: int, width: int, pad: int = 0) -> Layer:
    """Stride 1; classes are channels."""
    out = (channels_out, height + 2 * pad - kernel + 1, width + 2 * pad - kernel + 1)
    return Layer(
        name,
        "Conv2d",
        {"in_channels": channels_in, "out_channels": channels_out, "kernel_size": kernel, "padding": pad},
        (Input("x", (channels_in, height, width)),),
        out,
        {"weight": (channels_out, channels_in, kernel, kernel), "bias": (channels_out,)},
        class_axis=0,
    )


def norm(name: str, kind: str, channels: int, *axes: int, **options: int | bool) -> Layer:
    """Layer, RMS, group and instance norms with one trained scale (and shift, except RMSNorm) per channel."""
    bias = {} if kind == "RMSNorm" else {"bias": (channels,)}
    shape = (channels, *axes)
    return Layer(
        name, kind, options, (Input("x", shape),), shape, {"weight": (channels,), **bias}, class_axis=0 if axes else -1
    )


def embedding(name: str, rows: int, dim: int, *axes: int) -> Layer:
    """Token ids of shape ``axes`` (one token per example where there are none) to vectors."""
    return Layer(
        name,
        "Embedding",
        {"num_embeddings": rows, "embedding_dim": dim},
        (Input("x", axes, vocabulary=rows),),
        (*axes, dim),
        {"weight": (rows, dim)},
    )


def attention(name: str, width: int, heads: int, queries: int, keys: int | None = None) -> Layer:
    """Multi-head attention with biases; self-attention where ``keys`` is None, else key and value are two inputs."""
    inputs = [Input("x", (queries, width))]
    if keys is not None:
        inputs += [Input("key", (keys, width)), Input("value", (keys, width))]
    return Layer(
        name,
        "MultiheadAttention",
        {"embed_dim": width, "num_heads": heads},
        tuple(inputs),
        (queries, width),
        {
            "in_proj_weight": (3 * width, width),
            "in_proj_bias": (3 * width,),
            "out_proj.weight": (width, width),
            "out_proj.bias": (width,),
        },
    )


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent(name: str, kind: str, steps: int, n_in: int, hidden: int, bias: bool) -> Layer:
    """One layer over ``steps`` steps from a random initial state ``h0`` (and ``c0``)."""
    rows = GATES[kind] * hidden
    states = ("h0", "c0") if kind == "LSTM" else ("h0",)
    biases = {"bias_ih_l0": (rows,), "bias_hh_l0": (rows,)} if bias else {}
    return Layer(
        name,
        kind,
        {"input_size": n_in, "hidden_size": hidden, "bias": bias},
        (Input("x", (steps, n_in)), *(Input(state, (hidden,), is_state=True) for state in states)),
        (steps, hidden),
        {"weight_ih_l0": (rows, n_in), "weight_hh_l0": (rows, hidden), **biases},
    )


def _as_in_the_paper(layer: Layer, row: str | None, time_first: bool = False) -> Layer:
    return replace(layer, paper_row=row, time_first=time_first)


PAPER = (
    _as_in_the_paper(conv2d("conv", 64, 64, 8, 50, 100), "Conv"),
    _as_in_the_paper(norm("layer-norm", "LayerNorm", 64, normalized_shape=64), "LayerNorm"),
    _as_in_the_paper(norm("instance-norm", "InstanceNorm1d", 256, 64, num_features=256, affine=True), "InstanceNorm"),
    _as_in_the_paper(norm("group-norm", "GroupNorm", 256, num_groups=16, num_channels=256), "GroupNorm"),
    _as_in_the_paper(norm("rms-norm", "RMSNorm", 64, normalized_shape=64), None),
    _as_in_the_paper(linear("linear", 512, 512), "Linear"),
    _as_in_the_paper(embedding("embedding", 20_000, 100), "Embedding"),
    _as_in_the_paper(attention("mha", 100, 4, 64, 128), "MHA", time_first=True),
    _as_in_the_paper(recurrent("rnn", "RNN", 128, 100, 100, bias=False), "RNN", time_first=True),
    _as_in_the_paper(recurrent("gru", "GRU", 128, 100, 100, bias=False), "GRU", time_first=True),
    _as_in_the_paper(recurrent("lstm", "LSTM", 128, 100, 100, bias=False), "LSTM", time_first=True),
)
"""The paper's configurations (RMSNorm, which it did not have, in the shape of its LayerNorm)."""

TODAY = (
    conv2d("conv3x3-32px", 64, 64, 3, 32, 32, pad=1),
    conv2d("conv3x3-16px", 128, 128, 3, 16, 16, pad=1),
    conv2d("conv3x3-8px", 256, 256, 3, 8, 8, pad=1),
    linear("linear-t128", 512, 512, 128),
    linear("linear-t1024", 512, 512, 1024),
    embedding("embedding-50k", 50_000, 768, 128),
    attention("mha-512", 256, 8, 512),
    recurrent("rnn-bias", "RNN", 128, 100, 100, bias=True),
    recurrent("gru-bias", "GRU", 128, 100, 100, bias=True),
    recurrent("lstm-bias", "LSTM", 128, 100, 100, bias=True),
)
"""What is trained today: small kernels at three depths, long sequences, a large vocabulary, biases; batch first."""

SWEEP_ROWS = {1: 0.63, 10: 5.0, 100: 50.0, 1_000: 496.0, 10_000: 4_951.0, 20_000: 9_901.0, 52_429: 25_955.0}
"""num_embeddings -> L/C as the paper's figure has it (its L is rounded up to blocks of 512 bytes)."""

SWEEP = tuple(embedding(f"embedding-n{rows}", rows, 100) for rows in SWEEP_ROWS)

SETS: dict[str, tuple[Layer, ...]] = {"paper": PAPER, "today": TODAY, "sweep": SWEEP}
LAYERS: dict[str, Layer] = {layer.name: layer for layers in SETS.values() for layer in layers}


def select(names: Iterable[str]) -> tuple[str, ...]:
    """Names of layers, where the name of a set (``paper``, ``today``, ``sweep``) stands for all of its layers.

    Raises :class:`BadInput` for a name that is neither.
    """
    chosen: list[str] = []
    for name in names:
        if name in SETS:
            chosen += [layer.name for layer in SETS[name]]
        elif name in LAYERS:
            chosen.append(name)
        else:
            raise BadInput(
                f"There is no layer {name!r}{did_you_mean(name, [*LAYERS, *SETS])}; choose from {', '.join(LAYERS)}, "
                f"or a set: {', '.join(SETS)}."
            )
    return tuple(dict.fromkeys(chosen))


def initial_parameters(layer: Layer, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights by name: embeddings normal, scales near 1, everything else uniform in +-1/sqrt(fan in)."""
    rng = np.random.default_rng([seed, 1])
    fan_in = math.prod(next(iter(layer.parameters.values()))[1:]) or 1
    made = {}
    for name, shape in layer.parameters.items():
        if layer.kind == "Embedding":
            made[name] = rng.standard_normal(shape, dtype=np.float32)
        elif "Norm" in layer.kind:
            centre = 1.0 if name == "weight" else 0.0
            made[name] = (centre + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        else:
            made[name] = ((2.0 * rng.random(shape, dtype=np.float32) - 1.0) / math.sqrt(fan_in)).astype(np.float32)
    return made


def batch_seed(seed: int, number: int) -> int:
    """Return the seed of a process's batch of that number."""
    return 1000 * seed + number


def batch(layer: Layer, size: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(inputs by name [size, *shape], targets [size, *output]): normal values or uniform token ids (int64); targets are
    positive and sum to 1 along ``class_axis``."""
    rng = np.random.default_rng([seed, 2])
    inputs: dict[str, np.ndarray] = {}
    for i in layer.inputs:
        shape = (size, *i.shape)
        if i.vocabulary is None:
            inputs[i.name] = rng.standard_normal(shape, dtype=np.float32)
        else:
            inputs[i.name] = rng.integers(0, i.vocabulary, shape, dtype=np.int64)
    targets = rng.random((size, *layer.output), dtype=np.float32)
    axis = layer.class_axis + 1 if layer.class_axis >= 0 else layer.class_axis
    targets /= targets.sum(axis=axis, keepdims=True)
    return inputs, targets
