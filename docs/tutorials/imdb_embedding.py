"""Tutorial 3: the engine without the loop: clipped sums, norms and one call per step, on IMDb reviews.

    python docs/tutorials/imdb_embedding.py                   # seconds, synthetic; or cell by cell, as a notebook
    python docs/tutorials/imdb_embedding.py --data FOLDER     # genuine reviews

You will learn: what DP-SGD computes, by looking at it; the fastest way to train (`Engine`); how to sample yourself; and
how to account for it.
"""

# %% [1] Words to vectors, their mean, two classes.
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore import Engine, GaussianNoise, clipped_sum
from dpcore.accountants import PRVAccountant
from dpcore.examples import data
from dpcore.utils.uniform_sampler import UniformWithReplacementSampler

options = data.tutorial_options(epochs=5)
reviews = data.load("imdb", options.data, data.TUTORIAL_EXAMPLES)
x, y = reviews.train.tensors
batch_size = 512 if options.data else 256
print(f"{len(x)} reviews ({reviews.label} data)")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCABULARY, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).mean(1))
        return logits


# %% [2] One loss per example, never a mean: a mean would mix the examples before they are clipped.
def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


# %% [3] The heart of it: the sum of the clipped gradients. Adding or removing one example moves it by at most
# `sensitivity`, whatever that example is; this is what the noise has to hide.
model = Words()
result = clipped_sum(model, loss_fn, x[:64], y[:64], max_grad_norm=0.1)
print(
    f"gradient norms {result.norms.min():.3f} … {result.norms.max():.3f}; clipped: {(result.factors < 1).sum()} of 64"
)
without = clipped_sum(model, loss_fn, x[1:64], y[1:64], max_grad_norm=0.1)
moved = torch.stack([(result.sums[n] - without.sums[n]).square().sum() for n in result.sums]).sum().sqrt()
print(f"without the first example the sum moves by {moved:.4f}; the sensitivity is {result.sensitivity}")
assert moved <= result.sensitivity * (1 + 1e-5)

# %% [4] Built once, used for every batch: Engine clips, adds noise, divides by the public batch size and updates.
NOISE, DELTA = 1.0, 1e-5
engine = Engine(
    model,
    loss_fn,
    max_grad_norm=0.1,
    noise_multiplier=NOISE,
    expected_batch_size=batch_size,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
    noise=GaussianNoise(options.seed),
)
sampler = UniformWithReplacementSampler(
    num_samples=len(x), sample_rate=batch_size / len(x), seed=None if options.seed is None else options.seed + 1
)
accountant = PRVAccountant()

start = time.perf_counter()
for epoch in range(1, options.epochs + 1):
    for rows in sampler:
        engine.step(x[rows], y[rows])
        accountant.step(noise_multiplier=NOISE, sample_rate=sampler.sample_rate)
    print(
        f"epoch {epoch}: epsilon {accountant.get_epsilon(DELTA):.3f}, "
        f"test accuracy {data.accuracy(model, reviews.test):.4f}, "
        f"{time.perf_counter() - start:.1f} s ({reviews.label} data)",
        flush=True,
    )

# %% [5] The engine, and what was chosen for this model on this machine.
print(engine)
print(engine.explain())
