"""Lead from a number in a table back to its processes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean, median
from typing import Any

import pandas as pd

from harness.analysis.frames import SHOWN_PACKAGES, Tables
from harness.analysis.naming import duration, machine_label, number, size
from harness.analysis.tidy import rows_of
from harness.errors import BadInput
from harness.report import model
from harness.store import surroundings
from harness.store.record import Gate, Record

COMMAND = "reproduce"
"""The label of the command that measures a process again."""

NEAR = 8
"""How many similar names an error lists."""


def cell_name(fragment: str, known: Iterable[str]) -> str:
    """Return the cell of that name, or the only one that the fragment fits.

    A fragment that fits whole parts of a name (between slashes) goes before one that fits in the middle of a part, so
    that ``mnist-cnn/opacus-hooks/16`` does not mean 16 and 1600 alike. Parts may be left out at either end.

    Raises :class:`BadInput` that lists near ones where there is none or more than one.
    """
    known = sorted(set(known))
    whole = [k for k in known if f"/{fragment.strip('/')}/" in f"/{k}/"]
    found = [k for k in known if k == fragment] or whole or [k for k in known if fragment in k]
    if len(found) == 1:
        return found[0]
    meant = _respelt(fragment, known)
    fitting = found or [k for k in known if meant and meant in k]
    near = fitting or difflib.get_close_matches(fragment, known, n=NEAR, cutoff=0.3) or known
    listed = ", ".join(near[:NEAR]) + (f" and {len(near) - NEAR} more" if len(near) > NEAR else "")
    what = "fits more than one cell" if found else "is no cell"
    instead = f" (did you mean {meant}?)" if meant and not found else ""
    raise BadInput(f"{fragment!r} {what} of these records{instead}; choose one of {listed}.")


def _respelt(fragment: str, known: Iterable[str]) -> str | None:
    """Return the fragment with every part as known names spell the most similar one; None where that fits no name."""
    known = list(known)
    parts = list(dict.fromkeys(part for name in known for part in name.split("/")))
    near = [
        part if part in parts else "".join(difflib.get_close_matches(part, parts, 1)) for part in fragment.split("/")
    ]
    meant = "/".join(near)
    return meant if all(near) and any(meant in name for name in known) else None


def rows(tables: Tables, fragment: str) -> list[tuple[Record, dict[str, Any]]]:
    """Return the records of a cell and of the gate that admitted it, each with its row of the tidy frame, oldest
    first."""
    measured = tables.raw[tables.raw.purpose != "gate"]
    name = cell_name(fragment, tables.raw.cell if measured.empty else measured.cell)
    here = tables.raw[tables.raw.cell == name]
    # The gate judges a contestant on a task once, at a batch size of its own.
    same = ["machine", "device", "task", "contestant", "code"]
    judged = pd.MultiIndex.from_frame(tables.raw[same]).isin(pd.MultiIndex.from_frame(here[same]))
    gates = tables.raw[judged & (tables.raw.purpose == "gate") & (tables.raw.cell != name)]
    here = pd.concat([gates, here]).sort_values(["machine", "when"], kind="stable")
    return [(tables.records[i], {str(k): v for k, v in row.items()}) for i, row in here.iterrows()]


def other_rows(records: Iterable[Record], fragment: str) -> list[tuple[Record, dict[str, Any]]]:
    """Return the same for cells of layers and of the memory frontier."""
    cells = other_cells(records)
    return cells[cell_name(fragment, cells)]


def other_cells(records: Iterable[Record]) -> dict[str, list[tuple[Record, dict[str, Any]]]]:
    """Return all cells of layers and of the memory frontier by name, which have no tidy frame of the main table; their
    gate stands in the record itself. What older code measured is marked as superseded."""
    cells: dict[str, list[Record]] = {}
    for record in sorted((r for r in records if r.cell.kind != "e2e"), key=lambda r: (r.cell.name, r.when)):
        cells.setdefault(record.cell.name, []).append(record)
    found = {}
    for name, here in cells.items():
        made = [surroundings.of(r) for r in here]
        newest = {one.key: one.code for one in made}
        found[name] = [
            (r, {"state": r.state, "reason": r.reason, "superseded": one.code != newest[one.key]})
            for r, one in zip(here, made, strict=True)
        ]
    return found


def summary(tables: Tables, name: str) -> Iterator[str]:
    """Yield what the tables show for this cell, a line per machine."""
    for row in rows_of(tables.cells[tables.cells.cell == name]):
        value = row.state
        if row.state == "ok":
            value = f"median {number(row.median)} s{model.interval(row.low, row.high)}, n = {row.n}"
            value += "; extrapolated from a part of an epoch" if row.extrapolated else ""
            value += f"; {model.SWAMPED_NOTE}" if row.swamped else ""
            value += f"; {row.disturbed} of {row.n} disturbed" if row.disturbed and not row.swamped else ""
        yield f"{row.machine}: {value}" + (f" ({row.failures}: {row.reason})" if row.failures else "")


Known = dict[tuple[Any, int], Any]
"""What was made of parts that many records share, by the parts' identity: it is made once."""


def lines(record: Record, row: Mapping[str, Any], known: Known | None = None) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of everything that one process left behind. ``known``: of the other records of a report."""
    known = {} if known is None else known
    yield "state", row["state"] + (f": {row['reason']}" if row["reason"] else "")
    if row["superseded"]:
        yield "", "left out of the tables: a newer adapter or environment, or whole epochs, were measured later"
    ran = "" if record.purpose == "gate" and record.wall_seconds < 0.05 else f", ran {record.wall_seconds:.1f} s"
    yield "started", f"{record.started}{ran or ', the verdict was remembered'}"
    block = record.block
    yield "block", f"run {block.run}, round {block.round}, place {block.order} in its block"
    if record.epoch_seconds:
        yield "epoch seconds", ", ".join(f"{s:.4g}" for s in record.epoch_seconds)
    if record.timed:
        yield "steps", _timed(record)
    yield from _layer(record)
    yield from _probe(record)
    if record.compile_seconds is not None:
        yield "compile seconds", f"{record.compile_seconds:.4g}"
    for metric, value in record.memory.items():
        yield metric, f"{value / model.MEBIBYTE:.1f} MiB"
    for i, rank in enumerate(record.ranks):
        given = ", ".join(f"{size(count)} to {kind}" for kind, count in rank.payload.items())
        took = f"{size(rank.peak_bytes)}, {duration(rank.step_seconds)} of a processor a step"
        yield f"rank {i}", f"{took}, gives {given or 'nothing'}"
    if record.load:
        yield "load", _load(record)
    yield from _made(known, _gate, record.gate)
    if record.epsilon:
        e = record.epsilon
        rdp, pld, own = (model.MISSING if v is None else f"{v:.4g}" for v in (e.rdp, e.pld, e.own))
        yield "epsilon", f"RDP {rdp}, PLD {pld}, its own {own}, after {e.steps} steps at delta {e.delta:g}"
    if record.accuracy:
        yield "accuracy", f"{record.accuracy.test:.2%} after {record.accuracy.after_steps} steps"
    if record.data:
        kind = "synthetic" if record.data.synthetic else "genuine"
        yield "data", f"{record.data.name}, {kind}, {record.data.origin}, sha256 {record.data.sha256[:12]}"
    if record.seeds:
        yield "seeds", f"weights {record.seeds.initial}, batches {record.seeds.batches}, noise {record.seeds.noise}"
    yield from _provenance(record, known)
    if record.log_tail:
        yield "log", record.log_tail
    yield COMMAND, record.command or "no command recorded"


def parts(
    found: list[tuple[Record, dict[str, Any]]], every_check: bool = False
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (title, facts) of each process, times first and the gate last. What all measuring processes share is told
    once, after them. Checks that passed are counted, unless ``every_check``."""
    measured = [(record.purpose, list(lines(record, row))) for record, row in found if record.purpose != "gate"]
    gates = [(record.purpose, list(lines(record, row))) for record, row in found if record.purpose == "gate"]
    measured.sort(key=lambda part: part[0] != "time")
    shared = (
        [fact for fact in measured[0][1] if all(fact in facts for _, facts in measured)] if len(measured) > 1 else []
    )
    for i, (purpose, facts) in enumerate(measured, 1):
        yield f"{purpose} process {i} of {len(measured)}", [fact for fact in facts if fact not in shared]
    if shared:
        yield "in all of them", shared
    for _, facts in gates:
        passed = [fact for fact in facts if fact[0].startswith("gate ") and fact[1].startswith("passed")]
        if passed and not every_check:
            facts = [fact for fact in facts if fact not in passed and fact not in shared]
            facts.append(("checks", f"{len(passed)} passed; --all-checks shows each"))
        yield "gate process", facts


def _made(known: Known, make: Callable[[Any], Any], part: Any) -> Any:
    """Return what ``make`` makes of a part of a record."""
    if (made := known.get((make, id(part)))) is None:
        made = known[make, id(part)] = make(part)
    return made


def _gate(gate: Gate | None) -> list[tuple[str, str]]:
    if gate is None:
        return []
    told = [("gate", f"{'passed' if gate.passed else 'not passed'}, key {gate.key}")]
    for check in gate.checks:
        limits = (
            "" if check.error is None or check.limit is None else f" error {check.error:.5g}, limit {check.limit:.5g}"
        )
        detail = f" ({check.detail})" if check.detail else ""
        told.append((f"gate {check.check}", ("passed" if check.passed else "FAILED") + limits + detail))
    return told


def _versions(versions: Mapping[str, str]) -> str:
    shown = [f"{name} {versions[name]}" for name in ("python", *SHOWN_PACKAGES) if name in versions]
    rest = len(versions) - len(shown)
    return ", ".join(shown) + (f" and {rest} more (see --json)" if rest else "")


def _provenance(record: Record, known: Known) -> Iterator[tuple[str, str]]:
    yield "machine", _made(known, machine_label, record.machine)
    yield "versions", _made(known, _versions, record.versions)
    if record.image:
        matches = "" if record.image.matches_lock else ", which is not the lock of the repository"
        yield "image", f"{record.image.tag} {record.image.digest}, on {record.image.base}"
        yield "image's lock", record.image.lock + matches
    else:
        yield "image", f"none (isolation {record.cell.isolation})"
    if record.container:
        startup = record.container.startup_seconds
        started = "did not start" if startup is None else f"started in {startup:.2f} s, outside the clock"
        yield "container", f"{record.container.engine}, {started}, exit code {record.container.exit_code}"
    source = record.source
    dirty = " with uncommitted changes" if source.dirty else ""
    yield "source", f"commit {source.commit}{dirty}, adapter {source.adapter_hash}, environment {source.lock_hash}"
    yield "key", record.key


def _layer(record: Record) -> Iterator[tuple[str, str]]:
    layer = record.layer
    if layer is None:
        return
    yield "layer", layer.description
    if seconds := layer.pass_seconds:
        middle = f"median {median(seconds) * 1e3:.4g} ms, mean {fmean(seconds) * 1e3:.4g} ms"
        yield "passes", f"{len(seconds)} timed after {layer.warm_up}, {middle}, stopped by {layer.stopped_by}"
        yield "pass ms", ", ".join(f"{s * 1e3:.4g}" for s in seconds)
    if layer.predicted_seconds is not None and layer.predicted_bytes is not None:
        size = f"{layer.predicted_bytes / model.MEBIBYTE:.4g} MiB"
        yield "predicted", f"{layer.predicted_seconds:.4g} s and {size} a pass"
    if parts := layer.parts:
        each = ("input", "labels", "module", "gradients", "intermediate", "peak", "baseline")
        yield "bytes", ", ".join(f"{name} {getattr(parts, name):,}" for name in each) + f", by {parts.instrument}"
    if layer.plan:
        yield "its own plan", ", ".join(f"{name} {value:,}" for name, value in layer.plan.items())


def _probe(record: Record) -> Iterator[tuple[str, str]]:
    probe = record.probe
    if probe is None:
        return
    limit = probe.budget_bytes if probe.device_bytes is None else probe.device_bytes
    yield ("probe", f"{probe.stage}, " + ("no limit" if limit is None else f"limit {limit / model.MEBIBYTE:.4g} MiB"))
    if probe.step_seconds:
        yield "step seconds", ", ".join(f"{s:.4g}" for s in probe.step_seconds)


def _timed(record: Record) -> str:
    t = record.timed
    assert t is not None
    text = f"{t.steps_timed} of {t.steps_per_epoch} per epoch timed, {t.warm_up_steps} warm-up"
    return f"{text}, padding {t.padding_fraction:.1%}" + (", extrapolated to whole epochs" if t.extrapolated else "")


def _load(record: Record) -> str:
    load = record.load
    assert load is not None
    probes = [f"{c:.3g} s" for c in (load.canary_before, load.canary_after) if c is not None]
    return (
        f"other programs took {load.foreign_share:.1%} of the processors, {load.repeats} repeats"
        + (f", its quota stopped it in {load.throttled:.0%} of its periods" if load.throttled else "")
        + (", disturbed" if load.disturbed else "")
        + (f", speed probe before and after {' and '.join(probes)}" if probes else "")
    )
