"""Choices that the user need not make: how each parameter's norm is taken, and how many examples go through at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from dpcore.grad_sample.tape import Use

# What a micro-batch leaves behind should still be in the last-level cache when its norms and sums are taken. Every
# piece costs some 0.5 ms of operator starts whatever its size, so smaller pieces that fit a smaller cache were slower.
CPU_STASH_BYTES = 32 * 2**20
CPU_FEWEST_EXAMPLES = 16
CPU_FEWEST_IN_A_LOOP = 64
CUDA_FREE_FRACTION = 0.25


@dataclass(frozen=True)
class Choice:
    """How one parameter's contribution is computed: ``ghost`` (norm without per-sample gradients, then a weighted
    contraction) or ``keep`` (per-sample gradients, formed once and used for both)."""

    param: Parameter
    uses: tuple[Use, ...]
    method: str


def choose(uses: Sequence[Use]) -> list[Choice]:
    """One choice per parameter that was used. A parameter used more than once has cross terms between its uses, which
    only its per-sample gradient contains: it is kept."""
    by_param: dict[Parameter, list[Use]] = {}
    for use in uses:
        if use.grad is not None:
            for param in use.params:
                by_param.setdefault(param, []).append(use)
    return [
        Choice(param, tuple(of), "ghost" if len(of) == 1 and of[0].ghost_is_cheaper(param) else "keep")
        for param, of in by_param.items()
    ]


def stash_bytes(choices: Sequence[Choice], uses: Sequence[Use], batch_size: int) -> float:
    """Bytes per example of inputs, output gradients and kept per-sample gradients."""
    kept = sum(choice.param.nbytes for choice in choices if choice.method == "keep")
    return kept + sum(use.stash_bytes() for use in uses) / batch_size


def physical_batch_size(bytes_per_example: float, uses: Sequence[Use], device: torch.device) -> int:
    """How many examples to process at once. The clipped sum is associative: the result does not depend on it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, int(CUDA_FREE_FRACTION * free / bytes_per_example))
    fewest = CPU_FEWEST_IN_A_LOOP if any(use.sequential for use in uses) else CPU_FEWEST_EXAMPLES
    return max(fewest, int(CPU_STASH_BYTES / bytes_per_example))
