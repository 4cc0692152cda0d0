"""dpcore in several processes, as its users have it: ``make_private`` of copies or of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine, native
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel
from dpcore.errors import UnsupportedError
from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.ranks import Rank, shard
from harness.contract import Setting, Unsupported
from harness.tasks import Task


class Ranked(Rank):
    """The wrapped model and the optimiser between the lines of an ordinary loop."""

    def __init__(self, parallel: str) -> None:
        """``parallel``: ``ddp`` or ``fsdp2``."""
        self.parallel = parallel

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("dpcore only trains with differential privacy; its non-private twin is pytorch.")
        try:
            native.build()
        except native.NativeBuildError as error:
            raise Unsupported(str(error)) from None
        self.configure(task, setting)
        self.model = self.network(initial)
        self.losses = torch_models.loss_fn(task)
        is_sharded = self.parallel == "fsdp2"
        module = shard(self.model) if is_sharded else DifferentiallyPrivateDistributedDataParallel(self.model)
        try:
            self.wrapped, self.private, _ = PrivacyEngine(seed=setting.seed).make_private(
                module=module,
                optimizer=self.optimizer_of(),
                # The harness draws the batches: of the loader only its length is used.
                data_loader=DataLoader(TensorDataset(torch.zeros(setting.dataset_size)), setting.batch_size),
                noise_multiplier=setting.noise_multiplier,
                max_grad_norm=setting.max_grad_norm,
                sample_rate=setting.sample_rate,
                expected_batch_size=setting.batch_size,
                check_batches=False,
            )
        except UnsupportedError as error:
            raise Unsupported(str(error)) from None

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        x, y = self.batch(self.share(indices))
        self.private.zero_grad()
        self.losses(self.wrapped(x), y).mean().backward()
        self.private.step()
