"""``python -m tests.planted --fault slow-10 --repeats 10``: real comparisons of clean dpcore against dpcore with a
planted fault.

Every comparison is kept; a killed run goes on where it stopped. At the end, one table of all that lies in the folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli.options import integers, names_of
from harness.compare import record as compare_record
from harness.compare import sides
from harness.compare.options import ComparisonOptions
from harness.compare.record import Comparison
from harness.compare.report import summary as sentence
from harness.compare.run import ComparisonRun
from harness.errors import BadInput
from harness.run.progress import Progress
from harness.store import cache
from harness.store.folder import RunFolder
from tests.planted import table
from tests.planted.faults import FAULTS, plant

PLAN = {"slow-10": 10, "memory": 10, "clip-bug": 10, "none": 20}
"""What ``--fault all`` runs."""


def main(
    fault: Annotated[str, typer.Option(help=f"all, table (nothing new), or one of {', '.join(FAULTS)}.")] = "all",
    repeats: Annotated[int | None, typer.Option(help="Comparisons; default 10, of none 20.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the comparisons and the table.")] = Path("results/local/alerts"),
    layers: Annotated[str, typer.Option(help="Comma-separated.")] = "linear",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "128",
    seconds: Annotated[float, typer.Option(help="Timed seconds per process.")] = 0.6,
    threshold: Annotated[float, typer.Option()] = 0.05,
    max_rounds: Annotated[int, typer.Option()] = 20,
    minutes: Annotated[float | None, typer.Option(help="No new comparison is begun after so many.")] = None,
) -> None:
    if fault not in {"all", "table", *FAULTS}:
        raise BadInput(f"--fault is {fault!r}: choose all, table, or one of {', '.join(FAULTS)}.")
    plan = PLAN if fault == "all" else {} if fault == "table" else {fault: PLAN.get(fault, 10)}
    jobs = [(name, number) for name, count in plan.items() for number in range(repeats or count)]
    jobs.sort(key=lambda job: job[1])  # every fault in turn, so that an early end leaves some of each
    begun = time.monotonic()
    console = Console()
    for name, number in jobs:
        folder = out / name / f"{number:02}"
        if (folder / "comparison.json").exists():
            continue
        if minutes is not None and time.monotonic() - begun > 60.0 * minutes:
            console.print("The time is up; the same command goes on from here.")
            break
        options = ComparisonOptions(
            layers=names_of(layers) or (),
            batch_sizes=integers(batch_sizes, "--batch-sizes") or (),
            seconds=seconds,
            threshold=threshold,
            max_rounds=max_rounds,
            first_alert=True,
            seed=number,
        )
        comparison = compare(name, options, folder, console)
        console.print(
            f"{name} {number + 1}: exit {comparison.exit_code}, {comparison.minutes:.1f} minutes. "
            f"{sentence(comparison)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    said = table.summary(stored(out))
    cache.write_atomically(out / "alerts.json", json.dumps(said, indent=1).encode())
    text = table.markdown(said)
    cache.write_atomically(out / "alerts.md", text.encode())
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def compare(name: str, options: ComparisonOptions, folder: Path, console: Console) -> Comparison:
    with tempfile.TemporaryDirectory() as temporary:
        planted = Path(temporary, f"planted-{name}")
        plant(name, planted)
        base, head = sides.resolve("base", "."), sides.resolve("head", str(planted))
    run = ComparisonRun.connected(
        options, base, head, RunFolder(folder.resolve()), f"python -m tests.planted --fault {name}"
    )
    with Progress(console, quiet=True) as progress:
        return run.execute(progress)


def stored(out: Path) -> dict[str, list[Comparison]]:
    return {
        name: [compare_record.read(path) for path in sorted(out.glob(f"{name}/*/comparison.json"))] for name in FAULTS
    }


if __name__ == "__main__":
    try:
        typer.run(main)
    except BadInput as error:
        raise SystemExit(f"planted: {error}") from None
