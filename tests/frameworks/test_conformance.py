"""Every contestant, present and future, in its own environment: before the gate, and what it must do besides being
right (``probe.py``); and a short run end to end.

Generated from the folders under ``frameworks/``: a new one is tested without a line here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.environments import executor, memory_limit
from harness.environments import venv as env
from harness.environments.backend import last_json
from harness.environments.executor import Limits, Venv
from harness.errors import BadInput
from harness.gate import admission
from harness.plan import e2e as plan
from harness.plan import registry
from harness.plan.registry import Contestant
from harness.run.e2e import ensure_data
from harness.tasks import FULL_TASKS, GATE_TASKS, TASKS

pytestmark = pytest.mark.frameworks

DEFAULTS = {c.name for c in registry.select(["defaults"])}
CORE = {c.name for c in registry.select(["core"])}


def is_gated(contestant: Contestant, task: str) -> bool:
    """Say whether the gate sees it: of the default variants the core ones on two tasks, the others on one; who draws
    noise late, on tables."""
    if contestant.name == "dpcore-lazy":
        return task == "recsys-1m"
    if contestant.name in CORE:
        return task in ("mnist-cnn", "imdb-embedding")
    return contestant.name in DEFAULTS and task == "mnist-cnn"


def is_gated_in_ci(contestant: Contestant, task: str) -> bool:
    """Say the same for CI, where what compiles anew for every size of batch is judged on a task without convolutions,
    whose network it compiles in less than half the time; the other task is among the conformance tests."""
    if contestant.name in CORE or not contestant.variant.static_shapes:
        return is_gated(contestant, task)
    return contestant.name in DEFAULTS and task == "ffnn"


def is_probed(contestant: Contestant, task: str) -> bool:
    """What CI probes besides: the core ones on both tasks. What compiles every size of batch takes minutes."""
    return contestant.name in CORE


def cases(tasks: Iterable[str], is_quick: Callable[[Contestant, str], bool]) -> list[Any]:
    """A parameter per contestant and task."""
    return [
        pytest.param(
            contestant,
            task,
            id=f"{contestant.name}-{task}",
            # One process asks all of a framework's questions, for some answers are kept (PROBES).
            marks=[
                pytest.mark.xdist_group(contestant.framework.name),
                *([] if is_quick(contestant, task) else [pytest.mark.slow]),
                *([pytest.mark.conformance] if is_gated(contestant, task) else []),
            ],
        )
        for contestant in registry.select(["all"])
        for task in tasks
    ]


@pytest.fixture(scope="module", autouse=True)
def data() -> None:
    """The data of the short run, before any verdict: verdicts hang on the data that is there, and the run would ask for
    all of its own anew."""
    with contextlib.suppress(BadInput):  # which then fails the run alone
        for task in plan.preset("smoke").tasks:
            ensure_data(TASKS[task].dataset, False, print)


def venv(contestant: Contestant, task: str) -> Venv:
    """Where it runs, or a skip with the reason."""
    if reason := contestant.variant.why_unsupported(task):
        pytest.skip(f"unsupported: {reason}")
    try:
        return Venv(env.ensure(contestant.framework, print).python, contestant.variant.environment)
    except env.EnvironmentFault as fault:
        pytest.skip(f"unsupported here: {fault}")


@pytest.mark.parametrize(
    ("contestant", "task"), cases([task for task in TASKS if task not in FULL_TASKS], is_gated_in_ci)
)
def test_the_gate_says_what_is_expected_of_it(contestant: Contestant, task: str) -> None:
    bounds = Limits(memory_limit.default_limit(), 600.0)
    threads = len(os.sched_getaffinity(0))
    verdict = admission.judge(
        contestant, task, venv(contestant, task), bounds, "cpu", threads, print, env.VenvBackend().run_tool
    )
    if verdict.state == "unsupported":
        assert verdict.reason
        pytest.skip(f"unsupported here: {verdict.reason}")
    assert verdict.state == "ok", verdict
    if fault := contestant.variant.why_rejected(task):
        assert not verdict.gate.passed, f"it passes, though it must be rejected: {fault}"
    else:
        assert verdict.gate.passed, admission.failures(verdict.gate)


PROBES: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.fixture
def probe(contestant: Contestant, task: str) -> dict[str, Any]:
    """What ``probe.py`` found, in one process for all tests of a contestant and task."""
    key = (contestant.name, task)
    place = venv(contestant, task)
    if key not in PROBES:
        variant = contestant.variant
        arguments = [str(contestant.framework.folder), variant.name, task]
        arguments += ["private" if variant.private else "plain", "static" if variant.static_shapes else "any"]
        PROBES[key] = last_json(
            executor.run_tool(place.python, "tests.frameworks.probe", arguments, environment=place.environment)
        )
    if "unsupported" in PROBES[key]:
        assert PROBES[key]["unsupported"].strip(), "a task is unsupported for a reason"
        pytest.skip(f"unsupported here: {PROBES[key]['unsupported']}")
    return PROBES[key]


probed = pytest.mark.parametrize(("contestant", "task"), cases(("mnist-cnn", "imdb-embedding"), is_probed))


@probed
def test_it_builds_the_task_s_network(contestant: Contestant, task: str, probe: dict[str, Any]) -> None:
    assert probe["parameters"] == {
        "fault": None,
        "count": TASKS[task].parameter_count,
        "dtypes": ["float32"],
        "copies": True,
    }


@probed
def test_every_size_of_batch_moves_the_weights_as_it_should(
    contestant: Contestant, task: str, probe: dict[str, Any]
) -> None:
    lengths = probe["batches"]
    assert set(lengths) == {"empty", "single", "partial", "full", "large"}
    for name, length in lengths.items():
        is_still = name == "empty" and not contestant.variant.private
        assert length == 0.0 if is_still else 0.0 < length < 1e6, (name, length)


@probed
def test_a_seed_fixes_everything(contestant: Contestant, task: str, probe: dict[str, Any]) -> None:
    assert probe["seeds"]["same"] <= 1e-4
    if contestant.variant.private:
        assert probe["seeds"]["other"] > 0.1, "another seed must give other noise"
    else:
        assert probe["seeds"]["other"] <= 1e-4


@probed
def test_it_frees_what_it_took(contestant: Contestant, task: str, probe: dict[str, Any]) -> None:
    assert probe["kept"]["growth"] < 0.5 * probe["kept"]["placed"]


@probed
def test_it_reports_memory_by_name(contestant: Contestant, task: str, probe: dict[str, Any]) -> None:
    """Nothing on a CPU, where the worker measures; whatever there is has a name and bytes."""
    for name, value in probe["memory"].items():
        assert name.isidentifier() and isinstance(value, int) and value >= 0


@probed
def test_its_own_loop_is_what_it_declares(contestant: Contestant, task: str, probe: dict[str, Any]) -> None:
    found, variant = probe["own_loop"], contestant.variant
    assert ("unsupported" in found) is (variant.own_sampling is None), found
    if variant.own_sampling is None:
        return
    assert found["updates"] is None or found["updates"] > 0
    assert 0.0 < found["length"] < 1e6
    if variant.own_replays:
        assert found["difference"] <= 1e-4


VARIANTS = {f"{f.name}-{v.name}": v for f in registry.frameworks().values() for v in f.variants}


@pytest.mark.parametrize("framework", registry.frameworks().values(), ids=lambda f: f.name)
def test_the_folder_says_what_it_is(framework: registry.Framework) -> None:
    assert framework.requirements.exists() and framework.licence
    assert framework.home.startswith("http") or (registry.ROOT / framework.home).exists()
    assert any(variant.default for variant in framework.variants)
    for file in (framework.requirements, framework.requirements_without_dependencies):
        for pin in registry.pins(file):
            assert "==" in pin or re.search(r" @ git\+https://.*@[0-9a-f]{40}$", pin), f"{pin!r} is not pinned"
    for variant in framework.variants:
        named = {*variant.unsupported, *variant.expected_rejection}
        assert named <= {*TASKS, *GATE_TASKS, registry.EVERY_TASK}
        assert {*variant.supported} <= {*TASKS, *GATE_TASKS}
        assert not variant.supported or registry.EVERY_TASK in variant.unsupported
        assert all(reason.strip() for reason in (*variant.unsupported.values(), *variant.expected_rejection.values()))
        if variant.twin is not None:
            twin = VARIANTS[variant.twin]
            assert variant.private and not twin.private and twin.parallel == variant.parallel, (
                "a twin does the same without DP"
            )
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
        # Of the preset's four the three that compile nothing: the fourth has its gate and its probe above.
        "--frameworks",
        "dpcore-native,opacus-hooks,pytorch-eager",
        "--out",
        str(tmp_path / "run"),
        "--json",
        # A busy machine compiles for longer than the preset waits.
        "--timeout",
        "900",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary["states"]) == {"ok"}
    written = {Path(p).suffix for p in summary["written"]}
    assert {".md", ".csv", ".tex", ".png", ".pdf", ".svg"} <= written
