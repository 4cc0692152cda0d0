"""Steps on a simulated CUDA device: the branches for GPUs compute what the CPU computes, and the host hardly waits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dpcore.simulated_cuda.device import build

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("engine", "loop", "hooks", "engine, bf16")
MODELS = ("linear", "convolution", "group norm", "lstm", "tied transformer")

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA, whose hooks cannot be there twice"),
    pytest.mark.xdist_group("device"),  # which takes a minute to compile
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device, compiled."""
    return build(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def steps(library: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what a process with the device reports, by model and way."""
    environment = os.environ | {"DPCORE_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.dpcore.simulated_cuda.steps", str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {(line["model"], line["way"]): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_the_device_is_exact_and_the_host_waits_once(steps, model, way):
    step = steps[model, way]

    assert step["device"] == "cuda"
    assert step["error"] < (5e-2 if "bf16" in way else 1e-5)
    # The one read asks if any norm overflowed or may be rounding error: nothing is released before that is known.
    assert step["steady"]["reads"] == {"item": 1}
    assert step["steady"]["uploads"] == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [model for model in MODELS if model != "lstm"])  # CUDA's fused cell is not the CPU's
def test_a_private_step_asks_for_few_more_operators_than_an_ordinary_one(steps, model, way):
    ordinary, private = steps[model, way]["ordinary"], steps[model, way]["steady"]

    assert ordinary["reads"] == {}
    assert sum(private["operators"].values()) <= 6 * sum(ordinary["operators"].values())


def test_the_proof_for_a_real_device_runs_on_the_simulated_one(library):
    command = [sys.executable, "-m", "tests.dpcore.on_device", "--device", "simulated", "--paths", "norm"]
    command += ["--library", str(library.parent)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["way"] for one in found} == {"engine", "engine, Triton", "loop", "hooks"}
    assert {one["outcome"] for one in found} == {"right"} and len(found) >= 30
