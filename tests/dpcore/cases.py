"""Small models, losses and loops that try to get past dpcore's checks, or that must not be stopped by them.

``python -m tests.dpcore.cases`` runs them all and writes docs/cases.md; test_cases.py runs them in CI.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune, rnn
from torch.utils.data import default_collate

from tests.dpcore.case_runner import Case, classify, run, vectors

CASES: list[Case] = []


def add(name: str, kind: str, model: Callable[[], nn.Module], **options: Any) -> None:
    CASES.append(Case(name, kind, model, **options))


class Of(nn.Module):
    """Named parts, and a function (parts, inputs...) as its forward pass."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def two(function: Callable[[Tensor], Any], **parts: Any) -> Callable[[], nn.Module]:
    """Linear, tanh, a function of the whole batch, Linear."""
    return lambda: Of(lambda m, x: m.b(function(torch.tanh(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3), **parts)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def table(*shape: int, scale: float = 0.5) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * scale)


def batch_of(*shape: int, count: int = 8) -> Callable[[], list[Any]]:
    """Examples (x [shape], label below 3)."""

    def make() -> list[Any]:
        numbers = torch.Generator().manual_seed(4)
        return [(torch.randn(*shape, generator=numbers), k % 3) for k in range(count)]

    return make


def token_rows(length: int, count: int = 8, classes: int = 11) -> Callable[[], list[Any]]:
    """Examples (ids [length], label below 3)."""

    def make() -> list[Any]:
        numbers = torch.Generator().manual_seed(4)
        return [(torch.randint(1, classes, (length,), generator=numbers), k % 3) for k in range(count)]

    return make


def sequences() -> list[Any]:
    """Examples of several lengths: (x [T, 4], label)."""
    numbers = torch.Generator().manual_seed(5)
    return [(torch.randn(t, 4, generator=numbers), t % 3) for t in (7, 3, 5, 2, 6, 3, 4, 1)]


def padded(examples: list[Any]) -> Any:
    x, y = zip(*examples, strict=True)
    return rnn.pad_sequence(list(x), batch_first=True), torch.tensor([len(v) for v in x]), torch.tensor(y)


# ---- leaks: outputs and losses that the check cannot reach by the return value


class Answer:
    """An output of a class that nobody knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def by_logits(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).logits, y)


def mixing_answer() -> nn.Module:
    return Of(lambda m, x: Answer(m.b(centred(torch.tanh(m.a(x))))), a=nn.Linear(6, 5), b=nn.Linear(5, 3))


add("mixing behind an output object of one's own", "leak", mixing_answer, loss=by_logits)
add(
    "an output object of one's own",
    "honest",
    lambda: Of(lambda m, x: Answer(m.b(torch.tanh(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
    loss=by_logits,
)
add(
    "mixing behind a distribution as output",
    "leak",
    lambda: Of(
        lambda m, x: torch.distributions.Categorical(logits=m.b(centred(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)
    ),
    loss=lambda m, b: -m(b[0]).log_prob(b[1]).mean(),
)
add(
    "a distribution as output",
    "honest",
    lambda: Of(
        lambda m, x: torch.distributions.Categorical(logits=m.b(torch.tanh(m.a(x)))),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    ),
    loss=lambda m, b: -m(b[0]).log_prob(b[1]).mean(),
)


def balance(m: Any, x: Tensor) -> Tensor:
    gate = m.a(x).softmax(-1)
    m.aux = (gate.mean(0) * gate.argmax(-1).bincount(minlength=5) / len(x)).sum() * 5
    return m.b(gate * m.c(x))


add(
    "a load-balancing loss as an attribute",
    "leak",
    lambda: Of(balance, a=nn.Linear(6, 5), b=nn.Linear(5, 3), c=nn.Linear(6, 5)),
    loss=lambda m, b: classify(m, b) + m.aux,
)


def penalised(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    m.aux = h.square().sum(1)
    return m.b(h)


add(
    "a penalty by example as an attribute",
    "honest",
    lambda: Of(penalised, a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
    loss=lambda m, b: classify(m, b) + m.aux.mean(),
)


def collecting() -> nn.Module:
    model = two(lambda h: h)()
    model.seen = []
    model.a.register_forward_hook(lambda layer, given, out: model.seen.append(out))
    return model


def spread(model: Any, batch: Any) -> Tensor:
    model.seen.clear()
    loss = classify(model, batch)
    return loss + model.seen[0].square().mean()


add("activations collected by a hook, penalised by example", "honest", collecting, loss=spread)


def stored(m: Any, x: Tensor) -> Tensor:
    m.state = {"z": [centred(torch.tanh(m.a(x)))]}
    return m.b(m.a(x).detach())


add(
    "mixing behind a dict of lists as an attribute",
    "leak",
    lambda: Of(stored, a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
    loss=lambda m, b: classify(m, b) + F.cross_entropy(m.state["z"][0], b[1]),
)
add(
    "nothing is returned, the logits are an attribute",
    "leak",
    lambda: Of(lambda m, x: setattr(m, "logits", m.b(centred(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
    loss=lambda m, b: (m(b[0]), F.cross_entropy(m.logits, b[1]))[1],
)

# ---- leaks: gradients, positions, counts


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if h.requires_grad:
        h.register_hook(hook)
    return h


def on_output(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Of(lambda m, x: hooked(m.b(torch.tanh(m.a(x))), hook), a=nn.Linear(6, 5), b=nn.Linear(5, 3))


add("the outputs' gradient is divided by its norm", "leak", on_output(lambda g: g / (g.norm() + 1e-9)), truth=False)
add("the outputs' gradient is centred", "leak", on_output(lambda g: g - g.mean(0)), truth=False)
add(
    "the outputs' gradient is cut by its largest value",
    "leak",
    on_output(lambda g: g * (0.1 / g.abs().max()).clamp(max=1.0)),
    truth=False,
)
add(
    "hidden gradients are divided by their norm",
    "leak",
    two(lambda h: hooked(h, lambda g: g / (g.norm() + 1e-9))),
    truth=False,
)
add("hidden gradients are halved", "honest", two(lambda h: hooked(h, lambda g: g * 0.5)))


class Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-9)


add(
    "a function whose backward normalises the batch",
    "leak",
    lambda: Of(lambda m, x: Unit.apply(m.b(torch.tanh(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
    truth=False,
)
add(
    "full backward hook that centres",
    "leak",
    lambda: _with_backward_hook(lambda m, gi, go: (gi[0] - gi[0].mean(0),)),
    truth=False,
)
add("full backward hook that doubles", "honest", lambda: _with_backward_hook(lambda m, gi, go: (gi[0] * 2,)))


def _with_backward_hook(hook: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[1].register_full_backward_hook(hook)
    return model


def positions() -> Tensor:
    return torch.randn(64, 1, 5, generator=torch.Generator().manual_seed(1))


def positional(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) + m.pe[: len(x)]  # the tutorial's time-first code, given the batch first
    return m.b(torch.tanh(h).mean(1))


add(
    "positional encoding by the place in the batch",
    "leak",
    lambda: Of(positional, a=nn.Linear(4, 5), b=nn.Linear(5, 3), pe=positions()),
    examples=batch_of(7, 4),
)
add(
    "a learnt vector for every place in the batch",
    "leak",
    lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x) + m.p[: len(x)])), a=nn.Linear(6, 5), b=nn.Linear(5, 3), p=table(64, 5)
    ),
)
add(
    "weights by the place in the batch",
    "leak",
    lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x))) * torch.arange(1, len(x) + 1).unsqueeze(1),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    ),
)
add("divided by the number of examples", "leak", two(lambda h: 8 * h / len(h)), truth=False)
add(
    "output divided by the number of examples",
    "leak",
    lambda: Of(lambda m, x: m.a(x) * 8 / len(x), a=nn.Linear(6, 3)),
    truth=False,
)
add(
    "groups of neighbours in the batch",
    "leak",
    two(lambda h: h - h.view(-1, 2, 5).mean(1).repeat_interleave(2, 0) if len(h) % 2 == 0 else h),
)
add(
    "every second example is treated otherwise",
    "leak",
    two(lambda h: h * torch.tensor([1.0, -1.0]).repeat(len(h))[: len(h)].unsqueeze(1)),
)
add(
    "losses by the place in the batch (engine)",
    "leak",
    plain,
    per_example=lambda z, y: F.cross_entropy(z, y, reduction="none") * (1 + torch.arange(len(y))),
)
add(
    "losses divided by the number of examples (engine)",
    "leak",
    plain,
    per_example=lambda z, y: 8 * F.cross_entropy(z, y, reduction="none") / len(y),
    truth=False,
)
add(
    "mixing of large batches only",
    "leak",
    two(lambda h: centred(h) if len(h) > 20 else h),
    examples=batch_of(6, count=40),
    unseen="only batches of more than 16 examples",
)
add(
    "statistics of groups of 32",
    "leak",
    two(lambda h: centred(h) if len(h) >= 32 else h),
    examples=batch_of(6, count=34),
    unseen="only batches of more than 16 examples",
)
add(
    "the batch is dropped where one value is not finite",
    "leak",
    two(lambda h: h if h.isfinite().all() else h * 0.0),
    examples=lambda: [(torch.full((6,), torch.inf), 0), *vectors()],
)
add("gradient reaches by a sort in the hidden layer", "leak", two(lambda h: h.sort(0).values))
add("functional batch norm", "leak", two(lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h))
add(
    "instance norm with running statistics",
    "leak",
    lambda: nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3)
    ),
    examples=batch_of(2, 3),
)
add("median of the batch", "leak", two(lambda h: h - h.median(0).values))
add(
    "covariance whitening",
    "leak",
    two(lambda h: h @ torch.linalg.inv(torch.eye(5, dtype=h.dtype) + h.t() @ h / len(h))),
)
add(
    "nearest neighbour in the batch",
    "leak",
    two(lambda h: h + 0.5 * h[(torch.cdist(h, h) + 99 * torch.eye(len(h), dtype=h.dtype)).argmin(1)]),
)
add(
    "nearest neighbour before all layers, without gradient",
    "leak",
    lambda: Of(
        lambda m, x: m.b(
            torch.tanh(
                m.a(
                    torch.cat(
                        [x[:, :3], x[(torch.cdist(x, x) + 99 * torch.eye(len(x), dtype=x.dtype)).argmin(1), :3]], 1
                    )
                )
            )
        ),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    ),
)
add("early exit by the mean confidence", "leak", two(lambda h: h if h.detach().mean() > 0.0 else h * 2))
add(
    "the most frequent label weighs less (labels in the model)",
    "leak",
    lambda: Of(
        lambda m, x, y: F.cross_entropy(
            m.a(x), y, weight=(1.0 / (1 + y.bincount(minlength=3))).to(x.dtype), reduction="none"
        ),
        a=nn.Linear(6, 3),
    ),
    examples=lambda: [(x, y % 2) for x, y in vectors()],
    loss=lambda m, b: m(*b).mean(),
)
add(
    "in-batch negatives within the model",
    "leak",
    lambda: Of(
        lambda m, x, y: F.cross_entropy(m.a(x) @ m.b(x).t(), torch.arange(len(x))), a=nn.Linear(6, 5), b=nn.Linear(6, 5)
    ),
    loss=lambda m, b: m(*b),
)
add("squeeze and excitation over the batch", "leak", two(lambda h: h * torch.sigmoid(h.mean(0, keepdim=True))))
add(
    "attention that is given [T, B, d] for [B, T, d]",
    "leak",
    lambda: Of(
        lambda m, x: m.b(m.t(x, x, x, need_weights=False)[0].mean(1)), t=nn.MultiheadAttention(4, 2), b=nn.Linear(4, 3)
    ),
    examples=batch_of(5, 4),
)
add(
    "a recurrent layer that is given [T, B, d] for [B, T, d]",
    "leak",
    lambda: Of(lambda m, x: m.b(m.t(x)[0].mean(1)), t=nn.GRU(4, 4), b=nn.Linear(4, 3)),
    examples=batch_of(5, 4),
)
add(
    "a frozen recurrent layer that is given [T, B, d] for [B, T, d]",
    "leak",
    lambda: Of(lambda m, x: m.b(m.t(x)[0].mean(1)), t=nn.GRU(4, 4).requires_grad_(False), b=nn.Linear(4, 3)),
    examples=batch_of(5, 4),
)
add(
    "a convolution over the batch",
    "leak",
    two(lambda h: F.conv1d(h.t().unsqueeze(0), torch.ones(5, 5, 3, dtype=h.dtype) / 3, padding=1)[0].t()),
)
add(
    "fake quantisation observes the range",
    "leak",
    lambda: Of(
        lambda m, x: m.b(m.q(torch.tanh(m.a(x)))),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
        q=torch.ao.quantization.FakeQuantize(),
    ),
)
add("a range observer as a forward hook", "leak", lambda: _observed())


def _note(value: Any) -> None:
    """None, as a hook that only looks returns."""


def _observed() -> nn.Module:
    model = plain()
    model.register_buffer("most", torch.zeros(()))
    model[0].register_forward_hook(
        lambda layer, given, out: _note(model.most.copy_(torch.maximum(model.most, out.detach().max())))
    )
    return model


add(
    "a flag switches the mixing on later",
    "leak",
    lambda: Of(
        lambda m, x, mix=False: m.b(centred(torch.tanh(m.a(x))) if mix else torch.tanh(m.a(x))),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    ),
    loop=lambda m, o, dl, loss: _flagged(m, o, dl),
    truth=False,
)


def _flagged(model: Any, optimizer: Any, loader: Any) -> None:
    for mix in (False, False, False, False, True):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x, mix), y).backward()
            if mix:
                optimizer.step()


add("a vmap within the model", "honest", lambda: Of(lambda m, x: torch.func.vmap(m.a)(x), a=nn.Linear(6, 3)))
# ---- wrong numbers: ways to use weights


def linear_of(weight: Callable[[Any], Tensor], **parts: Any) -> Callable[[], nn.Module]:
    """x @ (a weight that is computed from parts) and a Linear."""
    return lambda: Of(
        lambda m, x: m.b(torch.tanh(x @ weight(m))), b=nn.Linear(5, 3), **{k: v() for k, v in parts.items()}
    )


def low_rank() -> dict[str, Any]:
    return {"u": lambda: table(6, 2), "v": lambda: table(2, 5)}


add("a product of two factors as weight", "wrong", linear_of(lambda m: m.u @ m.v, **low_rank()))
add(
    "two factors one after the other",
    "wrong",
    lambda: Of(lambda m, x: m.b(torch.tanh(x @ m.u @ m.v)), b=nn.Linear(5, 3), u=table(6, 2), v=table(2, 5)),
)
add(
    "a frozen weight plus factors",
    "wrong",
    linear_of(
        lambda m: m.w.detach() + m.u @ m.v, w=lambda: nn.Parameter(torch.randn(6, 5), requires_grad=False), **low_rank()
    ),
)
add(
    "a masked weight",
    "wrong",
    linear_of(lambda m: m.w * m.mask, w=lambda: table(6, 5), mask=lambda: (torch.arange(30).view(6, 5) % 2).float()),
)
add(
    "weights concatenated",
    "wrong",
    linear_of(lambda m: torch.cat([m.u, m.v], 1), u=lambda: table(6, 2), v=lambda: table(6, 3)),
)
add(
    "a part of a weight, and all of it",
    "wrong",
    lambda: Of(lambda m, x: m.b(torch.tanh(x @ m.w)) + (x[:, :2] @ m.w[:2])[:, :3], b=nn.Linear(5, 3), w=table(6, 5)),
)
add("a softmax of a weight", "wrong", linear_of(lambda m: m.w.softmax(0), w=lambda: table(6, 5)))
add(
    "a weight from a network of a learnt code",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(torch.tanh(x @ m.gen(m.z).view(6, 5))), b=nn.Linear(5, 3), gen=nn.Linear(4, 30), z=table(4)
    ),
)
add(
    "weights by example from a network",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(torch.einsum("bi,bij->bj", x, m.gen(x).view(-1, 6, 5))),
        b=nn.Linear(5, 3),
        gen=nn.Linear(6, 30),
    ),
)
add(
    "a weight in half precision inside",
    "wrong",
    linear_of(lambda m: m.w.to(torch.bfloat16).to(m.w.dtype), w=lambda: table(6, 5)),
    tolerance=2e-2,
)
add(
    "experts in one tensor, by bmm",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(
            (torch.bmm(x.unsqueeze(0).expand(4, -1, -1), m.w) * m.g(x).softmax(-1).t().unsqueeze(-1)).sum(0)
        ),
        b=nn.Linear(5, 3),
        g=nn.Linear(6, 4),
        w=table(4, 6, 5),
    ),
)
add(
    "an expert chosen by example",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(torch.bmm(x.unsqueeze(1), m.w[m.g(x).argmax(-1)]).squeeze(1)),
        b=nn.Linear(5, 3),
        g=nn.Linear(6, 4),
        w=table(4, 6, 5),
    ),
)
add(
    "a class token and positions",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(m.t(torch.cat([m.cls.expand(len(x), -1, -1), x], 1) + m.pos)[:, 0]),
        b=nn.Linear(4, 3),
        t=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        cls=table(1, 1, 4),
        pos=table(1, 6, 4),
    ),
    examples=batch_of(5, 4),
)
add(
    "a temperature and a bias as numbers",
    "wrong",
    lambda: Of(lambda m, x: m.a(x) * m.t.exp() + m.s, a=nn.Linear(6, 3), t=table(), s=table(1)),
)
add("pruned weights", "wrong", lambda: _pruned())
add("a symmetric parametrised weight", "wrong", lambda: _parametrised())
add(
    "one weight, once as it is and once transposed",
    "wrong",
    lambda: Of(lambda m, x: m.b(F.linear(torch.tanh(m.a(x)), m.a.weight.t())), a=nn.Linear(6, 5), b=nn.Linear(6, 3)),
)
add(
    "one layer twice, one of them without gradient",
    "wrong",
    lambda: Of(lambda m, x: m.b(torch.tanh(m.a(x)) + m.a(x).detach()), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
)
add(
    "a tied table, in and out, with a scale",
    "wrong",
    lambda: Of(lambda m, x: (m.e(x).mean(1) * m.s) @ m.e.weight.t(), e=nn.Embedding(11, 5), s=table(5)),
    examples=token_rows(4),
)
add(
    "a table read by index_select and by gather",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(torch.index_select(m.w, 0, x.flatten()).view(*x.shape, 5).mean(1) + m.w[x[:, 0]]),
        b=nn.Linear(5, 3),
        w=table(11, 5),
    ),
    examples=token_rows(4),
)
add(
    "one-hot times table",
    "wrong",
    lambda: Of(lambda m, x: m.b((F.one_hot(x, 11).to(m.w.dtype) @ m.w).mean(1)), b=nn.Linear(5, 3), w=table(11, 5)),
    examples=token_rows(4),
)
add(
    "complex weights",
    "wrong",
    lambda: Of(
        lambda m, x: m.b((x.to(m.w.dtype) @ m.w).abs().to(m.b.weight.dtype)),
        b=nn.Linear(5, 3),
        w=nn.Parameter(torch.randn(6, 5, dtype=torch.complex64)),
    ),
    truth=False,
)
add(
    "a fused qkv weight by einsum",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(F.scaled_dot_product_attention(*torch.einsum("btd,kde->kbte", x, m.w)).mean(1)),
        b=nn.Linear(4, 3),
        w=table(3, 4, 4),
    ),
    examples=batch_of(5, 4),
)
add(
    "a learnt query for pooling",
    "wrong",
    lambda: Of(lambda m, x: m.b(((x @ m.q).softmax(1).unsqueeze(-1) * x).sum(1)), b=nn.Linear(4, 3), q=table(4)),
    examples=batch_of(5, 4),
)
add(
    "relative position biases by index",
    "wrong",
    lambda: Of(
        lambda m, x: m.b(
            ((x @ x.transpose(1, 2) + m.r[(torch.arange(5)[:, None] - torch.arange(5)) + 4]).softmax(-1) @ x).mean(1)
        ),
        b=nn.Linear(4, 3),
        r=table(9),
    ),
    examples=batch_of(5, 4),
)
add(
    "prototypes by distance",
    "wrong",
    lambda: Of(lambda m, x: -torch.cdist(m.a(x), m.p), a=nn.Linear(6, 5), p=table(3, 5)),
)
add(
    "radial functions by subtraction",
    "wrong",
    lambda: Of(
        lambda m, x: m.b((-(m.a(x).unsqueeze(1) - m.p).square().sum(-1)).exp()),
        a=nn.Linear(6, 5),
        p=table(4, 5),
        b=nn.Linear(4, 3),
    ),
)
add(
    "a cosine classifier",
    "wrong",
    lambda: Of(
        lambda m, x: 5 * F.normalize(m.a(x), dim=1) @ F.normalize(m.w, dim=1).t(), a=nn.Linear(6, 5), w=table(3, 5)
    ),
)


def _pruned() -> nn.Module:
    model = plain()
    prune.l1_unstructured(model[0], "weight", 0.4)
    return model


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


def _parametrised() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


# ---- wrong numbers: the batch in other places


def video(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.flatten(0, 1))).view(*x.shape[:2], -1).mean(1))


frames = {"a": lambda: nn.Linear(4, 5), "b": lambda: nn.Linear(5, 3)}


def of(function: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Of(function, **{name: part() for name, part in parts.items()})


add("frames flattened into the batch", "wrong", of(video, **frames), examples=batch_of(5, 4))
add(
    "frames flattened, time first",
    "wrong",
    of(lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1))).view(5, len(x), -1).mean(0)), **frames),
    examples=batch_of(5, 4),
)
add(
    "as many frames as examples, flattened time first",
    "wrong",
    of(lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1))).view(8, len(x), -1).mean(0)), **frames),
    examples=batch_of(8, 4),
)
add(
    "two views concatenated within the model",
    "wrong",
    of(
        lambda m, x: sum(m.b(torch.tanh(m.a(torch.cat([x, x.flip(1)])))).chunk(2)),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
)
add(
    "views interleaved within the model",
    "wrong",
    of(
        lambda m, x: (
            m.b(
                torch.tanh(
                    m.a(x.repeat_interleave(3, 0) * torch.arange(1, 4, dtype=x.dtype).repeat(len(x)).unsqueeze(1))
                )
            )
            .view(-1, 3, 3)
            .mean(1)
        ),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
)
add(
    "one example at a time within the model",
    "wrong",
    of(
        lambda m, x: torch.stack([m.b(torch.tanh(m.a(row))) for row in x]),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
)
add(
    "chunks of 16 within the model",
    "wrong",
    of(
        lambda m, x: torch.cat([m.b(torch.tanh(m.a(part))) for part in x.split(16)]),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
    examples=batch_of(6, count=32),
)
add(
    "chunks of half a batch within the model",
    "wrong",
    of(
        lambda m, x: torch.cat([m.b(torch.tanh(m.a(part))) for part in x.split(4)]),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
)
add(
    "reversed within the model and back",
    "wrong",
    of(lambda m, x: m.b(torch.tanh(m.a(x.flip(0)))).flip(0), a=lambda: nn.Linear(6, 5), b=lambda: nn.Linear(5, 3)),
)
add(
    "outputs in reverse order, labels too",
    "wrong",
    of(lambda m, x: m.b(torch.tanh(m.a(x))).flip(0), a=lambda: nn.Linear(6, 5), b=lambda: nn.Linear(5, 3)),
    loss=lambda m, b: F.cross_entropy(m(b[0]), b[1].flip(0)),
)
add(
    "as many features as examples",
    "wrong",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
    examples=batch_of(8),
)
add(
    "as many steps as examples, GRU time first by hand",
    "wrong",
    of(lambda m, x: m.b(m.a(x.transpose(0, 1))[0][-1]), a=lambda: nn.GRU(4, 5), b=lambda: nn.Linear(5, 3)),
    examples=batch_of(8, 4),
)
add(
    "an unpacked list of examples as input",
    "wrong",
    of(lambda m, xs: m.b(torch.tanh(m.a(rnn.pad_sequence(xs, batch_first=True))).sum(1)), **frames),
    examples=sequences,
    collate=lambda ex: ([x for x, _ in ex], torch.tensor([y for _, y in ex])),
)
add(
    "a square list of examples as input",
    "wrong",
    of(lambda m, xs: m.b(torch.tanh(m.a(torch.stack(xs))).sum(1)), **frames),
    examples=batch_of(8, 4),
    collate=lambda ex: ([x for x, _ in ex], torch.tensor([y for _, y in ex])),
)
add(
    "a mask before the inputs, as many positions as examples",
    "wrong",
    of(lambda m, mask, x: m.b(torch.tanh(m.a(mask @ x)).mean(1)), **frames),
    examples=batch_of(8, 4),
    loss=lambda m, b: F.cross_entropy(m(torch.ones(8, 8, dtype=b[0].dtype).tril() / 8, b[0]), b[1]),
)
add(
    "sparse inputs",
    "wrong",
    of(lambda m, x: m.b(torch.tanh(torch.sparse.mm(x, m.w))), w=lambda: table(6, 5), b=lambda: nn.Linear(5, 3)),
    loss=lambda m, b: F.cross_entropy(m(b[0].to_sparse()), b[1]),
)
add(
    "nested (jagged) inputs",
    "wrong",
    of(lambda m, x: m.b(m.a(x).to_padded_tensor(0.0).sum(1)), **frames),
    examples=sequences,
    collate=lambda ex: (list(ex),),
    loss=lambda m, b: F.cross_entropy(
        m(torch.nested.nested_tensor([x for x, _ in b[0]], layout=torch.jagged)), torch.tensor([y for _, y in b[0]])
    ),
)

# ---- honest models with odd structures


def mapping(examples: list[Any]) -> Any:
    x, y = default_collate(examples)
    return {"deep": {"x": x, "names": ["n"] * len(y)}, "y": y, "flag": True}


Pair = collections.namedtuple("Pair", "x y")

add(
    "a nested dict with names and flags",
    "honest",
    of(lambda m, deep, flag: {"out": (m.a(deep["x"]), None, "s")}, a=lambda: nn.Linear(6, 3)),
    collate=mapping,
    loss=lambda m, b: F.cross_entropy(m(b["deep"], flag=b["flag"])["out"][0], b["y"]),
)
add(
    "a named tuple as batch and as output",
    "honest",
    of(lambda m, pair: Pair(m.a(pair.x), pair.y), a=lambda: nn.Linear(6, 3)),
    collate=lambda ex: Pair(*default_collate(ex)),
    loss=lambda m, b: (lambda out: F.cross_entropy(out.x, out.y))(m(b)),
)
add(
    "a namespace of tensors as input",
    "honest",
    of(lambda m, b: m.a(b.x), a=lambda: nn.Linear(6, 3)),
    loss=lambda m, b: F.cross_entropy(m(SimpleNamespace(x=b[0])), b[1]),
)
add("input changed in place", "honest", of(lambda m, x: m.a(x.mul_(2.0).add_(1.0)), a=lambda: nn.Linear(6, 3)))
add(
    "padded lengths, masked mean",
    "honest",
    of(
        lambda m, x, n: m.b(
            (torch.tanh(m.a(x)) * (torch.arange(x.shape[1]) < n[:, None]).unsqueeze(-1)).sum(1) / n[:, None]
        ),
        **frames,
    ),
    examples=sequences,
    collate=padded,
)
add(
    "padded lengths, mean over the padding",
    "leak",
    of(lambda m, x, n: m.b(torch.tanh(m.a(x)).mean(1)), **frames),
    examples=sequences,
    collate=padded,
    unseen="Inputs padded to the longest of the batch",
)
add(
    "padded lengths, last state after the padding",
    "leak",
    of(lambda m, x, n: m.b(m.a(x)[1][0]), a=lambda: nn.GRU(4, 5, batch_first=True), b=lambda: nn.Linear(5, 3)),
    examples=sequences,
    collate=padded,
    unseen="Inputs padded to the longest of the batch",
)
add(
    "packed without sorting, both directions",
    "honest",
    of(
        lambda m, x, n: m.b(
            m.a(rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[1].transpose(0, 1).flatten(1)
        ),
        a=lambda: nn.GRU(4, 5, 2, batch_first=True, bidirectional=True),
        b=lambda: nn.Linear(20, 3),
    ),
    examples=sequences,
    collate=padded,
)
add(
    "key padding mask",
    "honest",
    of(
        lambda m, x, n: m.b(m.t(x, src_key_padding_mask=torch.arange(x.shape[1]) >= n[:, None])[:, 0]),
        t=lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        b=lambda: nn.Linear(4, 3),
    ),
    examples=sequences,
    collate=padded,
)
add(
    "a generator of its own for dropout",
    "honest",
    lambda: _own_generator(),
    truth=False,
    optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
)


def _own_generator() -> nn.Module:
    model = Of(
        lambda m, x: m.b(
            torch.tanh(m.a(x)) * torch.bernoulli(torch.full((len(x), 5), 0.5, dtype=x.dtype), generator=m.numbers)
        ),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    )
    model.numbers = torch.Generator().manual_seed(2)
    return model


add("NaN in one example", "honest", plain, examples=lambda: [*vectors(), (torch.full((6,), torch.nan), 1)])
add(
    "an example of size 1e30",
    "honest",
    lambda: nn.Linear(6, 3),
    examples=lambda: [*vectors(), (torch.full((6,), 1e30), 1)],
)
add(
    "one example of size 1e-30",
    "honest",
    lambda: nn.Linear(6, 3, bias=False),
    examples=lambda: [*vectors(), (torch.full((6,), 1e-30), 1)],
)
for layer, shape in (
    (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1, groups=1), (2, 4, 4)),
    (lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"), (4, 5, 5)),
    (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    (lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.PReLU(4)), (2, 6)),
    (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.PReLU()), (6,)),
    (lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, affine=True), nn.MaxPool2d(2)), (2, 4, 4)),
    (lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Softmax(-1), nn.LayerNorm((2, 6)[1:])), (2, 6)),
):
    add(
        f"layer: {layer()}".replace("\n", " "),
        "honest",
        lambda layer=layer: Of(lambda m, x: m.f(x).flatten(1)[:, :3], f=layer()),
        examples=batch_of(*shape),
    )
for cell in (nn.GRUCell, nn.RNNCell):
    add(
        f"a loop over {cell.__name__}",
        "honest",
        lambda cell=cell: Of(lambda m, x: m.b(_looped(m.c, x)), c=cell(4, 5), b=nn.Linear(5, 3)),
        examples=batch_of(5, 4),
    )


def _looped(cell: Any, x: Tensor) -> Tensor:
    h = None
    for step in x.unbind(1):
        h = cell(step, h)
    return h


add(
    "attention with other key and value widths and biases",
    "honest",
    of(
        lambda m, x, y: m.b(m.t(x, y[..., :3], y, need_weights=True)[0].mean(1)),
        t=lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=4, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        b=lambda: nn.Linear(4, 3),
    ),
    examples=batch_of(5, 4),
    loss=lambda m, b: F.cross_entropy(m(b[0], b[0].flip(1)), b[1]),
)
add(
    "encoder and decoder",
    "honest",
    of(
        lambda m, x: m.b(m.t(x, x[:, :2])[:, -1]),
        t=lambda: nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True),
        b=lambda: nn.Linear(4, 3),
    ),
    examples=batch_of(5, 4),
)
add(
    "adaptive softmax",
    "honest",
    of(
        lambda m, x, y: m.t(m.a(x), y).loss,
        a=lambda: nn.Linear(6, 8),
        t=lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [2, 6]),
    ),
    loss=lambda m, b: m(b[0], b[1] * 4),
)
add("bilinear", "honest", of(lambda m, x: m.f(x[:, :3], x[:, 3:]), f=lambda: nn.Bilinear(3, 3, 3)))
add("data parallel on one device", "honest", lambda: nn.DataParallel(plain()))
add(
    "checkpointed in sequence",
    "honest",
    lambda: Of(
        lambda m, x: torch.utils.checkpoint.checkpoint_sequential(m.f, 2, x, use_reentrant=False),
        f=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)),
    ),
)
add("a bfloat16 autocast loop", "honest", plain, autocast=True, half=True, tolerance=2e-2)
add(
    "a bfloat16 autocast loop with raw weights",
    "honest",
    lambda: Of(lambda m, x: m.b(torch.tanh(x @ m.w) * m.s), w=table(6, 5), s=table(5), b=nn.Linear(5, 3)),
    autocast=True,
    half=True,
    tolerance=2e-2,
)
add(
    "a bfloat16 model",
    "honest",
    lambda: plain().bfloat16(),
    loss=lambda m, b: F.cross_entropy(m(b[0].to(next(iter(m.parameters())).dtype)).to(b[0].dtype), b[1]),
    half=True,
    tolerance=3e-2,
)
add(
    "a float64 head on a float32 body",
    "honest",
    lambda: Of(lambda m, x: m.b(torch.tanh(m.a(x)).double()), a=nn.Linear(6, 5), b=nn.Linear(5, 3).double()),
)
add(
    "two calls of the model in one loss",
    "honest",
    plain,
    loss=lambda m, b: classify(m, b) + F.cross_entropy(m(b[0].flip(1)), b[1]),
)
add(
    "two calls, the second in another order",
    "leak",
    plain,
    loss=lambda m, b: classify(m, b) + F.cross_entropy(m(b[0].flip(0)), b[1].flip(0)),
    unseen="two calls of the model in one loss with the rows in another order",
)
add(
    "an auxiliary head that is not used",
    "honest",
    lambda: Of(lambda m, x: (m.a(x), m.b(x))[0], a=nn.Linear(6, 3), b=nn.Linear(6, 3)),
)
add("a straight-through rounding", "honest", two(lambda h: h + ((h * 4).round() / 4 - h).detach()))
add(
    "gradient reversal",
    "honest",
    lambda: Of(lambda m, x: m.b(Reverse.apply(torch.tanh(m.a(x)))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
)
add(
    "teacher and student in one model",
    "honest",
    lambda: Of(lambda m, x: m.a(x) + 0.1 * m.t(x).detach(), a=nn.Linear(6, 3), t=nn.Linear(6, 3).requires_grad_(False)),
)
add("top-k within an example", "honest", two(lambda h: h * (h >= h.topk(2, 1).values[:, -1:])))
add(
    "the model answers with the loss",
    "honest",
    lambda: Of(lambda m, x, y: F.cross_entropy(m.a(x), y), a=nn.Linear(6, 3)),
    loss=lambda m, b: m(*b),
)
add(
    "the model answers with loss and logits",
    "honest",
    lambda: Of(lambda m, x, y: {"loss": F.cross_entropy(m.a(x), y), "logits": m.a(x)}, a=nn.Linear(6, 3)),
    loss=lambda m, b: m(*b)["loss"],
)
add(
    "labels smoothed and weighted by example",
    "honest",
    plain,
    loss=lambda m, b: (
        F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1, reduction="none") * (1 + b[0][:, 0].abs())
    ).mean(),
)
add("an average of hidden activations is logged", "honest", lambda: Of(_logging, a=nn.Linear(6, 5), b=nn.Linear(5, 3)))
add(
    "a deviation of hidden activations is logged with its graph",
    "honest",
    lambda: Of(
        lambda m, x: (h := torch.tanh(m.a(x)), setattr(m, "seen", h.std()), m.b(h))[2],
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 3),
    ),
)


def _logging(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    m.logged = h.mean()
    return m.b(h)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


# ---- loops, optimizers, loaders


def closure_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            return value

        optimizer.step(closure)


def vector_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        F.cross_entropy(model(x), y, reduction="none").backward(torch.full((len(y),), 1.0 / len(y)))
        optimizer.step()
        optimizer.zero_grad()


def chosen_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:
        loss(model, batch).backward(inputs=[p for p in model.parameters() if p.requires_grad])
        optimizer.step()


def copies_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        loss(model, (torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))).backward()
        optimizer.step()


def replaced_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        loss(model, (x[:1].expand_as(x), y[:1].expand_as(y))).backward()
        optimizer.step()


def mixed_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        loss(model, (0.7 * x + 0.3 * x.roll(1, 0), y)).backward()
        optimizer.step()


def clipping_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()


def twice_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:
        value = loss(model, batch)
        value.backward(retain_graph=True)
        value.backward()
        optimizer.step()


def halves_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        h = len(x) // 2
        (loss(model, (x[:h], y[:h])) + loss(model, (x[h:], y[h:]))).backward()
        optimizer.step()


def two_halves_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for x, y in loader:
        h = len(x) // 2
        loss(model, (x[:h], y[:h])).backward()
        loss(model, (x[h:], y[h:])).backward()
        optimizer.step()


def hidden_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    """Calls parts of the model instead of the model."""
    inner = getattr(model, "_module", model)
    for x, y in loader:
        F.cross_entropy(inner[2](inner[1](inner[0](x))), y).backward()
        optimizer.step()


def saving_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    """SWA's copy of the private model beside it."""
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        average.update_parameters(model)
        average(batch[0])


def penalty_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:
        (loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()


def sam_loop(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for batch in loader:
        loss(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        optimizer.zero_grad()
        loss(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)
        optimizer.step()


add("optimizer.step with a closure", "wrong", plain, loop=closure_loop)
add("backward of a vector of losses", "wrong", plain, loop=vector_loop)
add("backward(inputs=parameters)", "wrong", plain, loop=chosen_loop)
add("a copy of an example added by the loop", "leak", plain, loop=copies_loop)
add(
    "all rows replaced by one example in the loop",
    "leak",
    plain,
    loop=replaced_loop,
    unseen="What the loop does to a batch",
)
add("mixup in the loop", "leak", plain, loop=mixed_loop, unseen="What the loop does to a batch")
add("clip_grad_norm_ in the loop", "wrong", plain, loop=clipping_loop)
add("backward twice through one graph", "wrong", plain, loop=twice_loop, truth=False)
add("two halves in one loss", "leak", plain, loop=halves_loop)
add("two halves, two backward passes", "wrong", plain, loop=two_halves_loop, truth=False)
add("the parts called instead of the model", "leak", plain, loop=hidden_loop)
add("averaged weights beside it", "honest", plain, loop=saving_loop)
add("a weight penalty in the loss", "wrong", plain, loop=penalty_loop)
add("weights shifted and shifted back (SAM)", "wrong", plain, loop=sam_loop, truth=False)
for name, optimizer in {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, eps=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1.0, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, eps=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "SGD, nesterov, decay, foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "groups with other rates": lambda p: (
        lambda ps: torch.optim.SGD([{"params": ps[:1], "lr": 0.5}, {"params": ps[1:]}], lr=0.1)
    )(list(p)),
}.items():
    add(f"optimizer: {name}", "honest", plain, optimizer=optimizer, rounds=3)
add(
    "the optimizer has the head only",
    "wrong",
    plain,
    optimizer=lambda p: torch.optim.SGD(list(p)[2:], lr=1.0),
    truth=False,
)
add("hooks on the module", "honest", plain, options={"wrap_model": False})
add("hooks on the module that mixes", "leak", mixing_answer, options={"wrap_model": False}, loss=by_logits)
add(
    "mode hooks: mixing by place",
    "leak",
    of(positional, a=lambda: nn.Linear(4, 5), b=lambda: nn.Linear(5, 3), pe=positions),
    examples=batch_of(7, 4),
    options={"grad_sample_mode": "hooks"},
)
add("fixed batches", "honest", plain, poisson=False)
add(
    "fixed batches that mix by place",
    "leak",
    of(
        lambda m, x: m.b(torch.tanh(m.a(x))) * torch.arange(1, len(x) + 1).unsqueeze(1),
        a=lambda: nn.Linear(6, 5),
        b=lambda: nn.Linear(5, 3),
    ),
    poisson=False,
)
add(
    "a collate function that sorts",
    "honest",
    plain,
    collate=lambda ex: default_collate(sorted(ex, key=lambda e: float(e[0][0]))),
)
add(
    "a collate function that drops examples",
    "honest",
    plain,
    collate=lambda ex: default_collate([e for e in ex if float(e[0][0]) > -9]),
)
add("a collate function that drops most examples", "leak", plain, collate=lambda ex: default_collate(ex[:3]))
add("a collate function that repeats", "leak", plain, collate=lambda ex: default_collate([*ex, *ex]))
add(
    "a collate function that mixes up",
    "leak",
    plain,
    collate=lambda ex: (lambda x, y: (0.7 * x + 0.3 * x.roll(1, 0), y))(*default_collate(ex)),
    unseen="collate function that puts several examples into one row",
)
add(
    "an engine with two inputs",
    "honest",
    of(lambda m, x, y: m.a(torch.cat([x, y], 1)), a=lambda: nn.Linear(12, 3)),
    examples=lambda: [((x, x.flip(0)), y) for x, y in vectors()],
    collate=lambda ex: (tuple(default_collate([x for x, _ in ex])), torch.tensor([y for _, y in ex])),
    per_example=lambda z, y: F.cross_entropy(z, y, reduction="none"),
)
add(
    "an engine whose outputs are an object",
    "leak",
    mixing_answer,
    per_example=lambda z, y: F.cross_entropy(z.logits, y, reduction="none"),
)


def main() -> None:
    """Runs all cases and writes docs/cases.md."""
    text = [HEAD, *section(CASES)]
    Path("docs/cases.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


HEAD = """# Cases

Made by `tests/dpcore/cases.py` (`python -m`, from the root). Every case is trained privately without noise.

* *right*: the weights are those of a loop over examples in float64, clipped one by one, to a relative 1e-4 (in half
  precision 2e-2), and no example that is left out moves them by more than C.
* *refused*: one of dpcore's sentences. An honest case may be refused; it is marked.
* *unseen*: a leak that privacy.md lists among what remains unseen.

Expected "right or refused" are uses of weights and loops whose numbers might be wrong. Models of transformers, PEFT and
timm: [models.md](models.md)."""


def section(cases: list[Case]) -> list[str]:
    """A table of these cases with its totals."""
    rows, totals, refused = [], collections.Counter[str](), 0
    for case in cases:
        outcome = run(case)
        totals[outcome.what] += 1
        honest = case.kind == "honest" and outcome.what == "refused"
        refused += honest
        line = outcome.line.replace("|", "/")
        what = f"{outcome.what}{' (honest)' if honest else ''}"
        rows.append(f"| {case.name} | {case.expected} | {what} | {line[:200]} |")
        print(rows[-1], flush=True)
    counts = ", ".join(f"{totals[what]} {what}" for what in ("right", "refused", "unseen", "wrong", "crash"))
    head = ["", f"{len(cases)} cases: {counts}. Honest cases refused: {refused}.", ""]
    return [*head, "| case | expected | outcome | detail |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    main()
