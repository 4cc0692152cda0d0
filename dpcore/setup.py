"""The kernels' part of building a wheel; everything else stands in pyproject.toml.

With a C++ compiler on Linux the wheel carries the kernels for every instruction set of the machine, and is one for all
versions of Python and torch (py3-none-PLATFORM). Without one it is pure. Environment variables, for releases: CXX is
the compiler, DPCORE_KERNELS the machine to compile for (x86_64, aarch64; none for a pure wheel), and DPCORE_PLATFORM
the wheel's platform tag.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
CHOSEN = os.environ.get("DPCORE_KERNELS", "")
MACHINE = CHOSEN or (platform.machine() if sys.platform == "linux" else "none")


def module(name: str) -> ModuleType:
    """Load a file of dpcore.native alone: the package imports torch, which a build has not."""
    spec = importlib.util.spec_from_file_location(f"_dpcore_{name}", HERE / "native" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


LEVELS = [level for level in module("levels").LEVELS if level.machine == MACHINE]
if LEVELS and not CHOSEN and not module("compiling").has_compiler():
    print("There is no C++ compiler: the wheel is pure, without kernels.", file=sys.stderr)
    LEVELS = []
if CHOSEN not in ("", "none") and not LEVELS:
    sys.exit(f"DPCORE_KERNELS is {CHOSEN!r}: there are kernels for x86_64 and aarch64; say none for a pure wheel.")


class WithKernels(build_py):
    """Compiles the kernels beside the Python files."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        compiling = module("compiling")
        folder = Path(self.build_lib) / "dpcore" / "native" / "libraries"
        for level in LEVELS:
            compiling.compile_library(folder / level.file_name, level.name, compiling.compiler(), compiling.RELEASE)


class HasKernels(Distribution):
    """Installed where compiled files belong, if there are any."""

    def has_ext_modules(self) -> bool:
        return bool(LEVELS)


class ForEveryPython(bdist_wheel):
    """The kernels are called through ctypes: the tag names a platform, and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not LEVELS:
            return "py3", "none", "any"
        default = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return "py3", "none", os.environ.get("DPCORE_PLATFORM", default)


setup(distclass=HasKernels, cmdclass={"build_py": WithKernels, "bdist_wheel": ForEveryPython})
