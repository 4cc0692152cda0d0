"""A small transformer, pre-trained on public reviews, fine-tuned privately on others with low-rank adapters (LoRA).

    python -m dpcore.examples.transformer_lora --data FOLDER       # genuine reviews; some minutes on two cores
    python -m dpcore.examples.transformer_lora --smoke             # seconds, synthetic

A few thousand of the training reviews play the public corpus: the whole network learns there, without privacy. The
others are private: the backbone is frozen, and only low-rank adapters, the last norm and the head are trained, with
noise. The epsilon protects the private reviews alone; the accuracy before that training is printed beside the others.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine
from dpcore.examples import data

TOKENS = 128
WIDTH, HEADS, LAYERS, RANK = 64, 4, 2, 4


class Adapted(nn.Module):
    """``linear`` frozen, plus a trained product of rank ``rank``: W x + b + U V x, with U = 0 at the start."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.up(self.down(x))
        return result


class Block(nn.Module):
    """Pre-norm attention and feed-forward on [B, T, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        heads = [m(z).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.query, self.key, self.value)]
        attended: Tensor = F.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Backbone(nn.Module):
    """Tokens [B, T] -> [B, T, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(data.VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return x


class Classifier(nn.Module):
    """Backbone, mean over time, norm, head: tokens [B, T] -> logits [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.backbone(tokens).mean(1)))
        return logits

    def adapt(self) -> None:
        """Freezes the backbone and puts adapters beside its attention's queries and values and its feed-forward."""
        self.backbone.requires_grad_(False)
        for block in self.backbone.blocks:
            for name in ("query", "value", "up", "down"):
                setattr(block, name, Adapted(getattr(block, name), RANK))


def pretrain(model: Classifier, tokens: Tensor, labels: Tensor, steps: int) -> None:
    """Ordinary training on the public reviews."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(steps):
        rows = torch.randint(len(tokens), (64,))
        loss = F.cross_entropy(model(tokens[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"public training, step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--public", type=int, default=4000, help="how many reviews are public")
    parser.add_argument("--pretraining-steps", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=512, help="expected; batches are Poisson samples")
    parser.add_argument("--learning-rate", type=float, default=0.005)
    options = parser.parse_args()
    if options.smoke:
        options.public, options.pretraining_steps = 64, min(options.pretraining_steps, 20)

    if options.seed is not None:
        torch.manual_seed(options.seed)
    reviews = data.load("imdb", options.data)
    x, y = reviews.train.tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    public, private = order[: options.public], order[options.public :]
    test = TensorDataset(reviews.test.tensors[0][:, -TOKENS:], reviews.test.tensors[1])

    start = time.perf_counter()
    classifier = Classifier()
    pretrain(classifier, x[public, -TOKENS:], y[public], options.pretraining_steps)
    classifier.adapt()
    model: nn.Module = classifier
    trained = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in trained)} of {sum(p.numel() for p in model.parameters())} parameters are trained")
    print(f"before private training: test accuracy {data.accuracy(model, test):.4f}", flush=True)

    batch_size = min(options.batch_size, len(private) // 4)
    engine = PrivacyEngine(seed=options.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=options.learning_rate),
        data_loader=DataLoader(TensorDataset(x[private, -TOKENS:], y[private]), batch_size=batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=1.0,
        sample_rate=batch_size / len(private),
        expected_batch_size=batch_size,
    )
    for epoch in range(1, options.epochs + 1):
        for tokens, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
        print(
            f"epoch {epoch}: epsilon {engine.get_epsilon(options.delta):.3f} at delta {options.delta:g}, "
            f"test accuracy {data.accuracy(model, test):.4f}, {time.perf_counter() - start:.0f} s "
            f"({reviews.label} data, noise multiplier {optimizer.noise_multiplier:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
