"""accelerate's processes, which hold the whole model or shards of it: which of its ways dpcore can take part in.

For :mod:`dpcore.accelerate` and :mod:`dpcore.transformers`, whose Trainer has an accelerator inside.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.data_loader import worker_options
from dpcore.distributed import Ranks, replicate, share_of
from dpcore.errors import UnsupportedError

REPLICATING = ("NO", "MULTI_CPU", "MULTI_GPU")
"""accelerate's names of what was tried, or works through the same backends of torch as what was."""
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""FSDP2 alone of these leaves a rank the whole gradients of its own examples before they are reduced."""
PARALLEL = ("dp_shard_size", "tp_size", "cp_size", "sp_size")
"""What a ``ParallelismConfig`` calls the numbers of processes that share one model or one example."""


def shards(accelerator: Any) -> bool:
    """Return whether the accelerator puts models into shards by torch's ``fully_shard``."""
    return bool(getattr(accelerator, "is_fsdp2", False))


def check_processes(accelerator: Any) -> None:
    """Refuse an accelerator whose processes do not each work on whole examples, with the whole model or FSDP2's shards.

    Raises:
        UnsupportedError: with the reason and the remedy.
    """
    kind = accelerator.distributed_type.value
    if not shards(accelerator) and (kind in SHARDING or (accelerator.num_processes > 1 and kind not in REPLICATING)):
        raise UnsupportedError(
            f"The accelerator's processes work together as {kind}, which splits the model, or reduces gradients before "
            "they are clipped: use FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2)), or plain data parallelism "
            "on CPUs or GPUs (accelerate launch --multi_gpu, or torchrun, without a plugin)."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    known = ("dp_shard_size",) if shards(accelerator) else ()
    split = [name for name in PARALLEL if name not in known and (getattr(parallel, name, 1) or 1) > 1]
    if split:
        raise UnsupportedError(
            f"The accelerator's parallelism_config has {', '.join(split)} above 1: its processes share a model or an "
            "example, and none of them has an example's whole gradient. Leave parallelism_config out; every process "
            "then trains the whole model on examples of its own."
        )


def check_drawn(accelerator: Any, poisson: bool) -> None:
    """Refuse batches of sharded models that are not drawn as one for all processes.

    Raises:
        UnsupportedError: with the remedy.
    """
    if shards(accelerator) and not poisson:
        raise UnsupportedError(
            "poisson_sampling=False with FSDP2: the processes' shares would be batches of their own. Leave it out: one "
            "Poisson batch is drawn for all processes, and dealt out by position."
        )


def joined(accelerator: Any, module: nn.Module) -> Ranks | None:
    """Return the accelerator's processes, which train ``module`` together from now on.

    None where it has one, or where the module's shards say which they are.
    """
    return replicate(module) if accelerator.num_processes > 1 and not shards(accelerator) else None


def put_in_shards(accelerator: Any, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return both as the accelerator's FSDP2 plugin shards them.

    The accelerator keeps the model, and saves and loads its shards in its own form. It forgets the optimizer: dpcore's
    file has its state, and what saves an optimizer's shards would take a step of the private one to make it.
    """
    module, prepared = accelerator.prepare(module, optimizer)
    accelerator._optimizers.remove(prepared)
    return module, prepared.optimizer


def logical_loader(
    loader: DataLoader[Any], sampler: Any, share: int, poisson: bool, ranks: Ranks | None, drop_last: bool
) -> DataLoader[Any]:
    """Return a loader of logical batches over the data of ``loader``, of which a process gets ``share`` examples.

    A Poisson loader goes through the whole data, and its batch size is that of all processes together; any other
    loader goes through what is this process's own.
    """
    if ranks is not None and not poisson:
        sampler = share_of(sampler, loader.dataset, ranks)
    return DataLoader(
        loader.dataset,
        sampler=sampler,
        batch_size=share if ranks is None or not poisson else share * ranks.size,
        collate_fn=loader.collate_fn,
        **worker_options(loader),
        drop_last=drop_last and not poisson,
    )
