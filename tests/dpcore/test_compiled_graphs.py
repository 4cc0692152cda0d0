"""``Engine(compile=...)``: the pass as compiled graphs, against float64 and against the eager engine."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dpcore import Engine, GaussianNoise, reference
from dpcore.clipping import automatic_factors
from dpcore.engine.graphs import graph_size, rung
from dpcore.errors import PrivacyError, UnsupportedError
from tests.dpcore.comparison import MARGIN, odd_loss, relative_error
from tests.dpcore.exactness import PATHS, Averaged, First, OwnScale, Reused

TRACED = "eager"
"""The backend that runs what was traced as it is, without a C++ compiler."""
TRACED_AGAIN = "aot_eager"
"""One that traces it once more, as compilers do, which takes longer than all else in a test of small models."""
AGAIN = {"positions, ghost norm", "no rule"}
"""Models whose graphs CI traces again, too; the slow tests do it with all, and inductor with convolutions below."""


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch._dynamo.reset()


class Normed(nn.Module):
    """A residual block as transformers have it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.linear(self.norm(x)).relu()


def images(batch, channels=2, size=12):
    return torch.randn(batch, channels, size, size)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), lambda b: torch.randn(b, 6)),
    "positions, ghost norm": (lambda: nn.Linear(64, 48), lambda b: torch.randn(b, 4, 64)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, 2, 1, groups=2)),
        images,
    ),
    "convolutions, channels-last": (
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 40, 3, padding=1)).to(
            memory_format=torch.channels_last
        ),
        lambda b: images(b, size=5).to(memory_format=torch.channels_last),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
        lambda b: images(b, size=6),
    ),
    "attention": (Normed, lambda b: torch.randn(b, 5, 8)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=2), lambda b: torch.randint(0, 7, (b, 6))),
    "embedding, averaged": (lambda: Averaged(7, 3), lambda b: torch.randint(0, 7, (b, 6))),
    "used twice": (lambda: Reused(nn.Linear(4, 3)), lambda b: torch.randn(b, 4, 4)),
    "no rule": (lambda: nn.Sequential(OwnScale(4, by_rule=False), nn.Linear(4, 2)), lambda b: torch.randn(b, 4)),
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch_of(name, batch):
    torch.manual_seed(batch)
    return MODELS[name][1](batch), torch.arange(batch) % 3


def graphs_of(engine):
    return engine._sums.graphs.sizes


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, TRACED) for name in MODELS),
        *(pytest.param(n, TRACED_AGAIN, marks=[] if n in AGAIN else [pytest.mark.slow]) for n in MODELS),
    ],
)
def test_graphs_give_the_float64_clipped_sum(name, backend):
    model = model_of(name)
    x, y = batch_of(name, 9)
    norms = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, 1.0).norms
    engine = Engine(model, odd_loss, max_grad_norm=float(norms.median()), compile=backend)
    engine.clipped_sum(x, y)  # eagerly: plans
    for count in (9, 5, 1):
        truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x[:count], y[:count], float(norms.median()))
        result = engine.clipped_sum(x[:count], y[:count])
        assert relative_error(result.sums, truth.clipped) < 1e-5 + MARGIN[torch.float32]
        torch.testing.assert_close(result.norms.double(), truth.norms, rtol=1e-5, atol=0)
    assert graphs_of(engine) == [4, 5, 10]


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")
def test_the_default_backend_gives_the_eager_step():
    name = "convolutions, channels-last"
    results = []
    for compiled in (False, True):
        model = model_of(name)
        engine = Engine(
            model,
            odd_loss,
            max_grad_norm=0.1,
            noise_multiplier=1.0,
            expected_batch_size=8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            noise=GaussianNoise(3),
            compile=compiled,
        )
        # Of one length, for each takes the compiler a quarter of a minute; and filled up.
        for count in (9, 9, 0, 9):
            last = engine.step(*batch_of(name, count))
        results.append((torch.cat([p.detach().flatten() for p in model.parameters()]), last.norms, engine))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=0)
    assert graphs_of(results[1][2]) == [10]


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 5000), most=st.integers(1, 600))
def test_graphs_hold_every_batch_with_little_filling(count, most):
    size = graph_size(count, most)
    rows = -(-count // size) * size
    assert rung(size) == size and count <= rows
    assert size <= max(4, 1.25 * most)
    assert rows <= max(1.25 * count + 4, 4 * -(-count // most))


def small(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = Engine(model, odd_loss, **{"max_grad_norm": 0.2, "compile": TRACED, **options})
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    engine.clipped_sum(x, y)
    return model, engine, x, y


def agrees(model, engine, x, y, bound):
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x, y, bound)
    result = engine.clipped_sum(x, y)
    assert relative_error(result.sums, truth.clipped) < 1e-5 + MARGIN[torch.float32]
    return result


def test_weights_and_bounds_are_read_at_every_call():
    model, engine, x, y = small()
    agrees(model, engine, x, y, 0.2)
    with torch.no_grad():
        model[0].weight.mul_(-2.0)
    agrees(model, engine, x, y, 0.2)
    model[2].weight.data = torch.randn(3, 5)  # memory of its own
    agrees(model, engine, x, y, 0.2)
    engine.accumulator.set_bounds(0.05)
    assert agrees(model, engine, x, y, 0.05).sensitivity == 0.05
    assert len(engine._sums.graphs._graphs) == 1


def test_buffers_and_frozen_parameters_are_read_at_every_call():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.linear.bias.requires_grad_(False)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return self.linear(x + self.shift)

    model = Shifted()
    engine = Engine(model, odd_loss, max_grad_norm=0.3, compile=TRACED)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    engine.clipped_sum(x, y)
    agrees(model, engine, x, y, 0.3)
    model.shift += 1.5
    model.linear.bias += 0.5
    agrees(model, engine, x, y, 0.3)


def test_parameters_given_other_data_get_a_graph_of_their_own():
    model, engine, x, y = small()
    agrees(model, engine, x, y, 0.2)
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    agrees(model, engine, x, y, 0.2)
    torch.use_deterministic_algorithms(True)
    try:
        agrees(model, engine, x, y, 0.2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(engine._sums.graphs._graphs) == 3


def test_batches_that_come_filled_up_are_not_filled_again():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
    x, y = torch.randn(150, 6), torch.arange(150) % 3
    lengths = [9, 11, 13, 15, 17, 21, 22, 23, 25, 27, 150]
    for count in (9, *lengths):
        mask = torch.arange(count) != 1
        truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x[:count][mask], y[:count][mask], 0.2)
        assert relative_error(engine.clipped_sum(x[:count], y[:count], mask).sums, truth.clipped) < 1e-5
    # Eight as they came, the others by the next rung.
    assert graphs_of(engine) == [9, 11, 13, 15, 17, 21, 22, 23, 28, 160]


def test_masked_examples_contribute_nothing():
    model, engine, x, y = small()
    mask = torch.tensor([True, False] * 4)
    truth = reference.clipped_sum(copy.deepcopy(model), odd_loss, x[mask], y[mask], 0.2)
    result = engine.clipped_sum(x, y, mask)
    assert relative_error(result.sums, truth.clipped) < 1e-5
    assert not result.factors[~mask].any()
    nothing = engine.clipped_sum(x, y, torch.zeros(8, dtype=torch.bool))
    assert not engine.accumulator.flat.any() and not nothing.factors.any()


def test_filling_leaves_no_trace_of_other_batches():
    """What an earlier piece left in the graph's memory must not enter a later one, not even times zero."""
    model, engine, x, y = small()
    engine.clipped_sum(torch.full((8, 6), float("nan")), y)
    result = agrees(model, engine, x[:7], y[:7], 0.2)
    assert result.nonfinite == 0 and len(result.norms) == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_an_example_that_is_not_finite_is_left_to_the_eager_pass(bad):
    model, engine, x, y = small()
    x[3] = bad
    others = torch.arange(8) != 3
    result = engine.clipped_sum(x, y)
    assert all(s.isfinite().all() for s in result.sums.values())
    eager = Engine(copy.deepcopy(model), odd_loss, max_grad_norm=0.2).clipped_sum(x, y)
    assert relative_error(result.sums, eager.sums) < 1e-5
    torch.testing.assert_close(result.norms[others], eager.norms[others], rtol=1e-5, atol=0)
    assert result.nonfinite == eager.nonfinite


@pytest.mark.parametrize(
    "path", [p for p in PATHS if not p.compiled and p.cancels and not p.recorded], ids=lambda path: path.name
)
@pytest.mark.parametrize("degree", [1e4])
def test_nothing_above_the_bound_is_released_under_cancellation(path, degree):
    torch.manual_seed(0)
    batch = path.build(degree)
    loss = lambda outputs, y: (outputs * y).flatten(1).sum(1)  # noqa: E731
    norms = reference.clipped_sum(copy.deepcopy(batch.model), loss, batch.x, batch.y, 1.0).norms
    bound = max(float(norms.median()), 1e-6)
    engine = Engine(batch.model, loss, max_grad_norm=bound, compile=TRACED)
    engine.clipped_sum(batch.x, batch.y)
    for i in range(len(batch.x)):
        one = engine.clipped_sum(batch.x[i : i + 1], batch.y[i : i + 1])
        released = sum(float(s.double().square().sum()) for s in one.sums.values()) ** 0.5
        assert released <= bound


def test_the_private_step_is_the_eager_one_with_its_noise():
    results = []
    for compiled in (False, TRACED):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        engine = Engine(
            model,
            odd_loss,
            max_grad_norm=0.2,
            noise_multiplier=1.0,
            expected_batch_size=8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            noise=GaussianNoise(7),
            compile=compiled,
        )
        for count in (8, 6, 0, 1, 12):
            torch.manual_seed(count)
            engine.step(torch.randn(count, 6), torch.arange(count) % 3)
        assert engine.steps == 5
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_per_layer_bounds_and_other_clipping_rules():
    model, engine, x, y = small(max_grad_norm=[0.1, 0.2, 0.3, 0.4])
    eager = Engine(copy.deepcopy(model), odd_loss, max_grad_norm=[0.1, 0.2, 0.3, 0.4]).clipped_sum(x, y)
    assert relative_error(engine.clipped_sum(x, y).sums, eager.sums) < 1e-5
    model, engine, x, y = small(factors=automatic_factors)
    eager = Engine(copy.deepcopy(model), odd_loss, max_grad_norm=0.2, factors=automatic_factors).clipped_sum(x, y)
    assert relative_error(engine.clipped_sum(x, y).sums, eager.sums) < 1e-5


def test_dropout_draws_anew_and_is_off_in_evaluation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    engine.clipped_sum(x, y)
    first, second = (engine.clipped_sum(x, y).norms.clone() for _ in range(2))
    assert not torch.allclose(first, second)
    model.eval()
    agrees(model, engine, x, y, 0.2)


def test_inputs_by_name_and_of_several_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, left, right):
            return self.linear(left * right)

    torch.manual_seed(0)
    model, y = Two(), torch.arange(8) % 3
    left, right = torch.randn(8, 4), torch.randn(8, 4)
    expected = Engine(copy.deepcopy(model), odd_loss, max_grad_norm=0.2).clipped_sum((left, right), y)
    for x in ((left, right), {"left": left, "right": right}):
        engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
        engine.clipped_sum(x, y)
        assert relative_error(engine.clipped_sum(x, y).sums, expected.sums) < 1e-5


def test_a_change_of_what_a_graph_holds_for_makes_a_new_one():
    model, engine, x, y = small()
    agrees(model, engine, x, y, 0.2)
    engine.accumulator.set_bounds([0.2] * 4)
    eager = Engine(copy.deepcopy(model), odd_loss, max_grad_norm=[0.2] * 4).clipped_sum(x, y)
    result = engine.clipped_sum(x, y)
    assert result.norms.shape == eager.norms.shape and relative_error(result.sums, eager.sums) < 1e-5
    engine.accumulator.set_bounds(0.2)
    model[0].register_forward_hook(lambda module, args, output: 2.0 * output)
    agrees(model, engine, x, y, 0.2)
    engine.loss_fn = lambda outputs, y: 3.0 * odd_loss(outputs, y)
    truth = reference.clipped_sum(copy.deepcopy(model), engine.loss_fn, x, y, 0.2)
    assert relative_error(engine.clipped_sum(x, y).sums, truth.clipped) < 1e-5


def test_autocast_of_one_call_does_not_stay_in_the_graph():
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False)
    engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
    x, y = torch.randn(8, 4, 64), torch.arange(8) % 3
    for inside in (False, True, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            engine.clipped_sum(x, y)
            for i in range(8):
                sums = engine.clipped_sum(x, y, torch.arange(8) == i).sums
                assert sums["weight"].double().norm() <= 0.2
    agrees(model, engine, x, y, 0.2)


@pytest.mark.parametrize("y", [torch.tensor([1]), torch.tensor(1)])
def test_one_label_for_all_is_refused(y):
    _, engine, x, _ = small()
    with pytest.raises(UnsupportedError, match="one row per example"):
        engine.clipped_sum(x, y)


def test_the_model_keeps_real_tensors():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.seen = None

        def forward(self, x):
            self.seen = x
            return self.linear(x)

    torch.manual_seed(0)
    model, y = Cached(), torch.arange(8) % 3
    engine = Engine(model, odd_loss, max_grad_norm=0.3, compile=TRACED)
    x = torch.randn(8, 4)
    for count in (8, 8, 5):
        agrees(model, engine, x[:count], y[:count], 0.3)
    assert type(model.seen) is torch.Tensor


def test_a_copied_engine_steps_with_a_model_and_graphs_of_its_own():
    _, engine, x, y = small(noise_multiplier=1.0, expected_batch_size=8)
    engine.privatize(x, y)
    for copied in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        released = engine.accumulator.flat.clone()
        copied.noise_multiplier = 0.0
        with torch.no_grad():
            copied.model[0].weight.mul_(-2.0)
        agrees(copied.model, copied, x, y, 0.2)
        copied.privatize(x, y)
        assert copied.model[0].weight.grad.data_ptr() == copied.accumulator.sums[copied.model[0].weight].data_ptr()
        assert torch.equal(engine.accumulator.flat, released)


def test_a_clipping_rule_that_writes_to_its_bound_does_not_move_it():
    def rule(norms, bound):
        bound *= 1.5
        return (bound / (norms + 1e-6)).clamp(max=1.0) / 1.5

    _, engine, x, y = small(factors=rule)
    for _ in range(4):
        result = engine.clipped_sum(x, y)
        assert (result.norms * result.factors).max() <= 0.2


def test_a_buffer_that_takes_the_place_of_another_is_seen():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("shift", torch.ones(6))
            self.register_buffer("scale", None)

        def forward(self, x):
            x = x if self.shift is None else x + self.shift
            return self.linear(x if self.scale is None else x * self.scale)

    torch.manual_seed(0)
    model = Either()
    engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    for _ in range(3):
        agrees(model, engine, x, y, 0.2)
    model.shift, model.scale = None, 3.0 * model.shift
    agrees(model, engine, x, y, 0.2)


def test_the_newer_setting_of_matmul_precision_is_no_obstacle():
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        model, engine, x, y = small()
        agrees(model, engine, x, y, 0.2)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_losses_of_one_call_outlive_the_next():
    _, engine, x, _ = small()
    engine.loss_fn = lambda outputs, y: y
    first = engine.clipped_sum(x, x[:, 0]).losses
    kept = first.clone()
    engine.clipped_sum(x, x[:, 1])
    assert torch.equal(first, kept)


# ---- what is refused


def test_recurrent_layers_are_refused():
    with pytest.raises(UnsupportedError, match="layer is a recurrent layer"):
        Engine(First(nn.LSTM(3, 3)), odd_loss, compile=True)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="compile is 'fast'; it must be True, False or a backend"):
        Engine(nn.Linear(2, 2), odd_loss, compile="fast")


def refused(loss, match, error=UnsupportedError, model=None):
    torch.manual_seed(0)
    model = model or nn.Linear(6, 3)
    engine = Engine(
        model,
        loss,
        max_grad_norm=0.2,
        noise_multiplier=1.0,
        expected_batch_size=8,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        compile=TRACED,
        check_isolation=False,
    )
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    engine.step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=match):
        engine.step(x, y)
    assert engine.steps == 1 and not engine.accumulator.flat.any()
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


def test_what_depends_on_values_is_refused_and_nothing_released():
    refused(lambda o, y: odd_loss(o, y) * (2.0 if o.sum() > 0 else 1.0), "cannot be traced")
    refused(lambda o, y: odd_loss(o, y) + float(o.detach().mean()), "cannot be traced")
    refused(lambda o, y: odd_loss(o, y) + torch.from_numpy(o.detach().numpy()).sum(1), "cannot be traced")
    scale = torch.tensor(2.0)
    refused(lambda o, y: odd_loss(o, y) * float(scale), r"reads a tensor's value by __float__\(\)")
    refused(lambda o, y: odd_loss(o, y) * scale.item(), r"reads a tensor's value by item\(\)")


def test_a_buffer_set_anew_is_refused_and_stays_real():
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1
            return self.linear(x)

    model = Moving()
    refused(odd_loss, "changes its buffer mean", model=model)
    assert type(model.mean) is torch.Tensor


@pytest.mark.parametrize("by_batch", [True, False])
def test_a_buffer_changed_in_place_is_refused_and_left_as_the_eager_pass_had_it(by_batch):
    """A graph would count the rows that it is filled up with, and a doubtful piece twice."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(2, 6))

        def forward(self, x):
            self.seen[0].add_(x.detach().sum(0) if by_batch else 1.0)
            return self.linear(x)

    model = Counting()
    after_one = []
    loss = lambda outputs, y: after_one.append(model.seen.clone()) or odd_loss(outputs, y)  # noqa: E731
    refused(loss, "changes (its|a) buffer", model=model)
    assert torch.equal(model.seen, after_one[0])


def test_random_numbers_without_a_rule_are_refused_in_every_mode():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return F.dropout(torch.addcmul(torch.zeros_like(x), x, self.scale), 0.5, self.training)

    model = Own().eval()
    engine = Engine(model, odd_loss, max_grad_norm=0.2, compile=TRACED)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    engine.clipped_sum(x, y)
    engine.clipped_sum(x, y)
    model.train()
    with pytest.raises(UnsupportedError, match="random"):
        engine.clipped_sum(x, y)


def test_a_mean_loss_is_refused_as_ever():
    first = [True]

    def mean_later(outputs, y):
        each = F.cross_entropy(outputs, y, reduction="none")
        if first and first.pop():
            return each
        return each.mean()

    refused(mean_later, "one loss per example", PrivacyError)


def test_explain_names_the_graphs():
    _, engine, x, y = small()
    engine.clipped_sum(x, y)
    assert "one compiled graph for each" in engine.explain() and "physical batch size: 8" in engine.explain()
