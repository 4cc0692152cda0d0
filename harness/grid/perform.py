"""A unit on the machine that measures it: one command, one run folder, and a sign of life while it is at work."""

from __future__ import annotations

import io
import os
import secrets
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from harness.environments.orphans import dying_with_parent
from harness.grid.folder import (
    BEAT,
    BEAT_SECONDS,
    COMPLETE,
    END,
    LOG,
    End,
    GridFolder,
    digest,
    not_as_planned,
    read_end,
    write_end,
)
from harness.grid.plan import PYTHON, Plan, Unit
from harness.store import folder as store

LOST_WITH_IT = ("scratch", "report")
"""Folders of a run that do not travel: weights that may be lost at any time, and a report of a part."""


def perform(plan: Plan, unit: Unit, attempts: Path) -> Path:
    """Measure a unit into a new folder, and return it. How it ended is written last: a folder without that is not
    complete, whatever the engine says.

    Args:
        plan: The grid's.
        unit: One of it.
        attempts: Folder in which the new one is made.
    """
    # Nothing of the node in the name, which becomes part of the records.
    attempt = attempts / f"{unit.name}.{secrets.token_hex(4)}"
    attempt.mkdir(parents=True)
    beat = attempt / BEAT
    beat.touch()
    began = time.monotonic()
    command = [sys.executable if word == PYTHON else word for word in plan.command]
    command += ["run", "e2e", *plan.words_of(unit), "--out", str(attempt)]
    with (attempt / LOG).open("wb") as log:
        process = subprocess.Popen(
            dying_with_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        other = None
        while process.poll() is None:
            has_begun = (attempt / store.PLAN).exists()
            if has_begun and other is None and (other := not_as_planned(attempt, unit)) is not None:
                process.terminate()  # long before it has measured what would not count
            try:
                process.wait(BEAT_SECONDS if has_begun else 1.0)
            except subprocess.TimeoutExpired:
                os.utime(beat)
    seconds, there = time.monotonic() - began, digest(attempt)
    fault = other
    if fault is None and (process.returncode not in COMPLETE or not there):
        lines = (attempt / LOG).read_text(errors="replace").strip().splitlines()
        fault = f"exit code {process.returncode}: {lines[-1] if lines else 'it said nothing'}"
    fault = fault or not_as_planned(attempt, unit)
    write_end(attempt, End(unit.name, process.returncode, seconds, there, fault, place()))
    return attempt


def place() -> dict[str, str]:
    """Return engine, job and node of this process, as far as the engine tells."""
    env = os.environ
    job = env.get("SLURM_ARRAY_JOB_ID", env.get("SLURM_JOB_ID", ""))
    task = env.get("SLURM_ARRAY_TASK_ID", env.get("JOB_COMPLETION_INDEX", ""))
    engine = "slurm" if job else "ray" if "RAY_JOB_ID" in env else "kubernetes" if task else ""
    node = env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname()
    job = "_".join(part for part in (job, task) if part)
    return {"engine": engine, "job": job, "again": env.get("SLURM_RESTART_COUNT", "0"), "node": node}


def on_shared_disk(path: Path, name: str, scratch: Path | None = None) -> End:
    """Measure a unit of the grid at ``path`` unless it is done, and return how it ended.

    Args:
        path: The grid's folder, as this machine sees it.
        name: The unit's name or number.
        scratch: Folder on a disk of this machine in which the run is made; only what remains is copied.
    """
    grid = GridFolder(path)
    unit = grid.plan.find(name)
    if (end := grid.end_of(unit)) is not None:
        return end
    attempt = perform(grid.plan, unit, scratch or grid.attempts)
    if scratch is not None:
        attempt = unpacked(packed(attempt), grid.attempts)
    end = read_end(attempt)
    assert end is not None
    grid.settle(attempt)
    return end


def packed(attempt: Path) -> bytes:
    """Return an attempt as bytes, for a machine that does not see this one's disk."""

    def kept(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(item.name).parts
        return None if len(parts) > 1 and parts[1] in LOST_WITH_IT else item

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(attempt, attempt.name, filter=kept)
    return buffer.getvalue()


def unpacked(content: bytes, attempts: Path) -> Path:
    """Write what :func:`packed` made, its end last, and return the attempt."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        members = sorted(tar.getmembers(), key=lambda item: Path(item.name).name == END)
        tar.extractall(attempts, members, filter="data")
    return attempts / Path(members[0].name).parts[0]
