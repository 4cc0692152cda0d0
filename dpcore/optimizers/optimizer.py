"""An ordinary optimiser behind a private gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.clipping import clip_factors
from dpcore.distributed import Ranks, fingerprint
from dpcore.errors import PrivacyError
from dpcore.grad_sample.accumulator import Accumulator, Factors
from dpcore.grad_sample.grad_sample_module import GradSampleModule
from dpcore.noise import GaussianNoise

StepHook = Callable[["DPOptimizer"], None]


class DPOptimizer(Optimizer):
    """Wraps ``optimizer``; ``step()`` hands it (Σ clipped gradients + σ·C·N(0, I)) / expected_batch_size.

    ``max_grad_norm``: one bound, or one per trained parameter (per-layer clipping; the noise is then σ times their L2
    norm). ``module``: the :class:`GradSampleModule` whose backward passes are clipped. A loss that is summed over the
    batch is not divided. ``ranks``: the processes that train the module together, each on examples of its own; the
    batch size is then that of all of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        module: GradSampleModule,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        noise: GaussianNoise | None = None,
        factors: Factors = clip_factors,
        ranks: Ranks | None = None,
    ) -> None:
        if not noise_multiplier >= 0.0:
            raise ValueError(f"noise_multiplier is {noise_multiplier}; it must be at least 0.")
        if module.loss_reduction == "mean" and not (expected_batch_size and expected_batch_size > 0):
            raise ValueError(
                f"expected_batch_size is {expected_batch_size}; with loss_reduction='mean' the update needs a "
                f"positive, "
                "public divisor."
            )
        self.original_optimizer = optimizer
        self.module = module
        self.noise_multiplier = float(noise_multiplier)
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = module.loss_reduction
        self.noise = GaussianNoise() if noise is None else noise
        self.accumulator = Accumulator(module.trained, max_grad_norm, factors)
        self.ranks = ranks
        self.weights_agree = False
        self.steps = 0
        self.step_hook: StepHook | None = None
        self.nonfinite = 0
        self._skip = False
        self._batches = 0
        self._in_piece = False
        self._released: dict[Parameter, tuple[Tensor, int]] = {}

    # ---- what the wrapped optimiser is

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"

    # ---- the private gradient

    @property
    def max_grad_norm(self) -> float | list[float]:
        bounds = self.accumulator.bounds
        return bounds[0] if len(bounds) == 1 else list(bounds)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float]) -> None:
        self.accumulator.set_bounds(value)

    @property
    def accumulated_iterations(self) -> int:
        """Logical batches whose gradients this step adds up: 1, unless gradients are accumulated without virtual
        steps.
        """
        return max(1, self._batches)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """The next ``step()`` only clips and accumulates (a physical piece of a larger logical batch)."""
        self._skip = do_skip

    def attach_step_hook(self, hook: StepHook) -> None:
        """``hook(self)`` runs after noise was added and before the parameters change; the accountant attaches here."""
        self.step_hook = hook

    def discard(self) -> None:
        """Forgets clipped sums of an unfinished logical batch, and its flag."""
        self.module.forget()
        self._skip = False
        self._batches, self._in_piece = 0, False
        self.accumulator.flat.zero_()
        for param in self.accumulator.parameters.values():
            param.summed_grad = None  # type: ignore[attr-defined]

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of the backward passes since the last call to ``p.summed_grad``.

        PrivacyError where there was none, or where a parameter received an ordinary gradient: its examples were not
        clipped.
        """
        self.accumulator.check_unchanged()
        self._check_no_ordinary_gradient()
        with torch.no_grad():
            passes = 0
            for uses, batch_size in self.module.take():
                passes += 1
                if batch_size:
                    norms, _ = self.accumulator.add(uses, batch_size)
                    self.nonfinite += int((~norms.isfinite()).any(0).sum())
        if not passes:
            raise PrivacyError(
                "optimizer.step() found no backward pass of the wrapped module since the last step; stepping now would "
                "release noise for a batch that was never seen. Call loss.backward() on the module's output first."
            )
        # All pieces of a logical batch count as one batch; without pieces every backward pass is a batch of its own.
        self._batches += passes if not (self._skip or self._in_piece) else int(not self._in_piece)
        self._in_piece = self._skip
        for param, summed in self.accumulator.sums.items():
            param.summed_grad = summed  # type: ignore[attr-defined]

    def _check_no_ordinary_gradient(self) -> None:
        for name, param in self.accumulator.parameters.items():
            grad = param.grad
            if grad is None:
                continue
            released, version = self._released.get(param, (None, 0))
            if grad is not released or grad._version != version:
                raise PrivacyError(
                    f"Parameter {name} has an ordinary, unclipped gradient: it is used by an operation that "
                    f"dpcore has no "
                    "rule for, or outside of the wrapped module's forward in training mode. Wrap that operation in a "
                    "module of its own, or freeze the parameter with requires_grad_(False)."
                )

    def add_noise(self) -> None:
        """``p.grad`` becomes summed gradient + σ·C·noise of this step's number; of all ranks, with the noise of the
        first.
        """
        std = self.noise_multiplier * self.accumulator.sensitivity
        if self.ranks is None or self.ranks.rank == 0:
            self.noise.add_(self.accumulator.flat, std, self.steps)
        if self.ranks is not None:
            self.ranks.sum_(self.accumulator.flat)
        self.steps += 1
        for param, summed in self.accumulator.sums.items():
            param.grad = summed.to(param.dtype, copy=True)

    def _check_ranks(self, ranks: Ranks) -> None:
        """PrivacyError unless all ranks are about to release the same step; the weights are compared once after each
        start.
        """
        groups = [{name: v for name, v in g.items() if name != "params"} for g in self.param_groups]
        ranks.agree(
            {
                "the number of steps": self.steps,
                "the number of accumulated batches": self.accumulated_iterations,
                "noise_multiplier": self.noise_multiplier,
                "max_grad_norm": self.max_grad_norm,
                "expected_batch_size": self.expected_batch_size,
                "the optimizer's settings": groups,
                "the weights": None if self.weights_agree else fingerprint(self.module.parameters()),
            }
        )
        self.weights_agree = True

    def scale_grad(self) -> None:
        """Divides ``p.grad`` by the public batch size, for a mean loss."""
        if self.loss_reduction == "mean":
            assert self.expected_batch_size is not None
            for param in self.accumulator.parameters.values():
                assert param.grad is not None
                param.grad.div_(self.expected_batch_size * self.accumulated_iterations)

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Everything but the update; False where this was a piece of a logical batch that goes on."""
        self.clip_and_accumulate()
        if self._skip:
            self._skip = False
            return False
        if self.ranks is not None:
            self._check_ranks(self.ranks)
        self.add_noise()
        self.scale_grad()
        if self.step_hook is not None:
            self.step_hook(self)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One private update, or (after ``signal_skip_step``) only accumulation. A closure is called once, first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
            self._released = {p: (p.grad, p.grad._version) for p in self.accumulator.sums if p.grad is not None}
            self.discard()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad``; what virtual steps have accumulated stays until the logical batch's step."""
        self.original_optimizer.zero_grad(set_to_none=True)
