"""No example contributes more than C, in the real numbers: norms are upper bounds at every size and in every path.

The released float32 sums of one example without noise are squared and added up in float64, and the result is compared
with C itself, without any tolerance.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine, native
from dpcore.clipping import automatic_factors
from dpcore.grad_sample import register_grad_sampler, register_norm_sampler
from dpcore.numerics.precision import full_precision, is_lowered
from dpcore.numerics.rounding import gamma, gram, gram_roundings, squares
from dpcore.rules.convolution import ConvolutionUse
from dpcore.rules.custom import GRAD_SAMPLERS, NORM_SAMPLERS
from dpcore.rules.linear import ContractionUse, add_contraction, contraction_norm_sq
from tests.dpcore.exactness import First, OwnScale, Reused, WeightedBag, aligned

pytestmark = pytest.mark.usefixtures("compiled")

C = 1e-3


def length(tensors: list[Tensor]) -> float:
    """The L2 norm of all tensors together, in float64."""
    return math.sqrt(math.fsum(float(np.square(t.detach().double().numpy()).sum()) for t in tensors))


def released(model: nn.Module, x: Tensor, y: Tensor, bound: float = C, **options: object) -> float:
    """The norm over C of what one example moves the engine's sum by."""
    return length(list(Engine(model, aligned, max_grad_norm=bound, **options).clipped_sum(x, y).sums.values())) / bound


def moved(model: nn.Module, x: Tensor, y: Tensor, mode: str, bound: float = C, **options: object) -> float:
    """The norm over C of what one step of the two-line use makes of one example, without noise."""
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **options,
    )
    for one, target in loader:
        aligned(model(one), target).sum().backward()
        optimizer.step()
    total = math.hypot(*bound) if isinstance(bound, list) else bound
    return length([p.grad for p in model.parameters()]) / total


# ---- size


@pytest.mark.parametrize("size", [10**8, 10**7 + 19, 128, 1040, 16384, 99_991])
def test_norms_of_up_to_a_hundred_million_numbers(size: int) -> None:
    """The bound holds and is small, for lengths without a divisor, too. In one float32 sum 10^8 came out 2 % too
    small."""
    row = torch.full((1, size), 1e-3)
    found = squares(row)
    truth = float(row[0, 0].double()) ** 2 * size
    assert abs(float(found.value) - truth) <= found.error * truth
    assert found.error < 2e-5


class Table(nn.Module):
    """A kept parameter of any size: every example's gradient is its own ``y``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


@pytest.mark.parametrize("size", [3 * 10**7])
def test_an_example_of_many_parameters_contributes_at_most_its_share(size: int) -> None:
    assert 0.9999 < released(Table(size), torch.zeros(1, size), torch.full((1, size), 1e-3)) <= 1.0


@pytest.mark.parametrize("positions", [1, 64, 220])
@pytest.mark.parametrize("mode", ["engine", "bookkeeping", "hooks"])
def test_a_large_linear_layer_moves_by_at_most_its_share(mode: str, positions: int) -> None:
    """3072 x 3072, where vector_norm moved it by 1.00027 C: at 220 positions the gradient is kept, at 64 it is not."""
    torch.manual_seed(0)
    model, x = nn.Linear(3072, 3072, bias=False), torch.randn(1, positions, 3072)
    y = 1e-3 * torch.randn(1, positions, 3072)
    found = released(model, x, y) if mode == "engine" else moved(model, x, y, mode)
    assert 0.9999 < found <= 1.0


# ---- the reductions themselves


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 10**6), st.floats(-25, 15), st.floats(0, 12))
def test_gram_matrices_keep_to_their_bound(width: int, seed: int, exponent: float, spread: float) -> None:
    rows = _spread((2, 5, width), seed, spread) * 10.0**exponent
    exact, found = rows.double(), gram(rows).double()
    truth = exact @ exact.transpose(1, 2)
    lengths = exact.square().sum(-1).sqrt()
    limit = gamma(gram_roundings(width), torch.float32) * lengths.unsqueeze(1) * lengths.unsqueeze(2)
    assert ((found - truth).abs() <= limit + width * 2.0**-149).all()


@pytest.mark.parametrize("compiled", [True, False])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 10**6), st.floats(-9, 5), st.floats(0, 6))
def test_norms_of_linear_maps_keep_to_their_bound(
    compiled: bool, rows: int, columns: int, seed: int, exponent: float, spread: float
) -> None:
    """What is added for an example is at most what its norm says: by the kernel, where it is there, and purely."""
    g, x = _spread((2, 9, rows), seed, spread) * 10.0**exponent, _spread((2, 9, columns), seed + 1, spread)
    with nullcontext() if compiled else native.disabled():
        found = contraction_norm_sq(g, x)
        assert found.scale is not None
        upper = (found.value + found.error * found.scale) * (1.0 + gamma(8, torch.float32))
        for i in range(2):
            added = torch.zeros(rows, columns)
            add_contraction(g, x, torch.eye(2)[i], added)
            assert float(added.double().square().sum()) <= float(upper[i])
            truth = g[i].double().t() @ x[i].double()
            assert float(truth.square().sum()) <= float(upper[i])


def test_bounds_stay_small_at_every_size() -> None:
    assert gamma(gram_roundings(4096) * 2 + 2 * 4096 + 4, torch.float32) < 6e-4
    assert gamma(gram_roundings(10**6), torch.float32) < 2e-4
    assert gamma(10**9, torch.float64) < 2e-7
    assert gamma(2**24, torch.float32) == math.inf


def _spread(shape: tuple[int, ...], seed: int, decades: float) -> Tensor:
    """Numbers of both signs whose sizes are spread over so many decades; none at all: all equal."""
    generator = torch.Generator().manual_seed(seed)
    if decades == 0.0:
        return torch.full(shape, 0.1)
    sizes = 10.0 ** (-decades * torch.rand(shape, generator=generator))
    return sizes * torch.randn(shape, generator=generator).sign()


# ---- every path


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("cancelling", [False, True])
def test_a_linear_map_of_a_hundred_million_weights_keeps_the_bound(half: bool, cancelling: bool) -> None:
    """By norms without the gradient, and by the example's own float64 gradient where positions cancel."""
    torch.manual_seed(0)
    model, x, signs = nn.Linear(10_000, 10_000, bias=False), torch.randn(2, 8, 10_000), torch.ones(8, 1)
    if cancelling:
        x[:, 1::2] = x[:, ::2] + 1e-2 * torch.randn(2, 4, 10_000)
        signs[1::2] = -1.0
    engine = Engine(model, lambda outputs, _: (outputs.float() * signs).sum((1, 2)), max_grad_norm=1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        (released,) = engine.clipped_sum(x[:1], torch.zeros(1)).sums.values()
    norm = math.sqrt(sum(float(row.double().square().sum()) for row in released.split(1000)))
    assert 0.99 < norm <= 1.0


class Mean(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.long()).mean(1)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(7, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.long())


class Weighted(nn.Module):
    """Ids in the first half of x, weights in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = WeightedBag(9, 24)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = x.chunk(2, 1)
        return self.bag(torch.stack([ids.abs().mul(1e6).long().remainder(9).to(x.dtype), weights], 1))


class Twice(nn.Module):
    """A bilinear layer of x and x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(12, 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def _last(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``memory_format=torch.channels_last``."""
    return lambda: layer().to(memory_format=torch.channels_last)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one position": (lambda: nn.Linear(700, 9), (700,)),
    "ghost norm": (lambda: nn.Linear(300, 200), (6, 300)),
    "ghost norm, many positions": (lambda: nn.Linear(1100, 900), (70, 1100)),
    "kept": (lambda: nn.Linear(30, 20), (120, 30)),
    "kept, very many positions": (lambda: nn.Linear(30, 20), (4096, 30)),
    "used twice": (lambda: Reused(nn.Linear(30, 20)), (6, 30)),
    "convolution, ghost norm": (lambda: nn.Conv2d(24, 40, 3, padding=1), (24, 4, 4)),
    "convolution, kept": (lambda: nn.Conv2d(4, 8, 3), (4, 18, 18)),
    "convolution, channels last": (_last(lambda: nn.Conv2d(4, 8, 3)), (4, 18, 18)),
    "convolution, channels last, ghost norm": (_last(lambda: nn.Conv2d(24, 40, 3)), (24, 4, 4)),
    "convolution in groups": (lambda: nn.Conv2d(24, 48, 3, groups=2), (24, 4, 4)),
    "convolution, one dimension": (lambda: nn.Conv1d(24, 64, 5, stride=2), (24, 9)),
    "layer norm": (lambda: nn.LayerNorm(50), (9, 50)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (8, 5, 5)),
    "bilinear": (Twice, (12,)),
    "bilinear, ghost norm": (Twice, (3, 12)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), (5, 16)),
    "LSTM": (lambda: First(nn.LSTM(10, 12, batch_first=True)), (7, 10)),
    "GRU": (lambda: First(nn.GRU(10, 12, batch_first=True)), (7, 10)),
    "no rule": (lambda: OwnScale(60, by_rule=False), (9, 60)),
    "embedding": (Looked, (30,)),
    "embedding, averaged": (lambda: Mean(nn.Embedding(7, 40)), (30,)),
    "embedding bag": (Weighted, (16,)),
}
IDS = ("embedding", "embedding, averaged")


HARD = dict(seed=st.integers(0, 10**6), decades=st.sampled_from([0.0, 0.5, 3.0, 9.0]), size=st.floats(-6, 6))


def _batch(case: str, seed: int, decades: float, size: float) -> tuple[nn.Module, Tensor, Tensor]:
    """One example with all inputs equal, or spread over decades, and likewise the gradients at its outputs."""
    torch.manual_seed(seed)
    make, shape = CASES[case]
    model = make()
    x = torch.randint(0, 7, (1, *shape)).float() if case in IDS else _spread((1, *shape), seed, decades) * 10.0**size
    y = _spread(tuple(model(x).shape), seed + 1, decades) * 10.0 ** (3.0 - size)
    return model, x, y


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, deadline=None)
@given(**HARD)
def test_an_example_contributes_at_most_its_share(
    case: str, kernels: str, seed: int, decades: float, size: float
) -> None:
    """With the compiled kernels where there is a compiler, and without."""
    with nullcontext() if kernels == "compiled" else native.disabled():
        model, x, y = _batch(case, seed, decades, size)
        norm = float(Engine(model, aligned, max_grad_norm=1e30).clipped_sum(x, y).norms)
        for bound in (C, max(1e-8, norm * (1.0 - 1e-7)), max(1e-8, norm)):
            assert released(model, x, y, bound) <= 1.0
            assert released(model, x, y, bound, factors=automatic_factors) <= 1.0


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4, deadline=None)
@given(**HARD)
def test_a_step_moves_by_at_most_its_share(case: str, mode: str, seed: int, decades: float, size: float) -> None:
    assert moved(*_batch(case, seed, decades, size), mode) <= 1.0


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4, deadline=None)
@given(**HARD)
def test_every_parameter_contributes_at_most_its_share(case: str, seed: int, decades: float, size: float) -> None:
    model, x, y = _batch(case, seed, decades, size)
    bounds = [C * (1 + k) for k, _ in enumerate(model.parameters())]
    engine = Engine(model, aligned, max_grad_norm=bounds)
    for bound, summed in zip(bounds, engine.clipped_sum(x, y).sums.values(), strict=True):
        assert length([summed]) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["one position", "ghost norm", "kept", "convolution, ghost norm", "no rule"])
def test_half_precision_contributes_at_most_its_share(case: str, dtype: torch.dtype) -> None:
    for seed, decades in ((0, 0.0), (1, 1.0), (2, 2.0)):
        model, x, y = _batch(case, seed, decades, 0.0)
        assert 0.9 < released(model.to(dtype), x.to(dtype), y.to(dtype) / 100) <= 1.0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (3, 2), (1, 1)])
def test_a_convolution_summed_by_a_product(memory_format: torch.memory_format, kernel: int, groups: int) -> None:
    """What a GPU goes by gives what the convolution's own backward pass gives."""
    torch.manual_seed(0)
    weight = torch.randn(6, 4 // groups, kernel, kernel).to(memory_format=memory_format)
    x, grad = torch.randn(5, 4, 7, 7).to(memory_format=memory_format), torch.randn(5, 6, 4, 4)
    last = memory_format == torch.channels_last
    use = ConvolutionUse("layer", x, weight, (), (2, 2), (kernel // 2,) * 2, (1, 1), groups, last)
    use.grad, factors, out = grad, torch.rand(5), torch.zeros_like(weight)
    use.add_clipped_sum(weight, factors, out)
    torch.testing.assert_close(use._summed(grad * factors.view(-1, 1, 1, 1)), out)


# ---- rules of the user's


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_norm_sampler_is_not_asked_in_half_precision() -> None:
    """Its layer's own backward pass would round every factor to 8 bits, and release up to 1.004 C."""
    asked = []

    @register_norm_sampler(Scaled)
    def norms(layer: Scaled, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        asked.append(backprops.dtype)
        return {layer.weight: (activations[0] * backprops).flatten(1).double().norm(dim=1)}

    @register_grad_sampler(Scaled)
    def gradients(layer: Scaled, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        return {layer.weight: activations[0] * backprops}

    try:
        for seed in range(20):
            x, y = _spread((1, 40), seed, 1.0), _spread((1, 40), seed + 1, 1.0)
            assert 0.9 < released(Scaled().bfloat16(), x.bfloat16(), y.bfloat16()) <= 1.0
        assert not asked
        assert released(Scaled(), x, y) <= 1.0 and asked
    finally:
        del NORM_SAMPLERS[Scaled], GRAD_SAMPLERS[Scaled]


# ---- lowered precision of products


@pytest.fixture
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_norms_and_clipped_sums_are_in_full_precision(medium: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, TF32 puts ghost norms off by 1e-3; the user's setting holds for the passes, and afterwards."""
    seen = []
    norm_sq, add = ContractionUse.norm_sq, ContractionUse.add_clipped_sum

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            seen.append(is_lowered())
            return function(*args)

        return call

    monkeypatch.setattr(ContractionUse, "norm_sq", watched(norm_sq))
    monkeypatch.setattr(ContractionUse, "add_clipped_sum", watched(add))
    model, x, y = _batch("ghost norm", 0, 1.0, 0.0)
    assert released(model, x, y) <= 1.0
    assert seen and not any(seen)
    assert is_lowered() and torch.get_float32_matmul_precision() == "medium"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
def test_the_newer_setting_is_put_back() -> None:
    """With it, what asks for the older one is refused by torch."""
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "bf16"
    try:
        model, x, y = _batch("kept", 0, 1.0, 0.0)
        assert released(model, x, y) <= 1.0
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = "none"


def test_threads_do_not_take_the_precision_from_each_other(medium: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with full_precision():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with full_precision():
        leave.set()
        thread.join()
        assert not is_lowered()
    assert is_lowered()
