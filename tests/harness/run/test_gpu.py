"""``run gpu``: the order of importance, the time it keeps, an environment as it is found; with fake contestants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import frames
from harness.environments import unpinned
from harness.environments.executor import Limits
from harness.environments.unavailable import Unavailable
from harness.environments.unpinned import Deadline, OutOfTime
from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import gpu as gpu_plan
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.plan.gpu import Choice
from harness.run import gpu_summary
from harness.run.gpu import GpuRun
from harness.store import read as report_records
from harness.tasks import BF16_TASKS, TASKS
from harness.worker import machine
from tests.harness.run.test_layers import ROOT
from tests.harness.run.test_layers import request as layer_request
from tests.support.phantom_layer import PHANTOM

BLOCKED = ("pandas", "scipy", "dp_accounting", "matplotlib", "docker", "jinja2", "PIL")
"""What a Python that was found need not have."""


def run_gpu(out: Path, reference: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, in which nothing of BLOCKED can be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r})); from tests.support import drive; "
    code += "drive.install(); drive.cli.main()"
    environment = {**os.environ, "DRIVE_LAYER_REFERENCE": str(reference), "DPBENCH_CACHE": str(cache)}
    command = [sys.executable, "-c", code, "run", "gpu", "--device", "cpu", "--threads", "1", "--rounds", "1"]
    command += ["--frameworks", "phantom-noop,phantom-plain,phantom-unfit", "--tasks", "logreg"]
    command += ["--layers", "layer-norm", "--batch-sizes", "32", "--out", str(out)]
    return subprocess.run(
        [*command, *arguments], env={**environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True
    )


def test_a_run_that_was_too_short_names_what_it_did_not_begin_and_goes_on(reference, cache, tmp_path):
    short = run_gpu(tmp_path, reference, cache, "--seconds", "3.1", "--json")
    assert short.returncode == 0, short.stderr
    first = json.loads(short.stdout)
    names = {f"phantom-{v}" for v in ("noop", "plain", "unfit")}
    assert not first["complete"] and first["not_begun"]
    assert {row["contestant"] for row in first["cells"]} == {row["contestant"] for row in first["gates"]} == names

    done = run_gpu(tmp_path, reference, cache, "--seconds", "300")
    assert done.returncode == 0, done.stderr  # the gate rejects phantom-unfit, as its folder declares
    said = json.loads((tmp_path / "summary.json").read_text())
    assert said["complete"] and said["not_begun"] == [] and said["unpinned"] and said["synthetic_data"]
    assert {(row["contestant"], row["state"]) for row in said["gates"]} == {
        ("phantom-noop", "passed"),
        ("phantom-plain", "passed"),
        ("phantom-unfit", "rejected"),
    }
    cells = {row["contestant"]: row for row in said["cells"]}
    assert set(cells) == names
    assert cells["phantom-unfit"]["state"] == "rejected" and cells["phantom-unfit"]["step_ms"] is None
    assert cells["phantom-noop"]["state"] == "ok" and cells["phantom-noop"]["step_ms"] > 0
    layers = {(row["contestant"], row["passes"]): row["state"] for row in said["layers"]}
    assert layers["phantom-exact", "clipped"] == "ok" and layers["phantom-plain", "plain"] == "ok"
    assert any("no dp-accounting" in note for note in said["notes"])

    text = (tmp_path / "summary.txt").read_text()
    assert "NOT the pinned one" in text and "SYNTHETIC" in text

    found_records = report_records.load(tmp_path)  # what `dpbench report` reads: each once, the summary is none
    assert len(found_records) == len((tmp_path / "records.jsonl").read_text().splitlines())
    assert {r.cell.isolation for r in found_records} == {"unpinned"}
    assert all(r.source.lock_hash.startswith("unpinned-") for r in found_records)
    assert all(r.data is None or r.data.synthetic for r in found_records)
    assert {r.purpose for r in found_records if r.cell.variant == "unfit" and r.state == "ok"} == set()

    tables = frames.build([r for r in found_records if r.cell.kind == "e2e"])
    assert set(tables.cells.isolation) == {"unpinned"} and set(tables.cells.synthetic) == {True}

    before = (tmp_path / "records.jsonl").read_text()
    again = run_gpu(tmp_path, reference, cache, "--seconds", "300")
    assert again.returncode == 0 and (tmp_path / "records.jsonl").read_text() == before
    other = run_gpu(tmp_path, reference, cache, "--seed", "1")
    assert other.returncode == 2 and "--fresh" in other.stderr


def test_without_a_cuda_device_it_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "gpus", list)
    with pytest.raises(BadInput, match=r"needs a CUDA device.*--device cpu"):
        GpuRun(Choice(), Path(sys.executable), 60.0, tmp_path)


def test_a_python_without_the_frameworks_is_one_sentence(tmp_path):
    chosen = Choice(frameworks=("pytorch", "dpcore"), device="cpu")
    with pytest.raises(BadInput, match=r"can import none of the chosen frameworks .*pytorch needs torch"):
        GpuRun(chosen, Path(sys.executable), 60.0, tmp_path)
    with pytest.raises(BadInput, match="no program here"):
        GpuRun(chosen, tmp_path / "python", 60.0, tmp_path)
    with pytest.raises(BadInput, match="does not run"):
        GpuRun(chosen, Path("false"), 60.0, tmp_path)


def test_a_python_without_the_harness_own_libraries_is_one_sentence():
    code = "import sys, runpy; sys.modules.update(typer=None, psutil=None); "
    code += "runpy.run_module('harness', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "lacks psutil, typer" in done.stderr and "--python" in done.stderr


def test_what_a_framework_needs_is_read_from_its_code(tmp_path):
    needed = unpinned.imports([ROOT / "frameworks" / "dpcore" / "adapter.py"])
    assert {"torch", "numpy", "scipy"} <= needed  # scipy by way of dpcore
    assert "opacus" not in needed and "lightning" not in needed and "json" not in needed
    (tmp_path / "adapter.py").write_text("import nobody_has_this.part\nimport numpy\n\ndef f():\n    import nor_this\n")
    here = unpinned.look(Path(sys.executable), {"one": (tmp_path / "adapter.py",)})
    assert here.missing == {"one": ("nobody_has_this",)}
    framework = replace(registry.load(PHANTOM), name="one")
    fake = registry.Contestant(framework, framework.variants[0])
    backend = unpinned.UnpinnedBackend(here, Deadline(60.0), 60.0)
    assert backend.executor(fake, print) == Unavailable(f"not installed in {sys.executable}: nobody_has_this.")


def test_the_runs_time_and_a_process_own_time_are_two_things(reference, monkeypatch):
    def executor(seconds: float, longest: float) -> Any:
        here = unpinned.UnpinnedEnvironment(Path(sys.executable), {}, {})
        framework = registry.load(PHANTOM)
        phantom = registry.Contestant(framework, framework.variants[0])
        backend = unpinned.UnpinnedBackend(here, Deadline(seconds), longest)
        return backend.executor(phantom, print, "harness.worker.layers")

    asked = layer_request(reference, variant="exact", most_passes=10**9, seconds=1e9)
    limits = Limits(2**34, 100.0)
    with pytest.raises(OutOfTime):  # not the process is to blame: nothing to record
        executor(1.5, 100.0).run(asked, limits, lambda event: None)
    assert executor(100.0, 1.5).run(asked, limits, lambda event: None).state == "timeout"
    # On a machine so busy that the harness itself hardly runs, the run's time is over all the same.
    monkeypatch.setattr("harness.environments.executor.Patience.is_over", property(lambda self: False))
    with pytest.raises(OutOfTime):
        executor(1.5, 100.0).run(asked, limits, lambda event: None)


def test_the_most_important_comes_first_and_every_job_once():
    choice = Choice(device="cpu")
    options = gpu_plan.options(choice, synthetic=True)
    jobs = plan.jobs(options, gpu_plan.contestants(choice))
    layer_options = gpu_plan.layer_options(choice)
    layer_jobs = layer_plan.jobs(layer_options, gpu_plan.layer_contestants(choice))
    tiers = gpu_plan.tiers(choice, options, jobs, layer_jobs)
    ordered = [job for tier in tiers for job in (*tier.untimed, *tier.timed)]
    assert sorted(j.name for j in ordered) == sorted(j.name for j in [*jobs, *layer_jobs])

    cells = [{job.cell.name for job in tier.timed} for tier in tiers]
    assert [{job.cell.task for job in tier.timed} for tier in tiers[:3]] == [
        {"mnist-cnn", "imdb-embedding"},
        {"cifar10-cnn", "imdb-lstm"},
        set(BF16_TASKS),
    ]
    assert [{job.cell.batch_size for job in tier.timed} for tier in tiers[:3]] == [{512}, {512}, {64}]
    for tier in tiers[:3]:
        assert {job.contestant.name for job in tier.timed} <= set(gpu_plan.FIRST)
        assert {job.cell.name for job in tier.untimed} == {
            job.cell.name for job in tier.timed
        }  # the peak of every cell
    assert {job.cell.layer for job in tiers[3].timed} == set(gpu_plan.LAYERS[: gpu_plan.FIRST_LAYERS])
    assert {job.cell.layer for job in tiers[4].timed} == set(gpu_plan.LAYERS[gpu_plan.FIRST_LAYERS :])
    assert {job.contestant.name for job in tiers[5].timed} == set(gpu_plan.GRAPHS)
    assert {job.cell.task for job in tiers[5].timed}.isdisjoint(gpu_plan.FLOAT32_TASKS)
    assert {job.cell.task for job in tiers[6].timed} == set(gpu_plan.FLOAT32_TASKS), "the same networks in float32"
    last = {job.round for job in tiers[-1].timed}
    assert last == {1} and all(cells)
    assert all(job.purpose == "memory" for tier in tiers for job in tier.untimed)
    layered = {c.name for c in layer_registry.contestants()}
    assert {job.contestant.name for job in layer_jobs} <= layered


def test_tasks_of_published_shapes_come_late_one_by_one_and_on_a_gpu_alone():
    choice = Choice()
    assert gpu_plan.tasks(Choice(device="cpu")) == gpu_plan.tasks(Choice(batch_sizes=(512,))) == gpu_plan.TASKS
    assert gpu_plan.tasks(choice) == (*gpu_plan.TASKS, *gpu_plan.FULL)
    options = gpu_plan.options(choice, synthetic=True)
    assert {options.batch_sizes[task] for task in gpu_plan.FULL} == {(16,)}
    assert options.batch_sizes["mnist-cnn"] == gpu_plan.BATCH_SIZES
    assert options.batch_sizes["vit"] == gpu_plan.MODERN_BATCH_SIZES
    jobs = plan.jobs(options, gpu_plan.contestants(choice))
    tiers = gpu_plan.tiers(choice, options, jobs, [])
    found = [{job.cell.task for job in tier.timed} for tier in tiers]
    places = [found.index({task}) for task in gpu_plan.FULL]
    assert places == [*range(places[0], places[0] + 4)]
    assert set().union(*found[: places[0]]) == set(gpu_plan.TASKS), "all else by the most important contestants first"
    assert {job.contestant.name for job in tiers[places[0]].timed} == set(gpu_plan.FIRST)
    later = {job.contestant.name for tier in tiers[places[-1] + 1 :] for job in tier.timed if job.round == 0}
    assert later == {*gpu_plan.LATER, *gpu_plan.GRAPHS}


def test_a_full_task_that_is_named_is_measured_at_a_size_that_fits():
    choice = Choice(tasks=("llama-1b-lora-bf16", "gpt2-774m", "gpt2-124m-bf16"), layers=())
    options = gpu_plan.options(choice, synthetic=True)
    assert options.batch_sizes == {"llama-1b-lora-bf16": (4,), "gpt2-774m": (4,), "gpt2-124m-bf16": (16,)}
    jobs = plan.jobs(options, gpu_plan.contestants(choice))
    first = gpu_plan.tiers(choice, options, jobs, [])[0]
    assert {job.cell.task for job in first.timed} == set(choice.tasks)


def test_the_frontier_is_that_of_tasks_that_are_judged():
    assert gpu_plan.frontier_tasks(Choice()) == ("gpt2-lm-bf16",)
    assert gpu_plan.frontier_tasks(Choice(tasks=("mnist-cnn",))) == ()
    assert gpu_plan.frontier_tasks(Choice(tasks=("mnist-cnn", "vit"), frontier=("vit",))) == ("vit",)
    with pytest.raises(BadInput, match="--frontier names 'vit', which is not among the tasks of this run"):
        gpu_plan.frontier_tasks(Choice(tasks=("mnist-cnn",), frontier=("vit",)))
    here = gpu_plan.contestants(Choice())
    assert {c.name for c in gpu_plan.frontier_contestants(Choice(), here)} == set(gpu_plan.FIRST)


@pytest.mark.slow  # three quarters of a minute
def test_the_frontier_comes_last(reference, cache, tmp_path):
    arguments = ("--layers", "none", "--frontier", "logreg", "--frameworks", "phantom-noop,phantom-unfit")
    done = run_gpu(tmp_path, reference, cache, "--seconds", "300", *arguments)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "summary.json").read_text())
    found = {row["contestant"]: row for row in said["frontier"]}
    assert said["complete"] and set(found) == {"phantom-noop", "phantom-unfit"}
    everyone = TASKS["logreg"].train_size
    assert found["phantom-noop"]["batch_size"] == everyone and found["phantom-noop"]["examples_per_second"] > 0
    assert found["phantom-noop"]["ended"] == f"batch {everyone} at least; no larger size was tried"
    assert found["phantom-unfit"]["ended"] == "nothing fits, then rejected"
    assert "Largest physical batch that fits" in (tmp_path / "summary.txt").read_text()
    probes = [r for r in report_records.load(tmp_path) if r.purpose == "probe"]
    timed = [r for r in report_records.load(tmp_path) if r.purpose == "time"]
    assert {r.cell.kind for r in probes} == {"frontier"} and len(probes) > 5
    assert min(r.sequence for r in probes) > max(r.sequence for r in timed)


def test_versions_other_than_the_pins_are_named():
    place = gpu_summary.Place(
        device="cuda",
        python="/somewhere/python",
        versions={"python": "3.12.3", "torch": "2.11.0+cu130", "typing-extensions": "4.16.0"},
        pins={"torch": "2.13.0", "typing_extensions": "4.16.0", "scipy": "1.17.1"},
        lacking={"jax": ("jax",)},
        devices=[{"framework": "torch", "version": "2.11.0+cu130", "device": "A device"}],
        machine={"gpus": ["A device, 1000 MiB, 1.0"]},
        synthetic=True,
    )
    nothing = gpu_summary.Outcome(place, "dpbench run gpu", 520.0, 12.0, [], [], {})
    said = gpu_summary.summary(nothing)
    assert said["versions_found_and_pinned"] == {
        "scipy": {"found": None, "pinned": "1.17.1"},
        "torch": {"found": "2.11.0+cu130", "pinned": "2.13.0"},
    }
    assert "torch 2.11.0+cu130 (pinned 2.13.0)" in gpu_summary.text(nothing)
    assert "Not installed, so not measured: jax (no jax)" in gpu_summary.text(nothing)
