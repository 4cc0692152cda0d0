"""Measure what correlated noise costs a step: 10 million parameters, one thread, processor time, four ways in turns.

python -m proofs.correlated_noise [--turns 112]

Noise is made for several steps at once, so that means of whole periods are compared: of 2, 14 and 7 steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import CorrelatedNoise, PrivacyEngine

EXAMPLES, BATCH, WIDTH = 4096, 64, 2400
WAYS = {
    "independent": None,
    "previous(0.9)": CorrelatedNoise.previous(0.9),
    "square_root(8)": CorrelatedNoise.square_root(8),
    "banded(8)": CorrelatedNoise.banded(8),
}


def endless(mechanism: CorrelatedNoise | None) -> Callable[[], None]:
    """Return a function that makes one private step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(EXAMPLES, 64), torch.randint(10, (EXAMPLES,)))
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1700), nn.ReLU(), nn.Linear(1700, 10))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(data, BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mechanism=mechanism,
        **({} if mechanism else {"sampling": "shuffle"}),
    )

    def batches():
        while True:
            yield from loader

    given = batches()

    def step() -> None:
        x, y = next(given)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print mean and largest processor time of a step, and the ratio of means to that of independent noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=112)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    ways = {name: endless(mechanism) for name, mechanism in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-10, turns):  # the first steps have experiments, and fewer noises to draw
        for name, step in ways.items():
            start = time.process_time()
            step()
            if turn >= 0:
                seconds[name].append(time.process_time() - start)
    usual = seconds["independent"]
    for name, took in seconds.items():
        print(f"{name:16s} {statistics.mean(took) * 1e3:7.1f} ms, at most {max(took) * 1e3:7.1f}; ", end="")
        print(f"{statistics.mean(took) / statistics.mean(usual):.3f}")


if __name__ == "__main__":
    main()
