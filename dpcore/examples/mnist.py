"""A convolutional network on MNIST, trained to a target epsilon.

    python -m dpcore.examples.mnist --data FOLDER       # genuine data; some minutes on two cores
    python -m dpcore.examples.mnist --smoke             # seconds, synthetic

The noise is the smallest that keeps all epochs within the budget; training stops there. The number of examples is
taken as public here.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.examples import data
from dpcore.utils.batch_memory_manager import BatchMemoryManager


def network() -> nn.Module:
    """Images [B, 1, 28, 28] -> logits [B, 10]; tanh, which bounds activations and so gradients, does well under DP."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=1024, help="expected; batches are Poisson samples")
    parser.add_argument("--physical-batch-size", type=int, default=256, help="examples in memory at a time")
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    options = parser.parse_args()
    if options.smoke:
        options.epochs = min(options.epochs, 2)

    if options.seed is not None:
        torch.manual_seed(options.seed)
    images = data.load("mnist", options.data)
    batch_size = min(options.batch_size, len(images.train) // 4)

    model = network()
    engine = PrivacyEngine(seed=options.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.5),
        data_loader=DataLoader(images.train, batch_size=batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
        sample_rate=batch_size / len(images.train),
        expected_batch_size=batch_size,
    )
    start = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=options.physical_batch_size, optimizer=optimizer
        ) as pieces:
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        print(
            f"epoch {epoch}: epsilon {engine.get_epsilon(options.delta):.3f} at delta {options.delta:g}, "
            f"test accuracy {data.accuracy(model, images.test):.4f}, {time.perf_counter() - start:.0f} s "
            f"({images.label} data, noise multiplier {optimizer.noise_multiplier:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
