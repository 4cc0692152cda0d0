"""Lower precision, mixed precision and activation checkpointing: right to the precision of the arithmetic, and every
example's contribution within its bound, whatever the arithmetic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from dpcore import Engine, GradSampleModule, UnsupportedError, clipped_sum
from dpcore.optimizers import DPOptimizer
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import losses, make, small_data, small_model, step, truth

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    ),
    "sequence": lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 6), nn.GELU(), nn.Flatten(), nn.Linear(48, 3)),
}


def _data(n: int = 6):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


def _sums(model: nn.Module, x, y, bound: float, autocast: bool) -> dict[str, torch.Tensor]:
    """Clipped sums by the ordinary loop."""
    wrapped = GradSampleModule(model, ordinary_grad=False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(wrapped(x), y)
    loss.backward()
    optimizer.clip_and_accumulate()
    return {n: p.summed_grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["module", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_right_to_its_precision_and_keeps_the_bound(name, kind):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = _data()
    if kind == "module":
        model, x = model.bfloat16(), x.bfloat16()
    bound = 0.4
    expected = truth(model, x, y, bound)
    found = _sums(copy.deepcopy(model), x, y, bound, kind == "autocast")
    assert all(g.dtype == torch.float32 for g in found.values())
    assert relative_error(found, expected) < 0.05
    for i in range(len(x)):
        one = _sums(copy.deepcopy(model), x[i : i + 1], y[i : i + 1], bound, kind == "autocast")
        norm = torch.cat([g.double().flatten() for g in one.values()]).norm()
        assert 0.9 * bound < norm <= bound


def test_bfloat16_steps_train():
    torch.manual_seed(0)
    model = MODELS["mlp"]().bfloat16()
    x, y = _data(12)
    _, wrapped, optimizer, _ = make(model, max_grad_norm=5.0, expected_batch_size=12, check_batches=False)
    before = float(F.cross_entropy(model(x.bfloat16()), y))
    for _ in range(20):
        step(wrapped, optimizer, x.bfloat16(), y)
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert float(F.cross_entropy(model(x.bfloat16()), y)) < before - 0.3


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_a_scaled_loss_is_refused(mode, unscaled):
    """unscale_() divides p.grad, and no example's gradient: every example would be clipped at its scaled size."""
    _, wrapped, optimizer, _ = make(grad_sample_mode=mode, check_batches=False)
    x, y = small_data()[:5]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(wrapped(x), y)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)
    assert optimizer.steps == 0


def test_norms_of_bfloat16_gradients_do_not_cancel():
    """Two positions whose contributions nearly cancel: in bfloat16 the ghost norm of such a pair was exactly 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16()
    x = torch.randn(1, 1, 32).bfloat16().expand(1, 2, 32).contiguous()

    def loss(outputs, _):
        signs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
        return (outputs.float() * signs * torch.linspace(1, 1.001, 2).view(1, 2, 1) * 1e3).sum((1, 2))

    result = clipped_sum(model, loss, x, torch.zeros(1), 1.0)
    assert float(result.sums["0.weight"].double().norm()) <= 1.0


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, keywords: bool = False):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        hidden = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        hidden = checkpoint_sequential(self.middle, 2, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_activation_checkpointing(reentrant, mode):
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    x, y = small_data()[:5]
    expected = {n: g / 10 for n, g in truth(model, x, y).items()}
    _, wrapped, optimizer, _ = make(model, grad_sample_mode=mode, check_batches=False)
    step(wrapped, optimizer, x, y)
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12
    result = clipped_sum(wrapped.to_standard_module(), losses, x, y, 0.5)
    assert relative_error(result.sums, truth(model, x, y)) < 1e-12
    # Outside of private training, checkpointing is torch's again.
    runs = []
    handle = model.middle.register_forward_pre_hook(lambda *_: runs.append(1))
    F.cross_entropy(model(x), y).backward()
    handle.remove()
    assert len(runs) >= 2


def test_float64_and_float32_agree():
    x, y = small_data()[:5]
    model = small_model()
    exact = _sums(copy.deepcopy(model), x, y, 0.5, False)
    found = _sums(copy.deepcopy(model).float(), x.float(), y, 0.5, False)
    assert exact["0.weight"].dtype == torch.float64
    assert relative_error(found, exact) < 1e-5


@pytest.mark.parametrize("wrap", [True, False])
def test_a_module_that_is_compiled_after_it_was_made_private(wrap):
    model = small_model()
    x, y = small_data()[:5]
    expected = {n: g / 10 for n, g in truth(model, x, y).items()}
    _, wrapped, optimizer, _ = make(model, wrap_model=wrap, check_batches=False)
    step(torch.compile(wrapped if wrap else model, backend="eager"), optimizer, x, y)
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


class _Turned(nn.Module):
    """Weights that lie as [in, out], in the spellings of Hugging Face's Conv1D, of matrix products and of a view."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.weight = nn.Parameter(torch.randn(24, 16) / 4)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "addmm":
            return torch.addmm(self.bias, x.reshape(-1, 24), self.weight).view(*x.shape[:-1], 16)
        if self.spelling == "matmul":
            return torch.tanh(x @ self.weight) + self.bias
        return nn.functional.linear(x, self.weight.reshape(-1).view(24, 16).transpose(0, 1), self.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["addmm", "matmul", "views"])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (40, 24)])
def test_turned_weights_in_half_precision_keep_an_example_within_c(dtype, spelling, shape) -> None:
    def losses(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.float().flatten(1).pow(2).sum(1)

    torch.manual_seed(0)
    engine = Engine(_Turned(spelling).to(dtype), losses, max_grad_norm=0.5)
    for _ in range(8):
        x = torch.randn(1, *shape).to(dtype)
        sums = engine.clipped_sum(x, torch.zeros(1)).sums
        length = sum(s.double().square().sum() for s in sums.values()).sqrt()
        assert 0.5 * (1 - 1e-3) < float(length) <= 0.5 * (1 + 1e-6)


def test_leaving_out_one_of_many_examples_moves_a_half_precision_weights_sum_by_c_at_most() -> None:
    """Rounded to bfloat16, the sum of 2048 examples that agree moved by 2.6 C."""
    torch.manual_seed(0)
    model = _Turned("matmul").bfloat16()
    engine = Engine(model, lambda outputs, _: outputs.float().flatten(1).sum(1), max_grad_norm=0.5)
    x, y = (torch.randn(2048, 4, 24) * 0.3 + 1).bfloat16(), torch.zeros(2048)
    whole = {name: found.double().clone() for name, found in engine.clipped_sum(x, y).sums.items()}
    without = engine.clipped_sum(x[1:], y[1:]).sums
    moved = sum((whole[name] - without[name]).square().sum() for name in whole).sqrt()
    assert 0.5 * (1 - 1e-3) < float(moved) <= 0.5 * (1 + 1e-4)
