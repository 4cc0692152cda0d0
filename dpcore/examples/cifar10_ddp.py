"""A convolutional network on CIFAR-10, trained by several processes together.

    torchrun --nproc-per-node 2 -m dpcore.examples.cifar10_ddp --data FOLDER     # genuine data; 3 min/epoch on 2 cores
    torchrun --nproc-per-node 2 -m dpcore.examples.cifar10_ddp --smoke           # seconds, synthetic

Every process holds the whole data set and draws its own part of each Poisson batch; batch size, noise and epsilon are
those of all processes together, so that their number changes the speed and nothing else.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel
from dpcore.examples import data
from dpcore.utils.batch_memory_manager import BatchMemoryManager


def network(width: int = 32) -> nn.Module:
    """Images [B, 3, 32, 32] -> logits [B, 10]; group norm in place of batch norm, which would mix the examples."""

    def stage(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *stage(3, width),
        *stage(width, 2 * width),
        *stage(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(64 * width, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=1024, help="expected, over all processes")
    parser.add_argument("--physical-batch-size", type=int, default=128, help="examples at a time, per process")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=0.002)
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.learning_rate = min(options.epochs, 4), 0.003

    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m dpcore.examples.cifar10_ddp ...")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    images = data.load("cifar10", options.data)
    batch_size = min(options.batch_size, len(images.train) // 4)

    model: nn.Module = DifferentiallyPrivateDistributedDataParallel(network().to(device))
    engine = PrivacyEngine(seed=options.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.learning_rate),
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
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: epsilon {engine.get_epsilon(options.delta):.3f} at delta {options.delta:g}, "
                f"test accuracy {data.accuracy(model, images.test):.4f}, {time.perf_counter() - start:.0f} s "
                f"({images.label} data, {dist.get_world_size()} processes, "
                f"noise multiplier {optimizer.noise_multiplier:.4f})",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
