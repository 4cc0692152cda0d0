"""Tutorial 1: a private MNIST classifier, budget first.

    python docs/tutorials/mnist_cnn.py                    # seconds, on synthetic images; or cell by cell, as a notebook
    python docs/tutorials/mnist_cnn.py --data FOLDER      # genuine digits, some minutes

You will learn: the two lines that make a training loop private, how to ask for an epsilon instead of a noise level, how
to read epsilon while training, and how to stop when the budget is spent.
"""

# %% [1] An ordinary script: a model, an optimiser, a loader. Nothing here knows of privacy.
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore.examples import data

options = data.tutorial_options(epochs=5)
digits = data.load("mnist", options.data, data.TUTORIAL_EXAMPLES)
batch_size = 256
print(f"{len(digits.train)} images ({digits.label} data)")

model = nn.Sequential(
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(digits.train, batch_size=batch_size, shuffle=True)

# %% [2] Two lines make it private. epsilon and delta come first: the smallest noise multiplier that keeps `epochs`
# rounds within them is found, to 1e-6, never on the wrong side. delta should be well below one over the number of
# people. sample_rate and expected_batch_size are *public* numbers. Leave them out and they are derived from the length
# of the data: then the number of examples is no secret.
from dpcore import PrivacyEngine  # noqa: E402

EPSILON, DELTA = 2.0, 1e-5
engine = PrivacyEngine(seed=options.seed)
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=options.epochs,
    max_grad_norm=1.0,
    sample_rate=batch_size / len(digits.train),
    expected_batch_size=batch_size,
)
print(f"noise multiplier {optimizer.noise_multiplier:.4f} for epsilon {EPSILON} at delta {DELTA:g}")

# %% [3] The loop is unchanged. The loader now draws Poisson samples: every example is in a batch with probability
# sample_rate, by itself, so batches differ in size and may be empty; an empty one is still a noisy, accounted step.
start = time.perf_counter()
sizes = []
for epoch in range(1, options.epochs + 1):
    for x, y in data.progress(loader):
        sizes.append(len(x))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    spent = engine.get_epsilon(DELTA)
    print(
        f"epoch {epoch}: epsilon {spent:.3f}, test accuracy {data.accuracy(model, digits.test):.4f}, "
        f"{time.perf_counter() - start:.1f} s ({digits.label} data)",
        flush=True,
    )
print(f"batch sizes {min(sizes)} … {max(sizes)}, expected {batch_size}")

# %% [4] Early stop: ask at any time whether one more step fits the budget. The noise was chosen for all the epochs, so
# now it does not; a step all the same would raise BudgetError and release nothing.
print(engine)
assert engine.get_epsilon(DELTA) <= EPSILON and not engine.within_budget(optimizer)

# %% [5] The trained network is an ordinary module again.
plain = model.to_standard_module()
assert set(plain.state_dict()) == {f"{i}.{part}" for i in (0, 3, 7, 9) for part in ("weight", "bias")}
