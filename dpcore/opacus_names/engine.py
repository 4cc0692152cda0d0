"""Opacus' extension points of the engine: the methods from which a subclass makes the parts of a private run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.utils.data import DataLoader

from dpcore.data_loader import DPDataLoader
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.grad_sample.utils import DEFAULT_MODE, prepare_module
from dpcore.loading.checks import check_data_set
from dpcore.noise import GaussianNoise
from dpcore.optimizers import DPOptimizer, get_optimizer_class
from dpcore.private_setup import FACTORS, Setup, run_seed
from dpcore.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from dpcore.validators import ModuleValidator

MAY_BE_UNKNOWN = (
    *("batch_first", "rand_on_empty", "wrap_model", "grad_sample_mode", "max_grad_norm", "criterion"),
    "group",
)
"""Arguments that older versions did not pass, so that an override need not take them."""


class ExtensionPoints:
    """Makes the parts of a private run, by methods that a subclass of the engine may override or call.

    An override is called by make_private with the arguments that Opacus passes, and what it returns is checked before
    it is used. One that cannot be called is refused by name.
    """

    secure_mode: bool
    seed: int | None
    _spending: Any
    _made: int
    secure_rng = None  # noise and batches of secure mode come from the operating system, whatever the generator

    @property
    def dataset(self) -> Any:
        """The data set that was made private last."""
        return self._spending.dataset

    def _prepare_model(
        self,
        module: Any,
        *,
        batch_first: bool = True,
        max_grad_norm: Any = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = DEFAULT_MODE,
        wrap_model: bool = True,
        group: int = 1,
    ) -> Any:
        ModuleValidator.validate(module, strict=True)
        if isinstance(module, AbstractGradSampleHooks):
            return module
        options: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction, "group": group}
        return prepare_module(module, grad_sample_mode, wrap_model, **options)

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        *,
        poisson_sampling: bool,
        distributed: bool,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> Any:
        if not poisson_sampling:
            return data_loader
        return DPDataLoader.from_data_loader(
            data_loader,
            seed=run_seed(self.seed, self._made),
            secure=self.secure_mode,
            distributed=distributed,
            rand_on_empty=rand_on_empty,
        )

    def _prepare_optimizer(
        self,
        *,
        optimizer: Any,
        noise_multiplier: float,
        max_grad_norm: Any,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = DEFAULT_MODE,
        **options: Any,
    ) -> DPOptimizer:
        if clipping in FACTORS:
            options["factors"] = FACTORS[clipping]
        return get_optimizer_class(clipping, distributed, grad_sample_mode)(
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=noise_generator,
            secure_mode=self.secure_mode,
            **options,
        )

    def _prepare_criterion(
        self, *, module: Any, optimizer: DPOptimizer, criterion: Any, loss_reduction: str = "mean", **options: Any
    ) -> Any:
        return DPLossFastGradientClipping(module, optimizer, criterion, loss_reduction)

    def _extended(self, setup: Setup) -> Setup:
        """Return ``setup``, or one that calls what this engine overrides.

        Raises:
            UnsupportedError: an override cannot be called.
        """
        overridden = set(_overridden(self))
        if "_prepare_criterion" in overridden and setup.settings["grad_sample_mode"] == "ghost":
            raise UnsupportedError(
                f"{type(self).__name__} overrides _prepare_criterion(), and the criterion of the mode 'ghost' is no "
                "part that may be replaced: its losses must belong to one example each. Leave the mode out, with which "
                "any loss is an ordinary tensor, and compute yours in the loop."
            )
        if not overridden:
            return setup
        given = {field.name: getattr(setup, field.name) for field in fields(setup)}
        return ExtendedSetup(**given, engine=self, overridden=frozenset(overridden))


POINTS = {name: value for name, value in vars(ExtensionPoints).items() if name.startswith("_prepare_")}


def _overridden(engine: ExtensionPoints) -> Iterator[str]:
    """Yield the names of the extension points for which ``engine`` has a method of its own."""
    for name, own in POINTS.items():
        if inspect.getattr_static(engine, name) is not own:
            yield name
    core = next(kind for kind in type(engine).__mro__ if ExtensionPoints in kind.__bases__)
    if inspect.getattr_static(engine, "validate") is not vars(core)["validate"]:
        yield "validate"


@dataclass(frozen=True)
class ExtendedSetup(Setup):
    """The steps of make_private of an ``engine`` that has methods of its own for those that are ``overridden``."""

    engine: Any = None
    overridden: frozenset[str] = frozenset()

    def check(self) -> None:
        super().check()
        if "validate" in self.overridden:
            loader = self.settings["data_loader"]
            self.engine.validate(module=self.module, optimizer=self.optimizer, data_loader=loader)

    def loader(self) -> tuple[Any, float]:
        if "_prepare_data_loader" not in self.overridden:
            return super().loader()
        kind, settings = type(self.engine).__name__, self.settings
        if self.ranks is not None:
            raise UnsupportedError(
                f"{kind} overrides _prepare_data_loader(), and the module is trained by several ranks, whose loaders "
                "must draw shares of one batch by one seed; make the module private with PrivacyEngine itself."
            )
        check_data_set(settings["data_loader"].dataset)
        options = {name: settings[name] for name in ("poisson_sampling", "batch_first", "rand_on_empty")}  # type: ignore[literal-required]
        made = _called(self.engine._prepare_data_loader, settings["data_loader"], distributed=False, **options)
        if not settings["poisson_sampling"]:
            return replace(self, settings={**settings, "data_loader": made})._ordinary_loader()
        if not isinstance(made, DPDataLoader) or settings["sample_rate"] not in (None, made.sample_rate):
            rate = f"of the rate {made.sample_rate:.6g}" if isinstance(made, DPDataLoader) else "of an unknown rate"
            raise PrivacyError(
                f"{kind}._prepare_data_loader() returned a {type(made).__name__} {rate}, and sample_rate is "
                f"{settings['sample_rate']}: the accountant must know with what chance an example is in a batch. "
                "Return a DPDataLoader (of super()._prepare_data_loader(...), say), and leave sample_rate out."
            )
        if settings["max_batch_size"] not in (None, most := made.sampler_state.max_batch_size):
            raise ValueError(
                f"max_batch_size is {settings['max_batch_size']}, and {kind}._prepare_data_loader() returned a loader "
                f"with max_batch_size={most}; give it to the DPDataLoader there."
            )
        if settings["sampling"] not in (None, made.kind):
            raise ValueError(
                f"sampling is {settings['sampling']!r}, and {kind}._prepare_data_loader() returned a loader with "
                f"sampling={made.kind!r}; give it to the DPDataLoader there."
            )
        return made, made.sample_rate

    def recorded(self) -> Any:
        if "_prepare_model" not in self.overridden:
            return super().recorded()
        names = ("batch_first", "max_grad_norm", "loss_reduction", "grad_sample_mode", "wrap_model")
        options = {name: self.settings[name] for name in names}  # type: ignore[literal-required]
        made = _called(self.engine._prepare_model, self.module, group=self.group, **options)
        if not isinstance(made, AbstractGradSampleHooks):
            raise PrivacyError(
                f"{type(self.engine).__name__}._prepare_model() returned a {type(made).__name__}, which records no "
                "gradients by example. Return what super()._prepare_model(module, ...) returns, or a GradSampleModule."
            )
        return replace(self, module=made).plain().recorded()  # type: ignore[arg-type]

    def plain(self) -> Setup:
        """Return the steps without any that are overridden."""
        return replace(self, overridden=frozenset())

    def private_optimizer(self, recorded: AbstractGradSampleHooks, divisor: float, noise: GaussianNoise) -> DPOptimizer:
        if "_prepare_optimizer" not in self.overridden:
            return super().private_optimizer(recorded, divisor, noise)
        names = ("max_grad_norm", "loss_reduction", "clipping", "noise_generator", "grad_sample_mode")
        made = _called(
            self.engine._prepare_optimizer,
            optimizer=self.optimizer,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=divisor,
            distributed=self.ranks is not None,
            **{name: self.settings[name] for name in names},  # type: ignore[literal-required]
            **self._options,
        )
        what = f"{type(self.engine).__name__}._prepare_optimizer() returned a {type(made).__name__}"
        if not isinstance(made, DPOptimizer) or "run" not in vars(made):
            raise PrivacyError(
                f"{what}, which neither clips nor adds noise that is counted. Return a DPOptimizer, or an instance of "
                "a class derived from it whose __init__() calls super().__init__()."
            )
        if made.module is not recorded or made.original_optimizer is not self.optimizer:
            raise PrivacyError(
                f"{what} around another optimizer or module than that which make_private was given, whose steps would "
                "be counted in its place. Build it around the optimizer= that the method is called with."
            )
        if not made.noise.is_chosen:
            made.noise = noise  # of the engine's seed, and the same on all ranks
        made.ranks = self.ranks
        return made


def _called(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an override, without those of :data:`MAY_BE_UNKNOWN` that it does not take."""
    parameters = inspect.signature(method).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        options = {name: v for name, v in options.items() if name in parameters or name not in MAY_BE_UNKNOWN}
    return method(*args, **options)
