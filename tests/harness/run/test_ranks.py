"""Cells of several processes: how they are asked for, kept, judged and shown."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.environments import venv
from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import registry
from harness.run.session import key_of_cell
from harness.store.record import Cell
from harness.worker import memory
from tests.support.driver import Driver

SHORT = ("run", "e2e", "--preset", "smoke", "--tasks", "logreg", "--repeats", "0", "--rounds", "1")
LABEL = "W=2, FSDP2, gloo: says nothing about scaling"
ALONE = {
    "task": "logreg",
    "framework": "opacus",
    "variant": "hooks",
    "private": True,
    "batch_size": 64,
    "protocol": "verified",
    "device": "cpu",
    "isolation": "venv",
}


def test_a_cell_has_its_world_size_and_every_figure_says_what_it_is_worth(cache: Path, tmp_path: Path) -> None:
    driver = Driver(SHORT, cache, tmp_path / "run")
    driver.environment["DRIVE_WITH_REPORT"] = "1"
    done = driver.run("joint", "--world-size", "1,2", "--batch-sizes", "64")
    assert done.returncode == 0, done.stderr
    times, memories = driver.records(), driver.records("memory")
    assert sorted((r.cell.world_size, r.cell.parallel) for r in times) == [(1, "fsdp2"), (2, "fsdp2")]
    assert {r.state for r in times} == {"ok"}
    assert len({r.key for r in times}) == 2 and len({r.file_name for r in [*times, *memories]}) == 4
    assert {r.cell.world_size: memory.SENT in r.memory for r in memories} == {1: False, 2: True}
    ranks = {r.cell.world_size: r.ranks for r in memories}
    assert ranks[1] == [] and [rank.payload for rank in ranks[2]] == [{"all_reduce": 2048}]
    assert ranks[2][0].step_seconds > 0
    report = (driver.out / "report" / "report_synthetic.md").read_text()
    assert LABEL in report and LABEL.replace("W=2", "W=1") in report
    assert report.count("rank by rank") == 1 and "2.00 KiB" in report


def test_a_cell_of_one_process_keeps_its_key_and_its_name() -> None:
    cell = Cell.model_validate(ALONE)
    assert key_of_cell(cell, ("code", "lock")) == "b29a32da4d90c69e"
    assert (cell.name, cell.runner) == ("logreg/opacus-hooks/64/verified/cpu/venv", "opacus-hooks")
    assert cell.surroundings == "venv"
    two = Cell.model_validate(ALONE | {"variant": "ddp", "parallel": "ddp", "world_size": 2})
    assert (two.name, two.runner) == ("logreg/opacus-ddp/64/verified/cpu/venv/w2", "opacus-ddp-w2")
    with pytest.raises(ValueError, match="world size and a way"):
        Cell.model_validate(ALONE | {"world_size": 2})


def test_contestants_of_several_processes_come_where_they_are_asked_for() -> None:
    ordinary = {c.name for c in registry.select(("all",))} | {c.name for c in registry.select(("opacus:all",))}
    assert not any(name.endswith(("-ddp", "-fsdp2")) for name in ordinary)
    options = plan.preset("modern", world_size=(1, 2), parallel=("fsdp2",), frameworks=("opacus", "pytorch"))
    assert [c.name for c in options.contestants()] == [
        *("opacus-fsdp2", "pytorch-fsdp2", "opacus-fsdp2-w2", "pytorch-fsdp2-w2"),
    ]
    everybody = {c.framework.name for c in plan.preset("modern", world_size=(2,)).contestants()}
    assert everybody >= {"dpcore", "opacus", "pytorch"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--world-size", "0"), "--world-size is 0: it must be at least 1"),
        (("--world-size", "2", "--parallel", "fsdp"), "--parallel is 'fsdp' (did you mean fsdp2?)"),
        (("--world-size", "2", "--frameworks", "jax"), "None of jax trains by ddp or fsdp2"),
        (("--parallel", "ddp"), "say how many by --world-size"),
    ],
    ids=["none", "a way", "a framework", "no number"],
)
def test_what_cannot_train_together_is_refused(
    refusal: Callable[..., str], tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    assert said in " ".join(refusal(*SHORT, "--out", str(tmp_path / "run"), *given).split())


def test_a_way_that_is_none_is_refused_in_the_framework_s_file(tmp_path: Path) -> None:
    text = (registry.ROOT / "tests/fakes/phantom/framework.toml").read_text()
    (tmp_path / "framework.toml").write_text(text.replace('parallel = "fsdp2"', 'parallel = "pipeline"'))
    with pytest.raises(BadInput, match="parallel 'pipeline'; choose one of ddp, fsdp2"):
        registry.load(tmp_path)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bool]]:
    """Judge the contestants of tests/support/rank_gates.py: whether each passed, by check."""
    python = os.environ.get("DPBENCH_TORCH_PYTHON")
    if not python:
        try:
            python = str(venv.ensure(registry.frameworks()["pytorch"], print).python)
        except (venv.EnvironmentFault, KeyError) as fault:
            pytest.skip(f"no environment with torch ({fault}); DPBENCH_TORCH_PYTHON may name an interpreter")
    out = tmp_path_factory.mktemp("ranks") / "checks.json"
    command = [python, "-m", "tests.support.rank_gates", str(out)]
    subprocess.run(command, cwd=registry.ROOT, check=True, timeout=1200)
    found = json.loads(out.read_text())
    return {name: {check["check"]: check["passed"] for check in of_one} for name, of_one in found.items()}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", ["joined", "ddp", "fsdp2"])
def test_the_joined_update_of_right_ones_passes(checks: dict[str, dict[str, bool]], name: str) -> None:
    assert len(checks[name]) >= 4 and all(checks[name].values())


@pytest.mark.frameworks
def test_noise_of_every_rank_and_a_divisor_of_one_rank_are_rejected(checks: dict[str, dict[str, bool]]) -> None:
    failed = {name: {check for check, passed in of_one.items() if not passed} for name, of_one in checks.items()}
    assert failed["draws-on-every-rank"] == {"noise: on real batches"}
    assert failed["divides-by-its-share"] >= {"update: some clipped", "update: other C, B and rate"}
