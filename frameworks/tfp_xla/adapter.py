"""DP-SGD in plain TensorFlow: vectorised per-example gradients under XLA, as a graph and eagerly; and without privacy.

One backward pass gives d loss_i / d z for the output z of every layer with weights; from that and what the layer saw,
the per-example gradients of a whole micro-batch are one contraction a layer. ``textbook`` is the paper's form:
``tf.vectorized_map`` over a gradient tape for one example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from frameworks._shared import channels_last
from frameworks._shared.tensorflow import models as tf_models
from frameworks._shared.tensorflow.models import Trace
from harness import tasks
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task

MICRO_BATCH = {"cifar10-cnn": 4, "imdb-lstm": 8}
MICRO_BATCH_ELSEWHERE = 16
"""Examples per turn under XLA, tuned on a CPU: what they leave behind should stay in the cores' own caches."""

Tree = dict[str, tf.Tensor]
Summed = Callable[[Tree, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Tree]


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``xla``, ``graph``, ``eager``, ``textbook`` or ``non-private``."""
    return TfpXla(variant)


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is put to TensorFlow.

    ``jit``: compiled by XLA, for each length of the batch. ``patches``: convolutions as matrix products over patches.
    ``micro_batch``: examples per turn of a loop; None takes the whole batch.
    """

    jit: bool
    patches: bool
    micro_batch: int | None


def formulation(variant: str, task: Task, device: str) -> Formulation:
    """What was fastest on a CPU (NOTES.md); on any other device XLA's own convolution and the whole batch."""
    if variant != "xla" or device != "/CPU:0":
        return Formulation(variant not in ("graph", "eager"), False, None)
    convolves = any(isinstance(layer, tasks.Conv2d) for layer in task.layers)
    return Formulation(True, convolves, MICRO_BATCH.get(task.name, MICRO_BATCH_ELSEWHERE))


class TfpXla(Adapter):
    """Data are tensors, weights are variables that the compiled step updates in place; hyper-parameters are arguments,
    so that another setting of the same task needs no compilation."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.task: Task | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != (self.variant != "non-private"):
            raise Unsupported(f"The variant {self.variant} is {'not ' * setting.private}private; use the other one.")
        self.device = tf_models.device(setting)
        values = channels_last.parameters(task, initial)
        with tf.device(self.device):
            if task != self.task:
                self.task = task
                self.params = {name: tf.Variable(value) for name, value in values.items()}
                self.form = formulation(self.variant, task, self.device)
                self.update = _update(task, self.variant, self.form, self.params)
            for name, variable in self.params.items():
                variable.assign(values[name])
            rate = setting.learning_rate / setting.batch_size
            hyper = (rate, setting.max_grad_norm, setting.noise_multiplier * setting.max_grad_norm)
            self.hyper = tf.constant(hyper, tf.float32)
        self.seed = setting.seed
        self.steps = 0

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = tf_models.placed(channels_last.data(self.task, x), y, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if not self.form.jit and mask is not None:
            indices, mask = indices[mask], None
        if len(indices) == 0:  # some of TensorFlow's kernels refuse an empty batch, and the noise must be added
            indices, mask = np.zeros(1, np.int64), np.zeros(1, bool)
        kept = np.ones(len(indices), np.float32) if mask is None else mask.astype(np.float32)
        seed = np.array([self.seed, self.steps], np.int64)
        with tf.device(self.device):
            self.update(self.x, self.y, tf.constant(indices.astype(np.int32)), tf.constant(kept), self.hyper, seed)
        self.steps += 1

    def synchronize(self) -> None:
        tf.test.experimental.sync_devices()

    def parameters(self) -> Mapping[str, np.ndarray]:
        return channels_last.canonical(self.task, {name: value.numpy() for name, value in self.params.items()})

    def peak_memory(self) -> Memory:
        return tf_models.peak_memory(self.device)


def _update(task: Task, variant: str, form: Formulation, variables: dict[str, tf.Variable]) -> Callable[..., None]:
    """The step: (all x, all y, rows [k], mask [k], (rate, C, sigma*C), (seed, number of the step)) -> None."""
    private = variant != "non-private"
    formulated = {"textbook": textbook, "non-private": plain_sum}
    summed = formulated[variant](task) if variant in formulated else clipped_sum(task, form)

    def update(x, y, rows, mask, hyper, seed):
        rate, bound, deviation = tf.unstack(hyper)
        params = {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}
        total = _in_pieces(summed, form.micro_batch, params, x, y, rows, mask, bound)
        if private:
            noise = _noise(total, seed, form.jit)
            total = {name: value + deviation * noise[name] for name, value in total.items()}
        for name, variable in variables.items():
            variable.assign_sub(rate * total[name])

    if variant == "eager":
        return update
    signature = [
        tf.TensorSpec([None, *channels_last.input_shape(task)], task.input_dtype),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([3], tf.float32),
        tf.TensorSpec([2], tf.int64),
    ]
    return tf.function(update, None if form.jit else signature, jit_compile=form.jit, autograph=False)


def _in_pieces(summed, micro_batch, params, x, y, rows, mask, bound) -> Tree:
    """The sum over a batch whose rows are taken ``micro_batch`` at a time; as equal as they can be, so that padding
    stays below one row each."""
    if micro_batch is None or rows.shape[0] <= micro_batch:
        return summed(params, tf.gather(x, rows), tf.gather(y, rows), mask, bound)
    size = rows.shape[0]
    pieces = -(-size // micro_batch)
    excess = -size % pieces
    rows = tf.reshape(tf.pad(rows, [[0, excess]]), [pieces, -1])
    mask = tf.reshape(tf.pad(mask, [[0, excess]]), [pieces, -1])

    def accumulate(i, total):
        more = summed(params, tf.gather(x, rows[i]), tf.gather(y, rows[i]), mask[i], bound)
        return i + 1, {name: value + more[name] for name, value in total.items()}

    start = (0, {name: tf.zeros_like(value) for name, value in params.items()})
    return tf.while_loop(lambda i, _: i < pieces, accumulate, start, maximum_iterations=pieces)[1]


def _noise(like: Tree, seed: tf.Tensor, jit: bool) -> Tree:
    """Standard normals from one draw of a stateless generator keyed by (seed, number of the step). XLA runs threefry
    faster; TensorFlow's own kernel exists for Philox only."""
    sizes = [value.shape.num_elements() for value in like.values()]
    drawn = tf.split(tf.random.stateless_normal([sum(sizes)], seed, alg="threefry" if jit else "philox"), sizes)
    return {name: tf.reshape(z, value.shape) for (name, value), z in zip(like.items(), drawn, strict=True)}


def plain_sum(task: Task) -> Summed:
    """sum_i m_i g_i."""

    def summed(params, x, y, mask, bound):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            outputs, _ = tf_models.logits(task, params, x, xla=True)
            loss = tf.tensordot(mask, tf_models.losses(task, outputs, y), 1)
        return {name: tf.convert_to_tensor(g) for name, g in tape.gradient(loss, params).items()}

    return summed


def textbook(task: Task) -> Summed:
    """sum_i m_i min(1, C/|g_i|) g_i, everything of one example inside ``tf.vectorized_map``, as the paper has it."""

    def summed(params, x, y, mask, bound):
        def one(example):
            x, y, kept = example
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(params)
                outputs, _ = tf_models.logits(task, params, x[None], xla=True, unrolled=True)
                loss = tf_models.losses(task, outputs, y[None])[0]
            gradient = {name: tf.convert_to_tensor(g) for name, g in tape.gradient(loss, params).items()}
            norm2 = tf.add_n([tf.reduce_sum(g * g) for g in gradient.values()])
            factor = kept * tf.minimum(1.0, bound / tf.sqrt(norm2))
            return {name: factor * g for name, g in gradient.items()}

        clipped = tf.vectorized_map(one, (x, y, mask))
        return {name: tf.reduce_sum(g, 0) for name, g in clipped.items()}

    return summed


@dataclass(frozen=True)
class Found:
    """Per-example gradients [B, ...] of one layer's weights, or what replaces them: squared norms [B] and the function
    from weights [B] to the weighted sums."""

    norm2: tf.Tensor
    weighted: Callable[[tf.Tensor], Tree]


def clipped_sum(task: Task, form: Formulation) -> Summed:
    """sum_i m_i min(1, C/|g_i|) g_i over a micro-batch, with one backward pass that stops at the layers' outputs."""

    def summed(params, x, y, mask, bound):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            outputs, traces = tf_models.logits(task, params, x, form.jit, form.patches, watch=tape.watch)
            loss = tf.reduce_sum(tf_models.losses(task, outputs, y))
        deltas = tape.gradient(loss, [trace.given for trace in traces])
        found = [_found(trace, delta, form.jit) for trace, delta in zip(traces, deltas, strict=True)]
        factors = mask * tf.minimum(1.0, bound / tf.sqrt(tf.add_n([each.norm2 for each in found])))
        return {name: value for each in found for name, value in each.weighted(factors).items()}

    return summed


def _found(trace: Trace, delta: tf.Tensor, jit: bool) -> Found:
    match trace.layer:
        case tasks.Conv2d(name, c_in, c_out, kernel, stride):
            columns = trace.seen[0]
            if columns.shape[-1] != c_in * kernel**2:
                columns = tf_models.image_patches(columns, kernel, stride, jit)
            positions = columns.shape[1] * columns.shape[2]
            columns = tf.reshape(columns, [-1, positions, c_in * kernel**2])
            delta = tf.reshape(delta, [-1, positions, c_out])
            weight = tf.reshape(tf.matmul(columns, delta, transpose_a=True), [-1, kernel, kernel, c_in, c_out])
            return _instantiated({f"{name}.weight": weight, f"{name}.bias": tf.reduce_sum(delta, 1)})
        case tasks.Linear(name):
            weight = trace.seen[0][:, :, None] * delta[:, None, :]
            return _instantiated({f"{name}.weight": weight, f"{name}.bias": delta})
        case tasks.Lstm(name):
            x, h = trace.seen
            before = tf.pad(h[:, :-1], [[0, 0], [1, 0], [0, 0]])
            weight_ih = tf.matmul(x, delta, transpose_a=True)
            weight_hh = tf.matmul(before, delta, transpose_a=True)
            bias = tf.reduce_sum(delta, 1)
            return _instantiated({f"{name}.weight_ih": weight_ih, f"{name}.weight_hh": weight_hh, f"{name}.bias": bias})
        case tasks.Embedding(name, rows):
            tokens = trace.seen[0]
            return Found(
                _squared_norm_by_token(tokens, delta, jit),
                lambda factors: {
                    f"{name}.weight": tf.math.unsorted_segment_sum(factors[:, None, None] * delta, tokens, rows)
                },
            )
    raise TypeError(f"There is no rule for the layer {type(trace.layer).__name__}.")


def _instantiated(gradients: Tree) -> Found:
    norm2 = tf.add_n([tf.reduce_sum(g * g, list(range(1, g.shape.rank))) for g in gradients.values()])
    return Found(norm2, lambda factors: {name: tf.tensordot(factors, g, 1) for name, g in gradients.items()})


def _squared_norm_by_token(tokens: tf.Tensor, delta: tf.Tensor, jit: bool) -> tf.Tensor:
    """|g_i|^2 [B] of an embedding table's gradients from those by position [B, T, dim].

    Positions of one token add up.
    """
    batch, length = tf.shape(tokens)[0], tokens.shape[1]
    first = tf.range(batch)[:, None]
    if jit:  # sorting, as a list of unknown length is beyond XLA
        order = tf.argsort(tokens)
        tokens, delta = tf.gather(tokens, order, batch_dims=1), tf.gather(delta, order, batch_dims=1)
        new = tf.cast(tokens[:, 1:] != tokens[:, :-1], tf.int32)
        segment = tf.cumsum(tf.pad(new, [[0, 0], [1, 0]]), 1) + first * length
        sums = tf.math.unsorted_segment_sum(delta, segment, batch * length)
        return tf.reduce_sum(tf.reshape(sums * sums, [-1, length * delta.shape[2]]), 1)
    pairs, position = tf.unique(tf.reshape(tf.cast(first, tf.int64) * 2**32 + tf.cast(tokens, tf.int64), [-1]))
    sums = tf.math.unsorted_segment_sum(tf.reshape(delta, [-1, delta.shape[2]]), position, tf.size(pairs))
    return tf.math.segment_sum(tf.reduce_sum(sums * sums, 1), tf.cast(pairs // 2**32, tf.int32))
