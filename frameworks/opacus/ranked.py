"""Opacus in several processes: its optimiser of copies (DDP), and its prototype for FSDP2 (ghost clipping)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import wrap_model
from opacus.layers import DPLSTM
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.fsdp_utils import FSDP2Wrapper

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.ranks import Rank
from frameworks.opacus.criterion import Criterion
from harness.contract import Setting, Unsupported
from harness.tasks import Task, TiedHead


class Ranked(Rank):
    """The pieces that ``PrivacyEngine.make_private`` puts together for several processes, with its B over the ranks."""

    own_modules = torch_models.Own(lstm=DPLSTM, table=torch.nn.Embedding, views=False)

    def __init__(self, parallel: str) -> None:
        """``parallel``: ``ddp`` or ``fsdp2``."""
        self.is_sharded = parallel == "fsdp2"

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("Opacus only trains with differential privacy; its non-private twin is pytorch.")
        if self.is_sharded and any(isinstance(layer, TiedHead) for layer in task.layers):
            raise Unsupported("Opacus 1.6.0 cannot: its FSDP2Wrapper shards a tied weight twice, which torch refuses.")
        self.configure(task, setting)
        self.model = self.network(initial)
        module = (
            FSDP2Wrapper(self.model) if self.is_sharded else DifferentiallyPrivateDistributedDataParallel(self.model)
        )
        mode = "ghost_fsdp" if self.is_sharded else "hooks"
        extra = {"max_grad_norm": setting.max_grad_norm} if self.is_sharded else {}
        self.wrapped = wrap_model(module, mode, batch_first=True, loss_reduction="mean", **extra)
        self.optimizer = get_optimizer_class("flat", distributed=True, grad_sample_mode=mode)(
            self.optimizer_of(),
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            expected_batch_size=setting.batch_size / dist.get_world_size(),
            loss_reduction="mean",
            generator=torch.Generator().manual_seed(setting.seed),
        )
        self.loss = Criterion(task, "mean")
        if self.is_sharded:
            self.loss = DPLossFastGradientClipping(self.wrapped, self.optimizer, self.loss, loss_reduction="mean")

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        mine = self.share(indices)
        if len(mine):
            x, y = self.batch(mine)
            self.loss(self.wrapped(x), y).backward()
        elif self.is_sharded:
            # Its hooks raise on an empty batch, and the other ranks wait for this one's part in gathering weights: an
            # example whose gradient is zero.
            x, y = self.batch(np.zeros(1, dtype=np.int64))
            self.loss(0.0 * self.wrapped(x), y).backward()
        else:
            for p in self.optimizer.params:  # what the hooks leave behind for an empty batch
                p.grad_sample = p.new_zeros((0, *p.shape))
        self.optimizer.step()
