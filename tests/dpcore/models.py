"""The matrix of architectures: clipped sums of transformers, PEFT and timm models beside a float64 loop over examples.

``python -m tests.dpcore.models`` runs it and writes docs/models.md, with ``--group K`` the page's section on units of K
rows; ``--json FILE`` keeps the figures. It needs tests/requirements-models.txt.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpcore
from dpcore import Engine, PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.example_isolation import check as isolation
from dpcore.reference import clip_factor, norm
from tests.dpcore.adapters import PLACES, adapters
from tests.dpcore.architectures import Architecture, Batch, architectures
from tests.dpcore.comparison import relative_error

ERROR, HALF_ERROR = 1e-5, 1e-2
LOWERED = 1e-4
CONTRIBUTION = 1.0 + 1e-6
MODES = ("Engine", "two lines", "hooks", "ghost", "Engine, bf16", "two lines, bf16")
NO_RULE = ": no rule"
PAGE = Path("docs/models.md")
UNITS = "## Units of several rows"


@dataclass(frozen=True)
class Truth:
    """A loop over the examples, one at a time: its clipped sum, and the C that it was clipped to."""

    clipped: dict[str, Tensor]
    bound: float
    each: list[dict[str, Tensor]]
    factors: list[float]

    def at(self, factors: Tensor) -> dict[str, Tensor]:
        """The sum at other clip factors [B]."""
        return _sum(self.each, factors.double())


@dataclass(frozen=True)
class Outcome:
    """``what``: right, refused, wrong or crash. ``error``: relative to the float64 loop; in float32 ``apart``, the same
    to the loop's sum at the factors that the engine used. ``most``: the largest contribution of an example over C (bf16
    by the engine). ``sentence``: of a refusal or a crash.
    """

    what: str
    error: float = 0.0
    apart: float = 0.0
    most: float = 0.0
    sentence: str = ""


@dataclass(frozen=True)
class Row:
    """One architecture: its outcome in every mode, and the modules that are run again for want of a rule."""

    name: str
    library: str
    outcomes: dict[str, Outcome]
    fallbacks: tuple[str, ...]
    lowered: float
    """By how much of itself the engine's clip factor of an example is below the true one, at most."""
    ordinary: tuple[float, float]
    """Errors of torch's own loop over the examples, in float32 and under bfloat16 autocast."""


def every() -> list[Architecture]:
    """The architectures, each trained as a whole and then by adapters."""
    bases = architectures()
    return [*bases, *adapters(bases)]


def call(model: Any, x: Any) -> Any:
    """The model's outputs."""
    return model(**x) if isinstance(x, dict) else model(x)


def loop(
    architecture: Architecture, model: nn.Module, batch: Batch, bound: float | None = None, group: int = 1
) -> Truth:
    """One example, the mean of its ``group`` rows, at a time by torch alone; C is the median norm."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = []
    for i in range(len(batch.y) // group):
        one = batch.example(i, group)
        loss = architecture.losses(architecture.scores(call(model, one.x)), one.y).mean()
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
        each.append({name: g.double() for name, g in zip(trained, found, strict=True)})
    norms = torch.stack([norm(gradients) for gradients in each])
    bound = float(norms.median()) if bound is None else bound
    factors = [clip_factor(n, bound) for n in norms]
    return Truth(_sum(each, factors), bound, each, factors)


def _sum(each: Sequence[dict[str, Tensor]], factors: Iterable[Any]) -> dict[str, Tensor]:
    return {name: sum(f * g[name] for f, g in zip(factors, each, strict=True)) for name in each[0]}


def by_engine(
    architecture: Architecture, model: nn.Module, batch: Batch, bound: float, group: int = 1
) -> tuple[dict[str, Tensor], Tensor, Engine]:
    """(the clipped sum, the clip factors, the engine)."""
    engine = Engine(
        model,
        lambda outputs, y: architecture.losses(architecture.scores(outputs), y),
        max_grad_norm=bound,
        group=group,
    )
    result = engine.clipped_sum(batch.x, batch.y)
    return {name: value.clone() for name, value in result.sums.items()}, result.factors, engine


class _Criterion(nn.Module):
    """An architecture's losses as a criterion with a reduction."""

    def __init__(self, losses: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.losses, self.reduction = losses, "mean"

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        losses = self.losses(scores, y)
        return losses if self.reduction == "none" else losses.mean()


def by_loop(
    architecture: Architecture, model: nn.Module, batch: Batch, bound: float, mode: str | None, group: int = 1
) -> dict[str, Tensor]:
    """The gradient that one step of the private loop releases; ``mode`` None: the two lines as they are."""
    criterion = _Criterion(architecture.losses)
    made = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(range(examples := len(batch.y) // group), examples, collate_fn=lambda rows: batch),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        sample_rate=1.0,
        expected_batch_size=1,
        criterion=criterion,
        group=group,
        **({} if mode is None else {"grad_sample_mode": mode}),
    )
    private, optimizer, *middle, loader = made
    criterion = middle[0] if middle else criterion
    for given in loader:
        optimizer.zero_grad()
        criterion(architecture.scores(call(private, given.x)), given.y).backward()
        optimizer.step()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def outcome(
    architecture: Architecture,
    expected: Truth,
    mode: str,
    factors: Tensor | None,
    ordinary: float,
    batch: Batch,
    group: int = 1,
) -> tuple[Outcome, Tensor | None, Engine | None]:
    """What comes of an architecture in a mode, and from an engine its factors; ``factors``: those of the first mode.

    ``ordinary``: the error of torch's own loop under bfloat16 autocast.
    """
    model, engine = architecture.model(), None
    kind, _, half = mode.partition(", ")
    most = 0.0
    with (
        warnings.catch_warnings(),
        mock.patch.object(isolation, "random", SimpleNamespace(Random=lambda: random.Random(7))),
        torch.autocast("cpu", torch.bfloat16) if half else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        try:
            if kind == "Engine":
                sums, used, engine = by_engine(architecture, model, batch, expected.bound, group)
                factors = factors if half else used
                if half:
                    most = max(contribution(engine, batch, i) for i in range(len(used))) / expected.bound
            else:
                loop_mode = None if kind == "two lines" else kind
                sums = by_loop(architecture, model, batch, expected.bound, loop_mode, group)
        except Exception as error:  # whatever it is, it is an outcome
            return _failed(error), None, None
    error = apart = relative_error(sums, expected.clipped)
    if factors is not None and not half:
        apart = relative_error(sums, expected.at(factors))
    limit = max(HALF_ERROR, 2 * ordinary) if half else ERROR
    bad = not apart <= limit or not most <= CONTRIBUTION
    return Outcome("wrong" if bad else "right", error, apart, most), factors, engine


def contribution(engine: Engine, batch: Batch, i: int) -> float:
    """The norm of what example i adds to the sum, the others being there and masked."""
    mask = torch.arange(len(batch.y) // engine.group) == i
    sums = engine.clipped_sum(batch.x, batch.y, mask).sums
    return float(norm({name: value.double() for name, value in sums.items()}))


def _failed(error: Exception) -> Outcome:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    own = Path(frame.filename).is_relative_to(Path(dpcore.__file__).parent)
    refused = isinstance(error, PrivacyError | UnsupportedError) or (own and isinstance(error, ValueError))
    line = f"{'' if refused else type(error).__name__ + ': '}{error}".split("\n")[0]
    return Outcome("refused" if refused else "crash", sentence=line)


def row(architecture: Architecture, modes: Sequence[str] = MODES, group: int = 1) -> Row:
    """All of an architecture's outcomes; ``group``: of three examples of so many rows."""
    model, batch = architecture.model(), architecture.batch()
    if group > 1:
        batch = batch.rows(torch.arange(3 * group).flip(0) % len(batch.y))
    expected, outcomes = loop(architecture, architecture.model().double(), batch.double(), None, group), {}
    own = loop(architecture, model, batch, expected.bound, group)
    with torch.autocast("cpu", torch.bfloat16):
        half = loop(architecture, model, batch, expected.bound, group)
    ordinary = relative_error(own.clipped, expected.clipped), relative_error(half.clipped, expected.clipped)
    fallbacks: tuple[str, ...] = ()
    factors, lowered = None, 0.0
    for mode in modes:
        outcomes[mode], factors, engine = outcome(architecture, expected, mode, factors, ordinary[1], batch, group)
        if engine is not None and mode == "Engine":
            lines = [line for line in engine.explain().splitlines() if NO_RULE in line]
            fallbacks = tuple(line.partition(NO_RULE)[0] for line in lines)
            lowered = float((1.0 - factors.double() / torch.tensor(expected.factors)).max())
            above = float((factors.double() / torch.tensor(expected.factors)).max())
            if not above <= CONTRIBUTION or not lowered <= LOWERED:
                outcomes[mode] = replace(outcomes[mode], what="wrong")
    return Row(architecture.name, architecture.library, outcomes, fallbacks, lowered, ordinary)


HEAD = f"""# Architectures

Made by `python -m tests.dpcore.models` (or `make test-models`), from the root. Small random weights, texts of different
lengths, no dropout; what is compared is the clipped sum without noise, clipped to the median norm.

* A figure is the relative error beside a loop over the examples in float64.
* *lowered*: clip factors are below the true ones by what rounding may hide of a norm, so that no example exceeds C;
  this is by how much, at most. It is a part of the errors in float32.
* *right* in float32: at most {ERROR:.0e} beside the loop's sum at the factors that were used, none of them above the
  true one or more than {LOWERED:.0e} below it. Under bfloat16 autocast: at most {HALF_ERROR:.0e}, or twice what
  torch's own loop has there, and no example adds more than C (1 + 1e-6).
* *Engine*, *two lines* (`make_private`), *hooks* and *ghost* are the modes of [dpcore.md](dpcore.md).
* *loop*: the same loop over the examples by torch alone in float32, and under bfloat16 autocast: what the precision
  itself leaves.
* *most*: the largest norm of what one example adds to the sum under bfloat16 autocast, over C.
* *fallbacks*: modules that are run again by example, because dpcore has no rule for what they do with a parameter.
"""

ADAPTERS = """## With adapters

PEFT's adapters on all of them, with random values in what is trained, as many adapters begin at zero. LoRA and DoRA
are on projections of the attention, or on hidden layers or convolutions where there is none; IA3 scales keys, values
and what the last hidden layer is given. A classifier's head is trained too. PEFT has no prefix tuning for pictures and
masked words, nor for models that are not given past keys and values:"""


def document(rows: Sequence[Row], versions: str) -> str:
    """The tables as a page."""
    whole, adapted = ([each for each in rows if (each.library == "peft") is kind] for kind in (False, True))
    without = [name for name, at in PLACES.items() if at.task is not None and not at.prefix]
    sentences = [
        f"* {each.name}, {mode}: {found.sentence}"
        for each in rows
        for mode, found in each.outcomes.items()
        if found.sentence
    ]
    parts = [
        [HEAD, versions, "", summary(rows)],
        ["## Trained as a whole", "", *_table(whole)],
        [f"{ADAPTERS} {', '.join(without)}.", "", *_table(adapted)],
        ["Sentences:", "", *sentences] if sentences else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def of_units(rows: Sequence[Row], group: int, versions: str) -> str:
    """The section on units of ``group`` rows: counts by mode, and the largest errors in float32."""
    found = [(each.name, each.outcomes[mode]) for each in rows for mode in MODES[:4]]
    apart, error = (max(found, key=lambda one: getattr(one[1], what)) for what in ("apart", "error"))
    above = sum(one.error > ERROR for _, one in found)
    return f"""{UNITS}

All of the above with `--group {group}`: three [units](privacy-unit.md) of {group} rows each, in which rows of the batch
come again, beside a loop over the units in float64. {versions}

{summary(rows)}
* largest error in float32 beside the loop's sum at the factors that were used: {apart[1].apart:.1e} ({apart[0]});
  beside the loop's own sum, from which lowered factors differ too: {error[1].error:.1e} ({error[0]}), above \
{ERROR:.0e} in {above} of {len(found)}
"""


def _write(rows: Sequence[Row], group: int, versions: str) -> None:
    """Writes the page, or its section on units; either leaves the other as it is."""
    before, _, units = PAGE.read_text().partition(UNITS) if PAGE.exists() else ("", "", "")
    if group > 1:
        PAGE.write_text(f"{before.rstrip()}\n\n{of_units(rows, group, versions)}")
    else:
        PAGE.write_text(document(rows, versions) + (f"\n{UNITS}{units}" if units else ""))


def _table(rows: Sequence[Row]) -> list[str]:
    names = ["lowered", "loop", *MODES[:4], "loop, bf16", MODES[4], "most", MODES[5]]
    lines = [f"| architecture | {' | '.join(names)} | fallbacks |", "|---" * (len(names) + 2) + "|"]
    for each in rows:
        cells = [_cell(each.outcomes[mode]) for mode in MODES]
        half = each.outcomes[MODES[4]]
        cells.insert(5, f"{half.most:.7f}" if half.most else "")
        cells.insert(4, f"{each.ordinary[1]:.1e}")
        cells = [f"{each.lowered:.1e}", f"{each.ordinary[0]:.1e}", *cells]
        fallbacks = f"{len(each.fallbacks)}: {', '.join(each.fallbacks)}" if each.fallbacks else "0"
        lines.append(f"| {each.name} | {' | '.join(cells)} | {fallbacks} |")
    return lines


def _cell(found: Outcome) -> str:
    if found.what in ("refused", "crash"):
        return found.what
    return f"{found.error:.1e}" + (" **wrong**" if found.what == "wrong" else "")


def summary(rows: Sequence[Row]) -> str:
    """How many are right, refused, wrong or crash, by mode; and how many have fallbacks."""
    lines = []
    for mode in MODES:
        counts = Counter(each.outcomes[mode].what for each in rows)
        lines.append(
            f"* {mode}: " + ", ".join(f"{counts[what]} {what}" for what in ("right", "refused", "wrong", "crash"))
        )
    several = [each for each in rows if each.fallbacks]
    count = sum(len(each.fallbacks) for each in several)
    return "\n".join([*lines, f"* fallbacks: {count} in {len(several)} of {len(rows)} architectures"])


def main() -> int:
    """Runs the matrix and writes its page; 1 if a cell is not right, or a module is run again by example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--only", default="", help="architectures whose name contains this; nothing is written then")
    parser.add_argument("--group", type=int, default=1, help="rows of an example")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for architecture in every():
        if given.only.lower() in architecture.name.lower():
            rows.append(row(architecture, group=given.group))
            print(rows[-1].name, {m: (_cell(o), o.sentence[:300]) for m, o in rows[-1].outcomes.items()}, flush=True)
            print(
                "   ",
                [f"{e:.1e}" for e in rows[-1].ordinary],
                f"{rows[-1].outcomes[MODES[4]].most:.7f}",
                len(rows[-1].fallbacks),
                rows[-1].fallbacks,
                flush=True,
            )
    print(summary(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    if not given.only:
        import peft
        import timm
        import transformers

        libraries = (torch, transformers, peft, timm)
        versions = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
        _write(rows, given.group, f"With {versions}.")
    bad = [each.name for each in rows if each.fallbacks or any(o.what != "right" for o in each.outcomes.values())]
    if bad:
        print(f"Not right in every mode, or with fallbacks: {'; '.join(bad)}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
