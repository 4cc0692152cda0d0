"""The entry point: two lines make an ordinary training script private."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.accountants import create_accountant, get_noise_multiplier
from dpcore.clipping import automatic_factors, clip_factors
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import check_shares, ranks_of, restore_random_state, save_random_state
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.grad_sample_module import GradSampleModule
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers import DPOptimizer
from dpcore.validators import ModuleValidator

CLIPPINGS = {"flat": clip_factors, "per_layer": clip_factors, "automatic": automatic_factors}


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

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: nn.Module | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        noise_generator: torch.Generator | None = None,
    ) -> tuple[GradSampleModule, DPOptimizer, DataLoader[Any]]:
        """(module, optimizer, data_loader) to train with as before; every ``optimizer.step()`` is accounted for.

        ``sample_rate`` and ``expected_batch_size`` are public numbers; where they are not given they are derived from
        the data's length, with a warning. ``clipping``: flat, per_layer (``max_grad_norm`` is then a list, one bound
        per trained parameter) or automatic. ``noise_generator`` seeds the noise, for tests. A module in
        ``DifferentiallyPrivateDistributedDataParallel`` is trained by all ranks of its group, each of which calls this
        with the whole data set and the same settings; ``expected_batch_size`` is that of all ranks together.
        """
        ranks = ranks_of(module)
        self._check(module, optimizer, clipping, max_grad_norm)
        derived = sample_rate is None and not isinstance(data_loader, DPDataLoader)
        if self.secure_mode and not poisson_sampling:
            raise ValueError("secure_mode also draws the batches; it needs poisson_sampling=True.")
        if poisson_sampling:
            data_loader = DPDataLoader.from_data_loader(
                data_loader,
                sample_rate=sample_rate,
                seed=self.seed if ranks is None else ranks.share_seed(self.seed),
                secure=self.secure_mode,
                distributed=ranks is not None,
            )
            sample_rate = data_loader.sample_rate
        else:
            if ranks is not None:
                check_shares(data_loader, ranks)
            if sample_rate is None:
                sample_rate = 1 / len(data_loader)
        if expected_batch_size is None:
            expected_batch_size = len(data_loader.dataset) * sample_rate  # type: ignore[arg-type]
            if not derived:
                warnings.warn(
                    f"The divisor {expected_batch_size:.6g} is derived from the number of examples, which is then no "
                    "secret; pass expected_batch_size= to keep it one.",
                    stacklevel=2,
                )
        seed = self.seed
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
        wrapped = module if isinstance(module, GradSampleModule) else None
        if wrapped is None:
            wrapped = GradSampleModule(module, batch_first=batch_first, loss_reduction=loss_reduction)
        private = DPOptimizer(
            optimizer,
            module=wrapped,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            noise=SecureNoise() if self.secure_mode else GaussianNoise(seed, rank=ranks.rank if ranks else 0),
            factors=CLIPPINGS[clipping],
            ranks=ranks,
        )
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate))
        return wrapped, private, data_loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float],
        sample_rate: float | None = None,
        **options: Any,
    ) -> tuple[GradSampleModule, DPOptimizer, DataLoader[Any]]:
        """:meth:`make_private` with the smallest noise that keeps ``epochs`` rounds within the budget."""
        if len(self.accountant):
            warnings.warn(
                "This accountant has already counted steps; the noise is chosen as if it had not, and get_epsilon will "
                "report the sum.",
                stacklevel=2,
            )
        if isinstance(data_loader, DPDataLoader):
            sample_rate = data_loader.sample_rate
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=1 / len(data_loader) if sample_rate is None else sample_rate,
            epochs=epochs,
            accountant=self.accountant.mechanism(),
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sample_rate=sample_rate,
            **options,
        )

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at ``delta``, for neighbours by adding or removing one example."""
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: DPOptimizer, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Everything that a run which continues bit for bit needs: weights, optimiser, accountant, noise, batches and
        the global random state (dropout). Save between steps, not within a logical batch.

        Of several ranks, rank 0 writes ``path``, and the others their random state beside it (``path.rank1`` ...); all
        load ``path``."""
        state = {
            "setting": _setting(optimizer, data_loader),
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "accountant": self.accountant.state_dict(),
            "noise": optimizer.noise.state_dict(),
            "steps": optimizer.steps,
            "torch_rng": torch.get_rng_state(),
        }
        if isinstance(data_loader, DPDataLoader):
            state["sampler"] = data_loader.sampler_state.state_dict()
        if optimizer.ranks is not None and optimizer.ranks.rank > 0:
            save_random_state(path, optimizer.ranks, optimizer.steps)
        else:
            torch.save(state, path)

    def load_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: DPOptimizer, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Restores what :meth:`save_checkpoint` wrote. PrivacyError where it was saved under other settings."""
        state = torch.load(path, weights_only=True)
        here = _setting(optimizer, data_loader)
        for name, value in state["setting"].items():
            if here[name] != value:
                raise PrivacyError(
                    f"The checkpoint was saved with {name}={value}, this run has {here[name]}; the accountant's "
                    f"history would "
                    "not describe it. Rebuild the run with the checkpoint's settings."
                )
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        self.accountant.load_state_dict(state["accountant"])
        optimizer.noise.load_state_dict(state["noise"])
        optimizer.steps = state["steps"]
        if optimizer.ranks is not None:
            optimizer.noise.rank = optimizer.ranks.rank
            optimizer.weights_agree = False
        if optimizer.ranks is not None and optimizer.ranks.rank > 0:
            restore_random_state(path, optimizer.ranks, optimizer.steps)
        else:
            torch.set_rng_state(state["torch_rng"])
        if isinstance(data_loader, DPDataLoader):
            data_loader.sampler_state.load_state_dict(state["sampler"])

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

    def _check(self, module: nn.Module, optimizer: Optimizer, clipping: str, max_grad_norm: Any) -> None:
        ModuleValidator.validate(module, strict=True)
        if not module.training:
            raise ValueError("The module is in evaluation mode; call module.train() before make_private.")
        if clipping not in CLIPPINGS:
            raise UnsupportedError(f"There is no clipping {clipping!r}; there are {', '.join(CLIPPINGS)}.")
        if (clipping == "per_layer") != isinstance(max_grad_norm, Sequence):
            raise ValueError(
                f"clipping={clipping!r} with max_grad_norm={max_grad_norm}: per_layer takes a list of bounds, one per "
                "trained parameter; the others take one number."
            )
        if isinstance(optimizer, DPOptimizer):
            raise PrivacyError("The optimizer is private already; a second make_private would add its noise twice.")
        known = {id(p) for p in module.parameters()}
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not in_optimizer <= known:
            raise PrivacyError(
                "The optimizer holds parameters that are not the module's: they would be updated without clipping and "
                "noise. Build the optimizer from module.parameters()."
            )
        if not trained <= in_optimizer:
            warnings.warn(
                "Some trained parameters are not in the optimizer: they are clipped and take noise, but never change. "
                "Freeze them with requires_grad_(False).",
                stacklevel=3,
            )


def _setting(optimizer: DPOptimizer, data_loader: DataLoader[Any] | None) -> dict[str, Any]:
    """What must not differ between the run that saved a checkpoint and the one that continues it."""
    return {
        "noise_multiplier": optimizer.noise_multiplier,
        "max_grad_norm": optimizer.max_grad_norm,
        "expected_batch_size": optimizer.expected_batch_size,
        "loss_reduction": optimizer.loss_reduction,
        "sample_rate": data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else None,
    }
