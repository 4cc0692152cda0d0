"""Accuracy of trained weights on a test set: ``python -m frameworks._tools.evaluate``, in an environment with PyTorch.

The same code for every framework's weights, so that accuracies differ only where weights do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import numpy as np
import torch

from frameworks._shared.torch import models as torch_models
from harness.tasks import TASKS, Task

BATCH = 500
TOKEN_BATCH = 50


def evaluate(task: Task, parameters: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Fraction classified right (of tokens: the mean over examples of the share that is) and mean loss over
    x [n, *input_shape] (uint8 images are divided by 255), y [n, *label_shape]."""
    model = torch_models.build_model(task, parameters).eval()
    losses = torch_models.loss_fn(task)
    right, total = 0.0, 0.0
    size = BATCH if not task.label_shape else TOKEN_BATCH
    with torch.no_grad():
        for start in range(0, len(x), size):
            chunk = np.asarray(x[start : start + size])
            if chunk.dtype == np.uint8:
                chunk = chunk.astype(np.float32) / 255
            inputs, labels = torch_models.place(chunk, np.asarray(y[start : start + size]), "cpu")
            logits = model(inputs)
            right += float(torch_models.correct(task, logits, labels).double().sum())
            total += float(losses(logits, labels).double().sum())
    return {"accuracy": right / len(x), "loss": total / len(x)}


def main() -> None:
    """Prints {"accuracy": ..., "loss": ...} as JSON."""
    parser = argparse.ArgumentParser(description=evaluate.__doc__)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--parameters", required=True, help=".npz of canonical weights")
    parser.add_argument("--x", required=True, help=".npy of test inputs")
    parser.add_argument("--y", required=True, help=".npy of test labels")
    options = parser.parse_args()
    with np.load(options.parameters) as stored:
        parameters = {name: stored[name] for name in stored.files}
    x, y = np.load(options.x, mmap_mode="r"), np.load(options.y)
    print(json.dumps(evaluate(TASKS[options.task], parameters, x, y)))


if __name__ == "__main__":
    main()
