"""Every contestant, present and future, before the gate in its own environment; and a short run end to end.

Generated from the folders under ``frameworks/``: a new one is tested without a line here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import env, gatekeeper, limits, registry
from harness.isolation import Limits, Venv
from harness.registry import Contestant
from harness.tasks import TASKS

pytestmark = pytest.mark.frameworks

DEFAULTS = registry.select(None)
EVERYTHING = registry.select(["all"])
CASES = [(c, "mnist-cnn") for c in EVERYTHING] + [(c, t) for c in DEFAULTS for t in TASKS if t != "mnist-cnn"]


@pytest.mark.parametrize(("contestant", "task"), CASES, ids=[f"{c.name}-{t}" for c, t in CASES])
def test_the_gate_lets_it_in(contestant: Contestant, task: str) -> None:
    if reason := contestant.variant.why_unsupported(task):
        pytest.skip(f"unsupported: {reason}")
    place = Venv(env.ensure(contestant.framework, print).python, contestant.variant.environment)
    bounds = Limits(limits.default_limit(), 600.0)
    threads = len(os.sched_getaffinity(0))
    verdict = gatekeeper.judge(contestant, task, place, bounds, "cpu", threads, print)
    if verdict.state == "unsupported":
        pytest.skip(f"unsupported here: {verdict.reason}")
    assert verdict.state == "ok", verdict
    assert verdict.gate.passed, gatekeeper.failures(verdict.gate)


@pytest.mark.parametrize("framework", registry.frameworks().values(), ids=lambda f: f.name)
def test_the_folder_says_what_it_is(framework: registry.Framework) -> None:
    assert framework.requirements.exists() and framework.licence
    assert framework.home.startswith("http") or (registry.ROOT / framework.home).exists()
    assert any(variant.default for variant in framework.variants)
    for line in framework.requirements.read_text().splitlines():
        assert not line.strip() or line.startswith("#") or "==" in line, f"{line!r} is not pinned"
    for variant in framework.variants:
        assert set(variant.unsupported) <= set(TASKS)
    assert (framework.folder / "NOTES.md").stat().st_size > 200, "the decisions that make it fast and fair"


def test_a_short_run_end_to_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "e2e",
        "--preset",
        "smoke",
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary["states"]) == {"ok"}
    written = {Path(p).suffix for p in summary["written"]}
    assert {".md", ".csv", ".tex", ".png", ".pdf", ".svg"} <= written
