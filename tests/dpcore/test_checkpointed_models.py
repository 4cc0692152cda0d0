"""torch.utils.checkpoint in models of many shapes, with batches that need care, and without leaving anything behind."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpcore import Engine, reference
from dpcore.grad_sample import GradSampleModule
from dpcore.tape.dropped_use import DroppedUse
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import whole_batch
from tests.dpcore.test_checkpointing import (
    BLOCKS,
    WAY,
    WIDTH,
    C,
    FromWeights,
    Net,
    Remembers,
    assert_equal,
    data,
    losses,
    truth,
)

SHORT = 3
"""So few positions that gradients by example are larger than inputs and output gradients, which are kept; at 40 they
themselves are."""

LENGTHS = pytest.mark.parametrize("length", [SHORT, 40])
pytestmark = pytest.mark.usefixtures("only_new_objects")


def gradients(private: nn.Module, examples: int) -> dict[str, Tensor]:
    return {n: p.grad * examples for n, p in private.to_standard_module().named_parameters()}


@pytest.mark.parametrize("bounds", ["per layer", "infinite"])
def test_other_bounds(bounds):
    torch.manual_seed(0)
    model, (x, y) = Net("not").double(), data(length=SHORT)
    plain = copy.deepcopy(model)
    plain.how = "plainly"
    c = [0.1] * len(list(model.parameters())) if bounds == "per layer" else 1e9
    found, expected = (Engine(m, losses, max_grad_norm=c).clipped_sum(x, y).sums for m in (model, plain))
    assert_equal(dict(found), dict(expected))


def test_autocast_is_that_of_the_first_run():
    torch.manual_seed(0)
    model, (x, y) = Net("not"), data(length=SHORT, dtype=torch.float32)
    expected = truth(copy.deepcopy(model).double(), x.double(), y)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(private(x).float(), y)
    loss.backward()
    optimizer.step()
    found = gradients(private, len(x))
    error = sum((found[n] - expected[n]).square().sum() for n in expected).sqrt()
    assert error <= 1e-2 * sum(v.square().sum() for v in expected.values()).sqrt()


@LENGTHS
def test_two_batches_for_one_step(length):
    """Each keeps what its functions have seen."""
    torch.manual_seed(0)
    model, (x, y) = Remembers("not").double(), data(length=length)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    for inputs in (x, -x):
        F.cross_entropy(private(inputs), y).backward()
    optimizer.step()
    plain = copy.deepcopy(model)
    total = {n: torch.zeros_like(p) for n, p in plain.named_parameters()}
    for inputs in (x, -x):
        for n, v in Engine(plain, losses, max_grad_norm=C).clipped_sum(inputs, y).sums.items():
            total[n] += v / 2  # the step is the mean of the two batches'
    assert_equal(gradients(private, len(x)), total)


@LENGTHS
def test_gradients_by_example_can_be_read(length):
    torch.manual_seed(0)
    model, (x, y) = Net("not").double(), data(length=length)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    F.cross_entropy(private(x), y).backward()
    plain = copy.deepcopy(model)
    plain.how = "plainly"
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        other.grad = None
        (grad,) = torch.autograd.grad(losses(plain(x[2:3]), y[2:3]).sum(), other)
        assert torch.allclose(param.grad_sample[2], grad, atol=1e-10), name
    optimizer.zero_grad()


def test_ordinary_gradients_are_formed_at_the_end_of_the_backward_pass():
    torch.manual_seed(0)
    model, (x, y) = Net("not").double(), data(length=SHORT)
    plain = copy.deepcopy(model)
    plain.how = "plainly"
    F.cross_entropy(plain(x), y).backward()
    private = GradSampleModule(model)
    F.cross_entropy(private(x), y).backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})


@LENGTHS
def test_doubtful_examples(length):
    """One whose gradient is not finite contributes nothing, and the others what they are."""
    torch.manual_seed(0)
    model, (x, y) = Net("not").double(), data(length=length)
    x[1] = torch.nan
    keep = torch.tensor([i for i in range(len(x)) if i != 1])
    expected = truth(model, x[keep], y[keep])
    # The probe and the experiments on mixing look at examples that are finite.
    engine = Engine(model, losses, max_grad_norm=C, check_isolation=False)
    assert_equal(dict(engine.clipped_sum(x, y).sums), expected)


class Words(Net):
    """Every position has an answer of its own, so that gradients are far shorter than the terms of their norms."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how == "plainly" else checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def of_words(outputs: Tensor, y: Tensor) -> Tensor:
    """``y`` [B, T, 5]: what each example's outputs are multiplied by, and the share of their logarithmic losses."""
    numbers = torch.Generator().manual_seed(2)
    targets = torch.randint(4, y.shape[1:2], generator=numbers).expand(len(y), -1)
    own = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)
    return own * y[:, 0, 4] + (outputs * y[:, :, :4]).sum((1, 2))


def words(kinds: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Examples that are ordinary ("o"), whose first two positions cancel mostly and are all ("m") or cancel entirely
    ("c"), huge ("h") or no numbers ("n").
    """
    shares = {"o": (0.0, 0.0), "m": (1.0, -0.8), "c": (1.0, -1.0), "h": (1e30, 1e30), "n": (torch.nan, 0.0)}
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(len(kinds), 16, 8, generator=numbers, dtype=dtype)
    y = torch.zeros(len(kinds), 16, 5, dtype=dtype)
    for i, kind in enumerate(kinds):
        x[i, 1] = x[i, 0]
        y[i, 0, :2], y[i, 1, :2] = shares[kind]
        y[i, :, 4] = kind == "o"
    return x, y


@pytest.mark.parametrize("kinds", ["omm", "oco", "omncho"])
def test_examples_that_cancel(kinds):
    torch.manual_seed(0)
    model, (x, y) = Words("not"), words(kinds)
    of = reference.example_gradients(copy.deepcopy(model), of_words, x, y)
    of = [g for g in of if torch.isfinite(reference.norm(g))]
    truth = {n: sum(min(1.0, C / max(float(reference.norm(g)), 1e-12)) * g[n] for g in of) for n in of[0]}
    sums = Engine(model, of_words, max_grad_norm=C, check_isolation=False).clipped_sum(x, y).sums
    assert relative_error(sums, truth) < 1e-4


def test_an_example_that_is_not_finite_leaves_the_others_as_they_are():
    def run(kinds: str, of: list[int]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, y = words(kinds)
        engine = Engine(Words("not"), of_words, max_grad_norm=C, check_isolation=False)
        return {n: v.clone() for n, v in engine.clipped_sum(x[of], y[of]).sums.items()}

    assert relative_error(run("hno", [0, 1, 2]), run("hno", [0, 2])) < 1e-6
    assert relative_error(run("mno", [0, 1, 2]), run("mno", [0, 2])) < 1e-6


class Several(Net):
    """Blocks that return two tensors, one of them made of the other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.first(x), 0.0
        for block in self.blocks:

            def both(h: Tensor, block: nn.Module = block) -> tuple[Tensor, Tensor]:
                first = block(h)
                return first, first.sin()

            if self.how == "plainly":
                hidden, beside = both(hidden)
            else:
                hidden, beside = checkpoint(both, hidden, use_reentrant=False)
            total = total + beside
        return self.last((hidden + total).mean(1))


class Crossed(Net):
    """Blocks that see a second tensor with a graph, brought along as transformers does it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        hidden = first
        for block in self.blocks:

            def crossed(h: Tensor, beside: Tensor, block: nn.Module = block) -> Tensor:
                return block(h + beside.tanh())

            call = functools.partial(crossed, beside=first)
            hidden = call(hidden) if self.how == "plainly" else checkpoint(call, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


class Flat(Net):
    """Blocks that see all positions of all examples side by side."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).reshape(-1, WIDTH)
        for block in self.blocks:
            hidden = block(hidden) if self.how == "plainly" else checkpoint(block, hidden, use_reentrant=False)
        return self.last(hidden.reshape(len(x), -1, WIDTH).mean(1))


class Twice(Net):
    """Blocks of which the first is run twice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            hidden = block(hidden) if self.how == "plainly" else checkpoint(block, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


class Passes(Net):
    """Blocks that get a parameter as an argument, and one tensor three times."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        attend = functools.partial(self.attention, need_weights=False)
        run = (lambda f, *a: f(*a)) if self.how == "plainly" else functools.partial(checkpoint, use_reentrant=False)
        hidden = hidden + run(lambda q, k, v: attend(q, k, v)[0], hidden, hidden, hidden)
        hidden = run(lambda h, w: F.linear(h, w).tanh(), hidden, self.weight)
        for block in self.blocks:
            hidden = run(block, hidden)
        return self.last(hidden.mean(1))


class Positions(Net):
    """Adds positions, which come from a parameter alone, before its blocks."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.positions = nn.Embedding(SHORT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.positions(torch.arange(SHORT))
        for block in self.blocks:
            hidden = block(hidden) if self.how == "plainly" else checkpoint(block, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


class TurnedBlock(nn.Module):
    """A residual block whose weights are multiplied from the left, as those of transformers' GPT-2 are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4), nn.Parameter(torch.randn(2 * WIDTH))
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.bias, x.reshape(-1, WIDTH), self.up).view(*x.shape[:-1], -1)
        return x + hidden.tanh() @ self.down


class TurnedNet(Net):
    """A net of such blocks."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.blocks = nn.ModuleList(TurnedBlock() for _ in range(BLOCKS))


class Leaks(Net):
    """Hands on a tensor by an attribute, through which a gradient comes back into the checkpointed function."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, self.left = self.first(x), []
        for block in self.blocks:

            def inner(h: Tensor, block: nn.Module = block) -> Tensor:
                inside = block.up(block.norm(h))
                if len(self.left) < BLOCKS:
                    self.left.append(inside)
                return h + block.down(inside.tanh())

            hidden = inner(hidden) if self.how == "plainly" else checkpoint(inner, hidden, use_reentrant=False)
        return self.last(hidden.mean(1)) * (1.0 + sum(left.mean((1, 2)) for left in self.left)[:, None])


@WAY
@pytest.mark.parametrize("kind", [Several, Crossed, Flat, Twice, FromWeights, Passes, Positions, TurnedNet, Leaks])
def test_shapes_of_models(way, kind):
    torch.manual_seed(0)
    model = (kind() if kind is FromWeights else kind("not")).double()
    x, y = data(length=SHORT)
    expected = truth(model, x, y)
    assert_equal(way(model, x, y), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@WAY
def test_rules_that_form_gradients_only(way, dtype):
    """Norms of roots of mean squares and gates, at one position."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__("not")
            self.rms, self.gate = nn.RMSNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            for block in self.blocks:
                inner = functools.partial(lambda h, block: block(self.rms(h)) * self.gate, block=block)
                hidden = inner(hidden) if self.how == "plainly" else checkpoint(inner, hidden, use_reentrant=False)
            return self.last(hidden.mean(1))

    torch.manual_seed(0)
    model, (x, y) = Gated().to(dtype), data(length=1, dtype=dtype)
    wide, expected = copy.deepcopy(model).double(), {}
    expected = truth(wide, x.double(), y)
    found = {n: v.double() for n, v in way(model, x, y).items()}
    error = sum((found[n] - expected[n]).square().sum() for n in expected).sqrt()
    limit = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 5e-2}[dtype]
    assert error <= limit * sum(v.square().sum() for v in expected.values()).sqrt()


class Holds(Net):
    """Functions that hold a tensor with a graph as a default."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        hidden = first
        for block in self.blocks:

            def inner(h: Tensor, beside: Tensor = first, block: nn.Module = block) -> Tensor:
                return block(h + beside.tanh())

            hidden = checkpoint(inner, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


@pytest.mark.parametrize("step", [True, False])
def test_functions_that_hold_a_graph_leave_nothing(step):
    torch.manual_seed(0)
    model, (x, y) = Holds("not").double(), data(length=SHORT)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    counts = []
    for _ in range(4):
        F.cross_entropy(private(x), y).backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        counts.append(sum(isinstance(value, DroppedUse) for value in gc.get_objects()))
    assert counts[1] == counts[3]


def test_a_batch_that_is_dropped_leaves_nothing():
    """A backward pass without a step."""
    torch.manual_seed(0)
    model, (x, y) = Crossed("not").double(), data(length=SHORT)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    found: list[weakref.ref[Tensor]] = []
    for _ in range(2):
        inputs = x.clone()
        found.append(weakref.ref(inputs))
        F.cross_entropy(private(inputs), y).backward()
        del inputs
        optimizer.zero_grad()
    gc.collect()
    assert all(reference() is None for reference in found)
