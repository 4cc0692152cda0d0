"""The contestants of the layer benchmark: frameworks whose folder holds a ``layers.py`` and a ``layers.toml``."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from harness.errors import BadInput
from harness.layers import Layer
from harness.paths import ROOT
from harness.plan.registry import Framework, code_files, frameworks
from harness.store.record import Column, Passes

COMMON_SOURCES = tuple(
    f"harness/{name}.py" for name in ("contract", "layers", "layer_contract", "worker/gate/layers", "worker/layers")
)
"""Sources on which every layer's time depends, beside the framework's own files."""


@dataclass(frozen=True)
class LayerVariant:
    """``column`` of the paper's tables: ``module``, ``own_module`` (both without DP) or ``dp``. ``kinds``: of layers
    that it is about, all where there are none. ``unsupported``: layer or kind -> the reason why it cannot run.
    ``core``: among the contestants of the short presets. ``environment``: variables of the worker process."""

    name: str
    title: str
    column: Column
    passes: tuple[Passes, ...]
    kinds: tuple[str, ...] = ()
    core: bool = False
    unsupported: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def has(self, layer: Layer) -> bool:
        """Return whether there is such a cell at all."""
        return not self.kinds or layer.kind in self.kinds

    def why_unsupported(self, layer: Layer) -> str | None:
        return self.unsupported.get(layer.name) or self.unsupported.get(layer.kind)


@dataclass(frozen=True)
class LayerContestant:
    """A framework in one of its ways to run a layer. ``sources``: files and folders that its times depend on beside
    its own folder's ``layers.py`` and ``layers.toml``."""

    framework: Framework
    variant: LayerVariant
    sources: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.framework.name}-{self.variant.name}"

    @property
    def code_hash(self) -> str:
        """A hash of all code inside this repository that its times depend on."""
        roots = [self.framework.folder / "layers.py", self.framework.folder / "layers.toml"]
        roots += [self.framework.root / source for source in (*COMMON_SOURCES, *self.sources)]
        digest = hashlib.sha256()
        for path in sorted({p for root in roots for p in code_files(root)}):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:12]


def contestants(hidden: bool = False, root: Path = ROOT) -> list[LayerContestant]:
    """Return all contestants of layers. Raises :class:`BadInput` for a ``layers.toml`` that cannot be read."""
    return [c for framework in frameworks(hidden, root).values() for c in _of(framework)]


def _of(framework: Framework) -> list[LayerContestant]:
    path = framework.folder / "layers.toml"
    if not path.exists():
        return []
    try:
        data = tomllib.loads(path.read_text())
        sources = tuple(data.get("sources", ()))
        variants = [
            LayerVariant(**{**v, "passes": tuple(v["passes"]), "kinds": tuple(v.get("kinds", ()))})
            for v in data["variants"]
        ]
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise BadInput(f"{path} cannot be read ({error}); compare it with frameworks/pytorch/layers.toml.") from None
    for variant in variants:
        if variant.column not in get_args(Column) or not set(variant.passes) <= set(get_args(Passes)):
            raise BadInput(
                f"{path}: variant {variant.name} has column {variant.column!r} and passes {list(variant.passes)}; "
                f"choose a column of {', '.join(get_args(Column))} and passes of {', '.join(get_args(Passes))}."
            )
    return [LayerContestant(framework, variant, sources) for variant in variants]


def select(names: Iterable[str], hidden: bool = False, root: Path = ROOT) -> list[LayerContestant]:
    """``opacus``: all of its variants; ``opacus-ghost``: that one; ``core``: those of the short presets; ``all``.

    Raises :class:`BadInput` for a name that does not exist.
    """
    known = contestants(hidden, root)
    chosen: dict[str, LayerContestant] = {}
    for name in names:
        found = [c for c in known if name in (c.name, c.framework.name, "all") or (name == "core" and c.variant.core)]
        if not found:
            raise BadInput(
                f"There is no layer contestant {name!r}; choose from {', '.join(c.name for c in known)}, the name of a "
                "framework, core or all."
            )
        chosen |= {c.name: c for c in found}
    return list(chosen.values())
