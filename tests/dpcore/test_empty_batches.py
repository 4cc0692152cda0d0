"""An empty batch is one step with the noise of any other, however often the loop calls the model on it."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import GradSampleModule, PrivacyEngine
from dpcore.data_loader import DPDataLoader
from tests.dpcore.private_setup import make, small_data


def _private(**options):
    model = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 3)).double()
    settings = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "data_loader": DataLoader(small_data(30), batch_size=1),
        "noise_multiplier": 1.0,
        "sample_rate": 1 / 30,
        "expected_batch_size": 1,
        "check_isolation": False,
    }
    return make(model, PrivacyEngine(seed=3), **(settings | options))


def _twice(model, optimizer, x, y):
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(2.0 * x), y)).backward()


def _logged(model, optimizer, x, y):
    (model(x).argmax(1) == y).float().mean()  # the accuracy, for the log
    F.cross_entropy(model(x), y).backward()


def _cleared_late(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()


def _left_out(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    if loss.isfinite():
        loss.backward()


def _through_one_graph_twice(model, optimizer, x, y):
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    outputs.square().mean().backward()


LOOPS = [_twice, _logged, _cleared_late, _left_out, _through_one_graph_twice]


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("loop", LOOPS)
def test_noise_and_count_do_not_tell_that_a_batch_was_empty(loop, mode):
    """The second call of the model made two batches of it, and its update had half the noise."""
    engine, model, optimizer, loader = _private(grad_sample_mode=mode)
    empty = 0
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loop(model, optimizer, x, y)
        optimizer.step()
        moved = torch.cat([(p - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
        assert 0.42 < float(moved.detach().std()) < 0.58  # C = 0.5
        empty += not len(x)
    assert 3 < empty < 27
    assert engine.accountant.history == [(1.0, 1 / 30, 30)]


@pytest.mark.parametrize("loop", LOOPS)
def test_accumulated_empty_batches_count_one_by_one(loop):
    if loop in (_cleared_late, _left_out):
        pytest.skip("clears what it has accumulated")
    assert _accumulated(loop) == [(pytest.approx(3**-0.5), 1 / 30, 30)]


def _accumulated(loop):
    """Return what is accounted where a step follows every third batch."""
    engine, model, optimizer, loader = _private()
    for number, (x, y) in enumerate(loader, 1):
        loop(model, optimizer, x, y)
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return engine.accountant.history


def test_accumulated_batches_whose_backward_pass_is_left_out():
    def loop(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        if loss.isfinite():
            loss.backward()

    assert _accumulated(loop) == [(pytest.approx(3**-0.5), 1 / 30, 30)]


def test_batches_in_two_pieces_may_be_empty_and_accumulated():
    """An empty batch beside another made it look as if the other had gone through twice as many passes."""

    def loop(model, optimizer, x, y):
        for part in range(2):
            F.cross_entropy(model(x[part::2]), y[part::2]).backward()

    assert _accumulated(loop) == [(pytest.approx(6**-0.5), 1 / 30, 60)]


def test_zero_grad_forgets_the_gradients_of_empty_batches_as_those_of_others():
    """They stayed: a step that followed counted them, and divided by their number."""
    engine, model, optimizer, loader = _private()
    for number, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number % 3 == 0:
            optimizer.step()
    assert engine.accountant.history == [(1.0, 1 / 30, 10)]


def test_a_call_after_the_step_belongs_to_no_later_batch():
    engine, model, optimizer, loader = _private()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model(x)
    assert engine.accountant.history == [(1.0, 1 / 30, 30)]


def test_copies_of_the_model_do_not_copy_the_data():
    _, model, _, loader = _private()
    loader.dataset.__class__ = type("Once", (type(loader.dataset),), {"__deepcopy__": None})
    assert type(copy.deepcopy(model)) is type(model)


@dataclasses.dataclass
class Pack:
    x: torch.Tensor
    count: int


CONSTANT = torch.ones(1, 2, 6)


@pytest.mark.parametrize(
    ("collate", "check"),
    [
        (lambda rows: UserDict(x=torch.stack(rows), n=len(rows)), lambda b: (len(b["x"]), b["n"]) == (0, 0)),
        (lambda rows: Pack(torch.stack(rows), len(rows)), lambda b: (b.x.shape, b.count) == ((0, 6), 0)),
        (lambda rows: SimpleNamespace(x=torch.stack(rows), scale=2.0), lambda b: (len(b.x), b.scale) == (0, 2.0)),
        (lambda rows: (torch.stack(rows), CONSTANT), lambda b: (len(b[0]), b[1].shape) == (0, (1, 2, 6))),
        (lambda rows: (torch.stack(rows, 1), [{"w": r} for r in rows]), lambda b: (b[0].shape, b[1]) == ((6, 0), [])),
        (lambda rows: {"x": torch.stack(rows), "task": "a"}, lambda b: (len(b["x"]), b["task"]) == (0, "a")),
    ],
)
def test_an_empty_batch_has_the_structure_of_the_others(collate, check):
    rows = list(torch.randn(20, 6))
    batches = list(DPDataLoader(rows, sample_rate=0.05, collate_fn=collate, seed=0))
    full = type(collate(rows[:2]))
    assert all(type(batch) is full for batch in batches)
    assert any(check(batch) for batch in batches)


class Packs(nn.Module):
    """The last states of a recurrent layer over packed sequences [B, T, 6], and what has none of the examples."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 2), batch_first=True)
        return {"out": self.head(self.body(packed)[1][0]), "fixed": torch.ones(2)}


def test_a_module_that_fails_on_an_empty_batch():
    private = GradSampleModule(Packs())
    found = private(torch.zeros(0, 2, 6))
    assert found["out"].shape == (0, 3) and found["out"].requires_grad and found["fixed"].shape == (2,)
    found["out"].sum().backward()
    assert private.has_passes


def test_a_module_that_fails_on_any_batch_says_what_an_empty_one_takes():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as failed:
        GradSampleModule(nn.Linear(5, 3))(torch.zeros(0, 6))
    assert "return an empty output" in failed.value.__notes__[0]


class Beside(nn.Module):
    """A layer for the examples [B, T, 6] and for a constant [1, T, 6]."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, constant):
        return self.head(torch.tanh(self.body(x) + self.body(constant)).mean(1))


def test_a_batch_of_one_beside_a_constant_of_one():
    generator = torch.Generator().manual_seed(0)
    constant, data = torch.randn(1, 2, 6, generator=generator), torch.randn(20, 2, 6, generator=generator)
    torch.manual_seed(0)
    model = Beside()
    private, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, 2, collate_fn=lambda rows: (torch.stack(rows), constant)),
        noise_multiplier=0.0,
        max_grad_norm=0.01,
    )
    sizes = set()
    for _ in range(3):
        for x, fixed in loader:
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            private(x, fixed).square().sum(1).mean().backward()
            optimizer.step()
            moved = sum((p.detach() - q).square().sum() for p, q in zip(model.parameters(), before, strict=True)) ** 0.5
            assert float(moved) <= 0.01 * len(x) / 2 + 1e-6 and (len(x) or not moved)
            if len(x) == 1:
                assert float(moved) == pytest.approx(0.005, rel=1e-3)  # all of its gradient, clipped
            sizes.add(len(x))
    assert {0, 1, 2} <= sizes
