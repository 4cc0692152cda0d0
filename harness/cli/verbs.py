"""Groups of verbs, which know what other programs call theirs."""

from __future__ import annotations

from typing import Any

import typer

SAME = (
    {"rm", "remove", "delete", "del", "uninstall", "clean"},
    {"list", "ls", "show"},
    {"make", "build", "create", "install"},
    {"fetch", "download", "get", "pull"},
    {"verify", "check", "validate"},
    {"run", "bench", "benchmark", "measure"},
    {"compare", "diff"},
    {"merge", "pack", "collect"},
)
"""Words for one thing. What resembles a verb by its letters, typer itself finds."""


class Verbs(typer.core.TyperGroup):
    """Answers a word that means one of its verbs with that verb."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        asked = args[0]
        if asked not in self.commands:
            meant = [verb for words in SAME if asked in words for verb in self.list_commands(context) if verb in words]
            if meant:
                context.fail(f"No such command {asked!r}. Did you mean {meant[0]!r}?")
        return super().resolve_command(context, args)
