"""What no table of the paper had, on records with known answers."""

from __future__ import annotations

import math

import pytest

from harness.analysis.frames import build
from harness.report import contents, model
from harness.report.chapters import costs
from harness.run import peaks
from harness.tasks import TASKS
from tests.support import record_factory as factory

PEAKS = {"flops_per_second": 5e10, "bytes_per_second": 1e10}
FAST = {"framework": "fast", "variant": "jit"}
"""Starts in 30 s, 2 s an epoch."""
EAGER = {"framework": "fast", "variant": "eager"}
"""Starts at once, 5 s an epoch."""
RIVAL = {"framework": "rival", "variant": "one"}
"""Starts at once, 3 s an epoch."""
SLOW = {"framework": "slow", "variant": "jit"}
"""Starts in 30 s, 4 s an epoch."""


def started(compile_seconds, seconds, **who):
    return factory.record(seconds=[seconds], compile_seconds=compile_seconds, **who)


@pytest.fixture(scope="module")
def starters():
    records = [started(30.0, 2.0, **FAST), started(0.0, 5.0, **EAGER), started(0.0, 3.0, **RIVAL)]
    return costs.start_up(build([*records, started(30.0, 4.0, **SLOW)])).set_index("contestant")


def test_a_compiled_contestant_pays_after_start_over_gain(starters):
    fast = starters.loc["fast-jit"]
    assert (fast.rival, fast.rival_epochs) == ("rival-one", pytest.approx(30.0))
    assert (fast.sibling, fast.sibling_epochs) == ("fast-eager", pytest.approx(10.0))
    assert fast.first_over_ordinary == pytest.approx(16.0)


def test_who_is_slower_per_epoch_too_never_pays(starters):
    assert math.isinf(starters.loc["slow-jit"].rival_epochs)
    assert starters.loc["slow-jit"].sibling == ""


def test_who_starts_at_once_has_nothing_to_pay_back(starters):
    assert starters.loc["rival-one"].rival == "" and math.isnan(starters.loc["rival-one"].rival_epochs)


def finished(test, seconds, steps, **more):
    epsilon = {"delta": 1e-5, "steps": steps, "rdp": 0.61, "pld": 0.55, "own": 0.61}
    return factory.record(
        seconds=[seconds], accuracy={"test": test, "after_steps": steps}, epsilon=epsilon, compile_seconds=1.0, **more
    )


def test_seconds_to_an_accuracy_hold_the_start_and_all_steps():
    # 118 steps an epoch at batch 512: 236 steps are two epochs.
    records = [finished(0.931, 10.0 + r, 236, round=r) for r in range(3)]
    tables = build([*records, finished(0.88, 3.0, 236, framework="quick", variant="one")])
    frame = costs.goals(tables).set_index("contestant")
    row = frame.loc["opacus-hooks"]
    assert (row.seconds, row.low, row.high, row.n) == (23.0, 21.0, 25.0, 3)
    assert (row.reached, row.epsilon, row.epochs) == (pytest.approx(0.90), 0.55, 2.0)
    (grid,) = costs.goals_grids(costs.goals(tables))
    assert "seconds to 90% test accuracy" in grid.title
    assert [(r[0], r[2]) for r in grid.rows] == [("opacus-hooks", "yes"), ("quick-one", "no")], "first who reached it"


@pytest.mark.parametrize(("accuracy", "warned"), [(0.515, True), (0.62, False)])
def test_an_accuracy_that_guessing_reaches_is_called_so(accuracy, warned):
    (grid,) = costs.goals_grids(costs.goals(build([finished(accuracy, 10.0, 98, task="imdb-embedding")])))
    assert any("Guessing among 2 classes reaches 50%" in note for note in grid.notes) == warned


def test_the_floor_is_arithmetic_and_data_over_the_measured_peaks():
    machine = {**factory.MACHINE, "peaks": PEAKS}
    slower = {**factory.MACHINE, "peaks": {k: v / 2 for k, v in PEAKS.items()}}
    records = [factory.record(seconds=[10.0], machine=machine), factory.record(round=1, seconds=[10.0], machine=slower)]
    records.append(factory.record(task="imdb-embedding", seconds=[1.0], machine=machine))
    frame = costs.floor(build(records)).set_index("task")
    cnn = frame.loc["mnist-cnn"]
    task = TASKS["mnist-cnn"]
    assert cnn.flops == task.training_flops * 60_000
    assert cnn.arithmetic_seconds == pytest.approx(cnn.flops / 5e10), "the best of all runs is the peak"
    assert cnn.bytes == 60_000 * math.prod(task.input_shape) * 4
    assert (cnn.bound, cnn.over_floor) == ("arithmetic", pytest.approx(10.0 / cnn.arithmetic_seconds))
    embedding = frame.loc["imdb-embedding"]
    assert embedding.floor_seconds == max(embedding.arithmetic_seconds, embedding.memory_seconds)


@pytest.mark.parametrize(("seconds", "said"), [(10.0, False), (1e-4, True)])
def test_a_time_under_the_floor_is_explained_where_it_stands(seconds, said):
    machine = {**factory.MACHINE, "peaks": PEAKS}
    tables = build([factory.record(task="cifar10-cnn", seconds=[seconds * 100], machine=machine)])
    (grid,) = costs.floor_grids(tables, model.sections(tables)[0], costs.floor(tables))
    assert any(note.startswith("Below 1×: not faster than physics") for note in grid.notes) == said


def test_without_peaks_there_is_a_sentence_and_no_floor():
    tables = build([factory.record()])
    assert costs.floor(tables).empty
    (grid,) = costs.floor_grids(tables, model.sections(tables)[0], costs.floor(tables))
    assert "No record of this section holds measured peaks" in grid.notes[0]


def test_a_run_can_measure_the_peaks_of_its_machine():
    found = peaks.measure(1)
    assert found is not None and found["flops_per_second"] > 1e8 and found["bytes_per_second"] > 1e8


def test_cumulative_seconds_are_those_of_the_figure_and_marked_beyond_the_measured_epochs():
    tables = build([factory.record(seconds=[2.0, 3.0], compile_seconds=10.0)])
    (grid,) = costs.cumulative(tables, model.sections(tables)[0])
    assert grid.rows == (("opacus-hooks", "12.0", "22.5ᵉ", "35.0ᵉ", "60.0ᵉ", "1"),)
    part = build([factory.record(seconds=[2.0], extrapolated=True)])
    (grid,) = costs.cumulative(part, model.sections(part)[0])
    assert grid.rows[0][1] == "2.00ᵉ", "an epoch that was scaled up from a part is marked from the first on"
    frame = costs.cumulative_numbers(tables).set_index("epoch")
    assert frame["median"][2] == 15.0 and not frame.extrapolated[2] and frame.extrapolated[3]


def test_numbers_made_of_disturbed_processes_carry_the_mark():
    machine = {**factory.MACHINE, "peaks": PEAKS}
    records = [finished(0.931, 10.0, 236, disturbed=True, machine=machine)]
    tables = build(records)
    section = model.sections(tables)[0]
    for grid in (
        *costs.cumulative(tables, section),
        *costs.start_up_grids(costs.start_up(tables)),
        *costs.floor_grids(tables, section, costs.floor(tables)),
        *costs.goals_grids(costs.goals(tables)),
    ):
        assert "ᵈ" in " ".join(grid.rows[-1]) and any(note.startswith("ᵈ disturbed") for note in grid.notes), grid


def test_failures_name_state_and_reason():
    tables = build(factory.quick_run(rounds=1, tasks=("imdb-lstm",)))
    (grid,) = costs.failures(tables, model.sections(tables)[0])
    shown = {(row[0], row[2], row[3]): row[4] for row in grid.rows}
    assert shown["opacus-ghost", "64, 512", "unsupported"].startswith("ghost clipping has no rule")
    assert "limit of 12 GiB" in shown["opacus-hooks", "512", "oom"]
    assert "7 of 10 cells have a time" in grid.notes[0]


def test_hardware_says_what_the_records_say():
    machine = {**factory.MACHINE, "threads": 2, "peaks": PEAKS}
    tables = build([factory.record(machine=machine)])
    (grid,) = costs.hardware(tables, model.sections(tables)[0])
    rows = dict(grid.rows)
    assert rows["processor"] == "AMD EPYC 7B13" and rows["memory"] == "16.0 GiB" and rows["GPU"] == "none"
    assert rows["measured peak, float32 product"] == "50 GFLOP/s"


def test_a_section_holds_the_numbers_of_its_own_machine_only():
    runs = factory.quick_run(rounds=1, tasks=("mnist-cnn",))
    other = factory.quick_run(rounds=2, tasks=("mnist-cnn",), machine=factory.OTHER_MACHINE)
    report = contents.build(runs + other)
    seconds = [c for c in report.chapters if c.title == "Seconds per epoch"]
    # The machine with more times comes first.
    assert [set(c.frames["seconds-per-epoch"].n) for c in seconds] == [{2}, {1}]
    assert {c.section.machine for c in seconds} == set(report.tables.cells.machine)
