"""``dpbench env make``: as many environments at once as there are processors, and a row for each framework."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.environments import venv
from harness.environments.venv import Environment, EnvironmentFault
from harness.plan import registry
from harness.plan.registry import Framework


def test_environments_are_made_side_by_side_and_one_that_cannot_be_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def ensure(framework: Framework, log: object) -> Environment:
        both.wait()
        if framework.name == "jax":
            raise EnvironmentFault("there is no such version.")
        return Environment(Path("made"), framework.lock_hash, (framework.name,), 1.0)

    monkeypatch.setattr(venv, "ensure", ensure)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    done = CliRunner().invoke(app, ["env", "make", "pytorch", "jax", "--json"])
    assert done.exit_code == 3, done.output
    assert json.loads(done.stdout) == [
        {"framework": "pytorch", "state": "ready", "where": "made"},
        {"framework": "jax", "state": "not installed", "where": "there is no such version."},
    ]


def test_unused_environments_are_those_of_no_framework_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = registry.frameworks()["pytorch"].lock_hash
    found = [Environment(Path(lock), lock, ("pytorch",), 1.0) for lock in (here, "of-other-pins")]
    removed: list[str] = []
    monkeypatch.setattr(venv, "existing", lambda: found)
    monkeypatch.setattr(venv, "remove", lambda environment: removed.append(environment.lock_hash))
    assert CliRunner().invoke(app, ["env", "rm", "--unused", "--json"]).exit_code == 0
    assert removed == ["of-other-pins"]
