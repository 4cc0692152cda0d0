"""Checkpoints of a private run: all that a run which continues bit for bit needs, as one typed record and one file."""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from dpcore import shards_file
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError, warn_caller
from dpcore.loading.counting_loader import CountingDataLoader
from dpcore.loading.ledger import name_of
from dpcore.noise import SecureNoise
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers.checks import SPENT
from dpcore.optimizers.private_run import UNKNOWN, NextBatch
from dpcore.spending import Runs, Spending

Json = dict[str, Any]
ACCOUNTANT = "privacy_accountant_state_dict"
MODULE = "module_state_dict"
OPTIMIZER = "optimizer_state_dict"
RANDOM = "random_states_of_ranks"
_GLOBAL = ("torch_rng", "cuda_rng")


@dataclass(frozen=True)
class PrivateState:
    """State of the private step: the noise's stream, the number of steps, and what schedules have made of the settings.

    ``sample_rate``: of a Poisson loader, else None. ``correlated``: of noise over steps.
    """

    noise: Json
    steps: int
    noise_multiplier: float
    max_grad_norm: float | list[float]
    expected_batch_size: float | None
    sample_rate: float | None
    correlated: Json | None = None

    @classmethod
    def from_run(cls, optimizer: DPOptimizer, data_loader: Any) -> PrivateState:
        """Return the state as it is now."""
        return cls(
            noise=optimizer.noise.state_dict(),
            steps=optimizer.steps,
            noise_multiplier=optimizer.noise_multiplier,
            max_grad_norm=optimizer.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            sample_rate=data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else None,
            correlated=None if optimizer.run.correlation is None else optimizer.run.correlation.state(),
        )

    def entries(self) -> dict[str, Any]:
        """Return what a file holds of it."""
        return {name: value for name, value in asdict(self).items() if name != "correlated" or value is not None}

    def restore(self, optimizer: DPOptimizer, data_loader: Any) -> None:
        """Continue the noise and the settings where they were saved."""
        rank = optimizer.noise.rank
        optimizer.noise.load_state_dict(self.noise)
        optimizer.steps = self.steps
        if optimizer.run.correlation is not None and self.correlated is not None:
            optimizer.run.correlation.go_on(self.correlated, optimizer.noise)
        if isinstance(data_loader, CountingDataLoader):
            data_loader.see(data_loader.handed_out)
        optimizer.run.next_batch = UNKNOWN
        optimizer.noise_multiplier = self.noise_multiplier
        optimizer.max_grad_norm = self.max_grad_norm
        optimizer.expected_batch_size = self.expected_batch_size
        if isinstance(data_loader, DPDataLoader) and self.sample_rate is not None:
            data_loader.set_sample_rate(self.sample_rate)
        if optimizer.ranks is not None:
            optimizer.noise.rank = rank  # not that of the rank which wrote the file
            optimizer.same_weights.known = False


@dataclass(frozen=True)
class RandomState:
    """The global random numbers of torch, on which dropout depends; None where a file has none."""

    cpu: torch.Tensor | None
    cuda: list[torch.Tensor] | None

    @classmethod
    def now(cls) -> RandomState:
        """Return the state as it is now."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None)

    def restore(self) -> None:
        """Continue the random numbers, as far as they were saved and there are devices for them."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self.cuda)


EARLIER = {
    "unit": "one example",
    "the users' rows": None,
    "max_batch_size": None,
    "sampling": "poisson",
    "mechanism": None,
}
"""Settings of runs whose files do not tell them."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file; None or empty where it was saved without that part.

    ``runs``: the history of every run whose steps are counted, by its name. ``settings``: what must be the same in the
    run that continues. ``schedulers``: states by the entry's name. ``callers_own``: entries that dpcore knows nothing
    of.
    """

    module: Json
    accountant: Json
    random: RandomState
    runs: Runs = field(default_factory=dict)
    optimizer: Json | None = None
    settings: Json = field(default_factory=dict)
    private: PrivateState | None = None
    sampler: Json | None = None
    schedulers: Mapping[str, Json] = field(default_factory=dict)
    callers_own: Json = field(default_factory=dict)

    # ---- the file

    @classmethod
    def of_run(
        cls,
        module: Json,
        spending: Spending,
        optimizer: DPOptimizer | None,
        data_loader: Any,
        schedulers: Mapping[str, Any],
        callers_own: Json,
    ) -> Checkpoint:
        """Return the checkpoint of a run between two of its steps.

        Raises:
            PrivacyError: a batch is at hand whose step was not made yet.
        """
        if optimizer is not None and optimizer.has_batch:
            raise PrivacyError(
                "save_checkpoint was called within a batch, after a backward pass and before its step: a run that is "
                "resumed from there would draw another batch, and add the noise to it that this run adds to the one at "
                "hand. Call it after optimizer.step() (within a loop over pieces, where optimizer.batch_goes_on is "
                "False), or give the batch up by optimizer.zero_grad() first."
            )
        position = None
        if isinstance(data_loader, DPDataLoader):
            position = data_loader.position(data_loader.waiting)
            position |= spending.epoch_at(data_loader, int(position["drawn"]))
            if optimizer is not None:
                position["batches"] = str(optimizer.run.batches_a_step)
                optimizer.run.expect(optimizer.noise, optimizer.steps, next_batch(optimizer, data_loader, position))
        return cls(
            module=module,
            accountant=spending.accountant.state_dict(),
            runs=spending.spent()["runs"],
            random=RandomState.now(),
            optimizer=None if optimizer is None else optimizer.state_dict(),
            settings={} if optimizer is None else optimizer.run.setting,
            private=None if optimizer is None else PrivateState.from_run(optimizer, data_loader),
            sampler=position,
            schedulers={name: scheduler.state_dict() for name, scheduler in schedulers.items()},
            callers_own=callers_own,
        )

    def entries(self) -> Json:
        """Return the file's entries: a dictionary of plain values and tensors."""
        optional = {
            OPTIMIZER: self.optimizer,
            "setting": self.settings or None,
            "runs": dict(self.runs),
            "privacy_state": None if self.private is None else self.private.entries(),
            "sampler": self.sampler,
            "torch_rng": self.random.cpu,
            "cuda_rng": self.random.cuda,
            **self.schedulers,
        }
        required = {MODULE: self.module, ACCOUNTANT: self.accountant}
        return {**self.callers_own, **required, **{name: v for name, v in optional.items() if v is not None}}

    @classmethod
    def from_entries(cls, entries: Json) -> Checkpoint:
        """Return the checkpoint with a file's entries, of this version of dpcore or of an earlier one.

        Raises:
            ValueError: they are no checkpoint's.
        """
        if not (isinstance(entries, Mapping) and {MODULE, ACCOUNTANT} <= entries.keys()):
            raise ValueError(
                f"The file holds a {type(entries).__name__} without {MODULE!r} and {ACCOUNTANT!r}, so it is no "
                "checkpoint of a private run, and does not say what its steps have spent. Load what "
                "PrivacyEngine.save_checkpoint wrote; weights alone go into the module by load_state_dict."
            )
        left = dict(entries)
        private = left.pop("privacy_state", None)
        accountant = left.pop(ACCOUNTANT)
        # Earlier versions named no runs, and Opacus does not: then the file's steps are those of a run of its own.
        unnamed = {f"unnamed {hashlib.sha256(repr((accountant, private)).encode()).hexdigest()}": accountant["history"]}
        return cls(
            module=left.pop(MODULE),
            accountant=accountant,
            runs=left.pop("runs", unnamed),
            optimizer=left.pop(OPTIMIZER, None),
            settings=left.pop("setting", {}),
            private=None if private is None else PrivateState(**private),
            sampler=left.pop("sampler", None),
            random=RandomState(left.pop("torch_rng", None), left.pop("cuda_rng", None)),
            schedulers={name: left.pop(name) for name in list(left) if name.endswith("_scheduler_state_dict")},
            callers_own=left,
        )

    def save(self, path: Any, ranks: Ranks | None, options: Json) -> None:
        """Write the file: rank 0 (or the only process) to ``path``, the others beside it what is not the same there.

        Shards are in a folder beside it.

        Raises:
            ValueError: the module is sharded, and ``path`` is no file name.
        """
        entries = self.entries()
        if ranks is not None and ranks.sharded:
            shards_file.check_disk(path, ranks, is_loading=False)
            steps = 0 if self.private is None else self.private.steps
            name = f"{steps}.{ranks.share_seed(None):032x}-{shards_file.FOLDER}"
            entries = shards_file.put(entries, (MODULE, OPTIMIZER), _beside(path), name, ranks)
            # Not in files of their own: a rank that dies meanwhile would leave those of two steps.
            entries[RANDOM] = ranks.gather(_random_state_in(entries))
        elif ranks is not None and ranks.rank and isinstance(path, (str, os.PathLike)):
            own = _random_state_in(entries) | {"steps": entries.get("privacy_state", {}).get("steps")}
            shards_file.write_whole(own, _beside(path, ranks), {})
        if ranks is None or not ranks.sharded:
            if ranks is None or ranks.rank == 0:
                torch.save(entries, path, **options)
            return
        shards_file.wait_for(ranks)
        if ranks.rank == 0:
            shards_file.write_whole(entries, path, options)
            shards_file.forget_others(_beside(path), entries)
        shards_file.wait_for(ranks)

    @classmethod
    def load(
        cls, path: Any, ranks: Ranks | None, options: Json, like: Callable[[tuple[Any, ...]], Any] | None = None
    ) -> Checkpoint:
        """Return what :meth:`save` wrote; with a warning where this rank's random state is missing.

        ``like``: gives, for the keys that lead to a sharded tensor, one that is sharded as it shall be; None where
        tensors are of no interest.
        """
        if ranks is not None and ranks.sharded:
            shards_file.check_disk(path, ranks, is_loading=True)
        entries = _read(path, options)
        in_folder = isinstance(entries, Mapping) and shards_file.FOLDER in entries
        if in_folder and like is not None and (ranks is None or not ranks.sharded):
            raise PrivacyError(
                f"{path} is the checkpoint of a sharded module, and this one is whole; apply fully_shard to it (one "
                "process is enough) before make_private, or load the weights alone by torch.distributed.checkpoint."
            )
        if ranks is not None and ranks.sharded and not in_folder:
            _check_in_shards(path, entries)
            if ranks.rank:  # of an earlier version
                return cls.from_entries(_read(_beside(path, ranks), options))
        if in_folder and ranks is not None and like is not None:
            entries = shards_file.bring_back(dict(entries), _beside(path), ranks, like)
        if ranks is not None and ranks.rank > 0:
            entries = _with_random_state_of(ranks, path, entries)
        if isinstance(entries, dict):
            entries.pop(RANDOM, None)
        return cls.from_entries(entries)

    # ---- may this run continue it?

    def check_settings(self, optimizer: DPOptimizer) -> None:
        """Refuse a run with other settings than those that the checkpoint was saved under.

        Raises:
            PrivacyError: the accountant's history would not describe the run, or the noise would be weaker.
        """
        saved_securely = self.private is not None and not self.private.noise
        if saved_securely and not isinstance(optimizer.noise, SecureNoise):
            raise PrivacyError(
                "The checkpoint was saved in secure mode, this run has an ordinary generator: its noise would be "
                "open to attacks on floating point. Build the engine with secure_mode=True."
            )
        if self.optimizer is not None:
            optimizer.check_state(self.optimizer)
        for name, value in ({**EARLIER, **self.settings} if self.settings else {}).items():
            if (mine := optimizer.run.setting.get(name, EARLIER.get(name))) != value:
                raise PrivacyError(
                    f"The checkpoint was saved with {name}={value}, this run has {mine}; the "
                    "accountant's history would not describe it. Rebuild the run with the checkpoint's settings."
                )

    def check_batches(self, data_loader: Any) -> None:
        """UnsupportedError where the loader's sampler is one of the user's that would draw batches again."""
        if self.sampler is not None and isinstance(data_loader, DPDataLoader):
            data_loader.sampler_state.check_loads()

    # ---- the run continues

    def restore_optimizer(self, optimizer: DPOptimizer, data_loader: DataLoader[Any] | None) -> None:
        """Continue the optimiser, its noise and the rate of its batches.

        A file without dpcore's own entries (Opacus' checkpoint, say) restores the optimiser alone, with a warning.
        """
        if self.optimizer is not None:
            optimizer.original_optimizer.load_state_dict(self.optimizer)
            optimizer.param_groups[0].pop(SPENT, None)  # the accountant has read it
        if self.private is not None:
            self.private.restore(optimizer, data_loader)
            return
        # Its steps before the checkpoint may have used this run's seed, from number 0 on.
        optimizer.noise.seed = secrets.randbits(128)
        if isinstance(data_loader, DPDataLoader):
            data_loader.sampler_state.reseed()
        warn_caller(
            "The checkpoint holds no state of noise and batches; the run goes on with fresh ones, and not bit for "
            "bit as it would have.",
        )

    def draw_anew(self, optimizers: Iterable[DPOptimizer]) -> bool:
        """Give secret seeds to those of ``optimizers`` that would draw noise and batches of this file's steps again.

        Returns:
            Whether there were any.
        """
        seed, found = self.noise_seed, False
        for optimizer in optimizers:
            if self.private is None or seed != optimizer.noise.state_dict().get("seed"):
                continue
            if optimizer.steps >= self.private.steps:
                continue  # the run that was saved
            optimizer.noise.seed = secrets.randbits(128)
            if isinstance(optimizer.run.loader, DPDataLoader):
                optimizer.run.loader.sampler_state.reseed()
            if optimizer.ranks is not None:
                optimizer.ranks.join_batches(optimizer.run.loader)
            found = True
        return found

    @property
    def noise_seed(self) -> str | None:
        """The seed of the noise of the file's steps; None where there is none, as in secure mode."""
        return None if self.private is None or not self.private.steps else self.private.noise.get("seed")

    def restore_batches(self, data_loader: DataLoader[Any] | None, optimizer: DPOptimizer | None) -> None:
        """Continue the Poisson batches where they were, under other noise where they are not those of the saved run."""
        if not isinstance(data_loader, DPDataLoader) or self.sampler is None:
            return
        data_loader.go_on(self.sampler)
        if optimizer is None or self.private is None:
            return
        if any(self.sampler.get(name, value) != value for name, value in data_loader.among.items()):
            optimizer.noise.branch(optimizer.steps, data_loader.among, known=True)
        optimizer.run.batches_a_step = int(self.sampler.get("batches", 1))
        optimizer.run.next_batch = next_batch(optimizer, data_loader, self.sampler)

    def restore_schedulers(self, schedulers: Mapping[str, Any]) -> None:
        """Continue the schedulers, by the names of their entries, as far as they were saved."""
        for name, scheduler in schedulers.items():
            if name in self.schedulers:
                scheduler.load_state_dict(self.schedulers[name])


def sharded_as(module: Any, optimizer: DPOptimizer | None, keys: tuple[Any, ...]) -> Any:
    """Return a tensor that is sharded as that of a file's entries shall be to which ``keys`` lead; None: there is none.

    An optimizer's state is sharded as the parameter is that it belongs to.
    """
    if keys[0] == MODULE:
        return module.state_dict().get(keys[1])
    if optimizer is None or keys[:2] != (OPTIMIZER, "state"):
        return None
    inner = getattr(optimizer.original_optimizer, "inner", optimizer.original_optimizer)
    params = [param for group in inner.param_groups for param in group["params"]]
    return params[keys[2]] if keys[2] < len(params) else None


def next_batch(optimizer: DPOptimizer, data_loader: DPDataLoader, position: Json) -> NextBatch:
    """Return the batches of the next step of a run that goes on from ``position``."""
    return NextBatch(name_of(data_loader), int(position["drawn"]), optimizer.run.batches_a_step)


def without_seeds(entries: Json) -> Json:
    """Return a file's entries as they may be printed: without the seeds of noise and batches."""
    shown = dict(entries)
    if "privacy_state" in shown:
        shown["privacy_state"] = {**shown["privacy_state"], "noise": {}}
    if "sampler" in shown:
        shown["sampler"] = {name: value for name, value in shown["sampler"].items() if name != "seed"}
    return shown


def named_schedulers(noise: Any, grad_clip: Any) -> dict[str, Any]:
    """Return the schedulers that there are, by the names of their entries in the file."""
    both = {"noise_scheduler_state_dict": noise, "grad_clip_scheduler_state_dict": grad_clip}
    return {name: scheduler for name, scheduler in both.items() if scheduler is not None}


def _read(path: Any, options: Json) -> Any:
    """Return what the file holds; ValueError where it is none that torch can read."""
    try:
        return torch.load(path, **options)
    except OSError:
        raise
    except Exception as error:  # of five classes, by where the file breaks off
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}). It must be a whole file that "
            "PrivacyEngine.save_checkpoint wrote; one that holds objects of classes of your own, and that you trust, "
            "needs torch_load_kwargs={'weights_only': False}."
        ) from error


def _check_in_shards(path: Any, entries: Any) -> None:
    """PrivacyError where a file of one process or of copies has whole weights."""
    weights = entries.get(MODULE, {}).values() if isinstance(entries, Mapping) else ()
    if weights and not any(hasattr(value, "device_mesh") for value in weights):
        raise PrivacyError(
            f"{path} is the checkpoint of a whole module, and this one is in shards. Go on with a whole one (of "
            "several ranks: in DifferentiallyPrivateDistributedDataParallel), or begin a new run with the weights, by "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict."
        )


def _random_state_in(entries: Json) -> Json:
    return {name: entries[name] for name in _GLOBAL if name in entries}


def _with_random_state_of(ranks: Ranks, path: Any, entries: Json) -> Json:
    """Rank 0's entries with the random state of this rank in place of its own."""
    shared = {name: value for name, value in entries.items() if name not in _GLOBAL}
    if ranks.rank < len(everyone := shared.pop(RANDOM, ())):
        return shared | everyone[ranks.rank]
    steps = entries.get("privacy_state", {}).get("steps")
    if isinstance(path, (str, os.PathLike)) and os.path.exists(_beside(path, ranks)):
        own = _read(_beside(path, ranks), {"weights_only": True})
        if own.pop("steps") == steps:
            return shared | own
    remedy = f"It is of {len(everyone)} ranks." if everyone else "Call save_checkpoint on every rank."
    warnings.warn(
        f"The checkpoint has no random state of rank {ranks.rank} at step {steps}; noise and batches continue where "
        f"they were, but dropout draws from this process's own random numbers. {remedy}",
        stacklevel=4,
    )
    return shared


def _beside(path: Any, ranks: Ranks | None = None) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f"path is a {type(path).__name__}; the ranks of a sharded module write files of their own beside it, so "
            "give a file name."
        )
    return os.fspath(path) if ranks is None else f"{os.fspath(path)}.rank{ranks.rank}"
