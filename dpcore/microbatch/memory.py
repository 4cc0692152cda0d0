"""Running out of memory: how errors say so, and what is given back before another attempt."""

from __future__ import annotations

import gc

import torch

from dpcore.rerun.heap import give_back

_SAID_BY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
"""Parts of the messages of RuntimeErrors with which torch's CPU allocator and NVIDIA's libraries say it."""


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, which fewer examples at once may not do."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY)


def give_back_everything(device: torch.device) -> None:
    """Free what a failed attempt left in circles of objects, and hand on to the system what allocators keep."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back()
