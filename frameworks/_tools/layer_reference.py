"""Float64 truth of layers for the correctness check: one example at a time by PyTorch's own backward pass.

``python -m frameworks._tools.layer_reference --layers a,b --out FOLDER`` writes ``<layer>.npz`` each: per parameter the
gradients of the examples of :func:`harness.worker.gate.layers.checked_batch`, [n, *shape] float64, sparse where most
are zero. Runs in an environment with PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from frameworks._shared.torch.layers import Model, canonical, load, own_losses, plain_module
from harness import layers
from harness.layers import Layer
from harness.worker.gate import layers as layer_gate
from harness.worker.gate.layers import Check


def gradients(layer: Layer) -> dict[str, np.ndarray]:
    """[n, *shape] float64 by parameter."""
    inputs, targets = layer_gate.checked_batch(layer)
    found = list(examples(layer, layer_gate.checked_weights(layer), inputs, targets))
    return {name: np.stack([one[name] for one in found]) for name in layer.parameters}


def examples(
    layer: Layer, weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], targets: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """The float64 gradients of one example after the other, by parameter."""
    module = plain_module(layer)
    load(module, layer, weights)
    model = Model(layer, module).double()
    losses = own_losses(layer)
    for row in range(len(targets)):
        model.zero_grad()
        one = []
        for i in layer.inputs:
            value = torch.from_numpy(inputs[i.name][row : row + 1])
            one.append(value.double() if value.is_floating_point() else value)
        losses(model(*one), torch.from_numpy(targets[row : row + 1]).double()).sum().backward()
        found = {}
        for name, parameter in canonical(module, layer).items():
            assert parameter.grad is not None
            found[name] = parameter.grad.numpy().copy()
        yield found


def compare(
    layer: Layer, passes: str, left: Mapping[str, np.ndarray], size: int, seed: int, number: int, bound: float
) -> Check:
    """What a process that was timed with batches of ``size`` and ``seed`` left of its batch ``number``, against the
    truth."""
    inputs, targets = layers.batch(layer, size, layers.batch_seed(seed, number))
    rows = left["rows"] if passes == "per_sample" else np.arange(size)
    chosen = {name: value[rows] for name, value in inputs.items()}
    truth = examples(layer, layers.initial_parameters(layer, seed), chosen, targets[rows])
    return layer_gate.last_pass(layer, passes, left, truth, bound)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--left", type=Path, help="compare this file of the first layer instead, and print the check")
    parser.add_argument("--passes", default="plain")
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--bound", type=float, default=1.0)
    arguments = parser.parse_args()
    names = arguments.layers.split(",")
    if arguments.left is not None:
        torch.set_num_threads(1)
        with np.load(arguments.left, allow_pickle=False) as left:
            found = dict(left)
        layer = layers.LAYERS[names[0]]
        a = arguments
        print(json.dumps(compare(layer, a.passes, found, a.batch_size, a.seed, a.number, a.bound)))
        return
    for name in names:
        packed = layer_gate.pack(gradients(layers.LAYERS[name]))
        part = arguments.out / f".{name}.{os.getpid()}.part"
        with part.open("wb") as file:
            np.savez(file, **packed)
        part.rename(arguments.out / f"{name}.npz")


if __name__ == "__main__":
    main()
