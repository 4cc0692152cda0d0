"""DP-SGD by dpcore's LazyEngine: the noise of a table's row is drawn when the row is next read, or must be shown."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from dpcore import GaussianNoise
from dpcore.errors import UnsupportedError
from dpcore.lazy_tables import LazyEngine
from dpcore.lazy_tables.engine import RowsOf
from frameworks.dpcore.adapter import Dpcore
from harness.contract import NO_OWN_LOOP, Setting, Unsupported
from harness.optimizer import SGD
from harness.tasks import FLOAT32, Bags, Embedding, Task


class Lazy(Dpcore):
    """Brings all rows up to date in ``synchronize``, which is inside the clock at the end of every timed stretch.

    Its user does so once per checkpoint. A turn has ``turn_steps`` of framework.toml or some more, and pays a whole
    flush: a time is an upper bound of what a step takes in a longer run.
    """

    optimizers = (SGD.name,)
    precisions = (FLOAT32,)

    def __init__(self) -> None:
        super().__init__(kernels=True, graphs=False)
        self.lazy: LazyEngine | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        tables = tables_of(task)
        if not tables:
            raise Unsupported("its task has no tables that are read by ids, for which alone noise is drawn later.")
        self.prepare(setting)
        self.configure(task, setting)
        self.model = self.network(initial)
        try:
            self.lazy = LazyEngine(
                self.model,
                self.losses_of_rows(),
                tables=tables,
                optimizer=self.optimizer(),
                max_grad_norm=setting.max_grad_norm,
                noise_multiplier=setting.noise_multiplier,
                expected_batch_size=setting.batch_size,
                noise=GaussianNoise(setting.seed),
            )
        except UnsupportedError as error:
            raise Unsupported(str(error)) from None

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        assert self.lazy is not None
        self.lazy.step(*self.batch(indices))

    def synchronize(self) -> None:
        if self.lazy is not None:
            self.lazy.flush()

    def parameters(self) -> Mapping[str, np.ndarray]:
        self.synchronize()  # else rows that wait are hidden
        return super().parameters()

    def epoch(self, seed: int) -> int:
        raise Unsupported(NO_OWN_LOOP)


def tables_of(task: Task) -> dict[str, RowsOf | None]:
    """Return the names of a network's tables in the model, and how the rows that a batch reads are found in it."""
    match task.layers[0]:
        case Embedding(name):
            return {name: None}
        case Bags() as bags:
            starts = range(bags.counts, bags.counts + len(bags.maps) * bags.ids, bags.ids)
            return {
                part.name: partial(_columns, first=first, count=bags.ids)
                for part, first in zip(bags.maps, starts, strict=True)
            }
    return {}


def _columns(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return one field's ids, without the counts and the ids of other tables."""
    return x[:, first : first + count]
