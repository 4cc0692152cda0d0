"""Sentiment of IMDb reviews by an LSTM, to a target epsilon.

    python -m dpcore.examples.imdb_lstm --data FOLDER          # genuine reviews; some minutes on two cores
    python -m dpcore.examples.imdb_lstm --smoke                # seconds, synthetic

Everything is ordinary PyTorch: ``nn.Embedding`` and ``nn.LSTM`` are used as they are.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.examples import data


class Sentiment(nn.Module):
    """Tokens [B, T] -> logits [B, 2]: embedding, LSTM, mean over time, linear."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states.mean(1))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=512, help="expected; batches are Poisson samples")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    options = parser.parse_args()

    if options.seed is not None:
        torch.manual_seed(options.seed)
    reviews = data.load("imdb", options.data)
    batch_size = min(options.batch_size, len(reviews.train) // 4)
    model: nn.Module = Sentiment()
    engine = PrivacyEngine(seed=options.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.learning_rate),
        data_loader=DataLoader(reviews.train, batch_size=batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
        # Public numbers: the size of this data set is published, so nothing is leaked by using it.
        sample_rate=batch_size / len(reviews.train),
        expected_batch_size=batch_size,
    )
    start = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        for tokens, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
        print(
            f"epoch {epoch}: epsilon {engine.get_epsilon(options.delta):.3f} at delta {options.delta:g}, "
            f"test accuracy {data.accuracy(model, reviews.test):.4f}, {time.perf_counter() - start:.0f} s "
            f"({reviews.label} data, noise multiplier {optimizer.noise_multiplier:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
