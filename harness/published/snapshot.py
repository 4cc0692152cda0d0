"""One file of all committed results, with its checksum beside it: what is cited, or put where files stay."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from harness.errors import BadInput
from harness.published.index import FOLDER
from harness.store.cache import write_atomically


def write(target: Path, folder: Path = FOLDER) -> str:
    """Write the files below ``results/`` that git knows into a ``.tar``, and ``target.sha256`` beside it.

    The same files make the same bytes, whoever packs them: sorted, without times, owners and modes, and not compressed,
    since compressors differ by version and most of it is compressed already.

    Returns:
        The checksum.

    Raises:
        BadInput: the target is no ``.tar`` or cannot be written, or git knows no files here.
    """
    if target.suffix != ".tar":
        raise BadInput(f"The snapshot is {target}: give it the ending .tar.")
    git = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        listed = subprocess.run(git, capture_output=True, check=True).stdout.decode()
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name in sorted(filter(None, listed.split("\0"))):
                data = (folder / name).read_bytes()
                member = tarfile.TarInfo(f"{folder.name}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadInput(f"The files of {folder} cannot be read ({error}); a snapshot needs a checkout.") from None
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    write_atomically(target, content.getvalue(), "name another file")
    write_atomically(target.with_name(f"{target.name}.sha256"), f"{digest}  {target.name}\n".encode())
    return digest
