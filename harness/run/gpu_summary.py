"""The summary of a short run on a GPU, as text and as JSON. Pure functions of its records and its plan; needs neither
pandas nor a report."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.analysis import energy
from harness.store.record import Cell, Record

BASELINE = "pytorch-eager"
NOT_BEGUN, NOT_ENDED = "not begun", "not ended"
MEMORY = ("cuda_peak_allocated", "cpu_peak_allocated", "jax_peak_in_use", "cuda_peak_in_use", "peak_resident_growth")
"""The first of these metrics that a record has is shown."""

Key = tuple[str, str, int]
"""(cell, purpose, round) of a record or of a job."""


@dataclass(frozen=True)
class Place:
    """The environment of a run. ``lacking``: framework -> what the environment lacks for it. ``devices``: what torch
    and jax say of the CUDA device. ``pins``: package -> its pinned version, of the frameworks that ran."""

    device: str
    python: str
    versions: Mapping[str, str]
    pins: Mapping[str, str]
    lacking: Mapping[str, Sequence[str]]
    devices: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    synthetic: bool


@dataclass(frozen=True)
class Outcome:
    """``planned``: every job's cell with its key, in the order of the plan; ``gates``: likewise, (task, contestant).
    ``declared``: the contestants that, by their own folder, the gate must reject in a task. ``searches``: how that for
    the largest physical batch ended, by (task, contestant)."""

    place: Place
    command: str
    seconds_asked: float
    seconds_used: float
    planned: Sequence[tuple[Cell, Key]]
    gates: Sequence[tuple[str, str]]
    records: Mapping[Key, Record]
    declared: frozenset[tuple[str, str]] = frozenset()
    notes: Sequence[str] = ()
    searches: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def not_begun(self) -> list[str]:
        """Jobs without a record, by name, and searches that have not ended."""
        jobs = [f"{key[0]} · {key[1]} · round {key[2] + 1}" for _, key in self.planned if key not in self.records]
        open_ones = [where for where, how in self.searches.items() if how in {NOT_BEGUN, NOT_ENDED}]
        return jobs + [f"{task}/{contestant} · largest batch" for task, contestant in open_ones]

    @property
    def expected_rejections(self) -> int:
        """Number of the rejected records that are known findings."""
        rejected = [r for r in self.records.values() if r.state == "rejected"]
        return sum((r.cell.task, r.cell.contestant) in self.declared for r in rejected)

    @property
    def states(self) -> dict[str, int]:
        """Number of records of each state, the gate's included."""
        found: dict[str, int] = {}
        for one in self.records.values():
            found[one.state] = found.get(one.state, 0) + 1
        return found


def key_of(record: Record) -> Key:
    """Return what identifies the process of a record in the summary."""
    return record.cell.name, record.purpose, record.block.round


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return everything, for machines."""
    place = outcome.place
    return {
        "what": "dpbench run gpu: a short run in an environment as it was found; its versions are not the pinned ones",
        "command": outcome.command,
        "device": place.device,
        "devices": list(place.devices),
        "machine": dict(place.machine),
        "python": place.python,
        "unpinned": True,
        "versions_found_and_pinned": _differing(place),
        "versions": dict(place.versions),
        "not_installed": {name: list(what) for name, what in place.lacking.items()},
        "synthetic_data": place.synthetic,
        "seconds": {"asked": outcome.seconds_asked, "used": round(outcome.seconds_used, 1)},
        "complete": not outcome.not_begun,
        "states": outcome.states,
        "gates": gate_rows(outcome),
        "cells": cell_rows(outcome),
        "layers": layer_rows(outcome),
        "frontier": frontier_rows(outcome),
        "not_begun": outcome.not_begun,
        "joules_missing": energy.missing(
            r for r in outcome.records.values() if r.purpose == "time" and r.state == "ok"
        ),
        "notes": list(outcome.notes),
    }


def gate_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one row per (task, contestant): ``state`` passed, rejected, …, or not begun."""
    verdicts = {(r.cell.task, r.cell.contestant): r for r in outcome.records.values() if r.purpose == "gate"}
    rows = []
    for task, contestant in outcome.gates:
        found = verdicts.get((task, contestant))
        checks = found.gate.checks if found is not None and found.gate is not None else []
        state = NOT_BEGUN if found is None else "passed" if found.state == "ok" else found.state
        row = {"task": task, "contestant": contestant, "state": state, "checks": len(checks)}
        rows.append({**row, "reason": found.reason if found is not None else None})
    return rows


def _groups(outcome: Outcome, kind: str) -> dict[str, tuple[Cell, list[Record], Record | None]]:
    """Cell name -> (cell, its timed records, its memory record), in the order of the plan."""
    groups: dict[str, tuple[Cell, list[Record], Record | None]] = {}
    for cell, key in outcome.planned:
        if cell.kind != kind:
            continue
        _, timed, memory = groups.get(cell.name, (cell, [], None))
        record = outcome.records.get(key)
        if record is not None and record.purpose == "time":
            timed = [*timed, record]
        elif record is not None:
            memory = record
        groups[cell.name] = (cell, timed, memory)
    return groups


def cell_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one row per end-to-end cell. ``step_ms``: median over its processes of seconds per step; ``times_plain``:
    over that of plain PyTorch in the same task and batch size, None where either is missing."""
    rows = []
    for cell, timed, memory in _groups(outcome, "e2e").values():
        steps = [
            1e3 * statistics.median(r.epoch_seconds) / r.timed.steps_per_epoch
            for r in timed
            if r.state == "ok" and r.timed is not None
        ]
        epochs = [statistics.median(r.epoch_seconds) for r in timed if r.state == "ok"]
        rows.append(
            {
                "task": cell.task,
                "batch_size": cell.batch_size,
                "contestant": cell.contestant,
                "private": cell.private,
                **_ending(timed, memory),
                "step_ms": statistics.median(steps) if steps else None,
                "epoch_seconds": statistics.median(epochs) if epochs else None,
                "extrapolated": any(r.timed is not None and r.timed.extrapolated for r in timed),
                "processes": len(steps),
                "first_pass_seconds": next((r.timed.first_pass_seconds for r in timed if r.timed is not None), None),
                "disturbed": any(r.load is not None and r.load.disturbed for r in timed),
                **_memory(memory),
                "joules_per_example": energy.median(r for r in timed if r.state == "ok"),
            }
        )
    return _with_ratio(rows, "step_ms", ("task", "batch_size"))


def layer_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one row per layer, contestant and kind of pass. ``pass_ms``: median over the passes."""
    rows = []
    for cell, timed, memory in _groups(outcome, "layer").values():
        ok = [r for r in timed if r.state == "ok" and r.layer is not None and r.layer.pass_seconds]
        passes = [1e3 * statistics.median(r.layer.pass_seconds) for r in ok if r.layer is not None]
        rows.append(
            {
                "layer": cell.layer,
                "batch_size": cell.batch_size,
                "contestant": cell.contestant,
                "passes": cell.passes,
                **_ending(timed, memory),
                "pass_ms": statistics.median(passes) if passes else None,
                "disturbed": any(r.load is not None and r.load.disturbed for r in timed),
                **_memory(memory),
            }
        )
    return _with_ratio(rows, "pass_ms", ("layer", "batch_size"))


def frontier_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one row per search: how it ended, its largest probe that fitted, and what that took."""
    rows = []
    for (task, contestant), how in outcome.searches.items():
        own = [r for r in outcome.records.values() if (r.cell.task, r.cell.contestant) == (task, contestant)]
        fitted = [r for r in own if r.purpose == "probe" and r.state == "ok" and r.probe is not None]
        best = max(fitted, key=lambda r: r.cell.batch_size, default=None)
        seconds = best.probe.step_seconds if best is not None and best.probe is not None else []
        size = best.cell.batch_size if best is not None else None
        rows.append(
            {
                "task": task,
                "contestant": contestant,
                "ended": how,
                "batch_size": size,
                "examples_per_second": size / statistics.median(seconds) if size and seconds else None,
                **_memory(best),
            }
        )
    return rows


def _ending(timed: Sequence[Record], memory: Record | None) -> dict[str, Any]:
    """Return the cell's state: that of a record that is not ok, else ok, else not begun."""
    failed = next((r for r in [*timed, *([memory] if memory else [])] if r.state != "ok"), None)
    if failed is not None:
        return {"state": failed.state, "reason": failed.reason}
    return {"state": "ok" if timed else NOT_BEGUN, "reason": None}


def _memory(record: Record | None) -> dict[str, Any]:
    found = record.memory if record is not None and record.state == "ok" else {}
    metric = next((name for name in MEMORY if name in found), None)
    return {"memory_bytes": found[metric] if metric else None, "memory_metric": metric}


def _with_ratio(rows: list[dict[str, Any]], value: str, block: tuple[str, ...]) -> list[dict[str, Any]]:
    plain = {
        tuple(row[name] for name in block): row[value]
        for row in rows
        if row["contestant"] == BASELINE and row[value] is not None
    }
    for row in rows:
        base = plain.get(tuple(row[name] for name in block))
        row["times_plain"] = row[value] / base if base and row[value] is not None else None
    return rows


def _differing(place: Place) -> dict[str, dict[str, str | None]]:
    """Package -> its version as found and as pinned, of the pins that are not met."""
    found = {_normal(name): version for name, version in place.versions.items()}
    pairs = {name: (found.get(_normal(name)), pin) for name, pin in sorted(place.pins.items())}
    # A local part (2.11.0+cu130) says how it was built, not which version it is.
    return {n: {"found": f, "pinned": p} for n, (f, p) in pairs.items() if (f or "").partition("+")[0] != p}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- text


def text(outcome: Outcome) -> str:
    """Return the summary for people."""
    place = outcome.place
    gpus = ", ".join(place.machine.get("gpus") or []) or "no GPU"
    where = gpus if place.device == "cuda" else f"{place.machine.get('cpu')} ({place.machine.get('threads')} threads)"
    lines = [
        f"dpbench run gpu on {place.device}: {where}",
        f"Environment as found, NOT the pinned one: {place.python}, Python {place.versions.get('python')}.",
    ]
    differing = [
        f"{name} {pair['found'] or 'absent'} (pinned {pair['pinned']})" for name, pair in _differing(place).items()
    ]
    lines += [f"Other versions than the pins: {', '.join(differing)}."] if differing else []
    lines += [f"{d['framework']} {d.get('version', '')}: {_sees(d)}." for d in place.devices]
    if place.lacking:
        lacking = "; ".join(f"{name} (no {', '.join(what)})" for name, what in place.lacking.items())
        lines.append(f"Not installed, so not measured: {lacking}.")
    if place.synthetic:
        lines.append(
            "Data: SYNTHETIC twins of the data sets; times stand, accuracies and batches are not the real ones."
        )
    lines += outcome.notes
    no_joules = energy.missing(r for r in outcome.records.values() if r.purpose == "time" and r.state == "ok")
    lines += [no_joules] if no_joules else []
    states = ", ".join(f"{count} {state}" for state, count in sorted(outcome.states.items())) or "none"
    lines.append(
        f"{outcome.seconds_used:.0f} s of {outcome.seconds_asked:.0f} s; records: {states}; "
        f"not begun: {len(outcome.not_begun)} of {len(outcome.planned)} measurements."
    )
    title = "Gate (a contestant that has not passed gets no time)"
    lines += _table(title, "task contestant state checks reason", gate_rows(outcome))
    cells = [
        r | {f"J/example, {c}": joules for c, joules in r["joules_per_example"].items()} for r in cell_rows(outcome)
    ]
    counters = sorted({column for r in cells for column in r if column.startswith("J/example")})
    title = f"Training steps (x plain: over {BASELINE}; *: extrapolated to the epoch from a part of its steps)"
    columns = "task B=batch_size contestant state ms/step=step_ms x_plain=times_plain s/epoch=epoch_seconds processes"
    joules = "".join(f" {counter.replace(' ', '_')}" for counter in counters)
    lines += _table(title, f"{columns} peak_MiB=memory_bytes{joules} reason", cells)
    layers = [r | {"contestant": f"{r['contestant']} ({r['passes']})"} for r in layer_rows(outcome)]
    columns = "layer B=batch_size contestant state ms/pass=pass_ms x_plain=times_plain peak_MiB=memory_bytes reason"
    lines += _table("Layers (a pass: forward and backward)", columns, layers)
    columns = "task contestant largest=ended examples/s=examples_per_second peak_MiB=memory_bytes"
    lines += _table("Largest physical batch that fits", columns, frontier_rows(outcome))
    if outcome.not_begun:
        lines += ["", "Not begun when the time was over (the same command goes on here):"]
        lines += [f"  {name}" for name in outcome.not_begun]
    return "\n".join(lines) + "\n"


def _sees(device: Mapping[str, Any]) -> str:
    if "device" not in device:
        return f"sees no CUDA device ({device.get('why_not') or 'no build for it'})"
    return f"sees {device['device']}" + "".join(
        f", {k} {device[k]}" for k in ("capability", "cuda", "cudnn") if k in device
    )


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}g}" if digits > 2 else f"{value:.{digits}f}"


def _shown(row: Mapping[str, Any], name: str) -> str:
    """Return one value of a row for people; nothing where there is none."""
    value = row.get(name)
    if name == "state" and row.get("disturbed"):
        return f"{value}, disturbed"
    if name == "reason":
        words = " ".join((value or "").split())
        return words if len(words) <= 100 else words[:99] + "…"
    if name == "memory_bytes":
        return _number(value and value / 2**20, 1)
    if name == "times_plain":
        return _number(value, 2)
    mark = "*" if name == "epoch_seconds" and row["extrapolated"] and value is not None else ""
    return (_number(value) if isinstance(value, float) else str(value or "")) + mark


def _table(title: str, columns: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table. ``columns``: the names of values, with their heads before them where those are others."""
    if not rows:
        return []
    parted = (column.replace("_", " ").partition("=")[0::2] for column in columns.split())
    named = [(head, name.replace(" ", "_") or head) for head, name in parted]
    cells = [[head for head, _ in named], *([_shown(row, name) for _, name in named] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(named))]
    return ["", title, *("  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in cells)]
