"""Writes the site: pages, script, style, feed, badge. It lies in one folder and asks for nothing from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
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
from harness.history.events import Event
from harness.history.runs import History
from harness.report.figures import looks
from harness.store.folder import SITE

WEB = Path(__file__).parent / "web"
RECENT_EVENTS = 10
OPEN_CELLS = 4
"""A page with no more cells shows all charts at once."""


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
    addresses = {e.id: by_series[id(e.first.series)].address for e in events}
    badge = feed.badge(history, events, options.days)
    current = events_of.current(events, history.runs[-1], options.days) if history.runs else []
    machines = view.machines(history)
    frameworks, covered = view.coverage(cells)
    subjects = list(dict.fromkeys((v.kind, v.subject) for v in sorted(cells, key=lambda v: v.kind == "layer")))
    grouped: dict[tuple[str, str], list[CellView]] = {}
    for v in cells:
        grouped.setdefault((v.machine.key, v.page), []).append(v)
    common = {
        "simulated": history.simulated,
        "options": options,
        "machines": machines,
        "subjects": [
            (kind, name, view.page_name(kind, name), view.subject_title(kind, name)) for kind, name in subjects
        ],
        "frameworks": [(name, view.page_name("framework", name)) for name in frameworks],
        "colours": {name: (look.colour, looks.light(look.colour)) for name, look in _looks(frameworks).items()},
        "of_series": lambda s: by_series[id(s)],
        "percent": view.percent,
        "spark_size": (view.SPARK_WIDTH, view.SPARK_HEIGHT),
        "newest": history.runs[-1].time[:10] if history.runs else None,
        "too_few": f"a slowdown shows from {LEAST_RUNS} runs of a cell on one machine on; the most so far are "
        f"{history.most_runs}",
        "faults": history.faults,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(WEB),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )

    def render(template: str, **values: Any) -> bytes:
        return environment.get_template(template).render(**common, **values).encode()

    files = {
        "index.html": render(
            "overview.html",
            page="index.html",
            title="dpbench history",
            badge=badge,
            current=current,
            older=[e for e in events if e.open and e not in current],
            better=[e for e in events if not e.worse and _recent(e, history, options.days)],
            movers=view.movers(cells),
            cells=cells,
            matrices=list(_matrices(frameworks, covered)),
            grouped=list(grouped.values()),
            recent=events[:RECENT_EVENTS],
            ok=sum(v.state == "ok" for v in cells),
        ),
        "events.html": render("events.html", page="events.html", title="Events", events=events),
        "site.css": (WEB / "site.css").read_bytes(),
        "site.js": (WEB / "site.js").read_bytes(),
        "feed.xml": feed.atom(history, events, addresses, options.site),
        "badge.svg": badge.as_svg().encode(),
        "badge.json": badge.as_json().encode(),
    }
    for kind, name in subjects:
        here = [v for v in cells if (v.kind, v.subject) == (kind, name)]
        title = f"{kind.capitalize()}: {view.subject_title(kind, name)}"
        files[view.page_name(kind, name)] = _cells_page(
            render, options, title, view.page_name(kind, name), here, events
        )
    for name in frameworks:
        here = [v for v in cells if v.framework == name]
        page = view.page_name("framework", name)
        rows = view.versions(history, name)
        files[page] = _cells_page(render, options, f"Framework: {name}", page, here, events, rows, by_subject=True)
    shown = {
        "runs": len(history.runs),
        "machines": len(machines),
        "cells": len(cells),
        "events": len(events),
        "open": [e.sentence for e in current],
        "badge": badge.message,
        "simulated": history.simulated,
        "faults": list(history.faults),
        "files": sorted(files),
    }
    files[SITE] = (json.dumps(shown, indent=1, ensure_ascii=False) + "\n").encode()
    return files, shown


def _matrices(frameworks: Sequence[str], covered: Sequence[tuple[str, str, dict[str, Any]]]) -> Iterator[Any]:
    """Yield (title, frameworks with a cell there, rows of (kind, subject, framework -> coverage)) of tasks and
    layers."""
    for kind, title in (("task", "Tasks"), ("layer", "Layers")):
        rows = [row for row in covered if row[0] == kind]
        if rows:
            yield title, [name for name in frameworks if any(name in found for _, _, found in rows)], rows


def _looks(names: Iterable[str]) -> dict[str, looks.Look]:
    """Return the looks of frameworks, those of reports; grey for one that this checkout does not have."""
    return {name: looks.of(f"{name}-") for name in names}


def _recent(event: Event, history: History, days: int) -> bool:
    return (history.runs[-1].moment - event.detected.moment).days <= days


def _cells_page(
    render: Any,
    options: Options,
    title: str,
    page: str,
    here: Sequence[CellView],
    events: Iterable[Event],
    versions: Sequence[dict[str, str]] = (),
    by_subject: bool = False,
) -> bytes:
    own = {id(v.series) for v in here}
    mine = [e for e in events if any(id(c.series) in own for c in e.changes)]
    marked = {v.id for v in here if v.mark in ("red", "worse")}
    opened = {v.id for v in here} if len(here) <= OPEN_CELLS else marked
    data = {**view.chart_data(here), "scale": view.SCALE, "repository": options.repository}
    groups: dict[str, list[CellView]] = {}
    for v in here:
        groups.setdefault(v.machine.key, []).append(v)
    return bytes(
        render(
            "cells.html",
            page=page,
            title=title,
            groups=list(groups.values()),
            opened=opened,
            events=mine,
            versions=versions,
            by_subject=by_subject,
            json=Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
        )
    )
