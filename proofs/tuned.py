"""Seek the settings of private training on genuine data: ``python -m proofs.tuned DATA`` (an hour).

DATA holds the harness' data sets (``harness data fetch cifar10`` and ``imdb``). Two models that people would take for a
small budget of privacy: a linear layer on fixed filters of CIFAR-10's pictures (:mod:`proofs.views_accuracy`), and the
mean of trained word vectors with a linear layer on IMDb's reviews.

For every batch and bound the rate is sought in steps of three, on 5,000 training examples that are held out, with one
seed. The best of all is trained with other seeds and judged by the test set, and so is the best of plain training,
whose rate is sought in the same way. Seeking on the held-out examples is not counted in epsilon, as nobody would
who tunes on public data. The table goes between the marks in docs/hyperparameters.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from proofs.views_accuracy import pictures, remembered, write_table

HELD_OUT, EPOCHS, DELTA = 5_000, 20, 1e-5
EPSILONS, BATCHES, BOUNDS = (1.0, 3.0, 8.0), (1024, 4096), (0.1, 1.0)
TUNING_SEED, SEEDS = 0, (1, 2, 3)
WORDS, WIDTH = 10_004, 16
PAGE = Path(__file__).parents[1] / "docs" / "hyperparameters.md"
BEGIN = "<!-- table of proofs/tuned.py -->"


@dataclass(frozen=True)
class Data:
    """Inputs and classes: what is trained on, what the settings are sought on, and the test set."""

    train: TensorDataset
    held_out: TensorDataset
    test: TensorDataset


@dataclass(frozen=True)
class Task:
    """A model and its data; ``rate``: where the search for the learning rate begins."""

    name: str
    load: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rate: float


@dataclass(frozen=True)
class Settings:
    """Those of one training; ``epsilon`` None: without privacy, which has no bound."""

    epsilon: float | None
    batch: int
    bound: float | None
    rate: float


def split(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> Data:
    """Return the data, of whose training examples the last ones are held out."""
    return Data(
        TensorDataset(x[:-HELD_OUT], y[:-HELD_OUT]),
        TensorDataset(x[-HELD_OUT:], y[-HELD_OUT:]),
        TensorDataset(test_x, test_y),
    )


def cifar10(folder: Path) -> Data:
    """Return features [n, 1073] of the pictures by fixed layers."""
    parts = [pictures(folder / "cifar10", name, slice(None), 0) for name in ("train", "test")]
    return split(*(tensor for x, y in parts for tensor in (x[:, 0].float(), y)))


def arrays(folder: Path) -> list[Tensor]:
    """Return training inputs and classes, and those of the test set."""
    names = ("train_x", "train_y", "test_x", "test_y")
    return [torch.from_numpy(np.load(folder / f"{name}.npy")).long() for name in names]


def imdb(folder: Path) -> Data:
    """Return the numbers of words [n, 256], 0 where a review has ended."""
    return split(*arrays(folder / "imdb"))


class MeanOfWords(nn.Module):
    """Words [B, T] -> logits [B, 2]: the mean of the vectors of those that are no padding (0), and a linear layer."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        own = words.ne(0).unsqueeze(-1)
        logits: Tensor = self.head((self.words(words) * own).sum(1) / own.sum(1).clamp(min=1))
        return logits


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def adam(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=rate)


TASKS = (
    Task("CIFAR-10, linear layer on fixed filters", cifar10, lambda: nn.Linear(1073, 10), sgd, 3.0),
    Task("IMDb, mean of trained word vectors", imdb, MeanOfWords, adam, 0.01),
)


def accuracy(task: Task, data: Data, judged: TensorDataset, settings: Settings, seed: int) -> float:
    """Train, the rate falling to zero, and return the share of ``judged`` that is right."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer: Any = task.optimizer(model.parameters(), settings.rate)
    loader: Any = DataLoader(data.train, batch_size=settings.batch, shuffle=settings.epsilon is None)
    steps, made = EPOCHS * len(loader), 0
    engine = dpcore.PrivacyEngine(seed=seed)
    if settings.epsilon is not None:
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=settings.bound,
            target_epsilon=settings.epsilon, target_delta=DELTA, epochs=EPOCHS, max_physical_batch_size="auto",
        )  # fmt: skip
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = settings.rate * (1.0 - made / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            made += not getattr(optimizer, "batch_goes_on", False)
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in DataLoader(judged, batch_size=1000)]
    return float(torch.cat(right).double().mean())


def best_rate(trial: Callable[[float], float], start: float, chance: float = 0.0) -> tuple[float, float]:
    """Return the rate of the highest trial and that trial, among steps of three from ``start`` while it grows.

    ``chance``: what is no more has learned nothing, and the search begins lower.
    """
    found = {start: trial(start)}
    while found[start] <= chance and len(found) < 5:
        start = float(f"{start / 3:.3g}")
        found[start] = trial(start)
    for factor in (3.0, 1 / 3):
        rate = max(found, key=lambda rate: found[rate])
        while rate == max(found, key=lambda rate: found[rate]) and len(found) < 8:
            rate = float(f"{rate * factor:.3g}")
            found[rate] = trial(rate)
    best = max(found, key=lambda rate: found[rate])
    return best, found[best]


def row(task: Task, settings: Settings, values: list[float]) -> str:
    """Return a row of the page."""
    shown = "none" if settings.epsilon is None else f"{settings.epsilon:g} at {DELTA:g}"
    bound = "" if settings.bound is None else f"{settings.bound:g}"
    low, high = (f"{100 * value:.1f}" for value in (min(values), max(values)))
    mean = f"{100 * statistics.mean(values):.1f} % [{low}, {high}]"
    return f"| {task.name} | {shown} | {settings.batch} | {bound} | {settings.rate:g} | {mean} |"


def main() -> None:
    """Seek, train and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--log", type=Path, help="lines of JSON, one for every training; those in it are not repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    once = remembered(given.log)
    head = "| task | ε at δ | batch | C | rate | test accuracy, mean [lowest, highest] |"
    lines = [head, "|---|---|--:|--:|--:|---|"]
    for task in TASKS:
        data = task.load(given.data)

        def trained(settings: Settings, seed: int, task: Task = task, data: Data = data) -> float:
            judged = data.held_out if seed == TUNING_SEED else data.test
            return once(f"{task.name}: {settings}, seed {seed}", lambda: accuracy(task, data, judged, settings, seed))

        for epsilon in (None, *EPSILONS):
            tried = []
            for batch in (256,) if epsilon is None else BATCHES:
                for bound in (None,) if epsilon is None else BOUNDS:
                    start = task.rate if task.optimizer is adam or bound is None else task.rate / bound
                    make = lambda rate, e=epsilon, n=batch, c=bound: Settings(e, n, c, rate)  # noqa: E731
                    rate, value = best_rate(lambda rate, make=make: trained(make(rate), TUNING_SEED), start)
                    tried.append((value, make(rate)))
            settings = max(tried, key=lambda each: each[0])[1]
            lines.append(row(task, settings, [trained(settings, seed) for seed in SEEDS]))
            print(lines[-1], flush=True)
    write_table(PAGE, BEGIN, "\n".join(lines))


if __name__ == "__main__":
    main()
