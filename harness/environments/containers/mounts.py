"""Files of this machine that containers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import BadInput


class Mounts:
    """Files and folders of this machine that containers see, read-only, by bind mounts."""

    def __init__(self) -> None:
        self._checked: set[Path] = set()

    def mount(self, source: Path, inside: str) -> Any:
        """``source`` as the folder ``inside``; a file as ``inside``/its name."""
        from docker.types import Mount

        source = source.resolve()
        if source not in self._checked:
            _check_readable(source)
            self._checked.add(source)
        target = inside if source.is_dir() else f"{inside}/{source.name}"
        return Mount(target, str(source), type="bind", read_only=True)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return [p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")]


def _check_readable(source: Path) -> None:
    """Raise :class:`BadInput`: a container runs as nobody, so that what is mounted has to be open to everybody."""
    for path in [source, *_files(source)]:
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            raise BadInput(
                f"{path} may be read by its owner only, and containers run as nobody; run `chmod -R o+rX {source}`."
            )
