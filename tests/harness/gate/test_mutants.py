"""Every deliberately wrong adapter is rejected, by the check that names its fault, and the right ones are not."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from harness.environments import venv
from harness.plan import registry
from harness.tasks import TASKS
from harness.worker.gate import adam
from harness.worker.gate import cases as gate_cases
from harness.worker.gate.checks import FROZEN_CHECK
from harness.worker.gate.updates import BOUND_CHECK, COPIES_CHECK
from tests.support import gate_numpy

# One process asks for the verdicts, which all tests share.
pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("mutants")]

UPDATES = {"update: all clipped", "update: none clipped", "update: some clipped", "update: large batch"}
LATE = {"update: many steps", "update: the last 4 of many steps"}
SPREAD = "noise: standard deviation sigma C / B"
OWN_TOKENS = f"update: {gate_cases.OWN_TOKENS}"
ADAM = f"update: {gate_cases.ADAM_STEPS}"

CAUGHT_BY = {
    "clips-batch": UPDATES | {"sensitivity"},
    "clips-per-layer": UPDATES | {"update: one, clipped"},
    "clips-rows": {"update: some clipped", "update: all clipped", "update: large batch"},
    "unit-twice": {"update: one, clipped", "update: some clipped", "sensitivity"},
    "cuts-batches": {"update: large batch", "update: sizes", "noise: on a large batch"},
    "ignores-c": UPDATES | {"update: other C, B and rate"},
    "inverts-factor": UPDATES | {"sensitivity"},
    "zero-norm": {"update: zero gradients", "update: zero and other gradients"},
    "noise-on-mean": {SPREAD, "noise: on empty batches", "noise: on real batches"},
    "reuses-noise": {"noise: independent steps"},
    "ignores-seed": {"noise: fresh per seed"},
    "fresh-entropy": {"noise: same seed, same noise", "timed = replayed"},
    "one-stream": {"noise: independent coordinates"},
    "noise-on-some-layers": {SPREAD},
    "half-noise": {SPREAD, "noise: on real batches"},
    "uniform-noise": {"noise: normal"},
    "no-noise-on-empty": {"noise: on empty batches"},
    "caches-gradients": LATE | {"update: three steps"},
    "accumulates": LATE | {"update: three steps"},
    "drops-example": UPDATES | {"update: one, clipped"},
    "drops-large-batch": {"update: large batch", "update: worst tensor"},
    "short-row-numbers": UPDATES,
    "drops-layer": UPDATES | {"update: worst tensor"},
    "actual-batch": {"update: one, clipped", "update: other C, B and rate", "sensitivity"},
    "ignores-rate": {"update: other C, B and rate"},
    "counts-padding": {"update: empty", "update: one, clipped"},
    "defers": {"deferred work"},
    "embedding-off": UPDATES | {"update: worst tensor"},
    "drops-recurrent": UPDATES | {"update: worst tensor"},
    "misnamed": {"parameters: names, shapes, count"},
    "own-start": {"parameters: as given to build"},
    "under-reports": {"budget"},
    "plain-actual-batch": {"update: one, clipped", "update: other C, B and rate"},
    "mixes-examples": {"update: some clipped", "update: none clipped", "sensitivity"},
    # On the small transformers.
    "token-mean": {OWN_TOKENS, "update: none clipped"},
    "forgets-tied-use": UPDATES | {"update: worst tensor"},
    "forgets-cross-term": {"update: all clipped", "update: one, clipped", "sensitivity"},
    "leaves-norms-out": {"update: all clipped", "update: one, clipped", "sensitivity"},
    "counts-frozen": UPDATES,
    "trains-base": {"parameters: frozen ones stay"},
    "noise-in-bf16": {"noise: fine enough"},
    "norm-in-bf16": {"update: one, clipped", "sensitivity", COPIES_CHECK, BOUND_CHECK},
    "clips-share-of-mean": UPDATES,
    # On the recommender and on encoders of which a part is trained.
    "counts-id-once": UPDATES | {"update: worst tensor"},
    "bag-mean": UPDATES | {"update: worst tensor"},
    "counts-norm-scale": UPDATES - {"update: none clipped"},
    "leaves-head-out": {"update: all clipped", "update: one, clipped", "sensitivity"},
    "bare-head": {"update: all clipped", "sensitivity", SPREAD},
    # With bfloat16 products, where updates say less.
    "cuts-norm-bf16": {COPIES_CHECK},
    "noise-bf16": {"noise: fine enough"},
    "sum-to-adam": UPDATES | {SPREAD},
    "mean-noise-to-adam": {SPREAD, "noise: on real batches"},
    "adam-l2": {ADAM},
    "no-warm-up": {ADAM},
    "keeps-moments": {ADAM, "timed = replayed"},
    # Over many steps of AdamW.
    "amsgrad": {ADAM},
    "warm-up-by-pieces": {adam.CHECK},
    "adam-per-epoch": {adam.CHECK},
    "cosine": {adam.CHECK},
    "adam-anew-on-empty": {ADAM, adam.CHECK},
    "decays-frozen": {FROZEN_CHECK},
    "moments-bf16": {adam.CHECK},
    "one-row": {adam.CHECK},
    # Noise that comes again.
    "noise-again": {"noise: no step comes again"},
    "seed-plus-tensor": {"noise: fresh per seed"},
    # What needs long ids, many rows, a second block, long texts or the first ids.
    "log-probabilities-bf16": {"update: none clipped", OWN_TOKENS},
    "ids-of-one-byte": UPDATES,
    "rows-of-two-bytes": UPDATES - {"update: none clipped"},
    "one-norm": UPDATES | {"update: worst tensor"},
    "long-texts": UPDATES | {"update: worst tensor"},
    "unknown-words": UPDATES | {OWN_TOKENS},
    "first-ids": UPDATES | {"update: worst tensor"},
    "half-rows": {"update: large batch"},
}
ONLY = {
    "reuses-noise",
    "ignores-seed",
    "one-stream",
    "uniform-noise",
    "caches-gradients",
    "accumulates",
    "drops-large-batch",
    "defers",
    "under-reports",
    "noise-in-bf16",
    "cuts-norm-bf16",
    "noise-bf16",
    "mean-noise-to-adam",
    "adam-l2",
    "no-warm-up",
    "keeps-moments",
    "amsgrad",
    "warm-up-by-pieces",
    "adam-per-epoch",
    "cosine",
    "adam-anew-on-empty",
    "decays-frozen",
    "one-row",
    "noise-again",
    "seed-plus-tensor",
    "half-rows",
}
"""Faults that nothing but the named checks may find in the updates: all single steps are right."""
QUICK = {"caches-gradients", "ignores-seed", "one-row"}
"""Mutants that CI judges each time; `make mutants` and the slow tests judge all. CI sees most faults of noise, of late
steps and of batches in numpy, too (test_gate.py)."""
RIGHT = ("exact", "exact-static", "exact-plain", "exact-adam")
ALSO_RIGHT = (
    "exact-lora",
    "exact-bf16",
    "exact-vit",
    "exact-wrn",
    "exact-recsys",
    "exact-bias",
    "exact-head",
    "exact-views",
)
"""Right ones that only the slow tests judge."""


@pytest.fixture(scope="session")
def torch_python():
    python = os.environ.get("DPBENCH_TORCH_PYTHON")
    if not python:
        try:
            python = venv.ensure(registry.frameworks()["pytorch"], print).python
        except (venv.EnvironmentFault, KeyError) as fault:
            pytest.skip(f"no environment with torch ({fault}); DPBENCH_TORCH_PYTHON may name an interpreter")
    return python


@pytest.fixture(scope="session")
def verdicts(torch_python, tmp_path_factory, request):
    """The checks of the mutants that the chosen tests are about."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in (*RIGHT, *ALSO_RIGHT, *CAUGHT_BY) if name in chosen]
    out = tmp_path_factory.mktemp("mutants") / "checks.json"
    command = [torch_python, "-m", "tests.support.mutant_gates", out, *names]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=7000)
    return json.loads(out.read_text())


def _failed(checks):
    return {check["check"] for check in checks if not check["passed"]}


@pytest.mark.parametrize("task", ["logreg", "ffnn"])
def test_the_truth_from_torch_is_that_of_numpy(torch_python, tmp_path, task):
    out = tmp_path / "reference.npz"
    command = [torch_python, "-m", "frameworks._tools.reference", "--task", task, "--out", out]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    found = dict(np.load(out))
    expected = gate_numpy.reference(TASKS[task], found["instability"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", [*RIGHT, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_RIGHT)])
def test_the_right_ones_pass(verdicts, name):
    assert _failed(verdicts[name]) == set()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(CAUGHT_BY)]
)
def test_every_fault_is_caught_by_name(verdicts, name):
    failed = _failed(verdicts[name])
    assert failed >= CAUGHT_BY[name]
    if name in ONLY:
        assert {check for check in failed if check.startswith("update")} == {
            check for check in CAUGHT_BY[name] if check.startswith("update")
        }


def test_no_mutant_is_forgotten():
    variants = {v.name for v in registry.frameworks(hidden=True)["mutants"].variants}
    assert variants == {*RIGHT, *ALSO_RIGHT, *CAUGHT_BY}


def test_a_measured_cell_under_adam_is_compared_by_its_gradients(torch_python, tmp_path):
    """Adam's own steps hide the scale of the noise; the replay that the reference looks at does not."""
    out = tmp_path / "said.json"
    names = ["exact-lora", "mean-noise-to-adam", "counts-frozen", "trains-base"]
    command = [torch_python, "-m", "tests.support.adam_replay", out, *names]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    said = json.loads(out.read_text())
    right = said["exact-lora"]
    assert right["apart"] == 0 and right["jump"] < 1
    assert right["update_error"] < right["update_limit"]
    assert max(right["noise_scores"].values()) < right["noise_limit"]
    assert said["mean-noise-to-adam"]["noise_scores"]["spread"] > 10 * right["noise_limit"]
    for name in ("counts-frozen", "trains-base"):
        assert said[name]["update_error"] > 100 * right["update_limit"]


def test_a_measured_cell_in_bfloat16_is_compared_within_what_that_rounds_away(torch_python, tmp_path):
    out = tmp_path / "said.json"
    names = ["exact-lora@bf16", "mean-noise-to-adam@bf16", "counts-frozen@bf16"]
    command = [torch_python, "-m", "tests.support.adam_replay", out, *names]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    right, little_noise, counts_frozen = json.loads(out.read_text()).values()
    assert right["apart"] == 0 and right["jump"] < 1
    assert 1e-3 < right["update_error"] < right["update_limit"] < 0.2
    assert max(right["noise_scores"].values()) < right["noise_limit"]
    assert little_noise["noise_scores"]["spread"] > 10 * right["noise_limit"]
    assert counts_frozen["update_error"] > 2 * right["update_limit"]


def test_the_reference_rounds_as_mixed_precision_does(torch_python, tmp_path):
    out = tmp_path / "said.json"
    command = [torch_python, "-m", "tests.support.rounding", out]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    said = json.loads(out.read_text())
    assert said.keys() >= {"small-gpt2", "small-llama", "small-vit", "small-wrn"}
    for task, apart in said.items():
        assert apart["float32"] == 0, task
        assert 1e-3 < apart["reference"] < 0.1, (task, apart)
        assert apart["reference"] / 2 < apart["autocast"] < gate_cases.ROUNDING_FACTOR * apart["reference"], (
            task,
            apart,
        )


def test_a_measured_step_may_take_the_other_side_of_a_kink_and_count_no_example_twice(torch_python, tmp_path):
    out = tmp_path / "said.json"
    command = [torch_python, "-m", "tests.support.kink_steps", out]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    said = json.loads(out.read_text())
    passed = {name: step["update_error"] <= step["update_limit"] for name, step in said.items()}
    assert said["other side"]["update_error"] > 10 * said["right"]["update_limit"]
    assert passed == {"right": True, "other side": True, "twice": False, "twice beside a kink": False}


def test_many_steps_near_kinks_may_end_where_a_bound_within_the_tolerance_leads(torch_python, tmp_path):
    out = tmp_path / "said.json"
    command = [torch_python, "-m", "tests.support.late_kinks", out]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=300)
    said = json.loads(out.read_text())
    for error, allowed in said["ffnn"].values():
        assert 0.0 < error < 0.01
        assert allowed == pytest.approx(error)
    assert [allowed for _, allowed in said["logreg"].values()] == [0.0, 0.0]
