"""Accuracy at equal epsilon: the same private training by dpcore and by Opacus, seed by seed.

    python -m proofs.opacus.accuracy --data FOLDER [--write FILE.json]
    python -m proofs.opacus.accuracy --smoke

Both get the same network, starting weights (by seed), learning rate, noise multiplier, clipping norm, sample rate and
number of steps; noise and Poisson batches are each library's own. The difference is paired by seed: its mean and the
95 % t interval.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore.examples import data

DELTA = 1e-5


def network() -> nn.Module:
    """The paper's CNN for MNIST: 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def train(library: str, digits: data.Data, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training run; its accuracy, epsilon (by that library's own default accountant) and seconds."""
    torch.manual_seed(seed)
    model = network()
    engine = importlib.import_module(library).PrivacyEngine()
    batch_size = min(options.batch_size, len(digits.train) // 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=options.learning_rate),
            data_loader=DataLoader(digits.train, batch_size=batch_size),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=1.0,
            noise_generator=torch.Generator().manual_seed(seed),
        )
        start = time.perf_counter()
        for _ in range(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        seconds = time.perf_counter() - start
        epsilon = engine.get_epsilon(DELTA)
    return {
        "library": library,
        "seed": seed,
        "accuracy": data.accuracy(model, digits.test),
        "epsilon": epsilon,
        "seconds": seconds,
        "data": digits.label,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=5, help="number of pairs")
    parser.add_argument("--first-seed", type=int, default=0, help="of the starting weights and the noise")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--noise-multiplier", type=float, default=1.1)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the runs as JSON")
    options = parser.parse_args()
    if options.seeds < 2:
        raise SystemExit(f"--seeds is {options.seeds}; an interval needs at least 2.")
    if options.smoke:
        options.seeds, options.epochs = 2, 1

    digits = data.load("mnist", options.data)
    runs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for library in ("dpcore", "opacus") if seed % 2 else ("opacus", "dpcore"):
            runs.append(train(library, digits, seed, options))
            print(
                "{library:7} seed {seed}: accuracy {accuracy:.4f}, epsilon {epsilon:.4f}, {seconds:.0f} s".format(
                    **runs[-1]
                ),
                flush=True,
            )
    ours, theirs = (np.array([r["accuracy"] for r in runs if r["library"] == name]) for name in ("dpcore", "opacus"))
    difference = ours - theirs
    half = stats.t.ppf(0.975, len(difference) - 1) * difference.std(ddof=1) / len(difference) ** 0.5
    summary = {
        "dpcore": float(ours.mean()),
        "opacus": float(theirs.mean()),
        "difference": float(difference.mean()),
        "low": float(difference.mean() - half),
        "high": float(difference.mean() + half),
        "pairs": len(difference),
    }
    print(
        "dpcore {dpcore:.4f}, opacus {opacus:.4f}; difference {difference:+.4f} [{low:+.4f}, {high:+.4f}], "
        "n = {pairs} pairs, {label} data".format(**summary, label=digits.label)
    )
    if options.write:
        setting = {key: value for key, value in vars(options).items() if key not in ("data", "write", "smoke", "seed")}
        text = json.dumps({"setting": setting, "summary": summary, "runs": runs}, indent=1)
        temporary = options.write.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        os.replace(temporary, options.write)
        print(f"written: {options.write}")


if __name__ == "__main__":
    main()
