"""Mean losses in half precision: an example's presence must not change how the gradients of the others are rounded."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from dpcore.grad_sample import GradSampleModule
from tests.dpcore.private_setup import whole_batch

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
    """Return the private model, optimizer, criterion and loader of one batch."""
    if settings.get("grad_sample_mode") == "ghost":
        settings["criterion"] = nn.CrossEntropyLoss(reduction=reduction)
    made = whole_batch(model, x, y, max_grad_norm=LARGE, loss_reduction=reduction, **settings)
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


def test_a_penalty_on_hidden_activations_starts_with_the_length_too() -> None:
    torch.manual_seed(4)
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))

    def with_penalty(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Tensor:
        norms = model.hidden.float().square().sum(1)
        return criterion(outputs.float(), y) + (norms.sum() if criterion.reduction == "sum" else norms.mean())

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The loss is divided")
        averaged, summed = (_sums("module", x, y, reduction, with_penalty) for reduction in ("mean", "sum"))
    assert (averaged - summed).norm() <= 1e-6 * summed.norm()


def _in_half_precision(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Tensor:
    return criterion(outputs.bfloat16(), y)


def _of_a_list(outputs: Tensor, y: Tensor, criterion: Any, model: Any) -> Any:
    """An object whose ``backward()`` hands a list of losses over, which is not looked through."""
    loss = criterion(outputs.float(), y)
    return types.SimpleNamespace(backward=lambda: torch.autograd.backward([loss]))


@pytest.mark.parametrize("loss", [_in_half_precision, _of_a_list])
def test_what_cannot_start_with_the_length_is_told_and_right(loss: Loss) -> None:
    torch.manual_seed(4)
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))
    with pytest.warns(UserWarning, match="rounded to half precision"):
        found = _sums("module", x, y, loss=loss)
    exact = _sums("float", x, y, loss=loss, model=copy.deepcopy(_net("module")).float())
    assert (found - exact).norm() <= 3e-2 * exact.norm()


class _AutocastInside(_Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class _FrozenHalf(_Net):
    """Trained float32 layers in front of a frozen bfloat16 one, as adapters are in a large model."""

    def __init__(self) -> None:
        super().__init__()
        self.last.bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).bfloat16())


@pytest.mark.parametrize("kind", [_AutocastInside, _FrozenHalf])
def test_half_precision_is_seen_where_neither_weights_nor_the_loop_show_it(kind: type[_Net]) -> None:
    x, y = torch.randn(37, 24), torch.randint(0, 10, (37,))
    sums = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(6)
        model = kind()
        private = GradSampleModule(model, loss_reduction=reduction)
        nn.CrossEntropyLoss(reduction=reduction)(private(x).float(), y).backward()
        sums.append(model.first.weight.grad_sample.sum(0))
    assert (sums[0] - sums[1]).norm() <= 1e-6 * sums[1].norm()


class _Stateful(_Net):
    """Adds the sum of an earlier pass's outputs to its input, from an attribute or an argument."""

    left: Tensor | None = None

    def forward(self, x: Tensor, left: Tensor | None = None) -> Tensor:
        left = self.left if left is None else left
        if left is not None and len(left) == len(x):
            x = x + left.sum(1, keepdim=True)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Two passes with the same random numbers")
@pytest.mark.parametrize("by_argument", [True, False])
def test_a_pass_that_only_a_later_one_leads_to_has_the_same_scale(by_argument: bool) -> None:
    torch.manual_seed(7)
    x, y = torch.randn(37, 24).bfloat16(), torch.randint(0, 10, (37,))
    sums = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        model = _Stateful().bfloat16()
        private = GradSampleModule(model, loss_reduction=reduction)
        left = private(x)
        if not by_argument:
            model.left, left = left, None
        nn.CrossEntropyLoss(reduction=reduction)(private(2 * x, left).float(), y).backward()
        sums.append(model.first.weight.grad_sample.sum(0))
    assert (sums[0] - sums[1]).norm() <= 1e-6 * sums[1].norm()


class _Adapted(nn.Module):
    """A frozen embedding whose output is made a leaf with a gradient, as checkpointing in front of adapters needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rest = nn.Embedding(50, 24).requires_grad_(False), _Net()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rest(self.embedding(tokens).requires_grad_())


def test_a_leaf_that_the_module_makes_does_not_hinder_the_start_with_the_length() -> None:
    sums = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(8)
        model, y = _Adapted().bfloat16(), torch.randint(0, 10, (37,))
        private = GradSampleModule(model, loss_reduction=reduction)
        nn.CrossEntropyLoss(reduction=reduction)(private(torch.arange(37)).float(), y).backward()
        sums.append(model.rest.first.weight.grad_sample.sum(0))
    assert (sums[0] - sums[1]).norm() <= 1e-6 * sums[1].norm()


class _Shifted(_Net):
    """Takes a tensor from elsewhere: ``self.shift[0]``, which no parameter and no argument shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = [torch.zeros(24).bfloat16()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift[0])


def _beside(name: str, private: bool) -> Tensor:
    """The gradient of a mean loss at a tensor that is none of the module's parameters."""
    torch.manual_seed(5)
    x, y = torch.randn(37, 24).bfloat16(), torch.randint(0, 10, (37,))
    inner, head, temperature = _Shifted().bfloat16(), nn.Linear(10, 10), nn.Parameter(torch.tensor(1.5))
    model = GradSampleModule(inner, ordinary_grad=False) if private else inner
    if name == "inputs":
        x.requires_grad_()
    if name == "shift":
        inner.shift[0].requires_grad_()
    outputs = model(x).float()
    if name == "checkpointed head":
        logits = torch.utils.checkpoint.checkpoint(head, outputs, use_reentrant=True)
    else:
        logits = outputs / temperature if name == "temperature" else outputs
    loss = F.cross_entropy(logits, y)
    if name == "outputs":
        torch.autograd.backward(loss, inputs=outputs)
    elif name == "outputs by position":
        torch.autograd.backward(loss, None, None, False, None, [outputs])
    else:
        loss.backward()
    ends = {"inputs": x, "shift": inner.shift[0], "checkpointed head": head.weight, "temperature": temperature}
    found = ends.get(name, outputs).grad
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:The loss is divided")
@pytest.mark.parametrize(
    "name", ["inputs", "shift", "checkpointed head", "temperature", "outputs", "outputs by position"]
)
def test_gradients_that_are_not_the_module_s_keep_their_size(name: str) -> None:
    assert torch.allclose(_beside(name, True), _beside(name, False), rtol=1e-2, atol=1e-6)
