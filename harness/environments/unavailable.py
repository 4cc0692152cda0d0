"""The value in the place of what cannot be had here, with the reason that the records give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unavailable:
    """Something that cannot be had: an executor, an image.

    Attributes:
        reason: why, as the ``unsupported`` records say it.
    """

    reason: str
