"""A pretrained encoder fine-tuned privately on film reviews: MiniLM-L6 by Hugging Face's classes, dpcore or Opacus.

    dpbench data fetch imdb-wordpiece                                     # reviews and weights; prints the folder
    python -m dpcore.examples.minilm_imdb --data FOLDER --train lora      # some minutes on one core
    python -m dpcore.examples.minilm_imdb --smoke                         # seconds: a small random encoder, synthetic

Needs ``transformers``, for ``--train lora`` ``peft``, for ``--library opacus`` ``opacus``. FOLDER holds the reviews as
word pieces (train_x.npy, ...) and the encoder's config.json and model.safetensors.

``--train full``: all weights. ``lora``: adapters of rank 8 beside all linear maps of the blocks. ``bias``: the biases
alone (BiTFiT). A new head on the mean over a review's tokens is trained in each of them. Both libraries get the same
starting weights, noise multiplier, bound, sample rate and number of steps; noise and Poisson batches are each library's
own. Nothing is dropped out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore.accountants.utils import get_noise_multiplier
from dpcore.examples import data

LIBRARIES = ("dpcore", "opacus")
TRAINED = ("full", "lora", "bias")
LEARNING_RATE = {"full": 5e-4, "lora": 3e-3, "bias": 5e-3}
"""Where to begin; it falls to zero over the steps."""
RANK = 8
SMOKE_TOKENS, SMOKE_VOCABULARY = 16, 120


class Classifier(nn.Module):
    """Tokens [B, T] -> logits [B, 2]: the encoder, the mean over the tokens that are no padding (id 0), a head."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens.ne(0)
        # Opacus needs positions and kinds of tokens with a batch dimension; the encoder's own have none.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self.encoder(
            input_ids=tokens, attention_mask=own.long(), position_ids=places, token_type_ids=torch.zeros_like(tokens)
        ).last_hidden_state
        mean = (states * own.unsqueeze(-1)).sum(1) / own.sum(1, keepdim=True)
        logits: Tensor = self.head(mean)
        return logits


def classifier(folder: Path | None, train: str) -> Classifier:
    """Return the network with the weights in ``folder`` (None: a small random encoder) and what ``train`` says trained.

    The head, and the adapters of ``lora``, start at random: seed torch before.
    """
    from transformers import BertConfig, BertModel

    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if folder is None:
        sizes = {"vocab_size": SMOKE_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        encoder = BertModel(BertConfig(**sizes, intermediate_size=64, **without), add_pooling_layer=False)
    else:
        encoder = BertModel.from_pretrained(folder, add_pooling_layer=False, local_files_only=True, **without)
    width: int = encoder.config.hidden_size
    if train == "lora":
        from peft import LoraConfig, get_peft_model

        maps = ["query", "key", "value", "dense"]
        encoder = get_peft_model(encoder, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=maps))
    elif train == "bias":
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(name.endswith(".bias"))
    return Classifier(encoder, width).train()


def reviews(options: argparse.Namespace) -> data.Data:
    """The first ``--examples`` training reviews (their order is mixed) and ``--test`` test reviews."""
    if options.data is None:
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 2, 256)
        tokens = rng.integers(10, SMOKE_VOCABULARY, (len(labels), SMOKE_TOKENS))
        tokens[:, ::4] = 5 + labels[:, None]
        both = TensorDataset(torch.from_numpy(tokens), torch.from_numpy(labels))
        return data.Data(both, both, "synthetic")
    train = _part(options.data, "train", 0, options.examples)
    return data.Data(train, _part(options.data, "test", options.first_test, options.test), "genuine imdb")


def _part(folder: Path, split: str, first: int, size: int) -> TensorDataset:
    tokens, labels = (np.load(folder / f"{split}_{kind}.npy")[first : first + size] for kind in "xy")
    return TensorDataset(torch.from_numpy(tokens).long(), torch.from_numpy(labels).long())


def _decays_linearly(optimizer: torch.optim.Optimizer, steps: int) -> list[int]:
    """Let the learning rate fall to zero over so many steps; the list gets an entry for each that was made.

    The steps are those of the user's optimizer: both libraries call it once for all pieces of a batch.
    """
    made: list[int] = []
    rates = [group["lr"] for group in optimizer.param_groups]

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        made.append(len(made))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * max(0.0, 1 - len(made) / steps)

    optimizer.register_step_post_hook(after)
    return made


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One training run; what there is to know about it."""
    found = reviews(options)
    size = len(found.train)
    delta = 1 / (2 * size)
    rate = min(1.0, options.batch_size / size)
    steps = options.epochs * len(DataLoader(found.train, batch_size=options.batch_size))
    noise = get_noise_multiplier(target_epsilon=options.epsilon, target_delta=delta, sample_rate=rate, steps=steps)

    torch.manual_seed(options.seed)
    model: nn.Module = classifier(options.data, options.train)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = data.accuracy(model, found.test) if options.before else None
    library = importlib.import_module(options.library)
    pieces = importlib.import_module(f"{options.library}.utils.batch_memory_manager").BatchMemoryManager
    engine = library.PrivacyEngine()
    inner = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    made = _decays_linearly(inner, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu, wall = time.process_time(), time.perf_counter()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=inner,
            data_loader=DataLoader(
                found.train,
                batch_size=options.batch_size,
                generator=torch.Generator().manual_seed(2 * options.seed),
            ),
            noise_multiplier=noise,
            max_grad_norm=options.max_grad_norm,
            noise_generator=torch.Generator().manual_seed(2 * options.seed + 1),
        )
        for _ in range(options.epochs):
            with pieces(data_loader=loader, max_physical_batch_size=options.piece, optimizer=optimizer) as batches:
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        epsilon = engine.get_epsilon(delta)
    assert len(made) == steps, f"{len(made)} steps were made, the noise is for {steps}"
    return {
        "library": options.library,
        "train": options.train,
        "seed": options.seed,
        "data": found.label,
        "accuracy": data.accuracy(model, found.test),
        "accuracy_before": before,
        "epsilon": float(epsilon),
        "delta": delta,
        "noise_multiplier": noise,
        "sample_rate": rate,
        "steps": steps,
        "examples": size,
        "test_examples": len(found.test),
        "first_test_example": options.first_test,
        "trained_parameters": sum(p.numel() for p in trained),
        "processor_seconds": cpu,
        "seconds": wall,
        "threads": torch.get_num_threads(),
        **{k: getattr(options, k) for k in ("epochs", "batch_size", "learning_rate", "max_grad_norm", "piece")},
        "versions": {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", "opacus")}
        if options.library == "opacus"
        else {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", "dpcore")},
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="FOLDER", help="as `dpbench data fetch imdb-wordpiece` makes it")
    source.add_argument("--smoke", action="store_true", help="a short run of a small random encoder, synthetic data")
    parser.add_argument("--library", choices=LIBRARIES, default="dpcore")
    parser.add_argument("--train", choices=TRAINED, default="lora")
    parser.add_argument("--seed", type=int, default=0, help="of head, adapters, batches and noise: not for a release")
    parser.add_argument("--examples", type=int, default=3072, help="reviews to train on")
    parser.add_argument("--test", type=int, default=2000, help="reviews to test on")
    parser.add_argument("--first-test", type=int, default=0, help="the first of them, so that tries have others")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=8.0, help="delta is half of one over the examples")
    parser.add_argument("--batch-size", type=int, default=128, help="expected; batches are Poisson samples")
    parser.add_argument("--piece", type=int, default=16, help="examples in memory at a time")
    parser.add_argument("--learning-rate", type=float, help=f"default: {LEARNING_RATE}")
    parser.add_argument("--max-grad-norm", type=float, default=0.1)
    parser.add_argument("--before", action="store_true", help="accuracy before training, too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the run as JSON")
    options = parser.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATE[options.train]
    if options.smoke:
        options.batch_size = min(options.batch_size, 64)
    return options


def main() -> None:
    options = parse()
    record = train(options)
    print(
        "{library}, {train}: {trained_parameters} parameters trained on {examples} reviews, {steps} steps; "
        "epsilon {epsilon:.3f} at delta {delta:.1e}, accuracy {accuracy:.4f} of {test_examples}, "
        "{processor_seconds:.0f} processor seconds ({data} data)".format(**record)
    )
    if options.write:
        temporary = options.write.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, options.write)


if __name__ == "__main__":
    main()
