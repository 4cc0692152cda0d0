"""What a step leaves in memory: nothing of the graph, whether or not a backward pass came."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine
from dpcore.tape.tape import Tape

pytestmark = pytest.mark.usefixtures("only_new_objects")

ALIVE: list[weakref.ref[Any]] = []


class _Watch(torch.autograd.Function):
    """The identity; its node in the graph lives exactly as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ALIVE.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Watched(nn.Module):
    """``first``, a watched identity, then ``second``, whose rule keeps an input that lies on the graph."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        output = self.second(_Watch.apply(self.first(x)))
        output = output[0] if isinstance(output, tuple) else output
        return output.flatten(1).mean(1)


class Itself(nn.Module):
    """A layer of several inputs, given the same one for all."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x) if isinstance(self.layer, nn.Bilinear) else self.layer(x, 2 * x, 3 * x)


class Shifted(nn.Module):
    """A table of positions without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table).tanh()


class Scaled(nn.Module):
    """A parameter that no rule knows, in a forward pass that vmap can run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,i->bi", x, self.scale.exp())


MODELS = {
    "linear": (Watched(nn.Linear(6, 6), nn.Linear(6, 3)), (6,)),
    "convolution": (Watched(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)), (2, 8, 8)),
    "norm": (Watched(nn.Linear(6, 6), nn.LayerNorm(6)), (6,)),
    "lstm": (Watched(nn.Linear(6, 6), nn.LSTM(6, 4, batch_first=True)), (5, 6)),
    "projected lstm": (Watched(nn.Linear(6, 6), nn.LSTM(6, 4, proj_size=3, batch_first=True)), (5, 6)),
    "gru": (Watched(nn.Linear(6, 6), nn.GRU(6, 4, batch_first=True, bidirectional=True)), (5, 6)),
    "rnn": (Watched(nn.Linear(6, 6), nn.RNN(6, 4, batch_first=True)), (5, 6)),
    "attention": (Watched(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)), (5, 8)),
    "cross-attention": (Watched(nn.Linear(8, 8), Itself(nn.MultiheadAttention(8, 2, batch_first=True))), (5, 8)),
    "bilinear": (Watched(nn.Linear(6, 6), Itself(nn.Bilinear(6, 6, 3))), (6,)),
    "lstm cell": (Watched(nn.Linear(6, 6), nn.LSTMCell(6, 4)), (6,)),
    "position table": (Watched(nn.Linear(6, 6), Shifted()), (5, 6)),
    "without a rule, by vmap": (Watched(nn.Linear(6, 6), Scaled()), (6,)),
    "without a rule": (Watched(nn.Linear(6, 6), nn.PReLU()), (6,)),
}


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Circles through autograd are invisible to the collector; others would only wait for it, holding activations."""
    ALIVE.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tapes() -> list[Tape]:
    return [thing for thing in gc.get_objects() if type(thing) is Tape]


@pytest.mark.parametrize("name", MODELS)
def test_a_clipped_sum_leaves_no_tape_for_the_collector(name: str) -> None:
    """In a circle it would keep the inputs and gradients of every layer until Python's collector comes by."""
    model, shape = MODELS[name]
    engine = Engine(model, lambda outputs, y: outputs)
    engine.clipped_sum(torch.randn(16, *shape), torch.zeros(16))
    gc.collect()  # what torch imports in a first call holds the frames of that call
    before = _tapes()  # wrapped modules of other tests have theirs
    for _ in range(2):
        engine.clipped_sum(torch.randn(16, *shape), torch.zeros(16))
    assert [tape for tape in _tapes() if not any(tape is other for other in before)] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_of_a_step_is_freed_with_the_step(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(16, *shape)
    wrapped, optimizer, _ = PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        check_batches=False,
    )
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(x).mean().backward()
        optimizer.step()
        wrapped(x)  # an output that nobody differentiates
    gc.collect(0)
    assert len(ALIVE) >= 4
    assert [ref() for ref in ALIVE] == [None] * len(ALIVE)
