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


def fit(module, data, checkpoint=None, **options):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 1} | quiet | options
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, **options)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer


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
def test_several_loaders_are_told_to_be_one():
    from dpcore.lightning import DPLightningDataModule

    class Several(lightning.LightningDataModule):
        def train_dataloader(self):
            return {"one": DataLoader(small_data(), batch_size=3), "other": DataLoader(small_data(), batch_size=3)}

    for poisson in (True, False):
        with pytest.raises(
            UnsupportedError, match=r"train_dataloader\(\) returned a dict.*Return one, over a ConcatDataset"
        ):
            fit(Module(small_model()), DPLightningDataModule(Several(), poisson_sampling=poisson))


@pytest.mark.filterwarnings("ignore")
def test_a_second_fit_goes_on_with_the_optimizer_of_the_first():
    from dpcore.lightning import DPLightningDataModule

    class Keeps(Module):
        made = None

        def configure_optimizers(self):
            self.made = self.made or super().configure_optimizers()
            return self.made

    def fitted(kind):
        module, data = kind(small_model(), PrivacyEngine(), noise_multiplier=1.0), DPLightningDataModule(Batches())
        for _ in range(2):
            fit(module, data)
        return len(module.engine.accountant)

    with pytest.raises(PrivacyError, match=r"configure_optimizers at every fit\(\): return the optimizer of the first"):
        fitted(Module)
    assert fitted(Keeps) == 40


@pytest.mark.filterwarnings("ignore")
def test_batches_that_a_callback_accumulates_are_refused():
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from dpcore.lightning import DPLightningDataModule

    class Later(lightning.Callback):
        def on_train_batch_end(self, trainer, *given):
            trainer.accumulate_grad_batches = 2

    for callback, steps in ((GradientAccumulationScheduler({0: 1, 4: 3}), 0), (Later(), 1)):
        engine = PrivacyEngine()
        module = Module(small_model(), engine, noise_multiplier=1.0)
        with pytest.raises(UnsupportedError, match=r"accumulate_grad_batches is [32]: .*GradientAccumulationScheduler"):
            fit(module, DPLightningDataModule(Batches()), callbacks=[callback])
        assert len(engine.accountant) == steps


@pytest.mark.filterwarnings("ignore:Epsilon", "ignore:.*num_workers", "ignore:.*expected_batch_size")
def test_a_trainers_own_clipping_is_told_to_do_nothing():
    from dpcore.lightning import DPLightningDataModule

    def clipped(algorithm):
        module = Module(small_model(), PrivacyEngine(), noise_multiplier=1.0)
        fit(module, DPLightningDataModule(Batches()), gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)

    with pytest.warns(UserWarning, match=r"gradient_clip_val is 0\.5: .*leave it out"):
        clipped("norm")
    with pytest.raises(UnsupportedError, match=r"gradient_clip_val is 0\.5: .*leave it out"):
        clipped("value")


class Several(Module):
    """A private model, and beside it others that are not trained by the loader's examples."""

    def __init__(self, *given, private: int = 1, **options) -> None:
        super().__init__(*given, **options)
        self.automatic_optimization = False
        self.beside = nn.ModuleList([small_model() for _ in range(2)])
        self.private = private

    def configure_optimizers(self):
        found = [torch.optim.SGD(self.beside[0].parameters(), lr=0.1), super().configure_optimizers()]
        if self.private > 1:
            self.model, kept = self.beside[1], self.model
            found.append(super().configure_optimizers())
            self.model = kept
        return found

    def training_step(self, batch, number):
        optimizer = self.optimizers()[1]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_of_the_one_private_optimizer_among_others(tmp_path):
    from dpcore.lightning import DPLightningDataModule, PrivacyCheckpoint

    def run(private=1, checkpoint=None, **options):
        engine = PrivacyEngine(seed=1)
        module = Several(small_model(), engine, noise_multiplier=1.0, private=private)
        data = DPLightningDataModule(Batches(), torch.Generator().manual_seed(2))
        callbacks = [PrivacyCheckpoint(engine)]
        return engine, module, fit(module, data, checkpoint, callbacks=callbacks, **options)

    checkpoint = str(tmp_path / "saved.ckpt")
    run()[2].save_checkpoint(checkpoint)
    whole, expected, _ = run(max_epochs=2)
    resumed, found, _ = run(max_epochs=2, checkpoint=checkpoint)
    assert resumed.accountant.history == whole.accountant.history and len(whole.accountant) == 40
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    with pytest.raises(UnsupportedError, match=r"returned 2 private optimizers, and PrivacyCheckpoint keeps"):
        run(private=2)[2].save_checkpoint(checkpoint)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_a_resumed_run_knows_its_budget_or_is_refused(written, read, tmp_path):
    from dpcore.lightning import DPLightningDataModule, PrivacyCheckpoint

    def run(keep, **options):
        engine = PrivacyEngine(seed=1)
        module = Module(small_model(), engine, noise_multiplier=1.0)
        callbacks = [PrivacyCheckpoint(engine)] if keep else []
        return engine, lambda: fit(module, DPLightningDataModule(Batches()), callbacks=callbacks, **options)

    first, train = run(written)
    trainer = train()
    assert len(first.accountant) == trainer.global_step == 20
    assert all(type(callback).__module__ != "dpcore.lightning" or written for callback in trainer.callbacks)
    checkpoint = str(tmp_path / "saved.ckpt")
    trainer.save_checkpoint(checkpoint)

    engine, train = run(read, max_epochs=2, checkpoint=checkpoint)
    if written and read:
        train()
        assert len(engine.accountant) == 40
        return
    with pytest.raises(PrivacyError, match=r"budget would be counted anew" if read else r"add PrivacyCheckpoint\("):
        train()
    assert len(engine.accountant) == (0 if read else 20)  # what the optimizer's own state says was spent


@pytest.mark.filterwarnings("ignore")
def test_steps_that_a_module_takes_by_itself_are_not_forgotten_by_a_resume(tmp_path):
    """Lightning does not count them: its global_step stays 0."""
    from dpcore.lightning import DPLightningDataModule

    class ByHand(Module):
        automatic_optimization = False

        def training_step(self, batch, number):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            F.cross_entropy(self.model(batch[0]), batch[1]).backward()
            optimizer.step()

    def module():
        return ByHand(small_model(), PrivacyEngine(), noise_multiplier=1.0)

    first = module()
    trainer = fit(first, DPLightningDataModule(Batches()))
    assert len(first.engine.accountant) == 20 and trainer.global_step == 0
    trainer.save_checkpoint(str(tmp_path / "saved.ckpt"))
    with pytest.raises(PrivacyError, match=r"add PrivacyCheckpoint\(engine\)"):
        fit(module(), DPLightningDataModule(Batches()), max_epochs=2, checkpoint=str(tmp_path / "saved.ckpt"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("size", ["auto", 2])
def test_pieces_that_the_trainer_would_never_see_are_refused(size, poisson):
    from dpcore.lightning import DPLightningDataModule

    options = {"noise_multiplier": 1.0, "max_physical_batch_size": size, "poisson_sampling": poisson}
    with pytest.raises(UnsupportedError, match=f"max_physical_batch_size is {size!r}, but Lightning's Trainer"):
        fit(
            Module(small_model(), PrivacyEngine(), **options),
            DPLightningDataModule(Batches(), poisson_sampling=poisson),
        )


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
