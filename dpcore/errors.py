"""The two ways in which dpcore refuses to go on."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """dpcore cannot compute this exactly; the message says what, why and what to do instead."""


class PrivacyError(RuntimeError):
    """Going on would release something that the accountant does not know of; the message says what would have
    leaked.
    """
