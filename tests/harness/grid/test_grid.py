"""Grids of fakes on this machine: what counts, what is named, and that a merged grid is one sequential run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from harness.grid.folder import END, End, GridFolder, digest, write_end
from harness.grid.plan import Plan, Unit
from harness.store.read import load
from tests.support.driver import DRIVE
from tests.support.grids import MEASURED, Grid, lasting, survive

SIZES = (300, 3000)
MORE = ("--rounds", "2", "--seed", "5")
VARIANTS = "noop,sleeper"
FIGURE = re.compile(r"[0-9][0-9.,e-]*")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """A grid that is done, which tests may read."""
    grid = Grid(tmp_path_factory.mktemp("finished") / "grid", cache)
    grid.plan(SIZES, VARIANTS, *MORE)
    done = grid.ask("run")
    assert done.returncode == 0 and "All units are done" in done.stdout, done.stdout + done.stderr
    return grid


@pytest.fixture
def copy(finished: Grid, cache: Path, tmp_path: Path) -> Grid:
    """The same, which a test may change."""
    shutil.copytree(finished.path, tmp_path / "grid")
    return Grid(tmp_path / "grid", cache)


def test_a_merged_grid_is_one_sequential_run_in_everything_but_times(finished: Grid, tmp_path: Path) -> None:
    names = ",".join(f"phantom-{name}" for name in VARIANTS.split(","))
    sizes = ",".join(map(str, SIZES))
    words = ["run", "e2e", *MEASURED, "--frameworks", names, "--batch-sizes", sizes, *MORE]
    alone = tmp_path / "alone"
    done = subprocess.run([sys.executable, str(DRIVE), *words, "--out", str(alone)], env=finished.environment)
    assert done.returncode == 0
    assert all(record.command.startswith("dpbench run e2e") and "--out" not in record.command for record in load(alone))
    merged = {record.file_name: lasting(record) for record in finished.merged()}
    assert merged == {record.file_name: lasting(record) for record in load(alone)}
    pages, tables = [], []
    for place in (finished.path / "merged.jsonl.gz", alone):
        out = tmp_path / f"report of {place.name}"
        words = [sys.executable, "-P", "-m", "harness", "report", str(place), "--out", str(out)]
        subprocess.run(words, env=finished.environment, check=True, stdout=subprocess.DEVNULL)
        # Rows stand in the order of their figures.
        pages.append(sorted(set(FIGURE.sub("#", (out / "report_synthetic.md").read_text()).splitlines())))
        tables.append([(out / f"{name}.csv").read_text() for name in ("coverage", "privacy_synthetic", "versions")])
    assert pages[0] == pages[1] and tables[0] == tables[1]


def test_merging_says_where_each_unit_was_measured(copy: Grid) -> None:
    node = socket.gethostname()
    assert f"\n  {len(SIZES)} measured on {node} (local)\n" in copy.ask("merge").stdout
    places = json.loads(copy.ask("merge", "--json").stdout)["places"]
    assert {place["node"] for place in places.values()} == {node} and len(places) == len(SIZES)


def test_the_same_plan_goes_on_and_another_one_is_refused(copy: Grid) -> None:
    copy.plan(SIZES, VARIANTS, *MORE)
    assert copy.ask("run").returncode == 0 and len(copy.units()) == len(SIZES), "what is done is not done again"
    assert not copy.attempts()
    before = {unit.name for unit in copy.units()}
    done = copy.ask("plan", *MEASURED, "--batch-sizes", "300")
    assert done.returncode == 2 and "another plan" in done.stderr
    other = Grid(copy.path.with_name("other"), Path(copy.environment["DPBENCH_CACHE"]))
    other.plan((*SIZES, 64), VARIANTS, "--rounds", "2", "--seed", "6")
    names = {unit["name"] for unit in json.loads((other.path / "grid.json").read_text())["units"]}
    assert len(names) == 3 and not names & before, "another seed is another measurement"
    same = Grid(copy.path.with_name("same"), Path(copy.environment["DPBENCH_CACHE"]))
    same.plan((*SIZES, 64), VARIANTS, *MORE)
    assert before < {unit["name"] for unit in json.loads((same.path / "grid.json").read_text())["units"]}


def test_a_second_delivery_is_set_aside_and_never_mixed(copy: Grid) -> None:
    first = copy.units()[0]
    before = {path.name: path.read_bytes() for path in (first / "records").iterdir()}
    late = copy.path / "attempts" / f"{first.name}.00000000"
    shutil.copytree(first, late)
    done = copy.ask("merge")
    assert done.returncode == 0 and f"set aside: {late.name}" in done.stdout
    assert not copy.attempts() and {p.name: p.read_bytes() for p in (first / "records").iterdir()} == before
    assert copy.ask("unit", first.name).stdout == f"{first.name}: done\n", "and none is measured a second time"


def _cut(unit: Path) -> None:
    next((unit / "records").glob("*.time.*")).unlink()


def _edited(unit: Path) -> None:
    path = next((unit / "records").glob("*.time.*"))
    path.write_text(path.read_text().replace('"epoch_seconds":[', '"epoch_seconds":[0.5,'))


def _of_other_code(unit: Path) -> None:
    path = unit / "plan.json"
    path.write_text(path.read_text().replace('"harness": "', '"harness": "0'))


def _of_two_machines(unit: Path) -> None:
    path = next((unit / "records").glob("*.time.*"))
    path.write_text(re.sub(r'"id":"\w+"', '"id":"ffffffff"', path.read_text()))
    end = json.loads((unit / END).read_text())
    write_end(unit, End(**end | {"digest": digest(unit)}))


def _without_end(unit: Path) -> None:
    (unit / END).unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, "not those that were measured"),
        (_edited, "not those that were measured"),
        (_of_other_code, "not those of the plan"),
        (_of_two_machines, "2 machines"),
        (_without_end, "not done"),
    ],
)
def test_a_unit_that_is_not_whole_is_named_and_left_out(copy: Grid, harm: Callable[[Path], None], words: str) -> None:
    harmed, whole = copy.units()
    harm(harmed)
    done = copy.ask("merge", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 3 and list(said["missing"]) == [harmed.name] and words in said["missing"][harmed.name]
    merged = load(copy.path / "merged.jsonl.gz")
    assert len(merged) == said["records"] == len(load(whole))


def test_an_engine_s_word_counts_for_nothing(tmp_path: Path) -> None:
    """An attempt without an end, one that failed, and a complete one: only the last is done."""
    unit = Unit("logreg.b64.0123", "logreg", 64, 1, 1.0)
    grid = GridFolder(tmp_path)
    grid.begin(Plan((), (unit,)))
    for token in ("1", "2", "3"):
        (grid.attempts / f"{unit.name}.{token}" / "records").mkdir(parents=True)
        (grid.attempts / f"{unit.name}.{token}" / "beat").touch()
    write_end(grid.attempts / f"{unit.name}.2", End(unit.name, 2, 1.0, fault="exit code 2: no"))
    os.utime(grid.attempts / f"{unit.name}.3" / "beat", (1, 1))
    grid.settle_all()
    state = grid.state()
    assert not state.done and state.under_way == 1 and state.lost[unit.name] == 1
    assert state.failed[unit.name][0].fault == "exit code 2: no"
    write_end(grid.attempts / f"{unit.name}.1", End(unit.name, 3, 1.0, "hash"))
    grid.settle_all()
    assert list(grid.state().done) == [unit.name] and grid.state().under_way == 0


def test_units_go_on_elsewhere_when_their_process_is_killed(cache: Path, tmp_path: Path) -> None:
    survive(Grid(tmp_path / "grid", cache), 5, "local")


@pytest.mark.slow
def test_thirty_units_one_by_one(cache: Path, tmp_path: Path) -> None:
    survive(Grid(tmp_path / "grid", cache), 30, "local")


def test_a_grid_of_so_many_minutes_gives_each_unit_its_share(cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    chosen = [
        "--frameworks",
        "phantom-noop,phantom-sleeper",
        "--batch-sizes",
        "300,301",
        "--no-memory",
        "--rounds",
        "1",
    ]
    done = grid.ask("plan", "--command", f"{{python}} {DRIVE}", *MEASURED, *chosen, "--minutes", "0.2")
    assert done.returncode == 0 and "for about 0.1 min" in done.stdout, done.stderr
    assert grid.ask("run").returncode == 0 and len(grid.units()) == 2
    for unit in grid.units():
        (found,) = json.loads((unit / "sessions.json").read_text()).values()
        assert found["sessions"] >= 1 and found["why"]


def test_other_code_is_named_before_it_was_measured(cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    grid.plan((300,), "sleeper", "--no-memory", "--rounds", "50")
    path = grid.path / "grid.json"
    text, (name,) = path.read_text(), [unit["name"] for unit in json.loads(path.read_text())["units"]]
    path.write_text(text.replace(name, f"{name[:-4]}0000"))
    done = grid.ask("unit", "0")
    assert done.returncode == 3 and "are not those of the plan" in done.stdout
    (attempt,) = grid.attempts()
    assert len(list((attempt / "records").glob("*.time.*"))) < 50


def test_packing_a_grid_names_the_verb_that_does(finished: Grid, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "harness", "pack", str(finished.path), str(tmp_path / "there.jsonl.gz")]
    done = subprocess.run(words, env=finished.environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"dpbench grid merge {finished.path}" in done.stderr


def _have_ended(family: list[psutil.Process]) -> bool:
    """Return whether all have, within the seconds that a busy machine may take."""
    deadline = time.monotonic() + 30.0
    while not all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in family):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_grid_that_was_stopped_goes_on(cache: Path, tmp_path: Path, how: signal.Signals, code: int) -> None:
    grid = Grid(tmp_path / "grid", cache)
    units = (300, 301, 302)  # on a busy machine the second one may be done before the signal arrives
    grid.plan(units, "sleeper", "--no-memory")
    runner = grid.start("run")
    grid.wait_until_done(1)
    runner.send_signal(how)
    said, _ = runner.communicate(timeout=60)
    assert runner.returncode == code and "Traceback" not in said, said
    family = [p for p in psutil.process_iter(["cmdline"]) if str(grid.path) in " ".join(p.info["cmdline"] or [])]
    assert _have_ended(family), "nothing outlives its driver"
    assert grid.ask("run").returncode == 0 and len(grid.units()) == len(units)


def test_a_unit_that_cannot_be_measured_is_tried_three_times_and_named(cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    grid.plan((300,), "noop", "--no-memory")
    path = grid.path / "grid.json"
    path.write_text(path.read_text().replace(str(DRIVE), "/no/such/script"))
    done = grid.ask("run")
    assert done.returncode == 3 and "Not done: logreg.b300." in done.stdout and "/no/such/script" in done.stdout
    assert len(grid.attempts()) == 3
    said = json.loads(grid.ask("status", "--json").stdout)
    assert said["units"] == 1 and not said["done"] and "/no/such/script" in str(said["open"])


def test_what_has_no_time_is_named_where_the_exit_code_speaks_of_it(cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    grid.plan((300,), "noop,crash", "--no-memory")
    done = grid.ask("run")
    assert done.returncode == 3 and "All units are done" in done.stdout, done.stderr
    assert "Without a time: logreg, batch 300, phantom-crash: crashed: " in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plan", "--minutes", "0"), "--minutes is 0"),
        (("pack",), "Did you mean 'merge'?"),
        (("plan", "--out", "there"), "--out is no option of a grid"),
        (("plan", "--preset", "smokey"), "did you mean smoke?"),
        (("plan", "--rounds", "0"), "--rounds is 0"),
        (("run", "--launcher", "lsf"), "choose one of local, slurm, ray"),
        (("run", "--with", "fast"), "--with is 'fast'"),
        (("run", "--with", "partition=p"), "the launcher local has no settings"),
        (("run", "--launcher", "ray", "--with", "nodes=2"), "address, num_gpus or num_cpus"),
        (("unit", "7"), "a number from 0 to 1"),
        (("export", "--as", "pbs"), "choose one of k8s, sbatch, skypilot"),
    ],
)
def test_bad_input_is_one_sentence(finished: Grid, words: tuple[str, ...], sentence: str) -> None:
    done = finished.ask(*words)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("launcher", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_a_missing_engine_is_one_sentence_with_the_remedy(
    finished: Grid, tmp_path: Path, launcher: str, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError")
    finished.environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), former := finished.environment["PYTHONPATH"]))
    done = finished.ask("run", "--launcher", launcher)
    finished.environment["PYTHONPATH"] = former
    assert done.returncode == 2 and f"pip install 'dpsgd-bench[{launcher}]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_texts_for_other_engines_are_whole(finished: Grid, tmp_path: Path) -> None:
    script = tmp_path / "grid.sh"
    script.write_text(finished.ask("export", "--as", "sbatch").stdout)
    assert subprocess.run([Path(sys.executable).with_name("shellcheck"), script]).returncode == 0
    assert "--array=0-1\n" in script.read_text() and "--exclusive" in script.read_text()
    units = json.loads((finished.path / "grid.json").read_text())["units"]
    done = subprocess.run(
        ["bash", str(script)], env={**finished.environment, "SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == f"{units[1]['name']}: done\n", done.stderr
    job = YAML(typ="safe").load(finished.ask("export", "--as", "k8s", "--image", "here/bench:1").stdout)
    assert job["spec"]["completions"] == 2 and job["spec"]["completionMode"] == "Indexed"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "here/bench:1" and "$JOB_COMPLETION_INDEX" in container["command"][-1]
    sky = YAML(typ="safe").load(finished.ask("export", "--as", "skypilot").stdout)
    assert not [text for text in (script.read_text(), str(job), str(sky)) if "@" in text]
    assert "grid unit /grid $UNIT" in sky["run"] and sky["envs"] == {"UNIT": 0}


def test_a_run_on_a_disk_of_its_own_is_copied_whole(copy: Grid, tmp_path: Path) -> None:
    unit = copy.units()[0]
    shutil.rmtree(unit)
    done = copy.ask("unit", unit.name, "--scratch", str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    assert unit.exists() and not copy.attempts() and copy.ask("merge").returncode == 0
