"""The entry point: two lines make an ordinary training script private."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore import native
from dpcore.accountants import IAccountant, create_accountant, get_noise_multiplier
from dpcore.accountants.accountant import History, count
from dpcore.accountants.utils import customary_delta, rounded_up
from dpcore.arguments import check_divisor, check_noise_multiplier, check_number, did_you_mean
from dpcore.budget import Budget, BudgetError
from dpcore.checkpoint import (
    Checkpoint,
    PrivateState,
    RandomState,
    Runs,
    forgotten_steps,
    named_schedulers,
    next_batch,
    steps_of,
    unknown_steps,
    without_seeds,
)
from dpcore.clipping import automatic_factors, check_max_grad_norm, check_noise
from dpcore.data_loader import RAND_ON_EMPTY, DPDataLoader
from dpcore.distributed import Ranks, check_shares, ranks_of
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.grad_sample.empty_batches import number_batches
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.grad_sample.utils import DEFAULT_MODE, prepare_module
from dpcore.loading.checks import check_data_set, check_once_a_round, check_ordinary
from dpcore.loading.counting_loader import CountingDataLoader, counted
from dpcore.loading.ledger import Ledger, Unused, give
from dpcore.loading.same_data import check_same_data
from dpcore.loading.uniform_sampler import drawn_seed, steps_per_epoch
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers import DPOptimizer, get_optimizer_class
from dpcore.optimizers.optimizer import NOISE_HINT, SPENT, check_takes_one_gradient, private_optimizers
from dpcore.secret_seeds import derived_seed
from dpcore.utils.batch_memory_manager import PiecewiseLoader, check_iterated, check_pieces, whole_batches
from dpcore.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, check_criterion
from dpcore.validators import ModuleValidator
from dpcore.validators.errors import IllegalModuleConfigurationError

FACTORS = {"automatic": automatic_factors}
INSTEAD = {
    "secure_mode": "it belongs to the engine: PrivacyEngine(secure_mode=True)",
    "generator": "pass noise_generator= to seed the noise",
    "noise": "it comes from the engine's seed, or from PrivacyEngine(secure_mode=True)",
    "module": "the module is recorded by make_private itself",
    "ranks": "the processes are those of the module's wrapper",
}
"""Arguments of the optimisers' classes that make_private sets itself, and what to do instead of passing them."""


class PrivacyEngine:
    """The accountant, and the way to make (module, optimizer, data loader) private.

    Args:
        accountant: How epsilon is computed: "prv" (tight, the default), "rdp" (looser), "gdp" (an approximation, no
            bound) or a registered name.
        secure_mode: Noise and batches come from the operating system's cryptographic generator, and noise is hardened
            against attacks on floating point. Slower, and nothing can be repeated.
        seed: Makes noise and batches reproducible. Without it they are secret, as they must be for a release; a
            loader's ``generator`` then seeds the batches.

    Raises:
        ValueError: there is no such accountant, or ``secure_mode`` was given a seed.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None) -> None:
        if secure_mode and seed is not None:
            raise ValueError("secure_mode draws from the operating system and takes no seed; pass one of the two.")
        self._accountant = create_accountant(accountant)
        self.secure_mode = secure_mode
        self.seed = seed
        self.budget: Budget | None = None
        self._dataset: Any = None
        self._made = 0
        self._unused = Unused()
        self._name = secrets.token_hex(16)
        self._runs: Runs = {}
        self._ancestors: dict[str, set[str]] = {}
        """Of runs, those that were in the file which they went on from."""
        self._taken_over: set[str] = set()
        """Runs that an optimizer's state has told of."""

    @property
    def accountant(self) -> IAccountant:
        """The accountant, which every step is counted by; another one may take its place if it knows of all steps."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: IAccountant) -> None:
        forgotten = forgotten_steps(self._accountant.history, accountant.history)
        if forgotten:
            raise PrivacyError(
                f"This engine has counted {forgotten} steps that the new accountant does not know of: epsilon would "
                "forget them. To read it by another accountant, give that the same history (other.history = "
                "list(engine.accountant.history)); for another run use a new PrivacyEngine."
            )
        self._accountant = accountant

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = DEFAULT_MODE,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        check_batches: bool = True,
        check_isolation: bool = True,
        max_physical_batch_size: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Make a training script private: every ``optimizer.step()`` clips, adds noise, and is accounted for.

        Train with what is returned as before. The update is (Σ clipped gradients + σ·C·N(0, I)) / expected_batch_size,
        for a mean loss.

        Args:
            module: The ``torch.nn.Module`` to train, in training mode. A module in
                ``DifferentiallyPrivateDistributedDataParallel``, or one to which ``fully_shard`` was applied, is
                trained by all ranks of its group; each of them calls this with the whole data set and the same
                settings.
            optimizer: An ordinary torch optimizer over ``module.parameters()``. Only what it holds is clipped, noised
                and updated.
            criterion: The loss for the mode "ghost" (default ``CrossEntropyLoss``), and in every mode checked against
                ``loss_reduction`` where it is given.
            data_loader: A torch loader over the whole data set. Its batch size sets the default sample rate only. Its
                ``generator`` seeds the batches, unless the engine has a seed or draws securely; for a release it must
                be secret.
            noise_multiplier: σ, the standard deviation of the noise over the bound ``max_grad_norm``. More noise,
                smaller epsilon; 0 gives no privacy.
            max_grad_norm: C, the L2 bound to which each example's gradient is clipped, and so how far one example can
                move a step's sum. For "per_layer" a list, one bound per trained parameter.
            batch_first: Whether the module's inputs are [B, T, ...]; False: [T, B, ...]. Wrong, it would clip time
                steps instead of examples.
            loss_reduction: The reduction of your loss over the batch, "mean" or "sum". The update of a mean loss is
                divided by ``expected_batch_size``, that of a sum by nothing. Wrong, every gradient is scaled by the
                batch's length before it is clipped.
            poisson_sampling: Whether the returned loader draws Poisson batches: every example independently with the
                chance ``sample_rate``. Epsilon holds for such batches only; False keeps your loader, with a warning.
            clipping: "flat" clips the whole gradient at one bound; "per_layer" each parameter at its own; "adaptive"
                moves the bound towards a quantile of the norms (``options`` are those of :class:`AdaClipDPOptimizer`);
                "automatic" scales every gradient to nearly the bound, shorter ones too.
            noise_generator: A ``torch.Generator`` that seeds the noise, for tests. Noise of a known seed protects
                nothing.
            grad_sample_mode: Where gradients can be read between ``backward()`` and ``step()``. "bookkeeping" never
                forms the ordinary gradient; "hooks" (also "functorch", "ew") leaves it in ``p.grad``; "ghost" is
                Opacus' fast clipping, with a criterion of its own; "no_op" records nothing and takes ``p.grad_sample``
                from the loop. The update is the same in all of them.
            wrap_model: Whether the module is returned in a wrapper. False records it where it is and returns the hooks;
                end with their ``cleanup()``.
            rand_on_empty: Accepted for compatibility and ignored, with a warning: an empty batch stays one and is a
                step of noise alone.
            sample_rate: q, the chance of an example to be in a batch; a public number. None: 1 / len(data_loader),
                which takes the number of examples to be public.
            expected_batch_size: The public divisor of every update of a mean loss, of all ranks together. None: sample
                rate × number of examples, with a warning where ``sample_rate`` was given. Never the batch's own length,
                which depends on the data.
            check_batches: Whether each step must use an unused batch of the returned loader, every example in one row.
                Pass False only where your own batches are drawn at the accounted rate.
            check_isolation: Whether experiments on the first batches of every kind, and on rare random ones later, look
                for examples that reach each other's gradients (:mod:`dpcore.example_isolation.check`). Clipping bounds
                nothing where they do.
            max_physical_batch_size: The most examples of a batch that the returned loader hands out at once; "auto"
                plans them by time and memory. ``step()`` then updates once per batch, at its last piece. Schedules of
                torch's and dpcore's classes move there too, though the loop steps them for every piece, and
                ``len(data_loader)`` stays the number of batches. None: whole batches. See
                :class:`dpcore.utils.batch_memory_manager.BatchMemoryManager`.
            **options: Further arguments of the optimiser's class for ``clipping``.

        Returns:
            (module, optimizer, data_loader); in the mode "ghost" (module, optimizer, criterion, data_loader).

        Raises:
            PrivacyError: going on would release something that the accountant does not know of.
            UnsupportedError: the module or the loader cannot be made private exactly.
            ValueError: an argument is out of its range, or arguments contradict each other.
            TypeError: an argument is of another class than it must be.
        """
        settings = _Settings(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            sample_rate=sample_rate,
            expected_batch_size=expected_batch_size,
            check_batches=check_batches,
            check_isolation=check_isolation,
            options=options,
        )
        _check_unprepared(module, optimizer, data_loader)
        module, optimizer, ranks = _trainable(module, optimizer, settings)
        self._check_inputs(module, optimizer, criterion, settings, rand_on_empty, ranks)
        if max_physical_batch_size is not None:
            check_pieces(max_physical_batch_size, batch_first, ranks)
            check_iterated(data_loader, max_physical_batch_size)
        rate_is_given = sample_rate is not None or isinstance(data_loader, DPDataLoader)
        data_loader, rate = self._private_loader(data_loader, settings, ranks)
        divisor = _divisor(data_loader, settings, rate, rate_is_given)
        seed = self._noise_seed(noise_generator, ranks)
        if ranks is not None:
            self._agree_between_ranks(ranks, module, data_loader, settings, rate, divisor)
        recorded = _recorded(module, settings)
        private = self._private_optimizer(optimizer, recorded, settings, divisor, seed, ranks)
        self._attach_accounting(private, data_loader, settings, rate)
        private.count_state()
        self._made += 1
        if max_physical_batch_size is not None:
            pieces = PiecewiseLoader(data_loader, max_physical_batch_size, private, counts_batches=True)
            data_loader = pieces  # type: ignore[assignment]
        if grad_sample_mode != "ghost":
            return recorded, private, data_loader
        criterion = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        return recorded, private, DPLossFastGradientClipping(recorded, private, criterion, loss_reduction), data_loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = DEFAULT_MODE,
        wrap_model: bool = True,
        sample_rate: float | None = None,
        enforce_budget: bool = True,
        **options: Any,
    ) -> Any:
        """Call :meth:`make_private` with the smallest noise that keeps ``epochs`` rounds within a privacy budget.

        A step beyond the budget raises :class:`BudgetError`, unless ``enforce_budget`` is False; see
        :meth:`set_budget`.

        Args:
            module: The ``torch.nn.Module`` to train, in training mode. A module in
                ``DifferentiallyPrivateDistributedDataParallel``, or one to which ``fully_shard`` was applied, is
                trained by all ranks of its group; each of them calls this with the whole data set and the same
                settings.
            optimizer: An ordinary torch optimizer over ``module.parameters()``. Only what it holds is clipped, noised
                and updated.
            criterion: The loss for the mode "ghost" (default ``CrossEntropyLoss``), and in every mode checked against
                ``loss_reduction`` where it is given.
            data_loader: A torch loader over the whole data set. Its batch size sets the default sample rate only. Its
                ``generator`` seeds the batches, unless the engine has a seed or draws securely; for a release it must
                be secret.
            target_epsilon: ε, the most that the whole training may spend at ``target_delta``.
            target_delta: δ, well below 1 / (number of examples).
            epochs: Rounds of the loader to plan for, of ceil(1 / sample rate) steps each.
            max_grad_norm: C, the L2 bound to which each example's gradient is clipped. For "per_layer" a list, one
                bound per trained parameter.
            batch_first: Whether the module's inputs are [B, T, ...]; False: [T, B, ...]. Wrong, it would clip time
                steps instead of examples.
            loss_reduction: The reduction of your loss over the batch, "mean" or "sum". The update of a mean loss is
                divided by ``expected_batch_size``, that of a sum by nothing. Wrong, every gradient is scaled by the
                batch's length before it is clipped.
            poisson_sampling: Whether the returned loader draws Poisson batches: every example independently with the
                chance ``sample_rate``. Epsilon holds for such batches only; False keeps your loader, with a warning.
            clipping: "flat" clips the whole gradient at one bound; "per_layer" each parameter at its own; "adaptive"
                moves the bound towards a quantile of the norms (``options`` are those of :class:`AdaClipDPOptimizer`);
                "automatic" scales every gradient to nearly the bound, shorter ones too.
            noise_generator: A ``torch.Generator`` that seeds the noise, for tests. Noise of a known seed protects
                nothing.
            grad_sample_mode: Where gradients can be read between ``backward()`` and ``step()``. "bookkeeping" never
                forms the ordinary gradient; "hooks" (also "functorch", "ew") leaves it in ``p.grad``; "ghost" is
                Opacus' fast clipping, with a criterion of its own; "no_op" records nothing and takes ``p.grad_sample``
                from the loop. The update is the same in all of them.
            wrap_model: Whether the module is returned in a wrapper. False records it where it is and returns the hooks;
                end with their ``cleanup()``.
            sample_rate: q, the chance of an example to be in a batch; a public number. None: 1 / len(data_loader),
                which takes the number of examples to be public.
            enforce_budget: Whether a step that would exceed the budget is refused.
            **options: Further arguments of :meth:`make_private`.

        Returns:
            What :meth:`make_private` returns.

        Raises:
            ValueError: no noise keeps the budget; or as :meth:`make_private`.
            PrivacyError: as :meth:`make_private`.
            UnsupportedError: as :meth:`make_private`.
        """
        _check_unprepared(module, optimizer, data_loader)
        if len(self.accountant) or any(SPENT in group for group in optimizer.param_groups):
            warn_caller(
                "This accountant has already counted steps; the noise is chosen as if it had not, and get_epsilon will "
                "report the sum.",
            )
        if isinstance(data_loader, DPDataLoader):
            sample_rate = data_loader.sample_rate
        _check_length(data_loader, sample_rate)
        rate = 1 / len(data_loader) if sample_rate is None else sample_rate
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            epochs=epochs,
            accountant=self.accountant.mechanism(),
        )
        private = self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            sample_rate=sample_rate,
            **options,
        )
        if enforce_budget:
            self.set_budget(target_epsilon, target_delta)
            assert self.budget is not None
            # Calibration found that these steps fit; only beyond them need epsilon be computed at every step.
            planned = noise_multiplier, rate, math.ceil(epochs * steps_per_epoch(rate) * (1 - 1e-12))
            self.budget = replace(self.budget, fits=[planned])
        else:
            self._check_delta(target_delta)
        return private

    # ---- the budget

    def set_budget(self, epsilon: float | None, delta: float | None = None) -> None:
        """Refuse from now on every step that would exceed a budget; nothing of such a step is released.

        Args:
            epsilon: The most that may be spent; None lifts the budget.
            delta: The δ at which epsilon is read.

        Raises:
            ValueError: not epsilon > 0 and 0 < delta < 1.
        """
        if epsilon is None:
            self.budget = None
            return
        need = f"the budget is epsilon {epsilon} at delta {delta}; need epsilon > 0 and 0 < delta < 1"
        check_number("epsilon", epsilon, lambda e: e > 0.0, need)
        check_number("delta", delta, lambda d: 0.0 < d < 1.0, need)
        assert delta is not None
        self._check_delta(delta)
        self.budget = Budget(epsilon, delta)

    def within_budget(self, optimizer: DPOptimizer) -> bool:
        """Return whether one more step fits the budget; a loop that asks stops in time.

        Args:
            optimizer: The private optimizer that would step, on one batch of its loader.
        """
        loader = getattr(optimizer, "data_loader", None)
        rate = loader.sample_rate if isinstance(loader, DPDataLoader) else self._last_rate()
        return self._epsilon_after(optimizer.noise_multiplier, rate, 1) is None

    def _last_rate(self) -> float:
        return self.accountant.history[-1][1] if self.accountant.history else 0.0

    def _check_budget(self, optimizer: DPOptimizer, sample_rate: float) -> None:
        batches = optimizer.accumulated_iterations
        spent = self._epsilon_after(optimizer.noise_multiplier / batches**0.5, sample_rate, batches)
        if spent is not None:
            assert self.budget is not None
            raise BudgetError(
                f"This step would bring epsilon to {rounded_up(spent, 6)} at delta {self.budget.delta:g}, beyond the "
                f"budget of {self.budget.epsilon:g}; nothing of it was released. Stop here, or raise the budget with "
                "set_budget (the data then leaks more)."
            )

    def _epsilon_after(self, noise_multiplier: float, sample_rate: float, steps: int) -> float | None:
        """Epsilon after these steps where it exceeds the budget, None where it does not."""
        if self.budget is None:
            return None
        after = copy.deepcopy(self.accountant)
        count(after, noise_multiplier, sample_rate, steps)
        if after.failure_probability:
            spent = after.get_epsilon(self.budget.delta)
            return spent if spent > self.budget.epsilon else None
        if self.budget.covers(after.history):
            return None
        ahead = self.budget.ahead
        while True:
            more = copy.deepcopy(after)
            if ahead:
                count(more, noise_multiplier, sample_rate, ahead)
            spent = more.get_epsilon(self.budget.delta)
            if spent <= self.budget.epsilon:
                self.budget = replace(self.budget, fits=list(more.history), ahead=2 * ahead)
                return None
            if not ahead:
                return spent
            ahead //= 2
            self.budget = replace(self.budget, ahead=ahead)

    # ---- what was spent, and checkpoints

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon that was spent so far.

        Args:
            delta: The δ at which it is read, in (0, 1) and well below 1 / (number of examples). It has to be given.

        Returns:
            Epsilon for neighbouring data sets that differ by one example added or removed. 0 before the first step;
                infinity where a step had no noise.

        Raises:
            ValueError: delta is not in (0, 1).
            TypeError: it was not given.
        """
        if delta is None:
            raise TypeError(
                "get_epsilon() was called without delta, and there is no epsilon without one. Choose it well below "
                f"1 / (number of examples): get_epsilon(delta={customary_delta(self._examples() or 10**5 - 1):g})."
            )
        self._check_delta(delta)
        epsilon = self.accountant.get_epsilon(delta)
        if epsilon == 0 and self._dataset is not None and not getattr(self.accountant, "history", True):
            warn_caller(
                "No private step was taken, so epsilon is 0. If you have trained already, it was without privacy: "
                "train with the model, optimizer and loader that make_private returned."
            )
        return epsilon

    def _check_delta(self, delta: float) -> None:
        """Warn where a promise at ``delta`` allows to publish a person."""
        examples = self._examples()
        if examples is not None and delta > 1 / examples:
            warn_caller(
                f"delta is {delta:g}, above 1 / {examples} (the number of examples): a mechanism that publishes one "
                f"example whole may keep such a promise. Use {customary_delta(examples):g} or less.",
            )

    def _examples(self) -> int | None:
        return len(self._dataset) if hasattr(self._dataset, "__len__") else None

    def __repr__(self) -> str:
        examples = self._examples()
        delta = self.budget.delta if self.budget else customary_delta(examples or 10**5 - 1)
        # Nobody asked for this delta: another one has another epsilon.
        origin = f" (below 1 / {examples} examples)" if examples and not self.budget else ""
        spent = rounded_up(self.accountant.get_epsilon(delta))
        parts = [f"accountant={self.accountant!r}", f"epsilon={spent} at {delta=:g}{origin}"]
        if self.budget:
            parts.append(f"budget={self.budget.epsilon:g}")
        parts += ["secure_mode=True"] if self.secure_mode else []
        # Told here and not by a warning: where there are none nothing is wrong, only slower.
        parts.append(f"kernels={native.description()}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> None:
        """Save everything that a run which continues bit for bit needs.

        Call it between steps, not within a logical batch; a batch that the loop has fetched and not used yet is drawn
        again by the run that goes on, as are those that the loader's workers have drawn ahead. The file holds weights,
        optimiser, accountant, noise, batches and the global random state (dropout). Of several ranks, rank 0 writes
        ``path``, and the others what is theirs alone beside it (``path.rank1`` ...: the random state, and the shards of
        a sharded module); all load ``path``.

        Args:
            path: A file name, or a file object.
            module: The private module.
            optimizer: The private optimizer; None saves weights and accountant alone.
            noise_scheduler: A schedule to save too.
            grad_clip_scheduler: A schedule to save too.
            checkpoint_dict: Entries of your own, returned by :meth:`load_checkpoint`.
            module_state_dict_kwargs: Arguments for ``module.state_dict``.
            torch_save_kwargs: Arguments for ``torch.save``.
            data_loader: The private loader; the optimiser's where not given.

        Raises:
            PrivacyError: a batch is at hand whose step was not made yet.
            ValueError: the module is sharded, and ``path`` is no file name.
        """
        unused = 0
        if optimizer is not None:
            if optimizer.has_batch:
                raise PrivacyError(
                    "save_checkpoint was called within a batch, after a backward pass and before its step: a run that "
                    "is resumed from there would draw another batch, and add the noise to it that this run adds to the "
                    "one at hand. Call it after optimizer.step() (within a loop over pieces, where "
                    "optimizer.batch_goes_on is False), or give the batch up by optimizer.zero_grad() first."
                )
            data_loader = optimizer.data_loader if data_loader is None else data_loader
        data_loader = whole_batches(data_loader)
        if optimizer is not None and data_loader is optimizer.data_loader:
            unused = getattr(data_loader, "handed_out", 0) - optimizer.course.batches_seen
        schedulers = named_schedulers(noise_scheduler, grad_clip_scheduler)
        position = None
        if isinstance(data_loader, DPDataLoader):
            position = data_loader.position(unused)
            if optimizer is not None:
                position["batches"] = str(optimizer.course.batches_a_step)
                optimizer.course.expect(optimizer.noise, optimizer.steps, next_batch(optimizer, data_loader, position))
        checkpoint = Checkpoint(
            module=module.state_dict(**(module_state_dict_kwargs or {})),
            accountant=self.accountant.state_dict(),
            runs=copy.deepcopy(self._named()),
            random=RandomState.now(),
            optimizer=None if optimizer is None else optimizer.state_dict(),
            settings={} if optimizer is None else optimizer.setting,
            private=None if optimizer is None else PrivateState.from_run(optimizer, data_loader),
            sampler=position,
            schedulers={name: scheduler.state_dict() for name, scheduler in schedulers.items()},
            callers_own=checkpoint_dict or {},
        )
        checkpoint.save(path, None if optimizer is None else optimizer.ranks, torch_save_kwargs or {})

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` wrote.

        A file without dpcore's own entries restores weights, optimiser and accountant; noise and batches then go on
        with fresh seeds, with a warning. So they do where ``optimizer`` is left out and a seed that was given to the
        engine would draw those of the file's steps again.

        Args:
            path: A file name, or a file object.
            module: The private module, built as the saved one was.
            optimizer: The private optimizer, built with the saved one's settings.
            noise_scheduler: A schedule to restore.
            grad_clip_scheduler: A schedule to restore.
            module_load_dict_kwargs: Arguments for ``module.load_state_dict``.
            torch_load_kwargs: Arguments for ``torch.load``; ``weights_only=True`` where not given.
            data_loader: The private loader; the optimiser's where not given.

        Returns:
            The file's entries, your own among them, but for the seeds of noise and batches.

        Raises:
            PrivacyError: the run was saved under other settings, or it has gone on from the file in this process and
                made steps that the file does not know of. (Steps of other runs stay counted.)
        """
        data_loader = whole_batches(data_loader)
        ranks = None if optimizer is None else optimizer.ranks
        checkpoint = Checkpoint.load(path, ranks, {"weights_only": True} | (torch_load_kwargs or {}))
        others = {run: steps for run, steps in self._named().items() if run not in checkpoint.runs}
        checkpoint.check_continues(self._runs, self._ancestors)
        if optimizer is not None:
            data_loader = optimizer.data_loader if data_loader is None else data_loader
            checkpoint.check_settings(optimizer)
            # Sums of an unfinished batch are of the run that is left behind.
            optimizer.discard()
        module.load_state_dict(checkpoint.module, **(module_load_dict_kwargs or {}))
        self.accountant.load_state_dict(checkpoint.accountant)
        for noise, rate, steps in (step for run in others.values() for step in run):
            count(self.accountant, noise, rate, steps)
        self._runs, self._taken_over = copy.deepcopy(dict(checkpoint.runs)) | others, set()
        for private in self._optimizers():
            self._ancestors[private.course.rename()] = set(checkpoint.runs)
        if optimizer is not None:
            checkpoint.restore_optimizer(optimizer, data_loader)
        else:
            self._draw_anew(checkpoint)
        checkpoint.random.restore()
        checkpoint.restore_schedulers(named_schedulers(noise_scheduler, grad_clip_scheduler))
        checkpoint.restore_batches(data_loader, optimizer)
        return without_seeds(checkpoint.entries())

    def _optimizers(self) -> list[DPOptimizer]:
        """Return the optimizers whose steps this engine counts."""
        return [optimizer for optimizer in private_optimizers() if optimizer.engine is self]

    def _draw_anew(self, checkpoint: Checkpoint) -> None:
        """Go on with other noise and batches than those of a checkpoint that was loaded without its optimizer."""
        anew = checkpoint.draw_anew(self._optimizers())
        if self.seed is not None and checkpoint.noise_seed == str(self._run_seed()):
            self.seed, anew = secrets.randbits(128), True
        if anew:
            warn_caller(
                "The checkpoint was loaded without its optimizer, and noise and batches of this run's seed would "
                "repeat those of the checkpoint's steps; they go on with fresh secret seeds. Pass optimizer= to go on "
                "bit for bit.",
            )

    @staticmethod
    def is_compatible(*, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Return whether every submodule treats examples apart."""
        return ModuleValidator.is_valid(module)

    @staticmethod
    def validate(*, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raises the first reason against ``module``."""
        ModuleValidator.validate(module, strict=True)

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy with what can be replaced replaced; raises what is left."""
        fixed = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed

    # ---- the steps of make_private

    def _check_inputs(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any,
        settings: _Settings,
        rand_on_empty: bool,
        ranks: Ranks | None,
    ) -> None:
        """Refuses what cannot be trained privately, before anything is changed."""
        ModuleValidator.validate(module, strict=True)
        if not module.training:
            raise IllegalModuleConfigurationError(
                "The module is in evaluation mode; call module.train() before make_private."
            )
        settings.check_numbers(module)
        settings.check_clipping(ranks is not None)
        _check_parameters(module, optimizer)
        if criterion is not None:
            check_criterion(criterion, settings.loss_reduction)
        if rand_on_empty:
            warn_caller(RAND_ON_EMPTY)
        if self.secure_mode and settings.noise_generator is not None:
            raise ValueError(
                "secure_mode draws the noise from the operating system, and noise_generator would be ignored; leave it "
                "out, or build the engine without secure_mode."
            )
        if self.secure_mode and not settings.poisson_sampling:
            raise ValueError("secure_mode also draws the batches; it needs poisson_sampling=True.")

    def _private_loader(
        self, data_loader: DataLoader[Any], settings: _Settings, ranks: Ranks | None
    ) -> tuple[DataLoader[Any], float]:
        """The loader to train with, and the rate at which an example is in a batch."""
        self._check_dataset(data_loader)
        check_data_set(data_loader.dataset)
        if not settings.poisson_sampling:
            return _ordinary_loader(data_loader, settings, ranks)
        seed = self._run_seed()
        if ranks is not None:
            # Ranks may have generators of different seeds, for an order of their own.
            seed = ranks.share_seed(seed, data_loader.generator)
            ranks.agree({"the number of examples": len(data_loader.dataset)})  # type: ignore[arg-type]
            check_same_data(data_loader.dataset, ranks)
        poisson = DPDataLoader.from_data_loader(
            data_loader,
            sample_rate=settings.sample_rate,
            seed=seed,
            secure=self.secure_mode,
            distributed=ranks is not None,
        )
        return poisson, poisson.sample_rate

    def _noise_seed(self, generator: torch.Generator | None, ranks: Ranks | None) -> int | None:
        """The seed of the noise; the same on all ranks."""
        seed = self._run_seed() if generator is None else drawn_seed(generator)
        return seed if ranks is None else ranks.share_seed(seed)

    def _agree_between_ranks(
        self,
        ranks: Ranks,
        module: nn.Module,
        data_loader: DataLoader[Any],
        settings: _Settings,
        rate: float,
        divisor: float,
    ) -> None:
        """PrivacyError where a rank was called with other settings: its sums would get the noise of these."""
        ranks.agree(
            {
                "accountant": self.accountant.mechanism(),
                "secure_mode": self.secure_mode,
                "poisson_sampling": settings.poisson_sampling,
                "sample_rate": rate,
                "the number of steps in a round": len(data_loader),
                "the number of examples": len(data_loader.dataset),  # type: ignore[arg-type]
                "expected_batch_size": divisor,
                "noise_multiplier": settings.noise_multiplier,
                "max_grad_norm": settings.max_grad_norm,
                "clipping": settings.clipping,
                "loss_reduction": settings.loss_reduction,
                "the trained parameters": [
                    (name, tuple(p.shape), p.dtype) for name, p in module.named_parameters() if p.requires_grad
                ],
            }
        )

    def _private_optimizer(
        self,
        optimizer: Optimizer,
        recorded: AbstractGradSampleHooks,
        settings: _Settings,
        divisor: float,
        seed: int | None,
        ranks: Ranks | None,
    ) -> DPOptimizer:
        """The optimiser that clips, adds noise and steps."""
        options = dict(settings.options)
        if settings.clipping in FACTORS:
            options["factors"] = FACTORS[settings.clipping]
        noise = SecureNoise() if self.secure_mode else GaussianNoise(seed, rank=ranks.rank if ranks else 0)
        noise.is_chosen = self.seed is not None or settings.noise_generator is not None
        kind = get_optimizer_class(settings.clipping, ranks is not None, settings.grad_sample_mode)
        return kind(
            optimizer,
            module=recorded,
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,  # type: ignore[arg-type]
            expected_batch_size=divisor,
            noise=noise,
            ranks=ranks,
            **options,
        )

    def _attach_accounting(
        self, private: DPOptimizer, data_loader: DataLoader[Any], settings: _Settings, fixed_rate: float
    ) -> None:
        """From now on every step is checked against the budget and the ledger, and counted."""
        private.data_loader = data_loader
        private.course.batches_seen = getattr(data_loader, "handed_out", 0)
        private.counted_by = weakref.ref(self)
        if private.ranks is not None:
            private.course.run = f"{private.ranks.share_seed(None):x}"
        private.setting["clipping"] = settings.clipping
        private.setting["sample_rate"] = fixed_rate if settings.poisson_sampling else None

        def rate() -> float:
            """The rate in force: a schedule may have changed the loader's."""
            return data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else fixed_rate

        if isinstance(data_loader, DPDataLoader):
            number_batches(private.module, functools.partial(getattr, data_loader, "handed_out"))
        private.attach_step_hook(lambda of: self._count(of, rate()))
        private.attach_step_guard(lambda of: self._check_budget(of, rate()))
        if isinstance(data_loader, CountingDataLoader):
            give(data_loader, self._unused)
            source = functools.partial(getattr, data_loader, "source")
            private.ledger = Ledger(source, self._unused, settings.check_batches)
        if not settings.check_isolation:
            private.module.isolation.switch_off()

    def _count(self, optimizer: DPOptimizer, rate: float) -> None:
        """Count a step, and under which name."""
        self.accountant.get_optimizer_hook_fn(rate)(optimizer)
        k = optimizer.accumulated_iterations
        _add(self._runs.setdefault(optimizer.course.run, []), (optimizer.noise_multiplier / k**0.5, rate, k))

    def spent(self) -> dict[str, Any]:
        """Return what was spent, run by run, for the states of optimizers: whoever goes on with them has spent it."""
        return {"runs": copy.deepcopy(self._named()), "failure_probability": self.accountant.failure_probability}

    def _named(self) -> Runs:
        """Return all steps that were counted by the names of their runs; those counted by hand have the engine's."""
        rest = unknown_steps(self.accountant.history, [step for run in self._runs.values() for step in run])
        if rest:
            for step in rest:
                _add(self._runs.setdefault(self._name, []), step)
        for optimizer in self._optimizers():
            self._runs.setdefault(optimizer.course.run, [])
        return self._runs

    def take_over(self, spent: Mapping[str, Any], optimizer: DPOptimizer) -> None:
        """Count what :meth:`spent` told, as far as it is not counted yet, before ``optimizer`` goes on.

        A seed of the user's would begin anew, so that its noise and its batches would be those of that run's steps.

        Args:
            spent: What was spent where the optimizer's new state was saved.
            optimizer: One of this engine's.
        """
        runs: Runs = spent["runs"]
        for run, history in runs.items():
            known = steps_of(self._named().get(run, []))
            for noise, rate, steps in history:
                new, known = max(0, steps - known), max(0, known - steps)
                if new:
                    count(self.accountant, noise, rate, new)
                    _add(self._runs.setdefault(run, []), (noise, rate, new))
                    self._taken_over.add(run)
        others = self._taken_over & runs.keys()
        if self._taken_over and spent.get("failure_probability", 0.0) > self.accountant.failure_probability:
            self.accountant.failure_probability = spent["failure_probability"]
        if others - optimizer.course.resumed:
            optimizer.course.resumed |= others
            steps = sum(map(steps_of, runs.values()))
            optimizer.noise.branch("resumed", steps, known=True)
            if isinstance(optimizer.data_loader, DPDataLoader):
                sampler = optimizer.data_loader.sampler_state
                sampler.seed = derived_seed(sampler.seed, "resumed", steps)

    def _run_seed(self) -> int | None:
        """Return the seed of this call of make_private.

        A second model with the noise and the batches of the first would leak what the two have in common, bare.
        """
        if self.seed is None or not self._made:
            return self.seed
        digest = hashlib.sha256(f"dpcore run {self.seed} {self._made}".encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def _check_dataset(self, data_loader: DataLoader[Any]) -> None:
        if self._dataset is not None and self._dataset is not data_loader.dataset:
            warn_caller(
                "This engine has made another data set private before; its accountant adds up the steps on both, which "
                "is the epsilon of their union. Use one PrivacyEngine per data set.",
            )
        self._dataset = data_loader.dataset


def _add(history: History, step: tuple[float, float, int]) -> None:
    """Add steps to a history, in which equal neighbours are counted together."""
    if history and tuple(history[-1][:2]) == step[:2]:
        step = (*step[:2], step[2] + history.pop()[2])
    history.append(step)


@dataclass(frozen=True)
class _Settings:
    """The arguments of make_private that are numbers and switches."""

    noise_multiplier: float
    max_grad_norm: float | Sequence[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    sample_rate: float | None
    expected_batch_size: float | None
    check_batches: bool
    check_isolation: bool
    options: Mapping[str, Any]

    def check_numbers(self, module: nn.Module) -> None:
        """ValueError where a number is none, out of its range, or too large for the module's parameters."""
        check_noise_multiplier(self.noise_multiplier, NOISE_HINT)
        if self.sample_rate is not None:
            check_number("sample_rate", self.sample_rate, lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
        if self.expected_batch_size is not None:
            check_divisor(self.expected_batch_size)
        each = isinstance(self.max_grad_norm, Sequence) and not isinstance(self.max_grad_norm, str)
        bounds = [check_max_grad_norm(c) for c in (self.max_grad_norm if each else [self.max_grad_norm])]  # type: ignore[union-attr]
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad and p.dtype.is_floating_point}
        for dtype in dtypes:
            for c in bounds:
                check_max_grad_norm(c, torch.promote_types(dtype, torch.float32))
            sensitivity = math.hypot(*bounds)
            check_noise(self.noise_multiplier, sensitivity, self.noise_multiplier * sensitivity, dtype)

    def check_clipping(self, distributed: bool) -> None:
        """Refuse options and bounds that the way of clipping does not take.

        Raises:
            TypeError: there is no such option.
            ValueError: there is no such way of clipping, or it takes bounds of another kind.
        """
        kind = get_optimizer_class(self.clipping, distributed)
        own = {p for c in kind.__mro__ for p in inspect.signature(c).parameters if issubclass(c, DPOptimizer)}
        arguments = {*inspect.signature(PrivacyEngine.make_private).parameters} - {"self", "options"}
        for name in self.options:
            if name in INSTEAD:
                raise TypeError(f"make_private() takes no argument {name!r}; {INSTEAD[name]}.")
            if name not in own - {"options"}:
                raise TypeError(
                    f"make_private() takes no argument {name!r} with clipping={self.clipping!r}."
                    f"{did_you_mean(name, own | arguments)}"
                )
        if "factors" in self.options and self.clipping in FACTORS:
            raise ValueError(
                f"clipping={self.clipping!r} is a clipping rule, and factors= is another one; pass factors= with "
                "clipping='flat', or leave it out."
            )
        if (self.clipping == "per_layer") != isinstance(self.max_grad_norm, Sequence):
            raise ValueError(
                f"clipping={self.clipping!r} with max_grad_norm={self.max_grad_norm}: per_layer takes a list of "
                "bounds, one per trained parameter; the others take one number."
            )


def _trainable(
    module: nn.Module, optimizer: Optimizer, settings: _Settings
) -> tuple[nn.Module, Optimizer, Ranks | None]:
    """Module and optimiser, with whole parameters where they are sharded, and the processes that train together."""
    _check_types(module, optimizer)
    if "torch.distributed.fsdp" in sys.modules:
        # Slow to import, and nothing can be sharded before it was.
        from dpcore.sharding import shard

        module, optimizer = shard(module, optimizer)
    ranks = ranks_of(module)
    mode, wrap_model = settings.grad_sample_mode, settings.wrap_model
    if ranks is not None and ranks.sharded and (mode != DEFAULT_MODE or not wrap_model):
        raise UnsupportedError(
            f"grad_sample_mode={mode!r} with wrap_model={wrap_model} is not for a sharded module, "
            f"whose ordinary gradients torch would average over the ranks; use {DEFAULT_MODE!r} and a wrapper."
        )
    return module, optimizer, ranks


def _check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """PrivacyError where the optimiser would update what is not clipped and noised once."""
    if isinstance(optimizer, DPOptimizer):
        raise PrivacyError(
            "The optimizer is private already; a second make_private would add its noise twice. Go on with the objects "
            "that the first call returned, or build model, optimizer and loader anew (run those cells again, too)."
        )
    known = {id(p) for p in module.parameters()}
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not in_optimizer <= known:
        raise PrivacyError(
            "The optimizer holds parameters that are not the module's: they would be updated without clipping and "
            "noise. Build the optimizer from module.parameters()."
        )


def _ordinary_loader(
    data_loader: DataLoader[Any], settings: _Settings, ranks: Ranks | None
) -> tuple[DataLoader[Any], float]:
    """The loader of a run without Poisson sampling, and the rate that its accountant assumes."""
    if ranks is not None:
        check_shares(data_loader, ranks)
    check_ordinary(data_loader)
    if settings.check_batches:
        data_loader = counted(data_loader)
    _check_length(data_loader, settings.sample_rate, settings.expected_batch_size)
    if settings.sample_rate is None:
        check_once_a_round(data_loader)
    rate = 1 / len(data_loader) if settings.sample_rate is None else settings.sample_rate
    warn_caller(
        f"poisson_sampling=False: epsilon is computed for Poisson batches at the rate {rate:.6g}, and "
        "that of shuffled or fixed batches can be larger. Use it for comparisons, and poisson_sampling=True "
        "for a release.",
    )
    return data_loader, rate


def _divisor(data_loader: DataLoader[Any], settings: _Settings, rate: float, rate_is_given: bool) -> float:
    """The number by which every update is divided.

    With a warning where it tells how many examples there are, and the rate was chosen so that it does not.
    """
    if settings.expected_batch_size is not None:
        return settings.expected_batch_size
    divisor: float = len(data_loader.dataset) * rate  # type: ignore[arg-type]
    if rate_is_given:
        warn_caller(
            f"expected_batch_size was not given, so every update is divided by {divisor:.6g}, the sample rate times "
            f"the number of examples, which tells how many there are. Pass expected_batch_size={divisor:.6g} if that "
            "may be known, and another public number if not.",
        )
    return divisor


def _recorded(module: nn.Module, settings: _Settings) -> Any:
    """``module`` recorded in the mode of ``settings``, or as it is where it is recorded already."""
    mine = settings.batch_first, settings.loss_reduction
    if not isinstance(module, AbstractGradSampleHooks):
        return prepare_module(
            module, settings.grad_sample_mode, settings.wrap_model, batch_first=mine[0], loss_reduction=mine[1]
        )
    if (module.batch_first, module.loss_reduction) != mine:
        raise ValueError(
            f"The module is wrapped already, with batch_first={module.batch_first} and "
            f"loss_reduction={module.loss_reduction!r}; pass the same, or its to_standard_module()."
        )
    module.check_unchanged()
    return module


def _check_types(module: Any, optimizer: Any) -> None:
    """Refuse what is no module or no optimiser that can be made private."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is of type {type(module).__name__}; pass the torch.nn.Module that is to be trained.")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; pass one torch.optim.Optimizer, with "
            "parameter groups where layers need settings of their own."
        )
    check_takes_one_gradient(optimizer)


def _check_unprepared(*given: Any) -> None:
    """Refuse what accelerate has wrapped already, and what is no loader."""
    if not hasattr(loader := given[-1], "dataset"):
        raise TypeError(
            f"data_loader is of type {type(loader).__name__}; pass a torch.utils.data.DataLoader over the data set: "
            "DataLoader(data, batch_size=...)."
        )
    for value in given:
        if type(value).__module__.startswith("accelerate."):
            raise UnsupportedError(
                f"The {type(value).__name__} was made by accelerate's prepare(), and make_private cannot wrap it. Call "
                "dpcore.accelerate.prepare(accelerator, engine, module=..., optimizer=..., data_loader=..., ...) "
                "instead of both."
            )


def _check_length(data_loader: Any, *given: float | None) -> None:
    """Refuse a data set without a length where a number is to be derived from it."""
    if None in given and not hasattr(data_loader.dataset, "__len__"):
        raise ValueError(
            f"The data set, of type {type(data_loader.dataset).__name__}, has no length from which the sample rate and "
            "the divisor could be derived; pass sample_rate= and expected_batch_size=. (Poisson sampling needs a "
            "map-style data set, with __len__ and __getitem__.)"
        )
