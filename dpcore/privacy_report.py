"""One page about a run's privacy, for whoever has to answer for the model: what is promised, and what is not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dpcore.accountants import create_accountant
from dpcore.accountants.accountant import rate_words, totals
from dpcore.accountants.pld import PLDAccountant
from dpcore.accountants.utils import customary_delta, rounded_up
from dpcore.checkpoint import Checkpoint
from dpcore.loading.epoch_sampler import CUT
from dpcore.log_chart import COLOURS, Axis, Curve, chart
from dpcore.privacy_engine import PrivacyEngine

NOT_COVERED = (
    "Settings, architectures and checkpoints that were chosen by their results on the same data.",
    "What was computed from the data before training: vocabularies, means, labels that were mended, deduplication.",
    "How many examples there are, which this page tells.",
    "Other models and figures made from the same data; their losses add up.",
    "A person with several examples: the promise is for one example, and weaker for all of theirs together.",
    "The training machine: its memory, its clock, and checkpoints, which hold the seed of the noise.",
)
SEEDED = "the noise is of a seed that was chosen, and protects nothing from those who know it."
UNEXAMINED = "check_isolation=False: nobody has looked whether the model mixes examples, which would void all figures."
OF_USERS = "A person with two ids, or whose rows have somebody else's."
"""Stands in the place of the sentence on people where users are the unit."""
_SUBSAMPLED = ("prv", "rdp", "gdp")
"""Accountants whose history is one of Poisson-subsampled Gaussian steps, whatever they make of it."""
ATTACKS = "What the best attack on membership reaches"
DRAWN = {
    "poisson": "Poisson samples, drawn by dpcore",
    "bins": "balls in bins: in each epoch every unit is in one batch, uniformly and independently; a begun one counts",
    "shuffle": "shuffled epochs, counted without amplification: an upper bound for units that are replaced by nothing "
    "(zeros), of a number that is known",
    "cycle": "the same batches in every epoch, in one order, counted without amplification: an upper bound for units "
    "that are replaced by nothing (zeros), of a number that is known",
}
_RATES = (0.001, 0.01, 0.1)
STYLE = (
    # A notebook shows the page among others: nothing here is about what is around it.
    ".dpcore-report{font:16px/1.5 sans-serif;max-width:46em;margin:auto;padding:1em;color-scheme:light dark;"
    "background:Canvas;color:CanvasText;--faint:color-mix(in srgb,CanvasText 18%,Canvas);"
    "--pale:color-mix(in srgb,CanvasText 65%,Canvas)}"
    ".dpcore-report table{border-collapse:collapse;margin-bottom:1.5em}"
    ".dpcore-report :is(td,th){border-bottom:1px solid var(--faint);padding:.3em 1.2em .3em 0;text-align:left;"
    "vertical-align:top}.dpcore-report th{color:var(--pale);font-weight:normal;white-space:nowrap}"
    ".dpcore-report .promise{font-size:1.15em}"
    ".dpcore-report .warning{background:#fff3cd;color:#222;padding:.6em 1em}"
    ".dpcore-report svg{display:block;width:100%;max-width:560px;height:auto}"
    # What is white or dark in the figure by itself follows the page.
    ".dpcore-report svg rect{fill:none}.dpcore-report svg text{fill:CanvasText}"
    '.dpcore-report svg [stroke="#ddd"]{stroke:var(--faint)}'
    f'.dpcore-report svg [stroke="{COLOURS[0]}"]{{stroke:light-dark({COLOURS[0]},#6cb2ff)}}'
)


@dataclass(frozen=True)
class Table:
    """A heading, names of columns, and rows of cells."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PrivacyReport:
    """One page: printed it is Markdown, in a notebook HTML with the figure; :meth:`save` writes either.

    ``warnings``: what is not as it must be for a release. ``svg``: the trade-off curve.
    """

    promise: str
    tables: tuple[Table, ...]
    svg: str
    warnings: tuple[str, ...] = field(default=())
    not_covered: tuple[str, ...] = NOT_COVERED

    def markdown(self, image: str | None = None) -> str:
        """Return the page as Markdown, for a model card.

        Args:
            image: The address of the figure; None leaves it out.
        """
        lines = ["# Privacy of this model", "", self.promise, ""]
        lines += [f"**Not as it must be: {warning}**\n" for warning in self.warnings]
        for table in self.tables:
            lines += [f"## {table.heading}", "", _row(table.columns), _row(["---"] * len(table.columns))]
            lines += [*map(_row, table.rows), ""]
            lines += [f"![{ATTACKS}]({image})", ""] if image and table.heading == ATTACKS else []
        return "\n".join([*lines, "## Not covered", "", *(f"* {what}" for what in self.not_covered), ""])

    def html(self) -> str:
        """Return the page as one HTML file, with the figure in it."""
        warnings = "".join(f'<p class="warning">Not as it must be: {escape(w)}</p>' for w in self.warnings)
        tables = "".join(
            f"<h2>{escape(t.heading)}</h2>{_table(t)}{self.svg if t.heading == ATTACKS else ''}" for t in self.tables
        )
        left = "".join(f"<li>{escape(what)}</li>" for what in self.not_covered)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Privacy of this model</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body>'
            '<main class="dpcore-report"><h1>Privacy of this model</h1>'
            f'<p class="promise">{escape(self.promise)}</p>{warnings}{tables}'
            f"<h2>Not covered</h2><ul>{left}</ul></main></body></html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page.

        Args:
            path: Ends with ``.html``, or with ``.md``; the figure of the latter is an ``.svg`` beside it.

        Raises:
            ValueError: it ends with something else.
        """
        path = Path(path)
        if path.suffix not in (".html", ".md"):
            raise ValueError(f"The report's path is {str(path)!r}; it must end with .html or .md.")
        if path.suffix == ".html":
            path.write_text(self.html(), encoding="utf-8")
            return
        image = path.with_suffix(".svg")
        image.write_text(self.svg, encoding="utf-8")
        path.write_text(self.markdown(image.name), encoding="utf-8")

    def __str__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        return self.html()


@dataclass(frozen=True)
class _Run:
    """Holds what is known of the runs: the accountant's state, the settings of each, how batches were drawn.

    ``is_poisson``: whether dpcore drew them; None: it is not known, because steps were counted by hand, or batches were
    not checked.
    """

    accountant: Mapping[str, Any]
    settings: Sequence[Mapping[str, Any]]
    examples: int | None
    is_poisson: bool | None
    warnings: tuple[str, ...] = ()


def report(engine: PrivacyEngine) -> PrivacyReport:
    """Return one page about what the runs of ``engine`` have spent and what an attack could reach.

    Args:
        engine: The engine; its steps so far are what the page is about.

    Raises:
        ValueError: it has counted no step, or by an accountant of your own.
        TypeError: it is no PrivacyEngine.
    """
    if not isinstance(engine, PrivacyEngine):
        raise TypeError(
            f"report() was given a {type(engine).__name__}; it takes the PrivacyEngine that counts the steps. Of an "
            "Engine, count them by hand, by accountant.step(...) of a PrivacyEngine."
        )
    spending = engine._spending
    made = spending.made()
    poisson = {run.is_poisson for run in made} or {None}
    run = _Run(
        accountant=engine.accountant.state_dict(),
        settings=[run.setting for run in made],
        examples=spending._examples,
        is_poisson=next(drawn for drawn in (False, None, True) if drawn in poisson),
        warnings=(SEEDED,) * any(run.is_chosen for run in made)
        + (UNEXAMINED,) * (not all(run.is_examined for run in made)),
    )
    return _of_run(run)


def report_of_checkpoint(path: str | os.PathLike[str]) -> PrivacyReport:
    """Return the page about the run whose checkpoint ``path`` is.

    Args:
        path: What :meth:`dpcore.PrivacyEngine.save_checkpoint` wrote.

    Raises:
        ValueError: it is no such file, or holds no step.
        FileNotFoundError: there is no such file.
    """
    checkpoint = Checkpoint.load(path, None, {"weights_only": True, "map_location": "cpu"})
    sampler = checkpoint.sampler
    settings = [checkpoint.settings] if checkpoint.settings else []
    examples = int(sampler["examples"]) if sampler and "examples" in sampler else None
    warnings = (SEEDED,) if checkpoint.private and "chosen" in checkpoint.private.noise else ()
    return _of_run(_Run(checkpoint.accountant, settings, examples, sampler is not None, warnings))


def _of_run(run: _Run) -> PrivacyReport:
    mechanism = run.accountant.get("mechanism")
    if mechanism not in _SUBSAMPLED:
        raise ValueError(f"The accountant is {mechanism!r}; a report can be made of {', '.join(_SUBSAMPLED)}.")
    accountant = create_accountant("prv")
    accountant.load_state_dict({**run.accountant, "mechanism": "prv"})
    assert isinstance(accountant, PLDAccountant)
    if not len(accountant):
        raise ValueError("No private step was counted, so there is nothing to report; train first.")
    delta = customary_delta(run.examples or 10**5 - 1)
    first = accountant.get_epsilon(delta)
    one = "one user's training examples" if "one user" in _units(run) else "one training example"
    is_shuffled = any(setting.get("sampling") in CUT for setting in run.settings)
    change = f"putting zeros in the place of {one}" if is_shuffled else f"adding or removing {one}"
    promise = (
        f"This model is (ε = {rounded_up(first)}, δ = {delta:g})-differentially private: for {change}, "
        "whatever an attacker knows of all others."
    )
    warnings = run.warnings
    if not run.is_poisson:
        how = "were not" if run.is_poisson is False else "may not have been"
        warnings += (f"batches {how} drawn by dpcore, and all figures hold only if they are as accounted.",)
    if any(sigma == 0.0 for sigma, _, _ in accountant.history):
        promise = "This model is not private: a step had no noise."
    elif first == float("inf"):
        promise = (
            f"No ε is promised at δ = {delta:g}: steps may have failed (batches that max_batch_size has cut) with the "
            f"probability {accountant.failure_probability:.3g}."
        )
    people = "A person with several"
    left = tuple(OF_USERS if "user" in one and what.startswith(people) else what for what in NOT_COVERED)
    title = f"Attacks at ε = {rounded_up(first)}, δ = {delta:g}, {len(accountant):,} steps"
    svg = _figure(accountant, title)
    tables = (_promises(accountant, first, delta), _risks(accountant), _training(run, accountant))
    return PrivacyReport(promise, tables, svg, warnings, left)


def _promises(accountant: PLDAccountant, first: float, delta: float) -> Table:
    """Return ε at three δ, the first of which is known."""
    others = [(accountant.get_epsilon(d), d) for d in (delta / 10, delta / 1000)]
    rows = tuple((f"{d:g}", rounded_up(epsilon)) for epsilon, d in [(first, delta), *others])
    return Table("Promise", ("δ", "ε, at most"), rows)


def _risks(accountant: PLDAccountant) -> Table:
    def percent(rate: float) -> str:
        return f"{rounded_up(100 * rate)}\N{NO-BREAK SPACE}%"

    finds = [(f"members found, at {100 * r:g} % false alarms", percent(accountant.tpr_at(r))) for r in _RATES]
    more = [
        ("true less false positive rate (advantage)", percent(accountant.advantage())),
        ("μ of Gaussian differential privacy", rounded_up(accountant.mu())),
    ]
    return Table(ATTACKS, ("", "at most"), (*finds, *more))


def _training(run: _Run, accountant: PLDAccountant) -> Table:
    """Return how the model was trained, as far as privacy depends on it."""
    steps = [
        f"{count} with noise multiplier {sigma:.6g}, {'sample ' * isinstance(rate, float)}{rate_words(rate)}"
        if rate != 0.0
        else f"{count} more of epochs that were counted"
        for (sigma, rate), count in totals(accountant.history).items()
    ]
    shown = steps if len(steps) <= 5 else [*steps[:5], f"and {len(steps) - 5} other kinds"]
    rows = [("unit", _units(run))]
    rows += [("number of units", f"{run.examples:,}")] if run.examples is not None else []
    rows += [("batches", batches) for batches in _batches(run)]
    rows += [("batches are cut to", f"{s['max_batch_size']}") for s in run.settings if s.get("max_batch_size")]
    rows += [("noise", f"correlated over steps, {s['mechanism']}") for s in run.settings if s.get("mechanism")]
    rows += [("steps", "; ".join(shown))]
    for setting in filter(None, run.settings):
        bounds, clipping = setting.get("max_grad_norm"), setting.get("clipping", "flat")
        rows += [("clipping", f"{clipping}, max_grad_norm {bounds}")]
        rows += [("divisor of the updates", f"{setting.get('expected_batch_size')}".removesuffix(".0"))]
    if failure := accountant.failure_probability:
        rows += [("steps may fail with probability", f"{failure:g}, counted")]
    rows += [("accountant of this page", "the privacy loss's distribution, an upper bound (dpcore)")]
    if (mechanism := run.accountant["mechanism"]) != accountant.mechanism():
        rows += [("accountant of the run, whose ε is another one", mechanism)]
    return Table("How it was trained", ("", ""), tuple(dict.fromkeys(rows)))


def _batches(run: _Run) -> list[str]:
    """Return how batches were drawn, in words."""
    if not run.is_poisson:
        return ["not known" if run.is_poisson is None else "not drawn by dpcore"]
    return [DRAWN[s.get("sampling", "poisson")] for s in run.settings] or [DRAWN["poisson"]]


def _units(run: _Run) -> str:
    """Return what is added or removed, in words; of runs with several units it is the smallest."""
    units = {setting.get("unit", "one example") for setting in run.settings} or {"one example"}
    return units.pop() if len(units) == 1 else "one example"


def _figure(accountant: PLDAccountant, title: str) -> str:
    rates = np.logspace(-5, 0, 201)
    best = Curve("best attack", rates, accountant.tpr_at(rates), COLOURS[0])
    guessing = Curve("guessing", rates, rates, "#888", "6 4")
    x, y = (Axis(f"{which} positive rate", -5, 0, lambda rate: f"{100 * rate:g} %") for which in ("false", "true"))
    return chart(title, "Upper bound for every attack that knows all other examples", x, y, [guessing, best])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns) if any(table.columns) else ""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{rows}</table>"
