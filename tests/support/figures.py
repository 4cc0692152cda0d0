"""Read what a figure shows out of its Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def words(spec: Any) -> str:
    """All texts of a figure, in order; lines of one text are joined."""
    return " ".join(_strings(spec))


def _strings(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from _strings(value)
    elif isinstance(part, list):
        for value in part:
            yield from _strings(value)


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what lies between its title and its legend."""
    return list(spec["vconcat"][0]["concat"])


def rows(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The data of all layers of a kind (``point``, ``line``, ``rule``, ``rect``, ``text``), without the legend's."""
    layers = [layer for panel in (panels(spec) if "vconcat" in spec else [spec]) for layer in panel["layer"]]
    return [row for layer in layers if layer["mark"]["type"] == kind for row in layer["data"]["values"] if row]


def legend(spec: dict[str, Any]) -> list[str]:
    """The names below the panels."""
    layers = [layer for part in spec["vconcat"][1:] for layer in part["layer"]]
    return [row["text"] for layer in layers if layer["mark"]["type"] == "point" for row in layer["data"]["values"]]
