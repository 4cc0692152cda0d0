"""Float64 truth of layers for the correctness check: one example at a time by PyTorch's own backward pass.

``python -m frameworks.layer_reference --layers a,b --out FOLDER`` writes ``<layer>.npz`` each: per parameter the
gradients of the examples of :func:`harness.layer_gate.checked_batch`, [n, *shape] float64, sparse where most are zero.
Runs in an environment with PyTorch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from frameworks.torch_layers import Model, canonical, load, own_losses, plain_module
from harness import layer_gate, layers
from harness.layers import Layer


def gradients(layer: Layer) -> dict[str, np.ndarray]:
    """[n, *shape] float64 by parameter."""
    module = plain_module(layer)
    load(module, layer, layer_gate.checked_weights(layer))
    model = Model(layer, module).double()
    losses = own_losses(layer)
    inputs, targets = layer_gate.checked_batch(layer)
    found: dict[str, list[np.ndarray]] = {name: [] for name in layer.parameters}
    for row in range(len(targets)):
        model.zero_grad()
        one = []
        for i in layer.inputs:
            value = torch.from_numpy(inputs[i.name][row : row + 1])
            one.append(value.double() if value.is_floating_point() else value)
        losses(model(*one), torch.from_numpy(targets[row : row + 1]).double()).sum().backward()
        for name, parameter in canonical(module, layer).items():
            assert parameter.grad is not None
            found[name].append(parameter.grad.numpy().copy())
    return {name: np.stack(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for name in arguments.layers.split(","):
        packed = layer_gate.pack(gradients(layers.LAYERS[name]))
        part = arguments.out / f".{name}.{os.getpid()}.part"
        with part.open("wb") as file:
            np.savez(file, **packed)
        part.rename(arguments.out / f"{name}.npz")


if __name__ == "__main__":
    main()
