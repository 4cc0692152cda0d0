"""A Lightning Trainer trains privately, and a resumed one goes on with its budget. Needs the package ``lightning``."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine, PrivacyError, UnsupportedError
from tests.dpcore.private_setup import small_data, small_model

lightning = pytest.importorskip("lightning")


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning_mnist", "--smoke", "--seed", "3", *arguments])
    runpy.run_module("dpcore.examples.lightning_mnist", run_name="__main__")
    return capsys.readouterr().out


def epsilons(output: str) -> list[float]:
    return [float(e) for e in re.findall(r"epsilon ([\d.]+)", output)]


def weights(folder) -> dict[str, torch.Tensor]:
    (path,) = folder.rglob("*.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_ends_where_the_uninterrupted_one_does(monkeypatch, capsys, tmp_path):
    whole = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "whole")))
    assert len(whole) == 2 and 0 < whole[0] < whole[1] and 2.99 < whole[1] <= 3.0
    half = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "half"), "--stop-after", "1"))
    assert half == whole[:1]
    (path,) = (tmp_path / "half").rglob("*.ckpt")
    rest = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "rest"), "--resume", str(path)))
    assert rest == whole[1:]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "rest")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_does_not_know_its_budget_is_refused(monkeypatch, capsys, tmp_path):
    run(monkeypatch, capsys, "--folder", str(tmp_path / "first"), "--stop-after", "1")
    (path,) = (tmp_path / "first").rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["dpcore"]
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match="budget would be counted anew"):
        run(monkeypatch, capsys, "--resume", str(path))


class Batches(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(small_data(), batch_size=3)


class Module(lightning.LightningModule):
    """An ordinary module, or one that is made private over the loader that it is given."""

    def __init__(self, model: nn.Module, engine: PrivacyEngine | None = None, loader=None, **options) -> None:
        super().__init__()
        self.model, self.engine, self.loader, self.options = model, engine, loader, options

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if self.engine is None:
            return optimizer
        return self.engine.make_private(
            module=self.model.train(),
            optimizer=optimizer,
            data_loader=self.loader or self.trainer.datamodule.train_dataloader(),
            max_grad_norm=1e6,
            wrap_model=False,
            **self.options,
        )[1]

    def training_step(self, batch, number):
        return F.cross_entropy(self.model(batch[0]), batch[1])


def fit(module, data, **options):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, **quiet, **options)
    trainer.fit(module, datamodule=data)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_without_noise_ends_where_lightnings_own_does():
    from dpcore.lightning import DPLightningDataModule

    ordinary, private, engine = small_model(), small_model(), PrivacyEngine()
    fit(Module(ordinary), Batches())
    without = {"noise_multiplier": 0.0, "poisson_sampling": False}
    fit(Module(private, engine, **without), DPLightningDataModule(Batches(), poisson_sampling=False))
    assert len(engine.accountant) == 20
    for mine, theirs, start in zip(
        private.parameters(), ordinary.parameters(), small_model().parameters(), strict=True
    ):
        assert (mine - theirs).norm() < 1e-9 * (theirs - start).norm()


@pytest.mark.filterwarnings("ignore")
def test_what_a_trainer_would_do_to_the_loss_or_the_loader_is_told_with_the_recipe():
    from dpcore.lightning import DPLightningDataModule

    with pytest.raises(UnsupportedError, match="accumulate_grad_batches is 4"):
        fit(Module(small_model()), DPLightningDataModule(Batches()), accumulate_grad_batches=4)
    other = DataLoader(small_data(), batch_size=3)
    with pytest.raises(PrivacyError, match=r"dpcore\.lightning\.DPLightningDataModule"):
        fit(Module(small_model(), PrivacyEngine(), other, noise_multiplier=1.0), Batches())


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_that_is_made_private_itself_is_told_the_recipe():
    class Whole(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            loader = DataLoader(small_data(), batch_size=3)
            options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
            return PrivacyEngine().make_private(module=self, optimizer=optimizer, data_loader=loader, **options)[1]

    with pytest.raises(PrivacyError, match=r"with lightning use dpcore\.lightning\.DPLightningDataModule"):
        fit(Whole(small_model()), Batches())
