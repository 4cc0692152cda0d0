"""The history: what is added, what may not be, what is read; series, events, and the verbs over them."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import BadInput
from harness.history import events, series
from harness.history import runs as history
from harness.store import cache
from harness.store.read import load
from tests.support import history_factory as made
from tests.support import record_factory as factory

QUICK = Path("results/records/2026-11-20-epyc-f21e580b-quick.jsonl.gz")
CONTAINERS = Path("results/records/2026-11-20-epyc-b714c58d-containers.jsonl.gz")
LAYERS = Path("results/records/2026-11-20-epyc-b714c58d-layers-quick.jsonl.gz")


@pytest.fixture(scope="module")
def quick():
    (run,) = history.condense(load(QUICK))
    return run


@pytest.fixture(scope="module")
def layers():
    (run,) = history.condense(load(LAYERS))
    return run


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_run_becomes_one_small_file_that_says_what_was_measured(tmp_path, quick):
    records = load(QUICK)
    (added,) = history.add([quick], tmp_path)
    run = history.read(added.path)
    assert run == added.run and added.path.parent.name == run.machine_key
    assert added.path.stat().st_size < len(gzip.decompress(QUICK.read_bytes())) / 5
    cell = run.by_series["mnist-cnn/dpcore-engine/512/verified-v1/cpu/venv"]
    own = [r for r in records if r.cell.name == cell.name]
    assert sorted(cell.seconds) == pytest.approx(
        sorted(r.epoch_seconds[0] for r in own if r.purpose == "time"), rel=1e-5
    )
    assert cell.memory["peak_resident_growth"] in [r.memory.get("peak_resident_growth") for r in own]
    assert (cell.state, cell.gate, cell.n, cell.extrapolated) == ("ok", "passed", 3, True)
    assert run.versions["opacus"]["opacus"] and 0.01 < run.canary_seconds < 0.02
    assert run.commit == own[0].source.commit and run.dirty is False


def test_layers_and_failures_are_part_of_it(layers):
    run, states = layers, {c.state for c in layers.cells}
    assert len(run.cells) == 184 and states == {"ok", "unsupported"}
    exact = run.by_series["conv/dpcore-engine/clipped/16/layers-v1/cpu/venv"]
    assert exact.memory == {"cpu_peak_allocated": 1124131524} and exact.passes == "clipped"
    assert all(c.reason for c in run.cells if c.state != "ok")


def test_a_wrong_process_rejects_its_cell_and_a_stopped_contestant_is_there_at_every_batch_size():
    records = factory.quick_run(rounds=2, tasks=("mnist-cnn", "imdb-lstm"))
    records.append(factory.record(state="rejected", reason="drops an example", gate_passed=False, round=9))
    records.append(factory.record(framework="slow", variant="one", purpose="gate", batch_size=16, state="crashed"))
    (run,) = history.condense(records)
    wrong = [c for c in run.cells if c.state == "rejected"]
    assert [(c.contestant, c.batch_size, c.seconds, c.reason) for c in wrong] == [
        ("opacus-hooks", 512, [], "drops an example")
    ]
    assert {c.batch_size for c in run.cells if c.contestant == "slow-one" and c.state == "crashed"} == {64, 512}
    assert {c.state for c in run.cells if c.subject == "imdb-lstm" and c.contestant == "opacus-ghost"} == {
        "unsupported"
    }
    hooks = [c for c in run.cells if c.subject == "imdb-lstm" and c.contestant == "opacus-hooks"]
    assert {c.batch_size: c.state for c in hooks} == {64: "ok", 512: "oom"}


def test_machines_and_thread_counts_are_never_mixed(tmp_path):
    one = factory.quick_run(rounds=1, tasks=("mnist-cnn",))
    other = factory.quick_run(rounds=1, tasks=("mnist-cnn",), machine=factory.OTHER_MACHINE)
    threads = factory.quick_run(rounds=1, tasks=("mnist-cnn",), machine={**factory.MACHINE, "threads": 1})
    history.add(history.condense([*one, *other, *threads]), tmp_path)
    loaded = history.load(tmp_path)
    assert len(loaded.machines) == 3 == len(list(tmp_path.iterdir()))
    for key, cells in series.of_history(loaded).items():
        assert {run.machine_key for s in cells for run in s.runs} == {key}
    named = history.condense(one, "ci-runner") + history.condense(threads, "ci-runner")
    assert "ci-runner" in named[0].machine_key and named[0].machine_key != named[1].machine_key
    with pytest.raises(BadInput, match="--machine is 'Not So'"):
        history.condense(one, "Not So")


def test_adding_twice_does_nothing_and_other_content_is_refused(tmp_path):
    records = factory.quick_run(rounds=1, tasks=("mnist-cnn",))
    (first,) = history.add(history.condense(records), tmp_path)
    before = first.path.read_bytes()
    (again,) = history.add(history.condense(records), tmp_path)
    assert first.new and not again.new and again.path == first.path and first.path.read_bytes() == before
    with pytest.raises(BadInput, match=r"run-1 is in the history already, with other content, as .*\.json"):
        history.add(history.condense(records[:-3]), tmp_path)
    assert [p.name for p in tmp_path.rglob("*.json")] == [first.path.name]


def test_two_branches_merge_without_a_conflict(tmp_path):
    def git(*arguments):
        done = subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(name):
        return history.condense(factory.quick_run(rounds=1, tasks=("mnist-cnn",), run=name))

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "start")
    for branch, names in (("one", ("a", "both")), ("two", ("b", "both"))):
        git("checkout", "-q", "-b", branch, "main")
        for name in names:
            history.add(run(name), tmp_path / "history")
        git("add", "-A")
        git("commit", "-q", "-m", branch)
    git("merge", "-q", "--no-edit", "one")
    assert sorted(r.run for r in history.load(tmp_path / "history").runs) == ["a", "b", "both"]


def test_what_cannot_be_read_is_named_and_the_rest_loads(tmp_path):
    runs = [
        r for name in "abcdef" for r in history.condense(factory.quick_run(rounds=1, tasks=("mnist-cnn",), run=name))
    ]
    paths = [a.path for a in history.add(runs, tmp_path)]
    paths[0].write_text("{")
    paths[1].write_text(json.dumps({**json.loads(paths[1].read_text()), "schema": 99}))
    for path, change in ((paths[4], {"time": "2026-11-20T08:00:00"}), (paths[5], {"canary_seconds": -1})):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    paths[2].write_text(json.dumps({**json.loads(paths[2].read_text()), "schema": 0}))
    odd = json.loads(paths[3].read_text())
    nameless = paths[3].with_name("nameless.json")
    nameless.write_text(json.dumps({**odd, "machine": {**odd["machine"], "memory_bytes": "16 GiB"}}))
    loaded = history.load(tmp_path)
    assert [r.run for r in loaded.runs] == ["d"] and len(loaded.faults) == 6
    assert any(str(paths[2]) in fault and "schema 0, which never was" in fault for fault in loaded.faults)
    assert any(str(nameless) in fault and "no name can be made" in fault for fault in loaded.faults)
    assert any(str(paths[4]) in fault and "offset from UTC" in fault for fault in loaded.faults)
    assert any(str(paths[5]) in fault and "canary" in fault for fault in loaded.faults)
    assert any(str(paths[0]) in fault and "git" in fault for fault in loaded.faults)
    assert any(str(paths[1]) in fault and "schema 99" in fault and "update dpbench" in fault for fault in loaded.faults)
    with pytest.raises(BadInput, match="no history in"):
        history.load(tmp_path / "none")


def test_the_canary_takes_the_machine_out_and_a_gpu_is_left_alone():
    slow = made.runs(40, drift={20: 1.3})
    (s,) = series.of_machine("m", slow)
    assert max(p.seconds for p in s.points) > 1.25 * min(p.seconds for p in s.points)
    assert s.time.steps == () and max(p.normalised for p in s.points) < 1.1 * min(p.normalised for p in s.points)
    (gpu,) = series.of_machine("m", made.runs(40, drift={20: 1.3}, device="cuda"))
    assert [p.seconds for p in gpu.points] == [p.normalised for p in gpu.points]


def test_disturbed_runs_are_shown_and_count_in_nothing():
    (s,) = series.of_machine("m", made.runs(40, time={20: 1.5}, disturbed=range(20, 40)))
    assert len(s.points) == 40 and len(s.timed) == 20 and s.time.steps == ()


def test_cells_that_step_together_are_one_event_that_names_its_commits_and_versions():
    runs = made.runs(60, cells=("a", "b", "c"), time={30: 1.13}, only=("a", "b"), versions={30: "1.7.0"}, noise=0.002)
    (event,) = events.of_machine("m", series.of_machine("m", runs))
    assert (event.metric, event.worse, event.open, event.red) == ("time", True, True, False)
    assert event.sentence == (
        f"2 cells of dpcore became 13 % slower between {runs[29].commit[:7]} and {runs[30].commit[:7]}"
    )
    assert {c.series.cell.subject for c in event.changes} == {"a", "b"}
    assert event.notes == ("dpcore ran on other versions: dpcore 1.6.0 → 1.7.0",)
    assert runs.index(event.detected) <= 35
    good, bad = runs[29].commit[:10], runs[30].commit[:10]
    assert event.bisect == f"dpbench bisect {event.changes[0].series.name} {good} {bad}"


def test_the_bisection_that_is_offered_is_one_that_the_verb_takes():
    from harness.cli.compare import parse_cell

    (event,) = events.of_machine("m", series.of_machine("m", made.runs(60, cells=("mnist-cnn",), time={30: 1.06})))
    _, _, cell, *_ = event.bisect.split()
    assert "dpcore-engine" in str(parse_cell(cell)) and 0.02 < float(event.bisect.split("--threshold ")[1]) < 0.04
    (better,) = events.of_machine("m", series.of_machine("m", made.runs(60, cells=("mnist-cnn",), time={30: 0.8})))
    assert better.bisect is None


def test_an_events_id_stays_when_runs_are_added():
    runs = made.runs(90, cells=("a", "b"), time={30: 1.1})
    ids = {e.id for n in (45, 60, 90) for e in events.of_machine("m", series.of_machine("m", runs[:n]))}
    assert len(ids) == 1


def test_memory_growth_and_wrong_updates_are_red_and_worst_comes_first():
    runs = made.runs(
        60, cells=("a", "b"), time={20: 1.2}, memory={50: 1.006}, states={("b", 57): "rejected", ("b", 58): "rejected"}
    )
    found = events.current(events.of_machine("m", series.of_machine("m", runs[:59])), runs[58], 90)
    assert [(e.metric, e.red) for e in found] == [("state", True), ("memory", True), ("time", False)]
    assert "went from ok to rejected" in found[0].sentence and "0.6 % more memory" in found[1].sentence
    mended = events.of_machine("m", series.of_machine("m", runs))
    assert [e.open for e in mended if e.metric == "state"] == [False]


def test_bytes_tell_from_the_second_run_on():
    (event,) = events.of_machine("m", series.of_machine("m", made.runs(5, memory={3: 1.006})))
    assert (event.metric, event.red) == ("memory", True)


def test_bytes_that_keep_changing_are_no_stairs():
    runs = made.runs(60, memory={i: 1.0625 if i % 4 < 2 else 1 / 1.0625 for i in range(0, 60, 2)})
    assert events.of_machine("m", series.of_machine("m", runs)) == []


def test_one_more_growth_takes_back_nothing_of_the_earlier_ones():
    runs = made.runs(40, memory={8: 1.02, 14: 1.03, 20: 1.02, 26: 1.04})
    three, four = ({e.id for e in events.of_machine("m", series.of_machine("m", runs[:n]))} for n in (25, 40))
    assert len(three) == 3 and len(four) == 4 and three < four


def test_memory_within_the_tolerance_of_a_comparison_is_no_event():
    assert events.of_machine("m", series.of_machine("m", made.runs(30, memory={20: 1.004}))) == []
    (s,) = series.of_machine("m", made.runs(30, memory={20: 1.004}))
    assert len(s.memory.steps) == 1, "it is drawn all the same"


def test_a_step_that_was_taken_back_is_closed_and_old_ones_are_not_news():
    runs = made.runs(120, time={40: 1.2, 80: 1 / 1.2})
    found = events.of_machine("m", series.of_machine("m", runs))
    assert sorted((e.worse, e.open) for e in found) == [(False, False), (True, False)]
    still = events.of_machine("m", series.of_machine("m", runs[:80]))
    assert events.current(still, runs[79], 20) == [] and len(events.current(still, runs[79], 60)) == 1


def test_the_verbs(tmp_path):
    folder = tmp_path / "history"
    first = invoke("history", "add", QUICK, CONTAINERS, "--folder", folder, "--json")
    assert first.exit_code == 0, first.output
    assert [a["new"] for a in json.loads(first.stdout)] == [True, True]
    again = invoke("history", "add", QUICK, "--folder", folder)
    assert again.exit_code == 0 and again.stdout.startswith("Already there")
    listed = json.loads(invoke("history", "list", "--folder", folder, "--json").stdout)
    assert len(listed) == 2 and {row["cells"] for row in listed} >= {28}
    by_machine = invoke("history", "list", "--folder", folder).stdout
    assert all(f"{row['machine']}\n" in re.sub(" +\n", "\n", by_machine) for row in listed)
    shown = json.loads(invoke("history", "show", "mnist-cnn/dpcore-engine/512", "--folder", folder, "--json").stdout)
    assert [len(part["points"]) for part in shown] == [1]
    assert json.loads(invoke("history", "show", listed[0]["id"], "--folder", folder, "--json").stdout)[0]["schema"] == 1
    calm = invoke("history", "check", "--folder", folder)
    assert calm.exit_code == 0 and "Too few runs to judge" in calm.stdout and "the most so far are 1" in calm.stdout


def test_a_run_at_work_is_not_added(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text('{"id": "run-1"}')
    records = factory.write(factory.quick_run(rounds=1, tasks=("mnist-cnn",)), tmp_path / "run" / "records")
    with cache.locked(records.parent / ".lock"):
        busy = invoke("history", "add", records.parent, "--folder", tmp_path / "history")
    assert isinstance(busy.exception, BadInput) and "A run is at work" in str(busy.exception)
    assert invoke("history", "add", records.parent, "--folder", tmp_path / "history").exit_code == 0


def test_check_ends_with_1_where_something_is_open(tmp_path):
    history.add(made.runs(60, cells=("a", "b"), time={50: 1.2}), tmp_path)
    found = invoke("history", "check", "--folder", tmp_path, "--json")
    assert found.exit_code == 1
    (event,) = json.loads(found.stdout)["open"]
    assert event["metric"] == "time" and len(event["cells"]) == 2 and event["simulated"]
    older = invoke("history", "check", "--folder", tmp_path, "--days", 3)
    assert older.exit_code == 0 and "No open regressions of 3 days, 1 older" in older.stdout
    (next(tmp_path.iterdir()) / "half.json").write_text("{")
    unread = invoke("history", "check", "--folder", tmp_path, "--days", 3)
    assert unread.exit_code == 3 and "half.json" in unread.stderr
    assert invoke("history", "check", "--folder", tmp_path).exit_code == 1
    assert isinstance(invoke("history", "check", "--folder", tmp_path / "none").exception, BadInput)


def test_the_committed_history_holds_the_reference_runs(quick, layers):
    runs = {run.run: run for run in history.load(history.FOLDER).runs}
    assert runs[quick.run] == quick and runs[layers.run] == layers
