"""The layer benchmark's instrument on a fake layer of known seconds, bytes and faults; its plan; and whole runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import layers
from harness.errors import BadInput
from harness.layer_contract import of_events
from harness.layers import LAYERS
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.store import record
from harness.worker import layers as layer_worker
from harness.worker.gate import layers as layer_gate
from harness.worker.layer_request import LayerRequest
from harness.worker.result import Result
from tests.support import phantom_layer, virtual_time
from tests.support.phantom_layer import PHANTOM

ROOT = Path(__file__).parents[3]
LAYER = LAYERS["layer-norm"]
KIB = 2**10
FAKE = phantom_layer.module()


def request(reference: Path, **changes: Any) -> LayerRequest:
    plain = LayerRequest(
        mode="time",
        folder=str(PHANTOM),
        variant="exact",
        layer="layer-norm",
        passes="clipped",
        batch_size=32,
        max_grad_norm=1.0,
        device="cpu",
        threads=1,
        seed=0,
        reference=str(reference),
        predicts=False,
        seconds=10.0,
        most_passes=20,
        least_passes=5,
        longest_pass=5.0,
        most_bytes=16 * 2**30,
    )
    return replace(plain, **changes)


def result_of(asked: LayerRequest) -> Result:
    """What the worker's last event says."""
    events: list[dict[str, Any]] = []
    layer_worker.run(asked, events.append)
    return Result.of(events[-1])


# ---- the instrument


@pytest.mark.parametrize("milliseconds", [5, 10, 50])
def test_a_known_sleep_is_measured(reference, milliseconds):
    made = []

    def create() -> Any:
        made.append(FAKE.Phantom())
        made[-1].sleep_seconds = milliseconds / 1e3
        return made[-1]

    asked = request(reference, most_passes=10)
    seconds = layer_worker.measure_time(create, LAYER, asked, lambda event: None).layer.pass_seconds
    truth = made[-1].lasted[-len(seconds) :]
    assert min(truth) >= milliseconds / 1e3
    ratios = [measured / lasted for measured, lasted in zip(seconds, truth, strict=True)]
    assert min(ratios) >= 1.0 and statistics.median(ratios) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("mebibytes", [0, 1, 4, 16])
@pytest.mark.parametrize("passes", ["plain", "per_sample", "clipped"])
def test_known_bytes_are_counted_part_by_part(reference, mebibytes, passes):
    def create() -> Any:
        adapter = FAKE.Phantom()
        adapter.spare_bytes = mebibytes * 2**20
        return adapter

    result = layer_worker.measure_memory(create, LAYER, request(reference, mode="memory", passes=passes))
    parts = result.layer.parts
    gradients = LAYER.parameter_bytes * (32 if passes == "per_sample" else 1)
    assert parts.input == 32 * LAYER.input_bytes
    assert parts.labels == 32 * LAYER.label_bytes
    assert parts.module == LAYER.parameter_bytes
    assert parts.gradients == gradients
    assert abs(parts.intermediate - mebibytes * 2**20) <= 64 * KIB
    assert parts.peak == parts.input + parts.labels + parts.module + parts.gradients + parts.intermediate
    assert parts.baseline == FAKE.WORKSPACE  # what the BLAS library keeps is no part of the layer
    assert parts.unexplained == 0
    assert result.state == "ok"


def test_events_give_level_and_peak():
    assert of_events([10, 20, -10, 5, -25]) == layer_worker.Bytes(delta=0, peak=30)
    assert of_events([-8, 4]) == layer_worker.Bytes(delta=-4, peak=0)


def test_parts_that_do_not_add_up_are_void(reference):
    result = result_of(request(reference, mode="memory", variant="leaky"))
    assert result.state == "rejected"
    assert "the parts do not add up: 1048576 bytes more are alive" in str(result.reason)


def test_a_cell_stops_by_passes_or_by_seconds_and_never_before_the_least(reference):
    by_passes = result_of(request(reference, most_passes=7)).layer
    assert len(by_passes.pass_seconds) == 7 and by_passes.stopped_by == "passes"
    by_seconds = result_of(request(reference, variant="slow", batch_size=10, seconds=0.1, most_passes=10_000)).layer
    assert 5 <= len(by_seconds.pass_seconds) <= 10 and by_seconds.stopped_by == "seconds"
    least = result_of(request(reference, variant="slow", batch_size=10, seconds=1e-6)).layer
    assert len(least.pass_seconds) == 5
    assert statistics.median(least.pass_seconds) >= 0.01


def test_what_is_predicted_to_be_too_large_is_not_tried(reference, monkeypatch):
    virtual_time.install(monkeypatch)
    hungry = result_of(request(reference, mode="memory", variant="hungry", predicts=True))
    assert hungry.state == "unsupported"
    assert str(hungry.reason) == "predicted 32.0 GiB for a pass (limit 16 GiB)."
    assert hungry.layer.predicted_bytes == pytest.approx(32 * 2**30, rel=1e-3)
    slow = result_of(request(reference, variant="slow", batch_size=2048, predicts=True, longest_pass=0.4))
    assert slow.state == "unsupported" and "s for a pass (limit 0 s)" in str(slow.reason)
    assert slow.layer.predicted_seconds == pytest.approx(2.048, rel=0.2)
    small = result_of(request(reference, variant="hungry", predicts=True, batch_size=16))
    assert small.state == "ok"  # only above the sizes that the prediction itself runs


# ---- correctness


@pytest.mark.parametrize("passes", ["plain", "per_sample", "clipped"])
def test_the_right_one_is_let_in(reference, passes):
    result = result_of(request(reference, passes=passes))
    assert result.state == "ok", result
    assert all(check.passed and check.error < 1e-5 for check in result.checks)


@pytest.mark.parametrize(
    ("variant", "passes", "check"),
    [
        ("drops-example", "clipped", "clipped-sum"),
        ("drops-example", "per_sample", "per-sample-gradients"),
        ("caches", "clipped", "clipped-sum"),
        ("caches", "per_sample", "per-sample-gradients"),
        ("never-clips", "clipped", "clipped-sum"),
        ("clips-batch", "clipped", "clipped-sum"),
        ("time-first", "per_sample", "batch-dimension"),
    ],
)
def test_wrong_ones_are_rejected_by_name(reference, variant, passes, check):
    result = result_of(request(reference, variant=variant, passes=passes))
    assert result.state == "rejected"
    assert str(result.reason).startswith(check)


def test_a_wrong_batch_dimension_voids_the_memory_too(reference):
    result = result_of(request(reference, mode="memory", variant="time-first", passes="per_sample"))
    assert result.state == "rejected" and "batch-dimension" in str(result.reason)


def test_the_reference_is_kept_sparse_and_comes_back_whole():
    rng = np.random.default_rng(0)
    table = np.zeros((2, 50, 3))
    table[0, 7] = rng.standard_normal(3)
    dense = rng.standard_normal((2, 4))
    packed = layer_gate.pack({"weight": table, "bias": dense})
    truth = layer_gate.Reference(packed, examples=2)
    for row in range(2):
        np.testing.assert_array_equal(truth.example(row)["weight"], table[row].reshape(-1))
        np.testing.assert_array_equal(truth.example(row)["bias"], dense[row])
    assert sum(value.nbytes for value in packed.values()) < table.nbytes / 4
    bound = truth.bound()
    norms = [float(np.sqrt((table[row] ** 2).sum() + (dense[row] ** 2).sum())) for row in range(2)]
    assert min(norms) < bound < max(norms)
    expected = sum(min(1.0, bound / norm) * value for norm, value in zip(norms, dense, strict=True))
    np.testing.assert_allclose(truth.total(bound)["bias"], expected)


# ---- plan and contestants


def test_every_real_contestant_can_be_read():
    names = {c.name for c in layer_registry.contestants()}
    assert {"pytorch-eager", "opacus-hooks", "opacus-ghost", "dpcore-native"} <= names
    for contestant in layer_registry.contestants():
        assert (contestant.framework.folder / "layers.py").exists()
        is_private = contestant.variant.column == "dp"
        assert ("plain" in contestant.variant.passes) != is_private, contestant.name


def test_layer_files_do_not_touch_the_hash_of_an_adapter(tmp_path):
    for name, text in {"adapter.py": "a = 1", "layers.py": "b = 1", "layers.toml": ""}.items():
        (tmp_path / name).write_text(text)
    framework = registry.Framework("x", "x", "", "", "3.11", tmp_path, ())
    before = framework.adapter_hash
    contestant = layer_registry.LayerContestant(framework, layer_registry.LayerVariant("v", "v", "dp", ("clipped",)))
    of_layers = contestant.code_hash
    (tmp_path / "layers.py").write_text("b = 2")
    assert framework.adapter_hash == before
    assert contestant.code_hash != of_layers
    (tmp_path / "adapter.py").write_text("a = 2")
    assert framework.adapter_hash != before


def test_a_plan_runs_whole_blocks_with_memory_right_before_time():
    options = layer_plan.preset("quick", layers=["linear", "rnn"], batch_sizes=(16, 64), rounds=2)
    jobs = layer_plan.jobs(options, layer_registry.select(["core"]))
    assert jobs == layer_plan.jobs(options, layer_registry.select(["core"]))
    assert len({job.name for job in jobs}) == len(jobs)
    blocks = [(job.round, job.cell.layer, job.cell.batch_size) for job in jobs]
    assert len([key for i, key in enumerate(blocks) if i == 0 or blocks[i - 1] != key]) == 2 * 4
    for i, job in enumerate(jobs):
        if job.purpose == "memory":
            assert job.round == 0 and jobs[i + 1].cell == job.cell and jobs[i + 1].purpose == "time"
    cells = {(j.cell.layer, j.cell.contestant, j.cell.passes) for j in jobs}
    assert ("rnn", "opacus-module", "plain") in cells
    assert ("linear", "opacus-module", "plain") not in cells  # the paper has no such column for it
    assert ("linear", "opacus-hooks", "per_sample") in cells and ("linear", "opacus-hooks", "clipped") in cells


def test_the_small_grid_is_ten_layers_two_sizes_four_modes_three_times():
    options = layer_plan.PRESETS["small"]
    jobs = layer_plan.jobs(options, layer_registry.select(options.frameworks))
    assert len(jobs) == 10 * 2 * 4 * 3
    assert {job.purpose for job in jobs} == {"time"}


def test_on_cuda_the_papers_passes_are_made_and_nothing_is_predicted():
    options = layer_plan.preset("quick", device="cuda")
    assert (options.most_passes, options.seconds) == (2000, 60.0)
    assert layer_plan.preset("quick", device="cuda", most_passes=50).most_passes == 50
    assert layer_plan.preset("quick").most_passes == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ["conv9d"]}, "There is no layer 'conv9d'"),
        ({"layers": []}, "--layers names nothing"),
        ({"batch_sizes": (0,)}, "Batch size 0 is not measured"),
        ({"batch_sizes": (9000,)}, "between 1 and 8192"),
        ({"passes": ("backward",)}, "--passes is 'backward'"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"seconds": 0.0}, "--seconds is 0.0"),
        ({"repeats": -1}, "--repeats is -1"),
    ],
)
def test_bad_input_is_one_sentence(changes, message):
    with pytest.raises(BadInput, match=message):
        layer_plan.preset("quick", **changes)
    with pytest.raises(BadInput, match="There is no preset 'huge'"):
        layer_plan.preset("huge")
    with pytest.raises(BadInput, match="There is no layer contestant 'nobody'"):
        layer_registry.select(["nobody"])


# ---- whole runs


def started(out: Path, reference: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """``dpbench run layers`` with the fakes in a process of its own."""
    environment = {**os.environ, "DRIVE_LAYER_REFERENCE": str(reference), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.drive", "run", "layers", "--layers", "layer-norm"]
    command += ["--threads", "1", "--repeats", "0", "--batch-sizes", "32", "--most-passes", "5"]
    done = subprocess.run(
        [*command, "--out", str(out), *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done


def dpbench(out: Path, reference: Path, *arguments: str, code: int = 0) -> list[record.Record]:
    """The records of a run."""
    done = started(out, reference, *arguments, "--json", code=code)
    if code == 2:
        return []
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == str(out)
    return [r for path in sorted((out / "records").glob("*.json")) for r in record.read(path)]


def test_what_the_last_timed_pass_left_on_the_measured_batch_is_compared(reference, tmp_path):
    chosen = "phantom-exact,phantom-four-only,phantom-idles"
    found = dpbench(tmp_path / "run", reference, "--frameworks", chosen, "--no-memory", code=1)
    for r in found:
        (last,) = [check for check in r.gate.checks if check.check == "last-timed-pass"]
        assert "32 examples of the measured batch" in last.detail
        assert (r.state, last.passed) == (("ok", True) if r.cell.variant == "exact" else ("rejected", False))
        assert r.state == "ok" or str(r.reason).startswith("last-timed-pass: error ")
    assert len(found) == 6


def test_a_run_leaves_a_record_per_process_and_resumes(reference, tmp_path):
    out = tmp_path / "run"
    chosen = "phantom-plain,phantom-own,phantom-exact,phantom-drops-example,phantom-hungry,phantom-crash"
    chosen += ",phantom-refuses,phantom-declared"
    found = dpbench(out, reference, "--frameworks", chosen, code=3)
    of = {(r.cell.contestant, r.cell.passes, r.purpose): r for r in found}
    assert len(found) == len(of) == 2 * 10
    good = of["phantom-exact", "clipped", "time"]
    assert good.state == "ok" and len(good.layer.pass_seconds) == 5 and good.gate.passed
    assert good.cell.name == "layer-norm/phantom-exact/clipped/32/layers-v1/cpu/venv"
    assert good.layer.example_bytes == LAYER.example_bytes and good.layer.column == "dp"
    assert of["phantom-own", "plain", "time"].layer.column == "own_module"
    assert of["phantom-exact", "per_sample", "memory"].layer.parts.gradients == 32 * LAYER.parameter_bytes
    assert of["phantom-drops-example", "clipped", "time"].state == "rejected"
    assert not of["phantom-drops-example", "clipped", "time"].gate.passed
    assert of["phantom-crash", "clipped", "time"].state == "crashed"
    assert "it was asked to" in of["phantom-crash", "clipped", "time"].reason
    assert of["phantom-refuses", "clipped", "time"].state == "unsupported"
    assert of["phantom-declared", "clipped", "time"].reason == "no rule for it"
    for purpose in ("memory", "time"):  # the memory process says it, and no timed one is tried
        hungry = of["phantom-hungry", "clipped", purpose]
        assert hungry.state == "unsupported" and hungry.reason.startswith("predicted 32.0 GiB")
        assert hungry.layer.predicted_bytes > 2**34

    next((out / "records").glob("*exact.clipped.b32.r0.memory*")).unlink()
    before = {path.name: path.read_text() for path in (out / "records").iterdir()}
    again = dpbench(out, reference, "--frameworks", chosen, code=3)
    assert len(again) == len(found)
    assert all((out / "records" / name).read_text() == text for name, text in before.items())
    dpbench(out, reference, "--frameworks", "phantom-plain", code=2)  # another plan in the same folder


def test_a_run_ends_with_tables_and_says_where_everything_lies(reference, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIVE_WITH_REPORT", "1")
    shown = started(tmp_path / "run", reference, "--frameworks", "phantom-exact", "--passes", "per_sample").stdout
    words = " ".join(shown.split())
    assert "The memory law" in shown and "phantom-exact (per_sample)" in shown
    place = tmp_path / "run"
    assert "".join(f"Report: {(place / 'report' / 'report.html').as_uri()}".split()) in "".join(words.split())


def test_batches_fit_their_room():
    assert layer_worker.batches_of(LAYER, 16) == 20
    assert layer_worker.batches_of(LAYERS["conv"], 16) == 2
    count = layer_worker.batches_of(LAYERS["lstm"], 128)
    assert count == 64 * 2**20 // (128 * (LAYERS["lstm"].input_bytes + LAYERS["lstm"].label_bytes))


def test_a_batch_of_a_run_differs_from_the_checked_one():
    mine, _ = layers.batch(LAYER, 4, 0)
    checked, _ = layer_gate.checked_batch(LAYER)
    assert not np.array_equal(mine["x"], checked["x"])
