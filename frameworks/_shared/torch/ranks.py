"""Contestants that train in several processes: the adapter's own process is rank 0 and starts the others.

The harness speaks to rank 0 alone. What it asks for goes to every rank as it is, the whole batch included, and each
takes its share. gloo on one machine: what it takes says nothing about scaling.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task
from harness.worker.memory import settle
from harness.worker.process import die_with_parent, load_create

LONGEST_WAIT = timedelta(days=1)
"""A gate computes for minutes between two calls."""
END_SECONDS = 10.0
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Payload(TorchDispatchMode):
    """Bytes of the larger side of every collective, by its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        space, name = str(function).split(".")[:2]
        if space in ("c10d", "_c10d_functional") and name not in ("barrier", "wait_tensor"):
            plain = name.replace("_", "")
            kind = next((kind for kind in KINDS if kind.replace("_", "") in plain), "other")
            self.bytes[kind] += max(map(_bytes, (*args, made)))
        return made


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


class Rank(TorchAdapter):
    """One process's part: ``build`` and ``step`` are called on all ranks, with the same arguments."""

    optimizers = optimizers.NAMES
    memory_format = torch.contiguous_format  # FSDP2 takes no other one

    def share(self, indices: np.ndarray) -> np.ndarray:
        """This rank's rows of a batch, dealt by position, so that no two ranks' shares differ by more than one."""
        return indices[dist.get_rank() :: dist.get_world_size()]

    def optimizer_of(self) -> torch.optim.Optimizer:
        """The setting's, over this rank's part of the trained parameters."""
        made = optimizers.make(torch_models.trained_parameters(self.model), self.setting, of_sum=False)
        if isinstance(made, torch.optim.SGD):
            made.param_groups[0]["fused"] = False  # torch 2.13 knows no fused SGD of shards
        return made

    def synchronize(self) -> None:
        """Return when all ranks have done their work."""
        super().synchronize()
        dist.barrier()

    def exchanged(self, indices: np.ndarray, mask: np.ndarray | None) -> Mapping[int, Mapping[str, int]]:
        """Return what every rank gave to collectives in one more step; counting would slow the timed ones."""
        with Payload() as payload:
            self.step(indices, mask)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (os.getpid(), dict(payload.bytes)))
        return dict(everyone)

    def parameters(self) -> Mapping[str, np.ndarray]:
        """The whole weights, which all ranks put together."""
        found = torch_models.canonical_parameters(self.model, self.task)
        if not any(isinstance(p, DTensor) for p in found.values()):
            return torch_models.read_parameters(self.model, self.task)
        return dict(zip(found, _whole([*found.values()]), strict=True))


def _whole(parameters: Sequence[torch.Tensor]) -> Iterator[np.ndarray]:
    """Gather what ``fully_shard`` dealt by rows, all in one collective: a gate reads the weights a thousand times."""
    size = dist.get_world_size()
    shapes = [[part.shape for part in torch.empty(p.shape, device="meta").chunk(size)] for p in parameters]
    lengths = [sum(parts[r].numel() for parts in shapes if r < len(parts)) for r in range(size)]
    mine = torch.cat([p.detach().to_local().flatten() for p in parameters])  # type: ignore[attr-defined]
    everyone = torch.empty(size, max(lengths))
    dist.all_gather_into_tensor(everyone.view(-1), nn.functional.pad(mine, (0, max(lengths) - len(mine))))
    placed = [0] * size
    for parts in shapes:
        found = []
        for r, shape in enumerate(parts):
            found.append(everyone[r, placed[r] : placed[r] + shape.numel()].view(shape))
            placed[r] += shape.numel()
        yield torch.cat(found).numpy()


def shard(model: nn.Module) -> nn.Module:
    """``model`` with its parameters spread over all ranks by ``fully_shard``, as FSDP2's users do it: a unit for each
    child, and one for the rest. A child with a tied weight belongs to the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = Counter(p for child in model.children() for p in child.parameters())
    for child in model.children():
        parameters = [*child.parameters()]
        if parameters and all(held[p] == 1 for p in parameters):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Lead(Adapter):
    """Rank 0 for the harness: starts the others with the first ``build``, and all of them anew after a fault."""

    in_group: ClassVar[Lead | None] = None
    """The adapter of this process that has the process group, of which there is one."""

    def __init__(self, file: str, variant: str, rank: Rank) -> None:
        """``file``: the adapter's, whose ``create(variant)`` makes the same object in the other processes."""
        self.file, self.variant, self.rank = file, variant, rank
        self.optimizers, self.precisions = rank.optimizers, rank.precisions
        self.others: list[subprocess.Popen[bytes]] = []
        self.size = 0
        self.meeting: tempfile.TemporaryDirectory[str] | None = None
        self.data: tuple[np.ndarray, np.ndarray] | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.device != "cpu":
            raise Unsupported("its ranks meet over gloo, on processors.")
        if Lead.in_group is not self or self.size != setting.world_size:
            self._start(setting.world_size)
            if self.data is not None:
                self._together("place", *self.data)
        self._together("build", task, setting, dict(initial))

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.data = x, y
        self._together("place", x, y)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self._together("step", indices, mask)

    def exchanged(self, indices: np.ndarray, mask: np.ndarray | None) -> Mapping[int, Mapping[str, int]]:
        found: Mapping[int, Mapping[str, int]] = self._together("exchanged", indices, mask)
        return found

    def synchronize(self) -> None:
        self._together("synchronize")

    def parameters(self) -> Mapping[str, np.ndarray]:
        found: Mapping[str, np.ndarray] = self._together("parameters")
        return found

    def peak_memory(self) -> Memory:
        return self.rank.peak_memory()

    def epsilon(self, steps: int, delta: float) -> float | None:
        return self.rank.epsilon(steps, delta)

    def _together(self, name: str, *arguments: Any) -> Any:
        """Call a method of every rank. What a rank raises ends them all, so that none waits for the others."""
        try:
            if self.size > 1:
                dist.broadcast_object_list([(name, arguments)])
            return getattr(self.rank, name)(*arguments)
        except BaseException:
            self.stop()
            raise

    def _start(self, size: int) -> None:
        if Lead.in_group is not None:
            Lead.in_group.stop()
        self.meeting = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = self.meeting.name
        command = [sys.executable, "-m", "frameworks._shared.torch.ranks", self.file, self.variant, folder, str(size)]
        self.others = [subprocess.Popen([*command, str(number)], stdin=subprocess.DEVNULL) for number in range(1, size)]
        _join(folder, size, 0)
        Lead.in_group, self.size = self, size

    def stop(self) -> None:
        """End the other ranks."""
        Lead.in_group, self.size = None, 0
        for process in self.others:
            process.kill()
        for process in self.others:
            process.wait(END_SECONDS)
        self.others = []
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.meeting is not None:
            self.meeting.cleanup()


def _join(folder: str, size: int, number: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, world_size=size, rank=number, timeout=LONGEST_WAIT)


def _calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    heard: list[Any] = [None]
    with suppress(RuntimeError):  # rank 0 has gone
        while True:
            dist.broadcast_object_list(heard)
            yield heard[0]


def main() -> None:
    """Be one of the other ranks."""
    die_with_parent()
    file, variant, folder, size, number = sys.argv[1:]
    rank = load_create(Path(file))(variant).rank
    _join(folder, int(size), int(number))
    gc.freeze()  # so that to look for garbage takes no time
    for name, arguments in _calls():
        getattr(rank, name)(*arguments)
        if name == "build":
            settle()  # as the harness does in rank 0: what a rank merely keeps would hide what its steps add


if __name__ == "__main__":
    main()
