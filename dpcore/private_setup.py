"""The steps of make_private: settings, checks, the loader, the divisor, the recorder and the optimizer."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, Required, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.arguments import check_divisor, check_noise_multiplier, check_number, did_you_mean
from dpcore.clipping import Factors, automatic_factors, check_max_grad_norm, check_noise
from dpcore.correlated import CorrelatedNoise, Correlation, check_correlated
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
from dpcore.spending import Spending
from dpcore.utils.batch_memory_manager import check_iterated, check_pieces
from dpcore.utils.fast_gradient_clipping_utils import check_criterion
from dpcore.validators import ModuleValidator
from dpcore.validators.errors import IllegalModuleConfigurationError

P = ParamSpec("P")
T = TypeVar("T")
FACTORS = {"automatic": automatic_factors}
INSTEAD = {
    "sampler": "say how batches are drawn by sampling=, as sampling='bins'",
    "secure_mode": "it belongs to the engine: PrivacyEngine(secure_mode=True)",
    "generator": "pass noise_generator= to seed the noise",
    "noise": "it comes from the engine's seed, or from PrivacyEngine(secure_mode=True)",
    "module": "the module is recorded by make_private itself",
    "ranks": "the processes are those of the module's wrapper",
}
"""Arguments that are set by make_private itself, or have another name, and what to do instead of passing them."""


class PrivateSettings(TypedDict, total=False):
    """The arguments of make_private but for the noise, with their defaults; without one: the optimizer's options.

    Args:
        module: The ``torch.nn.Module`` to train, in training mode. A module in
            ``DifferentiallyPrivateDistributedDataParallel``, or one to which ``fully_shard`` was applied, is trained by
            all ranks of its group; each of them calls this with the whole data set and the same settings.
        optimizer: An ordinary torch optimizer over ``module.parameters()``. Only what it holds is clipped, noised and
            updated.
        criterion: The loss for the mode "ghost" (default ``CrossEntropyLoss``), and in every mode checked against
            ``loss_reduction`` where it is given.
        data_loader: A torch loader over the whole data set. Its batch size sets the default sample rate only. Its
            ``generator`` seeds the batches, unless the engine has a seed or draws securely; for a release it must be
            secret.
        max_grad_norm: C, the L2 bound to which each example's gradient is clipped, and so how far one example can move
            a step's sum. For "per_layer" a list, one bound per trained parameter.
        batch_first: Whether the module's inputs are [B, T, ...]; False: [T, B, ...]. Wrong, it would clip time steps
            instead of examples.
        loss_reduction: The reduction of your loss over the batch, "mean" or "sum". The update of a mean loss is divided
            by ``expected_batch_size``, that of a sum by nothing. Wrong, every gradient is scaled by the batch's length
            before it is clipped.
        poisson_sampling: Whether the returned loader draws Poisson batches: every example independently with the chance
            ``sample_rate``. Epsilon holds for such batches only; False keeps your loader, with a warning.
        clipping: "flat" clips the whole gradient at one bound; "per_layer" each parameter at its own; "adaptive" moves
            the bound towards a quantile of the norms (``options`` are those of :class:`AdaClipDPOptimizer`);
            "automatic" scales every gradient to nearly the bound, shorter ones too.
        noise_generator: A ``torch.Generator`` that seeds the noise, for tests. Noise of a known seed protects nothing.
        grad_sample_mode: Where gradients can be read between ``backward()`` and ``step()``. "bookkeeping" never forms
            the ordinary gradient; "hooks" (also "functorch", "ew") leaves it in ``p.grad``; "ghost" is Opacus' fast
            clipping, with a criterion of its own; "no_op" records nothing and takes ``p.grad_sample`` from the loop.
            The update is the same in all of them.
        wrap_model: Whether the module is returned in a wrapper. False records it where it is and returns the hooks; end
            with their ``cleanup()``.
        rand_on_empty: Accepted for compatibility and ignored, with a warning: an empty batch stays one and is a step of
            noise alone.
        sample_rate: q, the chance of an example to be in a batch; a public number. None: 1 / len(data_loader), which
            takes the number of examples to be public.
        expected_batch_size: The public divisor of every update of a mean loss, of all ranks together. None: sample rate
            × number of examples, with a warning where ``sample_rate`` was given. Never the batch's own length, which
            depends on the data.
        check_batches: Whether each step must use an unused batch of the returned loader, every example in one row. Pass
            False only where your own batches are drawn at the accounted rate.
        check_isolation: Whether experiments on the first batches of every kind, and on rare random ones later, look for
            examples that reach each other's gradients (:mod:`dpcore.example_isolation.check`). Clipping bounds nothing
            where they do.
        max_physical_batch_size: The most examples of a batch that the returned loader hands out at once; "auto" plans
            them by time and memory. ``step()`` then updates once per batch, at its last piece. Schedules of torch's and
            dpcore's classes move there too, though the loop steps them for every piece, and ``len(data_loader)`` stays
            the number of batches. None: whole batches. See
            :class:`dpcore.utils.batch_memory_manager.BatchMemoryManager`.
        group: K, how many rows of a batch that follow each other are one example, the privacy unit: what is said of
            examples here holds for these. An example's gradient is that of the mean of its rows' losses, and is clipped
            once; the loss is reduced over all rows. None: as ``data_loader`` lays rows out, over :func:`dpcore.views`
            or :func:`dpcore.users`; one row over any other data set.
        max_batch_size: The most examples of a batch, for bounded memory and shapes (truncated Poisson sampling): of a
            longer one so many are kept, at random. Epsilon is an upper bound that charges the chance of a longer batch,
            so let that be next to nothing: nine standard deviations beyond the mean. None: no limit.
        sampling: How batches are drawn. "poisson": the default. "truncated": that with ``max_batch_size``, which is
            then needed. "bins": each round puts every example into one of its batches, uniformly and independently; the
            epsilon is its own, a begun round counts whole, and the accountant must be "prv". "shuffle": each round cuts
            the examples, in random order, into batches of the loader's length; every begun round counts as a Gaussian
            mechanism without amplification, an upper bound for neighbours of which one has zeros in an example's place.
            None: as ``data_loader`` does, where that is a :class:`DPDataLoader`.
        mechanism: A :class:`dpcore.CorrelatedNoise`, whose noise later steps partly take back (DP-FTRL). Every round
            then has the same batches in the same order, and epsilon is that of one Gaussian mechanism without
            amplification, for neighbours of which one has zeros in an example's place. None: independent noise.
    """

    module: Required[nn.Module]
    optimizer: Required[Optimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: Required[float | Sequence[float]]
    criterion: Annotated[Any, None]
    batch_first: Annotated[bool, True]
    loss_reduction: Annotated[str, "mean"]
    poisson_sampling: Annotated[bool, True]
    clipping: Annotated[str, "flat"]
    noise_generator: Annotated[torch.Generator | None, None]
    grad_sample_mode: Annotated[str, DEFAULT_MODE]
    wrap_model: Annotated[bool, True]
    rand_on_empty: Annotated[bool, False]
    sample_rate: Annotated[float | None, None]
    expected_batch_size: Annotated[float | None, None]
    check_batches: Annotated[bool, True]
    check_isolation: Annotated[bool, True]
    max_physical_batch_size: Annotated[int | str | None, None]
    group: Annotated[int | None, None]
    max_batch_size: Annotated[int | None, None]
    sampling: Annotated[str | None, None]
    mechanism: Annotated[CorrelatedNoise | None, None]
    factors: Factors
    target_unclipped_quantile: float
    clipbound_learning_rate: float
    max_clipbound: float
    min_clipbound: float
    unclipped_num_std: float | None


HINTS = get_type_hints(PrivateSettings, include_extras=True)
NEEDED = {name: get_args(hint)[0] for name, hint in HINTS.items() if get_origin(hint) is Required}
DEFAULTS = {name: hint.__metadata__[0] for name, hint in HINTS.items() if get_origin(hint) is Annotated}


def spelled_out(method: Callable[P, T]) -> Callable[P, T]:
    """Show the settings one by one in the signature and the docstring of a method that takes them as ``**options``."""
    (this, *own), kind = inspect.signature(method).parameters.values(), inspect.Parameter
    needed = [kind(name, kind.KEYWORD_ONLY, annotation=hint) for name, hint in NEEDED.items()]
    optional = [
        kind(name, kind.KEYWORD_ONLY, default=value, annotation=HINTS[name].__origin__)
        for name, value in DEFAULTS.items()
    ]
    rest = kind("options", kind.VAR_KEYWORD, annotation=Any)
    method.__signature__ = inspect.Signature([this, *needed, *own[:-1], *optional, rest])  # type: ignore[attr-defined]
    settings = (inspect.getdoc(PrivateSettings) or "").partition("Args:\n")[2]
    method.__doc__ = (inspect.getdoc(method) or "").replace("    **options:", f"{settings}\n    **options:")
    return method


def completed(given: PrivateSettings) -> PrivateSettings:
    """Return the settings with all defaults; TypeError where one is missing that has none."""
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise TypeError(f"make_private() needs {', '.join(f'{name}=' for name in missing)}, which was not given.")
    return cast(PrivateSettings, {**DEFAULTS, **given})


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
        if "torch.distributed.fsdp" in sys.modules:
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
        check_correlated(settings, self.ranks, self.secure)
        sampling_of(settings)
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
            ranks.agree({"the number of examples": len(loader.dataset)})  # type: ignore[arg-type]
            check_same_data(loader.dataset, ranks)
        poisson = DPDataLoader.from_data_loader(
            loader,
            sample_rate=self.settings["sample_rate"],
            seed=seed,
            secure=self.secure,
            distributed=ranks is not None,
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
        named = ("poisson_sampling", "sampling", "max_grad_norm", "clipping", "loss_reduction")
        self.ranks.agree(
            {
                "accountant": mechanism,
                "secure_mode": self.secure,
                "sample_rate": rate,
                "the number of steps in a round": len(loader),
                "the number of examples": len(loader.dataset),  # type: ignore[arg-type]
                "expected_batch_size": divisor,
                "noise_multiplier": self.noise_multiplier,
                **{name: value for name, value in self.settings.items() if name in named},
                "group": self.group,
                "the trained parameters": [
                    (name, tuple(p.shape), p.dtype) for name, p in self.module.named_parameters() if p.requires_grad
                ],
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
        run.batches_seen = run.handed_out
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
            if (mechanism := settings["mechanism"]) is not None:
                run.setting["mechanism"] = repr(mechanism)
                run.correlation = Correlation(mechanism, sampler.steps)
                private.attach_step_guard(run.correlation.check)

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
        private.attach_step_hook(lambda of: spending.count(of, rate(), failure()))
        private.attach_step_guard(lambda of: spending.check_budget(of, rate(), failure()))
        if isinstance(loader, CountingDataLoader):
            give(loader, spending.unused)
            run.ledger = Ledger(lambda: loader.source, spending.unused, settings["check_batches"])
        if not settings["check_isolation"]:
            private.module.isolation.switch_off()
