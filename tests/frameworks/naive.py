"""Each example's own gradient by the slowest and plainest means: float64, one example at a time.

``python -m tests.frameworks.naive TASK OUT.npz`` writes them, for environments that have no PyTorch.
"""

from __future__ import annotations

import sys

import numpy as np

from harness.tasks import TASKS, Task, initial_parameters

EXAMPLES = 12


def pool(task: Task) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """EXAMPLES made-up examples, their labels, and starting weights."""
    rng = np.random.default_rng(20)
    if task.input_dtype == "int32":
        x = rng.integers(0, 10_004, (EXAMPLES, *task.input_shape), dtype=np.int32)
        x[:, :100] = 0  # padding: one token many times in one example
        x[:, 200:220] = 7
    else:
        x = rng.random((EXAMPLES, *task.input_shape), dtype=np.float32)
    return x, rng.integers(0, task.classes, EXAMPLES, dtype=np.int32), initial_parameters(task, 3)


def gradients(task: Task) -> np.ndarray:
    """float64 [EXAMPLES, parameters]: gradients of the examples of :func:`pool`, flat in the task's order."""
    import torch

    from frameworks import torch_models

    x, y, initial = pool(task)
    inputs, labels = torch_models.place(x, y, "cpu")
    if inputs.is_floating_point():
        inputs = inputs.double()
    model = torch_models.build_model(task, initial, torch.float64)
    parameters = list(torch_models.canonical_parameters(model, task).values())
    losses = torch_models.loss_fn(task)
    rows = []
    for i in range(EXAMPLES):
        loss = losses(model(inputs[i : i + 1]), labels[i : i + 1]).sum()
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]).numpy())
    return np.stack(rows)


if __name__ == "__main__":
    np.savez(sys.argv[2], gradients=gradients(TASKS[sys.argv[1]]))
