"""Units by a real Slurm of two nodes, one of which is killed again and again."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import slurm
from tests.support.driver import ROOT
from tests.support.grids import Grid, survive
from tests.support.slurm import NODES, Cluster, Missing

OURS = ("--with", "partition=p", "--with", "timeout_min=20")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed; requirements.txt has it")
    try:
        packages = slurm.packages(ROOT / ".venvs" / "slurm")
    except Missing as why:
        pytest.skip(str(why))
    # The names of sockets are short.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, Cluster(packages, Path(folder, "c")) as it:
        yield it


def kills(cluster: Cluster) -> object:
    """Kill the nodes in turn; each is started again when the next one is killed."""
    turn = itertools.cycle(NODES)
    dead: list[str] = []

    def kill(_: psutil.Process) -> None:
        for node in dead:
            cluster.start(node)
        dead[:] = [node := next(turn)]
        cluster.kill(node)

    return kill


@pytest.mark.parametrize("count", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_units_go_on_elsewhere_when_a_node_dies(cluster: Cluster, cache: Path, tmp_path: Path, count: int) -> None:
    grid = Grid(tmp_path / "grid", cache, cluster.environment)
    for node in NODES:
        if not cluster.daemon(node):
            cluster.start(node)
    survive(grid, count, "slurm", *OURS, kill=kills(cluster))
    assert set(grid.nodes()) == set(NODES)


def test_what_slurm_does_not_take_is_one_sentence(cluster: Cluster, cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache, cluster.environment)
    grid.plan((300,), "noop", "--no-memory")
    for setting, words in (("partition=nowhere", "nowhere"), ("colour=red", "submitit does not take")):
        done = grid.ask("run", "--launcher", "slurm", "--with", setting)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
