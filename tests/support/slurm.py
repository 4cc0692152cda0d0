"""A real Slurm of two nodes on loopback, as slurm.md beside this sets one up: what stands there is what runs here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from harness.store import cache

NODES = ("n1", "n2")
BLOCK = re.compile(r"```sh\n# slurm: (\w+)\n(.*?)```", re.DOTALL)


class Missing(Exception):
    """Why there can be no Slurm here, in a sentence."""


def lines(*names: str) -> str:
    """Return the page's blocks of these names."""
    blocks = dict(BLOCK.findall(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")))
    return "\n".join(["set -eu", *(blocks[name] for name in names)])


def packages(folder: Path) -> Path:
    """Return the folder with the unpacked packages, fetched where they are missing. Raises :class:`Missing`."""
    if os.geteuid() != 0:
        raise Missing("Slurm's daemons are started as root, which this user is not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with cache.locked(folder.with_suffix(".lock")):  # several processes may run tests
        if not (folder / "ready").exists():
            _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise Missing("this machine has no apt-get, which Slurm's packages come by")
    environment = {**os.environ, "SLURM": str(folder)}
    fetch = ["bash", "-c", lines("get")]
    done = subprocess.run(fetch, env=environment, capture_output=True, text=True)
    if done.returncode:  # a machine's lists may be missing, or old
        subprocess.run(["apt-get", "-qq", "update"], capture_output=True, timeout=300)
        done = subprocess.run(fetch, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"Slurm's packages cannot be had: {done.stderr.strip()[-200:]}")
    (folder / "ready").touch()


def free_port() -> int:
    """Return a port that is free, as the next two most likely are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A Slurm in the folder ``root``. ``environment``: what its commands need."""

    def __init__(self, packages: Path, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        (root / "usr").symlink_to(packages / "usr")
        wanted = {**os.environ, "SLURM": str(root), "PORT": str(free_port())}
        said = subprocess.run(
            ["bash", "-c", lines("shell") + "\nenv -0"], env=wanted, capture_output=True, text=True, check=True
        ).stdout
        self.environment = dict(part.partition("=")[::2] for part in said.split("\0") if part)

    def __enter__(self) -> Cluster:
        self._run(lines("start"))
        wait_for(lambda: self.idle() == len(NODES), "two idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        for node in NODES:
            self.kill(node)
        kill_all(int(path.read_text()) for path in self.root.glob("*.pid"))

    def _run(self, text: str) -> None:
        with (self.root / "start.out").open("ab") as out:
            done = subprocess.run(["bash", "-c", text], env=self.environment, cwd=self.root, stdout=out, stderr=out)
        assert done.returncode == 0, (self.root / "start.out").read_text()

    def start(self, node: str) -> None:
        """Start a node again, with what a cut of its power left on its disk."""
        (command,) = re.findall(r"slurmd-wlm .*?(?=; done)", lines("start"))
        self._run(f"set -eu; node={node}; {command}")

    def daemon(self, node: str) -> list[int]:
        path = self.root / f"slurmd.{node}.pid"
        return [int(path.read_text())] if path.exists() and psutil.pid_exists(int(path.read_text())) else []

    def kill(self, node: str) -> None:
        """End a node as a cut of its power does: its daemon and all that runs there at once."""
        kill_all([*self.daemon(node), *self.jobs(node)])

    def jobs(self, node: str) -> list[int]:
        """Return the processes of jobs on this node, and of Slurm for them."""
        found: list[int] = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                family = process.children(recursive=True) if "slurmstepd" in (process.info["name"] or "") else []
                if any(self._is_of(child, node) for child in family):
                    found += [process.pid, *(child.pid for child in family)]
        return found

    def _is_of(self, process: psutil.Process, node: str) -> bool:
        said = process.environ()
        return said.get("SLURMD_NODENAME") == node and said.get("SLURM_CONF") == self.environment["SLURM_CONF"]

    def idle(self) -> int:
        words = ["sinfo", "--noheader", "--Node", "--format=%t"]
        said = subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout
        return sum(line.strip() == "idle" for line in said.splitlines())


def descendants(process: int) -> list[int]:
    """Return the processes that one has started, and they again."""
    try:
        return [child.pid for child in psutil.Process(process).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Iterable[int]) -> None:
    """Kill processes, of which some may be gone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_for(is_so: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until it is so, for at most so long."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)
