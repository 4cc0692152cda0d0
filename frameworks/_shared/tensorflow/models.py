"""The tasks' networks in TensorFlow on batches of examples, for every contestant that is built on TensorFlow.

Layouts are those of :mod:`frameworks._shared.channels_last`. Every measurement behind a formulation is in
frameworks/tfp_xla/NOTES.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import tensorflow as tf

from harness import tasks
from harness.contract import Memory, Setting, Unsupported
from harness.tasks import Task

Params = Mapping[str, tf.Tensor]

FEW_CHANNELS = 16
"""Up to which ``tf.image.extract_patches`` beats concatenated slices on a CPU without XLA."""


@dataclass(frozen=True)
class Trace:
    """What one layer with weights saw and gave; with d loss / d ``given`` enough for its per-example gradients.

    ``seen``: the layer's input (an LSTM: input and output). ``given``: W x + b before anything else happens to it
    (an embedding: the rows looked up; an LSTM: the input's share of the gates).
    """

    layer: tasks.Layer
    seen: tuple[tf.Tensor, ...]
    given: tf.Tensor


def logits(  # noqa: C901  (a case for each kind of layer)
    task: Task,
    params: Params,
    x: tf.Tensor,
    xla: bool = False,
    patches: bool = False,
    unrolled: bool = False,
    watch: Callable[[tf.Tensor], None] | None = None,
) -> tuple[tf.Tensor, list[Trace]]:
    """Logits [B, outputs] of a batch, and the trace of each layer with weights, in the order of the layers.

    x: float32 [B, H, W, C] or [B, features], or int32 tokens [B, T]. ``xla``: pooling over shifted slices, whose
    gradient XLA runs fast; else by TensorFlow's own kernels. ``patches``: convolutions as matrix products over image
    patches. ``unrolled``: the LSTM's time steps as separate operations, which ``tf.vectorized_map`` needs.
    ``watch`` is called with every ``given`` before it is used.
    """
    traces: list[Trace] = []

    def seen(layer: tasks.Layer, value: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        if watch:
            watch(value)
        traces.append(Trace(layer, inputs, value))
        return value

    for layer in task.layers:
        match layer:
            case tasks.Conv2d(name, _, _, kernel, stride, padding):
                x = tf.pad(x, [[0, 0], [padding, padding], [padding, padding], [0, 0]]) if padding else x
                weight, columns = params[f"{name}.weight"], x
                if patches:
                    columns = image_patches(x, kernel, stride, xla)
                    z = columns @ tf.reshape(weight, [-1, weight.shape[-1]])
                else:
                    z = tf.nn.conv2d(x, weight, stride, "VALID")
                x = seen(layer, z + params[f"{name}.bias"], columns)
            case tasks.Linear(name):
                x = seen(layer, x @ params[f"{name}.weight"] + params[f"{name}.bias"], x)
            case tasks.Embedding(name):
                x = seen(layer, tf.gather(params[f"{name}.weight"], x), x)
            case tasks.Lstm(name, n_in, _):
                flat = tf.reshape(x, [-1, n_in]) @ params[f"{name}.weight_ih"] + params[f"{name}.bias"]
                gates = tf.reshape(flat, [-1, x.shape[1], flat.shape[-1]])
                if watch:
                    watch(gates)
                h = (recur_unrolled if unrolled else recur)(gates, params[f"{name}.weight_hh"])
                traces.append(Trace(layer, (x, h), gates))
                x = h
            case tasks.ReLU():
                x = tf.nn.relu(x)
            case tasks.MaxPool2d(kernel, stride):
                x = _pool(x, kernel, stride, tf.maximum) if xla else tf.nn.max_pool2d(x, kernel, stride, "VALID")
            case tasks.AvgPool2d(kernel, stride):
                if xla:
                    x = _pool(x, kernel, stride, tf.add) / kernel**2
                else:
                    x = tf.nn.avg_pool2d(x, kernel, stride, "VALID")
            case tasks.Flatten():
                x = tf.reshape(x, [-1, x.shape[1] * x.shape[2] * x.shape[3]])
            case tasks.MeanOverSpace():
                x = tf.reduce_mean(x, [1, 2])
            case tasks.MeanOverTime():
                x = tf.reduce_mean(x, 1)
            case _:
                raise Unsupported(f"there is no TensorFlow function for the layer {type(layer).__name__}.")
    return x, traces


def losses(task: Task, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Each example's own loss [B] from its logits. The one place where logits become a loss."""
    if task.loss == "binary_cross_entropy":
        return tf.nn.softplus(outputs[:, 0]) - tf.cast(y, tf.float32) * outputs[:, 0]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)


def image_patches(x: tf.Tensor, kernel: int, stride: int, xla: bool) -> tf.Tensor:
    """Patches [B, H', W', k*k*C] of [B, H, W, C], each in the order of a kernel [k, k, C].

    XLA turns TensorFlow's own patches into a convolution with a unit kernel, and many slices are slow without XLA where
    there are few channels.
    """
    if not xla and x.shape[3] <= FEW_CHANNELS:
        return tf.image.extract_patches(x, [1, kernel, kernel, 1], [1, stride, stride, 1], [1, 1, 1, 1], "VALID")
    height, width = ((size - kernel) // stride + 1 for size in x.shape[1:3])
    shifted = [
        x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
        for i in range(kernel)
        for j in range(kernel)
    ]
    return tf.concat(shifted, -1)


def _pool(x: tf.Tensor, kernel: int, stride: int, combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Windows of [B, H, W, C] reduced by ``combine`` over shifted slices: XLA's own gradient of a maximum over windows
    is a slow scatter. Of equal values the first takes the whole gradient, as in PyTorch."""
    height, width = ((size - kernel) // stride + 1 for size in x.shape[1:3])
    x = reduce(combine, [x[:, :, i : i + stride * (width - 1) + 1 : stride] for i in range(kernel)])
    return reduce(combine, [x[:, i : i + stride * (height - 1) + 1 : stride] for i in range(kernel)])


def _cell(gate: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """(h, c, activated i, f, g, o, tanh c) from gate pre-activations [B, 4H] and the previous cell state [B, H]."""
    i, f, g, o = tf.split(gate, 4, -1)
    i, f, g, o = tf.sigmoid(i), tf.sigmoid(f), tf.tanh(g), tf.sigmoid(o)
    c = f * c + i * g
    squashed = tf.tanh(c)
    return o * squashed, c, i, f, g, o, squashed


def recur_unrolled(gates: tf.Tensor, weight_hh: tf.Tensor) -> tf.Tensor:
    """Hidden states [B, T, H] of an LSTM from the inputs' share of its gates [B, T, 4H]; zero initial state."""
    h = c = tf.zeros_like(gates[:, 0, : weight_hh.shape[0]])
    states = []
    for gate in tf.unstack(gates, axis=1):
        h, c, *_ = _cell(gate + h @ weight_hh, c)
        states.append(h)
    return tf.stack(states, 1)


@tf.custom_gradient
def recur(gates: tf.Tensor, weight_hh: tf.Tensor):
    """The same as a loop with a hand-written backward loop: all activations of a time step lie in one row of one array,
    and the gradient of ``weight_hh`` is one product at the end."""
    steps, hidden = gates.shape[1], weight_hh.shape[0]
    by_time = tf.transpose(gates, [1, 0, 2])
    zero = tf.zeros_like(by_time[0, :, :hidden])

    def forward(t, h, c, saved):
        h, c, *rest = _cell(by_time[t] + h @ weight_hh, c)
        return t + 1, h, c, saved.write(t, tf.concat([h, c, *rest], -1))

    saved = tf.TensorArray(tf.float32, steps, element_shape=[gates.shape[0], 7 * hidden])
    *_, saved = tf.while_loop(lambda t, *_: t < steps, forward, (0, zero, zero, saved), maximum_iterations=steps)
    rows = saved.stack()
    h = rows[:, :, :hidden]

    def gradient(upstream: tf.Tensor):
        from_output = tf.transpose(upstream, [1, 0, 2])
        transposed = tf.transpose(weight_hh)
        earlier_c = tf.concat([zero[None], rows[:-1, :, hidden : 2 * hidden]], 0)

        def backward(t, dh, dc, deltas):
            _, _, i, f, g, o, squashed = tf.split(rows[t], 7, -1)
            dh = dh + from_output[t]
            dc = dc + dh * o * (1.0 - squashed * squashed)
            delta = tf.concat(
                [
                    dc * g * i * (1.0 - i),
                    dc * earlier_c[t] * f * (1.0 - f),
                    dc * i * (1.0 - g * g),
                    dh * squashed * o * (1.0 - o),
                ],
                -1,
            )
            return t - 1, delta @ transposed, dc * f, deltas.write(t, delta)

        deltas = tf.TensorArray(tf.float32, steps, element_shape=[gates.shape[0], 4 * hidden])
        start = (steps - 1, zero, zero, deltas)
        *_, deltas = tf.while_loop(lambda t, *_: t >= 0, backward, start, maximum_iterations=steps)
        by_gate = deltas.stack()
        weight = tf.tensordot(h[:-1], by_gate[1:], [[0, 1], [0, 1]])
        return tf.transpose(by_gate, [1, 0, 2]), weight

    return tf.transpose(h, [1, 0, 2]), gradient


def device(setting: Setting) -> str:
    """TensorFlow's name of the setting's device; threads and precision are set on the way.

    Raises :class:`Unsupported` where there is no such device or precision.
    """
    if setting.precision not in ("float32", "tf32"):
        raise Unsupported(f"precision {setting.precision!r}: this adapter trains in float32 or tf32.")
    tf.config.experimental.enable_tensor_float_32_execution(setting.precision == "tf32")
    if tf.config.threading.get_intra_op_parallelism_threads() != setting.threads:
        tf.config.threading.set_intra_op_parallelism_threads(setting.threads)
        tf.config.threading.set_inter_op_parallelism_threads(setting.threads)
    if setting.device == "cpu":
        return "/CPU:0"
    if not tf.config.list_physical_devices("GPU"):
        raise Unsupported(f"TensorFlow finds no device {setting.device!r} here.")
    return "/GPU:0"


def placed(x: np.ndarray, y: np.ndarray, device: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Both as tensors on ``device``."""
    with tf.device(device):
        tensors = tf.constant(x), tf.constant(y)
    # TensorFlow lets go of a numpy array that it has copied only in its next call: one that costs nothing, so that the
    # data do not lie in memory twice until the first step.
    tf.zeros(()).numpy()
    return tensors


def peak_memory(device: str) -> Memory:
    """What TensorFlow's own allocator counted on a GPU."""
    if device == "/CPU:0":
        return Memory({})
    return Memory({"tf_peak_in_use": tf.config.experimental.get_memory_info("GPU:0")["peak"]})
