"""Plain training in several processes, without DP: torch's DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.ranks import Rank, shard
from harness.contract import Setting, Unsupported
from harness.tasks import Task


class Ranked(Rank):
    """Every rank's gradient of its share's summed losses; the ranks' mean, times their number, over B."""

    def __init__(self, parallel: str) -> None:
        """``parallel``: ``ddp`` or ``fsdp2``."""
        self.parallel = parallel

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private:
            raise Unsupported("PyTorch alone has no differential privacy.")
        self.configure(task, setting)
        self.model = self.network(initial)
        self.losses = torch_models.loss_fn(task)
        self.wrapped = shard(self.model) if self.parallel == "fsdp2" else DistributedDataParallel(self.model)
        self.optimizer = self.optimizer_of()

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        x, y = self.batch(self.share(indices))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.losses(self.wrapped(x), y).sum()
        (loss * (dist.get_world_size() / self.setting.batch_size)).backward()
        self.optimizer.step()
