"""The network of the MNIST example, trained by a Lightning Trainer.

    python -m dpcore.examples.lightning_mnist --data FOLDER       # genuine data; some minutes on two cores
    python -m dpcore.examples.lightning_mnist --smoke             # seconds, synthetic

Needs the package ``lightning``. ``--resume FILE`` goes on from a checkpoint of the Trainer, with its budget.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine
from dpcore.examples import data
from dpcore.examples.mnist import network
from dpcore.lightning import DPLightningDataModule, PrivacyCheckpoint, lightning


class Images(lightning.LightningDataModule):
    """An ordinary data module, that knows nothing of privacy."""

    def __init__(self, images: data.Data, batch_size: int) -> None:
        super().__init__()
        self.images = images
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.images.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.images.test, batch_size=500)


class Classifier(lightning.LightningModule):
    """``model`` is made private when the Trainer asks for the optimiser."""

    def __init__(self, engine: PrivacyEngine, options: argparse.Namespace, label: str) -> None:
        super().__init__()
        self.model: nn.Module = network()
        self.engine = engine
        self.options = options
        self.label = label
        self.start = time.perf_counter()

    def configure_optimizers(self) -> Any:
        options = self.options
        # Without a wrapper, the Trainer's checkpoints have the same names before and after.
        _, optimizer, _ = self.engine.make_private_with_epsilon(
            module=self.model.train(),
            optimizer=torch.optim.SGD(self.model.parameters(), lr=options.learning_rate, momentum=0.5),
            data_loader=self.trainer.datamodule.train_dataloader(),  # type: ignore[attr-defined]
            target_epsilon=options.epsilon,
            target_delta=options.delta,
            epochs=options.epochs,
            max_grad_norm=options.max_grad_norm,
            expected_batch_size=options.batch_size,
            wrap_model=False,
        )
        return optimizer

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean(), batch_size=len(x))

    def on_validation_epoch_end(self) -> None:
        print(
            f"epoch {self.current_epoch + 1}: epsilon {self.engine.get_epsilon(self.options.delta):.3f} at delta "
            f"{self.options.delta:g}, test accuracy {float(self.trainer.callback_metrics['accuracy']):.4f}, "
            f"{time.perf_counter() - self.start:.0f} s ({self.label} data)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=512, help="expected; batches are Poisson samples")
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, default=None, help="writes checkpoints there")
    parser.add_argument("--stop-after", type=int, default=None, help="epochs after which to stop before the budget")
    parser.add_argument("--resume", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    if options.smoke:
        options.epochs = min(options.epochs, 2)

    if options.seed is not None:
        torch.manual_seed(options.seed)
    images = data.load("mnist", options.data)
    options.batch_size = min(options.batch_size, len(images.train) // 4)
    engine = PrivacyEngine(seed=options.seed)
    trainer = lightning.Trainer(
        max_epochs=options.stop_after or options.epochs,
        accelerator="auto",
        devices=1,
        callbacks=[PrivacyCheckpoint(engine)],
        default_root_dir=options.folder,
        enable_checkpointing=options.folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    sample_rate = options.batch_size / len(images.train)
    batches = DPLightningDataModule(
        Images(images, options.batch_size),
        generator=None if options.seed is None else torch.Generator().manual_seed(options.seed),
        sample_rate=sample_rate,
    )
    trainer.fit(
        Classifier(engine, options, images.label),
        datamodule=batches,
        ckpt_path=None if options.resume is None else str(options.resume),
    )


if __name__ == "__main__":
    main()
