"""Canonical weights and data in the layouts of TensorFlow and Keras: images NHWC, kernels HWIO, matrices [in, out].

Numpy only, so that contestants of both can use it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness import network, tasks
from harness.tasks import Task


def input_shape(task: Task) -> tuple[int, ...]:
    """Return the shape of one example with its channels last."""
    return (*task.input_shape[1:], task.input_shape[0]) if len(task.input_shape) == 3 else task.input_shape


def data(task: Task, x: np.ndarray) -> np.ndarray:
    """Return the task's inputs with channels last: NCHW images become NHWC."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if len(task.input_shape) == 3 else x


def parameters(task: Task, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return canonical weights in these layouts, under the same names."""
    axes = _axes(task)
    return {name: values[name].reshape(shape).transpose(order).reshape(final) for name, shape, order, final in axes}


def canonical(task: Task, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of :func:`parameters`, in memory of its own."""
    back = {}
    for name, shape, order, _ in _axes(task):
        stored = values[name].reshape([shape[axis] for axis in order])
        back[name] = np.array(stored.transpose(np.argsort(order)), np.float32).reshape(task.parameters[name])
    return back


def _axes(task: Task) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(name, canonical shape with its axes told apart, order of the axes here, shape here)."""
    rules = []
    channels, flattened = 1, False
    for layer in network.walk(task.layers):
        match layer:
            case tasks.Conv2d(name, c_in, channels, k):
                rules.append((f"{name}.weight", (channels, c_in, k, k), (2, 3, 1, 0), (k, k, c_in, channels)))
            case tasks.Flatten():
                flattened = True
            case tasks.Linear(name, n_in, n_out):
                # Canonical Flatten runs over [C, H, W], that of these layouts over [H, W, C].
                split = (n_out, channels, n_in // channels) if flattened else (n_out, 1, n_in)
                rules.append((f"{name}.weight", split, (2, 1, 0), (n_in, n_out)))
                flattened = False
                if layer.lora:
                    rules.append((f"{name}.lora_a", (layer.lora, n_in), (1, 0), (n_in, layer.lora)))
                    rules.append((f"{name}.lora_b", (n_out, layer.lora), (1, 0), (layer.lora, n_out)))
            case tasks.Lstm(name, n_in, h):
                rules.append((f"{name}.weight_ih", (4 * h, n_in), (1, 0), (n_in, 4 * h)))
                rules.append((f"{name}.weight_hh", (4 * h, h), (1, 0), (h, 4 * h)))
    known = {rule[0] for rule in rules}
    straight = [(n, s, tuple(range(len(s))), s) for n, s in task.parameters.items() if n not in known]
    return rules + straight
