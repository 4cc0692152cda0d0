"""Checkpoints: files of earlier versions still continue, and what is saved is what is loaded."""

import gc
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import BudgetError, PrivacyEngine, PrivacyError
from dpcore.grad_sample import GradSampleModule
from dpcore.schedulers import ExponentialGradClip, ExponentialNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.private_setup import make, small_data, step

# Written by the code before checkpoint.py, after two rounds of the run below; with it the weights of a third round.
WRITTEN_BEFORE = Path(__file__).parent / "data" / "checkpoint-0.1.pt"

DROPOUT = [2.0, 2.0, 2.0, 2.0, 0.0, 2.0]
"""The numbers that the torch that wrote it draws for the seed 1. torch 2.6 draws other masks, so its weights are
others."""


class Run:
    """A private training run with everything that a checkpoint holds; ``seed`` is the engine's."""

    def __init__(self, seed: int | None, sigma: float = 1.1) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
        data = TensorDataset(x, torch.randint(3, (60,), generator=generator))
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.25), nn.Linear(5, 3)).double()
        self.engine = PrivacyEngine(accountant="rdp", seed=seed)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
            data_loader=DataLoader(data, batch_size=10),
            noise_multiplier=sigma,
            max_grad_norm=0.8,
            sample_rate=0.2,
            expected_batch_size=12,
        )
        self.schedules = {
            "noise_scheduler": ExponentialNoise(self.optimizer, gamma=0.9),
            "grad_clip_scheduler": ExponentialGradClip(self.optimizer, gamma=0.95),
        }

    def round(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        for schedule in self.schedules.values():
            schedule.step()

    def save(self, path, **own):
        parts = {"module": self.model, "optimizer": self.optimizer, **self.schedules}
        self.engine.save_checkpoint(path=path, checkpoint_dict=own, **parts)

    def load(self, path):
        parts = {"module": self.model, "optimizer": self.optimizer, **self.schedules}
        return self.engine.load_checkpoint(path=path, **parts)


def test_a_checkpoint_of_an_earlier_version_continues_as_it_would_have() -> None:
    run = Run(seed=99)
    loaded = run.load(WRITTEN_BEFORE)
    assert loaded["epoch"] == 2
    run.round()
    torch.manual_seed(1)
    if F.dropout(torch.ones(6)).tolist() == DROPOUT:
        for name, value in loaded["weights_one_round_later"].items():
            torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(loaded["epsilon_one_round_later"], rel=1e-12)


def test_a_file_has_the_entries_that_earlier_versions_wrote(tmp_path) -> None:
    run = Run(seed=7)
    run.save(tmp_path / "now.pt", epoch=2)
    before, now = (torch.load(path, weights_only=True) for path in (WRITTEN_BEFORE, tmp_path / "now.pt"))
    assert set(now) - {"cuda_rng", "runs"} == set(before) - {"weights_one_round_later", "epsilon_one_round_later"}
    assert set(now["privacy_state"]) == set(before["privacy_state"])
    new = {"clipping": "flat", "unit": "one example", "the users' rows": None, "max_batch_size": None}
    new |= {"sampling": "poisson"}
    assert now["setting"] == before["setting"] | new


def test_settings_of_another_run_are_refused_before_anything_is_changed() -> None:
    run = Run(seed=99, sigma=1.3)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(PrivacyError, match=r"noise_multiplier=1\.1, this run has 1\.3"):
        run.load(WRITTEN_BEFORE)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert not run.engine.accountant.history


def test_what_is_loaded_is_what_was_saved(tmp_path) -> None:
    run = Run(seed=7)
    run.round()
    run.save(tmp_path / "a.pt", note="mine")
    run.round()
    other = Run(seed=8)
    assert other.load(tmp_path / "a.pt")["note"] == "mine"
    other.round()
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.engine.accountant.history == run.engine.accountant.history
    assert other.optimizer.noise_multiplier == run.optimizer.noise_multiplier
    assert other.optimizer.max_grad_norm == run.optimizer.max_grad_norm


def _backward(model, x, y) -> None:
    F.cross_entropy(model(x), y).backward()


def test_a_checkpoint_within_a_batch_is_refused(tmp_path) -> None:
    """The run that went on from it gave the noise of the batch at hand to the next one."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    parts = {"path": tmp_path / "a.pt", "module": model, "optimizer": optimizer}
    batches = iter(loader)
    _backward(model, *next(batches))
    with pytest.raises(PrivacyError, match="within a batch, after a backward pass and before its step"):
        engine.save_checkpoint(**parts)
    optimizer.step()
    engine.save_checkpoint(**parts)
    _backward(model, *next(batches))
    optimizer.zero_grad()
    engine.save_checkpoint(**parts)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as pieces:
        for x, y in pieces:
            step(model, optimizer, x, y)
            if optimizer.batch_goes_on:
                with pytest.raises(PrivacyError, match="within a batch"):
                    engine.save_checkpoint(**parts)
                break
    engine.save_checkpoint(**parts)


def test_a_checkpoint_after_the_budget_s_end(tmp_path) -> None:
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    engine.set_budget(0.01, 1e-3)
    batches = iter(loader)
    with pytest.raises(BudgetError):
        step(model, optimizer, *next(batches))
    engine.save_checkpoint(path=tmp_path / "a.pt", module=model, optimizer=optimizer)
    engine.set_budget(None)
    _backward(model, *next(batches))
    optimizer.step()  # on this batch alone
    assert engine.accountant.history == [(1.0, 1 / 6, 1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fetched", [False, True])
def test_the_batch_that_comes_next_is_the_one_of_the_uninterrupted_run(tmp_path, fetched: bool, workers: int) -> None:
    """It was a later one where the loop had fetched a batch, or workers had: under noise of the same step."""

    def run():
        loader = DataLoader(small_data(), batch_size=10, num_workers=workers)
        return make(engine=PrivacyEngine(seed=3), data_loader=loader, noise_multiplier=1.0)

    engine, model, optimizer, loader = run()
    parts = {"path": tmp_path / "a.pt", "module": model, "optimizer": optimizer}
    for k, (x, y) in enumerate(loader):
        if k == 3 and fetched:
            engine.save_checkpoint(**parts)
        step(model, optimizer, x, y)
        if k == 2 and not fetched:
            engine.save_checkpoint(**parts)
    resumed, other, its, batches = run()
    resumed.load_checkpoint(path=tmp_path / "a.pt", module=other, optimizer=its)
    left = [step(other, its, x, y) for x, y in batches]
    assert len(left) == 3 and its.steps == optimizer.steps == 6
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for (x, _), (again, _) in zip(loader, batches, strict=True):
        assert torch.equal(x, again)


@pytest.mark.parametrize("made_before", [True, False])
def test_noise_and_batches_are_not_drawn_again_where_the_optimizer_is_not_loaded(tmp_path, made_before) -> None:
    path = tmp_path / "saved.pt"
    saved = Run(seed=7)
    saved.round()
    saved.save(path)
    again = Run(seed=7) if made_before else None
    engine = again.engine if again is not None else PrivacyEngine(accountant="rdp", seed=7)
    module = GradSampleModule(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.25), nn.Linear(5, 3)).double())
    with pytest.warns(UserWarning, match=r"repeat those of the checkpoint's steps.*Pass optimizer="):
        engine.load_checkpoint(path=path, module=module if again is None else again.model)
    if again is None:
        again = Run.__new__(Run)
        optimizer, loader = torch.optim.SGD(module.parameters(), lr=0.2), saved.loader.dataset
        given = {"sample_rate": 0.2, "expected_batch_size": 12, "noise_multiplier": 1.1, "max_grad_norm": 0.8}
        again.model, again.optimizer, again.loader = engine.make_private(
            module=module, optimizer=optimizer, data_loader=DataLoader(loader, batch_size=10), **given
        )
    assert again.optimizer.noise.seed != saved.optimizer.noise.seed
    assert again.loader.sampler_state.seed != saved.loader.sampler_state.seed
    assert len(engine.accountant) == len(saved.engine.accountant) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.engine.load_checkpoint(path=path, module=saved.model)  # the run that was saved repeats nothing


@pytest.mark.parametrize("content", [{"0.weight": torch.zeros(2)}, [1, 2]])
def test_a_file_that_is_no_checkpoint_is_one_sentence(tmp_path, content) -> None:
    torch.save(content, tmp_path / "other.pt")
    run = Run(seed=1)
    with pytest.raises(ValueError, match=r"no checkpoint of a private run.*PrivacyEngine\.save_checkpoint"):
        run.load(tmp_path / "other.pt")


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 broken off", pickle.dumps(nn.Linear)], ids=repr)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, content) -> None:
    (tmp_path / "other.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.pt cannot be read as a checkpoint \(.*save_checkpoint wrote.*trust"):
        Run(seed=1).load(tmp_path / "other.pt")


def test_another_way_of_clipping_is_another_setting(tmp_path) -> None:
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine, model, optimizer, loader = make(clipping="automatic", **given)
    step(model, optimizer, *next(iter(loader)))
    engine.save_checkpoint(path=tmp_path / "saved.pt", module=model, optimizer=optimizer)
    engine, model, optimizer, _ = make(**given)
    with pytest.raises(PrivacyError, match="saved with clipping=automatic, this run has flat"):
        engine.load_checkpoint(path=tmp_path / "saved.pt", module=model, optimizer=optimizer)


@pytest.mark.parametrize(("seed", "others"), [(None, None), (None, 8), (7, 7)])
@pytest.mark.parametrize("order", ["in turn", "the first is gone", "the saved one goes on"])
def test_a_second_run_from_one_checkpoint_is_told_of_the_first_one(tmp_path, seed, others, order) -> None:
    """Their noise is the same, which a resume needs, so that their difference is bare."""
    path = tmp_path / "saved.pt"
    saved = Run(seed)
    saved.round()
    saved.save(path)
    first, second = Run(others), Run(others)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first.load(path)
        first.round()
    if order == "the saved one goes on":
        second = saved
    elif order == "the first is gone":
        del first
        gc.collect()
        second.load(path)
    else:
        second.load(path)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        second.round()
    told = [warning for warning in heard if "has drawn the noise that this step adds" in str(warning.message)]
    assert bool(told) == (seed is None)


def test_a_second_run_by_state_dicts_has_noise_of_its_own() -> None:
    first, second = Run(None), Run(None)
    first.round()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.optimizer.noise.name(5) != first.optimizer.noise.name(5)
    assert second.engine.get_epsilon(1e-3) == pytest.approx(first.engine.get_epsilon(1e-3))
