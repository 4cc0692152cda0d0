"""Layers in plain JAX: one example's loss, ``vmap(grad)``, ``jit``; and the same without DP."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from harness.layer_contract import Bytes, LayerAdapter, LayerSetting, Unsupported
from harness.layers import Layer

Params = Mapping[str, jax.Array]
Forward = Callable[..., jax.Array]
EPSILON = 1e-5
"""Of PyTorch's norms. Its RMSNorm takes the smallest float32 step at 1."""


def create(variant: str) -> LayerAdapter:
    """``vmap``, or ``non-private``."""
    return JaxLayer()


def forward(layer: Layer) -> Forward:
    """(params, x, *others) of one example -> its output; PyTorch's conventions throughout."""
    options = layer.options
    match layer.kind:
        case "Linear":
            return lambda p, x: x @ p["weight"].T + p["bias"]
        case "Conv2d":
            return lambda p, x: _convolution(p, x, options["padding"])
        case "Embedding":
            return lambda p, x: p["weight"][x]
        case "LayerNorm":
            return lambda p, x: _standard(x, -1) * p["weight"] + p["bias"]
        case "RMSNorm":
            tiny = jnp.finfo(jnp.float32).eps
            return lambda p, x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + tiny) * p["weight"]
        case "InstanceNorm1d":
            return lambda p, x: _standard(x, -1) * p["weight"][:, None] + p["bias"][:, None]
        case "GroupNorm":
            rows = (options["num_groups"], -1)
            return lambda p, x: _standard(x.reshape(rows), -1).reshape(x.shape) * p["weight"] + p["bias"]
        case "MultiheadAttention":
            return lambda p, x, *others: _attention(p, options["num_heads"], x, *(others or (x, x)))
        case "RNN" | "GRU" | "LSTM":
            return lambda p, x, *states: _recurrent(layer.kind, p, x, states)
    raise Unsupported(f"there is no {layer.kind} here.")


def _standard(x: jax.Array, axis: int) -> jax.Array:
    centred = x - x.mean(axis, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred * centred, axis, keepdims=True) + EPSILON)


def _convolution(p: Params, x: jax.Array, padding: int) -> jax.Array:
    out = lax.conv_general_dilated(
        x[None], p["weight"], (1, 1), [(padding, padding)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return out[0] + p["bias"][:, None, None]


def _attention(p: Params, heads: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    weights, biases = jnp.split(p["in_proj_weight"], 3), jnp.split(p["in_proj_bias"], 3)
    q, k, v = (
        (x @ w.T + b).reshape(len(x), heads, -1) for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    share = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]), -1)
    mixed = jnp.einsum("hqk,khd->qhd", share, v).reshape(query.shape)
    return mixed @ p["out_proj.weight"].T + p["out_proj.bias"]


def _recurrent(kind: str, p: Params, x: jax.Array, states: tuple[jax.Array, ...]) -> jax.Array:
    """The input's projection as one product, a scan for the rest."""
    projected = x @ p["weight_ih_l0"].T + p.get("bias_ih_l0", 0.0)
    bias = p.get("bias_hh_l0", 0.0)

    def step(carry: tuple[jax.Array, ...], row: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        h = carry[0]
        own = h @ p["weight_hh_l0"].T + bias
        if kind == "RNN":
            h = jnp.tanh(row + own)
            return (h,), h
        if kind == "GRU":
            (ir, iz, i_n), (hr, hz, hn) = jnp.split(row, 3), jnp.split(own, 3)
            z = jax.nn.sigmoid(iz + hz)
            h = (1 - z) * jnp.tanh(i_n + jax.nn.sigmoid(ir + hr) * hn) + z * h
            return (h,), h
        i, f, g, o = jnp.split(row + own, 4)
        c = jax.nn.sigmoid(f) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, states, projected)[1]


class JaxLayer(LayerAdapter):
    """One compiled function per batch size; memory from the compiled program's own buffer assignment."""

    instrument = "XLA's buffer assignment"

    def configure(self, layer: Layer, setting: LayerSetting) -> None:
        self.layer, self.setting = layer, setting
        try:
            self.device = jax.devices(setting.device)[0]
        except RuntimeError as error:
            raise Unsupported(f"JAX finds no device {setting.device!r} here ({error}).") from None
        jax.config.update("jax_default_matmul_precision", "highest")
        self.forward = forward(layer)
        jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
        self.left: Params = {}

    def place_inputs(self, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.inputs = [tuple(self._placed(batch[i.name]) for i in self.layer.inputs) for batch in batches]
        jax.block_until_ready(self.inputs)

    def place_labels(self, batches: Sequence[np.ndarray]) -> None:
        self.labels = [self._placed(batch) for batch in batches]
        jax.block_until_ready(self.labels)

    def _placed(self, array: np.ndarray) -> jax.Array:
        """Token ids become int32: without its 64-bit mode JAX has no other."""
        return jax.device_put(array, self.device)

    def build(self, initial: Mapping[str, np.ndarray]) -> None:
        self.params = {name: jax.device_put(value, self.device) for name, value in initial.items()}
        jax.block_until_ready(self.params)
        self.compiled = jax.jit(self._gradients()).lower(self.params, self.inputs[0], self.labels[0]).compile()

    def _gradients(self) -> Callable[..., Params]:
        axis, run = self.layer.class_axis, self.forward

        def loss(params: Params, inputs: tuple[jax.Array, ...], target: jax.Array) -> jax.Array:
            return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(run(params, *inputs), axis), axis))

        def plain(params: Params, inputs: tuple[jax.Array, ...], targets: jax.Array) -> Params:
            return jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0, 0))(p, inputs, targets)))(params)

        per_sample = jax.vmap(jax.grad(loss), (None, 0, 0))

        def clipped(params: Params, inputs: tuple[jax.Array, ...], targets: jax.Array) -> Params:
            gradients = per_sample(params, inputs, targets)
            squares = sum(jnp.sum(g * g, range(1, g.ndim)) for g in gradients.values())
            factors = jnp.minimum(1.0, self.setting.max_grad_norm / jnp.sqrt(squares))
            return {name: jnp.tensordot(factors, g, 1) for name, g in gradients.items()}

        return {"plain": plain, "per_sample": per_sample, "clipped": clipped}[self.setting.passes]

    def run(self, batch: int) -> None:
        self.left = {}
        self.left = self.compiled(self.params, self.inputs[batch], self.labels[batch])

    def synchronize(self) -> None:
        jax.block_until_ready(self.left)

    def gradient_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.left.items()}

    def gradients(self) -> Mapping[str, np.ndarray]:
        return {name: np.array(value) for name, value in self.left.items()}

    def count(self, work: Callable[[], None]) -> Bytes:
        """What is alive afterwards; only for work without intermediate results, see :meth:`count_pass`."""
        before = self.allocated()
        work()
        delta = self.allocated() - before
        return Bytes(delta, max(0, delta))

    def allocated(self) -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def count_pass(self, batch: int) -> Bytes:
        before = self.allocated()
        old = sum(value.nbytes for value in self.left.values())
        self.run(batch)
        self.synchronize()
        plan = self.compiled.memory_analysis()
        # The last pass's gradients are let go of before the program starts.
        peak = plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes - old
        return Bytes(self.allocated() - before, max(0, peak))
