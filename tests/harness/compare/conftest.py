"""Comparisons in this process, between commits of a small project."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.run import layers as layer_run
from tests.support import virtual_time
from tests.support.project import Project


@pytest.fixture(scope="session")
def sides_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def apart(sides_cache, monkeypatch, reference) -> Iterator[None]:
    """Comparisons on a clock of their own, with the sides that earlier tests have unpacked."""
    monkeypatch.setenv("DPBENCH_CACHE", str(sides_cache))
    monkeypatch.setattr(
        "harness.compare.sides.compileall.compile_dir", lambda *tree, **how: True
    )  # it only saves workers time
    monkeypatch.setattr(layer_run, "ensure_references", lambda names, *rest: dict.fromkeys(names, reference))
    virtual_time.install(monkeypatch)
    # The canary's work is real, and takes no time on that clock.
    monkeypatch.setattr("harness.environments.backend.speed_probe.seconds", lambda: 0.01)
    monkeypatch.setattr("harness.environments.processors.LOOK_SECONDS", 0.001)
    # A worker collects garbage around its clock: of what the test run itself has loaded, that takes longest of all.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def project(tmp_path) -> Project:
    made = Project(tmp_path / "project")
    made.commit("sleep-3ms", title="plain")
    return made
