"""Numbers and names that users pass: one sentence for those that cannot be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection
from typing import Any

SIGMA_RULE = "it must be a number, at least 0, for instance 1.1"
DIVISOR_RULE = "it must be a positive, public number"


def check_noise_multiplier(value: Any, hint: str = "") -> float:
    """Return σ as a float; ValueError, which ends with ``hint``, unless it is finite and at least 0."""
    return check_number("noise_multiplier", value, lambda sigma: 0.0 <= sigma < math.inf, SIGMA_RULE + hint)


def check_divisor(value: Any, rule: str = DIVISOR_RULE) -> float:
    """Return the divisor of updates as a float; ValueError by ``rule`` unless it is finite and above 0."""
    return check_number("expected_batch_size", value, lambda size: 0.0 < size < math.inf, rule)


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
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if number != number or not allowed(number):
        raise ValueError(f"{name} is {value!r}; {rule}.")
    return number


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question that names what resembles ``name`` most; nothing where nothing does."""
    spelled = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f" Did you mean {spelled[close[0]]!r}?" if close else ""


def number_of(count: int, one: str, several: str | None = None) -> str:
    """Return a number with what it counts, as "1 unit" and "2 units"."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"
