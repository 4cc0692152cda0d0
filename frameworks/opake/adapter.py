"""DP-SGD by Opake: clipped gradient, Gaussian noise, optimiser and accountant, as in its quick start."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torchopt
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.dpsgd.sampling import PoissonSampler
from opake.functional import empty_collate, make_functional
from opake.optimizers import adamw, sgd
from opake.random import key, split
from torch.utils.data import DataLoader, TensorDataset, default_collate

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch.adapter import TorchAdapter
from harness.contract import PARALLEL, Adapter, Setting, Unsupported
from harness.optimizer import SGD, AdamW
from harness.tasks import Task

GRADIENT_BYTES = 10 * 2**20
"""Per-example gradients of one piece of a batch: what stays in the processor's cache is 1.5 to 3.5 times as fast."""
ROWS = {"imdb-lstm": 4, "gpt2-lm": 4, "llama-lora": 16, "vit": 16, "wrn-16-2": 16, "llama-full": 2, "wrn-16-4": 4}
ROWS |= {"wrn-16-4-k4": 1, "wrn-16-4-k16": 1}
"""Examples of a piece where that was measured (NOTES.md); those of views by analogy."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``vmap``; or, in several processes, ``ddp``."""
    if variant in PARALLEL:
        from frameworks._shared.torch.ranks import Lead
        from frameworks.opake.ranked import Ranked

        return Lead(__file__, variant, Ranked())
    return Opake()


def _optimizer(setting: Setting) -> torchopt.base.GradientTransformation:
    chosen = setting.optimizer
    if isinstance(chosen, AdamW):
        betas, rate = (chosen.beta1, chosen.beta2), setting.learning_rate
        if chosen.warm_up:
            return adamw(lambda count: rate * chosen.share(int(count) + 1), betas, chosen.eps, chosen.weight_decay)
        return adamw(rate, betas, chosen.eps, chosen.weight_decay)
    return sgd(lr=setting.learning_rate)


class Opake(TorchAdapter):
    """``clipped_grad`` over the loss of one example, ``gaussian_noise``, and an optimizer: state goes into and out of
    each."""

    memory_format = torch.contiguous_format
    own_modules = torch_models.Own(table=torch.nn.Embedding)
    optimizers = (SGD.name, AdamW.name)

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("Opake is here for DP; its non-private twin is pytorch.")
        self.configure(task, setting)
        self.model = self.network(initial)
        losses = torch_models.loss_fn(task)
        forward, trained, frozen = make_functional(self.model, disable_autograd_tracking=True, partition_trainable=True)

        def loss(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return losses(forward({**weights, **frozen}, x[None]), y[None])[0]

        rows = ROWS.get(task.name, max(1, GRADIENT_BYTES // (4 * task.trained_count)))
        options = {"clipping_norm": setting.max_grad_norm, "normalize_by": setting.batch_size, "batch_argnums": (1, 2)}
        self.clipped, self.clip_state = clipped_grad(loss, **options)
        self.in_pieces, _ = clipped_grad(loss, **options, microbatch_size=rows)
        self.rows = rows
        self.weights = trained
        self.optimizer = _optimizer(setting)
        self.optimizer_state = self.optimizer.init(trained)
        self._seed(setting.seed)

    def _seed(self, seed: int) -> None:
        self.noise, self.noise_state = gaussian_noise(noise_multiplier=self.setting.noise_multiplier, key=key(seed))

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self._update(*self.batch(indices))

    def _update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        clipped = self.clipped if len(x) <= self.rows else self.in_pieces
        gradient, self.clip_state = clipped(self.weights, x, y, state=self.clip_state)
        noisy, self.noise_state = self.noise(self.joined(gradient), self.noise_state)
        updates, self.optimizer_state = self.optimizer.update(noisy, self.optimizer_state, params=self.weights)
        self.weights = torchopt.apply_updates(self.weights, updates)

    def joined(self, gradient: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the clipped sum of all processes: of this one, where it is alone."""
        return gradient

    def epoch(self, seed: int) -> int:
        """The quick start's loop: Poisson sampling by its own sampler, through PyTorch's loader."""
        order, noise = split(key(seed), num=2)
        rows = TensorDataset(self.x.cpu(), self.y.cpu())
        steps = -(-self.setting.dataset_size // self.setting.batch_size)
        sampler = PoissonSampler(rows, sample_rate=self.setting.sample_rate, n_steps=steps, key=order)
        self.noise, self.noise_state = gaussian_noise(noise_multiplier=self.setting.noise_multiplier, key=noise)
        for x, y in DataLoader(rows, batch_sampler=sampler, collate_fn=empty_collate(default_collate)):
            self._update(x.to(self.device), y.to(self.device))
        return steps

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        try:
            import opake.dpsgd.accounting as accounting
        except TypeError:  # no release of Python 3.11 can import it (NOTES.md)
            return None
        one = accounting.poisson(accounting.gaussian(self.setting.noise_multiplier), self.setting.sample_rate)
        return float((one * steps).epsilon_at(delta))
