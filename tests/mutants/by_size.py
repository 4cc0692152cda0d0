"""Mutants that are wrong for some ids, lengths, depths and numbers of rows only, and whose noise comes again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from harness.contract import Setting
from harness.tasks import NOT_OWN, Task
from tests.mutants.exact import Exact, Sums
from tests.mutants.with_adam import Counting


class NoiseFromTheStartAgain(Counting):
    """Seeds the noise anew at step 100."""

    def update(self, rows: np.ndarray) -> None:
        if self.made == 100:
            self.generator.manual_seed(self.setting.seed)
        super().update(rows)


class SeedPlusTensor(Exact):
    """Every tensor has a stream of its own, whose seed is the next one's of the tensor before."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.streams = [torch.Generator().manual_seed(setting.seed + i) for i in range(len(self.trained))]

    def noise(self, examples: int) -> Sums:
        deviation = self.setting.noise_multiplier * self.setting.max_grad_norm
        streams = zip(self.trained.items(), self.streams, strict=True)
        return {name: deviation * torch.randn(p.shape, generator=stream) for (name, p), stream in streams}


class LogProbabilitiesInHalfPrecision(Exact):
    """Takes the logarithms of probabilities in bfloat16."""

    def gradients(self, row: int) -> Sums:
        self.model.zero_grad(set_to_none=True)
        logits, label = self.model(self.x[row : row + 1]), self.y[row : row + 1]
        found = F.log_softmax(logits, -1).bfloat16()
        labels = label.flatten()
        losses = F.nll_loss(found.flatten(0, -2).float(), labels, ignore_index=NOT_OWN, reduction="sum")
        (losses / (labels != NOT_OWN).sum().clamp(min=1)).backward()
        return {name: p.grad for name, p in self.trained.items()}


class ClipsRows(Exact):
    """Clips the gradient of every view by itself, before the mean over an example's."""

    def clip(self, gradients: Sums) -> Sums:
        return gradients

    def gradients(self, row: int) -> Sums:
        views = self.model[0](self.x[row : row + 1])
        found = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for view in views:
            self.model.zero_grad(set_to_none=True)
            F.cross_entropy(self.model[1:](view[None]), self.y[row : row + 1]).backward()
            clipped = super().clip({name: p.grad for name, p in self.trained.items()})
            found = {name: g + clipped[name] / len(views) for name, g in found.items()}
        return found


class UnitTwice(Exact):
    """Has the first unit of a batch in it twice, as a sampler of rows has a user: it adds up to twice C."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        return super().clipped_sum(np.concatenate([rows, rows[:1]]))


class CutsBatches(Exact):
    """Cuts a longer batch to the expected size, for shapes that do not change; the budget is that of Poisson batches.

    A unit may then push another one out.
    """

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        return super().clipped_sum(np.random.default_rng(0).permutation(rows)[: self.setting.batch_size])


class IdsOfOneByte(Exact):
    """Keeps ids in eight bits."""

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        super().place(x.astype(np.uint8).astype(np.int32), y)


class RowsOfTwoBytes(Exact):
    """Keeps row numbers in 16 bits."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices.astype(np.uint16).astype(np.int64), mask)


class OneNormForAllBlocks(Exact):
    """All blocks are given the norms of the first one."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        norms = [m for m in self.model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)][:-1]
        for i, norm in enumerate(norms[2:]):
            norm.forward = norms[i % 2].forward

    def gradients(self, row: int) -> Sums:
        found = super().gradients(row)
        return {name: torch.zeros_like(p) if found[name] is None else found[name] for name, p in self.trained.items()}


class LongTextsForgetTheTiedUse(Exact):
    """A table's gradient is that of the output alone where a text has more than 32 tokens."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.model.tokens.register_forward_hook(
            lambda module, inputs, output: output.detach() if output.shape[1] > 32 else output
        )


class LeavesUnknownWordsOut(Exact):
    """A word that the vocabulary does not know is nobody's to learn."""

    unknown = 2

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        super().place(x, np.where(y == self.unknown, NOT_OWN, y) if y.ndim > 1 else y)


class FixesTheFirstIds(Exact):
    """Padding, start and unknown words keep their vectors, as padding_idx has it."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.model.tokens.register_forward_hook(
            lambda module, inputs, output: torch.where((inputs[0] < 3)[..., None], output.detach(), output)
        )


class HalfPrecisionRows(Exact):
    """Keeps the clipped gradients of a batch of more than 384 rows in half precision."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        self.is_large = len(rows) > 384
        return super().clipped_sum(rows)

    def clip(self, gradients: Sums) -> Sums:
        clipped = super().clip(gradients)
        return {name: g.half().float() for name, g in clipped.items()} if self.is_large else clipped


VARIANTS: dict[str, type[Exact]] = {
    "noise-again": NoiseFromTheStartAgain,
    "seed-plus-tensor": SeedPlusTensor,
    "log-probabilities-bf16": LogProbabilitiesInHalfPrecision,
    "ids-of-one-byte": IdsOfOneByte,
    "rows-of-two-bytes": RowsOfTwoBytes,
    "one-norm": OneNormForAllBlocks,
    "long-texts": LongTextsForgetTheTiedUse,
    "unknown-words": LeavesUnknownWordsOut,
    "first-ids": FixesTheFirstIds,
    "half-rows": HalfPrecisionRows,
    "exact-views": Exact,
    "clips-rows": ClipsRows,
    "unit-twice": UnitTwice,
    "cuts-batches": CutsBatches,
}
