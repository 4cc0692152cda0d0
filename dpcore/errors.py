"""The two ways in which dpcore refuses to go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UnsupportedError(NotImplementedError):
    """dpcore cannot compute this exactly; the message says what, why and what to do instead."""


class NoRuleError(UnsupportedError):
    """No rule applies to the use of ``params``; the module around them may still be recorded as a whole."""

    def __init__(self, message: str, params: Sequence[Any]) -> None:
        super().__init__(message)
        self.params = params


class PrivacyError(RuntimeError):
    """Going on would release something that the accountant does not know of; the message says what would have
    leaked.
    """
