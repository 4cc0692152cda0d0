"""Sketches of arrays, whose distance is that of the arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.worker import sketch


def test_a_sketch_tells_how_far_arrays_lie_apart():
    rng = np.random.default_rng(3)
    one = {"a": rng.standard_normal((300, 70)), "b": rng.standard_normal(5)}
    known = sketch.of(one)
    assert len(known) == sketch.WIDTH and sketch.apart(known, sketch.of(dict(reversed(one.items())))) == 0.0
    for size in (1e-6, 1e-2, 1.0):
        apart = {name: value + size * rng.standard_normal(value.shape) for name, value in one.items()}
        assert sketch.apart(known, sketch.of(apart)) == pytest.approx(size, rel=0.3)
    assert sketch.apart(known, [math.nan] * sketch.WIDTH) == math.inf == sketch.apart(known, known[:3])
    nothing = sketch.of({"a": np.zeros(3)})
    assert sketch.apart(nothing, nothing) == 0.0 and sketch.apart(nothing, known) == math.inf
