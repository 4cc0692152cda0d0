"""A build backend that hands out the metadata lying in a source archive and runs no code of the archive.

``pip download`` asks the build backend of a source archive for its metadata. For old archives that means running their
``setup.py``, which may need libraries that nobody has. The downloader copies this file to ``setuptools/build_meta.py``
in a temporary folder on pip's path, so that pip takes it for the backend. Standard library only.
"""

from __future__ import annotations

import email
import sys
from pathlib import Path
from typing import Any

__legacy__ = sys.modules[__name__]  # the object that pip asks for where an archive has no pyproject.toml


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """PEP 517: writes the archive's PKG-INFO as a ``.dist-info`` folder and returns that folder's name."""
    text = Path("PKG-INFO").read_bytes()
    fields = email.message_from_bytes(text)
    name = fields["Name"].replace("-", "_")  # the folder's first hyphen ends the name
    folder = Path(metadata_directory) / f"{name}-{fields['Version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(text)
    return folder.name
