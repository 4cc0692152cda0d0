"""The series of ``dpcore.examples.minilm_imdb``: ``make minilm-imdb``, or from the root of a checkout

    python -m tests.dpcore.minilm_series --data FOLDER                    # what is missing, one run after another
    python -m tests.dpcore.minilm_series --data FOLDER --runs opacus:lora:0 dpcore:lora:0

First some learning rates are tried with dpcore, on a seed and on test reviews that are not those of the series; both
libraries get the best one. Every run is a process of its own with the example's own settings, and leaves one record in
results/minilm-imdb, those of the tries in its folder tuning; a record that is there is not made again. Seeds are
paired: both libraries start from the same head and adapters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpcore import native
from dpcore.examples import minilm_imdb
from dpcore.examples.minilm_imdb import LIBRARIES, TRAINED
from tests.dpcore import torchvision_on_cpu

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "minilm-imdb"
SEEDS = (0, 1, 2)
TUNING_SEED, TUNING_TEST = 100, 1000
"""The tries are tested on the first so many test reviews, the series on those behind them."""
RATES = {"full": (3e-4, 1e-3), "lora": (2e-3, 5e-3), "bias": (2e-3, 5e-3)}
"""Learning rates that are tried."""

EXAMPLE = ("-m", torchvision_on_cpu.__name__, minilm_imdb.__name__)
"""The arguments by which Python runs the example, where torchvision can be imported."""

Run = tuple[str, str, int]
"""Library, what is trained, seed."""


def all_runs() -> list[Run]:
    """The whole series, seed by seed, the libraries in turn, so that half of it is a smaller series."""
    return [
        (library, trained, seed)
        for seed in SEEDS
        for trained in TRAINED
        for library in (LIBRARIES if seed % 2 else LIBRARIES[::-1])
    ]


def record_of(folder: Path, run: Run) -> Path:
    """Where the record of a run is, or will be."""
    library, trained, seed = run
    return folder / f"{trained}-{library}-seed{seed}.json"


def tune(data: Path, folder: Path, further: Sequence[str]) -> dict[str, float]:
    """Try the learning rates whose record is missing.

    Returns:
        The best one of each kind of training by test accuracy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    best = {}
    for trained, rates in RATES.items():
        found = {}
        for rate in rates:
            path = folder / f"{trained}-{rate:g}.json"
            if path.exists() or _run(
                ("dpcore", trained, TUNING_SEED), rate, data, path, ["--test", str(TUNING_TEST), *further]
            ):
                found[rate] = json.loads(path.read_text())["accuracy"]
        best[trained] = max(found, key=lambda rate: found[rate])
    return best


def make(
    runs: Sequence[Run], rates: Mapping[str, float], data: Path, folder: Path, further: Sequence[str]
) -> list[Run]:
    """Make the runs whose record is missing, one after another.

    Args:
        runs: which.
        rates: learning rates by what is trained.
        data: the example's folder of reviews and weights.
        folder: where the records lie.
        further: options of the example.

    Returns:
        The runs that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for run in runs:
        path = record_of(folder, run)
        if path.exists():
            print(f"{path.name} is there", flush=True)
        elif not _run(run, rates[run[1]], data, path, ["--first-test", str(TUNING_TEST), *further]):
            failed.append(run)
    return failed


def _run(run: Run, rate: float, data: Path, path: Path, further: Sequence[str]) -> bool:
    """Make one run; whether its record is there."""
    library, trained, seed = run
    command = [sys.executable, "-W", "ignore", *EXAMPLE, "--data", str(data)]
    command += ["--library", library, "--train", trained, "--seed", str(seed), "--learning-rate", repr(rate)]
    command += ["--write", str(path), *further]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    return done.returncode == 0 and path.exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="what `dpbench data path imdb-wordpiece` prints"
    )
    parser.add_argument("--runs", nargs="+", metavar="LIBRARY:TRAINED:SEED", help="default: the whole series")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("further", nargs="*", help="after --: options of the example")
    options = parser.parse_args()
    runs = all_runs()
    if options.runs:
        asked = [run.split(":") for run in options.runs]
        runs = [(library, trained, int(seed)) for library, trained, seed in asked]
    native.build()  # as the wheel has them
    rates = tune(options.data, options.records / "tuning", options.further)
    failed = make(runs, rates, options.data, options.records, options.further)
    for run in failed:
        print(f"failed: {':'.join(map(str, run))}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
