"""The truth about the fake layers: what their last timed pass should have left, by their own formula in float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from harness import layers
from harness.worker.gate import layers as layer_gate
from harness.worker.gate.layers import Check

PHANTOM = Path(__file__).resolve().parent.parent / "fakes" / "phantom"


def module() -> Any:
    """Return the phantom's ``layers.py``."""
    spec = importlib.util.spec_from_file_location("phantom_layers", PHANTOM / "layers.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def last_pass(name: str, passes: str, path: Path, size: int, seed: int, number: int, bound: float) -> Check:
    """Return what ``frameworks._tools.layer_reference --left`` says of the file of the phantom's LayerNorm."""
    layer = layers.LAYERS[name]
    inputs, targets = layers.batch(layer, size, layers.batch_seed(seed, number))
    with np.load(path) as left:
        found = dict(left)
    rows = found.get("rows", np.arange(size))
    weights = {k: v.astype(np.float64) for k, v in layers.initial_parameters(layer, seed).items()}
    truth = module().gradients(weights, inputs["x"][rows].astype(np.float64), targets[rows].astype(np.float64))
    examples = ({name: value[row] for name, value in truth.items()} for row in range(len(rows)))
    return layer_gate.last_pass(layer, passes, found, examples, bound)
