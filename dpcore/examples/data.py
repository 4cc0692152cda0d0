"""The examples' data: folders of arrays, or small generated stand-ins that are labelled *synthetic*.

A folder holds ``train_x.npy``, ``train_y.npy``, ``test_x.npy`` and ``test_y.npy``; ``dpbench data fetch`` makes such
folders of the genuine MNIST, CIFAR-10 and IMDb reviews (``dpbench data list`` says where).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
TOKENS, VOCABULARY = 256, 10_004
SMOKE_EXAMPLES = 256


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


def load(name: str, folder: Path | None) -> Data:
    """``mnist``, ``cifar10`` or ``imdb`` from ``folder``; without a folder small synthetic data of the same shapes.

    The generated labels depend on the inputs, so that training can learn something.
    """
    if folder is None:
        rng = np.random.default_rng(0)
        return Data(_synthetic(name, rng), _synthetic(name, rng), "synthetic")
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


def _synthetic(name: str, rng: np.random.Generator) -> TensorDataset:
    if name in SHAPES:
        y = rng.integers(0, 10, SMOKE_EXAMPLES)
        x = rng.integers(0, 200, (SMOKE_EXAMPLES, *SHAPES[name]), dtype=np.uint8)
        for row, label in zip(x, y, strict=True):
            row[:, 2 * label : 2 * label + 3] = 255
        return _tensors(x, y)
    y = rng.integers(0, 2, SMOKE_EXAMPLES)
    x = rng.integers(100, VOCABULARY, (SMOKE_EXAMPLES, TOKENS)).astype(np.int32)
    x[:, ::4] = 10 + y[:, None]
    return _tensors(x, y)


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
