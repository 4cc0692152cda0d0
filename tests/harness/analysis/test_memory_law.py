"""The laws of memory: by hand, against each other, and on the paper's own tables."""

from __future__ import annotations

import math

import pytest

from harness.analysis import memory_law as law
from harness.analysis.memory_law import Parts
from harness.layers import LAYERS, PAPER


def test_the_laws_by_hand() -> None:
    assert law.non_private(4, C=10, L=100) == 240
    assert law.paper_private(4, C=10, L=100) == 540
    assert law.opacus_private(4, C=10, L=100) == 1040
    # Two micro-batches of 2: outputs of two examples instead of four, 7 bytes kept of each.
    assert law.dpcore_private(4, C=10, L=100, m=2, output=3, kept=7, apart=50) == 40 - 2 * 3 + 200 + 2 * 7 + 50


def test_dpcore_holds_no_more_than_training_without_dp_where_nothing_is_kept() -> None:
    for layer in PAPER:
        C, L = layer.example_bytes, layer.parameter_bytes
        for b in (1, 16, 512):
            without = law.non_private(b, C, L)
            assert law.dpcore_private(b, C, L, m=16, output=layer.output_bytes) <= without
            assert law.dpcore_private(b, C, L, m=b) == without
            # More than the batch at once is the batch.
            assert law.dpcore_private(b, C, L, m=10 * b, kept=L) == law.dpcore_private(b, C, L, m=b, kept=L)
            assert law.opacus_private(b, C, L) - without == 2 * b * L


def test_the_laws_without_and_with_dp_part_by_what_the_paper_says() -> None:
    assert law.paper_private(8, 5, 70) - law.non_private(8, 5, 70) == (8 - 1) * 70


def test_the_approximated_overhead_is_near_the_exact_one_far_from_the_borders() -> None:
    far = [Parts(512, 512 * 100_000, 0, 10), Parts(512, 512, 0, 10**9)]
    assert [p.regime for p in far] == ["L/C << b", "L/C >> b"]
    for p in far:
        exact = law.overhead(p.batch_size, p.C, p.L)
        assert law.overhead_by_regime(p) == pytest.approx(exact, rel=0.01)
    middle = Parts(512, 512 * 1000, 0, 512 * 1000)
    assert middle.regime == "L/C ~ b"
    assert law.overhead_by_regime(middle) == pytest.approx(law.overhead(512, middle.C, middle.L), rel=0.01)


@pytest.mark.parametrize(("rows", "published"), [(100, 50.0), (1_000, 496.0), (10_000, 4_951.0), (20_000, 9_901.0)])
def test_l_over_c_of_the_sweep_is_that_of_the_paper(rows: int, published: float) -> None:
    layer = LAYERS[f"embedding-n{rows}"]
    b = 64
    parts = Parts(b, b * layer.input_bytes, b * layer.label_bytes, layer.parameter_bytes)
    assert layer.example_bytes == parts.C
    assert parts.ratio == pytest.approx(published, rel=0.015)
    assert parts.output == layer.output_bytes


def test_errors_and_shares_point_the_right_way() -> None:
    assert law.share_explained(30, 60) == 0.5
    assert law.relative_error(141, 100) == pytest.approx(0.41)
    assert law.relative_error(76.7, 100) == pytest.approx(-0.233)


def test_the_spread_divides_by_n_less_one() -> None:
    found = law.spread([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.n) == (2.0, 1.0, 3)
    assert math.isnan(law.spread([1.0]).deviation)
    with pytest.raises(ValueError, match="at least one"):
        law.spread([])
