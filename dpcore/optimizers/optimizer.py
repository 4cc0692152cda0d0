"""An ordinary optimiser behind a private gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from dpcore.arguments import check_noise_multiplier
from dpcore.clipping import clip_factors
from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.loading.uniform_sampler import drawn_seed
from dpcore.microbatch.accumulator import Factors
from dpcore.microbatch.parallel_sums import accumulator_for
from dpcore.noise import GaussianNoise, SecureNoise, warn_without_noise
from dpcore.optimizers import checks
from dpcore.optimizers.checks import SPENT
from dpcore.optimizers.claims import claim, guard_inner, recorder_of, refuse_foreign_steps
from dpcore.optimizers.clipping_optimizer import ClippingOptimizer
from dpcore.optimizers.logical_batch import LogicalBatch
from dpcore.optimizers.private_run import PrivateRun
from dpcore.optimizers.schedules import follow
from dpcore.optimizers.summed import SummedGrads
from dpcore.reduction import Reduction, reduction_of
from dpcore.release import Release
from dpcore.same_weights import SameWeights

NOISE_HINT = " (make_private_with_epsilon finds it for a budget)"
StepHook = Callable[["DPOptimizer"], None]


class DPOptimizer(ClippingOptimizer):
    """A wrapper around ``optimizer`` whose step uses (Σ clipped gradients + σ·C·N(0, I)) / expected_batch_size.

    Only what ``optimizer`` holds is clipped, noised and released; the rest of the module is not updated.

    Args:
        optimizer: The torch optimizer that updates the parameters.
        noise_multiplier: σ, the standard deviation of the noise over the L2 norm of the bounds.
        max_grad_norm: C, the bound of each example's gradient; or one per trained parameter (per-layer clipping).
        expected_batch_size: The public divisor of a mean loss, of all ranks together; never the batch's own length.
        loss_reduction: As the module's, "mean" or "sum"; a loss that is summed over the batch is not divided.
        generator: Seeds the noise.
        secure_mode: Whether the noise comes from the operating system.
        module: The recorder of the gradients (:class:`GradSampleModule` or hooks); None finds it by its parameters.
        noise: A source of noise, in place of ``generator`` and ``secure_mode``.
        factors: The clipping rule, ``factors(norms, C)``, without state: it is called several times for a batch.
        ranks: The processes that train the module together, each on examples of its own.

    Raises:
        PrivacyError: the optimizer is private already, or its parameters are not recorded by one module.
        ValueError: a number is out of its range, or module and optimizer have different settings.
    """

    _step_supports_amp_scaling = True  # makes torch's GradScaler show itself in step(), which refuses it

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str | None = None,
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        module: AbstractGradSampleHooks | None = None,
        noise: GaussianNoise | None = None,
        factors: Factors = clip_factors,
        ranks: Ranks | None = None,
    ) -> None:
        sigma = check_noise_multiplier(noise_multiplier, NOISE_HINT)
        if isinstance(optimizer, DPOptimizer):
            raise PrivacyError("The optimizer is private already; a second one around it would add its noise twice.")
        checks.check_takes_one_gradient(optimizer)
        if secure_mode and generator is not None:
            raise ValueError(
                "secure_mode draws the noise from the operating system, and a generator would be ignored; pass one of "
                "the two."
            )
        module = recorder_of(optimizer) if module is None else module
        checks.check_same_settings(module, loss_reduction, max_grad_norm, expected_batch_size)
        self.original_optimizer = optimizer
        self.module = module
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = module.loss_reduction
        self.noise = noise if noise is not None else _noise(generator, secure_mode)
        self.ranks = ranks
        held = {p for group in optimizer.param_groups for p in group["params"]}
        self.accumulator = accumulator_for(
            {n: p for n, p in module.trained.items() if p in held},
            checks.ordered_bounds(max_grad_norm, module, self.params),
            factors,
            self.reduction,
        )
        self.noise_multiplier = sigma
        self.same_weights = SameWeights()
        self.steps = 0
        self.stage: Literal["open", "prepared", "counted"] = "open"
        self.step_hooks: list[StepHook] = []
        self.step_guards: list[StepHook] = []
        self.logical_batch = LogicalBatch(self.accumulator, sigma)
        self._is_ready = False  # whether a gradient was released that the wrapped optimiser has not applied
        claim(self)
        refuse_foreign_steps()
        guard_inner(self)
        follow(self, self.logical_batch)
        self.summed = SummedGrads(self.accumulator, type(self).__name__)
        names = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
        self.run = PrivateRun({name: getattr(self, name) for name in names})

    # ---- what the wrapped optimiser is

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state, and what its engine has spent: whoever goes on with it has spent it."""
        state = self.original_optimizer.state_dict()
        if self.engine is None:
            return state
        first, *others = state["param_groups"]
        return {**state, "param_groups": [{**first, SPENT: self.engine.spent()}, *others]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, and count what the private run that wrote it has spent, where that is not counted yet.

        Noise and batches go on with others than those of that run; ``load_checkpoint`` goes on bit for bit.

        Raises:
            PrivacyError: nobody counts the steps of this optimizer.
            ValueError: the state is that of an optimizer of another kind.
        """
        self.check_state(state_dict)
        self.original_optimizer.load_state_dict(state_dict)
        self.count_state()

    def count_state(self) -> None:
        """Count what a state that was loaded says was spent, by this optimiser or by the one inside before that.

        Raises:
            PrivacyError: nobody counts the steps of this optimizer.
            UnsupportedError: the loader would draw batches of that run again.
        """
        for group in self.param_groups:
            if SPENT not in group:
                continue
            checks.check_counts(self)
            self.engine.take_over(group[SPENT], self)
            del group[SPENT]  # not before: where it is refused, so is every step

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """ValueError where a state is that of an optimiser of another kind, whose settings this one does not have."""
        checks.check_state(self.original_optimizer, state_dict)

    @property
    def engine(self) -> Any:
        """Return the engine, or what counts its steps; None where nothing does."""
        return self.run.counter()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(noise_multiplier={self.noise_multiplier:.6g}, max_grad_norm={self.max_grad_norm}, "
            f"expected_batch_size={self.expected_batch_size}, steps={self.steps}, {self.original_optimizer!r})"
        )

    # ---- the private gradient

    @property
    def noise_multiplier(self) -> float:
        """σ, the standard deviation of the noise over the L2 norm of the bounds."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        sigma = check_noise_multiplier(value, NOISE_HINT)
        self.accumulator.check_noise(sigma)
        warn_without_noise(sigma, vars(self).get("_noise_multiplier"))
        self._noise_multiplier = sigma

    def attach_step_hook(self, fn: StepHook) -> None:
        """``fn(self)`` runs once noise was added and counted, before the update; where it raises, p.grad is None."""
        self.step_hooks.append(fn)

    def attach_step_guard(self, guard: StepHook) -> None:
        """``guard(self)`` runs before anything of a step is released, and raises to prevent it."""
        self.step_guards.append(guard)

    def add_noise(self) -> None:
        """Set ``p.grad`` (of a sharded module that of its shard) to the summed gradient + σ·C·noise of this step.

        Of several ranks the sums are added up, and each draws its share of the noise.
        """
        if self.stage != "prepared":  # a loop that makes the step by hand
            checks.admit(self)
        self.summed.take_changed()
        if self.module.ordinary_grad:
            self.summed.show(copies=True)
        self.logical_batch.check(self.noise_multiplier)  # a subclass may have changed it since the guards
        std = self.accumulator.check_noise(self._gradient_noise_multiplier())
        self.reduction.finish(Release.by(self, std, self.run.correlation), self.accumulator)
        self.count_step()  # before anything of the user's can see what the step releases
        for param, grad in self.accumulator.hand_over().items():
            param.grad = grad
            self.module.ordinary_gradients.release(param)

    def count_step(self) -> None:
        """Count the step, whose batch is used from then on, whatever becomes of it."""
        self.noise.note_made(self.steps)
        self.steps += 1
        self.run.count(self)
        self.run.conclude(self.logical_batch.batches)
        self.stage = "counted"

    @property
    def reduction(self) -> Reduction:
        """Return how the ranks' clipped sums become one."""
        return reduction_of(self.module._module, self.ranks)

    def _gradient_noise_multiplier(self) -> float:
        return self.noise_multiplier

    def scale_grad(self) -> None:
        """Divides ``p.grad`` by the public batch size, for a mean loss."""
        if self.loss_reduction == "mean":
            assert self.expected_batch_size is not None
            for param in self.accumulator.targets.values():
                assert param.grad is not None
                param.grad.div_(self.expected_batch_size * self.logical_batch.batches)

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Everything but the update; False where this was a piece of a logical batch that goes on."""
        self._conclude()
        self.count_state()
        pieces = self.logical_batch.pieces
        try:
            self.clip_and_accumulate()
            if self.logical_batch.pieces == pieces:
                self._use_own_clipping()
            if self.logical_batch.unfinished:
                return False
            checks.check_count(self)
            checks.see_division(self.module, self.logical_batch.batches)
            if self.ranks is not None:
                checks.check_ranks(self, self.ranks)
            checks.admit(self)
            self._release()
        except BaseException:
            self._forget(self.logical_batch.fail)  # or the batch would be added to the next one
            raise
        self._is_ready = True
        return True

    def _release(self) -> None:
        """Form the private gradient, count it, and let hooks see it; where one of these fails, nothing of it stays."""
        shown = (*self.accumulator.names, *self.accumulator.targets.values())
        for param in shown:
            param.grad = None  # an ordinary one is none that a subclass's add_noise() may leave there
        try:
            self.add_noise()
            if self.stage != "counted":
                self.count_step()
                self.summed.check_own_noise(self)
            self.scale_grad()
            for param in self.accumulator.targets.values():
                self.module.ordinary_gradients.release(param)
            for hook in self.step_hooks:
                hook(self)
        except BaseException:
            for param in shown:
                param.grad = None
            self.same_weights.known, self.stage = False, "open"  # the other ranks may have made the step
            raise

    def _conclude(self) -> None:
        """Make ready for the next batch, after an update."""
        if not self._is_ready:
            return
        self._is_ready = False
        for param in self.accumulator.names:
            if param.grad is not None:
                self.module.ordinary_gradients.own(param)
        self._clear()
        if not self.module.ordinary_grad or type(self).clip_and_accumulate is not DPOptimizer.clip_and_accumulate:
            self.summed.forget()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one private update, or (after ``signal_skip_step``) only accumulate.

        Args:
            closure: Called once, first; it runs forward and backward pass and returns the loss.

        Returns:
            The closure's loss, None without one.

        Raises:
            PrivacyError: there was no backward pass, the batch is none that may be used, or something would be released
                without clipping or noise. Nothing of the batch is released then.
            UnsupportedError: a GradScaler multiplied the loss.
            BudgetError: the step would exceed the engine's budget.
        """
        checks.check_loop(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            if not self._is_ready:
                for param in self.accumulator.names:
                    param.grad = None
                self.discard()
                raise PrivacyError(
                    f"{type(self).__name__}.pre_step() does not call super().pre_step(), which counts the step and "
                    "takes the batch; nothing was updated. Call it, and put what is to be other into "
                    "clip_and_accumulate(), add_noise() or scale_grad()."
                )
            with self.logical_batch.stepping():
                self.original_optimizer.step()
            self._conclude()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad`` and ``p.grad_sample``; the sum of an unfinished logical batch stays until its step.

        Args:
            set_to_none: Accepted for compatibility; gradients always become None.
        """
        self._conclude()
        self.stage = "open"
        self.original_optimizer.zero_grad(set_to_none=True)
        self.module.drop_gradients()
        if not self.logical_batch.unfinished:
            self._clear()
            self.summed.forget()


def _noise(generator: torch.Generator | None, secure_mode: bool) -> GaussianNoise:
    if secure_mode:
        return SecureNoise()
    return GaussianNoise(None if generator is None else drawn_seed(generator))
