"""Files of this machine that containers see: mounted where the engine runs here, sent to it where it runs elsewhere."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

from harness.environments.containers import engine, images
from harness.environments.containers.engine import Engine
from harness.environments.containers.images import Image
from harness.errors import BadInput


class Mounts:
    """Files and folders of this machine that containers see, read-only. By bind mount where the engine runs here, else
    in volumes, each filled once and removed at the end of the run."""

    def __init__(self, on: Engine) -> None:
        self.engine = on
        self._volumes: dict[tuple[Path, str], str] = {}
        self._checked: set[Path] = set()

    def mount(self, source: Path, inside: str, image: Image) -> Any:
        """``source`` as the folder ``inside``; a file as ``inside``/its name. ``image``: any that the engine has."""
        from docker.types import Mount

        source = source.resolve()
        if self.engine.is_remote:
            return Mount(inside, self._volume(source, image), type="volume", read_only=True, no_copy=True)
        if source not in self._checked:
            _check_readable(source)
            self._checked.add(source)
        target = inside if source.is_dir() else f"{inside}/{source.name}"
        return Mount(target, str(source), type="bind", read_only=True)

    def _volume(self, source: Path, image: Image) -> str:
        """Return the volume that holds ``source`` as it is now."""
        files = sorted(_files(source))
        stamp = hashlib.sha256(repr([(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]).encode())
        key = (source, stamp.hexdigest())
        if key not in self._volumes:
            client = self.engine.client
            labels = engine.labels(LONGEST_RUN_SECONDS)
            volume = client.volumes.create(f"dpbench-{os.getpid()}-{os.urandom(4).hex()}", labels=labels)
            # A container that never runs is the only way in by the API.
            carrier = client.containers.create(
                image.digest, volumes={volume.name: {"bind": "/mounts", "mode": "rw"}}, labels=labels
            )
            try:
                with tempfile.TemporaryFile() as archive:
                    _pack(archive, source, files)
                    archive.seek(0)
                    carrier.put_archive("/mounts", archive)
            finally:
                engine.remove(carrier)
            self._volumes[key] = volume.name
        return self._volumes[key]

    def forget(self) -> None:
        """Forget what was sent: a restarted engine may have lost it."""
        self._volumes.clear()


LONGEST_RUN_SECONDS = 7 * 24 * 3600.0


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return [p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")]


def _pack(archive: IO[bytes], source: Path, files: list[Path]) -> None:
    parent = source.parent if source.is_file() else source
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in files:
            with path.open("rb") as content:
                tar.addfile(images.entry(str(path.relative_to(parent)), path.stat().st_size), content)


def _check_readable(source: Path) -> None:
    """Raise :class:`BadInput`: a container runs as nobody, so that what is mounted has to be open to everybody."""
    for path in [source, *_files(source)]:
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            raise BadInput(
                f"{path} may be read by its owner only, and containers run as nobody; run `chmod -R o+rX {source}`."
            )
