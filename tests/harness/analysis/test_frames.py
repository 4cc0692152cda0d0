"""The frames: what is pooled, what is kept apart, what counts, and how failures show."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis import frames, naming
from harness.analysis.frames import build
from harness.report import model
from harness.report.chapters import tables as task_tables
from tests.support import record_factory as factory


def tables(records):
    return build(records, factory.PAPER_ROWS)


def cell(t, **place):
    rows = t.cells
    for column, value in place.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def text(grids):
    return "\n".join("\n".join([g.title, *map(" ".join, g.rows), *g.notes]) for g in grids)


def main_table(t):
    return text(g for s in model.sections(t) for g in task_tables.seconds(t, s))


def test_a_cell_is_the_median_of_processes_and_a_process_the_median_of_its_epochs():
    t = tables([factory.record(round=r, seconds=[v, v, 50 * v]) for r, v in enumerate([3.0, 1.0, 2.0])])
    row = cell(t, contestant="opacus-hooks")
    assert (row["median"], row.low, row.high, row.n) == (2.0, 1.0, 3.0, 3)


def test_rows_come_the_fastest_first_in_every_block_of_the_table():
    t = tables(factory.quick_run(rounds=1))
    assert t.order == ("pytorch-eager", "dpcore-book-keeping", "jax-vmap", "opacus-ghost", "opacus-hooks")
    fast_there = [factory.record(task="imdb-lstm", seconds=[0.1]), factory.record(framework="jax", seconds=[0.1])]
    slow_there = [factory.record(seconds=[9.0]), factory.record(task="imdb-lstm", framework="jax", seconds=[9.0])]
    cells = tables([*fast_there, *slow_there]).cells
    assert list(cells.framework if "framework" in cells else cells.contestant.str.partition("-")[0]) == [
        *("jax", "opacus"),
        *("opacus", "jax"),
    ]
    assert list(dict.fromkeys(t.cells.task)) == list(factory.LEVEL)


def test_the_frameworks_of_this_repository_name_rows_that_the_paper_has():
    rows = naming.paper_rows()
    assert rows["opacus-hooks"] == "Opacus"
    assert set(rows.values()) <= set(naming.PAPER_ORDER)


def test_two_machines_are_never_pooled_nor_paired():
    here = [
        factory.record(seconds=[1.0], round=0),
        factory.record(framework="dpcore", variant="a", seconds=[0.5], round=0),
    ]
    there = [factory.record(seconds=[100.0], round=0, machine=factory.OTHER_MACHINE)]
    t = tables(here + there)
    assert len(model.sections(t)) == 2
    assert sorted(t.cells[t.cells.contestant == "opacus-hooks"]["median"]) == [1.0, 100.0]
    assert set(t.cells.n) == {1}
    assert "H200" in main_table(t) or any("H200" in s.machine for s in model.sections(t))


def test_machines_that_look_alike_are_told_apart_by_their_id():
    other = {**factory.MACHINE, "id": "deadbeef"}
    t = tables([factory.record(), factory.record(machine=other)])
    assert len(model.sections(t)) == 2


def test_one_machine_with_different_threads_is_two_sections_with_files_of_their_own():
    t = tables([factory.record(machine={**factory.MACHINE, "threads": n}) for n in (1, 2)])
    slugs = {naming.machine_slug(section.machine) for section in model.sections(t)}
    assert slugs == {"3f2a91c0 1 thread", "3f2a91c0 2 threads"}


def test_a_changing_load_does_not_make_another_machine():
    busy = {**factory.MACHINE, "load_average": 7.0}
    t = tables([factory.record(round=0), factory.record(round=1, machine=busy)])
    assert cell(t, contestant="opacus-hooks").n == 2


@pytest.mark.parametrize("state", ["oom", "timeout", "crashed", "unsupported", "rejected"])
def test_a_failure_stands_in_its_place_with_its_reason(state):
    t = tables([factory.record(framework="jax", variant="vmap"), factory.record(state=state, reason="because of this")])
    assert cell(t, contestant="opacus-hooks").state == state
    shown = main_table(t)
    assert f"opacus-hooks {state}" in shown
    assert f"{state}: opacus-hooks at 512: because of this" in shown


def test_a_time_without_a_passed_gate_is_not_shown():
    t = tables([factory.record(gate_passed=None, seconds=[1.2345])])
    assert cell(t, contestant="opacus-hooks").state == "ungated"
    assert "1.23" not in main_table(t)
    t = tables([factory.record(gate_passed=False, seconds=[1.2345])])
    assert cell(t, contestant="opacus-hooks").state == "rejected"
    assert "1.23" not in main_table(t)


def test_one_rejected_process_rejects_its_cell():
    good = [factory.record(round=r, seconds=[1.2345]) for r in range(4)]
    t = tables([*good, factory.record(round=4, state="rejected", reason="replay differs")])
    row = cell(t, contestant="opacus-hooks")
    assert (row.state, row.n) == ("rejected", 0)
    assert "replay differs" in main_table(t)
    assert "1.23" not in main_table(t)


def test_some_failed_processes_are_told_beside_the_median_of_the_others():
    t = tables([factory.record(round=0, seconds=[2.0]), factory.record(round=1, state="oom", reason="too big")])
    row = cell(t, contestant="opacus-hooks")
    assert (row.state, row.n, row.failed) == ("ok", 1, 1)
    assert "ᶠ opacus-hooks at 512, besides the 1 shown: 1 oom: too big" in main_table(t)


def test_what_failed_before_timing_shows_at_every_batch_size():
    stopped = factory.record(purpose="memory", state="unsupported", reason="no LSTM", batch_size=64)
    others = [factory.record(framework="jax", variant="vmap", batch_size=b) for b in (64, 512)]
    t = tables([stopped, *others])
    assert cell(t, contestant="opacus-hooks", batch_size=512).state == "unsupported"
    assert "unsupported: opacus-hooks at 64, 512: no LSTM" in main_table(t)


def test_marks_are_shown_where_they_apply_and_only_there():
    plain = main_table(tables([factory.record()]))
    assert not any(word in plain for word in ("extrapolated", "synthetic", "disturbed"))
    marked = main_table(tables([factory.record(extrapolated=True, disturbed=True, synthetic=True)]))
    assert all(word in marked for word in ("extrapolated", "synthetic", "disturbed"))
    assert "1.00ᵉᵈ" in marked


def test_synthetic_and_genuine_data_are_two_tables():
    t = tables([factory.record(seconds=[1.0]), factory.record(seconds=[9.0], synthetic=True)])
    assert sorted(t.cells["median"]) == [1.0, 9.0]
    assert len(task_tables.seconds(t, model.sections(t)[0])) == 2


def test_a_failure_without_data_belongs_to_the_data_of_its_neighbours():
    t = tables(
        [factory.record(synthetic=True), factory.record(framework="jax", variant="v", state="crashed", data=None)]
    )
    assert list(t.cells.synthetic.unique()) == [True]


def test_whole_and_partial_epochs_of_one_run_stay_together():
    part = factory.record(seconds=[8.0], extrapolated=True, round=1)
    row = cell(tables([part, factory.record(seconds=[4.0], round=2)]), contestant="opacus-hooks")
    assert (row["median"], row.n, row.superseded, row.extrapolated) == (6.0, 2, 0, True)


def test_older_code_and_partial_epochs_are_left_out_and_counted():
    old = factory.record(seconds=[9.0], adapter_hash="old", started="2026-01-01T00:00:00+00:00")
    part = factory.record(seconds=[8.0], extrapolated=True, round=1, run="an earlier run")
    t = tables([old, part, factory.record(seconds=[1.0], round=2)])
    row = cell(t, contestant="opacus-hooks")
    assert (row["median"], row.n, row.superseded, row.extrapolated) == (1.0, 1, 2, False)
    assert "Left out: 2 processes" in main_table(t)


def pair(a, b, rounds=6, **more):
    rows = []
    for r in range(rounds):
        drift = 10.0**r
        rows.append(factory.record(framework="pytorch", variant="eager", private=False, seconds=[a * drift], round=r))
        rows.append(factory.record(seconds=[b * drift], round=r, **more))
    return rows


def test_ratios_are_paired_within_rounds():
    # Drift by factors of ten from round to round: only pairing gets an interval of no width.
    t = tables(pair(1.0, 2.5))
    row = t.ratios.iloc[0]
    assert row.contestant == "opacus-hooks" and row.baseline == "pytorch-eager" and row.n == 6
    assert np.allclose([row.ratio, row.low, row.high], 2.5)


def test_rounds_of_different_runs_are_not_paired():
    t = tables([factory.record(framework="pytorch", variant="eager", private=False), factory.record(run="run-2")])
    assert t.ratios.empty


def test_disturbed_pairs_are_left_out_while_two_others_remain():
    rows = pair(1.0, 2.0)
    rows.append(factory.record(framework="pytorch", variant="eager", private=False, round=9))
    rows.append(factory.record(seconds=[77.0], round=9, disturbed=True))
    row = tables(rows).ratios.iloc[0]
    assert (row.n, row.left_out, row.disturbed) == (6, 1, 0)
    assert math.isclose(row.ratio, 2.0)
    row = tables(pair(1.0, 2.0, rounds=3, disturbed=True)).ratios.iloc[0]
    assert (row.n, row.left_out, row.disturbed) == (3, 0, 1)


def test_without_a_baseline_there_are_no_ratios():
    assert tables([factory.record()]).ratios.empty
    assert task_tables.ratios(tables([factory.record()]), model.sections(tables([factory.record()]))[0]) == []


def test_memory_comes_from_memory_processes_and_names_its_metric():
    memory = factory.record(purpose="memory", memory={"peak_resident_growth": 3 * 2**20})
    t = tables([memory, factory.record(memory={"peak_resident_growth": 10**12})])
    grids = task_tables.memory(t, model.sections(t)[0])
    assert "MiB of peak_resident_growth" in grids[0].title
    assert grids[0].rows == (("opacus-hooks", "3.00"),)


def test_the_gate_table_shows_the_worst_error_and_every_failure():
    failed = factory.record(purpose="gate", run="run-2", gate_passed=False, state="rejected")
    t = tables([factory.record(purpose="gate"), failed])
    shown = text(task_tables.gate(t, model.sections(t)[0]))
    assert "opacus-hooks noise-standard-deviation 0.9 0.02 FAILED the noise is 10 times too small" in shown
    assert "sensitivity 0.9999 1.0001 passed" in shown


def test_privacy_shows_three_accountants_and_void_as_such():
    t = tables([factory.record(epsilon={"delta": 1e-5, "steps": 9, "rdp": 0.5, "pld": None, "own": 0.6})])
    grid = task_tables.privacy(t, model.sections(t)[0])[0]
    assert grid.rows == (("opacus-hooks", "512", "9", "1e-05", "0.5", "–", "0.6"),)
    assert "void" in grid.notes[0]


def test_coverage_counts_every_cell():
    t = tables(factory.quick_run(rounds=1))
    grid = task_tables.coverage(t, model.sections(t)[0])[0]
    assert grid.header == ("contestant", "cells", "ok", "oom", "unsupported")
    assert ("opacus-ghost", "8", "6", "0", "2") in grid.rows
    assert ("opacus-hooks", "8", "7", "1", "0") in grid.rows


def test_compile_seconds_have_a_table_of_their_own():
    t = tables([factory.record(compile_seconds=4.0, round=r) for r in range(3)])
    assert "4.00 [4.00, 4.00]" in text(task_tables.compile_seconds(t, model.sections(t)[0]))


def test_the_paper_is_shown_for_the_same_task_and_batch_sizes():
    t = tables([factory.record(batch_size=2048)])
    grid = task_tables.published(t, "mnist-cnn", [2048, 4096])
    assert ("JAX (DP)", "0.15") in grid.rows and ("PyVacy", "112.28") in grid.rows
    assert "2021" in grid.title and "A100" in grid.title
    assert task_tables.published(t, "logreg", [64]) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234.0, "1230"), (12.34, "12.3"), (0.999999, "1.00"), (0.00123, "0.00123"), (0.0, "0"), (float("nan"), "–")],
)
def test_numbers_have_three_digits_and_no_exponent(value, shown):
    assert naming.number(value) == shown


def test_tables_are_the_same_for_any_order_of_the_records():
    run = factory.quick_run(rounds=2)
    assert tables(run).cells.equals(tables(run[::-1]).cells)
    assert frames.baseline(tables(run).raw, {}) == "pytorch-eager"


def test_the_overhead_is_framework_times_dp_with_compiling_apart():
    """Plain PyTorch 2 s, JAX without DP 3 s, JAX with DP 12 s: 1.5 x 4 = 6, in rounds of different speed."""
    level = {("pytorch", "eager", False): 2.0, ("jax", "plain", False): 3.0, ("jax", "vmap", True): 12.0}
    records = [
        factory.record(
            framework=framework,
            variant=variant,
            private=private,
            seconds=[seconds * 1.3**r],
            compile_seconds=24.0 if private else 1.0,
            round=r,
        )
        for (framework, variant, private), seconds in level.items()
        for r in range(3)
    ]
    t = build(records, factory.PAPER_ROWS, {"jax-vmap": "jax-plain", "opacus-hooks": "pytorch-eager", "x-y": "z-a"})
    (row,) = t.overheads.itertuples()
    assert (row.contestant, row.twin, row.baseline, row.n) == ("jax-vmap", "jax-plain", "pytorch-eager", 3)
    assert (row.framework, row.dp, row.total) == pytest.approx((1.5, 4.0, 6.0))
    assert (row.compile, row.compile_twin) == (24.0, 1.0)
    (grid,) = task_tables.overheads(t, model.sections(t)[0])
    # The median epoch of the contestant takes 15.6 s.
    assert grid.rows[0][3:] == (
        "1.50× [1.50, 1.50]",
        "4.00× [4.00, 4.00]",
        "6.00× [6.00, 6.00]",
        "24.0 (1.54)",
        "1.00",
        "3",
        "",
    )


def test_an_overhead_of_disturbed_processes_says_so():
    records = [
        factory.record(framework=f, variant=v, private=p, seconds=[s], round=r, disturbed=r > 0)
        for f, v, p, s in (("pytorch", "eager", False, 2.0), ("opacus", "hooks", True, 5.0))
        for r in range(2)
    ]
    t = build(records, factory.PAPER_ROWS, {"opacus-hooks": "pytorch-eager"})
    (row,) = t.overheads.itertuples()
    assert (row.n, row.disturbed, row.left_out) == (2, 1, 0)
    (grid,) = task_tables.overheads(t, model.sections(t)[0])
    assert grid.rows[0][-2:] == ("2", "ᵈ") and any(note.startswith("ᵈ disturbed") for note in grid.notes)


@pytest.mark.parametrize(
    ("rounds", "words"), [(1, "too few for an interval"), (2, "too few for"), (3, "mean of 3 paired rounds")]
)
def test_fewer_than_three_rounds_claim_no_interval(rounds, words):
    t = build(factory.quick_run(rounds=rounds, tasks=("mnist-cnn",)), factory.PAPER_ROWS)
    section = model.sections(t)[0]
    grid = task_tables.ratios(t, section)[0]
    assert words in grid.notes[0]
    shown = " ".join(cell for g in (grid, task_tables.seconds(t, section)[0]) for row in g.rows for cell in row)
    assert ("[" in shown) == (rounds >= 3)


def test_versions_are_those_of_the_section():
    records = [factory.record(versions={"python": "3.11.7"})]
    records.append(factory.record(isolation="docker", versions={"python": "3.11.2"}))
    t = build(records)
    shown = {s.isolation: task_tables.versions(t, s)[0].rows for s in model.sections(t)}
    assert shown == {"docker": (("opacus-hooks", "python 3.11.2"),), "venv": (("opacus-hooks", "python 3.11.7"),)}


def test_a_contestant_without_memory_on_record_is_named():
    records = factory.quick_run(rounds=1, tasks=("mnist-cnn",))
    t = build([r for r in records if not (r.purpose == "memory" and r.cell.framework == "jax")])
    grids = task_tables.memory(t, model.sections(t)[0])
    assert grids and all(any("without this memory on record: jax-vmap" in n for n in g.notes) for g in grids)


def test_a_twin_that_is_the_baseline_itself_leaves_all_to_dp():
    records = [
        factory.record(framework=f, variant=v, private=p, seconds=[s])
        for f, v, p, s in (("pytorch", "eager", False, 2.0), ("opacus", "hooks", True, 5.0))
    ]
    (row,) = build(records, factory.PAPER_ROWS, {"opacus-hooks": "pytorch-eager"}).overheads.itertuples()
    assert (row.framework, row.dp, row.total) == pytest.approx((1.0, 2.5, 2.5)) and math.isnan(row.compile)
    assert build(records, factory.PAPER_ROWS, {"opacus-hooks": "jax-plain"}).overheads.empty


def test_how_a_library_s_own_loop_samples_is_a_column():
    def shipped(variant, sampling, replay_error, seconds):
        one = factory.record(variant=variant, protocol="as_shipped-v1", seconds=[seconds])
        timed = replace(one.timed, own_sampling=sampling, replay_error=replay_error)
        return one.model_copy(update={"timed": timed})

    t = tables([shipped("hooks", "poisson", 0.0, 2.0), shipped("ghost", "shuffled", 1.4, 3.0)])
    (grid,) = task_tables.seconds(t, model.sections(t)[0])
    assert grid.header == ("contestant", "samples", "batch 512")
    assert grid.rows == (("opacus-hooks", "poisson", "2.00"), ("opacus-ghost", "shuffled, unseeded", "3.00"))
    assert any("Only Poisson samples" in note for note in grid.notes)
    assert (
        "samples"
        not in task_tables.seconds(tables([factory.record()]), model.sections(tables([factory.record()]))[0])[0].header
    )
