"""Attributes of an object that are those of one of its parts."""

from __future__ import annotations

from typing import Any


class Forwarded:
    """An attribute that is that of a part, of the same name: ``state = Forwarded("original_optimizer")``."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, whole: Any, kind: Any = None) -> Any:
        return self if whole is None else getattr(getattr(whole, self.part), self.name)

    def __set__(self, whole: Any, value: Any) -> None:
        setattr(getattr(whole, self.part), self.name, value)
