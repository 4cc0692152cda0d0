"""Published figures of others beside the measured ones: only ratios meet, and every figure says where it is from."""

from __future__ import annotations

import pytest

from harness.analysis.frames import build
from harness.report import contents
from harness.report.chapters import elsewhere
from tests.support import record_factory as factory


def test_every_published_figure_has_a_source_a_machine_and_the_way_it_was_read():
    found = elsewhere.published()
    assert len(found) > 30 and set(found.read) == set(elsewhere.READ)
    assert found[["method", "network", "setting", "hardware", "source"]].notna().all().all()
    assert set(found.flat_exact) == {"yes", "no"}
    known = found[found.ratio_low.notna()]
    assert ((known.ratio_low > 0) & (known.ratio_low <= known.ratio_high) & (known.ratio_high <= 1)).all()


def test_a_ratio_is_made_of_its_two_speeds_and_missing_where_there_is_no_twin():
    found = elsewhere.published()
    (large,) = found[(found.network == "GPT-2 large") & (found.method == "book-keeping (fastDP)")].itertuples()
    assert large.ratio_low == large.ratio_high == pytest.approx(62 / 71)
    without = found[found.ratio_low.isna() & found.times_of.isna()]
    assert len(without) == 9 and without.without_dp.isna().all() and without.examples_per_second.notna().all()


def test_speed_over_another_training_with_dp_stands_apart():
    found = elsewhere.published()
    over = found[found.times_of.notna()]
    assert set(over.task) == {"encoder-bias", "recsys"}
    assert over.ratio_low.isna().all() and ((over.times_low >= 1) & (over.times_low <= over.times_high)).all()
    _, theirs = elsewhere.chapter(build([factory.record()])).grids
    assert [row[4:6] for row in theirs.rows] == [
        ("2.00 to 30.0", "training all parameters with DP"),
        ("119", "DP-SGD with noise on whole tables"),
    ]


def run(sizes=(64, 512), **more):
    """PyTorch takes 2 s; Opacus 5 s at the first batch size and 4 s at the others."""
    records = [
        factory.record(
            framework=f, variant=v, private=p, batch_size=b, round=r, seconds=[s if b == sizes[0] else late], **more
        )
        for f, v, p, s, late in (("pytorch", "eager", False, 2.0, 2.0), ("opacus", "hooks", True, 5.0, 4.0))
        for r in range(3)
        for b in sizes
    ]
    return build(records, factory.PAPER_ROWS, {"opacus-hooks": "pytorch-eager"})


def test_the_measured_rows_are_speeds_over_the_own_twin_over_the_batch_sizes():
    (row,) = elsewhere.measured(run()).itertuples()
    assert (row.contestant, row.twin, row.batch_sizes, row.n) == ("opacus-hooks", "pytorch-eager", "64, 512", 3)
    assert (row.ratio_low, row.ratio_high) == pytest.approx((0.4, 0.5))
    theirs, _, ours = elsewhere.chapter(run()).grids
    assert ours.rows[0][-2:] == ("0.40 to 0.50", "3")
    assert any(elsewhere.NO_TWIN in row for row in theirs.rows)


def test_doubts_of_the_measured_ones_stay_on_the_figure():
    *_, ours = elsewhere.chapter(run(sizes=(64,), disturbed=True)).grids
    assert ours.rows[0][-2] == "0.40ᵈ"


def test_a_report_has_the_chapter_with_the_published_figures_alone_where_no_twin_was_measured():
    report = contents.build([factory.record()])
    (chapter,) = [c for c in report.chapters if c.title == elsewhere.TITLE]
    assert len(chapter.grids) == 2 and list(chapter.frames) == ["published-elsewhere"]
    assert all(len(row) == len(grid.header) for grid in chapter.grids for row in grid.rows)
