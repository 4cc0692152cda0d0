"""Examples and tokens per second, on records with known answers."""

from __future__ import annotations

import pytest

from harness.analysis.frames import build
from harness.report import contents, model
from harness.report.chapters import tables as task_tables
from harness.report.chapters import throughput
from harness.tasks import TASKS
from tests.support import record_factory as factory

PLAIN = {"framework": "pytorch", "variant": "eager", "private": False}
PRIVATE = {"framework": "opacus", "variant": "hooks"}
SECONDS = {"plain": (100.0, 110.0, 120.0), "private": (150.0, 165.0, 180.0)}


def tables(task, **more):
    records = [
        factory.record(task=task, **more, seconds=[SECONDS[side][number]], round=number, **who)
        for side, who in (("plain", PLAIN), ("private", PRIVATE))
        for number in range(3)
    ]
    return build(records, factory.PAPER_ROWS, {"opacus-hooks": "pytorch-eager"})


def test_tokens_and_the_time_over_the_twin():
    found = throughput.frame(tables("gpt2-lm")).set_index("contestant")
    task = TASKS["gpt2-lm"]
    assert found.loc["opacus-hooks"].examples_per_second == pytest.approx(task.train_size / 165)
    assert found.loc["opacus-hooks"].tokens_per_second == pytest.approx(128 * task.train_size / 165)
    assert found.loc["opacus-hooks"].over_twin == pytest.approx(1.5)
    assert found.loc["opacus-hooks"].twin == "pytorch-eager"
    assert found.loc["pytorch-eager"].isna().over_twin


def test_utilisation_is_the_models_arithmetic_over_the_measured_peak():
    machine = {**factory.MACHINE, "peaks": {"flops_per_second": 1e12, "bytes_per_second": 1e10}}
    found = throughput.frame(tables("gpt2-lm", machine=machine))
    share = TASKS["gpt2-lm"].training_flops * 60_000 / 165 / 1e12  # the rows that the records name
    assert found.set_index("contestant").loc["opacus-hooks"].utilisation == pytest.approx(share)
    (grid,) = throughput.grids(found)
    assert f"{100 * share:.0f} %" in {row[grid.header.index("of peak")] for row in grid.rows}


def test_no_utilisation_where_no_peak_of_that_precision_was_measured():
    machine = {**factory.MACHINE, "peaks": {"flops_per_second": 1e12, "bytes_per_second": 1e10}}
    for found in (throughput.frame(tables("gpt2-lm")), throughput.frame(tables("gpt2-lm-bf16", machine=machine))):
        assert found.utilisation.isna().all()
        (grid,) = throughput.grids(found)
        assert "of peak" not in grid.header


def test_only_tokens_have_tokens_per_second():
    def header(task):
        (grid,) = throughput.grids(throughput.frame(tables(task)))
        return grid.header

    assert "tokens/s" in header("gpt2-lm") and "tokens/s" not in header("mnist-cnn")


def test_the_report_has_the_chapter():
    titles = [chapter.title for chapter in contents.end_to_end(tables("gpt2-lm"))]
    assert "Examples and tokens per second" in titles


def test_a_report_says_where_the_gate_judged_a_small_network():
    gate = {"passed": True, "key": "0" * 16, "checks": [], "judged_as": "small-gpt2"}
    found = tables("gpt2-lm", gate=gate)
    (section,) = model.sections(found)
    (grid,) = task_tables.seconds(found, section)
    assert any("The gate judged a small network of the same structure (small-gpt2)" in note for note in grid.notes)
    (grid,) = task_tables.seconds(tables("gpt2-lm"), section)
    assert not any("small network" in note for note in grid.notes)
