"""Every way in which people write a layer with parameters of its own has a rule, in batches of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpcore
from dpcore import Engine, clipped_sum, reference
from dpcore.reference import norm
from tests.dpcore.comparison import check, check_private, has_rules, odd_loss, relative_error

STEPS, WIDTH = 5, 8


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 3)


class Spelling(nn.Module):
    """A layer, then ``compute(self, h, ...)`` with the parameters ``w``, ``b`` and ``s``, then another layer."""

    def __init__(self, compute: Any, w: tuple[int, ...] = (WIDTH, WIDTH)) -> None:
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
        self.w, self.b, self.s = table(*w), table(WIDTH), table(WIDTH)
        self.register_buffer("places", (torch.arange(STEPS)[:, None] - torch.arange(STEPS)) % WIDTH)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """X [B, STEPS, 3]."""
        h = self.compute(self, self.first(x))
        return self.last(torch.tanh(h)).mean(1)


def flat(m: Any, h: Tensor) -> Tensor:
    return torch.addmm(m.b, h.view(-1, WIDTH), m.w).view(*h.shape[:-1], WIDTH)


def flat_through_a_layer(m: Any, h: Tensor) -> Tensor:
    rows = F.gelu(m.inner(h.reshape(-1, WIDTH))) * m.s
    return (rows + h.reshape(-1, WIDTH)).reshape(h.shape)


def windows(m: Any, h: Tensor) -> Tensor:
    pairs = h.view(len(h), STEPS, 2, WIDTH // 2).permute(0, 2, 1, 3).reshape(-1, STEPS, WIDTH // 2)
    pairs = F.scaled_dot_product_attention(pairs, pairs, pairs @ m.w) * m.s[: WIDTH // 2]
    return pairs.view(len(h), 2, STEPS, WIDTH // 2).permute(0, 2, 1, 3).reshape(h.shape)


class Own(list[Tensor]):
    """A list of the user's own class."""


def rms_norm(m: Any, h: Tensor) -> Tensor:
    return m.s * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6))


def biases(m: Any, h: Tensor) -> Tensor:
    return (h @ h.transpose(1, 2) + m.s[m.places]).softmax(-1) @ h


def masked_biases(m: Any, h: Tensor) -> Tensor:
    seen = h.detach()[:, :, :1] < 2.0
    mask = torch.where(seen.transpose(1, 2), m.s[m.places].unsqueeze(0), -5.0).unsqueeze(1)
    return F.scaled_dot_product_attention(*[h.unsqueeze(1)] * 3, attn_mask=mask).squeeze(1)


def masked(m: Any, h: Tensor) -> Tensor:
    h = m.inner(h) + 0.0
    h[h[..., 0] > 0] = m.s  # as speech models hide spans of their input
    return torch.tanh(h)


SPELLINGS: dict[str, Any] = {
    "a parameter where a mask is": masked,
    "x @ W": lambda m, h: h @ m.w,
    "matmul": lambda m, h: torch.matmul(h, m.w.t()),
    "W @ x": lambda m, h: (m.w @ h.transpose(1, 2)).transpose(1, 2),
    "addmm of flattened positions": flat,
    "flattened through layers": flat_through_a_layer,
    "windows": windows,
    "a scale after a norm by hand": rms_norm,
    "one plus a scale": lambda m, h: h * (1.0 + m.s.float()).to(h.dtype),
    "divided by a scale": lambda m, h: h / (2.0 + m.s.square()),
    "minus a vector": lambda m, h: h - m.b,
    "a vector minus it": lambda m, h: m.b - h,
    "in place": lambda m, h: h.clone().mul_(m.s).add_(m.b),
    "positions cut to length": lambda m, h: h + m.w[:STEPS],
    "parameters in a list of an own class": lambda m, h: h * torch.stack(Own([m.b, m.s])).sum(0),
    "a class token": lambda m, h: torch.cat([m.b.expand(len(h), 1, -1), h], 1),
    "biases by place": biases,
    "masked biases": masked_biases,
    "a product of two weights": lambda m, h: F.linear(h, m.w @ m.inner.weight, m.b),
    "a standardised weight": lambda m, h: F.linear(h, (m.w - m.w.mean(1, keepdim=True)) / m.w.std(1, keepdim=True)),
    "a weight used twice": lambda m, h: F.linear(torch.tanh(h @ m.w), m.w),
    "a layer of constants": lambda m, h: h + m.inner(torch.eye(STEPS, WIDTH, dtype=h.dtype)),
    "several heads": lambda m, h: (h.unsqueeze(1) @ m.w.view(2, WIDTH, WIDTH // 2)).transpose(1, 2).reshape(h.shape),
    "a table copied for every example": lambda m, h: torch.bmm(h, m.w.view(1, WIDTH, WIDTH).expand(len(h), -1, -1)),
}
SHAPES = {"windows": (WIDTH // 2, WIDTH // 2)}
EINSUMS: dict[str, Any] = {
    "btd,de->bte": lambda m, h: torch.einsum("btd,de->bte", h, m.w),
    "btd,ed->bte": lambda m, h: torch.einsum("btd,ed->bte", h, m.w),
    "de,btd->bte": lambda m, h: torch.einsum("de,btd->bte", m.w, h),
    "b,t,d in capitals, with blanks": lambda m, h: torch.einsum(" B T D , D E -> B T E ", h, m.w),
    "bd,de->be": lambda m, h: h + torch.einsum("bd,de->be", h.sum(1), m.w).unsqueeze(1),
    "nd,de->ne": lambda m, h: torch.einsum("nd,de->ne", h.reshape(-1, WIDTH), m.w).view(h.shape),
    "btd,dhk->bthk": lambda m, h: torch.einsum("btd,dhk->bthk", h, m.w.view(WIDTH, 2, WIDTH // 2)).reshape(h.shape),
    "btd,dhk->bhtk": lambda m, h: (
        torch.einsum("btd,dhk->bhtk", h, m.w.view(WIDTH, 2, WIDTH // 2)).transpose(1, 2).reshape(h.shape)
    ),
    "btd,hdk->btkh": lambda m, h: torch.einsum("btd,hdk->btkh", h, m.w.view(2, WIDTH, WIDTH // 2)).reshape(h.shape),
    "bthk,hkd->btd": lambda m, h: torch.einsum(
        "bthk,hkd->btd", h.view(*h.shape[:2], 2, WIDTH // 2), m.w.view(2, WIDTH // 2, WIDTH)
    ),
    "bthk,dkh->btd": lambda m, h: torch.einsum(
        "bthk,dkh->btd", h.view(*h.shape[:2], 2, WIDTH // 2), m.w.view(WIDTH, WIDTH // 2, 2)
    ),
    "nhk,hkd->nd": lambda m, h: torch.einsum(
        "nhk,hkd->nd", h.reshape(-1, 2, WIDTH // 2), m.w.view(2, WIDTH // 2, WIDTH)
    ).view(h.shape),
    "btd,d->bt": lambda m, h: h + torch.einsum("btd,d->bt", h, m.s).unsqueeze(-1),
    "...d,de->...e": lambda m, h: torch.einsum("...d,de->...e", h, m.w),
    "b...d,ed->b...e": lambda m, h: torch.einsum("b...d,ed->b...e", h, m.w),
    "without an arrow": lambda m, h: torch.einsum("btk,kz", h, m.w),
    "dots without an arrow": lambda m, h: torch.einsum("...k,kz", h, m.w),
    "operands in a list": lambda m, h: torch.einsum("btd,de->bte", [h, m.w]),
    "tensordot": lambda m, h: torch.tensordot(h, m.w, dims=1),
    "tensordot by dimensions": lambda m, h: torch.tensordot(h, m.w, ([-1], [1])),
    "tensordot of two dimensions": lambda m, h: torch.tensordot(
        h.view(*h.shape[:2], 2, WIDTH // 2), m.w.view(2, WIDTH // 2, WIDTH)
    ),
    "multiply": lambda m, h: torch.multiply(h, m.s).multiply(m.b),
    "multiply in place": lambda m, h: h.clone().multiply_(m.s),
    "divide": lambda m, h: torch.divide(h, 2.0 + m.s.square()).divide(2.0 + m.b.square()),
    "true_divide": lambda m, h: torch.true_divide(h, 2.0 + m.s.square()),
    "subtract": lambda m, h: torch.subtract(h, m.s).subtract(m.b),
    "rsub": lambda m, h: torch.rsub(h, m.s),
}
SPELLINGS |= EINSUMS
OTHER_EINSUMS: dict[str, Any] = {
    "positions mixed": lambda m, h: torch.einsum("btd,ts->bsd", h, m.w[:STEPS, :STEPS]),
    "a letter kept by both": lambda m, h: torch.einsum("btd,td->btd", h, m.w[:STEPS]),
    "an outer product": lambda m, h: torch.einsum("btd,e->bted", h, m.s).sum(2),
    "a sum on the way": lambda m, h: h + torch.einsum("btd,de->be", h, m.w).unsqueeze(1),
    "a sum of the weight": lambda m, h: h * torch.einsum("btd,de->bt", h, m.w).unsqueeze(-1),
    "the batch in another place": lambda m, h: torch.einsum("btd,de->tbe", h, m.w).transpose(0, 1),
    "a length of 1 spread out": lambda m, h: torch.einsum("btd,de->bte", h.mean(-1, keepdim=True), m.w),
    "three operands": lambda m, h: torch.einsum("btd,de,ef->btf", h, m.w, m.inner.weight),
    "numbers for letters": lambda m, h: torch.einsum(h, [0, 1, 2], m.w, [2, 3], [0, 1, 3]),
    "dots in both": lambda m, h: torch.einsum("...d,d...->...", h, m.w[:, :STEPS]).unsqueeze(-1) * h,
    "tensordot from the weight": lambda m, h: torch.tensordot(m.w, h, ([0], [2])).permute(1, 2, 0),
}


def made(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    return Spelling(SPELLINGS[name], SHAPES.get(name, (WIDTH, WIDTH))).to(dtype)


@pytest.mark.parametrize("examples", [4, STEPS])
@pytest.mark.parametrize("name", SPELLINGS)
def test_clipped_sums_are_those_of_a_loop(name, examples):
    """Also where a batch has as many examples as positions."""
    x = torch.randn(examples, STEPS, 3, dtype=torch.float64)
    y = torch.arange(examples) % 3
    model = made(name, torch.float64)
    check(model, x, y, clipped_sum)
    check_private(model, x, y)
    assert has_rules(model, x, y)


@pytest.mark.parametrize("examples", [4, STEPS])
@pytest.mark.parametrize("name", OTHER_EINSUMS)
def test_other_equations_are_right_by_whatever_way(name, examples):
    torch.manual_seed(2)
    model = Spelling(OTHER_EINSUMS[name]).double()
    x, y = torch.randn(examples, STEPS, 3, dtype=torch.float64), torch.arange(examples) % 3
    check(model, x, y, clipped_sum)
    check_private(model, x, y)


@pytest.mark.parametrize("name", EINSUMS)
def test_an_empty_batch_has_a_sum_of_zeros(name):
    model = made(name, torch.float64)
    sums = Engine(model, odd_loss).clipped_sum(torch.zeros(0, STEPS, 3, dtype=torch.float64), torch.arange(0)).sums
    assert sums and not any(total.any() for total in sums.values())


@pytest.mark.parametrize("compute", [lambda m, h: F.linear(h, m.w, m.b), flat], ids=["linear", "addmm"])
@pytest.mark.parametrize("shape", [(), (1,), (1, WIDTH)])
def test_a_bias_of_another_shape_is_added_as_torch_adds_it(compute, shape):
    """One number for all outputs, say."""
    torch.manual_seed(4)
    model = Spelling(compute)
    model.b = table(*shape)
    model.double()
    x, y = torch.randn(4, STEPS, 3, dtype=torch.float64), torch.arange(4) % 3
    check(model, x, y, clipped_sum)
    check_private(model, x, y)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_no_example_exceeds_the_bound_under_bfloat16_autocast(name, scale):
    """Scales at which all, some or none of the examples are clipped, and positions whose gradients nearly cancel."""
    torch.manual_seed(9)
    x, y = scale * torch.randn(6, STEPS, 3), torch.arange(6) % 3
    x[0, 1::2] = -x[0, : STEPS - 1 : 2] * (1 + 1e-3)
    model = made(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model, lambda o, y: odd_loss(o.float(), y), check_isolation=False)
        for bound in (1e-3, 0.3):
            engine.accumulator.set_bounds(bound)
            for i in range(len(x)):
                sums = engine.clipped_sum(x, y, torch.arange(len(x)) == i).sums
                assert float(norm({n: s.double() for n, s in sums.items()})) <= bound * (1 + 1e-6)


class Chosen(nn.Module):
    """Rows that a router picks: as many as there are positions, and no one knows whose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).reshape(-1, WIDTH)
        order = rows.detach().sum(1).argsort()
        mixed = torch.empty_like(rows).index_copy(0, order, self.expert(rows[order]))
        return self.last(torch.tanh(mixed)).view(len(x), -1, 2).mean(1)


def test_rows_in_another_order_are_right_or_refused():
    torch.manual_seed(2)
    model, x, y = Chosen().double(), torch.randn(4, STEPS, 3, dtype=torch.float64), torch.arange(4) % 3
    try:
        check(model, x, y, clipped_sum)
    except (dpcore.UnsupportedError, dpcore.PrivacyError) as refused:
        assert "expert" in str(refused)
    else:
        assert not has_rules(model, x, y)


class Skips(nn.Module):
    """Uses its biases only where something is masked, as models do that skip the mask of a batch without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.s, self.last = nn.Linear(3, 4), table(STEPS), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        scores = h @ h.transpose(1, 2)
        if not mask.all():
            scores = scores + torch.where(mask.bool().unsqueeze(1), self.s, -5.0)
        return self.last(scores.softmax(-1) @ h).mean(1)


def test_a_way_that_only_padded_batches_take_is_known():
    """The first example, of which the model is probed on copies, has no padding."""
    torch.manual_seed(2)
    model, x, y = Skips().double(), torch.randn(4, STEPS, 3, dtype=torch.float64), torch.arange(4) % 3
    mask = (torch.arange(STEPS) < torch.tensor([[5], [3], [4], [5]])).long()
    each = []
    for i in range(len(x)):
        # Alone an unpadded example would take the other way.
        loss = odd_loss(model(x, mask), y)[i]
        found = torch.autograd.grad(loss, list(model.parameters()))
        each.append(dict(zip(dict(model.named_parameters()), found, strict=True)))
    engine = Engine(model, odd_loss, max_grad_norm=1e9, check_isolation=False)
    result = engine.clipped_sum((x, mask), y)
    for name, total in result.sums.items():
        torch.testing.assert_close(total, sum(g[name] for g in each))
    torch.testing.assert_close(result.norms, torch.stack([norm(g) for g in each]))


@pytest.mark.parametrize("name", SPELLINGS)
def test_compiled_graphs_follow_the_weights(name):
    """What is computed from parameters alone is computed in the graph, too."""
    model, x, y = made(name, torch.float64), torch.randn(4, STEPS, 3, dtype=torch.float64), torch.arange(4) % 3
    # The backend that runs what was traced as it is; others trace it once more, which takes twice as long.
    engine = Engine(model, odd_loss, max_grad_norm=0.1, compile="eager", check_isolation=False)
    for _ in range(3):
        truth = reference.clipped_sum(model, odd_loss, x, y, 0.1).clipped
        assert relative_error(engine.clipped_sum(x, y).sums, truth) < 1e-10
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)


class FrozenMap(nn.Module):
    """A trained map, and a frozen one whose bias has any shape that torch spreads out over 256 outputs."""

    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(12, 128)
        self.register_buffer("weight", torch.randn(256, 128))
        self.register_buffer("bias", torch.randn(shape))

    def forward(self, x):
        return F.linear(self.trained(x), self.weight, self.bias)


@pytest.mark.parametrize("shape", [(), (1,), (256,), (1, 256)])
def test_frozen_maps_spread_out_their_bias_as_torch_does(shape):
    model, x = FrozenMap(shape), torch.randn(64, 12)
    expected = model(x)
    torch.testing.assert_close(dpcore.GradSampleModule(model)(x), expected, rtol=1e-4, atol=1e-4)
