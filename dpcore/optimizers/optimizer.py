"""An ordinary optimiser behind a private gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.clipping import clip_factors
from dpcore.distributed import Ranks, fingerprint
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.backward_pass import owner_of
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.loading.ledger import Ledger
from dpcore.microbatch.accumulator import Accumulator, Factors
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers.wrapper import OptimizerWrapper

StepHook = Callable[["DPOptimizer"], None]
_CLAIMED: weakref.WeakKeyDictionary[AbstractGradSampleHooks, weakref.ref[DPOptimizer]] = weakref.WeakKeyDictionary()
"""What records gradients -> the optimiser that takes them."""


class DPOptimizer(OptimizerWrapper):
    """Wraps ``optimizer``; ``step()`` hands it (Σ clipped gradients + σ·C·N(0, I)) / expected_batch_size.

    ``max_grad_norm``: one bound, or one per trained parameter (per-layer clipping; the noise is then σ times their L2
    norm). ``module``: what records the gradients (a :class:`GradSampleModule` or hooks); found by its parameters where
    not given. A loss that is summed over the batch is not divided. ``generator`` seeds the noise; ``secure_mode`` draws
    it from the operating system; ``noise`` is a source of the caller's, in place of both. ``ranks``: the processes that
    train the module together, each on examples of its own; the batch size is then that of all of them.

    Only what ``optimizer`` holds is clipped, noised and released; the rest of the module is not updated.
    """

    # Makes torch's GradScaler show itself in step(), which refuses it.
    _step_supports_amp_scaling = True

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
        if not noise_multiplier >= 0.0:
            raise ValueError(f"noise_multiplier is {noise_multiplier}; it must be at least 0.")
        if isinstance(optimizer, DPOptimizer):
            raise PrivacyError("The optimizer is private already; a second one around it would add its noise twice.")
        module = _recorder(optimizer) if module is None else module
        if loss_reduction not in (None, module.loss_reduction):
            raise ValueError(
                f"loss_reduction is {loss_reduction!r} here and {module.loss_reduction!r} in the module; gradients "
                "would be scaled by the batch's length in one place only. Give both the reduction of your loss."
            )
        if module.loss_reduction == "mean" and not (expected_batch_size and expected_batch_size > 0):
            raise ValueError(
                f"expected_batch_size is {expected_batch_size}; with loss_reduction='mean' the update needs a "
                "positive, public divisor."
            )
        if module.max_grad_norm not in (None, max_grad_norm):
            raise ValueError(
                f"max_grad_norm is {max_grad_norm} here and {module.max_grad_norm} in the module; give both the same."
            )
        self.original_optimizer = optimizer
        self.module = module
        self.noise_multiplier = float(noise_multiplier)
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = module.loss_reduction
        self.noise = noise if noise is not None else _noise(generator, secure_mode)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        self.accumulator = Accumulator(
            {n: p for n, p in module.trained.items() if p in held},
            self._order_bounds(max_grad_norm),
            factors,
        )
        self.ranks = ranks
        self.weights_agree = False
        self.steps = 0
        self.step_hooks: list[StepHook] = []
        self.step_guards: list[StepHook] = []
        self.ledger: Ledger | None = None
        self.data_loader: Any = None
        self.nonfinite = 0
        self._skip = False
        self._batches = 0
        self._in_piece = False
        self._piece_rows = 0
        self._stepping = False
        self._unstepped = 0
        self._overtaken = False
        self._clipped_at: tuple[float, ...] | None = None
        self._begun_at = 0
        _claim(module, self)
        self._guard_inner()
        for param in self.accumulator.parameters.values():
            param.summed_grad = None  # type: ignore[attr-defined]
        # What must not differ when a checkpoint is resumed; schedules move the attributes, not these.
        self.setting: dict[str, Any] = {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "expected_batch_size": self.expected_batch_size,
            "loss_reduction": self.loss_reduction,
        }

    def _order_bounds(self, max_grad_norm: float | Sequence[float]) -> float | Sequence[float]:
        """Bounds per parameter come in the optimiser's order and go to the module's."""
        if not isinstance(max_grad_norm, Sequence):
            return max_grad_norm
        params = self.params
        if len(max_grad_norm) != len(params):
            raise ValueError(
                f"max_grad_norm has {len(max_grad_norm)} bounds for {len(params)} trained parameters; give one per "
                "parameter, or a single number."
            )
        bounds = dict(zip(params, max_grad_norm, strict=True))
        return [bounds[p] for p in self.module.trained.values() if p in bounds]

    def _guard_inner(self) -> None:
        """The wrapped optimiser refuses to step on its own: the gradients that it would find are not private."""
        register = getattr(self.original_optimizer, "register_step_pre_hook", None)
        if register is None:
            return
        outer = weakref.ref(self)

        def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
            private = outer()
            if private is None or private._stepping:
                return
            if any(owner_of(p) is private.module for p in private.accumulator.names):
                raise PrivacyError(
                    "step() was called on the optimizer inside the private one: it would apply gradients without "
                    "clipping and noise, and the accountant would not know. Call step() on the optimizer that "
                    "make_private returned; for training without privacy, call to_standard_module() first."
                )

        register(refuse)

    # ---- what the wrapped optimiser is

    @property
    def inner(self) -> Optimizer:
        return self.original_optimizer

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
        return f"{type(self).__name__}({self.original_optimizer!r})"

    # ---- the private gradient

    @property
    def params(self) -> list[Parameter]:
        """The trained parameters, in the optimiser's order."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def grad_samples(self) -> list[Tensor]:
        """[examples, *p.shape] per parameter, over all batches since the last step."""
        values = [p.grad_sample for p in self.params]  # type: ignore[attr-defined]
        if any(value is None for value in values):
            raise PrivacyError("There are no per-sample gradients; call loss.backward() first.")
        return [torch.cat(value) if isinstance(value, list) else value for value in values]

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

    def hand_out(self, rows: int, goes_on: bool) -> None:
        """A piece of ``rows`` examples is on its way to the next ``step()``; ``goes_on``: it is not its batch's last.

        One that is handed out before the step on the one before it takes that one's flag away: pieces of different
        batches would be added up as one batch.
        """
        if self._unstepped and (self._skip or goes_on):
            self._overtaken = True
        self._unstepped = rows
        self.signal_skip_step(goes_on)

    def attach_step_hook(self, fn: StepHook) -> None:
        """``fn(self)`` runs after noise was added and before the parameters change; the accountant attaches here.

        Hooks add up: one more does not silence the accountant.
        """
        self.step_hooks.append(fn)

    def attach_step_guard(self, guard: StepHook) -> None:
        """``guard(self)`` runs before anything of a step is released, and raises to prevent it."""
        self.step_guards.append(guard)

    def discard(self) -> None:
        """Forgets clipped sums of an unfinished logical batch, and its flag."""
        self.module.forget()
        self._skip = False
        self._unstepped, self._overtaken = 0, False
        self._clear()
        self._forget_sums()

    def _clear(self) -> None:
        self._batches, self._in_piece, self._piece_rows = 0, False, 0
        self._clipped_at = None
        self.accumulator.flat.zero_()

    def _forget_sums(self) -> None:
        for param in self.accumulator.parameters.values():
            param.summed_grad = None  # type: ignore[attr-defined]

    def clip_and_accumulate(self) -> None:
        """Adds the clipped gradients of the backward passes since the last call to ``p.summed_grad``.

        PrivacyError where there was none, or where a parameter received an ordinary gradient: its examples were not
        clipped. An error forgets the whole logical batch: a part of it that stayed in the sum could be added again.
        """
        try:
            self._clip_and_accumulate()
        except BaseException:
            self.discard()
            raise

    def _clip_and_accumulate(self) -> None:
        self._check_unchanged()
        self._check_no_ordinary_gradient()
        self._check_bounds()
        if not self._batches and not self._in_piece:
            self.accumulator.follow()
        with torch.no_grad():
            sizes = []
            for uses, batch_size in self.module.take():
                sizes.append(batch_size)
                if batch_size:
                    norms, _ = self.accumulator.add(uses, batch_size)
                    self.nonfinite += int((~norms.isfinite()).any(0).sum())
                    self._observe(norms)
        if not sizes:
            raise PrivacyError(
                "optimizer.step() found no backward pass of the wrapped module since the last step; stepping now would "
                "release noise for a batch that was never seen. Call loss.backward() on the module's output first."
            )
        if self._overtaken or (self._unstepped and not sum(sizes)):
            raise PrivacyError(
                "A piece of a batch was handed out before optimizer.step() was called for the one before it, so pieces "
                "of different batches would be added up as one, and an example in two of them would move the sum by "
                "twice max_grad_norm. Call step() for every piece before the next one is fetched: no prefetching of "
                "BatchMemoryManager's pieces, and no piece left out."
            )
        self._unstepped = 0
        if self.ledger is not None:
            self._check_one_batch()
            self._piece_rows += sum(sizes)
            if not self._skip:
                self.ledger.use([self._piece_rows] if self._in_piece else sizes)
                self._piece_rows = 0
        # All pieces of a logical batch count as one batch; without pieces every backward pass is a batch of its own.
        self._batches += len(sizes) if not (self._skip or self._in_piece) else int(not self._in_piece)
        self._in_piece = self._skip
        for param, summed in self.accumulator.sums.items():
            param.summed_grad = summed  # type: ignore[attr-defined]

    def _check_bounds(self) -> None:
        """The noise is that of the bounds in force at the step: they must be those by which the sums were clipped."""
        if self._clipped_at is not None and self._clipped_at != self.accumulator.bounds:
            raise PrivacyError(
                f"max_grad_norm was changed from {self._clipped_at} to {self.accumulator.bounds} within a logical "
                "batch: examples clipped at one bound would get the noise of another. Change it between optimizer "
                "steps, so call a schedule's step() once per logical batch and not once per piece."
            )
        self._clipped_at = self.accumulator.bounds

    def _check_one_batch(self) -> None:
        """The pieces of a logical batch must come from one batch of the loader: they are accounted for as one."""
        drawn = getattr(self.data_loader, "handed_out", 0)
        if self._in_piece and drawn != self._begun_at:
            raise PrivacyError(
                f"One logical batch was put together from {drawn - self._begun_at + 1} batches of the private data "
                "loader by signal_skip_step(): an example in several of them would move the sum by several times "
                "max_grad_norm, and the accountant would count one step. Accumulate without signal_skip_step(), which "
                "is counted, or draw larger batches and cut them with BatchMemoryManager."
            )
        self._begun_at = drawn

    def _observe(self, norms: Tensor) -> None:
        """Norms [groups, B] of a batch that is being accumulated, for those who adapt to them."""

    def _check_unchanged(self) -> None:
        self.module.check_unchanged()
        released = self.accumulator.names
        for param in self.params:
            if param not in released:
                raise PrivacyError(
                    "A parameter was added to the optimizer after make_private; it would be updated without clipping "
                    "and noise. Make the module private again with an optimizer that holds it from the start."
                )

    def _check_no_ordinary_gradient(self) -> None:
        for name, param in self.accumulator.parameters.items():
            if self.module.owns(param):
                continue
            if not self.module._module.training:
                raise PrivacyError(
                    f"Parameter {name} has an ordinary, unclipped gradient: the module is in evaluation mode, in which "
                    "gradients are not recorded by example. Call model.train() before the training loop."
                )
            raise PrivacyError(
                f"Parameter {name} has an ordinary, unclipped gradient: it is used by an operation that dpcore has no "
                "rule for, or outside of the private module's forward in training mode (by a call of the module that "
                "make_private was given, say, or by a penalty on the weights), or p.grad was changed by hand (by "
                "clip_grad_norm_, say), which the step would undo. Call the module that make_private returned, put "
                "penalties into the optimizer's weight_decay, leave clipping to step(), wrap that operation in a "
                "module of its own, or freeze the parameter with requires_grad_(False)."
            )

    def add_noise(self) -> None:
        """``p.grad`` becomes summed gradient + σ·C·noise of this step's number; of all ranks, with the noise of the
        first.
        """
        if self.module.ordinary_grad:
            for param, summed in self.accumulator.sums.items():
                param.summed_grad = summed.clone()  # type: ignore[attr-defined]
        self._check_bounds()
        std = self._gradient_noise_multiplier() * self.accumulator.sensitivity
        flat = self.accumulator.flat
        if self.ranks is not None and isinstance(self.noise, SecureNoise):
            # Its release lies on a grid, which another rank's sum would undo: so the noise comes after the sums, and
            # the second reduction, to which the other ranks add zeros, hands it out.
            self.ranks.sum_(flat)
            if self.ranks.rank:
                flat.zero_()
        if self.ranks is None or self.ranks.rank == 0:
            self.noise.add_(flat, std, self.steps)
        if self.ranks is not None:
            self.ranks.sum_(flat)
        self.steps += 1
        for param, summed in self.accumulator.sums.items():
            param.grad = summed.to(param.dtype, copy=True)

    def _gradient_noise_multiplier(self) -> float:
        return self.noise_multiplier

    def _check_ranks(self, ranks: Ranks) -> None:
        """PrivacyError unless all ranks are about to release the same step; the weights are compared once after each
        start.
        """
        groups = [{name: v for name, v in g.items() if name != "params"} for g in self.param_groups]
        known = self.weights_agree or ranks.sharded
        ranks.agree(
            {
                "the number of steps": self.steps,
                "the number of accumulated batches": self.accumulated_iterations,
                "noise_multiplier": self.noise_multiplier,
                "max_grad_norm": self.max_grad_norm,
                "expected_batch_size": self.expected_batch_size,
                "the optimizer's settings": groups,
                "the weights": None if known else fingerprint(self.module._module.parameters()),
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
        for guard in self.step_guards:
            guard(self)
        self.add_noise()
        self.scale_grad()
        for hook in self.step_hooks:
            hook(self)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One private update, or (after ``signal_skip_step``) only accumulation. A closure is called once, first."""
        if getattr(self, "grad_scale", None) is not None:
            raise UnsupportedError(
                "A GradScaler has multiplied the loss, and every gradient would be clipped at its scaled size. Use "
                "torch.autocast with bfloat16, which needs no scaling, and call optimizer.step() without a scaler."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self._stepping = True
            try:
                self.original_optimizer.step()
            finally:
                self._stepping = False
            for param in self.accumulator.sums:
                if param.grad is not None:
                    self.module.own(param)
            self._clear()
            if not self.module.ordinary_grad:
                self._forget_sums()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``; what virtual steps have accumulated stays until the logical batch's
        step."""
        self.original_optimizer.zero_grad(set_to_none=True)
        self.module.drop_gradients()
        if not self._in_piece:
            self._clear()
            self._forget_sums()


class DPOptimizerFastGradientClipping(DPOptimizer):
    """:class:`DPOptimizer` under the name of the fast-clipping mode: one optimiser serves all modes."""


def _recorder(optimizer: Optimizer) -> AbstractGradSampleHooks:
    """What records the trained parameters of ``optimizer``."""
    owners = []
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        owner = owner_of(param)
        if not isinstance(owner, AbstractGradSampleHooks):
            raise PrivacyError(
                f"A trained parameter of shape {tuple(param.shape)} is not recorded by any GradSampleModule: it would "
                "be updated without clipping and noise. Wrap the module in GradSampleModule first and keep the "
                "wrapper, or use PrivacyEngine.make_private."
            )
        if owner not in owners:
            owners.append(owner)
    if len(owners) != 1:
        raise PrivacyError(
            f"The optimizer's parameters belong to {len(owners)} GradSampleModules; an example must be clipped over "
            "all of its gradient at once. Wrap one module around them all."
        )
    return owners[0]


def _claim(module: AbstractGradSampleHooks, optimizer: DPOptimizer) -> None:
    """One optimiser per recorded module: a second would find its gradients taken."""
    reference = _CLAIMED.get(module)
    if reference is not None and reference() is not None:
        raise PrivacyError(
            "The module is private already and belongs to another DPOptimizer, which takes its gradients; a second "
            "one would release noise alone. Use that optimizer, or start from module.to_standard_module()."
        )
    _CLAIMED[module] = weakref.ref(optimizer)


def _noise(generator: torch.Generator | None, secure_mode: bool) -> GaussianNoise:
    if secure_mode:
        return SecureNoise()
    return GaussianNoise(None if generator is None else int(torch.randint(2**62, (), generator=generator)))
