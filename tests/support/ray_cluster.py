"""A real Ray of two nodes on this machine's loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.slurm import descendants, free_port, kill_all, wait_for

# What a node does beside a clock: carrying its logs to the head cost 0.6 of its 1.1 % of a core.
QUIET = ("--include-log-monitor=false", "--disable-usage-stats")


class Cluster:
    """A head that measures nothing, and nodes with room for a unit each. ``address``: for clients."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # names of sockets are short
        self.environment = {**environment, "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(self.folder)}
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self.start("head", "--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}")
        for node in ("n1", "n2"):
            self.start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in list(self.nodes):
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, node: str, *more: str) -> None:
        """Start a node, or start it again."""
        joins = [] if more else [f"--address={self.address}", '--resources={"dpbench": 1}']
        usual = [*QUIET, "--num-cpus=1", "--block", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *more, *joins, *usual]
        with (self.folder / f"{node}.out").open("ab") as out:
            self.nodes[node] = subprocess.Popen(
                command, env={**self.environment, "NODE_NAME": node}, stdout=out, stderr=out, start_new_session=True
            )
        out = self.folder / f"{node}.out"
        wait_for(lambda: "Ray runtime started" in out.read_text(), f"node {node} of Ray: {out}", 120.0)

    def kill(self, node: str) -> None:
        """End a node as a cut of its power does: all of its processes at once."""
        starter = self.nodes.pop(node)
        kill_all([starter.pid, *descendants(starter.pid)])
        starter.wait()
