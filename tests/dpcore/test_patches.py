"""What dpcore replaces in torch and in the user's model is put back: after steps, errors and interleaved threads."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import Engine, PrivacyEngine
from tests.dpcore.private_setup import losses, make, small_data

OWNERS = (
    torch,
    F,
    nn,
    nn.Module,
    nn.Linear,
    nn.RNNBase,
    nn.Parameter,
    torch.Tensor,
    torch.autograd,
    torch.autograd.Function,
    torch.autograd.graph,
    torch.overrides,
    torch.utils.checkpoint,
    torch.utils.data.DataLoader,
    torch.func,
    torch.optim.Optimizer,
    torch.optim.SGD,
    torch.optim.lr_scheduler,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
    torch.random,
)


def _globals() -> dict[tuple[str, str], Any]:
    return {(str(owner), name): value for owner in OWNERS for name, value in vars(owner).items()}


def _of(model: nn.Module) -> list[Any]:
    """All that is set on a model's parts, hooks included; what a container holds, by identity."""
    found: list[Any] = []
    for name, part in model.named_modules():
        for attribute, value in sorted(vars(part).items()):
            found.append((name, attribute, tuple(value) if isinstance(value, dict) else id(value)))
    return found


def _same(before: dict[Any, Any]) -> None:
    after = _globals()
    changed = [key for key, value in before.items() if key not in after or after[key] is not value]
    assert changed == []
    added = {key for key in after if key not in before and not key[1].startswith("__")}
    assert added <= {(str(nn.Parameter), "grad_sample")}


class Scaled(nn.Module):
    """No rule, dropout, a recurrent layer and a checkpoint; fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(6, 6), nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(6))])
        self.inner = Raw()
        self.fails = False

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        x = self.inner(checkpoint(self.inner, x, use_reentrant=True), self.fails)
        return self.last(self.lstm(x.unsqueeze(1))[0].squeeze(1))


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("told to")
        return F.dropout(x * self.scale, 0.1)


def _data(n: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.arange(n) % 3)


def _private(model: nn.Module, seed: int = 1, **options: Any) -> tuple[Any, ...]:
    return PrivacyEngine(seed=seed).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_data(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        expected_batch_size=6,
        **options,
    )


def _train(model: Any, optimizer: Any, loader: Any, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [True, False])
def test_everything_is_put_back_after_steps(wrap):
    _train(*_private(Scaled())[:3])  # what torch imports in a first step is there
    before, model = _globals(), Scaled()
    bare = _of(model)
    private, optimizer, loader = _private(model, wrap_model=wrap)
    made = _of(model)
    assert [entry for entry in made if entry not in bare] == [e for e in made if e[:2] == ("", "forward")]
    _train(private if wrap else model, optimizer, loader)
    _same(before)
    assert _of(model) == made
    private.cleanup()
    assert _of(model) == bare


def test_pieces_change_how_schedules_are_looked_up_and_nothing_else():
    before = _globals()
    model, optimizer, loader = _private(Scaled(), max_physical_batch_size=2)[:3]
    _train(model, optimizer, loader)
    changed = [key for key, value in _globals().items() if before.get(key) is not value and key[1][:2] == "__"]
    # Nothing where an earlier test has handed out pieces.
    assert set(changed) <= {(str(torch.optim.lr_scheduler.LRScheduler), "__getattribute__")}
    _same(before)


def test_everything_is_put_back_after_an_engines_steps():
    before, model = _globals(), Scaled()
    bare = _of(model)
    engine = Engine(model, losses, noise_multiplier=1.0, expected_batch_size=6)
    for _ in range(2):
        engine.privatize(*_data().tensors)
    _same(before)
    assert _of(model) == bare


def test_everything_is_put_back_after_errors():
    before, model = _globals(), Scaled()
    private, optimizer, _ = _private(model, check_batches=False)
    bare = _of(model)
    x, y = _data().tensors
    for fails in (True, False, True):
        model.fails = fails
        with pytest.raises(ValueError, match="told to") if fails else contextlib.nullcontext():
            private(x)
    model.fails = False
    assert _of(model) == bare
    _same(before)

    def refuse(grad):
        raise KeyError("in the backward pass")

    output = private(x)
    output.register_hook(refuse)
    with pytest.raises(KeyError):
        F.cross_entropy(output, y).backward()
    output = private(x)
    middle = F.cross_entropy(output, y)
    middle.backward()
    optimizer.step()
    assert _of(model) == bare
    _same(before)


class Meeting(nn.Module):
    """Waits for the others within its forward pass."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.first, self.last, self.meet = nn.Linear(6, 6), nn.Linear(6, 3), barrier.wait

    def forward(self, x):
        self.meet()
        output = self.last(checkpoint(self.first, x, use_reentrant=False))
        self.meet()
        return output


def _run(*works: Any) -> None:
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []


def test_checkpoints_of_other_threads_are_torchs_own():
    """Tapes are open on two threads, and close in another order than they were opened; a third one checkpoints."""
    before, barrier, calls = _globals(), threading.Barrier(3, timeout=60), []
    x, y = _data().tensors

    def private() -> None:
        engine = Engine(Meeting(barrier), losses, physical_batch_size=len(x), check_isolation=False)
        engine.clipped_sum(x, y)

    def own() -> None:
        layer = nn.Linear(6, 3)

        def called(rows: torch.Tensor) -> torch.Tensor:
            calls.append(len(rows))
            return layer(rows)

        for _ in range(2):  # the probe, and the pass
            barrier.wait()
            for reentrant in (True, False):
                checkpoint(called, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
            barrier.wait()

    with pytest.warns(UserWarning, match="check_isolation=False"):
        _run(private, private, own)
    assert len(calls) == 8  # every checkpointed call once more in its backward pass
    _same(before)
    rows = x.clone().requires_grad_()
    calls.clear()
    checkpoint(lambda v: calls.append(0) or v.sin(), rows, use_reentrant=False).sum().backward()
    assert len(calls) == 2


def test_threads_draw_their_own_noise_and_use_their_own_batches():
    """Each ends with the weights that it has when it trains alone."""

    def trained(seed: int) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-1.0, 1.0 + seed + k, p.numel()).reshape(p.shape))
        private, optimizer, loader = _private(model, seed)
        _train(private, optimizer, loader, epochs=10)
        assert optimizer.steps == 20
        return [p.detach().clone() for p in model.parameters()]

    alone = [trained(seed) for seed in range(4)]
    before = _globals()
    together: dict[int, list[torch.Tensor]] = {}
    _run(*(lambda seed=seed: together.update({seed: trained(seed)}) for seed in range(4)))
    _same(before)
    for seed in range(4):
        torch.testing.assert_close(together[seed], alone[seed], rtol=0, atol=0)
    assert not torch.equal(alone[0][0], alone[1][0])


def test_two_threads_in_one_model_are_refused():
    barrier, model, x = threading.Barrier(2, timeout=60), nn.Linear(6, 3), _data().tensors[0]
    with pytest.warns(UserWarning, match="check_isolation=False"):
        private, _, _ = _private(model, check_isolation=False)  # whose passes would meet, too
    private(x)  # the probe is behind us
    refusals: list[str] = []

    class Slow(torch.overrides.TorchFunctionMode):
        """Meets the other thread in the midst of the layer."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.linear:
                barrier.wait()
                barrier.wait()
            return func(*args, **(kwargs or {}))

    def first() -> None:
        with Slow():
            private(x)

    def second() -> None:
        barrier.wait()
        try:
            private(x)
        except dpcore.UnsupportedError as error:
            refusals.append(str(error))
        barrier.wait()

    _run(first, second)
    assert len(refusals) == 1 and "Two threads run one private model" in refusals[0]
    private(x)


def test_an_error_in_a_backward_pass_costs_no_other_step():
    _, model, optimizer, _ = make(check_batches=False)
    x, y = small_data()[:5]
    output = model(x)
    output.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(output, y).backward()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.steps == 1


def test_a_graph_whose_backward_pass_failed_is_not_used_again():
    _, model, optimizer, _ = make(check_batches=False)
    x, y = small_data()[:5]
    fails: list[bool] = []

    def once(module, gradients):
        if fails:
            fails.clear()
            raise KeyError("once")

    model._module[0].register_full_backward_pre_hook(once)
    loss = F.cross_entropy(model(x), y)
    fails.append(True)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    with pytest.raises(dpcore.PrivacyError, match="another one had failed"):
        loss.backward()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
