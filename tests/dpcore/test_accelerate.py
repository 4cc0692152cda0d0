"""Loops of accelerate: without noise and clipping they end where the library's own run ends."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpcore import BudgetError, PrivacyEngine, PrivacyError, UnsupportedError
from tests.dpcore.trainer_parts import (
    EXAMPLES,
    PIECES,
    ROWS,
    STEPS,
    WITHOUT,
    Texts,
    arguments,
    difference,
    language_model,
    loop,
    network,
    numbers,
    parts,
    state,
)

accelerate = pytest.importorskip("accelerate")

from dpcore.accelerate import STATE, prepare  # noqa: E402

BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": 1.0}
"""For two rounds."""
NOISY = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}


def private_run(model=None, engine=None, **options):
    """(accelerator, engine, module, optimizer, loader), all of them new where they are not given."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    engine = engine or PrivacyEngine(seed=1)
    module, optimizer, loader = parts(model or network())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **options)
    return accelerator, engine, *private


def test_an_accelerators_loop_without_noise_ends_where_its_own_does():
    model = network()
    start, reference = state(model), copy.deepcopy(model)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    rate = loop(accelerator, *accelerator.prepare(*parts(model)))
    accelerator, engine, *private = private_run(reference, **WITHOUT)
    assert loop(accelerator, *private) == rate == 0.01 * 0.5**4
    assert len(engine.accountant) == STEPS
    assert difference(start, model, reference) < 1e-12


def test_an_accelerator_says_where_a_batch_has_ended():
    """Loops count their steps and average weights there; it said so at every piece."""
    accelerator, engine, model, optimizer, loader = private_run(**NOISY)
    total = len(loader.loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    scheduler, ended, pieces = accelerator.prepare(schedule), 0, 0
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pieces += 1
        ended += accelerator.sync_gradients
    assert ended == len(engine.accountant) == schedule.last_epoch == total < pieces


def test_a_schedule_that_an_accelerator_does_not_know_moves_once_a_batch():
    """It is stepped for every piece, with nothing of accelerate's between it and the loop."""
    accelerator, _, model, optimizer, loader = private_run(**BUDGET)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pieces = 0
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pieces += 1
    assert schedule.last_epoch == STEPS < pieces


def test_a_private_loop_of_an_accelerator_spends_its_budget_and_no_more():
    accelerator, engine, *private = private_run(**BUDGET | {"epochs": 1})
    loop(accelerator, *private)
    assert len(engine.accountant) == STEPS and 2.9 < engine.get_epsilon(1e-3) <= 3.0
    with pytest.raises(BudgetError):
        loop(accelerator, *private)


def test_an_accelerator_goes_on_with_its_budget_from_its_own_checkpoint(tmp_path):
    accelerator, whole, *run = private_run(**BUDGET)
    loop(accelerator, *run)
    accelerator.save_state(str(tmp_path))
    loop(accelerator, *run)
    with pytest.raises(PrivacyError, match="counted 20 steps that are not in the checkpoint"):
        accelerator.load_state(str(tmp_path))

    again, resumed, *rest = private_run(**BUDGET)
    again.load_state(str(tmp_path))
    assert len(resumed.accountant) == STEPS and rest[1].optimizer.steps == STEPS
    loop(again, *rest)
    assert resumed.accountant.history == whole.accountant.history and len(resumed.accountant) == 2 * STEPS
    assert resumed.get_epsilon(1e-3) == whole.get_epsilon(1e-3)
    first, second = state(run[0]), state(rest[0])
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(BudgetError):
        loop(again, *rest)

    other = private_run(**BUDGET | {"max_grad_norm": 2.0})[0]
    with pytest.raises(PrivacyError, match=r"saved with max_grad_norm=1\.0"):
        other.load_state(str(tmp_path))
    (tmp_path / STATE).unlink()
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        private_run(**BUDGET)[0].load_state(str(tmp_path))


def test_an_accelerator_refuses_a_checkpoint_that_knows_no_budget(tmp_path):
    plain = accelerate.Accelerator(cpu=True)
    plain.prepare(*parts(network()))
    plain.save_state(str(tmp_path))
    accelerator, _, module, *_ = private_run(**BUDGET)
    start = state(module)
    # As some scripts do: a hook that loads the weights itself, and takes the module away from those after it.
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        accelerator.load_state(str(tmp_path))
    assert all(torch.equal(start[name], value) for name, value in state(module).items())


def test_an_accelerator_saves_each_of_its_runs_and_none_that_it_has_freed(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    for _ in range(2):
        module, optimizer, loader = parts(network())
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        engine = PrivacyEngine()
        prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **options)
    accelerator.save_state(str(tmp_path / "both"))
    assert {file.name for file in (tmp_path / "both").glob("privacy*")} == {"privacy.pt", "privacy_1.pt"}
    accelerator.free_memory()
    accelerator.save_state(str(tmp_path / "none"))
    assert not list((tmp_path / "none").glob("privacy*"))


@pytest.mark.filterwarnings("ignore")
def test_a_second_run_of_an_accelerator_has_as_long_batches():
    """They were those of one piece: the first prepare() had left the accelerator to accumulate no more."""
    accelerator, rates = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True), []
    for _ in range(2):
        module, optimizer, loader = parts(network())
        run = {"module": module, "optimizer": optimizer, "data_loader": loader}
        rates.append(prepare(accelerator, PrivacyEngine(), **run, **NOISY)[2].sample_rate)
    assert rates == [1 / STEPS] * 2


def test_an_accelerator_saves_between_batches_only(tmp_path):
    accelerator, _, model, optimizer, loader = private_run(**BUDGET)
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.batch_goes_on:
            break
    with pytest.raises(PrivacyError, match=r"within a logical batch.*Save where optimizer\.batch_goes_on is False"):
        accelerator.save_state(str(tmp_path))


@pytest.mark.parametrize("size", ["auto", 3])
def test_an_accelerators_batches_are_cut_as_asked(size):
    ends = []
    for options in ({}, {"max_physical_batch_size": size}):
        accelerator, engine, *run = private_run(**BUDGET | options)
        assert loop(accelerator, *run) == 0.01 * 0.5**4
        assert len(engine.accountant) == STEPS
        ends.append(accelerator.unwrap_model(run[0]).to_standard_module())
    assert difference(state(network()), *ends) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "ghost"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_accelerators_modes_are_right_or_refused(mode, wrapped):
    """Three objects that train as the default mode's do, or a sentence that names the option."""
    ends = []
    for options in ({}, {"grad_sample_mode": mode, "wrap_model": wrapped}):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
        module, optimizer, loader = parts(network())
        given = {"module": module, "optimizer": optimizer, "data_loader": loader, **WITHOUT, **options}
        try:
            private = prepare(accelerator, PrivacyEngine(), **given)
        except UnsupportedError as refused:
            assert options and "grad_sample_mode" in str(refused) and "wrap_model" in str(refused)
            assert mode == "ghost" or not wrapped
            return
        assert not options or (mode != "ghost" and wrapped)
        loop(accelerator, *private)
        ends.append(module)
    assert difference(state(network()), *ends) < 1e-12


def test_an_accelerators_loader_must_be_numbered():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(numbers())

    module, optimizer, _ = parts(network())
    given = {"module": module, "optimizer": optimizer, "data_loader": DataLoader(Stream(), batch_size=ROWS)}
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        prepare(accelerate.Accelerator(cpu=True), PrivacyEngine(), **given, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.parametrize("first", ["make_private", "prepare"])
def test_accelerates_own_prepare_is_told_the_recipe(first):
    accelerator = accelerate.Accelerator(cpu=True)
    engine, given = PrivacyEngine(), parts(network())

    def make_private(module, optimizer, loader):
        return engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    with pytest.raises((PrivacyError, UnsupportedError), match=r"dpcore\.accelerate\.prepare\(accelerator,.* both"):
        if first == "make_private":
            loop(accelerator, *accelerator.prepare(*make_private(*given)))
        else:
            make_private(*accelerator.prepare(*given))


class Opened(Dataset):
    """Examples that a worker process can read after it has opened its file."""

    def __init__(self, examples) -> None:
        self.examples, self.file = examples, None

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int):
        return self.file[i]


def open_file(number: int) -> None:
    data = torch.utils.data.get_worker_info().dataset
    data.file = data.examples


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_worker_processes_are_started_as_the_loader_says(library, tmp_path):
    pytest.importorskip("transformers")

    from dpcore.transformers import DPTrainer

    class Reading(DPTrainer):
        def _make_private(self, loader):
            loader.worker_init_fn = open_file
            super()._make_private(loader)

    engine, workers = PrivacyEngine(), {"num_workers": 1, "worker_init_fn": open_file, "persistent_workers": True}
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    if library == "transformers":
        options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 2}
        given = {"args": arguments(tmp_path, **options), "train_dataset": Opened(Texts()), "engine": engine}
        trainer = Reading(model=language_model("lora"), **given, privacy=privacy)
        trainer.train()
        loader, steps = trainer.get_train_dataloader(), 2
    else:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
        module, optimizer, _ = parts(network())
        given = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": DataLoader(Opened(numbers()), ROWS, **workers),
        }
        run = prepare(accelerator, engine, **given, **privacy)
        loop(accelerator, *run)
        loader, steps = run[2], STEPS
    assert len(engine.accountant) == steps and loader.persistent_workers
