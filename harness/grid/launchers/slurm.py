"""Slurm, by submitit: an array of jobs with a whole node each, which Slurm requeues when a node dies."""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.grid.drive import Launcher
from harness.grid.folder import GridFolder
from harness.grid.plan import Unit
from harness.store import cache

MINUTES = 12 * 60
"""Longest time of a unit, unless ``timeout_min`` says another."""


class OnNode:
    """A unit, as submitit carries it to a node. Asked to end before its time, or to make room, it begins anew."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def __call__(self) -> int:
        """Measure the unit and return its exit code, which nobody relies on."""
        from harness.grid.perform import on_shared_disk

        return on_shared_disk(Path(self.path), self.name).exit

    def checkpoint(self) -> Any:
        """Return what submitit hands to Slurm again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Slurm(Launcher):
    """Jobs of one grid. Their numbers are kept in its folder, so that another ``grid run`` knows what waits already.

    Args:
        grid: Its folder, on a disk that all nodes see.
        settings: Further parameters of submitit by name, as ``partition`` or ``timeout_min``.

    Raises:
        BadInput: submitit or Slurm's commands are missing, or submitit does not take a setting.
    """

    poll_seconds = 5.0

    def __init__(self, grid: GridFolder, settings: Mapping[str, str]) -> None:
        try:
            import submitit
        except ImportError:
            told = "The launcher slurm needs submitit, which is not installed: `pip install 'dpsgd-bench[slurm]'`."
            raise BadInput(told) from None
        for name in ("sbatch", "squeue", "scancel"):
            if shutil.which(name) is None:
                told = f"There is no {name} here: start the grid on a login node, or write a text for one by "
                raise BadInput(f"{told}`dpbench grid export {grid.path} --as sbatch`.")
        self.grid = grid
        self.file = grid.path / "slurm" / "jobs.json"
        self.jobs: dict[str, str] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.executor = submitit.AutoExecutor(folder=grid.path / "slurm", cluster="slurm")
        usual: dict[str, Any] = {
            "name": "dpbench",
            "timeout_min": MINUTES,
            "nodes": 1,
            "slurm_ntasks_per_node": 1,
            "slurm_exclusive": True,
            # Without a step of its own, which would be bound to as many processors as it asks for.
            "slurm_use_srun": False,
            "slurm_array_parallelism": len(grid.plan.units),
            "slurm_additional_parameters": {"requeue": True},
        }
        own = {
            name if name in usual or name in ("gpus_per_node", "mem_gb") else f"slurm_{name}": _value(text)
            for name, text in settings.items()
        }
        try:
            self.executor.update_parameters(**{**usual, **own})
        except (NameError, TypeError, ValueError) as error:
            raise BadInput(f"submitit does not take these settings ({error}); see --with in the help.") from None

    def submit(self, units: Sequence[Unit]) -> None:
        """Hand the units to Slurm as an array."""
        import submitit

        try:
            with self.executor.batch():
                jobs = [self.executor.submit(OnNode(str(self.grid.path), unit.name)) for unit in units]
        except submitit.core.utils.FailedJobError as error:
            raise BadInput(f"Slurm does not take the jobs ({' '.join(str(error).split())}); see --with.") from None
        self.jobs |= {job.job_id: unit.name for job, unit in zip(jobs, units, strict=True)}
        cache.write_atomically(self.file, json.dumps(self.jobs).encode())

    def at_work(self) -> set[str]:
        """Return the units whose jobs are in the queue; all, where Slurm does not answer."""
        if not self.jobs:
            return set()
        words = ["squeue", "--noheader", "--array", "--format=%i %r", f"--user={getpass.getuser()}"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            return set(self.jobs.values())
        queued = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        # A node that could not start a job hands it back to be held for ever, unless somebody releases it.
        stuck = [job for job in self.jobs if queued.get(job, "").endswith("requeued held")]
        if stuck:
            subprocess.run(["scancel", *stuck], capture_output=True)
        return {name for job, name in self.jobs.items() if job in queued and job not in stuck}

    def close(self) -> None:
        """Leave the jobs to Slurm, which goes on without this process."""


def _value(text: str) -> int | str | bool:
    """Return a setting as submitit takes it."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
