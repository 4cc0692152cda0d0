"""Tutorial 2: large batches in small memory, schedules and clipping rules, on CIFAR-10.

    python docs/tutorials/cifar10_cnn.py                  # seconds, on synthetic images; or cell by cell, as a notebook
    python docs/tutorials/cifar10_cnn.py --data FOLDER    # genuine images; minutes an epoch

You will learn: why private training wants large batches, how a logical batch is cut into physical pieces without
changing the result, how to let noise and clipping norm follow a schedule, and how to see that both are accounted for.
"""

# %% [1] The noise of a step is divided by the batch size, so large batches drown it; they need not fit into memory.
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.examples import data
from dpcore.schedulers import ExponentialNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager

options = data.tutorial_options(epochs=2)
images = data.load("cifar10", options.data, data.TUTORIAL_EXAMPLES // 2)
batch_size, physical = (1024, 128) if options.data else (256, 64)
print(f"{len(images.train)} images ({images.label} data)")
DELTA = 1e-5


def block(channels_in: int, channels_out: int) -> list[nn.Module]:
    """Group norm instead of batch norm: batch norm mixes the examples of a batch, which no clipping can undo."""
    return [nn.Conv2d(channels_in, channels_out, 3, 1, 1), nn.GroupNorm(8, channels_out), nn.ReLU(), nn.AvgPool2d(2)]


model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 16, 10))

# %% [2] A private run. clipping="automatic" divides every gradient by its norm (Bu et al. 2022), so that no clipping
# norm needs tuning.
engine = PrivacyEngine(seed=options.seed)
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    data_loader=DataLoader(images.train, batch_size=batch_size),
    noise_multiplier=1.2,
    max_grad_norm=1.0,
    clipping="automatic",
    sample_rate=batch_size / len(images.train),
    expected_batch_size=batch_size,
)
schedule = ExponentialNoise(optimizer, gamma=0.99)

# %% [3] BatchMemoryManager hands out pieces. optimizer.step() after a piece only adds to the clipped sum; noise is
# added and a step is counted at the end of the logical batch. A piece knows by itself whether it is the last one.
start = time.perf_counter()
for epoch in range(1, options.epochs + 1):
    pieces = 0
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as cut:
        for x, y in data.progress(cut):
            pieces += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    # The schedule moves once an epoch; the accountant sees each step with the noise that it really has.
    schedule.step()
    print(
        f"epoch {epoch}: {len(loader)} steps in {pieces} pieces, epsilon {engine.get_epsilon(DELTA):.3f}, "
        f"next noise multiplier {optimizer.noise_multiplier:.4f}, "
        f"test accuracy {data.accuracy(model, images.test):.4f}, {time.perf_counter() - start:.1f} s "
        f"({images.label} data)",
        flush=True,
    )

# %% [4] Pieces are no steps: noise is added, and a step is counted, once for each logical batch.
print(engine)
assert pieces > len(loader) and len(engine.accountant) == options.epochs * len(loader)
