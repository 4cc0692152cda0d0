"""Tutorial 4: recurrent networks, checkpoints that continue bit for bit, and the check before you trust a model.

    python docs/tutorials/imdb_lstm.py                    # seconds, synthetic; or cell by cell, as a notebook
    python docs/tutorials/imdb_lstm.py --data FOLDER      # genuine reviews; a part of an epoch

You will learn: that `nn.LSTM` needs no replacement; how to test by experiment that a model keeps its examples apart;
how to stop and resume without using a noise value twice; and what happens when something is wrong.
"""

# %% [1] An embedding, an LSTM, the mean over time.
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine, PrivacyError
from dpcore.examples import data
from dpcore.validators import ModuleValidator, check_isolation

options = data.tutorial_options(steps=16)  # in all, half of them after the resume
reviews = data.load("imdb", options.data, data.TUTORIAL_EXAMPLES // 2)
batch_size = 128
print(f"{len(reviews.train)} reviews ({reviews.label} data)")
SEED = 5 if options.seed is None else options.seed  # seeded, so that two runs can be compared


class Sentiment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0].mean(1))
        return logits


# %% [2] Does one example's output depend on another's input? A list of classes cannot know; an experiment can.
assert ModuleValidator.is_valid(Sentiment())
check_isolation(Sentiment(), reviews.test[:4][0])
mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
try:
    check_isolation(mixing, torch.randn(5, 4))
except PrivacyError as finding:
    print(f"found: {finding}")


# %% [3] A run that can be stopped. `seed` makes it reproducible, for the comparison below; leave it out for a release.
def start() -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(SEED)
    model = Sentiment()
    engine = PrivacyEngine(seed=SEED)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(reviews.train, batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=batch_size / len(reviews.train),
        expected_batch_size=batch_size,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, steps: int) -> None:
    for _, (tokens, labels) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()


folder = tempfile.TemporaryDirectory()
path, half = Path(folder.name) / "checkpoint.pt", options.steps // 2
engine, model, optimizer, loader = start()
train(model, optimizer, loader, half)
engine.save_checkpoint(path=path, module=model, optimizer=optimizer, data_loader=loader)
train(model, optimizer, loader, half)
uninterrupted = [p.detach().clone() for p in model.parameters()]
print(f"after {options.steps} steps: {engine}, test accuracy {data.accuracy(model, reviews.test):.4f}")

# %% [4] Weights, optimiser, accountant, noise and sampler continue: the same parameters to the last bit.
engine, model, optimizer, loader = start()
engine.load_checkpoint(path=path, module=model, optimizer=optimizer, data_loader=loader)
train(model, optimizer, loader, half)
same = all(torch.equal(a, b) for a, b in zip(uninterrupted, model.parameters(), strict=True))
print(
    f"resumed run equals the uninterrupted one: {same}; epsilon {engine.get_epsilon(1e-4):.3f}, "
    f"test accuracy {data.accuracy(model, reviews.test):.4f} ({reviews.label} data)"
)
assert same
folder.cleanup()

# %% [5] Mistakes stop the run and say what would have leaked.
try:
    optimizer.zero_grad()
    optimizer.step()
except PrivacyError as refusal:
    print(f"refused: {refusal}")
