"""The two sides of a comparison: a name becomes a folder with ``frameworks/`` and ``dpcore/`` of that state under the
running ``harness/``, so that one instrument measures both. Folders are named by their content, and equal sides share
one. A container image is a side, too: the working tree, run in that image."""

from __future__ import annotations

import compileall
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from harness.errors import BadInput
from harness.paths import INSTALLED, ROOT
from harness.plan import registry
from harness.store import cache
from harness.worker import machine

Role = Literal["base", "head"]

CORE = "dpcore"
PARTS = ("frameworks", CORE)
WORKING_TREE = (".", "WORKTREE")
IMAGE = "image:"
PIN_FILES = ("requirements.txt", "requirements-no-deps.txt")
UNUSED_DAYS = 14
_VERSION = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


@dataclass(frozen=True)
class Side:
    """``asked``: the user's words. ``title``: for people. ``content``: hash of all its files. ``commit``, ``dirty``:
    where it is a state of a git repository. ``package``: the pin that was put in the place of another, and ``users``
    the frameworks that had one. ``image``: tag or digest of the container image that it runs in, whatever is locked."""

    role: Role
    asked: str
    title: str
    folder: Path
    content: str
    commit: str | None = None
    dirty: bool | None = None
    package: str | None = None
    users: tuple[str, ...] = ()
    image: str | None = None

    @property
    def slug(self) -> str:
        """Return the name as a part of a folder's name."""
        return self.content + (f"-{re.sub(r'[^A-Za-z0-9.]+', '-', self.image)[-40:]}" if self.image else "")

    @property
    def is_repinned(self) -> bool:
        """Whether requirements say something that no lock does (dpcore is pinned nowhere)."""
        return self.package is not None and self.users != (CORE,)


def resolve(role: Role, asked: str, repository: Path = ROOT) -> Side:
    """Return the side that the text names: a git ref of ``repository``, ``.`` or ``WORKTREE`` (its files as they are),
    another folder with ``frameworks/``, ``NAME==VERSION``, the path of a wheel, or ``image:TAG_OR_DIGEST``, which is
    looked up on the engine only when the comparison begins. Raises :class:`BadInput` for anything else."""
    if asked.startswith(IMAGE):
        return _of_image(role, asked, repository)
    if asked.endswith(".whl"):
        return _of_wheel(role, asked, repository)
    if match := _VERSION.fullmatch(asked):
        return _of_pin(role, asked, match[1], asked, repository)
    if asked in WORKING_TREE:
        return _of_folder(role, asked, repository, "the working tree")
    if (Path(asked) / "frameworks").is_dir():
        return _of_folder(role, asked, Path(asked).resolve(), f"the folder {Path(asked).name}")
    return _of_commit(role, asked, repository)


def git(repository: Path, *arguments: str) -> str | None:
    """Return the standard output, stripped; None where git fails, is not there, or the tree came with a wheel."""
    return None if repository == ROOT and INSTALLED else machine.git(*arguments, folder=repository)[0]


def commit_of(option: str, asked: str, repository: Path) -> str:
    """Return the full hash of the commit that a ref names. Raises :class:`BadInput`."""
    found = (
        None if asked.startswith("-") else git(repository, "rev-parse", "--verify", "--quiet", f"{asked}^{{commit}}")
    )
    if found is None and repository == ROOT and INSTALLED:
        raise BadInput(
            f"{option} is {asked!r}: commits need a checkout of dpbench, and this one was installed from a wheel; name "
            "a folder with frameworks/, NAME==VERSION, a wheel or image:TAG."
        )
    _, why = machine.git("rev-parse", "HEAD", folder=repository) if found is None else ("", "")
    if why:
        raise BadInput(f"{option} is {asked!r}, and git does not read {repository}: {why}")
    if found is None:
        raise BadInput(
            f"{option} is {asked!r}, which is no commit, branch or tag of this repository; fetch it first (a shallow "
            "clone lacks it), or name `.`, NAME==VERSION, a wheel or image:TAG."
        )
    return found


def _of_commit(role: Role, asked: str, repository: Path) -> Side:
    commit = commit_of(f"--{role}", asked, repository)
    with _workshop() as place:
        present = [part for part in PARTS if git(repository, "cat-file", "-e", f"{commit}:{part}") is not None]
        if "frameworks" not in present:
            raise BadInput(f"--{role} is {asked!r}, a commit without a folder frameworks/; name a later one.")
        archive = place / "archive.tar"
        if git(repository, "archive", "--format=tar", "-o", str(archive), commit, *present) is None:
            raise BadInput(f"git could not write out {asked!r} (--{role}); is the disk full, or the clone partial?")
        with tarfile.open(archive) as tar:
            tar.extractall(place / "tree", filter="data")
        folder, content = _finish(place / "tree")
    title = commit[:10] if commit.startswith(asked) else f"{asked} ({commit[:10]})"
    return Side(role, asked, title, folder, content, commit, False)


def _of_folder(role: Role, asked: str, source: Path, title: str) -> Side:
    with _workshop() as place:
        _copy(source, place / "tree")
        folder, content = _finish(place / "tree")
    commit = git(source, "rev-parse", "HEAD")
    dirty = None if commit is None else bool(git(source, "status", "--porcelain", "--", *PARTS))
    where = "" if commit is None else f" ({commit[:10]}{' with changes' if dirty else ''})"
    return Side(role, asked, title + where, folder, content, commit, dirty)


def _of_image(role: Role, asked: str, repository: Path) -> Side:
    name = asked.removeprefix(IMAGE)
    if not name.strip():
        raise BadInput(f"--{role} is {asked!r}, which names no image; write image:TAG or image:sha256:DIGEST.")
    tree = _of_folder(role, asked, repository, "the working tree")
    shown = name[:19] if name.startswith("sha256:") else name
    return replace(tree, title=f"image {shown}", image=name)


def _of_pin(role: Role, asked: str, name: str, line: str, repository: Path) -> Side:
    """Return the working tree, in which every pin of the package is ``line``."""
    with _workshop() as place:
        _copy(repository, place / "tree")
        _add_private(place / "tree")
        users = _repin(place / "tree" / "frameworks", name, line)
        if not users:
            raise BadInput(f"--{role} is {asked!r}, but no framework's requirements pin {name}; see `dpbench list`.")
        folder, content = _finish(place / "tree")
    commit, dirty = git(repository, "rev-parse", "HEAD"), bool(git(repository, "status", "--porcelain", "--", *PARTS))
    title = line.replace("==", " ") if "==" in line else f"{name} of {Path(*Path(asked).parts[-2:])}"
    return Side(role, asked, title, folder, content, commit, dirty, line, users)


def _of_wheel(role: Role, asked: str, repository: Path) -> Side:
    path = Path(asked).resolve()
    try:
        name, version, *_ = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidVersion):
        name = None
    if name is None or not path.is_file():
        raise BadInput(f"--{role} is {asked!r}: there is no such file, or its name is not that of a wheel.")
    if name == CORE:
        return _of_core_wheel(role, asked, path, str(version), repository)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return _of_pin(role, asked, name, f"{name} @ {path.as_uri()}#sha256={digest}", repository)


def _of_core_wheel(role: Role, asked: str, path: Path, version: str, repository: Path) -> Side:
    """Put a wheel of dpcore in place. It is imported from the tree and pinned nowhere: the wheel's
    package takes the place of the folder."""
    with _workshop() as place:
        _copy(repository, place / "tree")
        shutil.rmtree(place / "tree" / "dpcore", ignore_errors=True)
        with zipfile.ZipFile(path) as wheel:
            members = [name for name in wheel.namelist() if name.startswith("dpcore/") and ".." not in name.split("/")]
            wheel.extractall(place / "tree", members)
        if not members:
            raise BadInput(f"--{role} is {asked!r}, a wheel without the package dpcore; build it from dpcore/.")
        folder, content = _finish(place / "tree")
    return Side(role, asked, f"dpcore {version}", folder, content, package=f"dpcore=={version}", users=(CORE,))


def _repin(frameworks: Path, name: str, line: str) -> tuple[str, ...]:
    """Return the names of the frameworks in which a pin of ``name`` was replaced."""
    users = set()
    for file in (path for kind in PIN_FILES for path in sorted(frameworks.glob(f"*/{kind}"))):
        old = {
            pin
            for pin in registry.pins(file)
            if not pin.startswith("-") and canonicalize_name(Requirement(pin).name) == canonicalize_name(name)
        }
        if old:
            lines = [line if text.strip() in old else text for text in file.read_text().splitlines()]
            file.write_text("\n".join(lines) + "\n")
            users.add(file.parent.name)
    return tuple(sorted(users))


# ---- folders


@contextmanager
def _workshop() -> Iterator[Path]:
    """A folder beside the finished ones, so that a rename can finish one."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache.folder("sides")) as folder:
        yield Path(folder)


def _ignored(folder: str, names: list[str]) -> set[str]:
    return {
        name for name in names if name.startswith(".") or name in {"__pycache__", "build"} or name.endswith(".egg-info")
    }


def _copy(source: Path, target: Path) -> None:
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, ignore=_ignored)


def _add_private(tree: Path) -> None:
    """Copy the contestants from elsewhere, as they are, into a tree that has none of their names."""
    for folder in registry.extra_folders():
        for file in folder.glob(f"*/{registry.FILE}"):
            target = tree / "frameworks" / file.parent.name
            if not target.exists():
                shutil.copytree(file.parent, target, ignore=_ignored)


def _finish(tree: Path) -> tuple[Path, str]:
    """Return the running harness beside the tree; the whole under the name of its content."""
    _add_private(tree)
    shutil.copytree(ROOT / "harness", tree / "harness", ignore=_ignored, dirs_exist_ok=True)
    content = _hash(tree)
    target = cache.folder("sides") / content
    if not target.exists():
        _forget_unused(target.parent)
        # Workers write no bytecode: without this each of them would compile the tree again.
        compileall.compile_dir(tree, ddir=str(target), quiet=2)
        try:
            tree.rename(target)
        except OSError:
            if not target.exists():  # another process was faster
                raise
    os.utime(target)
    return target, content


def _hash(tree: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(tree)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest() + b"\0")
    return digest.hexdigest()[:12]


def _forget_unused(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
            shutil.rmtree(path, ignore_errors=True)
