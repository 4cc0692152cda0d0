"""``run gpu`` with real contestants, on the processors: from nothing to a summary in one environment as it is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.environments import venv
from harness.plan import registry

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]


def test_a_short_run_ends_with_gates_times_and_ratios(tmp_path):
    python = venv.ensure(registry.frameworks()["pytorch"], print).python
    command = [sys.executable, "-m", "harness", "run", "gpu", "--device", "cpu", "--python", str(python)]
    command += ["--frameworks", "pytorch,dpcore,jax", "--tasks", "logreg", "--layers", "none", "--batch-sizes", "64"]
    command += ["--rounds", "1", "--threads", "1", "--seconds", "500", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "summary.json").read_text())
    assert said["complete"] and said["not_installed"] == {"jax": ["jax"]}
    assert [row["state"] for row in said["gates"]] == ["passed", "passed"]
    cells = {row["contestant"]: row for row in said["cells"]}
    assert {row["state"] for row in cells.values()} == {"ok"}
    assert cells["pytorch-eager"]["times_plain"] == 1.0 and cells["dpcore-native"]["times_plain"] > 0
    assert all(row["memory_bytes"] > 0 for row in cells.values())
