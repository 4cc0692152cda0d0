"""The feed of regressions (Atom, RFC 4287). It says *simulated* where the history is."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC
from xml.etree import ElementTree

from harness.history.events import Event
from harness.history.runs import History, Run

ATOM = "http://www.w3.org/2005/Atom"
ENTRIES = 50
_FEED = uuid.UUID("0b4d2c55-58c4-5f0f-8f0e-4a8f2f6f7c11")


def atom(history: History, events: Sequence[Event], addresses: dict[str, str], site: str | None) -> bytes:
    """Return the newest regressions. ``addresses``: event id -> page and anchor. An entry keeps its id; ``updated``
    moves when a cell works again."""
    ElementTree.register_namespace("", ATOM)
    base = f"{site.rstrip('/')}/" if site else ""
    mark = "Simulated: " if history.simulated else ""
    feed = ElementTree.Element(_name("feed"))
    _text(feed, "title", f"{mark}dpbench regressions")
    _text(feed, "id", f"urn:uuid:{uuid.uuid5(_FEED, '|'.join(sorted(history.machines)))}")
    entries = [e for e in events if e.worse][:ENTRIES]
    changed = [_updated(e) for e in entries] or list(history.runs[-1:])
    latest = max(changed, key=lambda run: run.moment, default=None)
    _text(feed, "updated", _stamp(latest) if latest else "1970-01-01T00:00:00Z")
    _link(feed, f"{base}index.html", "alternate")
    _link(feed, f"{base}feed.xml", "self")
    author = ElementTree.SubElement(feed, _name("author"))
    _text(author, "name", "dpbench")
    for event in entries:
        entry = ElementTree.SubElement(feed, _name("entry"))
        _text(entry, "title", f"{mark}{event.sentence}")
        _text(entry, "id", f"urn:uuid:{event.id}")
        _text(entry, "published", _stamp(event.detected))
        _text(entry, "updated", _stamp(_updated(event)))
        _link(entry, base + addresses[event.id], "alternate")
        lines = [event.runs[0].machine_label, *event.notes, *(c.series.name for c in event.changes)]
        _text(entry, "summary", "\n".join(lines))
    ElementTree.indent(feed)
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(feed, "utf-8") + b"\n"


def _updated(event: Event) -> Run:
    """Return the run at which it was detected, or at which the last of its cells worked again."""
    ends = [event.runs[c.back] for c in event.changes if c.back is not None]
    return max([event.detected, *ends], key=lambda run: run.moment)


def _stamp(run: Run) -> str:
    return run.moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _name(tag: str) -> str:
    return f"{{{ATOM}}}{tag}"


def _text(parent: ElementTree.Element, tag: str, text: str) -> None:
    kept = "".join(c for c in text if c in "\n\t" or ord(c) >= 32)
    ElementTree.SubElement(parent, _name(tag)).text = kept


def _link(parent: ElementTree.Element, address: str, kind: str) -> None:
    ElementTree.SubElement(parent, _name("link"), {"rel": kind, "href": address})
