"""The steps of make_private: settings, checks, the loader, the divisor, the recorder and the optimizer."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.arguments import check_divisor, check_noise_multiplier, check_number, did_you_mean
from dpcore.clipping import automatic_factors, check_max_grad_norm, check_noise
from dpcore.correlated import check_correlated, correlate
from dpcore.data_loader import RAND_ON_EMPTY, DPDataLoader
from dpcore.distributed import Ranks, check_shares, ranks_of
from dpcore.errors import UnsupportedError, warn_caller
from dpcore.grad_sample.empty_batches import number_batches
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.grad_sample.utils import DEFAULT_MODE, prepare_module
from dpcore.loading.checks import check_data_set, check_once_a_round, check_ordinary
from dpcore.loading.counting_loader import CountingDataLoader, counted
from dpcore.loading.epoch_sampler import CYCLE, EpochSampler
from dpcore.loading.ledger import Ledger, give
from dpcore.loading.same_data import check_same_data
from dpcore.loading.uniform_sampler import drawn_seed
from dpcore.loading.units import users_digest
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers import DPOptimizer, get_optimizer_class
from dpcore.optimizers.optimizer import NOISE_HINT
from dpcore.private_inputs import (
    check_length,
    check_parameters,
    check_types,
    check_unprepared,
    group_of,
    longest_batch,
    sampling_of,
    unit_of,
    warn_of_overflow,
)
from dpcore.private_settings import DEFAULTS, NEEDED, PrivateSettings
from dpcore.reduction import check_keeps, reduction_of
from dpcore.spending import Spending
from dpcore.utils.batch_memory_manager import check_iterated, check_pieces
from dpcore.utils.fast_gradient_clipping_utils import check_criterion
from dpcore.validators import ModuleValidator
from dpcore.validators.errors import IllegalModuleConfigurationError

AGREED = {"poisson_sampling", "sampling", "mechanism", "max_grad_norm", "clipping", "loss_reduction", "keep_gathered"}
"""Settings that must be the same on all ranks."""
FACTORS = {"automatic": automatic_factors}
INSTEAD = {
    "sampler": "say how batches are drawn by sampling=, as sampling='bins'",
    "secure_mode": "it belongs to the engine: PrivacyEngine(secure_mode=True)",
    "generator": "pass noise_generator= to seed the noise",
    "noise": "it comes from the engine's seed, or from PrivacyEngine(secure_mode=True)",
    "module": "the module is recorded by make_private itself",
    "ranks": "the processes are those of the module's wrapper",
    **dict.fromkeys(("epochs", "target_epsilon", "target_delta"), "make_private_with_epsilon() plans noise by it"),
}
"""Arguments that are set by make_private itself, or have another name, and what to do instead of passing them."""


def run_seed(seed: int | None, made: int) -> int | None:
    """Return the seed of an engine's run behind ``made`` others.

    A second model with the noise and the batches of the first would leak what the two have in common, bare.
    """
    if seed is None or not made:
        return seed
    digest = hashlib.sha256(f"dpcore run {seed} {made}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


@dataclass(frozen=True)
class Setup:
    """One call of make_private: ``settings`` with all defaults, and what they are for.

    ``seed``: the run's, of batches and noise; None: secret ones.
    """

    settings: PrivateSettings
    noise_multiplier: float
    module: nn.Module
    optimizer: Optimizer
    ranks: Ranks | None
    seed: int | None
    secure: bool

    @classmethod
    def begin(cls, settings: PrivateSettings, noise_multiplier: float, seed: int | None, secure: bool) -> Setup:
        """Look at the classes of what was given; module and optimizer with whole parameters where they are sharded."""
        module, optimizer = settings["module"], settings["optimizer"]
        check_unprepared(settings)
        check_types(module, optimizer)
        if "torch.distributed.fsdp" in sys.modules or any(hasattr(p, "device_mesh") for p in module.parameters()):
            # Slow to import, and nothing can be sharded before it was.
            from dpcore.sharding import shard

            module, optimizer = shard(module, optimizer)
        ranks = ranks_of(module)
        mode, wrap_model = settings["grad_sample_mode"], settings["wrap_model"]
        if ranks is not None and ranks.sharded and (mode != DEFAULT_MODE or not wrap_model):
            raise UnsupportedError(
                f"grad_sample_mode={mode!r} with wrap_model={wrap_model} is not for a sharded module, "
                f"whose ordinary gradients torch would average over the ranks; use {DEFAULT_MODE!r} and a wrapper."
            )
        return cls(settings, noise_multiplier, module, optimizer, ranks, seed, secure)

    @property
    def group(self) -> int:
        """Return how many rows an example has."""
        return group_of(self.settings["group"], self.settings["data_loader"].dataset)

    # ---- checks

    def check(self) -> None:
        """Refuse what cannot be trained privately, before anything is changed."""
        settings = self.settings
        ModuleValidator.validate(self.module, strict=True)
        if not self.module.training:
            raise IllegalModuleConfigurationError(
                "The module is in evaluation mode; call module.train() before make_private."
            )
        self._check_numbers()
        self._check_clipping()
        check_correlated(settings, self.secure)
        sampling_of(settings)
        check_keeps(settings["keep_gathered"], reduction_of(self.module, self.ranks))
        check_parameters(self.module, self.optimizer)
        if settings["criterion"] is not None:
            check_criterion(settings["criterion"], settings["loss_reduction"])
        if settings["rand_on_empty"]:
            warn_caller(RAND_ON_EMPTY)
        if self.secure and settings["noise_generator"] is not None:
            raise ValueError(
                "secure_mode draws the noise from the operating system, and noise_generator would be ignored; leave it "
                "out, or build the engine without secure_mode."
            )
        if self.secure and not settings["poisson_sampling"]:
            raise ValueError("secure_mode also draws the batches; it needs poisson_sampling=True.")
        if settings["max_batch_size"] is not None and not settings["poisson_sampling"]:
            raise ValueError("max_batch_size cuts Poisson batches; it needs poisson_sampling=True.")
        if settings["max_physical_batch_size"] is not None:
            check_pieces(settings["max_physical_batch_size"], settings["batch_first"])
            check_iterated(settings["data_loader"], settings["max_physical_batch_size"])

    def _check_numbers(self) -> None:
        """ValueError where a number is none, out of its range, or too large for the module's parameters."""
        settings, sigma, bound = self.settings, self.noise_multiplier, self.settings["max_grad_norm"]
        check_noise_multiplier(sigma, NOISE_HINT)
        if settings["sample_rate"] is not None:
            check_number("sample_rate", settings["sample_rate"], lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
        if settings["expected_batch_size"] is not None:
            check_divisor(settings["expected_batch_size"])
        each = isinstance(bound, Sequence) and not isinstance(bound, str)
        bounds = [check_max_grad_norm(c) for c in (bound if each else [bound])]  # type: ignore[union-attr]
        dtypes = {p.dtype for p in self.module.parameters() if p.requires_grad and p.dtype.is_floating_point}
        for dtype in dtypes:
            for c in bounds:
                check_max_grad_norm(c, torch.promote_types(dtype, torch.float32))
            sensitivity = math.hypot(*bounds)
            check_noise(sigma, sensitivity, sigma * sensitivity, dtype)

    @property
    def _options(self) -> dict[str, Any]:
        """Return the options of the optimizer's class that were given beside the settings."""
        return {k: v for k, v in self.settings.items() if k not in DEFAULTS and k not in NEEDED}

    def _check_clipping(self) -> None:
        """Refuse options and bounds that the way of clipping does not take.

        Raises:
            TypeError: there is no such option.
            ValueError: there is no such way of clipping, or it takes bounds of another kind.
        """
        clipping, bound, options = self.settings["clipping"], self.settings["max_grad_norm"], self._options
        kind = get_optimizer_class(clipping, self.ranks is not None)
        own = {p for c in kind.__mro__ for p in inspect.signature(c).parameters if issubclass(c, DPOptimizer)}
        for name in options:
            if name in INSTEAD:
                raise TypeError(f"make_private() takes no argument {name!r}; {INSTEAD[name]}.")
            if name not in own - {"options"}:
                raise TypeError(
                    f"make_private() takes no argument {name!r} with clipping={clipping!r}."
                    f"{did_you_mean(name, own | {*DEFAULTS, *NEEDED})}"
                )
        if "factors" in options and clipping in FACTORS:
            raise ValueError(
                f"clipping={clipping!r} is a clipping rule, and factors= is another one; pass factors= with "
                "clipping='flat', or leave it out."
            )
        if (clipping == "per_layer") != isinstance(bound, Sequence):
            raise ValueError(
                f"clipping={clipping!r} with max_grad_norm={bound}: per_layer takes a list of "
                "bounds, one per trained parameter; the others take one number."
            )

    # ---- the parts

    def loader(self) -> tuple[Any, float]:
        """Return the loader to train with, and the rate at which an example is in a batch."""
        loader, ranks, seed = self.settings["data_loader"], self.ranks, self.seed
        check_data_set(loader.dataset)
        if not self.settings["poisson_sampling"]:
            return self._ordinary_loader()
        if ranks is not None:
            # Ranks may have generators of different seeds, for an order of their own.
            seed = ranks.share_seed(seed, loader.generator)
            check_same_data(loader.dataset, ranks)
        poisson = DPDataLoader.from_data_loader(
            loader,
            sample_rate=self.settings["sample_rate"],
            seed=seed,
            secure=self.secure,
            distributed=ranks is not None and ranks.deals,
            # Of batches that are not followed nobody knows whether all ranks have parts of the same.
            shares="dealt" if self.settings["check_batches"] else "owned",
            max_batch_size=longest_batch(self.settings),
            sampling=CYCLE if self.settings["mechanism"] is not None else self.settings["sampling"],
        )
        if ranks is not None:
            how = poisson.kind, poisson.source, poisson.is_dealt, poisson.sampler_state.max_batch_size
            ranks.agree({"how batches are drawn": how})
            ranks.join_batches(poisson)
        warn_of_overflow(poisson.sampler_state)
        return poisson, poisson.sample_rate

    def _ordinary_loader(self) -> tuple[DataLoader[Any], float]:
        """Return the loader of a run without Poisson sampling, and the rate that its accountant assumes."""
        loader, sample_rate = self.settings["data_loader"], self.settings["sample_rate"]
        if self.ranks is not None:
            check_shares(loader, self.ranks)
            check_same_data(loader.dataset, self.ranks)
        check_ordinary(loader)
        if self.settings["check_batches"]:
            loader = counted(loader)
        check_length(loader, sample_rate, self.settings["expected_batch_size"])
        if sample_rate is None:
            check_once_a_round(loader)
        rate = 1 / len(loader) if sample_rate is None else sample_rate
        warn_caller(
            f"poisson_sampling=False: epsilon is computed for Poisson batches at the rate {rate:.6g}, and "
            "that of shuffled or fixed batches can be larger. Use it for comparisons, and poisson_sampling=True "
            "for a release.",
        )
        return loader, rate

    def divisor(self, loader: DataLoader[Any], rate: float) -> float:
        """Return the number by which every update is divided.

        With a warning where it tells how many examples there are, and the rate was chosen so that it does not, or where
        it is far from a batch's length.
        """
        given = self.settings["expected_batch_size"]
        if given is not None:
            length = len(loader.dataset) * rate if hasattr(loader.dataset, "__len__") else given
            if self.settings["loss_reduction"] == "mean" and not length / 1.5 <= given <= 1.5 * length:
                warn_caller(
                    f"expected_batch_size is {given:g}, and a batch holds {length:.4g} examples on average: every "
                    f"update is {length / given:.3g} times what it should be. Leave it and sample_rate out, or give "
                    "numbers that belong to your data: expected_batch_size = sample_rate times the number of examples.",
                )
            return given
        divisor: float = len(loader.dataset) * rate  # type: ignore[arg-type]
        if self.settings["sample_rate"] is not None or isinstance(self.settings["data_loader"], DPDataLoader):
            warn_caller(
                f"expected_batch_size was not given, so every update is divided by {divisor:.6g}, the sample rate "
                f"times the number of examples, which tells how many there are. Pass expected_batch_size={divisor:.6g} "
                "if that may be known, and another public number if not.",
            )
        return divisor

    def noise(self) -> GaussianNoise:
        """Return the source of noise, of the same seed on all ranks."""
        generator, ranks = self.settings["noise_generator"], self.ranks
        seed = self.seed if generator is None else drawn_seed(generator)
        if ranks is not None:
            seed = ranks.share_seed(seed)
        noise = SecureNoise() if self.secure else GaussianNoise(seed)
        noise.is_chosen = self.seed is not None or generator is not None
        return noise

    def agree(self, mechanism: str, loader: DataLoader[Any], rate: float, divisor: float) -> None:
        """PrivacyError where a rank was called with other settings: its sums would get the noise of these."""
        if self.ranks is None:
            return
        shards = reduction_of(self.module, self.ranks).shards
        trained = {n: shards.get(p, p) for n, p in self.module.named_parameters() if p.requires_grad}
        self.ranks.agree(
            {
                "accountant": mechanism,
                "secure_mode": self.secure,
                "sample_rate": rate,
                "the number of steps in a round": len(loader),
                "expected_batch_size": divisor,
                "noise_multiplier": self.noise_multiplier,
                **{name: value for name, value in self.settings.items() if name in AGREED},
                "group": self.group,
                "the trained parameters": [(name, tuple(p.shape), p.dtype) for name, p in trained.items()],
            }
        )

    def recorded(self) -> Any:
        """Return the module recorded in the mode asked for, or as it is where it is recorded already."""
        module, settings = self.module, self.settings
        mine = {"batch_first": settings["batch_first"], "loss_reduction": settings["loss_reduction"]}
        mine["group"] = self.group
        if not isinstance(module, AbstractGradSampleHooks):
            return prepare_module(module, settings["grad_sample_mode"], settings["wrap_model"], **mine)
        if any(getattr(module, name) != value for name, value in mine.items()):
            raise ValueError(
                f"The module is wrapped already, with batch_first={module.batch_first}, group={module.group} and "
                f"loss_reduction={module.loss_reduction!r}; pass the same, or its to_standard_module()."
            )
        module.check_unchanged()
        return module

    def private_optimizer(self, recorded: AbstractGradSampleHooks, divisor: float, noise: GaussianNoise) -> DPOptimizer:
        """Return the optimizer that clips, adds noise and steps."""
        clipping, options = self.settings["clipping"], self._options
        if clipping in FACTORS:
            options["factors"] = FACTORS[clipping]
        kind = get_optimizer_class(clipping, self.ranks is not None, self.settings["grad_sample_mode"])
        return kind(
            self.optimizer,
            module=recorded,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.settings["max_grad_norm"],  # type: ignore[arg-type]
            expected_batch_size=divisor,
            noise=noise,
            ranks=self.ranks,
            **options,
        )

    def attach(self, private: DPOptimizer, loader: Any, fixed_rate: float, spending: Spending) -> None:
        """Let every step of ``private`` be checked against the budget and the ledger, and counted."""
        run, settings, poisson = private.run, self.settings, loader if isinstance(loader, DPDataLoader) else None
        run.loader, run.counter = loader, weakref.ref(spending)
        if self.ranks is not None:
            run.name = f"{self.ranks.share_seed(None):x}"
        run.setting["clipping"] = settings["clipping"]
        run.setting["unit"] = unit_of(settings["data_loader"].dataset, self.group)
        run.setting["the users' rows"] = users_digest(settings["data_loader"].dataset)
        run.setting["sample_rate"] = fixed_rate if settings["poisson_sampling"] else None
        run.setting["sampling"] = "poisson"  # of others, as of those that are cut, other settings tell
        if poisson is not None and isinstance(sampler := poisson.sampler_state, EpochSampler):
            run.setting |= {"sampling": sampler.kind, "sample_rate": sampler.source}
            spending.check_takes(sampler.kind)
            correlate(private, settings["mechanism"], sampler.steps)

        def rate() -> float:
            """The rate in force: a schedule may have changed the loader's."""
            return fixed_rate if poisson is None else poisson.sample_rate

        if poisson is not None:
            number_batches(private.module, lambda: poisson.handed_out)

        def failure() -> float:
            """Return what a step adds to the chance that a batch was cut; it is charged for both of two neighbours."""
            return 0.0 if poisson is None else min(1.0, 2.0 * poisson.sampler_state.overflow)

        if failure():
            spending.accountant.add_failure_probability(0.0)  # raises an error where it would not be charged
        run.setting["max_batch_size"] = None if poisson is None else poisson.sampler_state.max_batch_size
        run.count = lambda of: spending.count(of, rate(), failure())
        private.attach_step_guard(lambda of: spending.check_budget(of, rate(), failure()))
        if isinstance(loader, CountingDataLoader):
            give(loader, spending.unused)
            loader.see(loader.handed_out)
            run.ledger = Ledger(lambda: loader.source, spending.unused, settings["check_batches"], self.group)
        if not settings["check_isolation"]:
            private.module.isolation.switch_off()
        private.reduction.keep(settings["keep_gathered"], private.logical_batch)
