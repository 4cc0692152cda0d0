"""What bfloat16 products round away, by the reference and by PyTorch's own mixed precision, with torch: ``python -m
tests.support.rounding OUT`` writes, for each small task, how far either is from the float64 gradient, over its length.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch

from frameworks._shared.torch import models as torch_models
from frameworks._tools import bfloat16
from harness.tasks import GATE_TASKS, Task, in_bfloat16
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import pool as gate_pool

ROWS = 16


def gradient(task: Task, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the summed losses as one float64 vector."""
    model = copy.deepcopy(model)
    torch_models.loss_fn(task)(model(x), y).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad])


def distances(task: Task) -> dict[str, float]:
    """Return the relative distances from the float64 gradient of some rows."""
    x, y = (value[:ROWS] for value in torch_models.place(*gate_pool.pool(task), "cpu"))
    weights = gate_cases.starting_weights(task)
    full, single = (torch_models.build_model(task, weights, kind) for kind in (torch.float64, torch.float32))
    wide = x.double() if x.is_floating_point() else x
    exact = gradient(task, full, wide, y)
    with bfloat16.arithmetic(task):
        unchanged = gradient(task, full, wide, y)
    with bfloat16.arithmetic(in_bfloat16(task)):
        rounded = gradient(task, full, wide, y)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradient(task, single, x, y)
    apart = {"float32": unchanged, "reference": rounded, "autocast": mixed}
    return {name: float((value - exact).norm() / exact.norm()) for name, value in apart.items()}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    small = {name: task for name, task in GATE_TASKS.items() if not name.endswith("-bf16")}
    out.write_text(json.dumps({name: distances(task) for name, task in small.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
