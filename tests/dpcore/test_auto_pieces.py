"""Batches that the loader hands out in pieces of a planned size: ``max_physical_batch_size="auto"``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.planner import MicroBatches
from dpcore.optimizers import clipping_optimizer as optimizers
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.comparison import relative_error

EXAMPLES = 40


def private(size: int | str | None, lr: float = 0.1, **options: Any) -> tuple[Any, Any, Any, PrivacyEngine]:
    """A model, its optimizer and a loader of one batch of all examples after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(EXAMPLES, 5), torch.arange(EXAMPLES) % 3)
    engine = PrivacyEngine(seed=3)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        data_loader=DataLoader(data, batch_size=EXAMPLES),
        noise_multiplier=0.5,
        max_grad_norm=0.4,
        sample_rate=0.9,
        expected_batch_size=36,
        max_physical_batch_size=size,
        **options,
    )
    return *made, engine


def train(model: Any, optimizer: Any, loader: Any, epochs: int = 3) -> list[int]:
    """The lengths of the pieces."""
    sizes = []
    torch.manual_seed(1)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    return sizes


def planned(most: int) -> Any:
    """Pieces of at most so many examples, whatever they leave behind."""
    return mock.patch.object(optimizers, "micro_batches", lambda *_: MicroBatches(most, most))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_pieces_are_one_batch_and_one_step() -> None:
    whole, pieces = private(None), private("auto")
    lengths = train(*whole[:3])
    with planned(7):
        found = train(*pieces[:3])
    assert sum(found) == sum(lengths)
    assert max(found) <= 16 and max(found[5:]) <= 7 and len(found) > 2 * len(lengths)
    assert pieces[3].accountant.history == whole[3].accountant.history
    assert pieces[1].steps == whole[1].steps == len(lengths)
    assert relative_error(weights(pieces[0]), weights(whole[0])) < 1e-5
    assert len(pieces[2]) == len(whole[2])


@pytest.mark.parametrize(
    ("plan", "batch", "size"),
    [
        (MicroBatches(16, 16, whole=23, worth=1), 64, 16),
        (MicroBatches(16, 16, whole=23, worth=1), 30, 10),
        (MicroBatches(39, 39, whole=23, worth=39), 64, 32),
        (MicroBatches(39, 39, whole=23, worth=39), 20, 39),
        (MicroBatches(39, 39, whole=23, worth=39), 150, 39),
        (MicroBatches(6, 6, whole=2, bearable=40), 31, 31),
        (MicroBatches(6, 6, whole=2, bearable=40), 60, 30),
        (MicroBatches(6, 6, whole=2, bearable=40), 64, 32),
        (MicroBatches(6, 6, whole=2, bearable=10), 64, 10),
        (MicroBatches(6, 6, whole=2, bearable=200), 300, 6),
    ],
)
def test_pieces_of_small_batches_outweigh_the_passes_over_sums(plan: MicroBatches, batch: int, size: int) -> None:
    """Leave small batches whole and cut others into halves, while memory bears it; else into thirds, or halves where
    the sums are large beside what an example leaves behind.
    """
    assert plan.size(batch) == size


def test_a_rate_that_is_changed_for_every_piece_is_refused() -> None:
    """Nothing of dpcore's can tell it to wait: it is changed by hand, or by a schedule of another library."""
    model, optimizer, loader, _ = private("auto")
    with planned(7), pytest.raises(UnsupportedError, match=r"not optimizer\.batch_goes_on: scheduler\.step"):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
    assert optimizer.steps == 0


@pytest.mark.parametrize("size", ["auto", 7])
def test_noise_that_is_changed_for_every_piece_is_refused(size: int | str) -> None:
    model, optimizer, loader, engine = private(size)
    with planned(7), pytest.raises(PrivacyError, match="within a logical batch: the noise would depend on"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.noise_multiplier *= 0.5
    assert optimizer.steps == len(engine.accountant) == 0


def test_a_schedule_that_counts_batches_is_served() -> None:
    model, optimizer, loader, engine = private("auto")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with planned(7):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if not optimizer.batch_goes_on:
                schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**optimizer.steps)
    assert engine.accountant.history[0][2] == optimizer.steps > 0


def test_a_loop_that_was_left_leaves_no_piece_behind() -> None:
    left, fresh = private("auto", check_batches=False), private("auto", check_batches=False)
    with planned(7):
        for x, y in left[2]:
            F.cross_entropy(left[0](x), y).backward()
            left[1].step()
            break
        assert left[1].batch_goes_on
        train(*left[:3], epochs=1)
        train(*fresh[:3], epochs=1)
    assert left[1].steps == fresh[1].steps


def test_a_plan_holds_for_its_kind_of_batch() -> None:
    """Without a mock: the planner leaves a batch of small examples whole once it knows them."""
    lengths = train(*private("auto")[:3], epochs=4)
    assert lengths[0] <= 16 and max(lengths) > 30


@pytest.mark.parametrize("size", [0, "all", True, 2.5])
def test_other_sizes_are_refused_before_anything_is_changed(size: Any) -> None:
    with pytest.raises(ValueError, match="max_physical_batch_size is"):
        private(size)


def test_time_first_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="time-first"):
        private("auto", batch_first=False)


def test_the_manager_plans_too() -> None:
    model, optimizer, loader, _ = private(None)
    with (
        planned(7),
        BatchMemoryManager(data_loader=loader, max_physical_batch_size="auto", optimizer=optimizer) as pieces,
    ):
        found = train(model, optimizer, pieces, epochs=2)
    assert max(found[5:]) <= 7 and optimizer.steps < len(found)
    assert not optimizer.plans_pieces


@pytest.mark.parametrize("size", ["auto", 5])
def test_a_checkpoint_holds_where_the_batches_stand(size: int | str, tmp_path: Path) -> None:
    goes_on, resumed = private(size), private(size)
    train(*goes_on[:3])
    parts = dict(zip(("module", "optimizer", "data_loader"), goes_on, strict=False))
    goes_on[3].save_checkpoint(path=tmp_path / "run.pt", **parts)
    resumed[3].load_checkpoint(
        path=tmp_path / "run.pt", module=resumed[0], optimizer=resumed[1], data_loader=resumed[2]
    )
    for run in (goes_on, resumed):
        train(*run[:3])
    assert relative_error(weights(resumed[0]), weights(goes_on[0])) < 1e-5


def test_a_loader_of_pieces_describes_itself():
    _, _, loader, _ = private("auto")
    assert repr(loader).startswith("PiecewiseLoader(pieces of 'auto' of DPDataLoader(40 examples, sample_rate=0.9")


@pytest.mark.parametrize(
    ("size", "much", "told"), [(None, 1e9, False), (None, 0.0, True), ("auto", 0.0, False), (7, 0.0, False)]
)
def test_the_engine_says_what_auto_would_do_with_whole_batches(size, much, told):
    """A warning tells it where much is kept; no text that may be published has what depends on the examples."""
    model, optimizer, loader, engine = private(size)
    with (
        mock.patch.object(optimizers, "micro_batches", lambda *_: MicroBatches(9, 9, per_example=2**20)),
        mock.patch.object(optimizers, "MUCH_KEPT", much),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        train(model, optimizer, loader)
    advice = 'max_physical_batch_size="auto" would take some 9 of 36 examples at a time'
    assert (optimizer.advice or "").startswith(advice) == (size is None)
    assert ("optimizer.advice" in repr(engine)) == (size is None)
    assert "9 of 36" not in repr(engine)
    assert [str(warning.message).startswith(advice) for warning in heard if "would take" in str(warning.message)] == [
        True
    ] * told
