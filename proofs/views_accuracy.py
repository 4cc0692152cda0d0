"""Compare K = 4 views of an example with one: ``python -m proofs.views_accuracy FOLDER`` (hours of one thread).

FOLDER holds CIFAR-10 as the harness keeps it (``harness data path cifar10``). A small network with group norms is
trained from nothing on 10,000 pictures at epsilon 8, for every K at the better of two rates, which are compared on
pictures of their own that are in neither set. Equal seeds have the same pictures and the same first weights. The table
goes between the marks in docs/privacy-unit.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpcore

EXAMPLES, HELD_OUT, BATCH, EPOCHS, EPSILON, DELTA = 10_000, 2_000, 500, 8, 8.0, 1e-5
SEEDS, RATES = range(1, 6), (2.0, 4.0)
TUNING_SEED = 0
PAGE = Path(__file__).parents[1] / "docs" / "privacy-unit.md"
BEGIN, END = "<!-- table of proofs/views_accuracy.py -->", "<!-- end -->"
KINDS = {"as it is": (1, False), "1 view": (1, True), "4 views": (4, True)}


def view(padded: Tensor) -> Tensor:
    """Return a crop of [3, 32, 32] from a picture with margins of 4, flipped half of the time."""
    top, left, flip = [*torch.randint(9, (2,)).tolist(), bool(torch.rand(()) < 0.5)]
    crop = padded[:, top : top + 32, left : left + 32]
    return crop.flip(2) if flip else crop


def network() -> nn.Sequential:
    """Return three convolutions with group norms, and a linear layer: 16,074 numbers."""
    first = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
    third = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2))
    return nn.Sequential(first, second, third, nn.Flatten(), nn.Linear(512, 10))


def pictures(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return pictures [n, 3, 32, 32] around 0, and their classes [n]."""
    x, y = (np.load(folder / f"{split}_{part}.npy", mmap_mode="r") for part in "xy")
    few = torch.from_numpy(np.array(x[: EXAMPLES + HELD_OUT] if split == "train" else x)).float()
    few = few.permute(0, 3, 1, 2) if few.shape[-1] == 3 else few
    return ((few / 255 if few.max() > 2 else few) - 0.47) / 0.25, torch.from_numpy(np.array(y[: len(few)])).long()


def accuracy(data: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor], kind: str, rate: float, seed: int) -> float:
    """Train one network and return the share of ``judged`` that it gets right."""
    group, augmented = KINDS[kind]
    torch.manual_seed(seed)
    model = network()
    x, y = (part[:EXAMPLES] for part in data)
    if augmented:
        x = F.pad(x, (4, 4, 4, 4), mode="reflect")
    dataset = dpcore.views(TensorDataset(x, y), view if augmented else None, K=group)
    loader = DataLoader(dataset, batch_size=BATCH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
    engine = dpcore.PrivacyEngine(seed=seed)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, max_physical_batch_size=125,
        target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS, wrap_model=False,
    )  # fmt: skip
    steps = EPOCHS * math.ceil(EXAMPLES / BATCH)
    for _ in range(EPOCHS):
        for rows, classes in loader:
            for options in optimizer.param_groups:
                options["lr"] = rate * (1.0 - optimizer.steps / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(rows), classes).backward()
            optimizer.step()
    assert engine.get_epsilon(DELTA) <= EPSILON
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in judged[0].split(500)])
    return float((found == judged[1]).double().mean())


def interval(differences: list[float]) -> str:
    """Return the mean and its 95 % interval, in points of a hundred."""
    mean, n = statistics.mean(differences), len(differences)
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def table(rates: dict[str, float], found: dict[str, list[float]]) -> str:
    """Return the rows of the page, in the order of the seeds."""
    lines = ["| an example is | rate | accuracy of each seed | mean | 4 views, over this |", "|---|---|---|---|---|"]
    for kind, values in found.items():
        each = ", ".join(f"{100 * value:.1f}" for value in values)
        apart = [four - own for four, own in zip(found["4 views"], values, strict=True)]
        against = "" if kind == "4 views" else interval(apart)
        lines.append(f"| {kind} | {rates[kind]:g} | {each} | {100 * statistics.mean(values):.1f} | {against} |")
    return "\n".join(lines)


def main() -> None:
    """Choose a rate for every kind, train with every seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path, help="lines of JSON, one for every training; those in it are not repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, test = pictures(given.folder, "train"), pictures(given.folder, "test")
    held_out = tuple(part[EXAMPLES : EXAMPLES + HELD_OUT] for part in train)
    known: dict[str, float] = {}
    if given.log and given.log.exists():
        known = dict(json.loads(line) for line in given.log.read_text().splitlines())

    def trained(kind: str, rate: float, seed: int, judged: Any) -> float:
        name = f"{kind}, rate {rate:g}, seed {seed}"
        if name not in known:
            known[name] = accuracy(train, judged, kind, rate, seed)
            print(f"{name}: {known[name]:.4f}", flush=True)
            if given.log:
                with given.log.open("a") as log:
                    log.write(json.dumps([name, known[name]]) + "\n")
        return known[name]

    rates = {k: max(RATES, key=lambda rate, k=k: trained(k, rate, TUNING_SEED, held_out)) for k in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in SEEDS:
        for kind in KINDS:
            found[kind].append(trained(kind, rates[kind], seed, test))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    made = table(rates, found)
    print(made)
    if rest:
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
