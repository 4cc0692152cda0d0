"""Lightning: Poisson batches for training, and checkpoints that know the budget. Needs the package ``lightning``.

Make the model private in ``configure_optimizers``, with ``wrap_model=False`` and the Trainer's own loader, and return
the private optimiser; automatic optimisation then works as it is. ``dpcore.examples.lightning_mnist`` shows it.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from dpcore.data_loader import DPDataLoader
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import PrivacyEngine
from dpcore.utils.batch_memory_manager import iterate_whole

try:
    import lightning
except ImportError as error:
    raise ImportError("dpcore.lightning needs Lightning; install it with: pip install lightning") from error


class DPLightningDataModule(lightning.LightningDataModule):
    """``datamodule`` with Poisson batches for training; everything else is its own.

    ``sample_rate``: the public rate; without it 1 / len(train_dataloader()). ``generator`` seeds the batches.
    ``poisson_sampling`` False: the loader of ``datamodule``, for comparisons; pass the same to ``make_private``. For
    one process: the Trainer's distributed strategies average unclipped gradients.

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
        self.seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))
        self._train: Any = None

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:  # type: ignore[override]
        if self.trainer is not None and self.trainer.world_size > 1:
            raise UnsupportedError(
                f"The Trainer has {self.trainer.world_size} processes, and its strategies average unclipped gradients; "
                "use devices=1, or a loop of your own with DifferentiallyPrivateDistributedDataParallel."
            )
        if self.trainer is not None and self.trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"accumulate_grad_batches is {self.trainer.accumulate_grad_batches}: the Trainer would divide the loss "
                "by it before gradients are clipped. Leave it out, and let the train loader have the whole batch size."
            )
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
            self._train = self.datamodule.train_dataloader()
            if self.poisson_sampling:
                rate, seed = self.sample_rate, self.seed
                self._train = DPDataLoader.from_data_loader(self._train, sample_rate=rate, seed=seed)
            iterate_whole(self._train, "Lightning's Trainer")
        return self._train

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


class _ResumeGuard(lightning.Callback):
    """Refuses to train on from a checkpoint where nobody has restored what its steps have spent."""

    def __init__(self) -> None:
        self.checked = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
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
    checkpoint that was written without it, or under other settings.
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        self.engine = engine
        self._found: torch.Tensor | None = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        written = io.BytesIO()
        self.engine.save_checkpoint(path=written, **_parts(trainer, pl_module))
        checkpoint["dpcore"] = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if "dpcore" not in checkpoint:
            raise PrivacyError(
                "The checkpoint does not say what its steps have spent, so the budget would be counted anew. Resume "
                "from one that was written with this callback."
            )
        # The optimiser does not exist yet.
        self._found = checkpoint["dpcore"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._found is not None:
            read = io.BytesIO(self._found.cpu().numpy().tobytes())
            self.engine.load_checkpoint(path=read, **_parts(trainer, pl_module))
            self._found = None


def _parts(trainer: Any, module: Any) -> dict[str, Any]:
    return {"module": module, "optimizer": trainer.optimizers[0], "data_loader": trainer.train_dataloader}
