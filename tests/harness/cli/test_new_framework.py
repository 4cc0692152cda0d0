"""``dpbench new-framework``: it writes a folder that runs, that the gate rejects with a clear message, and that the
page for newcomers turns into a right adapter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import new_framework
from harness.contract import Adapter
from harness.errors import BadInput
from harness.plan import registry
from harness.tasks import TASKS
from harness.worker.gate.checks import checks
from harness.worker.gate.updates import BOUND_CHECK
from harness.worker.process import load_create
from tests.harness.gate.test_gate import BUDGET, PRIVATE, reference

PAGE = registry.ROOT / "docs" / "add-a-framework.md"
STEP = re.compile(r"    def step\(.*?(?=\n    def |\n```)", re.DOTALL)


def follow_the_page(parent: Path, name: str = "plain_numpy") -> Path:
    """The skeleton with the step and the unsupported tasks of docs/add-a-framework.md."""
    folder = parent / name
    new_framework.write(name, parent)
    page = PAGE.read_text()
    step = STEP.search(page)
    unsupported = re.search(r"^unsupported = .*\nsupported = .*$", page, re.MULTILINE)
    assert step is not None and unsupported is not None
    adapter = (folder / "adapter.py").read_text()
    filled, count = STEP.subn(lambda _: step[0].rstrip() + "\n", adapter)
    assert count == 1
    (folder / "adapter.py").write_text(filled)
    with (folder / "framework.toml").open("a") as file:
        file.write(unsupported[0] + "\n")
    return folder


def gate(folder: Path) -> list[dict]:
    def create() -> Adapter:
        return load_create(folder / "adapter.py")("default")

    return list(checks(create, TASKS["logreg"], PRIVATE, False, reference("logreg"), BUDGET))


def test_the_skeleton_runs_and_the_gate_names_what_is_missing(tmp_path: Path) -> None:
    new_framework.write("newcomer", tmp_path)
    framework = registry.load(tmp_path / "newcomer")
    assert framework.name == "newcomer" and [v.default for v in framework.variants] == [True]
    assert all("==" in pin for pin in registry.pins(framework.requirements))
    assert (framework.folder / "NOTES.md").exists()
    found = gate(framework.folder)
    failed = [check for check in found if not check["passed"]]
    named = [
        check for check in failed if "step is not filled in yet in frameworks/newcomer/adapter.py" in check["detail"]
    ]
    assert len(named) > 10
    assert {check["check"] for check in found if check["passed"]} <= {
        "parameters: names, shapes, count",
        "parameters: as given to build",
        "update: worst tensor",
        "budget",
        BOUND_CHECK,  # not measured
    }


def test_the_page_s_adapter_passes_the_gate(tmp_path: Path) -> None:
    folder = follow_the_page(tmp_path)
    assert [check for check in gate(folder) if not check["passed"]] == []
    variant = registry.load(folder).variants[0]
    assert [task for task in TASKS if variant.why_unsupported(task) is None] == ["logreg"]


def test_the_command_writes_it_and_refuses_to_write_over_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "new-framework", "newcomer", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT)
    assert done.returncode == 0 and "docs/add-a-framework.md" in done.stdout
    before = {path.name: path.read_text() for path in (tmp_path / "newcomer").iterdir()}
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=registry.ROOT)
    assert again.returncode == 2 and "There is a framework newcomer already" in again.stderr
    assert {path.name: path.read_text() for path in (tmp_path / "newcomer").iterdir()} == before
    other = subprocess.run(
        [*command[:4], "second", *command[5:], "--json"], capture_output=True, text=True, cwd=registry.ROOT
    )
    written = json.loads(other.stdout)["written"]
    assert sorted(written) == sorted(str(path) for path in (tmp_path / "second").iterdir())


@pytest.mark.parametrize("name", ["Opacus", "two words", "../up", "9lives", "all", "core", "", "a-b"])
def test_a_name_that_cannot_be_is_bad_input(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be called"):
        new_framework.write(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["opacus", "mutants"])
def test_a_name_that_is_taken_is_bad_input(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="already"):
        new_framework.write(name, tmp_path)


@pytest.mark.frameworks
def test_a_newcomer_gets_a_measured_row(tmp_path: Path) -> None:
    """The page's commands, on the genuine machinery: not filled in, filled in, passed, timed."""
    parent = tmp_path / "frameworks"
    new_framework.write("plain_numpy", parent)
    environment = {**os.environ, registry.EXTRA_FOLDERS: str(parent)}

    def dpbench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "harness", *arguments, "--json"]
        return subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT, env=environment)

    one = ("--frameworks", "plain_numpy", "--tasks", "logreg")
    unfilled = dpbench("gate", *one)
    assert unfilled.returncode == 3, unfilled.stderr
    rows = [row for row in json.loads(unfilled.stdout) if row["adapter"] == "plain_numpy-default"]
    assert [row["verdict"] for row in rows] == ["crashed"] and "step is not filled in yet" in rows[0]["detail"]
    (parent / "plain_numpy").rename(tmp_path / "skeleton")
    follow_the_page(parent)
    assert dpbench("gate", *one).returncode == 0
    run = dpbench("run", "e2e", "--preset", "smoke", *one, "--synthetic", "--out", str(tmp_path / "run"))
    assert run.returncode == 0, run.stderr
    cells = json.loads(dpbench("report", str(tmp_path / "run")).stdout)["cells"]
    assert [(cell["contestant"], cell["state"]) for cell in cells] == [("plain_numpy-default", "ok")]
    assert cells[0]["median"] > 0


def test_variables_of_a_file_are_every_variants_but_where_one_takes_them_back() -> None:
    found = {v.name: v.environment for v in registry.frameworks()["pytorch"].variants}
    assert found["eager"]["MALLOC_MMAP_MAX_"] == "0" and found["installed"] == {}
