"""Errors caused by the user's input: one sentence with the value, the rule and the remedy. Exit code 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BadInput(Exception):
    """The message is shown as it is, without a traceback."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean opacus?)``; empty where nothing of what is ``known`` resembles ``name``."""
    found = get_close_matches(name, list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""
