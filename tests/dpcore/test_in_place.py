"""Outputs of layers that the model changes in place, and parameters that change something in place."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpcore import Engine, GradSampleModule, UnsupportedError, reference
from dpcore.tape import edges
from tests.dpcore.comparison import relative_error

WIDTH = 5


class Body(nn.Module):
    """A hidden layer over [B, T, d], whose output ``body`` goes on with."""

    def __init__(self, body, layer=None):
        super().__init__()
        self.first, self.hidden, self.head = nn.Linear(4, WIDTH), layer or nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.p, self.body = nn.Parameter(torch.randn(WIDTH)), body

    def forward(self, x):
        return self.head(self.body(self, torch.tanh(self.first(x))).mean(1))


def _added(m, h):
    z = m.hidden(h)
    z += h
    return z


def _masked(m, h):
    z = m.hidden(h)
    z[:, ::2] = 0.0
    return z


def _chunks(m, h):
    z = m.hidden(h)
    a, b = z[..., :2], z[..., 2:]
    b.mul_(0.5)
    return torch.cat([b, a], -1)


def _view_scaled(m, h):
    z = m.hidden(h).view(len(h), -1)
    z *= 0.5
    return z.view(*h.shape)


def _base_behind_view(m, h):
    z = m.hidden(h)
    z[:, 1:].add_(h[:, :-1])
    return torch.tanh(z)


def _parameter_added_to_view(m, h):
    z = m.hidden(h) * 2
    z[:, 0].add_(m.p)
    return z


def _parameter_scales_view(m, h):
    z = m.hidden(h) * 2
    z[:, 1:].mul_(m.p)
    return z


def _parameter_added(m, h):
    z = m.hidden(h) * 2
    z += m.p
    return z


def _parameter_scales(m, h):
    z = m.hidden(h)
    z *= m.p
    return z


def _parameter_to_data(m, h):
    z = torch.ones_like(h)
    z += m.p
    return m.hidden(h) * z


def _twice(m, h):
    z = m.hidden(h).mul_(2.0)
    z.mul_(m.p).add_(h)
    return z.clamp_(max=1.0)


BODIES = {
    "relu": lambda m, h: F.relu(m.hidden(h), inplace=True),
    "clamp": lambda m, h: m.hidden(h).clamp_(min=0),
    "dropout": lambda m, h: F.dropout(m.hidden(h), 0.0, inplace=True),
    "scaled": lambda m, h: m.hidden(h).mul_(0.5),
    "filled": lambda m, h: m.hidden(h).masked_fill_(h > 0.5, 0.0),
    "transposed": lambda m, h: m.hidden(h).transpose(1, 2).relu_().transpose(1, 2),
    "flattened": lambda m, h: F.silu(m.hidden(h).flatten(0, 1), inplace=True).view(*h.shape),
    "added": _added,
    "masked": _masked,
    "chunks": _chunks,
    "a view is scaled": _view_scaled,
    "a view is added to": _base_behind_view,
    "a parameter is added to a view": _parameter_added_to_view,
    "a parameter scales a view": _parameter_scales_view,
    "a parameter is added": _parameter_added,
    "a parameter scales": _parameter_scales,
    "a parameter is added to constants": _parameter_to_data,
    "several in a row": _twice,
}


def _losses(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def _data(examples=6, length=7):
    generator = torch.Generator().manual_seed(examples)
    return torch.randn(examples, length, 4, generator=generator), torch.arange(examples) % 3


def _checked(model, x, y, bound=0.5):
    truth = reference.clipped_sum(copy.deepcopy(model), _losses, x, y, bound).clipped
    found = Engine(copy.deepcopy(model), _losses, max_grad_norm=bound).clipped_sum(x, y).sums
    assert relative_error({n: truth[n] for n in found}, found) < 1e-4
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    _losses(wrapped(x), y).sum().backward()
    plain = copy.deepcopy(model)
    grads = torch.autograd.grad(_losses(plain(x), y).sum(), list(plain.parameters()), allow_unused=True)
    for p, grad in zip(wrapped.parameters(), grads, strict=True):
        torch.testing.assert_close(
            p.grad_sample.sum(0), torch.zeros_like(p) if grad is None else grad, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("body", BODIES)
def test_a_layer_keeps_its_gradient(body):
    torch.manual_seed(0)
    _checked(Body(BODIES[body]), *_data())


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("body", ["relu", "added", "masked", "chunks"])
def test_so_does_every_kind_of_layer(layer, body):
    torch.manual_seed(0)
    if isinstance(layer, nn.Bilinear):
        inner = copy.deepcopy(layer)

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, h):
                return self.inner(h, h)

        layer = Twice()
    _checked(Body(BODIES[body], copy.deepcopy(layer)), *_data())


def test_attention_whose_output_is_changed_in_place():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            z = self.attention(x, x, x, need_weights=False)[0]
            z += x
            return self.head(F.relu(z, inplace=True).mean(1))

    torch.manual_seed(0)
    _checked(Block(), *_data())


@settings(max_examples=30)
@given(examples=st.integers(1, 9), length=st.integers(1, 6), body=st.sampled_from(sorted(BODIES)))
def test_of_any_shape(examples, length, body):
    torch.manual_seed(examples)
    _checked(Body(BODIES[body]), *_data(examples, length))


@pytest.mark.parametrize("body", ["relu", "added", "filled", "transposed"])
@pytest.mark.parametrize("examples", [1, 6])
def test_a_lost_gradient_is_found_whatever_loses_it(monkeypatch, body, examples):
    monkeypatch.setattr(edges, "no_view", lambda output: output if output.requires_grad else output.clone())
    x, y = _data(examples)
    with pytest.raises(UnsupportedError, match=r"hidden\.(weight|bias) do not add up"):
        Engine(Body(BODIES[body]), _losses).clipped_sum(x, y)
    with pytest.raises(UnsupportedError, match=r"hidden\.(weight|bias) do not add up"):
        GradSampleModule(Body(BODIES[body]))(x)


def test_a_gradient_that_a_rule_doubles_is_found(monkeypatch):
    from dpcore.rules.linear import ContractionUse

    right = ContractionUse.grad_sample
    monkeypatch.setattr(ContractionUse, "grad_sample", lambda use, param: 2 * right(use, param))
    monkeypatch.setattr(ContractionUse, "ghost_is_cheaper", lambda use, param: False)
    with pytest.raises(UnsupportedError, match="do not add up"):
        GradSampleModule(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))(torch.randn(6, 4))
