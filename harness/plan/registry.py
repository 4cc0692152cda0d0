"""The contestants: every folder under ``frameworks/`` with a ``framework.toml``. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from harness.contract import PARALLEL
from harness.errors import BadInput, did_you_mean
from harness.paths import ROOT
from harness.worker import machine
from harness.worker.request import name_of

EXTRA_FOLDERS = "DPBENCH_FRAMEWORKS"
"""Environment variable: more folders of framework folders, separated like PATH."""


FILE = "framework.toml"
LAYER_FILES = ("layers.py", "layers.toml")
"""Files of a framework's folder that belong to the layer benchmark and have a hash of their own."""

TASK_FILES = ("network.py", "architectures.py", "optimizer.py", "task.py", "tasks.py")
"""Lies in another tree, and says where its tasks are."""

MOST_RANKS = 64
OWN_SAMPLING = ("poisson", "shuffled", "fixed")
EVERY_TASK = "every-task"

MARKERS = "osD^v<>PXdhpH8*"
"""Shapes of points that a framework may have in figures, by their letters in matplotlib."""
MADE = re.compile(r"__pycache__|build|dist|.*\.egg-info")
"""Names of folders that hold no source: what Python and `pip install` make."""
LOOK = re.compile(rb"^(colour|marker) *=.*\n", re.MULTILINE)
"""Lines of framework.toml that no time depends on: a new colour does not make older measurements outdated."""


@dataclass(frozen=True)
class Variant:
    """One way of running a framework. ``unsupported`` maps a task to the reason why it cannot run, and
    ``expected_rejection`` a task to the fault for which the gate must reject it (a finding, known and reasoned); the
    key ``every-task`` stands for all. ``supported``: tasks that it can run although ``unsupported`` names every task.

    ``own_sampling``: how the library's own loop (:meth:`Adapter.epoch`) draws its batches, one of OWN_SAMPLING; None
    where it has no loop of its own. ``own_replays``: whether that loop makes the same weights again for the same seed.
    ``twin``: the contestant that does the same without DP, as ``framework-variant``. ``turn_steps``: the least steps of
    a turn, as :class:`harness.worker.request.Request` has it. ``parallel``: how several
    processes train together, one of PARALLEL; such a variant runs where its name or a world size asks for it.
    """

    name: str
    title: str
    private: bool
    default: bool = False
    static_shapes: bool = False
    paper_row: str | None = None
    twin: str | None = None
    own_sampling: str | None = None
    own_replays: bool = True
    turn_steps: int = 1
    parallel: str | None = None
    unsupported: dict[str, str] = field(default_factory=dict)
    supported: list[str] = field(default_factory=list)
    expected_rejection: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the worker process; those of the whole file are every variant's, but for
    those that it names without a value."""

    def why_unsupported(self, task: str) -> str | None:
        """Return the declared reason why this variant cannot run ``task``, or None."""
        everywhere = None if task in self.supported else self.unsupported.get(EVERY_TASK)
        return self.unsupported.get(task) or everywhere

    def why_rejected(self, task: str) -> str | None:
        """Return the known fault for which the gate must reject this variant on ``task``, or None."""
        return self.expected_rejection.get(task) or self.expected_rejection.get(EVERY_TASK)


@dataclass(frozen=True)
class Framework:
    """One folder. ``sources``: other files and folders (relative to the repository) that a time depends on. ``core``:
    among the few contestants of the short presets. ``colour`` (``#RRGGBB``) and ``marker`` (one of MARKERS): how it
    looks in every figure; the variants differ by the fill of the marker and the style of the line."""

    name: str
    title: str
    home: str
    licence: str
    python: str
    folder: Path
    variants: tuple[Variant, ...]
    sources: tuple[str, ...] = ()
    hidden: bool = False
    core: bool = False
    colour: str = "#6E6E6E"
    marker: str = "o"
    root: Path = ROOT
    """The tree that ``sources`` are relative to, and that its workers import from: another one for a side of a
    comparison."""

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"

    @property
    def requirements_without_dependencies(self) -> Path:
        """Installed second, with ``--no-deps``: packages whose own requirements would pull in what must not be here."""
        return self.folder / "requirements-no-deps.txt"

    @property
    def lock_hash(self) -> str:
        """Identify the environment: the same pins and Python make the same hash, whatever the framework. Of a pin that
        names a wheel, a folder or a repository of this machine, what is in it counts."""
        text = f"python{self.python}\n" + "\n".join(map(_with_content, pins(self.requirements)))
        if bare := pins(self.requirements_without_dependencies):
            text += "\n--no-deps\n" + "\n".join(map(_with_content, bare))
        return _short(text.encode())

    @property
    def adapter_hash(self) -> str:
        """Hash of all code that the adapter's times depend on inside this repository, the contract included.

        A task adds its own part (:func:`harness.tasks.definition_hash`). Of another tree, whose tasks may be others,
        the files that hold them count as a whole.
        """
        roots = [self.folder, *(self.root / s for s in self.sources), self.root / "harness" / "contract.py"]
        if self.root != ROOT:
            roots += [self.root / "harness" / name for name in TASK_FILES]
        apart = {self.folder / name for name in LAYER_FILES}
        digest = hashlib.sha256()
        for path in sorted({p for root in roots for p in code_files(root)} - apart):
            content = path.read_bytes()
            if path.name == FILE:
                content = LOOK.sub(b"", content)
            digest.update(path.name.encode() + b"\0" + content + b"\0")
        return digest.hexdigest()[:12]

    @property
    def folder_hash(self) -> str:
        """Hash of every file of the folder, whatever it is: an adapter could read each of them."""
        digest = hashlib.sha256()
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.folder)}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:12]

    def variant(self, name: str) -> Variant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.variants)
        raise BadInput(f"{self.name} has no variant {name!r}; choose one of {known}.")


def pins(path: Path) -> list[str]:
    """Return the lines of a requirements file that say something, sorted; none where there is no such file."""
    text = path.read_text() if path.exists() else ""
    return sorted(line.strip() for line in text.splitlines() if line.strip() and line[0] != "#")


LOCAL = re.compile(
    r"(?:-\S+[ =])?(?:[^@/]* @ )?(?P<git>git\+)?(?:file:(?://)?)?(?P<path>[^@#\[]*)(?:@(?P<ref>[^#]+))?.*"
)


def _with_content(pin: str) -> str:
    """Return a pin with a hash of what it names on this machine; the pin alone where it names nothing here."""
    found = LOCAL.fullmatch(pin)
    path = Path(unquote(found["path"].strip())) if found else Path()
    if not found or "/" not in pin or not (path.is_absolute() or path.exists()):
        return pin
    if found["git"]:
        return f"{pin} {machine.git('rev-parse', found['ref'] or 'HEAD', folder=path)[0]}"
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        inside = file.relative_to(path)
        if not any(MADE.fullmatch(part) or part == ".git" for part in inside.parts):
            digest.update(f"{inside}\0".encode() + _digest(file, file.stat().st_mtime_ns, file.stat().st_size))
    return f"{pin} {digest.hexdigest()}"


@lru_cache(maxsize=10_000)
def _digest(path: Path, *stamp: int) -> bytes:
    """Return the hash of a file, which is read again where its ``stamp`` is new."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def code_files(root: Path) -> Iterable[Path]:
    """Return the file, or all code below the folder, without what building a package from it leaves there."""
    if root.is_file():
        return [root]
    found = (p for p in root.rglob("*") if p.suffix in {".py", ".toml", ".cpp", ".h"})
    return [p for p in found if not any(MADE.fullmatch(part) for part in p.relative_to(root).parts)]


def load(folder: Path, root: Path = ROOT) -> Framework:
    """Read one ``framework.toml``; a mistake in it is the user's."""
    path = folder / FILE
    try:
        data = tomllib.loads(path.read_text())
        shared = data.pop("environment", {})
        read = [Variant(**v) for v in data.pop("variants")]
        merged = [(v, shared | v.environment) for v in read]
        variants = tuple(replace(v, environment={k: s for k, s in e.items() if s}) for v, e in merged)
        data["sources"] = tuple(data.get("sources", ()))
        framework = Framework(folder=folder, variants=variants, root=root, **data)
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise BadInput(f"{path} cannot be read ({error}); compare it with frameworks/pytorch/framework.toml.") from None
    if not re.fullmatch("#[0-9A-Fa-f]{6}", str(framework.colour)):
        raise BadInput(f"{path} has colour {framework.colour!r}; write it as #RRGGBB, for instance #0072B2.")
    if framework.marker not in tuple(MARKERS):
        raise BadInput(f"{path} has marker {framework.marker!r}; choose one of {' '.join(MARKERS)}.")
    for variant in variants:
        if variant.own_sampling not in (None, *OWN_SAMPLING):
            raise BadInput(
                f"{path}: variant {variant.name} has own_sampling {variant.own_sampling!r}; "
                f"choose one of {', '.join(OWN_SAMPLING)}, or leave it out where there is no loop of its own."
            )
        if variant.parallel not in (None, *PARALLEL):
            raise BadInput(
                f"{path}: variant {variant.name} has parallel {variant.parallel!r}; choose one of "
                f"{', '.join(PARALLEL)}, or leave it out where one process trains."
            )
        if not isinstance(variant.turn_steps, int) or variant.turn_steps < 1:
            raise BadInput(f"{path}: variant {variant.name} has turn_steps {variant.turn_steps!r}; give 1 or more.")
    return framework


def extra_folders() -> list[Path]:
    """Return the folders of contestants that DPBENCH_FRAMEWORKS names."""
    return [Path(p) for p in os.environ.get(EXTRA_FOLDERS, "").split(os.pathsep) if p]


def frameworks(hidden: bool = False, root: Path = ROOT) -> dict[str, Framework]:
    """Return all contestants by name; the deliberately wrong ones only on request. ``root``: of another tree than this
    one."""
    parents = [root / "frameworks"]
    if root == ROOT:
        parents += extra_folders()
    files = [path for parent in parents for path in sorted(parent.glob("*/framework.toml"))]
    mutants = root / "tests" / "mutants" / "framework.toml"
    if hidden and mutants.exists():
        files.append(mutants)
    found = [load(path.parent, root) for path in files]
    return {f.name: f for f in found if hidden or not f.hidden}


@dataclass(frozen=True)
class Contestant:
    """A framework in one variant, and how many processes of it train together."""

    framework: Framework
    variant: Variant
    world_size: int = 1

    @property
    def name(self) -> str:
        return name_of(self.framework.name, self.variant.name, self.world_size)


def ranked(
    names: Iterable[str] | None, world_sizes: Iterable[int], ways: Iterable[str] | None, hidden: bool = False
) -> list[Contestant]:
    """Return the contestants of several processes, in every world size: of the frameworks or variants named (None:
    all), those that train in one of the ``ways`` (None: all), which are names of PARALLEL.

    Raises :class:`BadInput` for a name or a way that does not exist, and where none is left.
    """
    asked = list(PARALLEL) if ways is None else list(ways)
    for way in asked:
        if way not in PARALLEL:
            raise BadInput(f"--parallel is {way!r}{did_you_mean(way, PARALLEL)}: choose from {', '.join(PARALLEL)}.")
    known = frameworks(hidden)
    listed = list(known) if names is None else list(names)
    found = [c for name in listed for c in (_ranked_of(known[name]) if name in known else _expand(name, known))]
    sizes = list(dict.fromkeys(world_sizes))
    for size in sizes:
        if not 1 <= size <= MOST_RANKS:
            raise BadInput(f"--world-size is {size}: it must be at least 1 and at most {MOST_RANKS}.")
    chosen = [replace(c, world_size=size) for size in sizes for c in found if c.variant.parallel in asked]
    if not chosen:
        able = [c.name for framework in known.values() for c in _ranked_of(framework)]
        raise BadInput(f"None of {', '.join(listed)} trains by {' or '.join(asked)}; choose from {', '.join(able)}.")
    return list({c.name: c for c in chosen}.values())


def _ranked_of(framework: Framework) -> list[Contestant]:
    return [Contestant(framework, variant) for variant in framework.variants if variant.parallel]


def select(names: Iterable[str] | None, hidden: bool = False, root: Path = ROOT) -> list[Contestant]:
    """``opacus``: its default variant or variants; ``opacus-ghost``: that variant; ``opacus:all``: all of its variants;
    ``core``: the defaults of the frameworks that are ``core``; ``defaults`` (and None): the defaults of every
    framework; ``all``: everything.

    Raises :class:`BadInput` for a name that does not exist.
    """
    known = frameworks(hidden, root)
    chosen: list[Contestant] = []
    for name in names if names is not None else ("defaults",):
        chosen += _expand(name, known)
    unique = {c.name: c for c in chosen}
    return list(unique.values())


def _expand(name: str, known: dict[str, Framework]) -> list[Contestant]:
    if name in {"all", "defaults", "core"}:
        return [
            Contestant(f, v)
            for f in known.values()
            for v in f.variants
            if not v.parallel and (name == "all" or (v.default and (f.core or name == "defaults")))
        ]
    base, _, rest = name.partition(":")
    if base in known and rest in {"", "all"}:
        return [Contestant(known[base], v) for v in known[base].variants if v.default or (rest and not v.parallel)]
    for framework in known.values():
        for variant in framework.variants:
            if f"{framework.name}-{variant.name}" == name:
                return [Contestant(framework, variant)]
    variants = [f"{framework.name}-{variant.name}" for framework in known.values() for variant in framework.variants]
    meant = did_you_mean(name, [*known, *variants, "core", "defaults"])
    raise BadInput(
        f"There is no framework {name!r}{meant}; choose from {', '.join(known)} (a variant as opacus-ghost), "
        "core, defaults or all."
    )
