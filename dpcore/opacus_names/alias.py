"""``import opacus`` and all that it leads to, answered with dpcore."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from dpcore.grad_sample.grad_sample_module import AbstractGradSampleModule, GradSampleModule
from dpcore.opacus_names import optimizer, rules
from dpcore.opacus_names.table import PLACES, VERSION, named, ours
from dpcore.optimizers import DPOptimizer
from dpcore.rules.custom import GRAD_SAMPLERS, NORM_SAMPLERS

NAME = "opacus"
PATH = Path(__file__).parent / "path"
"""A folder for PYTHONPATH: a process that imports Opacus gets dpcore, though nobody has told it so."""


class StandIn(ModuleType):
    """A module of Opacus' name with dpcore's objects."""

    def __getattr__(self, name: str) -> Any:
        place = f"{self.__name__}.{name}".partition(".")[2]
        if place in PLACES:
            return importlib.import_module(f"{NAME}.{place}")
        raise AttributeError(f"module {self.__name__!r}, which is dpcore's, has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    """Finds Opacus' modules, and its distribution."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top, _, place = fullname.partition(".")
        if top != NAME or place not in PLACES:
            return None
        spec = ModuleSpec(fullname, self, origin="dpcore")
        if any(other.startswith(f"{place}.") for other in PLACES) or not place:
            spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        place = module.__name__.partition(".")[2]
        if (dpcores := ours(place)) is not None:
            module.__doc__ = dpcores.__doc__
            for name, value in vars(dpcores).items():
                if name == "__all__" or not (name.startswith("__") or isinstance(value, ModuleType)):
                    setattr(module, name, value)
        for name in PLACES[place].split():
            setattr(module, name, named(name))
        module.__file__ = getattr(dpcores, "__file__", __file__)
        if not place:
            vars(module)["__version__"] = VERSION

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, NAME):
            yield _Opacus()


class _Opacus(Distribution):
    """Answers programs that ask which version is installed."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


_FINDER = _Finder()
_ATTRIBUTES: list[tuple[type, str, Any]] = [
    *((DPOptimizer, name, value) for name, value in optimizer.OF_OPTIMIZERS.items()),
    (GradSampleModule, "GRAD_SAMPLERS", rules.Samplers(GRAD_SAMPLERS, rules.grad_sample)),
    (GradSampleModule, "NORM_SAMPLERS", rules.Samplers(NORM_SAMPLERS, rules.norm_sample)),
    (AbstractGradSampleModule, "__init_subclass__", classmethod(rules.refuse_overrides)),
]
"""Attributes of dpcore's classes that they have while Opacus' names are handed out."""


def is_installed() -> bool:
    """Return whether Opacus' names are handed out."""
    return _FINDER in sys.meta_path


def install(stand_ins: Sequence[str] = ()) -> None:
    """Let ``import opacus`` hand out dpcore from now on.

    Args:
        stand_ins: Modules that may stand under Opacus' name, since they only call this.

    Raises:
        ImportError: Opacus itself was imported before, and whoever did it would go on with it.
    """
    if is_installed():
        return
    if NAME in sys.modules and NAME not in stand_ins:
        raise ImportError(
            f"Opacus {getattr(sys.modules[NAME], '__version__', '')} was imported before dpcore.as_opacus, and what "
            "holds its classes would go on with them. Import dpcore.as_opacus first, at the top of the script; or "
            "start the script by python -m dpcore.as_opacus SCRIPT."
        )
    sys.modules.pop(NAME, None)
    sys.meta_path.insert(0, _FINDER)
    for kind, name, value in _ATTRIBUTES:
        setattr(kind, name, value)
    GradSampleModule.lives_with_module = True


def undo() -> None:
    """Hand out dpcore under Opacus' names no more; what was handed out stays what it is."""
    if not is_installed():
        return
    sys.meta_path.remove(_FINDER)
    for name in _loaded():
        del sys.modules[name]
    for kind, name, _ in _ATTRIBUTES:
        delattr(kind, name)
    GradSampleModule.lives_with_module = False


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == NAME]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Hand out dpcore under Opacus' names within a block, for tests: Opacus itself may be imported outside of it."""
    if is_installed():
        yield
        return
    outside = {name: sys.modules.pop(name) for name in _loaded()}
    install()
    try:
        yield
    finally:
        undo()
        sys.modules.update(outside)
