"""Layers as data against the paper's sizes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import layers
from harness.errors import BadInput
from harness.layers import LAYERS, PAPER, SWEEP, SWEEP_ROWS

PAPER_BYTES = Path(__file__).parents[2] / "results" / "paper" / "layer_memory_breakdown.csv"
BLOCK = 512
"""CUDA's allocator rounds every tensor up to it, and the paper measured what was allocated."""


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def published() -> list[dict[str, str]]:
    with PAPER_BYTES.open() as file:
        return list(csv.DictReader(file))


def as_printed(text: str) -> Any:
    """The printed figure: rounded to its last digit, and large allocations to 2 MB."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), rel=0.03, abs=0.5 * 10.0**-digits)


def test_bytes_are_those_that_the_paper_measured():
    rows = {layer.paper_row: layer for layer in PAPER}
    for line in published():
        layer, size = rows[line["layer"]], int(line["batch_size"])
        first, *others = layer.inputs
        # The paper counts the first input only: not the keys and values of the attention, not the initial states.
        example = layer.example_bytes - sum(i.bytes for i in others)
        expected = {
            "input_mb": rounded(size * first.bytes),
            "labels_mb": rounded(size * layer.label_bytes),
            "L_mb": sum(rounded(4 * int(np.prod(shape))) for shape in layer.parameters.values()),
        }
        for column, value in expected.items():
            assert value / 1e6 == as_printed(line[column]), (layer.name, size, column)
        if example > 10 * BLOCK:
            assert example / 1e6 == as_printed(line["C_mb"]), (layer.name, size)


def test_parameter_counts_of_the_published_table():
    counts = {
        "linear": 262_656,
        "conv": 262_208,
        "layer-norm": 128,
        "instance-norm": 512,
        "group-norm": 512,
        "embedding": 2_000_000,
        "mha": 40_400,
        "rnn": 20_000,
        "gru": 60_000,
        "lstm": 80_000,
    }
    assert {name: LAYERS[name].parameter_count for name in counts} == counts


def test_sweep_has_the_papers_seven_ratios():
    for layer, ratio in zip(SWEEP, SWEEP_ROWS.values(), strict=True):
        assert rounded(layer.parameter_bytes) / layer.example_bytes == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_arrays_have_the_shapes_and_bytes_that_are_declared(layer):
    inputs, targets = layers.batch(layer, 2, seed=3)
    assert sum(array.nbytes for array in inputs.values()) == 2 * layer.input_bytes
    assert targets.nbytes == 2 * layer.label_bytes
    axis = layer.class_axis + 1 if layer.class_axis >= 0 else -1
    np.testing.assert_allclose(targets.sum(axis=axis), 1.0, rtol=1e-4)
    weights = layers.initial_parameters(layer, seed=3)
    assert {name: array.shape for name, array in weights.items()} == dict(layer.parameters)
    assert sum(array.nbytes for array in weights.values()) == layer.parameter_bytes
    again, _ = layers.batch(layer, 2, seed=3)
    other, _ = layers.batch(layer, 2, seed=4)
    for name in inputs:
        assert np.array_equal(inputs[name], again[name])
        assert layer.inputs[0].vocabulary == 1 or not np.array_equal(inputs[name], other[name])


def test_select_takes_layers_and_sets():
    assert layers.select(["linear", "sweep", "linear"]) == ("linear", *(layer.name for layer in SWEEP))
    with pytest.raises(BadInput, match=r"'conv4d' \(did you mean conv\?\); choose from conv, .*paper, today, sweep"):
        layers.select(["conv4d"])
