"""What came of the planted faults: counts of real comparisons, and curves by resampling their pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.sequential import Rule
from harness.compare.record import Comparison, counted, most_set_aside
from tests.planted.faults import FAULTS
from tests.support.simulations import follow

EFFECTS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15)
TRIALS = 20_000
FEWEST_PAIRS = 20
"""Fewer recorded pairs say nothing about a curve."""


@dataclass(frozen=True)
class Tally:
    """Real comparisons with one fault. ``false``: alerts of a kind that was not planted. ``called``: comparisons
    that call a cell
    slower or faster without any alert of time. ``unfinished``: a cell did not run or nothing was compared. ``minutes``
    and ``pairs``: median and largest."""

    fault: str
    comparisons: int
    caught: int
    missed: int
    false: int
    called: int
    unfinished: int
    minutes: tuple[float, float]
    pairs: tuple[float, float]
    estimate: float | None
    paired_sd: float | None


def tally(fault: str, comparisons: Sequence[Comparison]) -> Tally:
    kind = FAULTS[fault].kind
    raised = [{alert for cell in comparison.cells for alert in cell.alerts} for comparison in comparisons]
    unfinished = [comparison.exit_code == 3 for comparison in comparisons]
    caught = sum(kind in alerts for alerts in raised)
    times = [cell.time for comparison in comparisons for cell in comparison.cells if cell.time is not None]
    ratios = [time.ratio for time in times if time.ratio is not None]
    deviations = [time.paired_sd for time in times if time.paired_sd is not None]
    pairs = [sum(len(cell.pairs) for cell in comparison.cells) for comparison in comparisons]
    return Tally(
        fault=fault,
        comparisons=len(comparisons),
        caught=caught,
        missed=len(comparisons) - caught - sum(unfinished) if kind is not None else 0,
        false=sum(bool(alerts - {kind}) for alerts in raised),
        called=sum(_is_only_called(comparison) for comparison in comparisons),
        unfinished=sum(unfinished),
        minutes=_middle_and_most([comparison.minutes for comparison in comparisons]),
        pairs=_middle_and_most(pairs),
        estimate=float(np.median(ratios)) - 1.0 if ratios else None,
        paired_sd=float(np.median(deviations)) if deviations else None,
    )


def _is_only_called(comparison: Comparison) -> bool:
    return any(cell.verdict in ("slower", "faster") and "time" not in cell.alerts for cell in comparison.cells)


def _middle_and_most(values: Sequence[float]) -> tuple[float, float]:
    return (float(np.median(values)), float(max(values))) if values else (0.0, 0.0)


def recorded_ratios(comparisons: Sequence[Comparison]) -> np.ndarray:
    """log(head / base) of the pairs that counted, of comparisons in which nothing changed."""
    return np.array(
        [
            ratio
            for comparison in comparisons
            for cell in comparison.cells
            for pair in counted(cell.pairs, most_set_aside(comparison.max_rounds))[0]
            if (ratio := pair.log_ratio) is not None
        ]
    )


def curve(ratios: np.ndarray, rule: Rule, seed: int = 0) -> list[dict[str, float]]:
    """*Simulated*: for each effect, how often an alert is raised, any difference is called, and equivalence, if the
    noise of every pair is one of the recorded ones (drawn with replacement, with a random sign: the sides are
    exchangeable)."""
    rows = []
    for number, effect in enumerate(EFFECTS):
        rng = np.random.default_rng([seed, number])
        shape = (TRIALS, rule.rounds)
        noise = rng.choice(ratios, size=shape) * rng.choice((-1.0, 1.0), size=shape)
        course = follow(np.log1p(effect) + noise, rule)
        rows.append(
            {
                "effect": effect,
                "alert": float(course.alert.mean()),
                "different": float(course.different.mean()),
                "equivalent": float(course.equivalent.mean()),
                "pairs": float(course.stopped.mean()),
            }
        )
    return rows


def summary(found: Mapping[str, Sequence[Comparison]]) -> dict[str, Any]:
    """Everything that :func:`markdown` shows."""
    rows = [tally(fault, found[fault]) for fault in FAULTS if found.get(fault)]
    quiet = found.get("none", ())
    ratios = recorded_ratios(quiet)
    simulated = None
    if len(ratios) >= FEWEST_PAIRS:
        first = quiet[0]
        rule = Rule(first.alpha, first.timed_cells, first.threshold, first.max_rounds)
        simulated = {
            "recorded_pairs": len(ratios),
            "recorded_comparisons": len(quiet),
            "recorded_sd": float(np.std(ratios, ddof=1)),
            "cells": rule.cells,
            "threshold": rule.threshold,
            "trials": TRIALS,
            "curve": curve(ratios, rule),
        }
    return {"faults": [vars(row) for row in rows], "simulated": simulated}


def markdown(said: Mapping[str, Any]) -> str:
    lines = [
        "# Planted faults",
        "",
        "Real comparisons of clean dpcore (base) against dpcore with one fault (head).",
        "",
    ]
    lines += [
        "| planted | comparisons | caught | missed | other alerts | called, no alert | did not run | minutes (most) | "
        "pairs (most) | estimate |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in said["faults"]:
        is_fault = FAULTS[row["fault"]].kind is not None
        estimate = (
            "–" if row["estimate"] is None else f"{row['estimate'] * 100:+.1f} % (sd {row['paired_sd'] * 100:.1f} %)"
        )
        caught = (str(row["caught"]), str(row["missed"])) if is_fault else ("–", "–")
        cells = [f"{row['fault']}: {FAULTS[row['fault']].title}", str(row["comparisons"]), *caught, str(row["false"])]
        cells += [str(row["called"]), str(row["unfinished"]), f"{row['minutes'][0]:.1f} ({row['minutes'][1]:.1f})"]
        cells += [f"{row['pairs'][0]:.0f} ({row['pairs'][1]:.0f})", estimate]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "`other alerts`: of a kind that was not planted; for the row without a fault, the false alarms. "
        "`called, no alert`: slower or faster, but no alert of time; without a fault, the other false differences.",
        "",
    ]
    s = said["simulated"]
    if s is None:
        return "\n".join([*lines, f"No curves yet: they need {FEWEST_PAIRS} recorded pairs of `none`.", ""])
    lines += [
        "## Simulated",
        "",
        f"**Not measured: simulated** by drawing from the {s['recorded_pairs']} recorded pairs of "
        f"{s['recorded_comparisons']} comparisons in which nothing changed (paired sd {s['recorded_sd'] * 100:.1f} %), "
        f"signs at random, {s['trials']} comparisons a row; threshold {s['threshold'] * 100:g} %, "
        f"cells a call: {s['cells']}. That noise comes in spells is lost by drawing.",
        "",
        "| true slowdown | alert | called slower or faster | called equivalent | pairs, mean |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['effect'] * 100:g} % | {row['alert'] * 100:.1f} % | {row['different'] * 100:.1f} % | "
        f"{row['equivalent'] * 100:.1f} % | {row['pairs']:.1f} |"
        for row in s["curve"]
    ]
    lines += [
        "",
        "The row of 0 % is the false-alarm rate, of noise whose signs were flipped at random: it cannot show a bias "
        "between the sides. Only the row without a fault, above, can.",
        "",
    ]
    return "\n".join(lines)
