"""The entry point: two lines make an ordinary training script private."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any, Unpack

from torch import nn
from torch.utils.data import DataLoader

from dpcore import native
from dpcore.accountants import IAccountant, create_accountant
from dpcore.budget import Budget, BudgetError
from dpcore.checkpoint import Checkpoint, named_schedulers, sharded_as, without_seeds
from dpcore.correlated import check_correlated
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import Ranks
from dpcore.errors import warn_caller
from dpcore.opacus_names.engine import ExtensionPoints
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers.checks import SPENT
from dpcore.parts import Forwarded
from dpcore.private_inputs import check_length, check_unprepared, rate_of, sampling_of, steps_that_fit
from dpcore.private_settings import PrivateSettings, completed, spelled_out
from dpcore.private_setup import Setup, run_seed
from dpcore.progress import progress
from dpcore.secret_seeds import check_seed
from dpcore.spending import Spending
from dpcore.utils.batch_memory_manager import PiecewiseLoader, whole_batches
from dpcore.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from dpcore.validators import ModuleValidator

__all__ = ["BudgetError", "PrivacyEngine"]


class PrivacyEngine(ExtensionPoints):
    """The accountant, and the way to make (module, optimizer, data loader) private.

    Args:
        accountant: How epsilon is computed: "prv" (tight, the default), "rdp" (looser), "gdp" (an approximation, no
            bound) or a registered name.
        secure_mode: Noise and batches come from the operating system's cryptographic generator, and noise is hardened
            against attacks on floating point. Slower, and nothing can be repeated.
        seed: Makes noise and batches reproducible. Without it they are secret, as they must be for a release; a
            loader's ``generator`` then seeds the batches. A copy of the engine has none.

    Raises:
        ValueError: there is no such accountant, a seed is below 0 or no whole number, or ``secure_mode`` was given one.
    """

    # The accountant, in whose place another one may come that knows of all steps; the budget, None where there is none.
    accountant: IAccountant = Forwarded("_spending")  # type: ignore[assignment]
    budget: Budget | None = Forwarded("_spending")  # type: ignore[assignment]

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None) -> None:
        if secure_mode and seed is not None:
            raise ValueError("secure_mode draws from the operating system and takes no seed; pass one of the two.")
        self._spending = Spending(create_accountant(accountant))
        self.secure_mode = secure_mode
        self.seed = None if seed is None else check_seed(seed)
        self._made = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy a secret seed: with the first one's it would make the same batches and the same noise."""
        vars(self).update(state, seed=None)

    @spelled_out
    def make_private(self, *, noise_multiplier: float, **options: Unpack[PrivateSettings]) -> Any:
        """Make a training script private: every ``optimizer.step()`` clips, adds noise, and is accounted for.

        Train with what is returned as before. The update is (Σ clipped gradients + σ·C·N(0, I)) / expected_batch_size,
        for a mean loss.

        Args:
            noise_multiplier: σ, the standard deviation of the noise over the bound ``max_grad_norm``. More noise,
                smaller epsilon; 0 gives no privacy.
            **options: The settings (:class:`dpcore.private_settings.PrivateSettings`), and further arguments of the
                optimiser's class for ``clipping``.

        Returns:
            (module, optimizer, data_loader); in the mode "ghost" (module, optimizer, criterion, data_loader).

        Raises:
            PrivacyError: going on would release something that the accountant does not know of.
            UnsupportedError: the module or the loader cannot be made private exactly.
            ValueError: an argument is out of its range, or arguments contradict each other.
            TypeError: an argument is of another class than it must be.
        """
        settings = completed(options)
        setup = Setup.begin(settings, noise_multiplier, run_seed(self.seed, self._made), self.secure_mode)
        setup = self._extended(setup)
        setup.check()
        self._spending.check_takes(sampling_of(settings))
        self._spending.use(settings["data_loader"].dataset)
        loader, rate = setup.loader()
        divisor, noise = setup.divisor(loader, rate), setup.noise()
        setup.agree(self.accountant.mechanism(), loader, rate, divisor)
        recorded = setup.recorded()
        private = setup.private_optimizer(recorded, divisor, noise)
        setup.attach(private, loader, rate, self._spending)
        private.count_state()
        self._made += 1
        if (most := settings["max_physical_batch_size"]) is not None:
            loader = PiecewiseLoader(loader, most, private, counts_batches=True)
        if settings["grad_sample_mode"] != "ghost":
            return recorded, private, loader
        reduction, criterion = settings["loss_reduction"], settings["criterion"]
        criterion = nn.CrossEntropyLoss(reduction=reduction) if criterion is None else criterion
        return recorded, private, DPLossFastGradientClipping(recorded, private, criterion, reduction), loader

    @spelled_out
    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        enforce_budget: bool = True,
        **options: Unpack[PrivateSettings],
    ) -> Any:
        """Call :meth:`make_private` with the smallest noise that keeps ``epochs`` rounds within a privacy budget.

        A step beyond the budget raises :class:`BudgetError`, unless ``enforce_budget`` is False; see
        :meth:`set_budget`.

        Args:
            target_epsilon: ε, the most that the whole training may spend at ``target_delta``.
            target_delta: δ, well below 1 / (number of examples).
            epochs: Rounds of the loader to plan for, of ceil(1 / sample rate) steps each.
            enforce_budget: Whether a step that would exceed the budget is refused.
            **options: All other arguments of :meth:`make_private`.

        Returns:
            What :meth:`make_private` returns.

        Raises:
            ValueError: no noise keeps the budget; or as :meth:`make_private`.
            PrivacyError: as :meth:`make_private`.
            UnsupportedError: as :meth:`make_private`.
        """
        settings = completed(options)
        check_unprepared(settings)
        if len(self.accountant) or any(SPENT in group for group in settings["optimizer"].param_groups):
            warn_caller(
                "This accountant has already counted steps; the noise is chosen as if it had not, and get_epsilon will "
                "report the sum.",
            )
        loader = settings["data_loader"]
        if isinstance(loader, DPDataLoader):
            settings["sample_rate"] = loader.sample_rate
        check_length(loader, settings["sample_rate"])
        check_correlated(settings, self.secure_mode)
        rate, mechanism = rate_of(settings), self.accountant.mechanism()
        self._spending.check_takes(sampling_of(settings))
        # Calibration finds that these steps fit; only beyond them need epsilon be computed at every step.
        noise, planned, failing = steps_that_fit(settings, rate, target_epsilon, target_delta, epochs, mechanism)
        private = self.make_private(noise_multiplier=noise, **settings)
        if enforce_budget:
            self._spending.set_budget(target_epsilon, target_delta, planned, failing)
        else:
            self._spending.check_delta(target_delta)
        return private

    def set_budget(self, epsilon: float | None, delta: float | None = None) -> None:
        """Refuse from now on every step that would exceed a budget; nothing of such a step is released.

        Args:
            epsilon: The most that may be spent; None lifts the budget.
            delta: The δ at which epsilon is read.

        Raises:
            ValueError: not epsilon > 0 and 0 < delta < 1.
        """
        self._spending.set_budget(epsilon, delta)

    def within_budget(self, optimizer: DPOptimizer) -> bool:
        """Return whether one more step fits the budget; a loop that asks stops in time.

        Args:
            optimizer: The private optimizer that would step, on one batch of its loader.
        """
        return self._spending.within_budget(optimizer)

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
        return self._spending.get_epsilon(delta)

    def progress(self, loader: Any, delta: float | None = None) -> Iterator[Any]:
        """Yield the batches of ``loader`` behind a bar of tqdm, which tells epsilon every five seconds and at the end.

        Args:
            loader: The private loader.
            delta: The δ at which epsilon is read; the budget's, or else a power of ten below 1 / (number of examples).

        Raises:
            UnsupportedError: the package tqdm is not installed.
        """
        return progress(self._spending, loader, delta)

    def __repr__(self) -> str:
        # Kernels are told here and not by a warning: where there are none nothing is wrong, only slower.
        parts = [*self._spending.parts(), *["secure_mode=True"] * self.secure_mode, f"kernels={native.description()}"]
        if any(optimizer.advice for optimizer in self._spending.optimizers()):
            parts.append("whole batches (optimizer.advice says what pieces would do)")
        parts += filter(None, (of.reduction.explained(of.accumulator) for of in self._spending.optimizers()))
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
        ``path``, and the others what is theirs alone beside it (``path.rank1`` ...: the random state). The shards of a
        sharded module are in a folder beside it, which any number of ranks can load. All load ``path``.

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
        schedulers = named_schedulers(noise_scheduler, grad_clip_scheduler)
        weights = module.state_dict(**(module_state_dict_kwargs or {}))
        loader = _loader_of(optimizer, data_loader)
        checkpoint = Checkpoint.of_run(weights, self._spending, optimizer, loader, schedulers, checkpoint_dict or {})
        checkpoint.save(path, _ranks_of(module, optimizer), torch_save_kwargs or {})

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
            PrivacyError: the run was saved under other settings, or has made steps here that the file does not know.
            UnsupportedError: the loader's sampler is one of your own, and would draw batches of that run again.
        """
        data_loader = _loader_of(optimizer, data_loader)
        ranks = _ranks_of(module, optimizer)
        options = {"weights_only": True} | (torch_load_kwargs or {})
        checkpoint = Checkpoint.load(path, ranks, options, partial(sharded_as, module, optimizer))
        self._spending.check_continues(checkpoint.runs)
        checkpoint.check_batches(data_loader)
        if optimizer is not None:
            checkpoint.check_settings(optimizer)
            optimizer.discard()  # sums of an unfinished batch are of the run that is left behind
        module.load_state_dict(checkpoint.module, **(module_load_dict_kwargs or {}))
        self._spending.go_on(checkpoint.accountant, checkpoint.runs)
        if optimizer is not None:
            checkpoint.restore_optimizer(optimizer, data_loader)
        else:
            _draw_anew(self, checkpoint)
        checkpoint.random.restore()
        checkpoint.restore_schedulers(named_schedulers(noise_scheduler, grad_clip_scheduler))
        checkpoint.restore_batches(data_loader, optimizer)
        self._spending.go_on_in_epoch(checkpoint.sampler or {})
        if ranks is not None:
            ranks.join_batches(data_loader)
        return without_seeds(checkpoint.entries())

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


def _loader_of(optimizer: DPOptimizer | None, given: Any) -> Any:
    """Return the loader of whole batches that a checkpoint is about: the optimizer's where none was given."""
    return optimizer.run.loader if given is None and optimizer is not None else whole_batches(given)


def _ranks_of(module: Any, optimizer: DPOptimizer | None) -> Ranks | None:
    """Return those who save and load together: without an optimizer, those that hold the shards of a module."""
    if optimizer is not None:
        return optimizer.ranks
    ranks = getattr(getattr(module, "_module", module), "ranks", None)
    return ranks if isinstance(ranks, Ranks) and ranks.sharded else None


def _draw_anew(engine: PrivacyEngine, checkpoint: Checkpoint) -> None:
    """Go on with other noise and batches than those of a checkpoint that was loaded without its optimizer."""
    anew = checkpoint.draw_anew(engine._spending.optimizers())
    if engine.seed is not None and checkpoint.noise_seed == str(run_seed(engine.seed, engine._made)):
        engine.seed, anew = secrets.randbits(128), True
    if anew:
        warn_caller(
            "The checkpoint was loaded without its optimizer, and noise and batches of this run's seed would repeat "
            "those of the checkpoint's steps; they go on with fresh secret seeds. Pass optimizer= to go on bit for bit."
        )
