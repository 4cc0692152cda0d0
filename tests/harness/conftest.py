"""What the tests of several folders share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.layers import LAYERS
from harness.worker.gate import layers as layer_gate
from tests.support import phantom_layer


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the harness's own, for runs of fakes."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float64 gradients of the checked batch of the fake LayerNorm."""
    layer = LAYERS["layer-norm"]
    inputs, targets = layer_gate.checked_batch(layer)
    weights = {name: value.astype(np.float64) for name, value in layer_gate.checked_weights(layer).items()}
    truth = phantom_layer.module().gradients(weights, inputs["x"].astype(np.float64), targets.astype(np.float64))
    path = tmp_path_factory.mktemp("reference") / "layer-norm.npz"
    np.savez(path, **layer_gate.pack(truth))
    return path
