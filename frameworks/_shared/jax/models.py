"""The tasks' networks as pure JAX functions of ONE example, for every contestant that is built on JAX.

Parameters are a dict under the task's canonical names and layouts; a batch is ``jax.vmap``'s business. Convolution and
LSTM exist in two formulations each with the same values, because what is fast under ``vmap(grad)`` differs between
backends; every measurement behind the choice is in frameworks/jax/NOTES.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from harness import network, tasks
from harness.contract import Unsupported
from harness.tasks import BFLOAT16, NOT_OWN, TOKEN_LOSS, Task

Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Form:
    """How the networks are put to XLA. ``patches``: convolutions as matrix products over image patches. ``unroll``: an
    LSTM as a Python loop, its time steps written out in the compiled program, instead of a ``lax.scan``. ``half``: what
    goes into linear maps and attention, and comes out, is bfloat16, weights rounded on the way in; softmax, norms and
    losses are float32."""

    patches: bool = False
    unroll: bool = False
    half: bool = False

    def lowered(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        """What a product takes."""
        return tuple(value.astype(jnp.bfloat16) for value in values) if self.half else values


PLAIN = Form()


def logits(task: Task, params: Params, x: jax.Array, form: Form = PLAIN) -> jax.Array:
    """Logits [outputs] of one example ``x``, of tokens [T, outputs], of views [views, outputs].

    x: float32 [*input_shape] or integers; for a task that starts with an embedding or with bags it may also be
    :func:`first_output`, float32, so that a gradient can stop there.
    """
    if task.precision == BFLOAT16:
        form = replace(form, half=True)
    layers = task.layers
    if task.views > 1:
        rows, layers = _views(x, task.views), layers[1:]
        return jax.vmap(lambda row: _through(layers, params, row, form))(rows)
    return _through(layers, params, x, form)


def _through(layers: tuple[tasks.Layer, ...], params: Params, x: jax.Array, form: Form) -> jax.Array:
    for layer in layers:
        x = _apply(layer, params, x, form)
    return x.astype(jnp.float32)


def _views(x: jax.Array, count: int) -> jax.Array:
    """[C, H, W] to [count, C, H, W]."""
    _, height, width = x.shape
    mirrored = x[..., ::-1]
    moved = [jnp.pad(mirrored if k % 2 else x, ((0, 0), (k // 2, 0), (k // 2, 0))) for k in range(count)]
    return jnp.stack([view[:, :height, :width] for view in moved])


def first_output(task: Task, params: Params, x: jax.Array) -> jax.Array:
    """Return what the first layer makes of one example's integers."""
    return _apply(task.layers[0], params, x, PLAIN)


def example_loss(task: Task, form: Form = PLAIN) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """(params, x, y) -> one example's own loss, what the libraries differentiate."""
    return lambda params, x, y: loss(task, logits(task, params, x, form), y)


def fastest_on(platform: str, task: Task) -> Form:
    """The form of per-example gradients under ``vmap``: on a CPU convolutions over patches."""
    convolves = any(isinstance(layer, tasks.Conv2d) for layer in network.walk(task.layers))
    return Form(patches=platform == "cpu" and convolves)


def loss(task: Task, outputs: jax.Array, y: jax.Array) -> jax.Array:
    """One example's own loss from its logits, of views the mean of theirs; of tokens the mean over its own ones, zero
    where it has none. The one place where logits become a loss."""
    if task.views > 1:
        return (jax.nn.logsumexp(outputs, axis=1) - outputs[:, y]).mean()
    if task.loss == TOKEN_LOSS:
        chosen = jnp.take_along_axis(outputs, jnp.maximum(y, 0)[:, None], axis=1)[:, 0]
        is_own = y != NOT_OWN
        return jnp.sum((jax.nn.logsumexp(outputs, axis=1) - chosen) * is_own) / jnp.maximum(jnp.sum(is_own), 1)
    if task.loss == "binary_cross_entropy":
        return jax.nn.softplus(outputs[0]) - y * outputs[0]
    return jax.nn.logsumexp(outputs) - outputs[y]


def parameters(task: Task, values: Mapping[str, np.ndarray], device: jax.Device) -> dict[str, jax.Array]:
    """Canonical numpy weights as arrays on ``device`` in memory of their own (a step may donate it)."""
    return {
        name: jax.device_put(np.array(values[name], np.float32), device, may_alias=False) for name in task.parameters
    }


def _apply(layer: tasks.Layer, params: Params, x: jax.Array, form: Form) -> jax.Array:
    match layer:
        case tasks.Conv2d() | tasks.Lstm() if form.half:
            raise Unsupported(f"its {type(layer).__name__} has no bfloat16 form.")
        case tasks.Conv2d(name, _, _, _, stride, padding):
            convolve = _convolve_patches if form.patches else _convolve
            return convolve(x, params[f"{name}.weight"], stride, padding) + params[f"{name}.bias"][:, None, None]
        case tasks.Linear():
            return _linear(layer, params, x, form)
        case tasks.Embedding(name):
            return x if jnp.issubdtype(x.dtype, jnp.floating) else params[f"{name}.weight"][x]
        case tasks.Lstm(name):
            gates = x @ params[f"{name}.weight_ih"].T + params[f"{name}.bias"]
            recur = _recur_unrolled if form.unroll else _recur
            return recur(gates, params[f"{name}.weight_hh"])
        case tasks.ReLU():
            return jax.nn.relu(x)
        case tasks.MaxPool2d(kernel, stride):
            return _pool(x, kernel, stride, _first_maximum)
        case tasks.AvgPool2d(kernel, stride):
            return _pool(x, kernel, stride, jnp.add) / kernel**2
        case tasks.Flatten():
            return x.reshape(-1)
        case tasks.MeanOverSpace():
            return x.mean((1, 2))
        case tasks.SpaceAsTime():
            return x.reshape(len(x), -1).T
        case tasks.MeanOverTime():
            return x.mean(0)
    return _apply_of_transformer(layer, params, x, form)


def _apply_of_transformer(layer: tasks.Layer, params: Params, x: jax.Array, form: Form) -> jax.Array:
    match layer:
        case tasks.Positions(name):
            return x + params[f"{name}.weight"][: len(x)]
        case tasks.GroupNorm(name, groups, _, eps):
            scaled = _standardised(x.reshape(groups, -1), eps).reshape(x.shape)
            return scaled * params[f"{name}.weight"][:, None, None] + params[f"{name}.bias"][:, None, None]
        case tasks.LayerNorm(name, _, eps):
            return _standardised(x, eps) * params[f"{name}.weight"] + params[f"{name}.bias"]
        case tasks.RMSNorm(name, _, eps):
            return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * params[f"{name}.weight"]
        case tasks.Bags():
            return x if jnp.issubdtype(x.dtype, jnp.floating) else _bags(layer, params, x)
        case tasks.TokenTypes(name):
            return x + params[f"{name}.weight"][0]
        case tasks.GELU(exact):
            return jax.nn.gelu(x, approximate=not exact)
        case tasks.SiLU():
            return jax.nn.silu(x)
        case tasks.SwiGLU():
            gate, up, down = layer.maps
            opened = jax.nn.silu(_linear(gate, params, x, form)) * _linear(up, params, x, form)
            return _linear(down, params, opened, form)
        case tasks.Attention():
            return _attention(layer, params, x, form)
        case tasks.TiedHead(table):
            x, weight = form.lowered(x, params[f"{table}.weight"])
            return x @ weight.T
        case tasks.Residual(layers, shortcut):
            body, beside = (
                reduce(lambda value, inner: _apply(inner, params, value, form), part, x) for part in (layers, shortcut)
            )
            return beside + body
    raise Unsupported(f"there is no JAX function for the layer {type(layer).__name__}.")


def _bags(layer: tasks.Bags, params: Params, x: jax.Array) -> jax.Array:
    """Integers [counts + fields * ids] to [counts + fields * dim]."""
    fields = x[layer.counts :].reshape(-1, layer.ids)
    summed = [params[f"{table.name}.weight"][ids].sum(0) for table, ids in zip(layer.maps, fields, strict=True)]
    return jnp.concatenate([jnp.log1p(x[: layer.counts].astype(jnp.float32)), *summed])


def _standardised(x: jax.Array, eps: float) -> jax.Array:
    """With the mean 0 and the variance 1 along the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)


def _linear(layer: tasks.Linear, params: Params, x: jax.Array, form: Form) -> jax.Array:
    """[in] or [T, in] to [out] or [T, out]."""
    x, weight = form.lowered(x, params[f"{layer.name}.weight"])
    result = weight @ x if x.ndim == 1 else x @ weight.T
    if layer.bias:
        (bias,) = form.lowered(params[f"{layer.name}.bias"])
        result = result + bias
    if layer.lora:
        first, second = form.lowered(params[f"{layer.name}.lora_a"], params[f"{layer.name}.lora_b"])
        result = result + network.LORA_SCALE * (x @ first.T @ second.T)
    return result


def _attention(layer: tasks.Attention, params: Params, x: jax.Array, form: Form) -> jax.Array:
    """Self-attention of [T, dim]."""
    length, groups, share = len(x), layer.groups, layer.heads // layer.groups
    query, key, value = (_linear(part, params, x, form).reshape(length, -1, layer.head_dim) for part in layer.maps[:3])
    if layer.rotary:
        query, key = form.lowered(_rotated(layer, query), _rotated(layer, key))
    query = query.reshape(length, groups, share, layer.head_dim)
    scores = jnp.einsum("tgsd,ugd->gstu", query, key, preferred_element_type=jnp.float32) / np.sqrt(layer.head_dim)
    if layer.causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    (shares,) = form.lowered(jax.nn.softmax(scores, -1))
    mixed = jnp.einsum("gstu,ugd->tgsd", shares, value)
    return _linear(layer.maps[3], params, mixed.reshape(length, -1), form)


def _rotated(layer: tasks.Attention, x: jax.Array) -> jax.Array:
    """[T, heads, head] with the pairs (first half, second half) of every head turned by their angles."""
    half = layer.head_dim // 2
    angles = np.arange(len(x))[:, None] * layer.rotary ** (-np.arange(half) / half)
    cos, sin = (np.asarray(f(angles), np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _convolve(x: jax.Array, weight: jax.Array, stride: int, padding: int) -> jax.Array:
    """[C, H, W] to [O, H', W'] by XLA's convolution."""
    return lax.conv_general_dilated(x[None], weight, (stride, stride), [(padding, padding)] * 2)[0]


def _convolve_patches(x: jax.Array, weight: jax.Array, stride: int, padding: int) -> jax.Array:
    """The same as one matrix product [O, C*k*k] @ [C*k*k, H'*W'].

    Under vmap the weight's gradient of :func:`_convolve` is a grouped convolution with a group per example, which XLA
    runs as a slow loop on a CPU (and every convolution inside a scan on one thread); this one's is a batched product.
    """
    kernel = weight.shape[2]
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    height, width = ((size - kernel) // stride + 1 for size in x.shape[1:])
    shifted = [
        x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
        for i in range(kernel)
        for j in range(kernel)
    ]
    columns = jnp.stack(shifted, 1).reshape(-1, height * width)
    return (weight.reshape(len(weight), -1) @ columns).reshape(-1, height, width)


def _pool(x: jax.Array, kernel: int, stride: int, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Windows of [C, H, W] reduced by ``combine`` over shifted slices; the gradient is elementwise where that of
    ``lax.reduce_window`` is a scatter."""
    for axis in (2, 1):
        last = (x.shape[axis] - kernel) // stride * stride
        x = reduce(combine, [lax.slice_in_dim(x, i, i + last + 1, stride, axis) for i in range(kernel)])
    return x


def _first_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """max(a, b); of equal values the first takes the whole gradient. Along rows, then columns, this makes the first
    maximum of the window in row-major order the one, as in PyTorch."""
    return jnp.where(a >= b, a, b)


def _cell(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h, c) from gate pre-activations [4H] in the order i, f, g, o and the previous cell state [H]."""
    i, f, g, o = jnp.split(gates, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _recur_unrolled(gates: jax.Array, weight_hh: jax.Array) -> jax.Array:
    """:func:`_recur` by a Python loop and the ordinary gradient: the paper's program, of T copies of the cell."""
    h = c = jnp.zeros(weight_hh.shape[1], gates.dtype)
    hidden = []
    for gate in gates:
        h, c = _cell(gate + weight_hh @ h, c)
        hidden.append(h)
    return jnp.stack(hidden)


@jax.custom_vjp
def _recur(gates: jax.Array, weight_hh: jax.Array) -> jax.Array:
    """Hidden states [T, H] of an LSTM from the inputs' share of its gates, [T, 4H], and a zero initial state.

    The gradient of ``weight_hh`` is one product after the backward scan. Left to itself, the scan would carry a
    [4H, H] sum (under vmap one per example) through every time step.
    """
    return _recur_forward(gates, weight_hh)[0]


def _recur_forward(gates: jax.Array, weight_hh: jax.Array):
    def step(state: tuple[jax.Array, jax.Array], gate: jax.Array):
        gate = gate + weight_hh @ state[0]
        h, c = _cell(gate, state[1])
        return (h, c), (h, c, gate)

    zero = jnp.zeros(weight_hh.shape[1], gates.dtype)
    _, (h, c, gates) = lax.scan(step, (zero, zero), gates)
    return h, (weight_hh, h, c, gates)


def _recur_backward(saved, h_gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight_hh, h, c, gates = saved
    zero = jnp.zeros((1, h.shape[1]), h.dtype)
    earlier_h, earlier_c = jnp.concatenate([zero, h[:-1]]), jnp.concatenate([zero, c[:-1]])

    def step(carried: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array, jax.Array]):
        from_output, gate, previous_c = now
        _, pull_back = jax.vjp(_cell, gate, previous_c)
        gate_gradient, c_gradient = pull_back((carried[0] + from_output, carried[1]))
        return (weight_hh.T @ gate_gradient, c_gradient), gate_gradient

    _, gate_gradients = lax.scan(step, (zero[0], zero[0]), (h_gradient, gates, earlier_c), reverse=True)
    return gate_gradients, gate_gradients.T @ earlier_h


_recur.defvjp(_recur_forward, _recur_backward)
