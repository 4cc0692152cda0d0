"""The feed of regressions (Atom, RFC 4287) and the badge. Both say *simulated* where the history is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from xml.etree import ElementTree

from markupsafe import escape

from harness.history.events import Event, current
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


@dataclass(frozen=True)
class Badge:
    """``colour``: a name that badge services know."""

    message: str
    colour: str

    def as_json(self) -> str:
        """Return the JSON that the endpoint of a badge service takes."""
        shown = {"schemaVersion": 1, "label": "dpbench", "message": self.message, "color": self.colour}
        return json.dumps(shown, ensure_ascii=False) + "\n"

    def as_svg(self) -> str:
        """Two boxes; the width of the text is stated, so that any font fits it."""
        left, right = 56, 14 + round(6.3 * len(self.message))
        fill = {"brightgreen": "#2e7d32", "red": "#b3261e", "orange": "#a15c00", "lightgrey": "#5f6368"}[self.colour]
        message, width = escape(self.message), left + right
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" '
            f'aria-label="dpbench: {message}"><title>dpbench: {message}</title>'
            f'<rect width="{width}" height="20" rx="3" fill="#3c4043"/>'
            f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z" fill="{fill}"/>'
            '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
            f'<text x="7" y="14" textLength="{left - 14}">dpbench</text>'
            f'<text x="{left + 7}" y="14" textLength="{right - 14}">{message}</text></g></svg>\n'
        )


def badge(history: History, events: Sequence[Event], days: int) -> Badge:
    """``no data``, ``2 regressions`` (open, of the last ``days``), ``too few runs to judge``, or ``no regressions
    since`` the day when the last one was detected (or measuring began)."""
    if not history.runs:
        return Badge("no data", "lightgrey")
    mark = "simulated: " if history.simulated else ""
    found = current(events, history.runs[-1], days)
    if found:
        colour = "red" if any(e.red for e in found) else "orange"
        return Badge(f"{mark}{len(found)} regression{'' if len(found) == 1 else 's'}", colour)
    if not history.can_judge:
        return Badge(f"{mark}too few runs to judge", "lightgrey")
    since = max([e.detected.time for e in events if e.worse] or [history.runs[0].time])
    return Badge(f"{mark}no regressions since {since[:10]}", "brightgreen")
