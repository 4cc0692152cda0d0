"""Mean losses in half precision: an example's presence must not change how the gradients of the others are rounded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine

LARGE = 100.0
"""A bound above every norm here: nothing is clipped, so that sums show the gradients."""


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(x))
        return self.last(self.hidden)


def _net(kind: str) -> _Net:
    torch.manual_seed(0)
    return _Net().bfloat16() if kind == "module" else _Net()


def _private(model: nn.Module, x: Tensor, y: Tensor, reduction: str, **settings: Any) -> tuple[Any, ...]:
    """The private model, optimizer and loader of one batch; the criterion before the loader in ghost mode."""
    if settings.get("grad_sample_mode") == "ghost":
        settings["criterion"] = nn.CrossEntropyLoss(reduction=reduction)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=LARGE,
        poisson_sampling=False,
        loss_reduction=reduction,
        **settings,
    )
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(reduction=reduction), made[2])


Loss = Callable[[Tensor, Tensor, Any, Any], Tensor]


def _usual(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Tensor:
    return criterion(outputs.float(), y)


def _sums(
    kind: str, x: Tensor, y: Tensor, reduction: str = "mean", loss: Loss = _usual, model: Any = None, **settings: Any
) -> Tensor:
    """The sums [n] of clipped gradients that one batch leaves, in float64."""
    model = _net(kind) if model is None else model
    private, optimizer, criterion, loader = _private(model, x, y, reduction, **settings)
    for inputs, targets in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            outputs = private(inputs.bfloat16() if kind == "module" else inputs)
        loss(outputs, targets, criterion, model).backward()
        optimizer.clip_and_accumulate()
    return torch.cat([param.summed_grad.double().flatten() for param in model.parameters()])


def _equal_examples(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 24).repeat(count, 1), torch.zeros(count, dtype=torch.long)


@pytest.mark.parametrize("mode", [{}, {"grad_sample_mode": "hooks"}, {"grad_sample_mode": "ghost"}], ids=str)
@pytest.mark.parametrize("kind", ["autocast", "module"])
def test_leaving_out_one_of_many_equal_examples_moves_the_sum_by_its_own_gradient(kind: str, mode: Any) -> None:
    """Divided before it was rounded, the sum of 2048 moved by 1.87 gradients."""
    x, y = _equal_examples(2048)
    own = _sums(kind, x[:1], y[:1]).norm()
    moved = (_sums(kind, x, y, **mode) - _sums(kind, x[1:], y[1:], **mode)).norm()
    assert abs(float(moved / own) - 1) < 1e-3


@pytest.mark.parametrize("kind", ["autocast", "module"])
def test_a_mean_loss_and_a_summed_one_leave_the_same_sums(kind: str) -> None:
    torch.manual_seed(2)
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The loss is divided")
        averaged, summed = _sums(kind, x, y), _sums(kind, x, y, "sum")
    assert (averaged - summed).norm() <= 1e-6 * summed.norm()


def test_two_passes_behind_one_loss_are_one_gradient_per_example() -> None:
    torch.manual_seed(3)
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))
    model = _net("module")
    private, optimizer, criterion, loader = _private(model, x, y, "mean")
    for inputs, targets in loader:
        inputs = inputs.bfloat16()
        losses = [criterion(private(part).float(), targets) for part in (inputs, 2 * inputs)]
        (losses[0] + losses[1]).backward()
        optimizer.clip_and_accumulate()
    both = torch.cat([param.summed_grad.double().flatten() for param in model.parameters()])
    parts = _sums("module", x, y, "sum") + _sums("module", 2 * x, y, "sum")
    assert (both - parts).norm() <= 1e-6 * parts.norm()


def _with_penalty(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Tensor:
    return criterion(outputs.float(), y) + model.hidden.float().square().sum(1).mean()


def _in_half_precision(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Tensor:
    return criterion(outputs.bfloat16(), y)


@pytest.mark.parametrize("loss", [_with_penalty, _in_half_precision])
def test_what_cannot_start_with_the_length_is_told_and_right(loss: Loss) -> None:
    torch.manual_seed(4)
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))
    with pytest.warns(UserWarning, match="rounded to half precision"):
        found = _sums("module", x, y, loss=loss)
    exact = _sums("float", x, y, loss=loss, model=copy.deepcopy(_net("module")).float())
    assert (found - exact).norm() <= 3e-2 * exact.norm()


def test_gradients_that_are_not_the_module_s_keep_their_size() -> None:
    """A temperature of the loss, and inputs that get a gradient."""
    torch.manual_seed(5)
    x, y = torch.randn(37, 24).bfloat16(), torch.randint(0, 10, (37,))
    given, temperature, found = x.clone().requires_grad_(), nn.Parameter(torch.tensor(1.5)), {}
    for private in (False, True):
        model: Any = _net("module")
        if private:
            model, _, _, loader = _private(model, x, y, "mean")
            next(iter(loader))
        for name, inputs, factor in (("temperature", x, temperature), ("inputs", given, torch.tensor(1.5))):
            given.grad = temperature.grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                F.cross_entropy(model(inputs).float() / factor, y).backward()
            found[name, private] = (temperature if name == "temperature" else given).grad
    for name in ("temperature", "inputs"):
        assert torch.allclose(found[name, True], found[name, False], rtol=1e-2, atol=1e-6), name
