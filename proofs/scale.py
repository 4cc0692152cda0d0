"""Measure what a large grid costs after it was measured: processor time and peak memory of pack, merge and report.

``python -m proofs.scale [UNITS]`` makes a grid of so many units (10,000) with ten records each, as if measured on three
machines. They are SIMULATED: a committed run's records with other tasks, sizes, machines, moments and seconds. They lie
in a folder that goes at the end, and nothing of them is ever committed. docs/grid.md has the figures.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness.grid import plan
from harness.grid.folder import End, GridFolder, digest, write_end
from harness.paths import ROOT
from harness.store.folder import PLAN
from harness.store.read import load
from harness.store.record import Record
from harness.tasks import TASKS

REAL = ROOT / "results/records/2026-11-27-epyc-26d5a594-paper-turns.jsonl.gz"
JUDGED = ("dpcore-native", "opacus-hooks", "jax-vmap")
MADE = tuple(TASKS)[:10]
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MACHINES = 3
KINDS = len(MADE) * len(SIZES)


def originals() -> list[dict[str, Any]]:
    """Return a unit's records of the real run: one round of its seven contestants, and three verdicts of the gate."""

    def of_unit(record: Record) -> bool:
        chosen = record.block.round == 0 if record.purpose == "time" else record.cell.contestant in JUDGED
        return record.cell.task == "mnist-cnn" and chosen

    return [json.loads(record.to_json()) for record in load(REAL) if of_unit(record)]


def simulated(real: dict[str, Any], task: str, size: int, number: int) -> Record:
    """Return a record of the unit of this number, made up from a real one."""
    drawn = random.Random(f"{number} {real['cell']['framework']} {real['block']['round']}")
    later = timedelta(minutes=number)
    made = {
        **real,
        "cell": {**real["cell"], "task": task, "batch_size": size},
        "key": f"{number:08x}{real['key'][8:]}",
        "epoch_seconds": [second * drawn.uniform(0.9, 1.1) for second in real["epoch_seconds"]],
        "machine": {**real["machine"], "cpu": "SIMULATED", "id": f"simulated-{number // KINDS % MACHINES}"},
        "block": {**real["block"], "run": f"simulated-{number}", "moment": moved(real["block"]["moment"], later)},
        "started": moved(real["started"], later),
        "sequence": None,
        "command": "simulated",
    }
    return Record.model_validate(made)


def moved(moment: str, later: timedelta) -> str:
    """Return a time of day so much later; none stays none."""
    return (datetime.fromisoformat(moment) + later).isoformat() if moment else ""


def make(folder: Path, count: int) -> Iterator[Path]:
    """Make a grid whose units are all done; yield every record's file."""
    units, real = [], originals()
    kinds = itertools.cycle(itertools.product(MADE, SIZES))
    grid = GridFolder(folder)
    for number, (task, size) in zip(range(count), kinds, strict=False):
        options = {"tasks": [task], "batch_sizes": {task: [size]}, "number": number}
        described = {"options": options, "contestants": {}, "tasks": {}, "harness": "simulated"}
        unit = plan.Unit(plan.name_of(described), task, size, len(real), None)
        units.append(unit)
        place = grid.units / unit.name
        (place / "records").mkdir(parents=True)
        (place / PLAN).write_text(json.dumps(described))
        for one in real:
            record = simulated(one, task, size, number)
            path = place / "records" / record.file_name
            path.write_text(record.to_json())
            yield path
        write_end(place, End(unit.name, 0, 1.0, digest(place)))
    grid.begin(plan.Plan((), tuple(units)))


def measured(*words: object) -> str:
    """Return processor seconds and peak memory of a verb of dpbench."""
    process = subprocess.Popen([sys.executable, "-m", "harness", *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"dpbench {words[0]} ended with {process.returncode}.")
    return f"{usage.ru_utime + usage.ru_stime:.1f} s of processor time, {usage.ru_maxrss / 2**20:.2f} GiB"


def main() -> None:
    """Make the records, measure the three verbs, and print a line of each."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        grid, whole, merged = Path(folder, "grid"), Path(folder, "whole"), Path(folder, "merged.jsonl.gz")
        (whole / "records").mkdir(parents=True)
        made = 0
        for path in make(grid, count):
            os.link(path, whole / "records" / f"{made:06}.json")
            made += 1
        print(f"{made} records of {count} units, simulated")
        print("pack  ", measured("pack", whole, Path(folder, "packed.jsonl.gz")), flush=True)
        print(
            "merge ",
            measured("grid", "merge", grid, "--to", merged),
            f"({merged.stat().st_size / 1e6:.0f} MB)",
            flush=True,
        )
        print("report", measured("report", merged, "--out", Path(folder, "report")), flush=True)


if __name__ == "__main__":
    main()
