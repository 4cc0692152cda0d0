"""Two contestants against each other, cell by cell, in plain words."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.analysis.pairs import paired
from harness.analysis.stats import VERDICT_ROUNDS, Comparison
from harness.errors import BadInput
from harness.report import model


@dataclass(frozen=True)
class Line:
    """One cell of the comparison. ``result`` is None where no round holds both; ``states`` then says why."""

    section: model.Section
    task: str
    synthetic: bool
    batch_size: int
    a: str
    b: str
    result: Comparison | None
    left_out: int
    disturbed: bool
    extrapolated: bool
    states: tuple[str, str]

    @property
    def text(self) -> str:
        """The summary in one line."""
        where = f"on {self.task} at {self.batch_size}"
        marks = [
            word
            for word, applies in (
                ("synthetic data", self.synthetic),
                ("extrapolated", self.extrapolated),
                ("disturbed", self.disturbed),
                (f"{self.left_out} disturbed left out", self.left_out > 0),
            )
            if applies
        ]
        tail = f" [{', '.join(marks)}]" if marks else ""
        r = self.result
        if r is None:
            return f"{self.a} and {self.b} cannot be compared {where}: {self._why()}{tail}"
        n = f"n = {r.n}{self._verdict()}{tail}"
        if _undecided(r):
            times = f"{factor(1 / r.ratio)}×{_interval(1 / r.high, 1 / r.low)}"
            return f"{self.a} takes {times} the time of {self.b} {where}, {n}"
        faster = r.ratio >= 1
        ratio, low, high = (r.ratio, r.low, r.high) if faster else (1 / r.ratio, 1 / r.high, 1 / r.low)
        word = "faster" if faster else "slower"
        return f"{self.a} is {factor(ratio)}×{_interval(low, high)} {word} than {self.b} {where}, {n}"

    def _verdict(self) -> str:
        r = self.result
        assert r is not None
        if r.verdict is None:
            why = "disturbed pairs" if self.disturbed else f"under {VERDICT_ROUNDS} rounds"
            return f" (no verdict: {why})"
        small = f", by less than {r.margin:.0%}" if r.within_margin and r.verdict in {"faster", "slower"} else ""
        return f" (verdict: {r.verdict}{small})"

    def _why(self) -> str:
        if self.states == ("ok", "ok"):
            return "no round holds both"
        return ", ".join(f"{name} {state}" for name, state in zip((self.a, self.b), self.states, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Plain numbers; ``ratio`` = seconds of b / seconds of a, NaN as null."""
        r = self.result
        return {
            "text": self.text,
            "machine": self.section.machine,
            "device": self.section.device,
            "protocol": self.section.protocol,
            "isolation": self.section.isolation,
            "task": self.task,
            "synthetic": self.synthetic,
            "batch_size": self.batch_size,
            "a": self.a,
            "b": self.b,
            "ratio": r.ratio if r else None,
            "low": r.low if r and not math.isnan(r.low) else None,
            "high": r.high if r and not math.isnan(r.high) else None,
            "n": r.n if r else 0,
            "verdict": r.verdict if r else None,
            "not_slower": r.not_slower if r else None,
            "within_margin": r.within_margin if r else None,
            "margin": r.margin if r else None,
            "left_out": self.left_out,
            "disturbed": self.disturbed,
            "extrapolated": self.extrapolated,
            "state_a": self.states[0],
            "state_b": self.states[1],
        }


def _undecided(r: Comparison) -> bool:
    """Neither word would be justified: the interval holds 1."""
    return not math.isnan(r.low) and r.low <= 1 <= r.high


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f" [{factor(low)}, {factor(high)}]"


def contestant(name: str, known: Iterable[str]) -> str:
    """Return the contestant of that name, or the only one whose name holds it.

    Raises :class:`BadInput` that lists near ones where there is none or more than one.
    """
    known = list(known)
    found = [k for k in known if k == name] or [k for k in known if name in k]
    if len(found) == 1:
        return found[0]
    near = found or difflib.get_close_matches(name, known, n=5, cutoff=0.3) or known
    what = "names more than one contestant" if found else "is no contestant"
    raise BadInput(f"{name!r} {what} in these records; choose from {', '.join(near)}.")


def compare(tables: Tables, a: str, b: str) -> list[Line]:
    """a against b in every cell in which either of them was meant to run.

    Raises :class:`BadInput` for names that are unknown, ambiguous, or the same.
    """
    a, b = contestant(a, tables.order), contestant(b, tables.order)
    if a == b:
        raise BadInput(f"Both names mean {a}; name two contestants.")
    current = tables.raw[~tables.raw.superseded]
    lines = []
    for section in model.sections(tables):
        for task, synthetic, group in model.blocks(section.of(tables.cells)):
            for size in sorted(group.batch_size.unique()):
                here = group[group.batch_size == size].set_index("contestant")
                if a not in here.index and b not in here.index:
                    continue
                place = {**vars(section), "task": task, "synthetic": synthetic, "batch_size": size}
                result, left_out, disturbed = paired(current, place, a, b)
                states = tuple(str(here.state.get(name, "not measured")) for name in (a, b))
                extrapolated = any(bool(here.extrapolated.get(name, False)) for name in (a, b))
                lines.append(
                    Line(
                        section,
                        task,
                        synthetic,
                        int(size),
                        a,
                        b,
                        result,
                        left_out,
                        disturbed,
                        extrapolated,
                        (states[0], states[1]),
                    )
                )
    return lines
