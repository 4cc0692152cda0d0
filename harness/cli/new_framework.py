"""``dpbench new-framework``: the folder of a contestant, ready to be filled in."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from harness.errors import BadInput
from harness.plan import registry

TEMPLATES = Path(__file__).parent / "templates"
RESERVED = {"all", "core", "defaults"}


def write(name: str, parent: Path) -> list[Path]:
    """Write ``parent/name``, never over anything; returns the files.

    Its adapter runs, and the gate rejects it because ``step`` is not filled in. Raises :class:`BadInput` for a name
    that cannot be a Python package or is taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in RESERVED or keyword.iskeyword(name):
        raise BadInput(
            f"A framework cannot be called {name!r}: begin with a letter, go on with lower-case letters, digits and "
            f"underscores, and choose neither a keyword of Python nor one of {', '.join(sorted(RESERVED))}."
        )
    folder = parent / name
    if folder.exists() or name in registry.frameworks(hidden=True):
        raise BadInput(f"There is a framework {name} already; choose another name, or edit its folder ({folder}).")
    files = {}
    for template in sorted(TEMPLATES.glob("*.txt")):
        text = template.read_text().replace("NAME", name).replace("CLASS", name.title().replace("_", ""))
        files[folder / template.name.removesuffix(".txt")] = text
    try:
        folder.mkdir(parents=True)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror}); choose another folder with --folder.") from None
    return list(files)
