"""Units by a real Ray of two nodes that share no disk with the driver, one of which is killed again and again."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.driver import ROOT
from tests.support.grids import Grid, survive
from tests.support.ray_cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make test-grid` brings it (285 MB)")
    of_nodes = Grid(Path("unused"), cache).environment
    with Cluster({**of_nodes, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}) as it:
        yield it


def test_thirty_units_go_on_elsewhere_when_a_node_dies(cluster: Cluster, cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    turn = itertools.cycle(("n1", "n2"))
    names = itertools.count(3)

    def kill(_: psutil.Process) -> None:
        node = next(turn)
        if node in cluster.nodes:
            cluster.kill(node)
        cluster.start(f"n{next(names)}")

    at = f"address={cluster.address}"
    survive(grid, 30, "ray", "--with", at, kill=kill, attempts=lambda: [*cluster.folder.glob("dpbench-*/*.*")])
    assert len(set(grid.nodes())) > 2 and not grid.attempts()


def test_a_cluster_without_room_is_one_sentence(cluster: Cluster, cache: Path, tmp_path: Path) -> None:
    grid = Grid(tmp_path / "grid", cache)
    grid.plan((300,), "noop", "--no-memory")
    done = grid.ask("run", "--launcher", "ray", "--with", "address=127.0.0.1:1")
    assert done.returncode == 2 and "ray start --head" in done.stderr and "Traceback" not in done.stderr, done.stderr
