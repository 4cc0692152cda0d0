"""Layers without a rule: their gradients by example are those of a loop over examples, or there is one sentence."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import Engine, PrivacyEngine, UnsupportedError, reference
from tests.dpcore.comparison import odd_loss, relative_error

EXAMPLES = 5
Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Both:
    a: Any
    b: Any


class Block(nn.Module):
    """``compute(self, x, *others)`` of a scale and a slope."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand(8) + 0.5)
        self.k = nn.Parameter(torch.rand(8) + 0.5)
        self.compute = compute

    def forward(self, x, *others, **named):
        return self.compute(self, x, *others, **named)


class Net(nn.Module):
    """A layer, then what ``use(net, x)`` makes of it with the block, then another layer."""

    def __init__(self, block: nn.Module, use: Any = lambda net, x: net.block(x)) -> None:
        super().__init__()
        self.first, self.block, self.last, self.use = nn.Linear(6, 8), block, nn.Linear(8, 3), use

    def forward(self, x):
        return self.last(self.use(self, self.first(x)))


def times(x, scale):
    """Their product, by a function that dpcore has no rule for."""
    return torch.addcmul(torch.zeros_like(x), x, scale)


def inner_and_outer(self, x):
    z = times(x, self.g)
    return torch.tanh(times(z, self.k)), z


def three_in_a_row(self, x):
    z = times(x, self.g)
    w = torch.sin(z)
    return z, w, w * self.k


def the_same_twice(self, x):
    z = times(times(x, self.g), self.k)
    return z, z


def nested(self, x):
    z = times(times(x, self.g), self.k)
    w = torch.sin(z)
    return {"a": [z, (w, z)], "n": None, "i": 3}


def plain(self, x):
    return torch.tanh(times(times(x, self.g), self.k))


def overlapping(self, x):
    z = times(times(x, self.g), self.k)
    return z, z[:, ::2]


def change_one_view(net, x):
    whole, half = net.block(x)
    half.mul_(3.0)
    return whole + half.repeat_interleave(2, 1)


def to_a_list(self, x, seen):
    seen.append(times(x, self.g))
    return torch.tanh(times(seen[-1], self.k))


def use_a_list(net, x):
    seen: list[Any] = []
    return net.block(x, seen) + seen[0]


def to_an_object(self, x, keeper):
    keeper.z = times(x, self.g)
    return torch.tanh(times(keeper.z, self.k))


def use_an_object(net, x):
    keeper = type("Keeper", (), {})()
    return net.block(x, keeper) + keeper.z


def to_an_attribute(self, x):
    self.aux = times(x, self.g)
    return torch.tanh(times(self.aux, self.k))


def with_a_context(net, x):
    net.block.context = 2 * x
    return net.block(x)


def in_place_on_its_input(self, x):
    x.mul_(2.0)
    return x + self.g * self.k


def without_gradients(self, x):
    with torch.no_grad():
        constant = torch.tanh(times(x, self.g))
    return torch.tanh(times(times(x, self.g), self.k) + constant)


def twice_once_without_gradients(net, x):
    with torch.no_grad():
        constant = net.block(x)
    return net.block(x) + constant


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


def counting(self, x):
    self.calls.add_(1)
    return times(times(x, self.g), self.k)


def counting_anew(self, x):
    self.calls = self.calls + 1
    return times(times(x, self.g), self.k)


def with_counter(compute):
    block = Block(compute)
    block.register_buffer("calls", torch.zeros((), dtype=torch.float64))
    return block


def hooked(kind):
    block = Block(plain)
    if kind == "pre":
        block.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    else:
        block.register_forward_hook(lambda module, inputs, output: 2 * output + inputs[0])
    return block


def with_other_weights(net, x):
    half = {name: p * 0.5 for name, p in net.block.named_parameters()}
    return torch.func.functional_call(net.block, half, (x,))


def of_the_last_layer():
    net = Net(Block(lambda self, x: torch.tanh(times(times(x, self.g), self.k) * self.other.weight.sum())))
    object.__setattr__(net.block, "other", net.last)
    return net


def two_times_at_two_temperatures(net, x):
    net.block.t = 0.5
    y = net.block(x)
    net.block.t = 2.0
    return net.block(y)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        chosen, output = self.router(x).argmax(1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                output[chosen == k] = expert(x[chosen == k])
        return output * self.router(x).softmax(1).amax(1, keepdim=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.g = nn.LSTM(8, 8, batch_first=True), nn.Parameter(torch.rand(8))

    def forward(self, x):
        output, (h, _) = self.lstm(x.unsqueeze(1) * self.g)
        return output.squeeze(1), h[0]


class Constants(nn.Module):
    """Seven rows that are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.randn(7, 2))
        self.k, self.a, self.h = nn.Linear(2, 8), nn.Linear(6, 8), nn.Linear(7, 3)

    def forward(self, x):
        return self.h(torch.tanh(self.a(x) @ self.k(self.c).t()))


MODELS = {
    "an output of an output": lambda: Net(Block(inner_and_outer), lambda n, x: (o := n.block(x))[0] + o[1] ** 2),
    "an output that nothing uses": lambda: Net(Block(inner_and_outer), lambda n, x: n.block(x)[0]),
    "three in a row": lambda: Net(Block(three_in_a_row), lambda n, x: (o := n.block(x))[0] + 2 * o[1] + 3 * o[2]),
    "one tensor twice": lambda: Net(Block(the_same_twice), lambda n, x: (o := n.block(x))[0] * o[1]),
    "nested": lambda: Net(Block(nested), lambda n, x: (o := n.block(x)["a"])[0] * o[1][1] + o[1][0]),
    "a named tuple": lambda: Net(
        Block(lambda s, x: Pair(*inner_and_outer(s, x))), lambda n, x: (o := n.block(x)).a + o.b
    ),
    "a dataclass": lambda: Net(
        Block(lambda s, x: Both(*inner_and_outer(s, x))), lambda n, x: (o := n.block(x)).a + o.b
    ),
    "its input, too": lambda: Net(
        Block(lambda s, x: (times(times(x, s.g), s.k), x)), lambda n, x: (o := n.block(x))[0] + torch.sin(o[1])
    ),
    "a view that is changed": lambda: Net(Block(overlapping), change_one_view),
    "an activation in place behind it": lambda: Net(
        Block(lambda s, x: times(times(x, s.g), s.k)), lambda n, x: F.relu_(n.block(x))
    ),
    "chunks": lambda: Net(
        Block(lambda s, x: torch.cat([times(x, s.g), times(x, s.k)], 1).chunk(2, 1)),
        lambda n, x: (o := n.block(x))[0] * o[1],
    ),
    "complex numbers": lambda: Net(
        Block(lambda s, x: torch.fft.fft(times(times(x, s.g), s.k))), lambda n, x: (o := n.block(x)).real + o.imag
    ),
    "an output without the batch": lambda: Net(
        Block(lambda s, x: (torch.tanh(times(x, s.g)), s.k.square().unsqueeze(0))),
        lambda n, x: (o := n.block(x))[0] + o[1],
    ),
    "a list among its arguments": lambda: Net(Block(to_a_list), use_a_list),
    "an object among its arguments": lambda: Net(Block(to_an_object), use_an_object),
    "an attribute": lambda: Net(Block(to_an_attribute), lambda n, x: n.block(x) + n.block.aux),
    "its parameter elsewhere": lambda: Net(Block(plain), lambda n, x: n.block(x) * n.block.g.sum()),
    "another's parameter": of_the_last_layer,
    "another's activation": lambda: Net(
        Block(lambda s, x: torch.tanh(times(times(x, s.g), s.k) + s.context)), with_a_context
    ),
    "in place on its input": lambda: Net(Block(in_place_on_its_input), lambda n, x: n.block(x) + x),
    "torch.no_grad inside": lambda: Net(Block(without_gradients)),
    "torch.no_grad around it": lambda: Net(Block(plain), twice_once_without_gradients),
    "an old autograd function": lambda: Net(Block(lambda s, x: x * Sign.apply(s.g) * s.k)),
    "a counter": lambda: Net(with_counter(counting)),
    "a counter that is set anew": lambda: Net(with_counter(counting_anew)),
    "a forward hook": lambda: Net(hooked("post")),
    "a forward pre-hook": lambda: Net(hooked("pre")),
    "called by forward()": lambda: Net(hooked("post"), lambda n, x: n.block.forward(x)),
    "weight_norm": lambda: Net(nn.utils.weight_norm(nn.Linear(8, 8))),
    "checkpoints": lambda: Net(Block(plain), lambda n, x: checkpoint(n.block, x, use_reentrant=False) * 2),
    "with other weights": lambda: Net(Block(plain), with_other_weights),
    "its state changes between two calls": lambda: Net(
        Block(lambda s, x: torch.tanh(times(times(x, s.g), s.k) * s.t)), two_times_at_two_temperatures
    ),
    "experts": lambda: Net(Experts()),
    "a recurrent layer": lambda: Net(Recurrent(), lambda n, x: (o := n.block(x))[0] * o[1]),
    "seven constant rows": Constants,
}


def _truth(model, x, y):
    """(bound, clipped sums, ordinary sums) by one ordinary batch or, where ``x`` has one example each, by a loop."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    each = []
    for i in range(len(x)):
        loss = odd_loss(model(x[i : i + 1].clone()), y[i : i + 1])[0]
        each.append(torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True))
    return _clipped(named, each)


def _clipped(named, each):
    norms = [torch.stack([g.square().sum() for g in grads]).sum().sqrt() for grads in each]
    bound = float(torch.stack(norms).median())
    factors = [reference.clip_factor(n, bound) for n in norms]
    columns = list(zip(*each, strict=True))
    clipped = {n: sum(f * g for f, g in zip(factors, gs, strict=True)) for n, gs in zip(named, columns, strict=True)}
    return bound, clipped, {n: sum(gs) for n, gs in zip(named, columns, strict=True)}


def _private(model, x, y, bound, **options):
    return PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        sample_rate=1.0,
        expected_batch_size=1,
        check_batches=False,
        **options,
    )


def _gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def _made(name):
    torch.manual_seed(3)
    return MODELS[name]().double()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_loop(name):
    x, y = torch.randn(EXAMPLES, 6, dtype=torch.float64), torch.arange(EXAMPLES) % 3
    bound, clipped, ordinary = _truth(_made(name), x, y)
    sums = Engine(_made(name), odd_loss, max_grad_norm=bound).clipped_sum(x.clone(), y).sums
    assert relative_error(sums, clipped) < 1e-10
    model = _made(name)
    private, optimizer, _ = _private(model, x, y, bound, grad_sample_mode="hooks")
    odd_loss(private(x.clone()), y).mean().backward()
    assert relative_error({n: g * EXAMPLES for n, g in _gradients(model).items()}, ordinary) < 1e-10
    optimizer.step()
    assert relative_error(_gradients(model), clipped) < 1e-10


def scaled_by_a_random_number(self, x):
    return times(times(x, self.g), self.k) * random.random()


RANDOM = {
    "dropout": lambda s, x: F.dropout(times(x, s.g), 0.5) * s.k,
    "noise": lambda s, x: (x + torch.randn_like(x)) * s.g * s.k,
    "python's random": scaled_by_a_random_number,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_the_batch(name):
    def made():
        torch.manual_seed(3)
        model = Net(Block(RANDOM[name])).double()
        torch.manual_seed(7)
        random.seed(7)
        return model

    x, y = torch.randn(EXAMPLES, 6, dtype=torch.float64), torch.arange(EXAMPLES) % 3
    model = made()
    named = dict(model.named_parameters())
    each = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in odd_loss(model(x), y)]
    bound, clipped, _ = _clipped(named, each)
    assert relative_error(Engine(made(), odd_loss, max_grad_norm=bound).clipped_sum(x, y).sums, clipped) < 1e-10
    model = made()
    private, optimizer, _ = _private(model, x, y, bound)
    odd_loss(private(x), y).mean().backward()
    optimizer.step()
    assert relative_error(_gradients(model), clipped) < 1e-10


@pytest.mark.parametrize("block", [nn.utils.weight_norm(nn.Linear(8, 8)), Block(RANDOM["dropout"])])
def test_an_example_that_is_not_finite_harms_no_other(block):
    """Where the module is copied or run again for it, too."""
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    engine, bad, good = Engine(Net(block), odd_loss, max_grad_norm=1.0), x.clone(), [0, 2, 3, 4]
    bad[1, 2] = torch.nan
    engine.clipped_sum(x, y)
    torch.manual_seed(7)
    clean = engine.clipped_sum(x, y).norms
    torch.manual_seed(7)
    result = engine.clipped_sum(bad, y)
    assert result.nonfinite == 1
    torch.testing.assert_close(result.norms[good], clean[good])
    assert all(torch.isfinite(s).all() for s in result.sums.values())


class Escapes(nn.Module):
    """A block without a rule, of which a tensor gets out otherwise than by its return value."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(6, 8), nn.Linear(8, 3), []
        self.block = Block(self._attribute if way == "attribute" else plain)
        if way == "hook":
            self.block.inner = nn.Tanh()
            self.block.compute = lambda s, x: times(s.inner(times(x, s.g)), s.k)
            self.block.inner.register_forward_hook(lambda module, inputs, output: self.kept.append(output))
        if way == "only its input":
            self.block.compute = lambda s, x: self.kept.append(torch.sin(x)) or plain(s, x)

    def _attribute(self, block, x):
        self.kept.append(times(x, block.g))
        return torch.tanh(times(self.kept[-1], block.k))

    def forward(self, x):
        self.kept.clear()
        return self.last(self.block(self.first(x)))


@pytest.mark.parametrize("mode", ["engine", "bookkeeping", "hooks"])
@pytest.mark.parametrize("way", ["attribute", "hook", "only its input"])
def test_a_gradient_that_would_be_lost_is_refused(way, mode):
    model = Escapes(way)
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    refused = pytest.raises(dpcore.UnsupportedError, match=r"return that tensor from forward\(\)")
    if mode == "engine":
        engine = Engine(model, lambda o, y: odd_loss(o, y) + model.kept[-1].square().mean(1))
        with refused:
            engine.clipped_sum(x, y)
        return
    private, optimizer, _ = _private(model, x, y, 1.0, grad_sample_mode=mode)
    loss = odd_loss(private(x), y)
    with refused:
        (loss + model.kept[-1].square().mean(1)).mean().backward()
    # Without it, all is well again.
    before = [p.detach().clone() for p in model.parameters()]
    odd_loss(private(x), y).mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_weight_penalty_on_what_a_hook_computed_is_refused():
    """Old weight_norm leaves a weight behind that depends on the parameters."""
    model = Net(nn.utils.weight_norm(nn.Linear(8, 8)))
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    private, optimizer, _ = _private(model, x, y, 1.0)
    loss = odd_loss(private(x), y).mean()
    (loss + model.block.weight.square().sum()).backward()
    with pytest.raises((dpcore.UnsupportedError, dpcore.PrivacyError), match=r"block\.weight_g"):
        optimizer.step()


def test_parameters_that_change_before_the_step_are_refused():
    model = Net(Block(plain))
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    private, optimizer, _ = _private(model, x, y, 1.0)
    odd_loss(private(x), y).mean().backward()
    with torch.no_grad():
        model.block.g.mul_(2.0)
    with pytest.raises(dpcore.UnsupportedError, match="changed between its forward pass"):
        optimizer.step()


def test_what_is_switched_before_the_step_is_refused():
    model = Net(Block(lambda s, x: torch.tanh(times(times(x, s.g), s.k)) if s.training else times(times(x, s.g), s.k)))
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    private, optimizer, _ = _private(model, x, y, 1.0)
    odd_loss(private(x), y).mean().backward()
    model.block.eval()
    with pytest.raises(dpcore.UnsupportedError, match="gave other outputs when it was run again"):
        optimizer.step()


def test_a_block_that_mixes_examples_behind_dropout_is_refused():
    model = Net(Block(lambda s, x: F.dropout((x - x.mean(0)) * s.g, 0.5) * s.k))
    with pytest.raises((dpcore.UnsupportedError, dpcore.PrivacyError), match=r"mixes|depends on the other"):
        Engine(model, odd_loss).clipped_sum(torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3)


class Conv1D(nn.Module):
    """A linear layer whose weight lies transposed, as a raw parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) * 0.4), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_bfloat16_autocast():
    torch.manual_seed(0)
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    model = Net(Conv1D())
    bound, clipped, _ = _truth(model, x, y)
    engine = Engine(model, odd_loss, max_grad_norm=bound)
    with torch.autocast("cpu", torch.bfloat16):
        sums = engine.clipped_sum(x, y).sums
    assert 0.0 < relative_error(sums, clipped) < 0.05
    private, optimizer, _ = _private(model, x, y, bound)
    with torch.autocast("cpu", torch.bfloat16):
        loss = odd_loss(private(x), y).mean()
    loss.backward()
    optimizer.step()
    assert 0.0 < relative_error(_gradients(model), clipped) < 0.05


def test_counters_count_the_users_calls_alone():
    for compute in (counting, counting_anew):
        model = Net(with_counter(compute))
        x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
        private, optimizer, _ = _private(model, x, y, 1.0)
        for _ in range(3):
            odd_loss(private(x), y).mean().backward()
            optimizer.step()
        assert int(model.block.calls) == 3


def test_a_second_pass_through_the_same_graph():
    for compute in (inner_and_outer, RANDOM["dropout"]):
        model = Net(Block(compute), lambda n, x: sum(o) if isinstance(o := n.block(x), tuple) else o)
        x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
        private, _, _ = _private(model, x, y, 1.0)
        loss = odd_loss(private(x), y).mean()
        loss.backward(retain_graph=True)
        once = model.block.g.grad_sample.clone()
        loss.backward()
        torch.testing.assert_close(model.block.g.grad_sample, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("name", ["", "reduction"])
def test_a_module_that_mixes_examples_is_refused_whatever_its_model_calls_its_attributes(name):
    """Models in shards have an attribute of that name."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x - x.mean(0)) * torch.view_as_complex(self.weight), n=6)

    model = nn.Sequential(nn.Linear(6, 6), Mixing(), nn.Linear(6, 2))
    if name:
        model.__dict__[name] = "mean"
    with pytest.warns(UserWarning, match="check_isolation=False"):
        engine = Engine(
            model, lambda o, y: F.cross_entropy(o, y, reduction="none"), max_grad_norm=1.0, check_isolation=False
        )
    with pytest.raises(UnsupportedError, match="depends on the others in the batch"):
        engine.clipped_sum(torch.randn(8, 6), torch.arange(8) % 2)
