"""The examples' data: folders of arrays, or small generated stand-ins that are labelled *synthetic*.

A folder holds ``train_x.npy``, ``train_y.npy``, ``test_x.npy`` and ``test_y.npy``; ``dpbench data fetch`` makes such
folders of the genuine MNIST, CIFAR-10 and IMDb reviews (``dpbench data list`` says where).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
TOKENS, VOCABULARY = 256, 10_004
SMOKE_EXAMPLES = 256
TUTORIAL_EXAMPLES = 2048


@dataclass(frozen=True)
class Data:
    """``train`` and ``test``: x float32 [n, channels, height, width] in 0 … 1, or int64 tokens [n, 256]; y int64 [n].

    ``label`` says which data these are, and belongs beside every figure that comes from them.
    """

    train: TensorDataset
    test: TensorDataset
    label: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--data FOLDER`` or ``--smoke``, of which one is required, and ``--seed``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="FOLDER", help="genuine data: train_x.npy, train_y.npy, test_…")
    source.add_argument("--smoke", action="store_true", help="a short run on generated (synthetic) data")
    parser.add_argument("--seed", type=int, default=None, help="reproducible; without it noise and batches are secret")


def tutorial_options(**defaults: int) -> argparse.Namespace:
    """``data``, ``seed`` and a tutorial's own options: of the command line, or the defaults where cells are run."""
    main = sys.modules["__main__"]
    parser = argparse.ArgumentParser(
        description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="genuine data: train_x.npy, train_y.npy, test_…")
    parser.add_argument("--smoke", action="store_true", help="generated (synthetic) data; so, too, without --data")
    parser.add_argument("--seed", type=int, default=None, help="reproducible; without it noise and batches are secret")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    is_script = getattr(main, "__file__", None) == sys.argv[0]
    return parser.parse_args(None if is_script else [])


def load(name: str, folder: Path | None = None, examples: int = SMOKE_EXAMPLES) -> Data:
    """``mnist``, ``cifar10`` or ``imdb`` from ``folder``; without a folder synthetic data of the same shapes.

    The generated labels depend on the inputs, so that training can learn something. ``examples``: how many there are
    of them, for training and again for testing.
    """
    if folder is None:
        rng = np.random.default_rng(0)
        return Data(_synthetic(name, rng, examples), _synthetic(name, rng, examples), "synthetic")
    arrays = {}
    for part in ("train_x", "train_y", "test_x", "test_y"):
        path = folder / f"{part}.npy"
        if not path.exists():
            raise SystemExit(f"--data {folder} holds no {path.name}; make the folder with `dpbench data fetch {name}`.")
        arrays[part] = np.load(path)
    return Data(
        _tensors(arrays["train_x"], arrays["train_y"]), _tensors(arrays["test_x"], arrays["test_y"]), f"genuine {name}"
    )


def _tensors(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    inputs = torch.from_numpy(x)
    inputs = inputs.float() / 255 if x.dtype == np.uint8 else inputs.long()
    return TensorDataset(inputs, torch.from_numpy(y).long())


def _synthetic(name: str, rng: np.random.Generator, examples: int) -> TensorDataset:
    if name in SHAPES:
        y = rng.integers(0, 10, examples)
        x = rng.integers(0, 200, (examples, *SHAPES[name]), dtype=np.uint8)
        for row, label in zip(x, y, strict=True):
            row[:, 2 * label : 2 * label + 3] = 255
        return _tensors(x, y)
    y = rng.integers(0, 2, examples)
    x = rng.integers(100, VOCABULARY, (examples, TOKENS)).astype(np.int32)
    x[:, ::4] = 10 + y[:, None]
    return _tensors(x, y)


def progress(loader: DataLoader[Any], seconds: float = 10.0) -> Iterator[Any]:
    """The batches of ``loader``, with a line now and then on how far it is."""
    start = said = time.perf_counter()
    for step, batch in enumerate(loader, 1):
        yield batch
        if time.perf_counter() - said > seconds:
            said = time.perf_counter()
            print(f"  step {step} of {len(loader)}, {said - start:.0f} s", flush=True)


def accuracy(model: nn.Module, test: TensorDataset, batch_size: int = 500) -> float:
    """Fraction of ``test`` whose largest output is the label's; the module is left in the mode it was in."""
    was_training = model.training
    model.eval()
    x, y = test.tensors
    with torch.no_grad():
        right = sum(
            int((_outputs(model, x[i : i + batch_size]).argmax(1) == y[i : i + batch_size]).sum())
            for i in range(0, len(x), batch_size)
        )
    model.train(was_training)
    return right / len(x)


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    device = next(model.parameters()).device
    outputs: Tensor = model(x.to(device)).cpu()
    return outputs
