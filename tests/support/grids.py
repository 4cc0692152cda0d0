"""Grids of fakes: ``dpbench grid`` in a process of its own, and what its folder says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from harness.store.read import load
from harness.store.record import Record
from tests.support.driver import DRIVE, ROOT, SECONDS
from tests.support.slurm import wait_for

MEASURED = ("--preset", "smoke", "--tasks", "logreg", "--repeats", "0", "--synthetic", "--threads", "1")
READINGS = {"timed", "epoch_seconds", "compile_seconds", "memory", "load", "energy", "started", "wall_seconds"}


class Grid:
    """A grid of phantoms in the folder ``path``. ``environment``: of its commands, an engine's among them."""

    def __init__(self, path: Path, cache: Path, environment: dict[str, str] | None = None) -> None:
        self.path = path
        here = {**os.environ, **(environment or {})}
        paths = [str(ROOT), here.get("PYTHONPATH", "")]
        fakes = str(DRIVE.parent.parent / "fakes")
        self.environment = {
            **here,
            "DPBENCH_CACHE": str(cache),
            "DPBENCH_FRAMEWORKS": fakes,
            "PYTHONPATH": os.pathsep.join(part for part in paths if part),
        }

    def words(self, *verb: str) -> list[str]:
        return [sys.executable, str(DRIVE), "grid", verb[0], str(self.path), *verb[1:]]

    def ask(self, *verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*verb), env=self.environment, capture_output=True, text=True, timeout=SECONDS)

    def start(self, *verb: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(*verb),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )

    def plan(self, sizes: Sequence[int], variants: str, *more: str) -> None:
        """Make the plan: a unit for each size."""
        names = ",".join(f"phantom-{name}" for name in variants.split(","))
        command = f"{{python}} {DRIVE}"
        chosen = ["--frameworks", names, "--batch-sizes", ",".join(map(str, sizes))]
        done = self.ask("plan", "--command", command, *MEASURED, *chosen, *more)
        assert done.returncode == 0, done.stderr

    def units(self) -> list[Path]:
        return sorted((self.path / "units").glob("*"))

    def attempts(self) -> list[Path]:
        return sorted((self.path / "attempts").glob("*"))

    def nodes(self) -> list[str]:
        """Return where each unit that is done was measured."""
        return [json.loads((unit / "unit.json").read_text())["place"]["node"] for unit in self.units()]

    def wait_until_done(self, count: int, seconds: float = 600.0) -> None:
        wait_for(lambda: len(self.units()) >= count, f"{count} units done", seconds)

    def merged(self, name: str = "merged.jsonl.gz") -> list[Record]:
        target = self.path / name
        done = self.ask("merge", "--to", str(target))
        assert done.returncode == 0, done.stdout + done.stderr
        return load(target)


def lasting(record: Record) -> dict[str, object]:
    """Return of a record what does not change from one measurement to the next: neither times nor other readings, nor
    what is drawn for a run folder alone, so that no contestant knows its batches before."""
    said = record.model_dump(mode="json", exclude=READINGS | {"sequence", "command"})
    for name in ("load_average", "cpu_mhz", "gpu_throttle"):
        said["machine"].pop(name, None)
    for name in ("run", "moment"):
        said["block"].pop(name)
    (said["seeds"] or {}).pop("batches", None)
    return said


def kill_local(runner: psutil.Process) -> None:
    """Kill the unit that is under way, and all that it has started, but not who hands units out."""
    for process in runner.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def survive(
    grid: Grid,
    count: int,
    launcher: str,
    *settings: str,
    kill: Callable[[psutil.Process], None] = kill_local,
    attempts: Callable[[], list[Path]] | None = None,
) -> None:
    """Measure ``count`` units while a node is killed at three moments; each must count once.

    Args:
        grid: an empty one.
        count: how many units.
        launcher: whose, with its ``settings``.
        kill: kills a node on which a unit is under way.
        attempts: returns the folders of units that were begun, where the grid's own folder does not have them.
    """
    attempts = attempts or grid.attempts
    grid.plan(range(300, 300 + count), "sleeper", "--no-memory")
    began = time.monotonic()
    runner = grid.start("run", "--launcher", launcher, *settings)
    for moment in range(3):
        wait_for(lambda moment=moment: len(grid.units()) >= moment * count // 3, f"kill {moment}", 600.0)
        # As soon as a unit begins, when its run has, and when its records come.
        wait_for(lambda moment=moment: is_at(attempts(), moment), f"a unit at moment {moment}", 120.0)
        kill(psutil.Process(runner.pid))
    said, _ = runner.communicate(timeout=SECONDS)
    seconds, lost = time.monotonic() - began, len(attempts())
    assert runner.returncode == 0, said
    assert len(grid.units()) == count
    assert lost, "no unit was under way when its node was killed"
    records = grid.merged()
    times = [record.cell.batch_size for record in records if record.purpose == "time"]
    assert sorted(times) == list(range(300, 300 + count)), "none is missing and none doubled"
    assert all(record.state == "ok" for record in records)
    where = grid.nodes()
    print(f"{launcher}: {count} of {count} in {seconds:.0f} s, nodes {dict(Counter(where))}, {lost} attempts lost")


def is_at(attempts: Iterable[Path], moment: int) -> bool:
    """Return whether a unit is under way and has got so far: begun, its run begun, records written."""
    pattern = ("beat", "plan.json", "records/*.gate.*")[moment]
    return any(next(a.glob(pattern), None) is not None and not (a / "unit.json").exists() for a in attempts)
