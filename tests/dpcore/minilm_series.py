"""The series of ``dpcore.examples.minilm_imdb``: ``make minilm-imdb``, or from the root of a checkout

    python -m tests.dpcore.minilm_series --data FOLDER                    # what is missing, one run after another
    python -m tests.dpcore.minilm_series --data FOLDER --runs opacus:lora:0 dpcore:lora:0
    python -m tests.dpcore.minilm_series --page                           # the table of the records that are there

First some learning rates are tried with dpcore, on a seed and on test reviews that are not those of the series; both
libraries get the best one. Every run is a process of its own with the example's own settings, and leaves one record in
results/minilm-imdb, those of the tries in its folder tuning; a record that is there is not made again. Seeds are
paired: both libraries start from the same head and adapters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpcore import native
from dpcore.examples import minilm_imdb
from dpcore.examples.minilm_imdb import LIBRARIES, TRAINED
from tests.dpcore import minilm_agreement, torchvision_on_cpu

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "minilm-imdb"
PAGE = ROOT / "results" / "findings" / "2026-11-24-minilm-imdb.md"
SEEDS = (0, 1, 2)
TUNING_SEED, TUNING_TEST = 100, 1000
"""The tries are tested on the first so many test reviews, the series on those behind them."""
RATES = {"full": (3e-4, 1e-3), "lora": (2e-3, 5e-3), "bias": (2e-3, 5e-3)}
"""Learning rates that are tried."""
SETTINGS = ("examples", "test_examples", "steps", "batch_size", "noise_multiplier", "delta", "max_grad_norm")
"""Of which every record must have the same: only then is there one table."""

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


HEAD = """# MiniLM fine-tuned privately on IMDb, by dpcore and by Opacus

Written by `python -m tests.dpcore.minilm_series --page` from [results/minilm-imdb](../minilm-imdb); the runs are those
of `make minilm-imdb` (`dpcore.examples.minilm_imdb`). Published weights (all-MiniLM-L6-v2, 6 layers of 384), the first
{tokens} word pieces of {examples} reviews, accuracy on {test_examples} others. Epsilon 8 at delta {delta:.1e} by
dpcore's accountant, which sets the noise multiplier {noise_multiplier:.3f} of both; Opacus' own accountant tells the
epsilon of its rows. {steps} steps of AdamW on Poisson batches of {batch_size} expected, bound {max_grad_norm:g}.
Learning rates fall to zero over the steps; they were chosen with dpcore on another seed and other test reviews, of two
tried for each kind ([tuning](../minilm-imdb/tuning)), and are equal for both. One thread; processor seconds of training
alone, on a shared machine, so they are rough.

"""


def page(
    records: Sequence[dict[str, Any]], agreement: Sequence[dict[str, Any]] = (), tries: Sequence[dict[str, Any]] = ()
) -> str:
    """The page of one or more records.

    Args:
        records: of the series.
        tries: those by which the rates were chosen.
        agreement: what ``minilm_agreement`` measured, one record for each kind of training.

    Raises:
        ValueError: there are none, or they are not of one setting.
    """
    if not records:
        raise ValueError("there is no record")
    for name in SETTINGS:
        found = {record[name] for record in records}
        if len(found) > 1:
            raise ValueError(f"the records have different {name}: {sorted(found)}")
    lines = [
        HEAD.format(**records[0], tokens=64),
        "| trained | library | seeds | accuracy, mean [range] | epsilon | processor seconds, mean [range] | rate |\n",
        "|:--|:--|--:|:--|--:|:--|--:|\n",
    ]
    for trained in TRAINED:
        for library in LIBRARIES:
            some = [r for r in records if (r["train"], r["library"]) == (trained, library)]
            if some:
                lines.append(_row(trained, library, some))
    pairs = [line for trained in TRAINED if (line := _pair(records, trained))]
    if pairs:
        lines += ["\ndpcore minus Opacus, seed by seed:\n\n", *pairs, _chance(records, tries)]
    return "".join(lines) + minilm_agreement.section(agreement)


def _row(trained: str, library: str, some: Sequence[dict[str, Any]]) -> str:
    accuracy, seconds = ([r[key] for r in some] for key in ("accuracy", "processor_seconds"))
    epsilon = max(r["epsilon"] for r in some)
    count, rates = some[0]["trained_parameters"], sorted({r["learning_rate"] for r in some})
    return (
        f"| {trained}, {count:,} | {library} | {len(some)} | {_told(accuracy, '.4f')} | {epsilon:.3f} "
        f"| {_told(seconds, '.0f')} | {', '.join(f'{rate:g}' for rate in rates)} |\n"
    )


def _told(values: Sequence[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def _pairs(records: Sequence[dict[str, Any]], trained: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """dpcore's and Opacus' record of every seed that both have."""
    ours, theirs = (
        {r["seed"]: r for r in records if (r["train"], r["library"]) == (trained, library)} for library in LIBRARIES
    )
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def _gained(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[float]:
    """dpcore's accuracy minus Opacus'."""
    return [ours["accuracy"] - theirs["accuracy"] for ours, theirs in pairs]


def _pair(records: Sequence[dict[str, Any]], trained: str) -> str:
    """A line on the seeds that both libraries have, empty where there is none."""
    pairs = _pairs(records, trained)
    if not pairs:
        return ""
    faster = [theirs["processor_seconds"] / ours["processor_seconds"] for ours, theirs in pairs]
    return (
        f"- {trained}: accuracy {_told(_gained(pairs), '+.4f')}, {len(pairs)} pairs; "
        f"Opacus takes {_told(faster, '.2f')} times as many processor seconds\n"
    )


def sign_test(differences: Sequence[float]) -> float:
    """Return the chance that fair coins are as uneven as the signs, either way; differences of zero are left out."""
    signs = [d < 0 for d in differences if d]
    fewer = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(len(signs), k) for k in range(fewer + 1)) / 2 ** len(signs))


def permutation_test(differences: Sequence[float]) -> float:
    """Return the share of all exchanges within pairs whose sum of differences is as far from zero, the real one among
    them."""
    found = abs(sum(differences)) - 1e-12
    exchanged = itertools.product((1, -1), repeat=len(differences))
    as_far = sum(abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= found for signs in exchanged)
    return as_far / 2 ** len(differences)


CHANCE = """
## Is it chance?

dpcore's accuracy is the lower one in {below} of {n} pairs, and lower by {lower:.4f} on average. An exact sign test says
p = {sign:.2f}, and of all 2^{n} exchanges of the libraries within pairs {permutation:.0%} have a mean difference as
far from zero (both two-sided). The two runs of a pair share head, adapters, rates and test reviews. They do not share
batches or noise: each library draws its own from the seed, by a generator of its own. So they differ as two runs of
one library with different seeds do. Those have a standard deviation of {spread:.4f}, pooled over libraries and kinds,
so that the mean of {n} differences of independent runs has one of {error:.4f}. {verdict}
"""
BY_CHANCE = """Chance alone would do as much now and
then: these runs prove no difference between the libraries, and exclude none of that size. Seeds 3 to 6 were added
because the pairs before them had 3% in that test, so read it as a description, not as a proof."""
RARE = """Chance alone seldom does as
much: either this is such a case, or something differs that the next section does not compare. More seeds would tell."""


TRIED = """
How far seeds of one library lie apart: the tries at the same rates, dpcore with seed {seed} on {reviews} other
reviews, had {found}. These chose the rates, so they are high ones.
"""


def _chance(records: Sequence[dict[str, Any]], tries: Sequence[dict[str, Any]]) -> str:
    """Whether the differences are more than what seeds do; empty where no seed was repeated."""
    differences = [d for trained in TRAINED for d in _gained(_pairs(records, trained))]
    groups = [
        [r["accuracy"] for r in records if (r["train"], r["library"]) == (trained, library)]
        for trained in TRAINED
        for library in LIBRARIES
    ]
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return ""
    freedom = sum(len(group) - 1 for group in repeated)
    spread = math.sqrt(sum((len(g) - 1) * statistics.variance(g) for g in repeated) / freedom)
    sign, permutation = sign_test(differences), permutation_test(differences)
    verdict = BY_CHANCE if min(sign, permutation) > 0.05 else RARE
    return CHANCE.format(
        below=sum(d < 0 for d in differences),
        n=len(differences),
        lower=-statistics.mean(differences),
        sign=sign,
        permutation=permutation,
        spread=spread,
        error=spread * math.sqrt(2 / len(differences)),
        verdict=verdict,
    ) + _tried(records, tries)


def _tried(records: Sequence[dict[str, Any]], tries: Sequence[dict[str, Any]]) -> str:
    """Return what dpcore reached at the series' rates before it; empty without tries."""
    rates = {r["train"]: r["learning_rate"] for r in records}
    found = [f"{r['accuracy']:.4f} ({r['train']})" for r in tries if rates.get(r["train"]) == r["learning_rate"]]
    if not found:
        return ""
    return TRIED.format(seed=tries[0]["seed"], reviews=tries[0]["test_examples"], found=", ".join(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="what `dpbench data path imdb-wordpiece` prints")
    parser.add_argument("--runs", nargs="+", metavar="LIBRARY:TRAINED:SEED", help="default: the whole series")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", action="store_true", help="write the page of the records, and end")
    parser.add_argument("further", nargs="*", help="after --: options of the example")
    options = parser.parse_args()
    if options.page:
        folders = (options.records, options.records / "agreement", options.records / "tuning")
        PAGE.write_text(
            page(*([json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))] for folder in folders))
        )
        return 0
    if options.data is None:
        parser.error("--data is missing")
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
