"""A wrong update is told by what is wrong with it."""

from __future__ import annotations

import numpy as np
import pytest

from harness.worker.gate import diagnosis

SLICES = {"fc1.weight": slice(0, 40), "fc1.bias": slice(40, 50)}
EXPECTED = np.random.default_rng(0).standard_normal(50)


def told(found: np.ndarray, rows: int = 12) -> str:
    return diagnosis.of(found, EXPECTED, SLICES, rows, batch_size=16, bound=2.5)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (16 / 12, "1.333 times as long as it ought to be, 16 / 12: the divisor is the batch's own length"),
        (16.0, "16 times as long as it ought to be, 16: it is the sum, and not divided by B"),
        (0.4, "0.4 times as long as it ought to be, 1 / C: C is missing"),
        (0.7, "0.7 times as long as it ought to be"),
        (1.0, ""),
    ],
)
def test_a_factor_is_told_with_what_it_means(factor, words):
    assert told(factor * EXPECTED) == words


def test_a_layer_that_does_not_move_is_named():
    found = EXPECTED.copy()
    found[SLICES["fc1.bias"]] = 0.0
    assert told(found) == "nothing moves fc1.bias"


def test_of_what_is_simply_wrong_nothing_is_said():
    assert told(EXPECTED[::-1]) == ""
