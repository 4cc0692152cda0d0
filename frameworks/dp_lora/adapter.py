"""DP-SGD on LoRA by dp-lora: PEFT's model under its hooks, its optimizer, its accountant."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from dp_lora import DPLoRAEngine, DPOptimizer, GradSampleModule, PrivacyAccountant
from dp_lora.grad_sample import GhostClippingModule
from peft import LoraConfig, PeftModel, get_peft_model

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import TorchAdapter
from frameworks._shared.torch.transformer import LoraLinear
from harness.contract import Adapter, Setting, Unsupported
from harness.network import LORA_SCALE
from harness.tasks import Task

METHOD = "vanilla"
"""Both matrices of an adapter are trained; its default, ``ffa``, freezes the first."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``hooks``, ``mean-loss`` or ``ghost``."""
    return DpLora(variant)


class DpLora(TorchAdapter):
    """The pieces that ``DPLoRAEngine.make_private`` puts together, with the exact expected batch size."""

    memory_format = torch.contiguous_format
    optimizers = optimizers.NAMES

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("dp-lora only trains with differential privacy; its non-private twin is pytorch.")
        if not any(name.endswith("lora_a") for name in task.trained_parameters):
            raise Unsupported("dp-lora trains adapters of LoRA alone: it raises where a model has none.")
        self.configure(task, setting)
        self.losses = torch_models.loss_fn(task)
        self._make(initial)
        hooks = GhostClippingModule if self.variant == "ghost" else GradSampleModule
        self.hooks = hooks(self.model, method=METHOD)
        self.optimizer = DPOptimizer(
            self._inner(),
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            expected_batch_size=setting.batch_size,
            generator=torch.Generator(self.device).manual_seed(setting.seed),
        )
        self.own = None

    def _make(self, initial: Mapping[str, np.ndarray]) -> None:
        """Sets the model, one of PEFT's, and its parameters under the canonical names."""
        plain = self.network(initial)
        self.canonical = torch_models.canonical_parameters(plain, self.task)
        self.model = as_peft(plain)
        for name in self.task.trained_parameters:  # PEFT freezes all but its own, a head as well
            self.canonical[name].requires_grad_(True)

    def _inner(self) -> torch.optim.Optimizer:
        return optimizers.make(torch_models.trained_parameters(self.model), self.setting, of_sum=False)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.optimizer.zero_grad()
        if len(indices) == 0:
            # Its own loop raises on an empty batch. One example whose gradient is zero leaves the noise alone.
            self.optimizer.step([(p, torch.zeros_like(p)[None]) for p in self.hooks.get_trainable_params()])
            return
        x, y = self.batch(indices)
        losses = self.losses(self.model(x), y)
        if self.variant == "ghost":
            self._step_ghost(losses)
            return
        (losses.mean() if self.variant == "mean-loss" else losses.sum()).backward()
        self.optimizer.step(self.hooks.get_per_sample_grads())
        self.hooks.clear_per_sample_grads()

    def _step_ghost(self, losses: torch.Tensor) -> None:
        """The two passes that its documentation names. It leaves the second one to its users, and has no function that
        takes the sum."""
        bound = self.setting.max_grad_norm
        losses.sum().backward(retain_graph=True)
        factors = self.hooks.compute_clip_factors(bound)
        self.hooks.clear_state()
        self.optimizer.zero_grad()
        (losses * factors).sum().backward()
        # The optimizer clips what it gets. Without a bound the sum, clipped already, passes as one example.
        self.optimizer.max_grad_norm = math.inf
        self.optimizer.clip_and_accumulate([(p, p.grad[None]) for p in self.hooks.get_trainable_params()])
        self.optimizer.max_grad_norm = bound
        self.optimizer.step()

    def epoch(self, seed: int) -> int:
        """``make_private``, its loader and the loop of its README; only the seeds are set and the losses summed."""
        if self.own is None:
            self.order, self.noise = torch.Generator(), torch.Generator(self.device)
            self._make(self.parameters())
            engine = DPLoRAEngine()
            _, optimizer, loader = engine.make_private(
                model=self.model,
                optimizer=self._inner(),
                data_loader=self.loader(self.order),
                noise_multiplier=self.setting.noise_multiplier,
                max_grad_norm=self.setting.max_grad_norm,
                method=METHOD,
                generator=self.noise,
            )
            self.own = (engine, optimizer, loader)
        engine, optimizer, loader = self.own
        self.order.manual_seed(seed)
        self.noise.manual_seed(seed + 1)
        updates = 0
        for x, y in loader:
            optimizer.zero_grad()
            self.losses(self.model(x.to(self.device)), y.to(self.device)).sum().backward()
            optimizer.step(engine.grad_sample_module.get_per_sample_grads())
            engine.grad_sample_module.clear_per_sample_grads()
            updates += 1
        return updates

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {name: p.detach().cpu().numpy().copy() for name, p in self.canonical.items()}

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        accountant = PrivacyAccountant(self.setting.noise_multiplier, self.setting.sample_rate, delta)
        for _ in range(steps):
            accountant.step()
        return float(accountant.get_epsilon())


def as_peft(model: torch.nn.Module) -> PeftModel:
    """``model`` with PEFT's adapters in place of the benchmark's; all parameters remain the same objects."""
    ours = {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}
    for name, part in ours.items():
        model.set_submodule(name, part.base)
    rank = next(iter(ours.values())).lora_a.out_features
    config = LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=list(ours), lora_dropout=0.0, bias="none")
    wrapped = get_peft_model(model, config)
    for name, part in ours.items():
        adapter = model.get_submodule(name)
        adapter.lora_A["default"], adapter.lora_B["default"] = part.lora_a, part.lora_b
    return wrapped
