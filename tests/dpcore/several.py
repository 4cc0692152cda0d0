"""Launching several processes, and what they train together by the float64 reference in one."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from dpcore import reference
from dpcore.noise import GaussianNoise
from tests.dpcore import ranks


def launch(folder: Path, size: int, *checks: str, script: str = ranks.__file__) -> list[dict[str, Any]]:
    """What each rank found, by torchrun on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, script, str(folder), *checks],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def trained_alone(batches: list[list[int]], sigma: float, dtype: torch.dtype) -> torch.Tensor:
    """[steps, weights] of DP-SGD by the float64 reference on the union of the ranks' batches."""
    model = ranks.model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x, y, _ = ranks.data(dtype).tensors
    noise, history = GaussianNoise(seed=7), []
    for step, batch in enumerate(batches):
        truth = reference.clipped_sum(
            copy.deepcopy(model), lambda o, y: F.cross_entropy(o, y, reduction="none"), x[batch], y[batch], ranks.CLIP
        )
        flat = torch.cat([g.flatten() for g in truth.clipped.values()]).to(dtype)
        noise.add_(flat, sigma * ranks.CLIP, step)
        for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = g.view_as(p) / ranks.DIVISOR
        optimizer.step()
        history.append(ranks.weights(model))
    return torch.stack(history)


def union(reports: list[dict[str, Any]]) -> list[list[int]]:
    """The examples of each step over all ranks."""
    return [
        [i for part in parts for i in part] for parts in zip(*(report["batches"] for report in reports), strict=True)
    ]
