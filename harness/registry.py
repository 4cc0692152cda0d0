"""The contestants: every folder under ``frameworks/`` with a ``framework.toml``. Standard library only."""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent
EXTRA_FOLDERS = "DPBENCH_FRAMEWORKS"
"""Environment variable: more folders of framework folders, separated like PATH."""


@dataclass(frozen=True)
class Variant:
    """One way of running a framework. ``unsupported`` maps a task to the reason why it cannot run."""

    name: str
    title: str
    private: bool
    default: bool = False
    static_shapes: bool = False
    paper_row: str | None = None
    unsupported: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the worker process."""


@dataclass(frozen=True)
class Framework:
    """One folder. ``sources``: other files and folders (relative to the repository) that a time depends on."""

    name: str
    title: str
    home: str
    licence: str
    python: str
    folder: Path
    variants: tuple[Variant, ...]
    sources: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"

    @property
    def lock_hash(self) -> str:
        """Identifies the environment: the same pins and Python make the same hash, whatever the framework."""
        text = self.requirements.read_text() if self.requirements.exists() else ""
        pins = "\n".join(sorted(line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"))
        return _short(f"python{self.python}\n{pins}".encode())

    @property
    def adapter_hash(self) -> str:
        """Hash of all code that the adapter's times depend on inside this repository, the contract included."""
        roots = [self.folder, *(ROOT / s for s in self.sources)]
        roots += [ROOT / "harness" / name for name in ("contract.py", "tasks.py")]
        digest = hashlib.sha256()
        for path in sorted({p for root in roots for p in _code(root)}):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:12]

    def variant(self, name: str) -> Variant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.variants)
        raise BadInput(f"{self.name} has no variant {name!r}; choose one of {known}.")


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _code(root: Path) -> Iterable[Path]:
    if root.is_file():
        return [root]
    return [p for p in root.rglob("*") if p.suffix in {".py", ".toml", ".cpp"} and "__pycache__" not in p.parts]


def load(folder: Path) -> Framework:
    """Reads one ``framework.toml``; a mistake in it is the user's."""
    path = folder / "framework.toml"
    try:
        data = tomllib.loads(path.read_text())
        variants = tuple(Variant(**v) for v in data.pop("variants"))
        data["sources"] = tuple(data.get("sources", ()))
        return Framework(folder=folder, variants=variants, **data)
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise BadInput(f"{path} cannot be read ({error}); compare it with frameworks/pytorch/framework.toml.") from None


def frameworks(hidden: bool = False) -> dict[str, Framework]:
    """All contestants by name; the deliberately wrong ones only on request."""
    parents = [ROOT / "frameworks"]
    parents += [Path(p) for p in os.environ.get(EXTRA_FOLDERS, "").split(os.pathsep) if p]
    found = [load(path.parent) for parent in parents for path in sorted(parent.glob("*/framework.toml"))]
    return {f.name: f for f in found if hidden or not f.hidden}


@dataclass(frozen=True)
class Contestant:
    """A framework in one variant."""

    framework: Framework
    variant: Variant

    @property
    def name(self) -> str:
        return f"{self.framework.name}-{self.variant.name}"


def select(names: Iterable[str] | None, hidden: bool = False) -> list[Contestant]:
    """``None``: the default variant or variants of every framework. ``opacus``: its defaults; ``opacus-ghost``: that
    variant; ``opacus:all``: all of its variants; ``all``: everything.

    Raises :class:`BadInput` for a name that does not exist.
    """
    known = frameworks(hidden)
    chosen: list[Contestant] = []
    for name in names if names is not None else known:
        chosen += _expand(name, known)
    unique = {c.name: c for c in chosen}
    return list(unique.values())


def _expand(name: str, known: dict[str, Framework]) -> list[Contestant]:
    if name == "all":
        return [Contestant(f, v) for f in known.values() for v in f.variants]
    base, _, rest = name.partition(":")
    if base in known and rest in {"", "all"}:
        return [Contestant(known[base], v) for v in known[base].variants if v.default or rest]
    for framework in known.values():
        for variant in framework.variants:
            if f"{framework.name}-{variant.name}" == name:
                return [Contestant(framework, variant)]
    raise BadInput(f"There is no framework {name!r}; choose from {', '.join(known)} (a variant as opacus-ghost).")
