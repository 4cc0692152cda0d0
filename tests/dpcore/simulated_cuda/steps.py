"""Private steps on the simulated device beside the CPU's float64 truth; prints one JSON line per model and way.

python -m tests.dpcore.simulated_cuda.steps LIBRARY
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.dpcore.simulated_cuda.device import Counts, SimulatedDevice, leave

DEVICE = SimulatedDevice(Path(sys.argv[1]))  # before torch

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from dpcore import Engine, PrivacyEngine, reference  # noqa: E402

BATCH, BOUND, CLASSES = 24, 0.3, 4
STARTING_STEPS = 4
"""Steps in which the experiments on mixing examples may still run, and the first of which plans."""


@dataclass(frozen=True)
class Step:
    """A private step on the device.

    ``error``: of the whole clipped sum, relative to the float64 truth. ``device``: where the gradients lay. ``steady``:
    the counts of one step behind the first ones; ``ordinary``: of one without privacy, None where the CPU lacks CUDA's
    operator.
    """

    model: str
    way: str
    error: float
    device: str
    steady: Counts
    ordinary: Counts | None


class TokenTagger(nn.Module):
    """Embedding, LSTM and a mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0].mean(1))


class TiedTransformer(nn.Module):
    """A layer of attention between a token table and the same table as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layer(self.table(x))) @ self.table.weight.T).mean(1)[:, :CLASSES]


def models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield name, module and a batch of inputs, all on the CPU."""
    torch.manual_seed(0)
    image, ids = torch.randn(BATCH, 1, 20, 20), torch.randint(0, 50, (BATCH, 9))
    yield "linear", nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES)), torch.randn(BATCH, 12)
    convolutions = nn.Sequential(nn.Conv2d(1, 4, 5, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.Flatten())
    yield "convolution", nn.Sequential(convolutions, nn.ReLU(), nn.Linear(54, CLASSES)), image
    groups = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    yield "group norm", nn.Sequential(groups, nn.Flatten(), nn.Linear(8, CLASSES)), image
    yield "lstm", TokenTagger(), ids
    yield "tied transformer", TiedTransformer(), ids


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """[B]: the loss of each example."""
    return F.cross_entropy(outputs, y, reduction="none")


def _can_be_examined(model: nn.Module) -> bool:
    """Return whether the CPU has the operators of an ordinary pass: it lacks CUDA's of an LSTM."""
    return not isinstance(model, TokenTagger)


def by_engine(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of the Engine."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        model,
        losses,
        max_grad_norm=BOUND,
        noise_multiplier=0.0,
        expected_batch_size=1,
        optimizer=optimizer,
        check_isolation=_can_be_examined(model),
    )

    def step() -> None:
        optimizer.zero_grad()
        engine.step(x, y)

    return step


def by_loop(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Callable[[], None]:
    """Return a step of the loop that users write around ``make_private``."""
    data = DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=BATCH)
    module, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=1,
        poisson_sampling=False,
        check_batches=False,
        check_isolation=_can_be_examined(model),
        **options,
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def by_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a step of the Engine under bfloat16 autocast."""
    step = by_engine(model, x, y)

    def autocast_step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            step()

    return autocast_step


def ordinary(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a training step without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]] = {
    "engine": by_engine,
    "loop": by_loop,
    "hooks": lambda model, x, y: by_loop(model, x, y, grad_sample_mode="hooks"),
    "engine, bf16": by_autocast,
}


def counts_of(step: Callable[[], None], warm: int) -> Counts:
    """Run ``warm`` steps and count what each of the next three does; return the least.

    Rare random steps examine the batch once more, which is no part of the steady state.
    """
    for _ in range(warm):
        step()
    found = []
    for _ in range(3):
        with DEVICE.counting() as counts:
            step()
        found.append(counts)
    return min(found, key=lambda counts: (sum(counts.reads.values()), sum(counts.operators.values())))


def run() -> Iterator[Step]:
    """Yield each model's step by each way."""
    for name, model, inputs in models():
        y = torch.randint(0, CLASSES, (BATCH,))
        truth = reference.clipped_sum(model, losses, inputs, y, BOUND).clipped
        for way, make in WAYS.items():
            private = copy.deepcopy(model).cuda()
            step = make(private, inputs.cuda(), y.cuda())
            step()
            found = {n: p.grad for n, p in private.named_parameters()}
            wrong = sum(float((found[n].cpu().double() - g).square().sum()) for n, g in truth.items())
            error = (wrong / sum(float(g.square().sum()) for g in truth.values())) ** 0.5
            device = ", ".join(sorted({grad.device.type for grad in found.values()}))
            steady = counts_of(step, STARTING_STEPS)
            try:
                plain = counts_of(ordinary(copy.deepcopy(model).cuda(), inputs.cuda(), y.cuda()), 2)
            except NotImplementedError:  # the fused LSTM cell
                plain = None
            yield Step(name, way, error, device, steady, plain)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for result in run():
        print(json.dumps(asdict(result)), flush=True)
    leave(0)
