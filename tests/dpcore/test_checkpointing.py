"""torch.utils.checkpoint under a private pass: exact, run again in the backward pass, and smaller."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpcore import Engine
from dpcore.errors import UnsupportedError
from dpcore.rerun.snapshot import RandomNumbers
from dpcore.tape.dropped_use import DroppedUse
from dpcore.tape.uses import Saved
from tests.dpcore.private_setup import whole_batch

pytestmark = pytest.mark.usefixtures("only_new_objects")

WIDTH, LENGTH, BLOCKS, C = 16, 12, 3, 0.5


class Block(nn.Module):
    """A residual block with a norm, two layers, dropout and much between them that no rule needs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + self.drop(self.down(hidden.tanh().exp().sigmoid() * hidden.cos()))


class Net(nn.Module):
    """Blocks of which ``how`` says how they are run: "reentrant", "not", or "plainly"."""

    def __init__(self, how: str, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how == "plainly" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.last(x.mean(1))


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def data(examples: int = 6, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(examples, length, 8, generator=numbers, dtype=dtype), torch.arange(examples) % 4


def truth(model: nn.Module, x: Tensor, y: Tensor, masks: list[Tensor] | None = None) -> dict[str, Tensor]:
    """The clipped sum by a loop over the examples, without checkpoints."""
    model = copy.deepcopy(model)
    model.how = "plainly"
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(x)):
        for block, mask in zip(model.blocks, masks or (), strict=masks is not None):
            block.drop.forward = functools.partial(torch.mul, mask[i : i + 1])  # type: ignore[method-assign]
        model.zero_grad()
        losses(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        for n, p in model.named_parameters():
            total[n] += p.grad * min(1.0, C / float(norm))
    return total


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = sum(v.square().sum() for v in expected.values()).sqrt()
    assert found.keys() == expected.keys()
    assert all((found[n] - expected[n]).norm() <= 1e-9 * scale for n in expected)


def by_engine(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in Engine(model, losses, max_grad_norm=C, **options).clipped_sum(x, y).sums.items()}


def by_two_lines(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    private, optimizer, loader = whole_batch(model, x, y, max_grad_norm=C)
    for inputs, targets in loader:
        F.cross_entropy(private(inputs), targets).backward()
        optimizer.step()
    return {n: p.grad * len(x) for n, p in private.to_standard_module().named_parameters()}


HOW = pytest.mark.parametrize("how", ["reentrant", "not"])
WAY = pytest.mark.parametrize("way", [by_engine, by_two_lines])


@HOW
@WAY
@pytest.mark.parametrize("length", [3, 40])
def test_it_is_exact(how, way, length):
    """At 3 positions inputs and gradients are kept, at 40 gradients by example, which are smaller."""
    torch.manual_seed(0)
    model, (x, y) = Net(how).double(), data(length=length)
    expected = truth(model, x, y)
    assert_equal(way(model, x, y), expected)
    if way is by_engine:
        assert_equal(by_engine(model, x, y, physical_batch_size=2), expected)


@HOW
@WAY
def test_blocks_run_again_once(how, way):
    model, (x, y) = Net(how).double(), data()
    way(model, x, y)  # with the probe and the experiments, which keep activations
    runs: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    engine = Engine(model, losses, max_grad_norm=C, check_isolation=False)
    engine.clipped_sum(x, y)
    runs.clear()
    engine.clipped_sum(x, y)
    assert len(runs) == 2 * BLOCKS


@HOW
@pytest.mark.parametrize("dropout_in", ["engine", "two lines"])
def test_dropout_is_the_same_in_both_runs(how, dropout_in):
    """The gradient is that of the masks of the first run, and the random numbers afterwards are those of one run."""
    torch.manual_seed(0)
    model, (x, y) = Net(how, dropout=0.5).double(), data()
    masks: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        masks.append(torch.where(args[0] == 0, 2.0, output.detach() / args[0].detach()).round())

    if dropout_in == "engine":
        engine = Engine(model, losses, max_grad_norm=C, check_isolation=False)
        engine.clipped_sum(x, y)
        handles = [block.drop.register_forward_hook(note) for block in model.blocks]
        before = RandomNumbers(model)
        found = {n: v.clone() for n, v in engine.clipped_sum(x, y).sums.items()}
    else:
        by_two_lines(model, x, y)
        private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False, check_isolation=False)
        private(x)  # the probe
        optimizer.zero_grad()
        handles = [block.drop.register_forward_hook(note) for block in model.blocks]
        before = RandomNumbers(model)
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        found = {n: p.grad * len(x) for n, p in private.to_standard_module().named_parameters()}
    for handle in handles:
        handle.remove()
    # A second run ends in the midst of dropout, with the last tensor that the graph wants.
    assert len(masks) == BLOCKS and all(bool((mask == 0).any() and (mask == 2).any()) for mask in masks)
    assert_equal(found, truth(model, x, y, masks))
    after = RandomNumbers(model)
    before.restore()
    model.how = "plainly"
    model(x)
    assert after.same(RandomNumbers(model))


def _bytes_kept(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes of what one forward pass leaves behind: what the graph saves and what the recorded uses hold."""
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False, check_isolation=False)
    private(x[:4])  # the probe
    optimizer.zero_grad()
    gc.collect()
    before = {id(value) for value in gc.get_objects() if isinstance(value, Saved)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = F.cross_entropy(private(x), y)
    recorded = [value for value in gc.get_objects() if isinstance(value, Saved) and id(value) not in before]
    assert len(recorded) == 2 * BLOCKS + 2
    for saved in recorded:
        note(saved.tensor)
    loss.backward()
    optimizer.step()
    return sum(kept.values())


@HOW
def test_less_is_kept(how):
    x, y = data(64, 64, torch.float32)
    assert _bytes_kept(Net(how), x, y) < 0.3 * _bytes_kept(Net("plainly"), x, y)


@HOW
@WAY
def test_nothing_outlives_the_step(how, way):
    """Neither the collector nor autograd may be left with a circle of what a step has recorded."""
    gc.collect()
    before = {id(value) for value in gc.get_objects() if isinstance(value, DroppedUse)}
    way(Net(how).double(), *data())
    gc.collect()
    assert not [value for value in gc.get_objects() if isinstance(value, DroppedUse) and id(value) not in before]


class Changes(nn.Module):
    """Changes a layer's input in place after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def inner(self, x: Tensor) -> Tensor:
        hidden = self.one(x) * 1.0
        out = self.two(hidden)
        hidden.add_(1.0)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).mean(1)


@WAY
def test_a_change_in_place_is_refused(way):
    model, (x, y) = Changes().double(), data()
    with pytest.raises(UnsupportedError, match="changed in place"):
        way(model, x, y)


@HOW
@pytest.mark.parametrize("length", [3, LENGTH])
def test_two_backward_passes_through_one_graph_add_up(how, length):
    """Both halves of the examples' losses, one after the other, through the same graph."""
    torch.manual_seed(0)
    model, (x, y) = Net(how).double(), data(length=length)
    expected = truth(model, x, y)
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    each = losses(private(x), y)
    (each[:3].sum() / len(x)).backward(retain_graph=True)
    (each[3:].sum() / len(x)).backward()
    optimizer.step()
    assert_equal({n: p.grad * len(x) for n, p in private.to_standard_module().named_parameters()}, expected)


class FromWeights(nn.Module):
    """Two checkpoints that compute their weights from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.weight = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(8, 8))
        self.blocks: list[nn.Module] = []
        self.runs, self.how = 0, "not"

    def inner(self, x: Tensor) -> Tensor:
        self.runs += 1
        return F.linear(x, self.weight.tanh()).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.inner(x) if self.how == "plainly" else checkpoint(self.inner, x, use_reentrant=False)
        return self.last(x.mean(1))


def test_weights_from_parameters_do_not_run_a_block_again():
    torch.manual_seed(0)
    model, (x, y) = FromWeights().double(), data()
    expected = truth(model, x, y)
    engine = Engine(model, losses, max_grad_norm=C, check_isolation=False)
    engine.clipped_sum(x, y)
    model.runs = 0
    assert_equal({n: v.clone() for n, v in engine.clipped_sum(x, y).sums.items()}, expected)
    assert model.runs == 4


class Remembers(Net):
    """A net whose checkpointed functions read what the forward pass has left in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.context = x.mean(-1, keepdim=True)
        hidden = self.first(x)
        for block in self.blocks:
            hidden = checkpoint(lambda h, block=block: block(h) * self.context, hidden, use_reentrant=False)
        return self.last(hidden.mean(1))


@pytest.mark.parametrize("backward", ["first", "both"])
def test_no_function_runs_again_after_another_batch(backward):
    """It would see that batch's context: its examples would move gradients of these by more than their own norm."""
    model, (x, y) = Remembers("not").double(), data()
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    one, other = (F.cross_entropy(private(inputs), y) for inputs in (x, -x))
    if backward == "both":
        other.backward()
    with pytest.raises(UnsupportedError, match="after another batch"):
        one.backward()
    optimizer.zero_grad()


def test_two_passes_in_one_loss_may_run_again():
    """Two views of every example: what one pass sees of the other is the example's own."""
    torch.manual_seed(0)
    model, (x, y) = Net("not").double(), data()
    private, optimizer, _ = whole_batch(model, x, y, max_grad_norm=C, check_batches=False)
    (F.cross_entropy(private(x), y) + F.cross_entropy(private(x), y)).backward()
    optimizer.step()
    found = {n: p.grad * len(x) for n, p in private.to_standard_module().named_parameters()}
    assert_equal(found, truth(model, x, y))  # all norms are above C, so that twice the gradients come to the same
