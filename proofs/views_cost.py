"""Time a step of K views beside K steps of one: ``python -m proofs.views_cost`` (minutes; writes nothing).

Processor time of steps of an Engine in pairs whose order changes, after three of each in which the model is looked at.
Printed is the median of the pairs' ratios with the interval of its order statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpcore

PAIRS, LOWEST = 41, 13  # the 14th smallest and largest of 41 enclose the median at 97 %


def convolutions() -> tuple[nn.Module, Tensor]:
    """Return a network for CIFAR-10 and 64 pictures."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(64 * 64, 10)), torch.randn(64, 3, 32, 32)


def attention() -> tuple[nn.Module, Tensor]:
    """Return two layers of a transformer and 32 sequences."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(96 * 32, 10)), torch.randn(32, 32, 96)


def stepper(model: nn.Module, x: Tensor, K: int, steps: int) -> Callable[[], float]:
    """Return what makes so many steps of ``K`` views and returns their processor time."""
    x, y = x.repeat_interleave(K, 0), torch.arange(len(x)).repeat_interleave(K) % 10
    engine = dpcore.Engine(
        model, lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), noise_multiplier=1.0,
        max_grad_norm=1.0, expected_batch_size=len(x) // K, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        group=K,
    )  # fmt: skip

    def run() -> float:
        begun = time.process_time()
        for _ in range(steps):
            engine.step(x, y)
        return time.process_time() - begun

    for _ in range(3):
        run()
    return run


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    print("| model | K | K views over K steps | interval |\n|---|---|---|---|")
    for name, made in (("convolutions", convolutions), ("attention", attention)):
        for K in (4, 16):
            views, single = stepper(*made(), K, 1), stepper(*made(), 1, K)
            ratios = []
            for pair in range(PAIRS):
                if pair % 2:
                    one, other = views(), single()
                else:
                    other, one = single(), views()
                ratios.append(one / other)
            ratios.sort()
            low, middle, high = ratios[LOWEST], ratios[PAIRS // 2], ratios[-1 - LOWEST]
            print(f"| {name} | {K} | {middle:.3f} | [{low:.3f}, {high:.3f}] |", flush=True)


if __name__ == "__main__":
    main()
