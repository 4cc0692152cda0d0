"""Lightning: Poisson batches for training, and checkpoints that know the budget. Needs the package ``lightning``.

Make the model private in ``configure_optimizers``, with ``wrap_model=False`` and the Trainer's own loader, and return
the private optimiser; automatic optimisation then works as it is. ``dpcore.examples.lightning_mnist`` shows it.

For several processes give the Trainer ``strategy=DPDDPStrategy()``; the rest stays as it is.
"""

from __future__ import annotations

import io
import itertools
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from dpcore.checkpoint import RandomState
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import Ranks, replicate
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.loading.uniform_sampler import drawn_seed
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import PrivacyEngine
from dpcore.utils.batch_memory_manager import iterate_whole

try:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.strategies import DDPStrategy

    import lightning
except ImportError as error:
    raise ImportError("dpcore.lightning needs Lightning; install it with: pip install lightning") from error


class DPDDPStrategy(DDPStrategy):  # type: ignore[misc]
    """Several processes, each with the whole model, that add up their clipped sums: ``Trainer(strategy=...)``.

    In the place of Lightning's "ddp", which puts the module into torch's DistributedDataParallel, where gradients are
    averaged before they are clipped. Every process calls ``configure_optimizers``; ``make_private`` in it makes one
    private optimiser of all of them.

    Args:
        **options: Those of Lightning's ``DDPStrategy`` that say how processes start and meet (``start_method``,
            ``process_group_backend``, ``timeout``, ``cluster_environment`` ...).

    Raises:
        UnsupportedError: an option is one of torch's DistributedDataParallel, or an optimiser is not private.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        given = {*self._ddp_kwargs, *(name for name in REDUCER_OPTIONS if options.get(name) is not None)}
        if given:
            raise UnsupportedError(
                f"DPDDPStrategy has no {', '.join(sorted(given))}: nothing averages gradients here, the private "
                "optimizer adds up the clipped sums of all processes. Leave it out."
            )

    def configure_ddp(self) -> None:
        """All processes train the module from now on, without a wrapper around it."""
        assert self.model is not None
        replicate(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if any(not isinstance(o, DPOptimizer) or o.ranks is None for o in self.optimizers):
            raise UnsupportedError(
                "An optimizer that configure_optimizers returned is not that of make_private, so each process would "
                "train on its own examples alone, and their weights would drift apart. Return the private optimizer, "
                "made of the module or of a part of it."
            )


REDUCER_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class DPLightningDataModule(lightning.LightningDataModule):
    """``datamodule`` with Poisson batches for training; everything else is its own.

    ``sample_rate``: the public rate; without it 1 / len(train_dataloader()). ``generator`` seeds the batches.
    ``poisson_sampling`` False: the loader of ``datamodule``, for comparisons; pass the same to ``make_private``.

    Of several processes (with :class:`DPDDPStrategy`) each draws its own share of a batch: the loader's batch size, and
    the rate, are those of all processes together, so that epsilon does not depend on their number. Without Poisson
    sampling the loader needs a ``DistributedSampler``, and its batch size is that of one process.

    A run that goes on from a checkpoint is refused (PrivacyError) unless its budget was restored; see
    :class:`PrivacyCheckpoint`. So is ``max_physical_batch_size`` of ``make_private`` (UnsupportedError): the Trainer
    iterates over whole batches.
    """

    def __init__(
        self,
        datamodule: lightning.LightningDataModule,
        generator: torch.Generator | None = None,
        *,
        sample_rate: float | None = None,
        poisson_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.poisson_sampling = poisson_sampling
        self.datamodule = datamodule
        self.sample_rate = sample_rate
        self.seed = None if generator is None else drawn_seed(generator)
        self._train: Any = None

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:  # type: ignore[override]
        if self.trainer is not None and self.trainer.world_size > 1:
            _check_strategy(self.trainer)
        if self.trainer is not None:
            _check_whole_batches(self.trainer)
            _check_clipping(self.trainer)
        if self.trainer is not None and stage == "fit":
            # Here, and not by the user: whoever forgets PrivacyCheckpoint would forget this too.
            self.trainer.callbacks = [*_without_guard(self.trainer), _ResumeGuard()]  # type: ignore[attr-defined]
        self.datamodule.setup(stage)  # type: ignore[arg-type]

    def teardown(self, stage: str | None = None) -> None:  # type: ignore[override]
        if self.trainer is not None:
            self.trainer.callbacks = _without_guard(self.trainer)  # type: ignore[attr-defined]
        self.datamodule.teardown(stage)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        """The same loader at every call, so that its stream of batches goes on and is never begun anew."""
        if self._train is None:
            self._train = _one_loader(self.datamodule.train_dataloader())
            if self.poisson_sampling:
                self._train = self._poisson(self._train)
            iterate_whole(self._train, "Lightning's Trainer")
        return self._train

    def _poisson(self, loader: Any) -> DPDataLoader:
        if self.trainer is None or self.trainer.world_size == 1:
            return DPDataLoader.from_data_loader(loader, sample_rate=self.sample_rate, seed=self.seed)
        ranks = Ranks(self.trainer.strategy.root_device)
        generator = loader.generator if self.seed is None else torch.Generator().manual_seed(self.seed)
        seed = ranks.share_seed(None, generator)
        poisson = DPDataLoader.from_data_loader(loader, sample_rate=self.sample_rate, seed=seed, distributed=True)
        # Lightning would deal the examples of a loader out once more that does not have such a sampler. (Batches come
        # from the loader's batch_sampler, and this one is not asked.)
        shares: Any = DistributedSampler(poisson.dataset, ranks.size, ranks.rank)
        vars(poisson)["sampler"] = shares
        return poisson

    def val_dataloader(self) -> Any:
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)


def _one_loader(loader: Any) -> DataLoader[Any]:
    """UnsupportedError where a data module has several loaders for training, or one of another kind."""
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"train_dataloader() returned a {type(loader).__name__}, and a private step takes one batch of one "
            "torch.utils.data.DataLoader. Return one, over a ConcatDataset or a data set of pairs where there are "
            "several."
        )
    return loader


def _check_strategy(trainer: Any) -> None:
    """UnsupportedError where the Trainer's processes would not add up clipped sums."""
    if not isinstance(trainer.strategy, DPDDPStrategy):
        raise UnsupportedError(
            f"The Trainer's {trainer.world_size} processes work together by {type(trainer.strategy).__name__}, which "
            "averages gradients before they are clipped, or shards the model. Pass strategy=DPDDPStrategy() of "
            "dpcore.lightning to the Trainer, or devices=1."
        )


def _check_whole_batches(trainer: Any) -> None:
    """UnsupportedError where the Trainer accumulates batches."""
    planned = [c.scheduling.values() for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]
    most = max(trainer.accumulate_grad_batches, *itertools.chain((1,), *planned))
    if most != 1:
        raise UnsupportedError(
            f"accumulate_grad_batches is {most}: the Trainer would divide the loss by it "
            "before gradients are clipped. Leave it (and GradientAccumulationScheduler) out, and let the train loader "
            "have the whole batch size."
        )


def _check_clipping(trainer: Any) -> None:
    """A warning where the Trainer would clip nothing; UnsupportedError where torch would stop, as it does by value."""
    if not trainer.gradient_clip_val:
        return
    told = (
        f"gradient_clip_val is {trainer.gradient_clip_val}: the Trainer would clip the ordinary gradient, which a "
        "private step does without. The private optimizer clips every example's own to max_grad_norm; leave it out."
    )
    if getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) == "value":
        raise UnsupportedError(told)
    warn_caller(told)


class _ResumeGuard(lightning.Callback):
    """Refuses to train on from a checkpoint where nobody has restored what its steps have spent.

    It refuses to accumulate batches, too, which callbacks begin in the middle of a run.
    """

    def __init__(self) -> None:
        self.checked = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        _check_whole_batches(trainer)
        # Not earlier: whoever restores the budget has done it by now, be it in the module's own on_train_start.
        if self.checked:
            return
        self.checked = True
        fresh = any(isinstance(o, DPOptimizer) and not o.steps for o in trainer.optimizers)
        # With the callback, a run may have been saved before its first step. Steps that a module takes by itself are
        # not in global_step, so that without it zero proves nothing.
        kept = any(isinstance(callback, PrivacyCheckpoint) for callback in trainer.callbacks)
        if trainer.ckpt_path and fresh and (trainer.global_step or not kept):
            raise PrivacyError(
                f"The Trainer goes on from {trainer.ckpt_path}, but what its steps have spent was not restored and "
                "would be counted anew; add PrivacyCheckpoint(engine) to the Trainer's callbacks, in the run that "
                "writes the checkpoint and in the one that resumes."
            )


def _without_guard(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if not isinstance(callback, _ResumeGuard)]


class PrivacyCheckpoint(lightning.Callback):
    """Keeps the accountant, the noise and the batches of ``engine`` in every checkpoint that the Trainer writes.

    Without it a resumed Trainer would begin to count the budget anew. PrivacyError where a run is resumed from a
    checkpoint that was written without it, or under other settings. The Trainer may have other optimizers beside the
    private one, but no second private one (UnsupportedError).
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        self.engine = engine
        self._found: torch.Tensor | None = None
        self._random: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        written, ranks = io.BytesIO(), _private_optimizer(trainer).ranks
        self.engine.save_checkpoint(path=written, **_parts(trainer, pl_module))
        if ranks is not None:
            # Of dropout, say; noise and batches of all processes follow from what the first one writes.
            checkpoint[RANDOM] = ranks.gather(asdict(RandomState.now()))
        if ranks is None or ranks.rank == 0:
            checkpoint["dpcore"] = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if "dpcore" not in checkpoint:
            raise PrivacyError(
                "The checkpoint does not say what its steps have spent, so the budget would be counted anew. Resume "
                "from one that was written with this callback."
            )
        # The optimiser does not exist yet.
        self._found = checkpoint["dpcore"]
        self._random = checkpoint.get(RANDOM, [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._found is None:
            return
        read, mine = io.BytesIO(self._found.cpu().numpy().tobytes()), self._random[trainer.global_rank :][:1]
        with warnings.catch_warnings():
            if mine:
                warnings.filterwarnings("ignore", "The checkpoint has no random state of rank")
            self.engine.load_checkpoint(path=read, **_parts(trainer, pl_module))
        for state in mine:
            RandomState(**state).restore()
        self._found = None


RANDOM = "dpcore_random"
"""The entry of all processes' random states in a checkpoint."""


def _parts(trainer: Any, module: Any) -> dict[str, Any]:
    return {"module": module, "optimizer": _private_optimizer(trainer), "data_loader": trainer.train_dataloader}


def _private_optimizer(trainer: Any) -> DPOptimizer:
    """The Trainer's one private optimizer.

    Raises:
        UnsupportedError: there is none, or a second one, whose noise a checkpoint would not hold.
    """
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DPOptimizer)]
    if len(found) != 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(found)} private optimizers, and PrivacyCheckpoint keeps the noise and "
            "the steps of one. Return one, made private over all parameters that learn from the data, or leave the "
            "callback out and do not resume."
        )
    return found[0]
