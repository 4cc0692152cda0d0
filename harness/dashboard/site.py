"""Writes the site: pages and a feed. It lies in one folder and asks for nothing from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.analysis.change_points import LEAST_RUNS
from harness.dashboard import feed, view
from harness.dashboard.view import CellView, Options
from harness.errors import BadInput
from harness.history import events as events_of
from harness.history import series as series_of
from harness.history.runs import History
from harness.report.formats import page
from harness.store.folder import SITE

WEB = Path(__file__).parent / "web"
RECENT_EVENTS = 10


def write(history: History, out: Path, options: Options) -> dict[str, Any]:
    """Replace ``out`` by the site, whole or not at all; returns what is in it.

    Raises :class:`BadInput` where ``out`` holds something else, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / SITE).exists())):
        raise BadInput(f"{out} holds something that is no dashboard; choose an empty folder by --out.")
    files, shown = pages(history, options)
    part, old = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("part", "old"))
    try:
        part.mkdir(parents=True)
        for name, content in files.items():
            (part / name).write_bytes(content)
        if out.exists():
            out.rename(old)
        part.rename(out)
    except OSError as error:
        raise BadInput(f"{out} cannot be written ({error.strerror}); choose another folder by --out.") from None
    finally:
        if old.exists() and not out.exists():
            with suppress(OSError):
                old.rename(out)
        shutil.rmtree(part, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
    return shown


def pages(history: History, options: Options) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return (file name -> content, summary)."""
    all_series = series_of.of_history(history)
    events = events_of.of_history(history, all_series)
    cells = view.cells(history, events, all_series, options.days)
    by_series = {id(v.series): v for v in cells}
    current = events_of.current(events, history.runs[-1], options.days) if history.runs else []
    machines = view.machines(history)
    subjects: dict[str, list[CellView]] = {}
    for v in sorted(cells, key=lambda v: v.kind == "layer"):
        subjects.setdefault(v.page, []).append(v)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(WEB),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    common = {
        "simulated": history.simulated,
        "options": options,
        "machines": machines,
        "subjects": [(here[0].subject_title, file) for file, here in subjects.items()],
        "of_series": lambda s: by_series[id(s)],
        "percent": view.percent,
        **dict.fromkeys(("faults", "lists", "groups"), ()),
    }

    def render(**values: Any) -> bytes:
        return environment.get_template("page.html").render(**{**common, **values}).encode()

    none = f"None of the last {options.days} days."
    if not history.can_judge:
        none = f"Too few runs to judge: a slowdown shows from {LEAST_RUNS} runs of a cell on one machine on; the most "
        none += f"so far are {history.most_runs}."
    lists = [
        ("Open regressions", current, none if history.runs else ""),
        ("Older, still open", [e for e in events if e.open and e not in current], ""),
        ("Latest events", events[:RECENT_EVENTS], ""),
    ]
    files = {
        "index.html": render(title="dpbench history", faults=history.faults, lists=lists),
        "events.html": render(title="Events", lists=[("All events", events, "Nothing has changed yet.")]),
        "page.css": (page.WEB / "page.css").read_bytes(),
        "vega.js": page.vega().encode() if cells else b"",
        "feed.xml": feed.atom(
            history, events, {e.id: by_series[id(e.first.series)].address for e in events}, options.site
        ),
    }
    for file, here in subjects.items():
        own = {id(v.series) for v in here}
        mine = [e for e in events if any(id(c.series) in own for c in e.changes)]
        title = f"{here[0].kind.capitalize()}: {here[0].subject_title}"
        files[file] = render(title=title, lists=[("What happened here", mine, "")], groups=list(_groups(here)))
    shown = {
        "runs": len(history.runs),
        "machines": len(machines),
        "cells": len(cells),
        "events": len(events),
        "open": [e.sentence for e in current],
        "simulated": history.simulated,
        "faults": list(history.faults),
        "files": sorted(files),
    }
    files[SITE] = (json.dumps(shown, indent=1, ensure_ascii=False) + "\n").encode()
    return files, shown


def _groups(here: Sequence[CellView]) -> Iterator[tuple[str, list[CellView], list[tuple[str, Markup]]]]:
    """Yield (machine's name, its cells, their charts)."""
    by_machine: dict[str, list[CellView]] = {}
    for v in here:
        by_machine.setdefault(v.machine.key, []).append(v)
    for views in by_machine.values():
        charts = [("Seconds", view.chart(views, "time"))]
        if any(v.series.counted for v in views):
            charts.append(("Memory", view.chart(views, "memory")))
        specs = [(name, Markup(json.dumps(spec, allow_nan=False).replace("<", "\\u003c"))) for name, spec in charts]
        yield views[0].machine.label, views, specs
