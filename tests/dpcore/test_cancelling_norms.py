"""Examples whose positions have nearly independent gradients: their norms by products of positions mostly cancel."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore import Engine, PrivacyEngine, native, reference
from dpcore.microbatch.accumulator import Accumulator
from tests.dpcore import exactness
from tests.dpcore.comparison import relative_error
from tests.dpcore.exactness import PATHS, Path
from tests.dpcore.test_exactness import FORMED, NORMS, SUMS

WIDTH, WORDS = 48, 60
pytestmark = pytest.mark.usefixtures("compiled")


class Language(nn.Module):
    """Words, a block with attention by torch's own layer, and a head: each position has a target of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(self.norm(h))


def losses(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), y[:, 0], reduction="none").mean(1) * y[:, 1, 0]


def build() -> nn.Module:
    torch.manual_seed(3)
    return Language()


def batch(size: int, length: int = 20, seed: int = 0, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids, and targets with a weight for each example's loss."""
    numbers = torch.Generator().manual_seed(seed)
    ids, y = (torch.randint(WORDS, (size, length), generator=numbers) for _ in range(2))
    weights = torch.ones(size) if weights is None else weights
    return ids, torch.stack([y, weights.long().view(-1, 1).expand_as(y)], 1)


def without_kernels(really: bool) -> AbstractContextManager[None]:
    return native.disabled() if really else nullcontext()


def plan(engine: Engine) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in engine.explain().splitlines())


@pytest.mark.parametrize("kernels", [True, False])
def test_a_language_model_is_not_done_in_float64(kernels: bool, compiled: bool) -> None:
    if kernels and not compiled:
        pytest.skip("no C++ compiler here to build the kernels with")
    ids, y = batch(6)
    singly = mock.patch.object(Accumulator, "_add_singly", side_effect=AssertionError)
    with without_kernels(not kernels), singly:
        engine = Engine(build(), losses, max_grad_norm=0.1)
        engine.clipped_sum(ids, y)
    assert plan(engine)["head.weight"] == "ghost"  # or nothing here is tested


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 5),
    length=st.integers(1, 24),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.3, 1.0, 3.0]),
    masked=st.booleans(),
    kernels=st.booleans(),
)
def test_the_sum_is_the_loops(size: int, length: int, seed: int, share: float, masked: bool, kernels: bool) -> None:
    model, (ids, y) = build(), batch(size, length, seed)
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.rand(size, generator=numbers) < 0.6 if masked else torch.ones(size, dtype=torch.bool)
    gradients = list(reference.example_gradients(copy.deepcopy(model), losses, ids, y))
    norms = torch.stack([reference.norm(g) for g in gradients])
    bound = share * float(norms.median())
    with without_kernels(not kernels):
        engine = Engine(model, losses, max_grad_norm=bound, check_isolation=False)
        result = engine.clipped_sum(ids, y, mask)
    torch.testing.assert_close(result.norms[mask].double(), norms[mask], rtol=1e-5, atol=0)
    assert bool((result.factors.double() <= mask * (bound / norms).clamp(max=1.0) * (1 + 1e-6)).all())
    assert bool((result.factors.double() >= mask * (bound / norms).clamp(max=1.0) * (1 - 2e-4)).all())
    truth = {n: sum(f * g[n] for f, g in zip(result.factors.double(), gradients, strict=True)) for n in gradients[0]}
    assert relative_error(result.sums, truth) < 1e-5


@pytest.mark.parametrize("share", [0.5, 0.999, 1.0])
@pytest.mark.parametrize("kernels", [True, False])
def test_no_example_adds_more_than_the_bound(share: float, kernels: bool) -> None:
    model, (ids, y) = build(), batch(1)
    (gradient,) = reference.example_gradients(copy.deepcopy(model), losses, ids, y)
    bound = share * float(reference.norm(gradient))
    with without_kernels(not kernels):
        sums = Engine(model, losses, max_grad_norm=bound, check_isolation=False).clipped_sum(ids, y).sums
    assert float(reference.norm({name: value.double() for name, value in sums.items()})) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("path", [p for p in PATHS if p.cancels], ids=lambda path: path.name)
def test_positions_that_cancel_moderately(path: Path, compiled: bool) -> None:
    """Of a sum that is a tenth of its terms: too little for products of positions, enough to be formed."""
    if path.compiled and not compiled:
        pytest.skip("no C++ compiler here to build the kernels with")
    # It goes another way than that whose name the path has.
    with mock.patch.object(exactness, "check_path"):
        errors = exactness.measure(path, 10.0)
    assert errors.overshoot <= 0.0
    assert errors.norms <= NORMS + 10.0 * FORMED
    assert errors.sum <= SUMS + 10.0 * FORMED


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 1e30])
def test_an_extreme_example_changes_nothing_about_the_others(weight: float) -> None:
    """What is done with an example depends on its own numbers alone, also where another one has none."""

    def weighted(scores: Tensor, y: Tensor) -> Tensor:
        own = losses(scores, y)
        return torch.where(y[:, 1, 0] == 0, scores.sum((1, 2)) * weight, own)

    def run(keep: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        ids, y = batch(5, weights=torch.tensor([1, 1, 0, 1, 1]))
        engine = Engine(build(), weighted, max_grad_norm=0.5, check_isolation=False)
        found = engine.clipped_sum(ids[keep], y[keep])
        return {name: value.clone() for name, value in found.sums.items()}, found.factors

    all_sums, factors = run([0, 1, 2, 3, 4])
    sums, of_others = run([0, 1, 3, 4])
    torch.testing.assert_close(factors[[0, 1, 3, 4]], of_others, rtol=1e-6, atol=0)
    if weight == 1e30:  # finite: clipped like every other one
        one, _ = run([2])
        sums = {name: value + one[name] for name, value in sums.items()}
    else:
        assert float(factors[2]) == 0.0
    assert relative_error(all_sums, sums) < 1e-6


def test_each_group_of_parameters_has_its_bound() -> None:
    model, (ids, y) = build(), batch(3)
    bounds = [0.01 * (k + 1) for k, _ in enumerate(model.parameters())]
    sums = Engine(model, losses, max_grad_norm=bounds, check_isolation=False).clipped_sum(ids, y).sums
    gradients = list(reference.example_gradients(copy.deepcopy(model), losses, ids, y))
    truth = {}
    for (name, _), bound in zip(model.named_parameters(), bounds, strict=True):
        each = [g[name] for g in gradients]
        truth[name] = sum(min(1.0, bound / float(g.norm())) * g for g in each)
    assert relative_error(sums, truth) < 2e-4


def test_the_two_line_loop_does_the_same() -> None:
    (ids, y), found = batch(4), []
    for two_lines in (True, False):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        if two_lines:
            data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, y), batch_size=4)
            options = {"noise_multiplier": 0.0, "max_grad_norm": 0.1, "poisson_sampling": False}
            model, optimizer, loader = PrivacyEngine().make_private(
                module=model, optimizer=optimizer, data_loader=data, **options
            )
            for of_x, of_y in loader:
                losses(model(of_x), of_y).mean().backward()
                optimizer.step()
        else:
            Engine(model, losses, max_grad_norm=0.1, expected_batch_size=4, optimizer=optimizer).step(ids, y)
        found.append({n.removeprefix("_module."): p.detach().clone() for n, p in model.named_parameters()})
    assert relative_error(found[0], found[1]) < 1e-6
