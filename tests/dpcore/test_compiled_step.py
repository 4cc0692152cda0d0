"""torch.compile around the engine: the step runs uncompiled and is the same, bit for bit; what would hide layers from
it is refused before anything is released."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpcore import Engine, GaussianNoise, clipped_sum
from dpcore.errors import UnsupportedError
from tests.dpcore.comparison import check, check_private
from tests.dpcore.private_setup import losses

BACKEND = "aot_eager"
"""Traces forward and backward as inductor does, without a C++ compiler."""
OLD = r"torch\._dynamo\.disable\(\) wrapped function <function Engine\.step"
"""What torch 2.6 says of a function that is not to be traced; it takes no reason."""
SIZES = (16, 13, 0, 1, 16)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch._dynamo.reset()


def make(loss=losses):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    engine = Engine(
        model,
        loss,
        max_grad_norm=0.5,  # below the norms: every example is clipped
        noise_multiplier=1.0,
        expected_batch_size=16,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        noise=GaussianNoise(3),
    )
    return model, engine


def batches():
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        yield torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def trained(wrap=lambda step: step, loss=losses):
    model, engine = make(loss)
    step = wrap(engine.step)
    results = [step(x, y) for x, y in batches()]
    assert engine.steps == len(SIZES)
    return weights(model), results


def test_a_compiled_step_is_the_step_itself():
    expected, plainly = trained()
    found, results = trained(lambda step: torch.compile(step, backend=BACKEND))
    assert torch.equal(found, expected)  # clipping, the noise of each step's number, and the update
    for one, other in zip(results, plainly, strict=True):
        assert torch.equal(one.norms, other.norms) and torch.equal(one.factors, other.factors)
    assert max(float(r.factors.max()) for r in results if len(r.factors)) < 1.0


def test_a_step_inside_of_a_compiled_function():
    def wrap(step):
        @torch.compile(backend=BACKEND)
        def scaled(x, y):
            return step(2.0 * x / 2.0, y)

        return scaled

    assert torch.equal(trained(wrap)[0], trained()[0])


def test_a_compiled_loss_is_as_good_as_any():
    compiled = torch.compile(losses, backend=BACKEND)
    torch.testing.assert_close(trained(loss=compiled)[0], trained()[0], rtol=1e-5, atol=1e-6)


def test_a_graph_of_the_whole_step_is_refused_and_nothing_is_released():
    model, engine = make()
    compiled = torch.compile(lambda x: x + 1, backend=BACKEND)
    compiled(torch.ones(1))
    make()[1].step(*next(iter(batches())))  # the first step beside a compiler; one that is traced has torch's sentence
    before = weights(model)
    whole = torch.compile(engine.step, backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the private step runs uncompiled|" + OLD):
        whole(*next(iter(batches())))
    assert torch.equal(weights(model), before) and engine.steps == 0


def test_a_compiled_model_is_refused_before_and_after_the_engine_is_built():
    model, engine = make()
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.compile"):
        Engine(torch.compile(model, backend=BACKEND), losses)
    x, y = next(iter(batches()))
    engine.step(x, y)
    before = weights(model)
    model[0].compile(backend=BACKEND)
    with pytest.raises(UnsupportedError, match=r"0 is compiled by torch\.compile"):
        engine.step(x, y)
    assert torch.equal(weights(model), before) and engine.steps == 1


class CallsCompiled(nn.Module):
    """Functions of a layer's outputs and a parameter that torch.compile has compiled, as models bring them along."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.traced = 0
        self.function = torch.compile(lambda h: torch.tanh(h) * self.scale, backend=self.count)

    def count(self, graph, inputs):
        self.traced += 1
        return graph

    def forward(self, x):
        return self.second(self.function(self.first(x)))

    def __deepcopy__(self, memo):
        twin = CallsCompiled().to(self.scale.dtype)
        twin.load_state_dict(self.state_dict())
        return twin


def test_compiled_functions_within_a_model_run_as_they_are_while_it_is_recorded():
    """The compiler traced the recording for every batch, and a right model was refused after some of them."""
    torch.manual_seed(0)
    model = CallsCompiled().double()
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.arange(5) % 3
    check(model, x, y, clipped_sum)
    assert not model.traced
    model.function(x.new_zeros(2, 16))
    assert model.traced  # as ever, outside of the pass
    check_private(CallsCompiled().double(), x, y)
