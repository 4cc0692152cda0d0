"""Every fast path of the engine in float32 against float64, also where large gradients of positions cancel.

``python -m tests.dpcore.exactness`` prints docs/exactness.md; test_exactness.py holds the bounds.

What the truth is. The loss is linear in the outputs, Σ y · outputs, so the gradient that reaches the last layer is y
itself, and the inputs of that layer are x itself: both are float32 numbers, and the float64 reference starts from the
very same ones. The sum over the positions then has one true value, however much cancels. Where a layer computes what
its weights see (gates, softmax, normalised inputs), those intermediate values are rounded before any rule sees them,
and float32 does not know the small rest at all; there the truth under cancellation is the float64 sum of the recorded
inputs and output gradients, and random data are compared with the reference itself.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import os
import pkgutil
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dpcore import Engine, native, reference
from dpcore.numerics.rounding import squares
from dpcore.reference import Gradients
from dpcore.rules import products
from dpcore.tape.uses import Use
from tests.dpcore.comparison import relative_error

EXAMPLES = 4

DEGREES = (1.0, 1e2, 1e4, 1e6)
"""How many times larger than their sum the gradients of the positions are, about. At 1 positions are opposite but for
a rest of their own size, and a ghost norm is still trusted: its rounding error is largest there."""

WATCHED = (
    "dpcore.rules.linear.gram_norm_sq",
    "dpcore.rules.linear.products",
    "dpcore.rules.linear.ContractionUse.example",
    "dpcore.rules.embedding.EmbeddingUse.add_example",
    "dpcore.rules.products._onednn",
    "dpcore.rules.convolution.gram_norm_sq",
    "dpcore.rules.convolution.matrices_norm_sq",
    "dpcore.rules.convolution.ConvolutionUse._unfolded",
    "dpcore.rules.convolution.ConvolutionUse._seen",
    "dpcore.rules.convolution.ConvolutionUse._window_gram",
    "dpcore.rules.embedding.EmbeddingUse._slots",
    "dpcore.rules.embedding.TokenCounts.add_rows",
    "dpcore.rules.embedding._pool",
    "dpcore.rules.embedding_bag.EmbeddingBagUse.add_clipped_sum",
    "dpcore.rules.vmap.ModuleUse._all",
    "dpcore.rules.broadcast.FactorUse.grad_sample",
    "dpcore.rules.normalization.NormUse.take",
    "dpcore.rules.recurrent_loops._gru_loop",
    "dpcore.rules.recurrent_loops._lstm_loop",
    "dpcore.rules.recurrent_loops._rnn_loop",
    "dpcore.native.add_by_token",
    "dpcore.native.contraction_grad_sample",
    "dpcore.native.contraction_into",
    "dpcore.native.contraction_norms",
    "dpcore.native.products.Products.clip",
    "dpcore.native.products.Products.form",
    "dpcore.native.conv2d_grad_sample",
    "dpcore.native.count_tokens",
    "dpcore.native.gru_backward",
    "dpcore.native.gru_forward",
    "dpcore.native.lstm_backward",
    "dpcore.native.lstm_forward",
    "dpcore.native.rnn_backward",
    "dpcore.native.rnn_forward",
)
"""Functions that tell the paths apart; the names of a path's own are unique endings of these."""

SINGLY = "dpcore.microbatch.accumulator.Accumulator._add_singly"
"""One example in float64: where a ghost norm cannot be trusted."""


@dataclass(frozen=True)
class Batch:
    """A model and its batch x [B, ...], y [B, ...], of the outputs' shape: see :func:`aligned`."""

    model: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Path:
    """One way through the engine.

    ``build(degree)``: a batch whose gradients cancel to 1/degree; None: random data. ``methods``: how each parameter's
    norm is taken, as ``Engine.explain`` has it. ``calls``: what of ``WATCHED`` runs on random data, and nothing else of
    it. ``compiled``: with the compiled kernels. ``cancels``: whether gradients can cancel at all. ``formed``: the rule
    itself adds up a gradient in float32, so that its error grows with the degree as that of ordinary training does.
    ``recorded``: the truth under cancellation is that of the recorded quantities. ``pieces``: physical batch size.
    ``masked``: every other example is.
    """

    name: str
    build: Callable[[float | None], Batch]
    methods: dict[str, str]
    calls: tuple[str, ...] = ()
    compiled: bool = False
    cancels: bool = True
    formed: bool = False
    recorded: bool = False
    pieces: int | None = None
    masked: bool = False
    degrees: tuple[float | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", (None, *(DEGREES if self.cancels else ())))


@dataclass(frozen=True)
class Errors:
    """``norms``: the worst relative error of an example's norm. ``sum``: relative L2 error of the clipped sum at the
    engine's factors, C the median norm. ``overshoot``: the largest norm that one example alone releases, over C, minus
    1."""

    norms: float
    sum: float
    overshoot: float


# ---- models and data


def aligned(outputs: Tensor, y: Tensor) -> Tensor:
    """[B]: the gradient at the outputs is y, exactly."""
    return (outputs * y).flatten(1).sum(1)


class First(nn.Module):
    """The first of a layer's outputs for x, given ``times`` over."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.times)[0]


class Reused(nn.Module):
    """One layer at the first and at the second half of the positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([self.layer(first), self.layer(second)], 1)


class Tied(nn.Module):
    """A table that is the output layer too."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, size)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.table(ids).sin(), self.table.weight)


class Averaged(nn.Module):
    """Ids [B, T] -> the mean of their vectors [B, d]."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, columns)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mean(1)


class WeightedBag(nn.Module):
    """x [B, 2, T], ids and their weights -> the weighted sum of the vectors [B, d]."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, columns, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x[:, 0].long(), per_sample_weights=x[:, 1].to(self.bag.weight.dtype))


class OwnScale(nn.Module):
    """A scale, by a product, which has a rule, or by a function that has none."""

    def __init__(self, features: int, by_rule: bool) -> None:
        super().__init__()
        self.by_rule = by_rule
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_rule:
            return (x * self.scale).sin()
        return torch.addcmul(torch.zeros_like(x), x, self.scale).sin()


def _alike(degree: float | None, positions: int, *shape: int) -> Tensor:
    """[B, positions, *shape]: the second half is the first but for 1/degree."""
    if degree is None:
        return torch.randn(EXAMPLES, positions, *shape)
    first = torch.randn(EXAMPLES, positions // 2, *shape)
    return torch.cat([first, first + torch.randn_like(first) / degree], 1)


def _opposite(degree: float | None, positions: int, *shape: int) -> Tensor:
    """[B, positions, *shape]: the second half is minus the first but for 1/degree."""
    y = _alike(degree, positions, *shape)
    if degree is not None:
        y[:, positions // 2 :].neg_()
    return y


def _linear(degree: float | None, positions: int, inputs: int, outputs: int) -> Batch:
    model, x = nn.Linear(inputs, outputs), _alike(degree, positions, inputs)
    return Batch(model, x, _opposite(degree, positions, outputs))


def _one_position(degree: float | None) -> Batch:
    return Batch(nn.Linear(40, 24), torch.randn(EXAMPLES, 40), torch.randn(EXAMPLES, 24))


def _reused(degree: float | None) -> Batch:
    batch = _linear(degree, 2, 24, 20)
    return Batch(Reused(batch.model), batch.x, batch.y)


def _convolution(
    degree: float | None, size: int, groups: int = 1, channels_last: bool = False, channels: int = 16
) -> Batch:
    """Without padding: where all pixels are nearly the same, so are all windows."""
    model = nn.Conv2d(channels, 32, 3, groups=groups)
    x = torch.randn(EXAMPLES, channels, size, size)
    if degree is not None:
        x = torch.randn(EXAMPLES, channels, 1, 1) + x / degree
    out = size - 2
    y = _opposite(degree, out * out, 32).transpose(1, 2).reshape(EXAMPLES, 32, out, out)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return Batch(model, x, y)


def _vectors(degree: float | None) -> Batch:
    ids = torch.randint(0, 5, (EXAMPLES, 8))
    return Batch(nn.Embedding(9, 24), torch.cat([ids, ids], 1), _opposite(degree, 16, 24))


def _tied(degree: float | None) -> Batch:
    return Batch(Tied(2100, 16), torch.randint(0, 40, (EXAMPLES, 6)), torch.randn(EXAMPLES, 6, 2100))


def _averaged(degree: float | None) -> Batch:
    return Batch(Averaged(9, 24), torch.randint(0, 9, (EXAMPLES, 16)), torch.randn(EXAMPLES, 24))


def _bag(degree: float | None) -> Batch:
    ids = torch.randint(0, 5, (EXAMPLES, 8))
    weights = _opposite(degree, 16)
    return Batch(WeightedBag(9, 24), torch.stack([torch.cat([ids, ids], 1), weights], 1), torch.randn(EXAMPLES, 24))


def _rnn_ghost(degree: float | None) -> Batch:
    """Four steps. Without recurrence and with steps alike, states are alike and gradients opposite at two steps."""
    layer = nn.RNN(32, 32, batch_first=True, nonlinearity="relu")
    x, y = torch.randn(EXAMPLES, 4, 32), torch.randn(EXAMPLES, 4, 32)
    if degree is not None:
        nn.init.zeros_(layer.weight_hh_l0)
        x = torch.randn(EXAMPLES, 1, 32) + x / degree
        large = torch.randn(EXAMPLES, 1, 32)
        nothing = torch.zeros_like(large)
        y = torch.cat([nothing, large, -large, nothing], 1) + y / degree
    return Batch(First(layer), x, y)


def _annihilated(make: Callable[[], nn.Module], degree: float | None, *shape: int) -> Batch:
    """Of any model with more outputs than parameters: y is from the null space of d outputs / d parameters, where the
    gradient is zero, plus 1/degree of anything."""
    model, x, outputs, bases = _null_spaces(make, shape)
    y = torch.randn(len(x), outputs[1:].numel())
    if degree is not None:
        y = y / degree
        for row, basis in zip(y, bases, strict=True):
            row += (basis @ torch.randn(basis.shape[1], dtype=torch.float64)).float()
    return Batch(copy.deepcopy(model), x, y.view(outputs))


@functools.cache
def _null_spaces(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> tuple[nn.Module, Tensor, torch.Size, list[Tensor]]:
    torch.manual_seed(1)
    model, x = make(), torch.randn(EXAMPLES, *shape)
    double = copy.deepcopy(model).double()
    bases = []
    for example in x.double().unbind(0):
        outputs = double(example.unsqueeze(0)).flatten()
        rows = [torch.autograd.grad(o, list(double.parameters()), retain_graph=True) for o in outputs]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        left, values, _ = torch.linalg.svd(jacobian)
        rank = int((values > 1e-9 * values[0]).sum())
        assert rank < len(jacobian), "more outputs than this are needed for gradients to cancel"
        bases.append(left[:, rank:])
    return model, x, model(x).shape, bases


def _rnn() -> nn.Module:
    return First(nn.RNN(3, 3, batch_first=True))


def _gru() -> nn.Module:
    return First(nn.GRU(2, 2, batch_first=True))


def _lstm() -> nn.Module:
    return First(nn.LSTM(2, 2, batch_first=True))


def _attention() -> nn.Module:
    return First(nn.MultiheadAttention(4, 2, batch_first=True), times=3)


def _layer_norm() -> nn.Module:
    return nn.LayerNorm(6)


def _own_scale(by_rule: bool) -> nn.Module:
    return OwnScale(5, by_rule)


# ---- the paths

KEEP, GHOST, TURN = "keep", "ghost", "turn"
LAYER = {"weight": GHOST, "bias": KEEP}
KEPT_LAYER = {"weight": KEEP, "bias": KEEP}
UNFOLD = "ConvolutionUse._unfolded"
GRAM = ("convolution.matrices_norm_sq", "ConvolutionUse._window_gram")
SEEN = ("linear.gram_norm_sq", "ConvolutionUse._seen")
POOLED = ("TokenCounts.add_rows", "embedding._pool")


def _recurrent(method: str) -> dict[str, str]:
    return {
        "layer.weight_ih_l0": method,
        "layer.weight_hh_l0": method,
        "layer.bias_ih_l0": KEEP,
        "layer.bias_hh_l0": KEEP,
    }


def _by_ghost_norm(degree: float | None) -> Batch:
    return _linear(degree, 4, 64, 48)


PATHS = (
    Path("linear, one position", _one_position, {"weight": GHOST, "bias": GHOST}, cancels=False),
    Path("linear, ghost norm", _by_ghost_norm, LAYER, ("linear.gram_norm_sq",)),
    Path("linear, ghost norm, pieces of 1", _by_ghost_norm, LAYER, ("linear.gram_norm_sq",), pieces=1),
    Path(
        "linear, ghost norm, compiled",
        _by_ghost_norm,
        LAYER,
        ("native.contraction_norms",),
        compiled=True,
    ),
    Path("linear, ghost norm, masked", _by_ghost_norm, LAYER, ("linear.gram_norm_sq",), masked=True),
    Path("linear, kept", lambda d: _linear(d, 32, 12, 10), KEPT_LAYER, ("linear.products",), formed=True),
    Path(
        "linear, kept, pieces of 3, masked",
        lambda d: _linear(d, 32, 12, 10),
        KEPT_LAYER,
        ("linear.products",),
        formed=True,
        pieces=3,
        masked=True,
    ),
    Path(
        "linear, kept, one product per example",
        lambda d: _linear(d, 128, 128, 128),
        KEPT_LAYER,
        ("linear.products", "products._onednn"),
        formed=True,
    ),
    Path(
        "linear, kept, compiled",
        lambda d: _linear(d, 128, 128, 128),
        KEPT_LAYER,
        ("native.contraction_grad_sample", "products._onednn"),
        compiled=True,
        formed=True,
    ),
    Path(
        "linear, in turn",
        lambda d: _linear(d, 64, 160, 224),
        {"weight": TURN, "bias": KEEP},
        ("ContractionUse.example", "products._onednn"),
        formed=True,
    ),
    Path(
        "linear, in turn, compiled",
        lambda d: _linear(d, 64, 160, 224),
        {"weight": TURN, "bias": KEEP},
        ("Products.clip", "products._onednn"),
        compiled=True,
        formed=True,
    ),
    Path(
        "table that is the output layer too, in turn, masked",
        _tied,
        {"table.weight": TURN},
        ("ContractionUse.example", "EmbeddingUse.add_example"),
        cancels=False,
        masked=True,
    ),
    Path("linear, used twice", _reused, {f"layer.{n}": KEEP for n in KEPT_LAYER}, ("linear.products",), formed=True),
    Path("convolution, ghost norm", lambda d: _convolution(d, 4), LAYER, SEEN),
    Path("convolution, ghost norm, channels-last", lambda d: _convolution(d, 4, 1, True), LAYER, SEEN),
    Path(
        "convolution, ghost norm, compiled",
        lambda d: _convolution(d, 4),
        LAYER,
        ("ConvolutionUse._seen", "native.contraction_norms"),
        compiled=True,
    ),
    Path("convolution, ghost norm by pixels", lambda d: _convolution(d, 4, channels=64), LAYER, GRAM),
    Path(
        "convolution, ghost norm by pixels, channels-last",
        lambda d: _convolution(d, 4, 1, True, 64),
        LAYER,
        GRAM,
    ),
    Path(
        "convolution in groups, ghost norm",
        lambda d: _convolution(d, 4, 2),
        LAYER,
        ("convolution.gram_norm_sq", UNFOLD),
    ),
    Path("convolution, kept", lambda d: _convolution(d, 12), KEPT_LAYER, (UNFOLD,), formed=True),
    Path(
        "convolution, kept, channels-last",
        lambda d: _convolution(d, 12, 1, True),
        KEPT_LAYER,
        (UNFOLD,),
        formed=True,
    ),
    Path(
        "convolution, kept, compiled",
        lambda d: _convolution(d, 12, 1, True),
        KEPT_LAYER,
        ("native.conv2d_grad_sample",),
        compiled=True,
        formed=True,
    ),
    Path(
        "convolution, kept, channels first, compiled",
        lambda d: _convolution(d, 12),
        KEPT_LAYER,
        ("native.conv2d_grad_sample",),
        compiled=True,
        formed=True,
    ),
    Path("embedding, repeated tokens", _vectors, {"weight": GHOST}, ("EmbeddingUse._slots",), formed=True),
    Path("embedding, averaged", _averaged, {"embedding.weight": GHOST}, POOLED, cancels=False),
    Path(
        "embedding, averaged, compiled",
        _averaged,
        {"embedding.weight": GHOST},
        (*POOLED, "native.count_tokens", "native.add_by_token"),
        compiled=True,
        cancels=False,
    ),
    Path(
        "embedding bag, weighted",
        _bag,
        {"bag.weight": GHOST},
        ("EmbeddingBagUse.add_clipped_sum",),
        formed=True,
    ),
    Path("RNN, ghost norm", _rnn_ghost, _recurrent(GHOST), ("linear.gram_norm_sq", "_rnn_loop"), recorded=True),
    Path(
        "RNN, kept",
        lambda d: _annihilated(_rnn, d, 16, 3),
        _recurrent(KEEP),
        ("linear.products", "recurrent_loops._rnn_loop"),
        formed=True,
        recorded=True,
    ),
    Path(
        "RNN, compiled loop",
        lambda d: _annihilated(_rnn, d, 16, 3),
        _recurrent(KEEP),
        ("native.contraction_grad_sample", "native.rnn_forward", "native.rnn_backward"),
        compiled=True,
        formed=True,
        recorded=True,
    ),
    Path(
        "GRU",
        lambda d: _annihilated(_gru, d, 20, 2),
        _recurrent(KEEP),
        ("linear.products", "recurrent_loops._gru_loop"),
        formed=True,
        recorded=True,
    ),
    Path(
        "GRU, compiled loop",
        lambda d: _annihilated(_gru, d, 20, 2),
        _recurrent(KEEP),
        ("native.contraction_grad_sample", "native.gru_forward", "native.gru_backward"),
        compiled=True,
        formed=True,
        recorded=True,
    ),
    Path(
        "LSTM",
        lambda d: _annihilated(_lstm, d, 24, 2),
        _recurrent(KEEP),
        ("linear.products", "recurrent_loops._lstm_loop"),
        formed=True,
        recorded=True,
    ),
    Path(
        "LSTM, compiled loop",
        lambda d: _annihilated(_lstm, d, 24, 2),
        _recurrent(KEEP),
        ("native.contraction_grad_sample", "native.lstm_forward", "native.lstm_backward"),
        compiled=True,
        formed=True,
        recorded=True,
    ),
    Path(
        "multihead attention",
        lambda d: _annihilated(_attention, d, 24, 4),
        {f"layer.{n}": KEEP for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")},
        ("linear.products",),
        formed=True,
        recorded=True,
    ),
    Path(
        "layer norm",
        lambda d: _annihilated(_layer_norm, d, 16, 6),
        KEPT_LAYER,
        ("NormUse.take",),
        formed=True,
        recorded=True,
    ),
    Path(
        "a scale by hand",
        lambda d: _annihilated(functools.partial(_own_scale, by_rule=True), d, 6, 5),
        {"scale": KEEP},
        ("FactorUse.grad_sample",),
        formed=True,
        recorded=True,
    ),
    Path(
        "no rule, vmap",
        lambda d: _annihilated(functools.partial(_own_scale, by_rule=False), d, 6, 5),
        {"scale": KEEP, "the whole model": "no rule, by vmap"},
        ("ModuleUse._all",),
        formed=True,
        recorded=True,
    ),
)


# ---- measuring


@contextmanager
def counted(names: Sequence[str]) -> Iterator[Counter[str]]:
    """How often each of the named functions is called within."""
    counts: Counter[str] = Counter()

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            holder, _, attribute = name.rpartition(".")
            place = pkgutil.resolve_name(holder)
            stack.enter_context(mock.patch.object(place, attribute, watching(name, getattr(place, attribute))))
        yield counts


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Gradients]]:
    """The float64 gradient of each example from what the engine has recorded of it, filled in by its next batch."""
    gradients: list[Gradients] = []
    add, names = engine.accumulator.add, engine.accumulator.names

    def one(uses: Sequence[Use], i: int) -> Gradients:
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for p, name in names.items()}
        for use in uses:
            if use.grad is not None:
                alone = use.rows(torch.tensor([i]), torch.float64)
                for p in use.params:
                    total[names[p]] += alone.grad_sample(p)[0]
        return total

    def record(uses: Sequence[Use], batch_size: int, *rest: Any) -> tuple[Tensor, Tensor]:
        gradients.extend(one(uses, i) for i in range(batch_size))
        return add(uses, batch_size, *rest)

    with mock.patch.object(engine.accumulator, "add", record):
        yield gradients


def build(path: Path, degree: float | None, seed: int = 0) -> Batch:
    torch.manual_seed(seed)
    return path.build(degree)


def truth(path: Path, degree: float | None, batch: Batch) -> list[Gradients]:
    """The true gradient of each example."""
    if degree is None or not path.recorded:
        return list(reference.example_gradients(batch.model, aligned, batch.x, batch.y))
    # Gradients that cancel to a millionth are rounding where a batch of another length is compared.
    engine = Engine(batch.model, aligned, physical_batch_size=path.pieces, check_isolation=False)
    with recorded(engine) as gradients:
        engine.clipped_sum(batch.x, batch.y)
    return gradients


def check_path(path: Path, degree: float | None, engine: Engine, counts: Counter[str]) -> None:
    """That the engine went the way whose name the path has: a choice of the planner must not turn one into another."""
    plan = dict(line.split(": ", 1) for line in engine.explain().splitlines())
    pieces = plan.pop("physical batch size")
    assert plan.pop("compiled kernels").startswith("in use") == path.compiled, path.name
    assert plan == path.methods, (path.name, plan)
    assert path.pieces is None or pieces == str(path.pieces), (path.name, pieces)
    calls = {c for c in path.calls if c != "products._onednn" or products._AVAILABLE}
    watched = {name for name in counts if name != SINGLY}
    found = {name for name in watched if any(name.endswith(f".{c}") for c in calls)}
    assert len(found) == len(calls), (path.name, watched)
    ghost = GHOST in path.methods.values() and not path.formed
    # An example in float64 goes through other functions too.
    if counts[SINGLY]:
        assert degree is not None and ghost, path.name
        assert not any(".native." in name for name in watched - found), (path.name, watched)
    else:
        assert watched == found, (path.name, watched)
        assert degree is None or degree < 10 or not ghost, f"{path.name}: a ghost norm was trusted at {degree:g}"


def measure(path: Path, degree: float | None, seed: int = 0) -> Errors:
    """Runs the batch and each of its examples alone; AssertionError where the engine took another path."""
    with nullcontext() if path.compiled else native.disabled():
        batch = build(path, degree, seed)
        gradients = truth(path, degree, batch)
        norms = torch.stack([reference.norm(g) for g in gradients])
        mask = torch.arange(EXAMPLES) % 2 == 0 if path.masked else torch.ones(EXAMPLES, dtype=torch.bool)
        bound = float(norms[mask].median())
        engine = Engine(
            batch.model, aligned, max_grad_norm=bound, physical_batch_size=path.pieces, check_isolation=False
        )
        # The first batch is the one that learns; what is deferred is deferred from then on.
        engine.clipped_sum(batch.x, batch.y)
        with counted([*WATCHED, SINGLY]) as counts:
            result = engine.clipped_sum(batch.x, batch.y, mask if path.masked else None)
        check_path(path, degree, engine, counts)
        # The engine's own factors: it clips a little below C on purpose, which would hide what is lost beyond it. What
        # one example releases (below) is right only if they are.
        clipped = {
            name: torch.stack([f * g[name] for f, g in zip(result.factors.double(), gradients, strict=True)]).sum(0)
            for name in gradients[0]
        }
        error = float(((result.norms.double() - norms).abs() / norms)[mask].max())
        return Errors(error, relative_error(result.sums, clipped), overshoot(path, batch, float(norms.min()), bound))


def overshoot(path: Path, batch: Batch, smallest: float, median: float) -> float:
    """The largest |released| / C - 1 of any example alone: half of them clipped, and all of them."""
    worst = -1.0
    for bound in (median, 0.5 * smallest):
        engine = Engine(
            batch.model, aligned, max_grad_norm=bound, physical_batch_size=path.pieces, check_isolation=False
        )
        for i in range(EXAMPLES):
            sums = engine.clipped_sum(batch.x[i : i + 1], batch.y[i : i + 1]).sums
            released = sum(float(s.double().square().sum()) for s in sums.values()) ** 0.5
            worst = max(worst, released / bound - 1.0)
    return worst


@contextmanager
def own_kernels(cache: File) -> Iterator[bool]:
    """The compiled kernels, built into ``cache`` unless they are there; whether there is a compiler to build them.

    Other processes may ask for the same ones: the first compiles them, the others wait.
    """
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
        os.environ.pop("DPCORE_NATIVE", None)
        native.reload()
        found = bool(os.environ.get("CXX")) or any(shutil.which(c) for c in native.COMPILERS)
        if found:
            with (cache / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                native.build()
            assert native.available()
        try:
            yield found
        finally:
            native.reload()
    native.reload()


# ---- the document

INTRODUCTION = """# Exactness of dpcore's fast paths

Each row is one way of the engine to norms and clipped sums, in float32, compared with float64.
In the columns "x 100" and so on the gradients of positions are about 100 times larger than their sum: they cancel.
No example alone releases more than C: the last figure of each cell, its norm over C minus 1, is never above 0.
"""

NOTES = """A cell: worst relative error of a norm / relative error of the clipped sum, C the median norm / overshoot.

- The engine clips below C on purpose, by what rounding may have hidden (see the next table), and so does the float64
  sum. That margin is what keeps the last figure below 0.
- A ghost norm that cannot be trusted is noticed. Its example's gradient is formed: where its positions add up to more
  than 32 times their sum in float64, so that errors do not grow, and else in float32, as the rows with + are.
- The rows with + add up a gradient in float32, as ordinary training does. Their error grows as that of ordinary
  training. They release that very sum, clipped by its own norm, so the bound holds nevertheless.
- The rows with * are layers that compute in float32 what their weights see. Where gradients cancel, the truth is the
  float64 sum of the recorded inputs and output gradients. For random data it is the whole model in float64, as in all
  other rows.
- A dash: gradients of this path cannot cancel. There is one position, or all positions share one gradient.
"""

SIZES = """## The size of a gradient

Errors of the norm of n equal numbers, relative to the true one. In a single float32 sum torch adds small squares to a
large total, and loses their ends. The last column is proven (`dpcore/numerics/rounding.py`), whatever order torch adds
in; the clip factor is taken from the norm and this bound, so that the real norm is at most C.
"""


def sizes() -> list[str]:
    """The rows of the second table."""
    lines = ["| n | one float32 sum | dpcore | its bound |", "|---|---|---|---|"]
    for n in (10**3, 10**4, 10**5, 10**6, 10**7, 10**8):
        row = torch.full((1, n), 1e-3)
        truth = float(row[0, 0].double()) * n**0.5
        found = squares(row)
        errors = (float(torch.linalg.vector_norm(row, dim=1)) / truth - 1.0, float(found.value) ** 0.5 / truth - 1.0)
        lines.append(f"| 1e{len(str(n)) - 1} | {errors[0]:.1e} | {errors[1]:.1e} | {found.error / 2:.1e} |")
    return lines


def _processor() -> str:
    try:
        lines = File("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def document(compiled: bool) -> str:
    """docs/exactness.md, with or without the rows of the compiled kernels."""
    heads = ["path", "random data", *(f"x {d:g}" for d in DEGREES)]
    lines = [" | ".join(["", *heads, ""]).strip(), "|".join(["", *["---"] * len(heads), ""])]
    for path in PATHS:
        cells = [path.name + " +" * path.formed + " *" * path.recorded]
        for degree in (None, *DEGREES):
            if degree not in path.degrees:
                cells.append("-")
            elif path.compiled and not compiled:
                cells.append("no compiler")
            else:
                found = measure(path, degree)
                cells.append(" / ".join(f"{v:.1e}" for v in (found.norms, found.sum, found.overshoot)))
        lines.append(" | ".join(["", *cells, ""]).strip())
    where = f"Measured, float32 against float64: torch {torch.__version__}, {_processor()}; `make prove-exactness`."
    return "\n".join([INTRODUCTION, where, "", *lines, "", NOTES, SIZES, *sizes()])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache, own_kernels(File(cache)) as compiled:
        print(document(compiled))


if __name__ == "__main__":
    main()
