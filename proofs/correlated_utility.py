"""Compare accuracy at equal epsilon under correlated noise: ``python -m proofs.correlated_utility DATA --log FILE``.

DATA holds the harness' data sets (``harness data fetch mnist`` and ``imdb``), both genuine; it takes some 40 minutes of
one thread, and every training of ``FILE`` that was made is not made again. The benchmark's network on MNIST sees each
example once; word vectors on IMDb see each four times, by SGD and by Adam. ``make_private_with_epsilon`` finds the
noise of each mechanism for one (epsilon, delta), with the batches that its theorem is about, and the loop is a user's.

How much is taken back, or over how many steps, is chosen before any training: least mean variance of the sum of all
noise so far. The rate falls to zero from where training with seed 0 does best on 5,000 held-out training examples, in
steps of three; the search is not counted in epsilon. Seeds 1 to 5 are judged by the test set. The table goes between
the marks in the page of findings.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import CorrelatedNoise, PrivacyEngine
from dpcore.accountants import get_noise_multiplier
from proofs.tuned import Data, MeanOfWords, adam, arrays, best_rate, split
from proofs.views_accuracy import interval, remembered, write_table

EPSILONS, DELTA = (8.0, 1.0), 1e-5
TUNING_SEED, SEEDS = 0, range(1, 6)
PAGE = Path(__file__).parents[1] / "results" / "findings" / "2026-11-29-correlated-utility.md"
BEGIN = "<!-- table of proofs/correlated_utility.py -->"
POISSON, CYCLE = "independent, Poisson samples", "independent, a fixed cycle"
SHARES, BANDS = (0.5, 0.8, 0.9, 0.95, 0.98), (4, 8, 16, 32, 64)
MECHANISMS: dict[str, dict[str, CorrelatedNoise]] = {
    CYCLE: {CYCLE: CorrelatedNoise.previous(0.0)},
    "previous": {f"previous({share:g})": CorrelatedNoise.previous(share) for share in SHARES},
    "square_root": {f"square_root({bands})": CorrelatedNoise.square_root(bands) for bands in BANDS},
    "banded": {f"banded({bands})": CorrelatedNoise.banded(bands) for bands in BANDS},
}


def network() -> nn.Module:
    """Return the benchmark's: pictures [B, 1, 28, 28] -> logits [B, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mnist(folder: Path) -> Data:
    """Return pictures [n, 1, 28, 28] in [0, 1]."""
    x, y, test_x, test_y = arrays(folder / "mnist")
    return split(*(t.float().view(-1, 1, 28, 28) / 255 if t.dim() > 1 else t for t in (x, y, test_x, test_y)))


def imdb(folder: Path) -> Data:
    """Return the numbers of words [n, 256], 0 where a review has ended."""
    return split(*arrays(folder / "imdb"))


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=rate)


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained.

    ``rate``: where the search for the rate begins; ``chance``: an accuracy that is no more than luck.
    """

    name: str
    load: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    batch: int
    passes: int
    bound: float
    rate: float
    chance: float


TASKS = (
    Task("MNIST, CNN, SGD", mnist, network, sgd, 64, 1, 1.0, 1.0, 0.15),
    Task("IMDb, word vectors, SGD", imdb, MeanOfWords, sgd, 128, 4, 0.1, 100.0, 0.52),
    Task("IMDb, word vectors, Adam", imdb, MeanOfWords, adam, 128, 4, 0.1, 0.1, 0.52),
)


def summed(mechanism: CorrelatedNoise, cycle: int, passes: int) -> float:
    """Return the deviation of the sum of all noise so far, the root of its mean square over the steps.

    In units of C times the multiplier of the one Gaussian step that costs as much as the whole run.
    """
    steps, weights = cycle * passes, np.array(mechanism.weights)
    column = np.zeros(steps)  # the first of the inverse of C
    if mechanism.is_banded:
        for t in range(steps):
            back = weights[1 : t + 1]
            column[t] = float(t == 0) - back @ column[t - 1 :: -1][: len(back)] if t else 1.0
    else:
        column[: len(weights)] = weights[:steps]
    variances = np.cumsum(np.cumsum(column) ** 2)
    return math.sqrt(float(variances.mean()) * math.fsum(mechanism.costs(cycle, passes)))


def over_poisson(mechanism: CorrelatedNoise, cycle: int, passes: int, epsilon: float) -> float:
    """Return that deviation over the one of independent noise with Poisson samples, at equal epsilon."""
    steps = cycle * passes
    target: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": DELTA, "accountant": "prv"}
    one = get_noise_multiplier(sample_rate=1.0, steps=1, **target)
    each = get_noise_multiplier(sample_rate=1 / cycle, steps=steps, **target)
    return one * summed(mechanism, cycle, passes) / (each * math.sqrt((steps + 1) / 2))


def accuracy(
    task: Task, data: Data, judged: TensorDataset, mechanism: CorrelatedNoise | None, epsilon: float, rate: float,
    seed: int,
) -> float:  # fmt: skip
    """Train, the rate falling to zero, and return the share of ``judged`` that is right."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer: Any = task.optimizer(model.parameters(), rate)
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(data.train, batch_size=task.batch),
        target_epsilon=epsilon, target_delta=DELTA, epochs=task.passes, max_grad_norm=task.bound, mechanism=mechanism,
    )  # fmt: skip
    steps = task.passes * len(loader)
    for _ in range(task.passes):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = rate * (1.0 - optimizer.steps / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert optimizer.steps == steps and engine.get_epsilon(DELTA) <= epsilon
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in DataLoader(judged, batch_size=1000)]
    return float(torch.cat(right).double().mean())


def absolute(values: list[float]) -> str:
    """Return mean and 95 % interval, in percent."""
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    low, mean, high = (100 * (statistics.mean(values) + side * half) for side in (-1, 0, 1))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def rows(task: Task, data: Data, epsilon: float, once: Callable[[str, Callable[[], float]], float]) -> list[str]:
    """Choose settings and train with every seed; return the rows of a task at one epsilon."""
    cycle = math.ceil(len(data.train) / task.batch)
    ways: dict[str, CorrelatedNoise | None] = {POISSON: None}
    for offered in MECHANISMS.values():
        name = min(offered, key=lambda name, offered=offered: summed(offered[name], cycle, task.passes))
        ways[name] = offered[name]
    found: dict[str, tuple[float, list[float]]] = {}
    for name, mechanism in ways.items():

        def trained(rate: float, seed: int, name: str = name, mechanism: CorrelatedNoise | None = mechanism) -> float:
            judged = data.held_out if seed == TUNING_SEED else data.test
            label = f"{task.name}, epsilon {epsilon:g}: {name}, rate {rate:g}, seed {seed}"
            return once(label, lambda: accuracy(task, data, judged, mechanism, epsilon, rate, seed))

        rate, _ = best_rate(lambda rate, trained=trained: trained(rate, TUNING_SEED), task.rate, task.chance)
        found[name] = rate, [trained(rate, seed) for seed in SEEDS]
    lines, usual = [], found[POISSON][1]
    for name, (rate, values) in found.items():
        mechanism = ways[name]
        noise = 1.0 if mechanism is None else over_poisson(mechanism, cycle, task.passes, epsilon)
        gain = "" if name == POISSON else interval([a - b for a, b in zip(values, usual, strict=True)])
        cells = task.name, f"{epsilon:g}", name, f"{noise:.2f}", f"{rate:.3g}", absolute(values), gain
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Choose, train, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--log", type=Path, help="lines of JSON, one for every training; those in it are not repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    once, made = remembered(given.log), []
    for number, (epsilon, task) in enumerate(itertools.product(EPSILONS, TASKS), 1):
        print(f"{number} of {len(EPSILONS) * len(TASKS)}: {task.name}, epsilon {epsilon:g}", flush=True)
        made += rows(task, task.load(given.data), epsilon, once)
    head = "| task | ε | noise | sum of noise, over Poisson's | rate | test accuracy | over Poisson's, points |"
    write_table(PAGE, BEGIN, "\n".join([head, "|---|--:|---|--:|--:|---|---|", *made]))


if __name__ == "__main__":
    main()
