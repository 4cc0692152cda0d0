"""Hooks that a model or a loop registers on tensors change the gradients of the layers before, as without dpcore."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore import Engine, PrivacyError, reference
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import losses, make

SHARE = 0.1


class Own(nn.Module):
    """A layer that dpcore has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x.tanh(), self.weight.exp())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 3))[0][:, -1]  # type: ignore[no-any-return]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 5),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 6), nn.Flatten()),
    "norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)),
    "recurrent": Recurrent,
    "functional": Functional,
    "no rule": Own,
}


class Hooked(nn.Module):
    """Scales the gradient behind its first layer: by a hook on the tensor, or without one."""

    def __init__(self, layer: nn.Module, by_hook: bool) -> None:
        super().__init__()
        self.first, self.last, self.by_hook = layer, nn.Linear(5, 3), by_hook

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.by_hook:
            h = h.detach() * (1.0 - SHARE) + SHARE * h
        elif h.requires_grad:
            h.register_hook(lambda grad: grad * SHARE)
        return self.last(torch.tanh(h))  # type: ignore[no-any-return]


def _models(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Hooked(LAYERS[kind](), True).double()
    plain = copy.deepcopy(model)
    plain.by_hook = False
    return model, plain


def _data() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def _update(model: nn.Module, take_step: Callable[[Any, Any], None], **options: Any) -> dict[str, Tensor]:
    """What one step has subtracted, times the divisor."""
    before = copy.deepcopy(model.state_dict())
    _, wrapped, optimizer, _ = make(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), check_batches=False, **options
    )
    take_step(wrapped, optimizer)
    return {name: 10.0 * (before[name] - p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_hook_within_the_model(kind: str, mode: str) -> None:
    """dpcore's own hook came before it: the layer's gradient was left as it was, those of layers before were not."""
    model, plain = _models(kind)
    x, y = _data()
    expected = reference.clipped_sum(plain, losses, x, y, 0.5).clipped
    for compile in (False, "aot_eager") if kind in ("linear", "functional") else (False,):
        engine = Engine(copy.deepcopy(model), losses, max_grad_norm=0.5, compile=compile)
        for _ in range(2):
            assert relative_error(engine.clipped_sum(x, y).sums, expected) < 1e-6

    def step(wrapped: Any, optimizer: Any) -> None:
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    assert relative_error(_update(model, step, grad_sample_mode=mode), expected) < 1e-6


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_a_hook_on_the_output_in_the_loop(mode: str, passes: int) -> None:
    _, plain = _models("linear")
    x, y = _data()
    expected = reference.clipped_sum(
        copy.deepcopy(plain), lambda outputs, y: 3.0 * passes * losses(outputs, y), x, y, 0.5
    ).clipped

    def step(wrapped: Any, optimizer: Any) -> None:
        outputs = wrapped(x)
        outputs.register_hook(lambda grad: 3.0 * grad)
        loss = F.cross_entropy(outputs, y)
        for k in range(passes):
            loss.backward(retain_graph=k + 1 < passes)
        optimizer.step()

    assert relative_error(_update(plain, step, grad_sample_mode=mode), expected) < 1e-6


def test_a_hook_that_mixes_the_examples_is_refused() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(lambda grad: grad / (1e-12 + grad.norm()))
            return self.last(torch.tanh(h))  # type: ignore[no-any-return]

    x, y = _data()

    def step(wrapped: Any, optimizer: Any) -> None:
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    with pytest.raises(PrivacyError, match=r"first\.(weight|bias) for an example depends on the other examples"):
        _update(Normalised().double(), step)
    with pytest.raises(PrivacyError, match=r"first\.(weight|bias) for an example depends on the other examples"):
        Engine(Normalised().double(), losses, max_grad_norm=0.5).clipped_sum(x, y)
