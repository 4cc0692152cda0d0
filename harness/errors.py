"""What the user did that cannot be done: one sentence with the value, the rule and the remedy. Exit code 2."""

from __future__ import annotations


class BadInput(Exception):
    """The message is shown as it is, without a traceback."""
