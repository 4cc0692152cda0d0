"""Cells in containers of a real engine: what a contestant can do there, what is recorded, what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.compare import record as compare_record
from harness.environments.containers import engine, images
from harness.environments.containers import executor as container
from harness.environments.containers.engine import Engine
from harness.environments.containers.mounts import Mounts
from harness.environments.executor import Limits
from harness.environments.venv import EnvironmentFault
from harness.errors import BadInput
from harness.plan import registry
from harness.store import record
from harness.store.record import Record
from harness.worker import machine
from harness.worker.request import Request
from tests.support import engines
from tests.support.project import Project

pytestmark = pytest.mark.containers
DRIVE = Path(__file__).parents[2] / "support" / "drive.py"
ROOT = DRIVE.parents[2]
PRISONER = ROOT / "tests" / "fakes" / "prisoner"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def world(cache: Path) -> Iterator[tuple[Engine, Any]]:
    """(engine, the OwnEngine that was started for it or None), with the fake's image built from its lock."""
    before = {name: os.environ.get(name) for name in (engine.HOST, "DPBENCH_CACHE")}
    os.environ["DPBENCH_CACHE"] = str(cache)
    own = None
    try:
        try:
            on, own = engines.obtain(Path(tempfile.mkdtemp(prefix="dpbench-engine-")))
            images.ensure(registry.load(PRISONER), on, print)
        except (RuntimeError, EnvironmentFault) as why:
            pytest.skip(f"skipped: {why}")
        yield on, own
    finally:
        if own is not None:
            own.stop()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Cells:
    """Runs ``dpbench run e2e`` on variants of the fake, in a process of its own."""

    def __init__(self, on: Engine, cache: Path, out: Path) -> None:
        self.on = on
        self.out = out
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, engine.HOST: on.host, "DPBENCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
        # What containers must not see: of the harness's environment, and of the user's Docker configuration.
        out.mkdir(parents=True)
        proxies = {"default": {"httpsProxy": "http://user:not-for-contestants@192.0.2.1"}}
        (out.parent / "config.json").write_text(json.dumps({"proxies": proxies}))
        self.environment |= {"TOKEN": "not-for-contestants", "DOCKER_CONFIG": str(out.parent)}

    def command(self, variants: str, *more: str) -> list[str]:
        names = ",".join(f"prisoner-{v}" for v in variants.split(","))
        base = ["run", "e2e", "--preset", "smoke", "--tasks", "logreg", "--synthetic", "--threads", "1"]
        where = ["--isolation", "docker", "--repeats", "0", "--no-memory", "--out", str(self.out)]
        return [sys.executable, str(DRIVE), *base, *where, "--frameworks", names, *more]

    def run(self, variants: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(variants, *more), env=self.environment, capture_output=True, text=True, timeout=600
        )

    def start(self, variants: str, *more: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(variants, *more),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A shell without job control lets what it starts in the background ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def records(self, purpose: str = "time") -> dict[str, Record]:
        found = [record.read(path)[0] for path in sorted((self.out / "records").glob("*.json"))]
        return {r.cell.variant: r for r in found if r.purpose == purpose}

    def left_behind(self) -> list[str]:
        return [one.name for one in (*engine.orphans(self.on), *self.out.rglob("*.part"))]

    def wait_for_work(self, process: subprocess.Popen[bytes]) -> Any:
        """The container of this process, once its worker has had time to start. Others may use the same engine."""
        for _ in range(1200):
            for one in self.on.client.containers.list(filters={"label": engine.OWNER}, ignore_removed=True):
                if f":{process.pid}:" in one.labels[engine.OWNER]:
                    time.sleep(3.0)
                    return one
            time.sleep(0.1)
        raise AssertionError("no container was started")


@pytest.fixture
def cells(world: tuple[Engine, Any], cache: Path, tmp_path: Path) -> Iterator[Cells]:
    these = Cells(world[0], cache, tmp_path / "run")
    yield these
    for process in these.started:
        process.kill()
        process.wait()


MISBEHAVIOUR = {
    "escape": ("ok", ""),
    "fill-results": ("crashed", "limit of file space"),
    "fill-scratch": ("crashed", "limit of file space"),
    "fork": ("crashed", "Resource temporarily unavailable"),
    "glutton": ("oom", "memory limit"),
    "vanish": ("crashed", "exit code 7"),
    "endless": ("crashed", "a line of more than 8 MiB without an end"),
    "orphan": ("crashed", "exit code 88, which says that the harness is gone, and it is not"),
    "flood": ("ok", ""),
    "invent": ("crashed", "what is no result"),
    "spoil": ("crashed", "snapshot.npz: no archive"),
    "honest": ("ok", ""),
}


def test_whatever_a_contestant_tries_is_contained_and_recorded(cells: Cells) -> None:
    done = cells.run(",".join(MISBEHAVIOUR), "--memory-limit", "1.0", "--timeout", "120")
    assert "Traceback" not in done.stderr, done.stderr
    found = cells.records()
    assert found.keys() == MISBEHAVIOUR.keys(), done.stdout + done.stderr
    says_oom = cells.on.facts["kind"] == "docker"
    expected = MISBEHAVIOUR | ({} if says_oom else {"glutton": ("crashed", "memory limit")})
    for variant, (state, words) in expected.items():
        assert found[variant].state == state, (variant, found[variant].reason, found[variant].log_tail)
        assert words in str(found[variant].reason), (variant, found[variant].reason)
    assert done.returncode == 3
    assert cells.left_behind() == []
    one = found["honest"]
    image = cells.on.client.images.get(images.tag_of(registry.load(PRISONER)))
    assert one.image is not None and one.image.digest == image.id and one.image.matches_lock
    assert one.image.base == images.base_digest(cells.on) and len(one.image.lock) == 64
    assert all(r.container is not None and r.container.engine_restarts == 0 for r in found.values())
    assert one.container is not None and one.container.exit_code == 0 and one.container.startup_seconds
    oom = found["glutton"].container
    assert oom is not None and oom.oom_killed == says_oom and oom.exit_code == 137


def test_the_same_attempts_succeed_outside_of_a_container(cells: Cells) -> None:
    """Else the test above could not fail. (Variables of the shell reach no worker anywhere: test_variables.)"""
    done = cells.run("escape", "--isolation", "venv")
    reason = str(cells.records()["escape"].reason)
    assert done.returncode == 3 and "escaped by" in reason
    for way in ("new privileges", "a network interface", "the host's processes", "writing elsewhere"):
        assert way in reason


def test_a_killed_harness_takes_its_container_with_it_and_the_rerun_completes(cells: Cells) -> None:
    process = cells.start("slow,honest")
    contained = cells.wait_for_work(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while contained.status == "running":
        assert time.monotonic() < deadline, "the container outlived its harness"
        time.sleep(0.2)
        contained.reload()
    assert contained.attrs["State"]["ExitCode"] == 88
    assert cells.left_behind() == [contained.name]
    done = cells.run("slow,honest")
    assert done.returncode == 0, done.stderr
    assert f"Removed {contained.name}" in done.stdout
    assert [r.state for r in cells.records().values()] == ["ok", "ok"]
    assert cells.left_behind() == []


def test_a_killed_container_is_a_record(cells: Cells) -> None:
    process = cells.start("hang")
    cells.wait_for_work(process).kill()
    assert process.wait(timeout=120) == 3
    found = cells.records()["hang"]
    assert found.state == "crashed" and "killed by signal 9" in str(found.reason)
    assert cells.left_behind() == []


def test_a_timeout_kills_and_ctrl_c_leaves_nothing(cells: Cells) -> None:
    assert cells.run("hang,mute", "--timeout", "15").returncode == 3
    for found in cells.records().values():
        assert found.state == "timeout" and "no result within 15 s" in str(found.reason)
    process = cells.start("hang", "--fresh")
    cells.wait_for_work(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert cells.left_behind() == []


def test_a_killed_engine_costs_one_repetition(world: tuple[Engine, Any], cells: Cells) -> None:
    own = world[1]
    if own is None:
        pytest.skip("skipped: the engine is not ours to kill")
    process = cells.start("slow")
    cells.wait_for_work(process)
    own.kill()
    own.start()
    assert process.wait(timeout=400) == 0
    found = cells.records()["slow"]
    assert found.state == "ok" and found.container is not None and found.container.engine_restarts == 1
    assert cells.left_behind() == []


def test_a_gpu_that_vanished_is_a_record_and_one_that_never_was_a_sentence(
    world: tuple[Engine, Any], tmp_path: Path
) -> None:
    on, _ = world
    if machine.gpus():
        pytest.skip("skipped: there is a GPU, and containers may get it")
    image = images.ensure(registry.load(PRISONER), on, print)
    with pytest.raises(BadInput, match=r"gives containers no GPU.*--device cpu"):
        container.check_gpu(on, image)
    settings = {name: 1 for name in ("max_grad_norm", "noise_multiplier", "learning_rate", "delta", "batch_size")}
    seeds = dict.fromkeys(("initial_seed", "batch_seed", "noise_seed"), 0)
    request = Request(
        mode="time",
        folder=str(PRISONER),
        variant="honest",
        private=True,
        static_shapes=False,
        task="logreg",
        dataset_size=64,
        sampling="poisson",
        warm_up=True,
        device="cuda",
        threads=1,
        **settings,
        **seeds,
    )
    result = container.Docker(on, image, Mounts()).run(request, Limits(2**30, 60.0), lambda event: None)
    assert result.state == "crashed" and "no GPU" in str(result.reason) and result.container is not None
    # Podman starts the container without one, and the container's own look finds that.
    assert result.container["exit_code"] is (None if on.facts["kind"] == "docker" else 0)
    assert [one for one in on.client.containers.list(all=True) if one.labels.get(engine.OWNER) == engine.owner()] == []


@pytest.fixture
def other(tmp_path: Path) -> registry.Framework:
    """The fake with another lock: one more hash."""
    folder = tmp_path / "prisoner"
    shutil.copytree(PRISONER, folder)
    with (folder / "requirements.lock").open("a") as lock:
        lock.write(f"six==1.17.0 --hash=sha256:{'0' * 64}\n")
    return registry.load(folder)


def test_an_image_of_another_lock_is_refused(world: tuple[Engine, Any], other: registry.Framework) -> None:
    on, _ = world
    with pytest.raises(BadInput, match=r"not the one that is locked: it was built from another lock.*--any-image"):
        images.ensure(other, on, print)
    assert (
        images.ensure(other, on, print, any_image=True).digest
        == images.ensure(registry.load(PRISONER), on, print).digest
    )


def test_verify_sees_a_changed_file_and_a_missing_package(world: tuple[Engine, Any], other: registry.Framework) -> None:
    on, _ = world
    framework = registry.load(PRISONER)
    assert images.verify(framework, on).faults == ()
    assert any("six missing" in fault for fault in images.verify(other, on).faults)
    tag = images.tag_of(framework)
    true = on.client.images.get(tag)
    script = "import numpy, pathlib; pathlib.Path(numpy.__file__).open('a').write('# changed')"
    tampered = on.client.containers.create(
        true.id, ["-c", script], user="0", network_mode="none", ulimits=engine.ulimits()
    )
    changed = None
    try:
        tampered.start()
        tampered.wait()
        repository, _, version = tag.partition(":")
        changed = tampered.commit(repository, version)
        faults = images.verify(framework, on).faults
        assert len(faults) == 1 and "numpy/__init__.py" in faults[0]
    finally:
        true.tag(*tag.split(":"))
        tampered.remove(force=True)
        if changed is not None:
            on.client.images.remove(changed.id, force=True)


def test_doctor_says_what_the_engine_is(cells: Cells) -> None:
    def rows() -> dict[str, dict[str, str]]:
        command = [sys.executable, "-m", "harness", "doctor", "--json"]
        done = subprocess.run(command, env=cells.environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        return {row["check"]: row for row in json.loads(done.stdout)["checks"]}

    there = rows()
    assert cells.on.name in there["container engine"]["measured"]
    assert "cgroup v" in there["container limits"]["measured"]
    assert str(images.base_digest(cells.on))[7:19] in there["container images"]["measured"]
    cells.environment[engine.HOST] = "tcp://127.0.0.1:9"
    assert "have to see this machine's files" in rows()["container engine"]["measured"]


@pytest.mark.slow
def test_the_same_cell_takes_as_long_in_a_process_a_venv_and_a_container(cells: Cells, tmp_path: Path) -> None:
    """The quickest of five processes each: what is left is the place itself. Says nothing on a busy machine."""
    quickest = {}
    for place in ("inprocess", "venv", "docker"):
        cells.out = tmp_path / place
        done = cells.run("work", "--isolation", place, "--rounds", "5", "--budget-seconds", "0.5")
        assert done.returncode == 0, done.stderr
        found = [record.read(path)[0] for path in (cells.out / "records").glob("*.time.*.json")]
        quiet = [r for r in found if r.load is not None and r.load.foreign_share < 0.05]
        if not quiet:
            pytest.skip("skipped: other processes took more than 5 % of the machine in every process")
        quickest[place] = min(min(r.epoch_seconds) for r in quiet)
    assert max(quickest.values()) / min(quickest.values()) < 1.25, quickest


@pytest.mark.slow
def test_the_same_lock_makes_the_same_content(world: tuple[Engine, Any]) -> None:
    on, _ = world
    framework = registry.load(PRISONER)
    first = images.verify(framework, on).content
    images.build(framework, on, print, fresh=True)
    assert images.verify(framework, on).content == first


@pytest.mark.slow
def test_two_images_and_two_states_are_compared_in_containers(
    world: tuple[Engine, Any],
    cells: Cells,
    tmp_path: Path,
    reference: Path,
) -> None:
    on, _ = world
    was = on.client.images.get(images.tag_of(registry.load(PRISONER)))
    script = (
        "import pathlib; p = pathlib.Path('/opt/env/lib/python3.11/site-packages/more-2.0.dist-info'); p.mkdir(); "
        "(p / 'METADATA').write_text('Metadata-Version: 2.1\\nName: more\\nVersion: 2.0\\n')"
    )
    changed = on.client.containers.create(
        was.id, ["-c", script], user="0", network_mode="none", ulimits=engine.ulimits()
    )
    changed.start()
    assert changed.wait()["StatusCode"] == 0
    now = changed.commit("dpbench/changed", "test")
    changed.remove()
    project = Project(tmp_path / "project")
    shutil.copytree(PRISONER, project.folder / "frameworks" / "prisoner")
    project.commit("sleep-3ms")
    project.commit("sleep-3ms", "buffer")
    cells.environment["DRIVE_LAYER_REFERENCE"] = str(reference)
    out = tmp_path / "comparison"
    few = ["--batch-sizes", "64", "--threads", "1", "--seconds", "0.1", "--max-rounds", "5", "--out", str(out)]

    def compare(base: str, head: str, *chosen: str) -> compare_record.Comparison:
        both = ["--base", base, "--head", head, "--repository", str(project.folder), "--isolation", "docker"]
        command = [sys.executable, str(DRIVE), "compare", *both, *chosen, *few, "--synthetic", "--fresh"]
        done = subprocess.run(command, env=cells.environment, capture_output=True, text=True, timeout=900)
        assert (out / "comparison.json").exists(), done.stdout + done.stderr
        return compare_record.read(out / "comparison.json")

    both = f"image:{was.id}", "image:dpbench/changed:test"
    try:
        layer = compare(*both, "--layers", "layer-norm", "--frameworks", "phantom-exact")
        # Pairs that stop early, for a difference by chance on a busy machine, are comparisons all the same.
        assert layer.cells[0].is_compared and layer.cells[0].memory is not None, layer.cells[0].reason
        task = compare(*both, "--tasks", "logreg", "--frameworks", "prisoner-escape")
        assert task.cells[0].is_compared, task.cells[0].reason
        assert (task.base.images["prisoner"].digest, task.head.images["prisoner"].digest) == (was.id, now.id)
        seen = [side.versions["prisoner"].get("more") for side in (task.base, task.head)]
        assert seen == [None, "2.0"]
    finally:
        images.remove(on, "dpbench/changed:test")
    states = compare("HEAD~1", "HEAD", "--tasks", "logreg", "--frameworks", "prisoner-honest")
    assert states.cells[0].is_compared, states.cells[0].reason
    assert states.base.images["prisoner"].matches_lock and states.base.content != states.head.content
    assert engine.orphans(on) == []
