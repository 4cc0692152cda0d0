"""The report as one HTML page that needs nothing else: no network, no second file.

Charts are Vega-Lite; its JavaScript comes out of the package ``vl-convert-python`` and stands inside of the page.
Numbers go in as JSON: a row per cell, and per process what ``dpbench explain`` prints, with every text once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from harness.analysis import naming
from harness.analysis.frames import Tables
from harness.analysis.tidy import CELL, PLACE, rows_of
from harness.errors import BadInput
from harness.report import model
from harness.report.chapters import costs, explain, overview, paper
from harness.report.figures import looks
from harness.report.model import Grid, Report, Section
from harness.store import cache
from harness.store.record import Record

WEB = Path(__file__).parent / "web"
PICTURE_WIDTH = 1000
"""Largest width of a figure inside the page, in pixels."""
MEMORY = ("peak_resident_growth", "cuda_peak_allocated", "nvml_process_peak")
"""The metric that the main table shows: the first that is on record."""


@dataclass(frozen=True)
class _Picture:
    title: str
    name: str
    uri: str
    width: int
    height: int


ACROSS, BESIDE = "Of all measurements", "Beside these measurements"
"""Headings of chapters that belong to no one section."""


@dataclass(frozen=True)
class _Chapter:
    title: str
    anchor: str
    grids: Sequence[Grid]
    pictures: Sequence[_Picture]
    open: bool


def page(report: Report, drawn: Mapping[str, Path]) -> str:
    """Return the page. ``drawn``: stem of a picture -> its SVG, for those that are shown as they are."""
    data = _data(report.tables) if report.tables and not _of_memory(report.tables) else {"cells": []}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((WEB / "page.html").read_text())
    machines = {naming.machine_identity(r.machine) for r in report.records}
    days = sorted({r.started[:10] for r in report.records})
    failed = sum(r.state != "ok" for r in report.records)
    summary = (
        f"{len(report.records)} processes on {len(machines)} machine{'' if len(machines) == 1 else 's'}, measured "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}; {failed} of them failed, were rejected or are "
        "not supported. Machines, devices, protocols and isolations are never pooled."
    )
    tables = report.tables
    main = model.sections(tables)[0] if tables else None
    return template.render(
        overview=overview.of(tables, main) if tables and main else None,
        where=model.readable(main, main.of(tables.raw)) if tables and main else "",
        own={name for name in tables.order if looks.is_own(name)} if tables else set(),
        names={name: tables.title(name) for name in tables.order} if tables else {},
        title="DP-SGD frameworks: benchmark report",
        summary=summary,
        data=data,
        parts=_parts(report, drawn),
        others=_others(report.records),
        css=Markup((WEB / "page.css").read_text()),
        script=Markup((WEB / "page.js").read_text()),
        vega=Markup(vega() if data["cells"] else ""),
        json=Markup(
            json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        ),
    )


def _of_memory(tables: Tables) -> bool:
    """Return whether memory was measured and nothing timed: charts of seconds would be empty."""
    return "time" not in set(tables.raw.purpose) and bool(
        ((tables.raw.purpose == "memory") & (tables.raw.state == "ok")).any()
    )


def _others(records: Iterable[Record]) -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    """Return cells of layers and of the frontier -> what each of their processes left behind."""
    return {
        name: [(record.purpose, list(explain.lines(record, row))) for record, row in rows]
        for name, rows in explain.other_cells(records).items()
    }


@lru_cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that defines ``vegaEmbed``. Bundling them takes longer than the rest
    of a page, so that the script is kept."""
    import vl_convert

    kept = None
    with contextlib.suppress(BadInput):
        kept = cache.own() / f"vega-{metadata.version('vl-convert-python')}.js"
        if kept.exists():
            return kept.read_text(encoding="utf-8")
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    if kept:
        with contextlib.suppress(BadInput):
            cache.write_atomically(kept, bundle.encode())
    return bundle


def _parts(report: Report, drawn: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return chapters of one section under one heading, in their order; what belongs to none at the end.

    Where nothing was timed end to end, the first chapter with a figure is open: it is the result.
    """
    cells = report.tables.cells if report.tables else pd.DataFrame()
    found: dict[Section | str, list[_Chapter]] = {}
    when: dict[Section | str, str] = {}
    anchors: Counter[str] = Counter()
    in_sections = any(chapter.section for chapter in report.chapters)
    for chapter in report.chapters:
        pictures = [] if chapter.interactive else [p for p in chapter.pictures if p.stem in drawn]
        if not chapter.grids and not pictures:
            continue
        # What compares sections, and what was left out of them, stands before the first of them.
        is_first = in_sections and not any(isinstance(one, Section) for one in found)
        section = chapter.section or (ACROSS if is_first else BESIDE)
        when.setdefault(section, chapter.when)
        timed = isinstance(section, Section) and len(cells) > 0 and bool((section.of(cells).state == "ok").any())
        others = found.setdefault(section, [])
        is_open = bool(pictures) and not timed and not any(other.open for other in others)
        is_open = is_open or section == ACROSS
        anchor = naming.slug(chapter.title)
        anchors[anchor] += 1
        if anchors[anchor] > 1:
            anchor += f"-{anchors[anchor]}"
        shown = [_picture(p.title, drawn[p.stem]) for p in pictures]
        others.append(_Chapter(chapter.title, anchor, [*model.with_common_notes(chapter.grids)], shown, is_open))
    return [
        {
            "title": section.title if isinstance(section, Section) else section,
            "note": f"Measured {when[section]}." if when[section] else "",
            "chapters": inside,
        }
        for section, inside in sorted(found.items(), key=lambda item: item[0] == BESIDE)
    ]


def _picture(title: str, path: Path) -> _Picture:
    content = path.read_bytes()
    wide, high = (float(points) for points in re.findall(rb'viewBox="0 0 (\S+) (\S+)"', content)[0])
    width = min(PICTURE_WIDTH, round(1.5 * wide))
    uri = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    return _Picture(title, path.name, uri, width, round(high / wide * width))


def _data(tables: Tables) -> dict[str, Any]:
    sections = model.sections(tables)
    position = {name: i for i, name in enumerate(tables.order)}
    private = dict(zip(tables.raw.contestant, tables.raw.private, strict=True))
    processes, labels, strings = _processes(tables)
    return {
        "sections": [{**vars(s), "when": model.provenance(tables, s)} for s in sections],
        "tasks": {
            key: model.task_title(task, synthetic)
            for task, synthetic in sorted(set(zip(tables.cells.task, tables.cells.synthetic, strict=True)))
            for key in [_task_key(task, synthetic)]
        },
        "contestants": [
            {
                "name": name,
                "title": tables.title(name),
                "grey": look.colour == looks.GREY,
                "private": bool(private[name]),
                "colour": look.colour,
                "light": looks.light(look.colour),
                "dash": looks.DASHES[look.line],
                "open": look.fill == "none",
                "shape": looks.SHAPES[look.marker],
            }
            for name, look in looks.of_all(tables.order, private).items()
        ],
        "cells": _cells(tables, {section: i for i, section in enumerate(sections)}, position),
        "metrics": {name: model.METRICS[name] for name in MEMORY},
        "below_floor": costs.BELOW_FLOOR,
        "labels": labels,
        "strings": strings,
        "processes": processes,
    }


def _task_key(task: str, synthetic: bool) -> str:
    return f"{task} (synthetic)" if synthetic else task


def _cells(tables: Tables, sections: Mapping[Section, int], position: Mapping[str, int]) -> list[dict[str, Any]]:
    def column(frame: pd.DataFrame, *names: str) -> dict[Any, Any]:
        if frame.empty:
            return {}
        return dict(
            zip(
                frame[CELL].itertuples(index=False, name=None),
                zip(*(frame[n] for n in names), strict=True),
                strict=True,
            )
        )

    ratio = column(tables.ratios, "ratio", "low", "high", "n", "baseline")
    ratio_marks = (
        {} if tables.ratios.empty else {k: model.doubts(r) for k, r in zip(ratio, rows_of(tables.ratios), strict=True)}
    )
    bases = set()
    if len(tables.ratios):
        bases = set(tables.ratios[[*CELL[:-1], "baseline"]].itertuples(index=False, name=None))
    old = column(paper.then_and_now(tables), "paper_ratio")
    start = column(tables.compile, "median")
    epsilon = column(tables.privacy, "pld")
    accuracy = column(tables.accuracy, "median")
    bound = column(costs.floor(tables), "over_floor")
    memory: dict[Any, tuple[float, str]] = {}
    for metric in reversed(MEMORY):
        frame = tables.memory[tables.memory.metric == metric] if len(tables.memory) else tables.memory
        memory |= {key: (value / model.MEBIBYTE, metric) for key, (value,) in column(frame, "median").items()}
    behind = _behind(tables)
    cells = []
    for row in rows_of(tables.cells):
        key = tuple(getattr(row, name) for name in CELL)
        section = Section(row.machine, row.device, row.protocol, row.isolation)
        against = ratio.get(key)
        cells.append(
            {
                "s": sections[section],
                "c": position[row.contestant],
                "task": _task_key(row.task, row.synthetic),
                "synthetic": bool(row.synthetic),
                "batch": int(row.batch_size),
                "state": row.state,
                "reason": row.reason,
                "median": _finite(row.median),
                "low": _finite(row.low),
                "high": _finite(row.high),
                "n": int(row.n),
                "marks": model.marks(row) if row.state == "ok" else "",
                "failures": row.failures if row.state == "ok" else "",
                "ratio": [*map(_finite, against[:3]), int(against[3])] if against else None,
                "baseline": against[4] if against else None,
                "base": key in bases,
                "ratio_marks": ratio_marks.get(key, ""),
                "paper": _finite(old[key][0]) if key in old else None,
                "start": _finite(start[key][0]) if key in start else None,
                "memory": _finite(memory[key][0]) if key in memory else None,
                "metric": memory[key][1] if key in memory else None,
                "floor": _finite(bound[key][0]) if key in bound else None,
                "epsilon": _finite(epsilon[key][0]) if key in epsilon else None,
                "accuracy": _finite(accuracy[key][0]) if key in accuracy else None,
                "cell": row.cell,
                "p": behind(row),
            }
        )
    return cells


def _finite(value: Any) -> float | None:
    """Round a number for JSON, to more digits than anything shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _behind(tables: Tables) -> Any:
    """Return a function: row of ``cells`` -> indices of its processes, superseded ones included, and of its gate."""
    raw = tables.raw
    own: dict[Any, list[int]] = {}
    gates: dict[Any, list[int]] = {}
    codes: dict[Any, set[str]] = {}
    places = zip(
        raw.index,
        raw.purpose,
        raw.code,
        raw.batch_size,
        raw[PLACE].itertuples(index=False, name=None),
        raw.contestant,
        strict=True,
    )
    for i, purpose, code, size, place, contestant in places:
        if purpose == "gate":
            # The gate judges a contestant on a task once, at a batch size of its own.
            gates.setdefault((place[0], place[1], place[4], contestant, code), []).append(i)
        else:
            own.setdefault((*place, size, contestant), []).append(i)
            codes.setdefault((*place, size, contestant), set()).add(code)

    def behind(row: Any) -> list[int]:
        key = tuple(getattr(row, name) for name in CELL)
        judged = [
            i
            for code in sorted(codes.get(key, ()))
            for i in gates.get((row.machine, row.device, row.task, row.contestant, code), ())
        ]
        if key not in own:  # stopped before it was timed
            judged = [
                i
                for place, found in gates.items()
                if place[:4] == (row.machine, row.device, row.task, row.contestant)
                for i in found
            ]
        return [*own.get(key, ()), *judged]

    return behind


def _processes(tables: Tables) -> tuple[list[list[Any]], list[str], list[str]]:
    """Return (per record: purpose, state, then label and text by their numbers; all labels; all texts)."""
    labels: dict[str, int] = {}
    strings: dict[str, int] = {}
    processes = []
    known: explain.Known = {}
    columns = ("state", "reason", "superseded")
    for record, *told in zip(tables.records, *(tables.raw[name].tolist() for name in columns), strict=True):
        row = dict(zip(columns, told, strict=True))
        entry: list[Any] = [record.purpose, row["state"]]
        for label, text in explain.lines(record, row, known):
            entry += [labels.setdefault(label, len(labels)), strings.setdefault(text, len(strings))]
        processes.append(entry)
    return processes, list(labels), list(strings)
