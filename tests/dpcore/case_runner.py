"""Trains a case privately without noise, and compares with one example at a time in float64 and with its neighbours.

An outcome is "right" (the weights are those of the loop over examples, and no example moves them by more than the
bound), "refused" (one of dpcore's own sentences), "wrong" or "crash".
"""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import dpcore
from dpcore import Engine, PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.example_isolation import check as isolation
from dpcore.reference import clip_factor

ERROR, SENSITIVITY = 1e-4, 1.0 + 1e-5
Loss = Callable[[Any, Any], Tensor]
"""(model, collated batch) -> the mean of the losses of its examples."""


def vectors() -> list[Any]:
    """Eight examples (x [6], label below 3)."""
    numbers = torch.Generator().manual_seed(3)
    return [(torch.randn(6, generator=numbers), k % 3) for k in range(8)]


def classify(model: Any, batch: Any) -> Tensor:
    """Cross entropy of the model's outputs [B, classes]."""
    *inputs, y = batch
    return F.cross_entropy(model(*inputs), y)


def loop(model: Any, optimizer: Any, loader: Any, loss: Loss) -> None:
    """The ordinary loop."""
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def sgd(parameters: Any) -> Any:
    """The optimizer whose change of the weights is the clipped sum."""
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass(frozen=True)
class Case:
    """``kind``: "honest" (right, or one clear sentence), "leak" (refused) or "wrong" (right or refused). A model is
    built anew, with the same weights, for every run. ``unseen``: the words of docs/privacy.md about a leak that is not
    seen.

    ``clip``: the bound as a multiple of the median norm. ``truth``: whether the loop over examples is the truth (not so
    with random numbers). ``per_example``: for ``Engine``, (outputs, y) -> [B] losses.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    examples: Callable[[], Sequence[Any]] = vectors
    loss: Loss = classify
    loop: Callable[[Any, Any, Any, Loss], None] = loop
    optimizer: Callable[[Any], Any] = sgd
    collate: Callable[[list[Any]], Any] = default_collate
    loader: Callable[..., Any] = DataLoader
    options: dict[str, Any] = field(default_factory=dict)
    poisson: bool = True
    rounds: int = 1
    clip: float = 1.0
    truth: bool = True
    per_example: Callable[[Any, Tensor], Tensor] | None = None
    autocast: bool = False
    half: bool = False
    tolerance: float = ERROR
    unseen: str = ""

    @property
    def expected(self) -> str:
        if self.unseen:
            return "unseen, documented"
        return {"honest": "right", "leak": "refused", "wrong": "right or refused"}[self.kind]


@dataclass(frozen=True)
class Outcome:
    """``what``: right, refused, wrong, crash or unseen; ``line``: the measured figures or the sentence."""

    what: str
    line: str

    def fits(self, case: Case) -> bool:
        """Whether it is an outcome that the case may have."""
        if case.unseen:
            return self.what == "unseen"
        return (
            self.what
            in {"honest": ("right", "refused"), "leak": ("refused",), "wrong": ("right", "refused")}[case.kind]
        )


def run(case: Case) -> Outcome:
    """What comes of a case."""
    with warnings.catch_warnings(), mock.patch.object(isolation, "random", SimpleNamespace(Random=_fixed)):
        warnings.simplefilter("ignore")
        torch.manual_seed(11)
        try:
            outcome = _measured(case)
        except Exception as error:  # whatever it is, it is an outcome
            outcome = _failed(error)
    if case.unseen and outcome.what == "wrong":
        return Outcome("unseen", f"{outcome.line}; docs/privacy.md: {case.unseen}")
    return outcome


def _fixed() -> random.Random:
    return random.Random(7)


def _failed(error: Exception) -> Outcome:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    own = Path(frame.filename).is_relative_to(Path(dpcore.__file__).parent)
    sentence = isinstance(error, PrivacyError | UnsupportedError) or (own and isinstance(error, ValueError | TypeError))
    line = f"{'' if sentence else type(error).__name__ + ': '}{error}".split("\n")[0]
    return Outcome("refused" if sentence else "crash", line)


def _measured(case: Case) -> Outcome:
    examples = case.examples()
    bound = _bound(case, examples)
    if case.kind == "leak":
        _change(replace(case, rounds=isolation.BATCHES), examples, bound)
    change = _change(case, examples, bound)
    error = 0.0
    if case.truth:
        expected = _expected(case, examples, bound)
        error = float((change - expected).norm() / expected.norm().clamp_min(1e-30))
    most = 0.0
    if case.optimizer is sgd and case.rounds == 1:
        # What mixes examples is refused above, at the latest; here the influence itself is measured.
        bare = replace(case, options={"check_isolation": False} | case.options)
        for k in range(len(examples)):
            others = [e for i, e in enumerate(examples) if i != k]
            # In half precision the length of a batch rounds all others anew; there an example is measured alone.
            own = _change(bare, [examples[k]], bound) if case.half else change - _change(bare, others, bound)
            most = max(most, float(own.norm()) / bound)
    line = f"error {error:.1e}, sensitivity {most:.3f} C" if case.truth else f"sensitivity {most:.3f} C"
    # Weights in bfloat16 cannot show a change more exactly.
    limit = 1.02 if any(p.dtype == torch.bfloat16 for p in _model(case).parameters()) else SENSITIVITY
    bad = error > case.tolerance or not most <= limit
    return Outcome("wrong" if bad else "right", line)


def _model(case: Case) -> nn.Module:
    torch.manual_seed(5)
    return case.model()


def _state(model: nn.Module) -> Tensor:
    """All that a release holds: parameters and buffers of floating point."""
    held = (*model.parameters(), *model.buffers())
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in held if t.is_floating_point() or t.is_complex()]
    return torch.cat([t.detach().double().flatten() for t in parts])


def _change(case: Case, examples: Sequence[Any], bound: float) -> Tensor:
    """What private training on these examples adds to the state of the model."""
    model = _model(case)
    before = _state(model)
    torch.manual_seed(6)
    if case.per_example is not None:
        x, y = case.collate(list(examples))
        optimizer = case.optimizer(model.parameters())
        engine = Engine(
            model,
            case.per_example,
            max_grad_norm=bound,
            noise_multiplier=0.0,
            expected_batch_size=1,
            optimizer=optimizer,
            **case.options,
        )
        for _ in range(case.rounds):
            engine.step(x, y)
        return _state(model) - before
    loader = case.loader(list(examples), batch_size=len(examples), collate_fn=case.collate)
    made = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=case.optimizer(model.parameters()),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=case.poisson,
        **({"sample_rate": 1.0, "expected_batch_size": 1} | case.options),
    )
    private, optimizer, *_, private_loader = made
    used = model if isinstance(case.options.get("wrap_model"), bool) else private
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
        for _ in range(case.rounds):
            case.loop(used, optimizer, private_loader, case.loss)
    return _state(model) - before


def _gradients(case: Case, model: nn.Module, examples: Sequence[Any]) -> list[list[Tensor]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for example in examples:
        batch = _in_double(case.collate([example])) if trained[0].dtype == torch.float64 else case.collate([example])
        if case.per_example is not None:
            x, y = batch
            loss = case.per_example(model(*x) if type(x) is tuple else model(x), y).sum()
        else:
            loss = case.loss(model, batch)
        found.append(
            [g.detach() for g in torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]
        )
    return found


def _norm(gradients: list[Tensor]) -> Tensor:
    return torch.stack([g.double().abs().square().sum() for g in gradients]).sum().sqrt()


def _bound(case: Case, examples: Sequence[Any]) -> float:
    norms = torch.stack([_norm(g) for g in _gradients(case, _model(case).double(), examples)])
    return float(norms[norms.isfinite()].median()) * case.clip or 1.0


def _expected(case: Case, examples: Sequence[Any], bound: float) -> Tensor:
    """The change by DP-SGD without noise, one example at a time in float64."""
    model = _model(case).double()
    before = _state(model)
    optimizer = case.optimizer(model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(case.rounds):
        sums = [torch.zeros_like(p) for p in trained]
        for gradients in _gradients(case, model, examples):
            factor = clip_factor(_norm(gradients), bound)
            for total, g in zip(sums, gradients, strict=True):
                if factor:
                    total += factor * g
        for p, total in zip(trained, sums, strict=True):
            p.grad = total
        optimizer.step()
    return _state(model) - before


def _in_double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({k: _in_double(v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_in_double(v) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(_in_double(v) for v in value)
    if hasattr(value, "in_double"):
        return value.in_double()
    return copy.deepcopy(value)
