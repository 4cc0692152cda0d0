"""A check of the gate: an error and its limit in the check's own measure. It passes if error <= limit; an error that is
not a number fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.contract import Unsupported
from harness.worker.gate.noise import Score

Check = dict[str, Any]
"""The fields of ``record.GateCheck``."""

RAISED = "raised "
"""How the detail of a check begins that an exception ended."""
FINDING = "finding: "
"""How the detail of a check begins that passes and has something to tell."""


def check(name: str, error: float | None, limit: float | None, detail: str = "", digest: Sequence[float] = ()) -> Check:
    """Return a check. ``digest``: of the update that it looked at."""
    if error is not None and not math.isfinite(error):
        error, detail = None, f"not finite; {detail}"
    passed = error is not None and limit is not None and bool(error <= limit)
    return {
        "check": name,
        "error": None if error is None else float(error),
        "limit": float(limit) if limit is not None and math.isfinite(limit) else None,
        "passed": passed,
        "detail": detail,
        "digest": list(digest),
    }


def scored(name: str, score: Score) -> Check:
    """Return the check of a score."""
    return check(name, score.value, score.limit, score.where)


def guarded(name: str, run: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the checks that ``run`` yields, and a failed one of this name where it raises."""
    try:
        yield from run()
    except (Unsupported, MemoryError):
        raise
    except Exception as error:
        yield check(name, None, None, f"{RAISED}{type(error).__name__}: {error}"[:500])


def worst(errors: Mapping[str, float]) -> str:
    """Return the name of the largest error, to which NaN belongs."""
    return max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
