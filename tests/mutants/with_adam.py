"""Mutants whose optimizer is wrong: Adam's constants, its memory, its rate, and what it may not touch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from frameworks._shared.torch.optimizers import Warmup
from harness.contract import Setting
from harness.optimizer import AdamW
from harness.tasks import Task
from tests.mutants.exact import Exact, Sums


class GivesAdamTheSum(Exact):
    """Never divides by B: Adam's ratio hides it."""

    def divisor(self, examples: int) -> int:
        return 1


class NoiseOfTheMean(Exact):
    """Adds the noise of the mean, sigma C / B, to the sum: Adam's ratio hides that there is B times too little."""

    def noise(self, examples: int) -> Sums:
        return {name: noise / self.setting.batch_size for name, noise in super().noise(examples).items()}


class DecaysByTheGradient(Exact):
    """Adam with L2 instead of AdamW: the decay goes through the ratio."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.decay = self.optimizer.param_groups[0]["weight_decay"]
        self.optimizer.param_groups[0]["weight_decay"] = 0.0

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        share = self.decay * self.setting.batch_size
        sums = super().clipped_sum(rows)
        return {name: value + share * self.trained[name].detach() for name, value in sums.items()}


class SkipsTheWarmup(Exact):
    """AdamW at the full rate from the first step on."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if isinstance(setting.optimizer, AdamW):
            setting = dataclasses.replace(setting, optimizer=dataclasses.replace(setting.optimizer, warm_up=0))
        super().build(task, setting, initial)


class KeepsItsMemory(Exact):
    """A new build leaves Adam's moments as they were."""

    kept: Mapping[str, Any] | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if hasattr(self, "optimizer"):
            self.kept = self.optimizer.state_dict()["state"]
        super().build(task, setting, initial)
        if self.kept:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": self.kept, "param_groups": groups})


class Counting(Exact):
    """Knows how many steps it has made since the last build, and how many an epoch has."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.made = 0
        self.epoch_steps = -(-setting.dataset_size // setting.batch_size)

    def update(self, rows: np.ndarray) -> None:
        super().update(rows)
        self.made += 1


class Amsgrad(Exact):
    """AdamW that never forgets its largest mean of squares."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        for group in self.optimizer.param_groups:
            group["amsgrad"] = True


class WarmsUpByPieces(Exact):
    """Counts the pieces of a batch, 64 rows each, for the warm-up, and not the steps."""

    piece = 64

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        self.warm_up = [hook for hook in hooks if isinstance(hook, Warmup)]

    def update(self, rows: np.ndarray) -> None:
        for hook in self.warm_up:
            hook.made += max(0, -(-len(rows) // self.piece) - 1)
        super().update(rows)


class AdamPerEpoch(Counting):
    """Begins every epoch with an Adam that remembers nothing."""

    def update(self, rows: np.ndarray) -> None:
        if self.made % self.epoch_steps == 0:
            self.optimizer.state.clear()
        super().update(rows)


class CosineAfterTheWarmup(Counting):
    """Lets the rate fall after the warm-up, along a cosine over ten epochs."""

    def update(self, rows: np.ndarray) -> None:
        optimizer = self.setting.optimizer
        if isinstance(optimizer, AdamW) and 0 < optimizer.warm_up <= self.made:
            gone = (self.made - optimizer.warm_up) / (10 * self.epoch_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.setting.learning_rate * (1 + math.cos(math.pi * min(1.0, gone))) / 2
        super().update(rows)


class AdamAnewOnEmpty(Exact):
    """Takes an empty batch for the start of a training."""

    def update(self, rows: np.ndarray) -> None:
        if not len(rows):
            self.optimizer.state.clear()
        super().update(rows)


class DecaysTheFrozen(Exact):
    """Lets frozen weights decay with the others."""

    def update(self, rows: np.ndarray) -> None:
        super().update(rows)
        share = self.optimizer.param_groups[0]["lr"] * self.optimizer.param_groups[0].get("weight_decay", 0.0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1.0 - share)


class MomentsInHalfPrecision(Exact):
    """Keeps Adam's two means in bfloat16."""

    def update(self, rows: np.ndarray) -> None:
        super().update(rows)
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name].copy_(state[name].bfloat16())


class OneRowAtTheTasksEps(Exact):
    """Takes one row wherever Adam's eps is the task's: where its steps are timed, and not where gradients are read."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        optimizer = self.setting.optimizer
        is_own = isinstance(optimizer, AdamW) and optimizer == self.task.optimizer
        return super().clipped_sum(rows[:1] if is_own else rows)


VARIANTS: dict[str, type[Exact]] = {
    "sum-to-adam": GivesAdamTheSum,
    "mean-noise-to-adam": NoiseOfTheMean,
    "adam-l2": DecaysByTheGradient,
    "no-warm-up": SkipsTheWarmup,
    "keeps-moments": KeepsItsMemory,
    "amsgrad": Amsgrad,
    "warm-up-by-pieces": WarmsUpByPieces,
    "adam-per-epoch": AdamPerEpoch,
    "cosine": CosineAfterTheWarmup,
    "adam-anew-on-empty": AdamAnewOnEmpty,
    "decays-frozen": DecaysTheFrozen,
    "moments-bf16": MomentsInHalfPrecision,
    "one-row": OneRowAtTheTasksEps,
}
