"""The entry point: two lines make an ordinary training script private."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.accountants import create_accountant, get_noise_multiplier
from dpcore.clipping import automatic_factors, check_max_grad_norm
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import check_shares, load_for_rank, ranks_of, save_for_rank
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.grad_sample.utils import DEFAULT_MODE, prepare_module
from dpcore.loading.checks import check_data_set, check_ordinary
from dpcore.loading.counting_loader import CountingDataLoader, counted
from dpcore.loading.ledger import Ledger
from dpcore.loading.uniform_sampler import steps_per_epoch
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers import DPOptimizer, get_optimizer_class
from dpcore.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, check_criterion
from dpcore.validators import ModuleValidator

FACTORS = {"automatic": automatic_factors}


class BudgetError(PrivacyError):
    """A step would exceed the privacy budget; nothing of it was released."""


class PrivacyEngine:
    """Keeps the accountant and makes (module, optimizer, data loader) private.

    ``accountant``: "prv" (tight, the default), "rdp", "gdp" or a registered name. ``seed``: makes noise and batches
    reproducible; without it they are secret, as they must be for a release. ``secure_mode``: noise and batches from the
    operating system's cryptographic generator, noise hardened against floating-point attacks; slower.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None) -> None:
        if secure_mode and seed is not None:
            raise ValueError("secure_mode draws from the operating system and takes no seed; pass one of the two.")
        self.accountant = create_accountant(accountant)
        self.secure_mode = secure_mode
        self.seed = seed
        self.budget: Budget | None = None
        self._dataset: Any = None
        self._made = 0
        self._ledger: Ledger | None = None

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
        **options: Any,
    ) -> Any:
        """(module, optimizer, data_loader) to train with as before; every ``optimizer.step()`` is accounted for. In the
        mode "ghost" there are four, with the criterion as the third.

        ``sample_rate`` and ``expected_batch_size`` are public numbers; where they are not given they are derived from
        the data's length, with a warning. ``clipping``: flat, per_layer (``max_grad_norm`` is then a list, one bound
        per trained parameter), adaptive (``options``: those of :class:`AdaClipDPOptimizer`) or automatic.
        ``noise_generator`` seeds the noise, for tests. ``grad_sample_mode``: "bookkeeping" never forms the ordinary
        gradient of the batch; "hooks" (also "functorch", "ew") leaves it in ``p.grad`` between ``backward()`` and
        ``step()``; "no_op" records nothing and takes ``p.grad_sample`` from the loop. All give the same updates.
        ``wrap_model=False`` returns hooks on the module instead of a wrapper; end with their ``cleanup()``.
        A module in ``DifferentiallyPrivateDistributedDataParallel``, or one to which ``fully_shard`` was applied, is
        trained by all ranks of its group, each of which calls this with the whole data set and the same settings;
        ``expected_batch_size`` is that of all ranks together.
        ``check_batches``: every step must use a batch of the returned loader, every example in one row.
        ``check_isolation``: the first batches of every kind, and rare random ones later, are used for experiments on
        whether the model keeps examples apart (:mod:`dpcore.example_isolation.check`); PrivacyError where it does not.
        """
        _check_types(module, optimizer)
        if "torch.distributed.fsdp" in sys.modules:
            # Slow to import, and nothing can be sharded before it was.
            from dpcore.sharding import shard

            module, optimizer = shard(module, optimizer)
        ranks = ranks_of(module)
        if ranks is not None and ranks.sharded and (grad_sample_mode != DEFAULT_MODE or not wrap_model):
            raise UnsupportedError(
                f"grad_sample_mode={grad_sample_mode!r} with wrap_model={wrap_model} is not for a sharded module, "
                f"whose ordinary gradients torch would average over the ranks; use {DEFAULT_MODE!r} and a wrapper."
            )
        self._check(module, optimizer, clipping, max_grad_norm)
        if criterion is not None:
            check_criterion(criterion, loss_reduction)
        if rand_on_empty:
            warn_caller(
                "rand_on_empty is not needed and is ignored: an empty batch keeps its structure and has length 0. A "
                "random example in its place would let one example move the sum by twice max_grad_norm.",
            )
        derived = sample_rate is None and not isinstance(data_loader, DPDataLoader)
        if self.secure_mode and not poisson_sampling:
            raise ValueError("secure_mode also draws the batches; it needs poisson_sampling=True.")
        self._check_dataset(data_loader)
        check_data_set(data_loader.dataset)
        if poisson_sampling:
            data_loader = DPDataLoader.from_data_loader(
                data_loader,
                sample_rate=sample_rate,
                seed=self._run_seed() if ranks is None else ranks.share_seed(self._run_seed()),
                secure=self.secure_mode,
                distributed=ranks is not None,
            )
            sample_rate = data_loader.sample_rate
        else:
            if ranks is not None:
                check_shares(data_loader, ranks)
            check_ordinary(data_loader)
            if check_batches:
                data_loader = counted(data_loader)
            _check_length(data_loader, sample_rate, expected_batch_size)
            if sample_rate is None:
                sample_rate = 1 / len(data_loader)
            warn_caller(
                f"poisson_sampling=False: epsilon is computed for Poisson batches at the rate {sample_rate:.6g}, and "
                "that of shuffled or fixed batches can be larger. Use it for comparisons, and poisson_sampling=True "
                "for a release.",
            )
        if expected_batch_size is None:
            expected_batch_size = len(data_loader.dataset) * sample_rate  # type: ignore[arg-type]
            if not derived:
                warn_caller(
                    f"The divisor {expected_batch_size:.6g} is derived from the number of examples, which is then no "
                    "secret; pass expected_batch_size= to keep it one.",
                )
        seed = self._run_seed()
        if noise_generator is not None:
            seed = int(torch.randint(2**62, (), generator=noise_generator))
        if ranks is not None:
            seed = ranks.share_seed(seed)
            ranks.agree(
                {
                    "accountant": self.accountant.mechanism(),
                    "secure_mode": self.secure_mode,
                    "poisson_sampling": poisson_sampling,
                    "sample_rate": sample_rate,
                    "the number of steps in a round": len(data_loader),
                    "the number of examples": len(data_loader.dataset),  # type: ignore[arg-type]
                    "expected_batch_size": expected_batch_size,
                    "noise_multiplier": noise_multiplier,
                    "max_grad_norm": max_grad_norm,
                    "clipping": clipping,
                    "loss_reduction": loss_reduction,
                    "the trained parameters": [
                        (name, tuple(p.shape), p.dtype) for name, p in module.named_parameters() if p.requires_grad
                    ],
                }
            )
        recorded = self._record(module, grad_sample_mode, wrap_model, batch_first, loss_reduction)
        if clipping in FACTORS:
            options["factors"] = FACTORS[clipping]
        private = get_optimizer_class(clipping, ranks is not None, grad_sample_mode)(
            optimizer,
            module=recorded,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            noise=SecureNoise() if self.secure_mode else GaussianNoise(seed, rank=ranks.rank if ranks else 0),
            ranks=ranks,
            **options,
        )
        private.data_loader = data_loader
        private.setting["sample_rate"] = sample_rate if poisson_sampling else None
        fixed_rate = sample_rate

        def rate() -> float:
            """The rate in force: a schedule may have changed the loader's."""
            return data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else fixed_rate

        private.attach_step_hook(lambda of: self.accountant.get_optimizer_hook_fn(rate())(of))
        private.attach_step_guard(lambda of: self._check_budget(of, rate()))
        if isinstance(data_loader, CountingDataLoader) and check_batches:
            private.ledger = self._ledger = Ledger(functools.partial(getattr, data_loader, "source"), self._ledger)
        if not check_isolation:
            recorded.isolation.switch_off()
        self._made += 1
        if grad_sample_mode == "ghost":
            criterion = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
            loss = DPLossFastGradientClipping(recorded, private, criterion, loss_reduction)
            return recorded, private, loss, data_loader
        return recorded, private, data_loader

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
        """:meth:`make_private` with the smallest noise that keeps ``epochs`` rounds within the budget.

        A step beyond it raises :class:`BudgetError`, unless ``enforce_budget`` is False; see :meth:`set_budget`.
        """
        if len(self.accountant):
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
            self.budget.planned = (noise_multiplier, rate, math.ceil(epochs * steps_per_epoch(rate) * (1 - 1e-12)))
        return private

    # ---- the budget

    def set_budget(self, epsilon: float | None, delta: float | None = None) -> None:
        """From now on a step after which epsilon at ``delta`` would exceed ``epsilon`` raises :class:`BudgetError`, and
        nothing of it is released. None lifts the budget."""
        if epsilon is None:
            self.budget = None
            return
        if delta is None or not (epsilon > 0.0 and 0.0 < delta < 1.0):
            raise ValueError(f"The budget is epsilon {epsilon} at delta {delta}; need epsilon > 0 and 0 < delta < 1.")
        self.budget = Budget(epsilon, delta)

    def within_budget(self, optimizer: DPOptimizer) -> bool:
        """Whether one more step of ``optimizer`` on one batch fits the budget; a loop that asks stops in time."""
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
                f"This step would bring epsilon to {spent:.6g} at delta {self.budget.delta:g}, beyond the budget of "
                f"{self.budget.epsilon:g}; nothing of it was released. Stop here, or raise the budget with set_budget "
                "(the data then leaks more)."
            )

    def _epsilon_after(self, noise_multiplier: float, sample_rate: float, steps: int) -> float | None:
        """Epsilon after these steps where it exceeds the budget, None where it does not."""
        if self.budget is None:
            return None
        after = copy.deepcopy(self.accountant)
        after.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)
        if self.budget.covers(after.history):
            return None
        spent = after.get_epsilon(self.budget.delta)
        return spent if spent > self.budget.epsilon else None

    # ---- what was spent, and checkpoints

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at ``delta``, for neighbours by adding or removing one example."""
        return self.accountant.get_epsilon(delta)

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
        """Everything that a run which continues bit for bit needs: weights, optimiser, accountant, noise, batches and
        the global random state (dropout). Save between steps, not within a logical batch.

        Of several ranks, rank 0 writes ``path``, and the others what is theirs alone beside it (``path.rank1`` ...: the
        random state, and the shards of a sharded module); all load ``path``. ``checkpoint_dict``: entries of the
        caller's own, returned by :meth:`load_checkpoint`. ``data_loader``: the optimiser's, where not given.
        """
        state = dict(checkpoint_dict or {})
        state["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
        state["privacy_accountant_state_dict"] = self.accountant.state_dict()
        state["torch_rng"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state_all()
        if optimizer is not None:
            data_loader = optimizer.data_loader if data_loader is None else data_loader
            state["optimizer_state_dict"] = optimizer.state_dict()
            state["setting"] = optimizer.setting
            state["privacy_state"] = {
                "noise": optimizer.noise.state_dict(),
                "steps": optimizer.steps,
                "noise_multiplier": optimizer.noise_multiplier,
                "max_grad_norm": optimizer.max_grad_norm,
                "expected_batch_size": optimizer.expected_batch_size,
                "sample_rate": data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else None,
            }
        for key, scheduler in (
            ("noise_scheduler_state_dict", noise_scheduler),
            ("grad_clip_scheduler_state_dict", grad_clip_scheduler),
        ):
            if scheduler is not None:
                state[key] = scheduler.state_dict()
        if isinstance(data_loader, DPDataLoader):
            state["sampler"] = data_loader.sampler_state.state_dict()
        save_for_rank(state, path, None if optimizer is None else optimizer.ranks, torch_save_kwargs or {})

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
        """Restores what :meth:`save_checkpoint` wrote, and returns it. PrivacyError where it was saved under other
        settings. A file without dpcore's own entries restores weights, optimiser and accountant, with a warning."""
        ranks = None if optimizer is None else optimizer.ranks
        state = load_for_rank(path, ranks, {"weights_only": True} | (torch_load_kwargs or {}))
        self._check_continues(state["privacy_accountant_state_dict"])
        if optimizer is not None:
            data_loader = optimizer.data_loader if data_loader is None else data_loader
            here = optimizer.setting
            if not state.get("privacy_state", {}).get("noise", True) and not isinstance(optimizer.noise, SecureNoise):
                raise PrivacyError(
                    "The checkpoint was saved in secure mode, this run has an ordinary generator: its noise would be "
                    "open to attacks on floating point. Build the engine with secure_mode=True."
                )
            for name, value in state.get("setting", {}).items():
                if here.get(name) != value:
                    raise PrivacyError(
                        f"The checkpoint was saved with {name}={value}, this run has {here.get(name)}; the "
                        "accountant's history would not describe it. Rebuild the run with the checkpoint's settings."
                    )
            # Sums of an unfinished batch are of the run that is left behind.
            optimizer.discard()
        module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
        self.accountant.load_state_dict(state["privacy_accountant_state_dict"])
        if optimizer is not None and "optimizer_state_dict" in state:
            optimizer.load_state_dict(state["optimizer_state_dict"])
        if optimizer is not None and "privacy_state" in state:
            private = state["privacy_state"]
            optimizer.noise.load_state_dict(private["noise"])
            optimizer.steps = private["steps"]
            optimizer.noise_multiplier = private["noise_multiplier"]
            optimizer.max_grad_norm = private["max_grad_norm"]
            optimizer.expected_batch_size = private["expected_batch_size"]
            if isinstance(data_loader, DPDataLoader) and private["sample_rate"] is not None:
                data_loader.set_sample_rate(private["sample_rate"])
            if optimizer.ranks is not None:
                optimizer.noise.rank = optimizer.ranks.rank
                optimizer.weights_agree = False
        elif optimizer is not None:
            # Its steps before the checkpoint may have used this run's seed, from number 0 on.
            optimizer.noise.seed = secrets.randbits(128)
            if isinstance(data_loader, DPDataLoader):
                data_loader.sampler_state.seed = secrets.randbits(128)
            warn_caller(
                "The checkpoint holds no state of noise and batches; the run goes on with fresh ones, and not bit for "
                "bit as it would have.",
            )
        if "torch_rng" in state:
            torch.set_rng_state(state["torch_rng"])
        if "cuda_rng" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        for key, scheduler in (
            ("noise_scheduler_state_dict", noise_scheduler),
            ("grad_clip_scheduler_state_dict", grad_clip_scheduler),
        ):
            if scheduler is not None and key in state:
                scheduler.load_state_dict(state[key])
        if isinstance(data_loader, DPDataLoader) and "sampler" in state:
            data_loader.sampler_state.load_state_dict(state["sampler"])
        return state

    @staticmethod
    def is_compatible(*, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether every submodule treats examples apart."""
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

    def _record(
        self, module: nn.Module, grad_sample_mode: str, wrap_model: bool, batch_first: bool, loss_reduction: str
    ) -> Any:
        """``module`` recorded in that mode, or as it is where it is recorded already."""
        if not isinstance(module, AbstractGradSampleHooks):
            return prepare_module(
                module, grad_sample_mode, wrap_model, batch_first=batch_first, loss_reduction=loss_reduction
            )
        if (module.batch_first, module.loss_reduction) != (batch_first, loss_reduction):
            raise ValueError(
                f"The module is wrapped already, with batch_first={module.batch_first} and "
                f"loss_reduction={module.loss_reduction!r}; pass the same, or its to_standard_module()."
            )
        module.check_unchanged()
        return module

    def _run_seed(self) -> int | None:
        """The seed of this call of make_private: a second model with the noise and the batches of the first would leak
        what the two have in common, bare."""
        if self.seed is None or not self._made:
            return self.seed
        digest = hashlib.sha256(f"dpcore run {self.seed} {self._made}".encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def _check_continues(self, accountant_state: dict[str, Any]) -> None:
        """PrivacyError where the accountant has counted steps that a checkpoint does not know of."""
        known: Counter[tuple[float, float]] = Counter()
        for noise, rate, steps in accountant_state["history"]:
            known[noise, rate] += steps
        for noise, rate, steps in self.accountant.history:
            known[noise, rate] -= steps
        forgotten = -sum(steps for steps in known.values() if steps < 0)
        if forgotten:
            raise PrivacyError(
                f"This engine has counted {forgotten} steps that are not in the checkpoint: epsilon would forget them, "
                "and training on would use their noise again, on other gradients, whose difference it would lay bare. "
                "To return to the checkpoint's weights, load its 'module_state_dict' into the module alone; the "
                "accountant and the noise then go on. To look at the run as it was, use a new PrivacyEngine."
            )

    def _check_dataset(self, data_loader: DataLoader[Any]) -> None:
        if self._dataset is not None and self._dataset is not data_loader.dataset:
            warn_caller(
                "This engine has made another data set private before; its accountant adds up the steps on both, which "
                "is the epsilon of their union. Use one PrivacyEngine per data set.",
            )
        self._dataset = data_loader.dataset

    def _check(self, module: nn.Module, optimizer: Optimizer, clipping: str, max_grad_norm: Any) -> None:
        ModuleValidator.validate(module, strict=True)
        if not module.training:
            raise ValueError("The module is in evaluation mode; call module.train() before make_private.")
        get_optimizer_class(clipping, False)
        if isinstance(max_grad_norm, str):
            check_max_grad_norm(max_grad_norm)
        if (clipping == "per_layer") != isinstance(max_grad_norm, Sequence):
            raise ValueError(
                f"clipping={clipping!r} with max_grad_norm={max_grad_norm}: per_layer takes a list of bounds, one per "
                "trained parameter; the others take one number."
            )
        if isinstance(optimizer, DPOptimizer):
            raise PrivacyError("The optimizer is private already; a second make_private would add its noise twice.")
        known = {id(p) for p in module.parameters()}
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not in_optimizer <= known:
            raise PrivacyError(
                "The optimizer holds parameters that are not the module's: they would be updated without clipping and "
                "noise. Build the optimizer from module.parameters()."
            )


def _check_types(module: Any, optimizer: Any) -> None:
    """What can be made private at all."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is of type {type(module).__name__}; pass the torch.nn.Module that is to be trained.")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; pass one torch.optim.Optimizer, with "
            "parameter groups where layers need settings of their own."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the same batch several times in a step, each of which would be a release; use SGD, "
            "Adam or another optimizer that takes one gradient per step."
        )


def _check_length(data_loader: Any, *given: float | None) -> None:
    """What is to be derived from a length needs one."""
    if None in given and not hasattr(data_loader.dataset, "__len__"):
        raise ValueError(
            f"The data set, of type {type(data_loader.dataset).__name__}, has no length from which the sample rate and "
            "the divisor could be derived; pass sample_rate= and expected_batch_size=."
        )


@dataclass
class Budget:
    """What may be spent. ``planned``: (noise multiplier, sample rate, steps) that are known to fit."""

    epsilon: float
    delta: float
    planned: tuple[float, float, int] | None = None

    def covers(self, history: Sequence[tuple[float, float, int]]) -> bool:
        """Whether a history is no more than was planned: fewer steps, each with as much noise and as few examples."""
        if self.planned is None:
            return False
        noise, rate, steps = self.planned
        return sum(n for _, _, n in history) <= steps and all(s >= noise and q <= rate for s, q, _ in history)
