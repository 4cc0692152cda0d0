"""Numbers and names that users pass: one sentence for those that cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any


def check_number(name: str, value: Any, allowed: Callable[[float], bool], rule: str) -> float:
    """Return ``value`` as a float.

    Args:
        name: The argument, as the user spells it.
        value: What was passed.
        allowed: Whether a number is in the argument's range.
        rule: The end of the sentence, for instance "it must lie in (0, 1]".

    Raises:
        ValueError: it is no number, or not in the range.
    """
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if number != number or not allowed(number):
        raise ValueError(f"{name} is {value!r}; {rule}.")
    return number


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question that names what resembles ``name`` most; nothing where nothing does."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
