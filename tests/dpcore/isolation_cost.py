"""The cost of the experiments on whether examples are kept apart: ``python -m tests.dpcore.isolation_cost``.

Checks are rare, so their cost is computed and not waited for: processor time of one check, in steps of the same run,
alternating with steps without one; times the rate of later checks, and for the first batches of a kind.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine
from dpcore.example_isolation.check import BATCHES, RATE, IsolationCheck
from tests.dpcore.transformers_cost import cifar10_cnn, mnist_cnn

ROUNDS = 15


def engine_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], None], IsolationCheck]:
    engine = Engine(
        model,
        lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"),
        expected_batch_size=len(x),
        noise_multiplier=1.0,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    )
    return lambda: engine.step(x, y) and None, engine.isolation


def loop_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], None], IsolationCheck]:
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        check_batches=False,
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()

    return step, private.isolation


def measure(step: Callable[[], None], check: IsolationCheck) -> tuple[float, list[float]]:
    """(seconds of a step, ROUNDS checks in steps) of processor time."""

    def seconds(checked: bool) -> float:
        check.due = lambda kind, batch_size: checked  # type: ignore[method-assign]
        start = time.process_time()
        step()
        return time.process_time() - start

    for _ in range(5):
        seconds(False)
    pairs = [(seconds(False), seconds(True)) for _ in range(ROUNDS)]
    return statistics.median(plain for plain, _ in pairs), [checked / plain - 1 for plain, checked in pairs]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| network | batch | loop | step, ms | a check, steps (range) | first checks, steps | share of later time |")
    print("|---|---|---|---|---|---|---|")
    for name, build, shape, size in (
        ("mnist-cnn", mnist_cnn, (1, 28, 28), 16),
        ("cifar10-cnn", cifar10_cnn, (3, 32, 32), 512),
    ):
        for loop, make in (("Engine", engine_step), ("two lines", loop_step)):
            torch.manual_seed(0)
            x, y = torch.randn(size, *shape), torch.arange(size) % 10
            one, checks = measure(*make(build(), x, y))
            middle = statistics.median(checks)
            print(
                f"| {name} | {size} | {loop} | {one * 1e3:.1f} | {middle:.1f} ({min(checks):.1f} to {max(checks):.1f}) "
                f"| {BATCHES * middle:.1f} | {middle * RATE:.2%} |"
            )


if __name__ == "__main__":
    main()
