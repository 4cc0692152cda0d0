"""Models that count or turn something with every pass: pieces of a batch all find what its first one has found.

Else gradients and buffers would depend on the number of pieces, which depends on the batch's length.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine
from dpcore.utils.batch_memory_manager import BatchMemoryManager

C = 0.2


class Counting(nn.Module):
    """A scale that is annealed with the number of passes, which ``count`` adds up."""

    def __init__(self, count: Callable[[Counting], None]) -> None:
        super().__init__()
        self.lin, self.count, self.calls = nn.Linear(3, 2), count, 0
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("places", torch.arange(2.0).expand(4, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count(self)
        return self.lin(x) / (self.calls + self.passes) + self.places[0]


def in_attribute(model: Counting) -> None:
    model.calls += 1


def in_place(model: Counting) -> None:
    model.passes += 1


def past_the_version(model: Counting) -> None:
    model.passes.data += 1


def anew(model: Counting) -> None:
    model.passes = model.passes + 1


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{of.__name__: lambda of=of: Counting(of) for of in (in_attribute, in_place, past_the_version, anew)},
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(9, 3), torch.arange(9) % 2


def trained(name: str, size: int | str | None, managed: bool = False) -> list[Tensor]:
    """Train for two steps; return weights and buffers."""
    model, x, y = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private, optimizer, loader = PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=9),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=9.0,
        max_physical_batch_size=None if managed else size,
    )
    for _ in range(2):
        if managed:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as pieces:
                run(private, optimizer, pieces)
        else:
            run(private, optimizer, loader)
    return [*model.parameters(), *model.buffers(), torch.tensor(float(getattr(model, "calls", 0)))]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "managed"), [(2, False), (4, True), ("auto", False)])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_find_what_the_first_one_has_found(name, size, managed) -> None:
    for whole, cut in zip(trained(name, None), trained(name, size, managed), strict=True):
        assert torch.allclose(whole, cut, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_so_do_an_engines(name) -> None:
    found = []
    for size in (None, 2, 4):
        model, x, y = made(name)
        engine = Engine(
            model, lambda out, y: F.cross_entropy(out, y, reduction="none"), max_grad_norm=C, physical_batch_size=size
        )
        sums = [engine.clipped_sum(x, y).sums for _ in range(2)]
        kept = torch.tensor(float(getattr(model, "calls", 0)))
        found.append([*(s.clone() for of in sums for s in of.values()), *model.buffers(), kept])
    for several in zip(*found, strict=True):
        assert all(torch.allclose(several[0], other, atol=1e-6) for other in several[1:])


def set_by_batch(late: bool | None) -> list[Tensor]:
    """Train on cut batches, for each of which the loop sets a number of the model's; return the updates.

    ``late``: whether pieces of the loop's own are signalled behind their passes; None: they are a loader's.
    """
    torch.manual_seed(0)
    model = Counting(in_place)
    x, y, updates = torch.randn(8, 3), torch.arange(8) % 2, []
    sgd = torch.optim.SGD(model.parameters(), lr=1e-9)
    sgd.register_step_post_hook(lambda *_: updates.append(model.lin.weight.grad.clone()))
    private, optimizer, loader = PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=sgd,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=8.0,
        max_physical_batch_size=4 if late is None else None,
    )
    for _ in range(3):
        for batch in loader:
            pieces = [batch] if late is None else list(zip(*(t.split(4) for t in batch), strict=True))
            for k, (x, y) in enumerate(pieces):
                if not optimizer.batch_goes_on:
                    model.calls = 1 + len(updates)
                if late is False:
                    optimizer.signal_skip_step(k + 1 < len(pieces))
                optimizer.zero_grad()
                F.cross_entropy(private(x), y).backward()
                if late:
                    optimizer.signal_skip_step(k + 1 < len(pieces))
                optimizer.step()
    assert len(updates) == 3 and float(model.passes) == 3 + bool(late)
    return updates


@pytest.mark.filterwarnings("ignore")
def test_what_the_loop_sets_at_a_batchs_first_piece_stays_for_the_others() -> None:
    pieces, signals = set_by_batch(None), set_by_batch(False)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(pieces, signals, strict=True))
    assert not torch.allclose(pieces[0], pieces[1], atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_signals_behind_their_passes_are_known_from_the_second_batch_on() -> None:
    set_by_batch(True)
