"""Gradients that are formed by products of bfloat16: right to that precision, no example above C however they round.

Here the products are forced on and taken at every size, whatever this processor has.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine, reference
from dpcore.microbatch import planner
from dpcore.rules import bfloat16
from dpcore.rules.linear import ContractionUse
from tests.dpcore.comparison import relative_error

RIGHT = 1e-2
"""By how much of itself a clipped sum may differ from float64's."""
ABOVE = 1 + 1e-6
"""How much of C an example may move the sum by."""


pytestmark = pytest.mark.filterwarnings("ignore:check_isolation=False")


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of bfloat16 on any processor and at any size, and gradients in turn of any size."""
    monkeypatch.setenv(bfloat16.SWITCH, "1")
    with mock.patch.object(bfloat16, "FEWEST_NUMBERS", 1), mock.patch.object(planner, "FEWEST_IN_TURN", 1):
        yield


@pytest.fixture
def taken() -> Iterator[mock.Mock]:
    """The products that are taken."""
    with mock.patch.object(bfloat16, "product", wraps=bfloat16.product) as product:
        yield product


class Words(nn.Module):
    """A small transformer: a tied table, attention by itself, a layer by its transposed weight, a norm."""

    def __init__(self, width: int = 16, words: int = 23) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.norm, self.queries = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up = nn.Parameter(torch.randn(width, 2 * width) * 0.2)
        self.bias = nn.Parameter(torch.zeros(2 * width))
        self.down = nn.Linear(2 * width, width, bias=False)
        init.normal_(self.table.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        q, k, v = self.queries(self.norm(h)).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        wide = torch.addmm(self.bias, h.reshape(-1, h.shape[-1]), self.up.to(h.dtype)).view(*ids.shape, -1)
        return F.linear(h + self.down(F.gelu(wide)), self.table.weight)


class Autocast(nn.Module):
    """A model under bfloat16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.model(x)
        return out.float()


def next_word(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), ids, reduction="none").mean(1)


def aligned(outputs: Tensor, y: Tensor) -> Tensor:
    """[B]: the gradient at an output is ``y``."""
    return (outputs.float() * y).flatten(1).sum(1)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


def linear_data(examples: int, positions: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(examples + positions)
    return (torch.randn(examples, positions, 24, generator=numbers) for _ in range(2))  # type: ignore[return-value]


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


def word_data(examples: int, positions: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(23, (examples, positions), generator=torch.Generator().manual_seed(examples + positions))
    return ids, ids


def length(tensors: dict[str, Tensor]) -> float:
    """The L2 norm of all tensors together, in float64."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def true(model: nn.Module, losses: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of the examples, in float64."""
    return list(reference.example_gradients(copy.deepcopy(model), losses, x, y))


def clipped(gradients: list[dict[str, Tensor]], bound: float) -> dict[str, Tensor]:
    return {n: sum(min(1.0, bound / length(g)) * g[n] for g in gradients) for n in gradients[0]}  # type: ignore[misc]


def named(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value.clone() for name, value in sums.items()}


CASES: dict[str, tuple[Any, ...]] = {
    "layers": (layers, linear_data, aligned),
    "transformer": (words, word_data, next_word),
}


@pytest.mark.parametrize("positions", [1, 3, 40, 120])
@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_the_float64_loop(case: str, positions: int, taken: mock.Mock) -> None:
    build, data, losses = CASES[case]
    model, (x, y) = build(), data(5, positions)
    gradients = true(model, losses, x, y)
    for share in (0.3, 1.0, 3.0):
        bound = share * sorted(map(length, gradients))[2]
        engine = Engine(Autocast(model), losses, max_grad_norm=bound, check_isolation=False)
        assert relative_error(named(engine.clipped_sum(x, y).sums), clipped(gradients, bound)) < RIGHT
        assert taken.called
        for i in range(5):
            alone = engine.clipped_sum(x[i : i + 1], y[i : i + 1]).sums
            assert length(alone) <= bound * ABOVE


def test_both_ways_of_forming_are_taken(taken: mock.Mock) -> None:
    """In turn, and all together where a gradient is small or a graph comes between."""
    model, (x, y) = layers(), linear_data(5, 80)
    gradients = true(model, aligned, x, y)
    bound = sorted(map(length, gradients))[2]
    for fewest, method in ((1, "turn"), (2**20, "keep")):
        with mock.patch.object(planner, "FEWEST_IN_TURN", fewest):
            engine = Engine(Autocast(model), aligned, max_grad_norm=bound, check_isolation=False)
            taken.reset_mock()
            sums = named(engine.clipped_sum(x, y).sums)
        assert f"0.weight: {method}" in engine.explain()
        assert taken.call_count == 2 * 5
        assert relative_error(sums, clipped(gradients, bound)) < RIGHT


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_physical_batches_do_not_change_the_sum(size: int) -> None:
    model, (x, y) = words(), word_data(7, 50)
    gradients = true(model, next_word, x, y)
    bound = sorted(map(length, gradients))[3]
    engine = Engine(Autocast(model), next_word, max_grad_norm=bound, check_isolation=False, physical_batch_size=size)
    assert relative_error(named(engine.clipped_sum(x, y).sums), clipped(gradients, bound)) < RIGHT


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "ghost"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_a_loop_of_ones_own(mode: str, case: str, taken: mock.Mock) -> None:
    build, data, losses = CASES[case]
    model, (x, y) = build(), data(4, 60)
    gradients = true(model, losses, x, y)
    norms = sorted(map(length, gradients))
    for bound, rows in ((norms[1], 4), (norms[0] / 2, 1)):
        one = Autocast(copy.deepcopy(model))
        made = PrivacyEngine().make_private(
            module=one,
            optimizer=torch.optim.SGD(one.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=rows),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            grad_sample_mode=mode,
            loss_reduction="sum",
            **({"criterion": Sum(losses)} if mode == "ghost" else {}),
        )
        private, optimizer, *criterion, loader = made
        for inputs, target in loader:
            loss = criterion[0](private(inputs), target) if criterion else losses(private(inputs), target).sum()
            loss.backward()
            optimizer.step()
        found = named({name.removeprefix("_module."): p.grad for name, p in private.named_parameters()})
        found = {name: value for name, value in found.items() if name in gradients[0]}
        assert relative_error(found, clipped(gradients[:rows], bound)) < RIGHT
        if rows == 1:
            assert length(found) <= bound * ABOVE
    assert taken.called


class Sum(nn.Module):
    """The sum of losses as a criterion."""

    def __init__(self, losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.losses, self.reduction = losses, "sum"

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        found = self.losses(outputs, y)
        return found if self.reduction == "none" else found.sum()


# ---- no example above C


def adds(x: Tensor, g: Tensor, bound: float, turned: bool = False) -> tuple[float, Tensor]:
    """The norm over C of what one example [T, p] with output gradients [T, d] adds to the sum, and the sum."""
    weight = torch.zeros(x.shape[1], g.shape[1]) if turned else torch.zeros(g.shape[1], x.shape[1])
    model = nn.Module()
    model.weight = nn.Parameter(weight.bfloat16())
    model.forward = lambda x: F.linear(x, model.weight.t() if turned else model.weight)  # type: ignore[method-assign]
    engine = Engine(model, aligned, max_grad_norm=bound, check_isolation=False)
    (found,) = engine.clipped_sum(x.bfloat16().unsqueeze(0), g.unsqueeze(0)).sums.values()
    return length({"": found}) / bound, found


def _hostile(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=numbers)
    made = {
        "normal": normal,
        "equal": torch.full(shape, 0.1),
        "huge": normal * 1e18,
        "tiny": normal * 1e-22,
        "subnormal": normal * 1e-39,
        "spread": normal.sign() * 10.0 ** (-12.0 * torch.rand(shape, generator=numbers)),
        "zero": torch.zeros(shape),
        "infinite": torch.where(normal > 1.5, torch.inf, normal),
        "nan": torch.where(normal > 1.5, torch.nan, normal),
        "cancelling": torch.cat([normal[: shape[0] // 2], -normal[: shape[0] - shape[0] // 2] * (1 + 2**-7)])[
            : shape[0]
        ],
    }
    return made[kind]


KINDS = ("normal", "equal", "huge", "tiny", "subnormal", "spread", "zero", "infinite", "nan", "cancelling")


@pytest.mark.parametrize("turned", [False, True])
@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.integers(1, 90),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 10**6),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
)
def test_no_hostile_example_adds_more_than_c(
    turned: bool, of_x: str, of_g: str, positions: int, d: int, p: int, seed: int, bound: float
) -> None:
    x, g = _hostile(of_x, (positions, p), seed), _hostile(of_g, (positions, d), seed + 1)
    added, found = adds(x, g, bound, turned)
    assert added <= ABOVE
    if not (x.bfloat16().isfinite().all() and g.isfinite().all()):
        assert not found.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_hostile_example_harms_no_other(value: float) -> None:
    """It goes through float64, the others once more in float32 beside it."""
    model, (x, y) = layers(), linear_data(5, 60)
    x[2] = value
    others = torch.tensor([0, 1, 3, 4])
    gradients = true(model, aligned, x[others], y[others])
    bound = sorted(map(length, gradients))[2]
    engine = Engine(Autocast(model), aligned, max_grad_norm=bound, check_isolation=False)
    whole = named(engine.clipped_sum(x, y).sums)
    assert all(s.isfinite().all() for s in whole.values())
    alone = named(engine.clipped_sum(x[2:3], y[2:3]).sums)
    assert length(alone) <= bound * ABOVE
    rest = {n: s.double() - alone[n] for n, s in whole.items()}
    assert relative_error(rest, clipped(gradients, bound)) < RIGHT


def test_a_gradient_beyond_bfloat16s_largest_number_is_taken_in_float64() -> None:
    """3.402e38 is finite in float32 and rounds to infinity here."""
    x, g = torch.full((1, 1), 1.4140625 * 2.0**63), torch.full((1, 1), 1.4140625 * 2.0**64)
    assert (x * g).isfinite() and bfloat16.product(x, g).isinf()
    added, found = adds(x, g, 1.0)
    assert 1 - 1e-5 < added <= ABOVE and found.isfinite().all()


@pytest.mark.parametrize("fewest", [1, 2**20], ids=["turn", "keep"])
@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_that_of_what_is_added(case: str, fewest: int) -> None:
    """However a product is rounded, also if each time otherwise: one that grows with every call gives nobody more."""
    build, data, losses = CASES[case]
    model, (x, y) = build(), data(1, 60)
    exact, calls = bfloat16.product, 0

    def growing(left: Tensor, right: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return exact(left, right) * (1.0 + calls)

    bound = length(true(model, losses, x, y)[0]) / 2
    with mock.patch.object(bfloat16, "product", growing), mock.patch.object(planner, "FEWEST_IN_TURN", fewest):
        engine = Engine(Autocast(model), losses, max_grad_norm=bound, check_isolation=False)
        for _ in range(3):
            assert 0.999 * bound < length(engine.clipped_sum(x, y).sums) <= bound * ABOVE
    assert calls


@pytest.mark.parametrize("per_layer", [False, True])
def test_leaving_an_example_out_moves_the_sum_by_c_at_most(per_layer: bool) -> None:
    """Beside 256 that agree with it: theirs are rounded alike with and without it."""
    model = nn.Linear(16, 24, bias=per_layer)
    x = (torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(1)) + 1).expand(257, -1, -1).contiguous()
    y = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(2)).expand(257, -1, -1).contiguous()
    bound = [0.3, 0.4] if per_layer else 0.5
    engine = Engine(Autocast(model), aligned, max_grad_norm=bound, check_isolation=False)
    whole = {n: s.double().clone() for n, s in engine.clipped_sum(x, y).sums.items()}
    without = engine.clipped_sum(x[1:], y[1:]).sums
    assert length({n: whole[n] - without[n].double() for n in whole}) <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("method", ["turn", "keep"])
def test_an_example_that_goes_through_float64_changes_no_others_rounding(method: str, value: float) -> None:
    """Beside 256 that are equal: formed in float32 once one example has to be, they would move the sum by their own."""
    model, (x, y) = nn.Linear(24, 24, bias=False), linear_data(1, 5)
    x, y = (t.expand(257, -1, -1).clone() for t in (x, y))
    x[3] = value
    others = torch.arange(257) != 3
    with mock.patch.object(planner, "FEWEST_IN_TURN", 1 if method == "turn" else 2**20):
        engine = Engine(Autocast(model), aligned, max_grad_norm=0.5, check_isolation=False)
        whole = named(engine.clipped_sum(x, y).sums)["weight"].double()
        without = named(engine.clipped_sum(x[others], y[others]).sums)["weight"].double()
        own = named(engine.clipped_sum(x[3:4], y[3:4]).sums)["weight"].double()
    assert engine.explain().startswith(f"model.weight: {method}")
    assert float(own.norm()) <= 0.5 * ABOVE
    assert float((whole - without - own).norm()) <= 0.5 * 1e-4


def test_the_longest_example_does_not_decide_how_others_are_formed() -> None:
    """Padded by zeros to any length, an example's gradient is formed the same way and hardly changes."""
    weight = nn.Parameter(torch.zeros(24, 16))
    numbers = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 1, 16, generator=numbers), torch.randn(2, 1, 24, generator=numbers).bfloat16()
    for padded in (1, 2, 30, 400):
        use = ContractionUse("layer", {weight: F.pad(x, (0, 0, 0, padded - 1))}, ())
        use.grad = F.pad(g, (0, 0, 0, padded - 1))
        assert not use.ghost_is_cheaper(weight)
        assert torch.equal(use.grad_sample(weight), (g.float().mT @ x.bfloat16().float()).bfloat16().float())


def test_an_engine_that_compiles_takes_none(taken: mock.Mock) -> None:
    """Its graphs have none, and an example that is doubtful sends the others of its piece back to the eager pass."""
    model, (x, y) = layers(), linear_data(4, 5)
    x[1] = torch.inf
    engine = Engine(Autocast(model), aligned, max_grad_norm=0.5, check_isolation=False, compile="eager")
    for _ in range(3):
        engine.clipped_sum(x, y)
    assert engine._sums.graphs is not None and engine._sums.graphs.sizes
    assert not taken.called


@pytest.mark.parametrize("time_major", [False, True])
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_an_examples_gradient_is_the_same_in_every_batch(
    time_major: bool, examples: int, positions: int, d: int, p: int, seed: int
) -> None:
    """Bit for bit, formed alone, in turn and with others: so it does not depend on who else is there."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (positions, examples) if time_major else (examples, positions)
    weight, x = nn.Parameter(torch.zeros(d, p)), torch.randn(*shape, p, generator=numbers)
    use = ContractionUse("layer", {weight: x}, (), time_major)
    use.grad = torch.randn(*shape, d, generator=numbers).bfloat16()
    together = use.grad_sample(weight)
    assert together.dtype == torch.float32 and together.shape == (examples, d, p)
    for i in range(examples):
        one = ContractionUse("layer", {weight: x.narrow(int(time_major), i, 1)}, (), time_major)
        one.grad = use.grad.narrow(int(time_major), i, 1)
        assert torch.equal(one.grad_sample(weight)[0], together[i])
        assert torch.equal(use.example(weight, i), together[i])
        written = torch.empty(d * p)
        found = use.write_example(weight, i, written)
        assert found is not None and torch.equal(written.view(d, p), together[i])
        norm_sq = float(written.double().square().sum())
        assert abs(float(found.value) - norm_sq) <= found.error * norm_sq


# ---- where it is done


def half_tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 256, 256, dtype=torch.bfloat16), torch.zeros(2, 256, 512, dtype=torch.bfloat16)


def test_it_is_off_without_the_hardware_and_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    g, x = half_tensors()
    monkeypatch.setattr(bfloat16, "FEWEST_NUMBERS", 2**15)
    for asked, supported, on in (("", True, True), ("", False, False), ("0", True, False), ("1", False, True)):
        monkeypatch.setenv(bfloat16.SWITCH, asked)
        bfloat16._has_units.cache_clear()
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda supported=supported: supported):
            assert bfloat16.takes(g, x) == on
    monkeypatch.delenv(bfloat16.SWITCH)
    bfloat16._has_units.cache_clear()
    with mock.patch.object(torch.cpu, "_is_amx_tile_supported", None):
        assert not bfloat16.takes(g, x)
    bfloat16._has_units.cache_clear()
    with pytest.raises(ValueError, match=r"DPCORE_BFLOAT16 is 'yes': say 0 or 1"):
        monkeypatch.setenv(bfloat16.SWITCH, "yes")
        bfloat16.takes(g, x)


def test_it_takes_no_other_precision_no_small_product_and_no_traced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    g, x = half_tensors()
    assert bfloat16.takes(g, x) and bfloat16.takes(g, x.float())
    assert not bfloat16.takes(g.float(), x) and not bfloat16.takes(g.half(), x.half())
    assert not bfloat16.takes(g, x.double())
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        assert not bfloat16.takes(g, x)
    torch.func.vmap(lambda _: _not_taken(g, x))(torch.zeros(3))
    monkeypatch.setattr(bfloat16, "FEWEST_NUMBERS", 2**15)
    assert not bfloat16.takes(g[..., :128], x[..., :255])


def _not_taken(g: Tensor, x: Tensor) -> Tensor:
    assert not bfloat16.takes(g, x)
    return torch.zeros(())


def test_float32_models_and_switched_off_ones_take_none(monkeypatch: pytest.MonkeyPatch, taken: mock.Mock) -> None:
    model, (x, y) = layers(), linear_data(3, 60)
    Engine(copy.deepcopy(model), aligned, max_grad_norm=0.5).clipped_sum(x, y)
    monkeypatch.setenv(bfloat16.SWITCH, "0")
    Engine(Autocast(model), aligned, max_grad_norm=0.5).clipped_sum(x, y)
    assert not taken.called


def _has_shapes_of_typed_products() -> bool:
    """Whether this torch knows what a product of another type than its factors' looks like; torch 2.9 does not."""
    empty = torch.empty(1, 1, device="meta")
    try:
        torch.ops.aten.mm.dtype(empty, empty, torch.float32)
    except (AttributeError, NotImplementedError, TypeError):
        return False
    return True


@pytest.mark.skipif(not _has_shapes_of_typed_products(), reason="this torch's products have one type, or no shapes")
def test_on_cuda_products_return_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and types alone: this machine has no GPU."""
    left, right = torch.empty(9, 4, device="meta"), torch.empty(9, 6, device="meta")
    monkeypatch.setattr(bfloat16, "_returns_float32", lambda device: True)
    found = bfloat16.product(left, right)
    assert found.shape == (4, 6) and found.dtype == torch.float32


def test_a_device_that_cannot_return_float32_is_not_asked_to() -> None:
    """The trial's tensors lie on the CPU, whose products cannot."""
    trial = bfloat16._returns_float32.__wrapped__
    with mock.patch.object(torch, "ones", lambda *shape, dtype, device: torch.full(shape, 1.0, dtype=dtype)):
        assert not trial(torch.device("cuda"))
    assert not trial(torch.device("cpu"))
