"""Which library of kernels is loaded, on which processor, and what happens to one that computes something else."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from dpcore import native
from dpcore.native import compiling, levels, library, self_check

NEEDS_A_COMPILER = pytest.mark.skipif(not compiling.has_compiler(), reason="no C++ compiler here")
DPCORE = Path(native.__file__).parents[1]

EPYC = frozenset(
    "fpu abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave".split()  # noqa: SIM905
)
AVX512 = EPYC | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library in the wheel or the cache, and none remembered."""
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.SWITCH)
    native.reload()
    yield tmp_path
    monkeypatch.undo()
    native.reload()


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", AVX512, ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        ("x86_64", EPYC, ["x86-64-v3", "x86-64-v2"]),
        ("x86_64", EPYC - {"avx2"}, ["x86-64-v2"]),
        ("x86_64", frozenset({"sse2"}), []),
        ("aarch64", frozenset({"fp", "asimd"}), ["armv8-a"]),
        ("riscv64", AVX512, []),
    ],
)
def test_a_processor_gets_the_levels_whose_every_instruction_it_has(machine, flags, names):
    assert [level.name for level in levels.levels_of(machine, flags)] == names


@pytest.mark.parametrize(("said", "is_intel"), [("GenuineIntel", True), ("AuthenticAMD", False), (None, False)])
def test_intels_processors_are_told_by_their_name(monkeypatch, tmp_path, said, is_intel):
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\n" + (f"vendor_id\t: {said}\nflags\t\t: fpu\n" if said else ""))
    monkeypatch.setattr(levels, "CPUINFO", facts)
    assert levels.is_intel() == is_intel


@pytest.mark.parametrize(("flags", "has"), [(AVX512, True), (EPYC, False), (AVX512 - {"avx512vl"}, False), ((), False)])
def test_avx_512_is_told_by_all_of_its_flags(monkeypatch, tmp_path, flags, has):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: {' '.join(sorted(flags))}\n")
    monkeypatch.setattr(levels, "CPUINFO", facts)
    monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
    assert levels.has_avx512() == has


def test_the_environment_forbids_levels(fresh, monkeypatch):
    monkeypatch.setattr(levels, "levels_here", lambda: levels.levels_of("x86_64", AVX512))
    for said, names in (
        ("", ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        ("x86-64-v3", ["x86-64-v3", "x86-64-v2"]),
        ("0", []),
    ):
        monkeypatch.setenv(library.SWITCH, said)
        assert [level.name for level in library.allowed()] == names
    monkeypatch.setenv(library.SWITCH, "avx9")
    with pytest.raises(ValueError, match=r"DPCORE_NATIVE is 'avx9'.*x86-64-v2"):
        library.allowed()


def test_a_machine_that_does_not_say_what_it_has_gets_no_kernels(fresh, monkeypatch):
    monkeypatch.setattr(levels, "CPUINFO", fresh / "none")
    assert levels.levels_here() == () and not native.available()
    with pytest.raises(native.NativeBuildError, match="Linux"):
        native.build()


def compiled(folder, level, more=()):
    target = folder / level.file_name
    compiling.compile_library(target, level.name, compiling.compiler(), more)
    return target


def noise(path, count=1003):
    """A hash of the noise of one stream."""
    name, out = torch.arange(1, 5, dtype=torch.int32), torch.zeros(count)
    call = ctypes.CDLL(str(path)).dpcore_add_normals
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (name, out))
    call(*pointers, ctypes.c_int64(777), ctypes.c_int64(count), ctypes.c_int64(1), ctypes.c_double(1.3))
    assert float(out.std()) > 0.5
    return hashlib.sha256(out.numpy().tobytes()).hexdigest()


@NEEDS_A_COMPILER
@pytest.mark.skipif(not levels.levels_here(), reason="no kernels for this processor")
def test_every_level_computes_what_torch_does_and_the_same_noise_to_the_bit(fresh):
    # -O0: what is compared is the source and the instruction set, and -O3 takes a minute for three of them.
    found = [compiled(fresh, level, ["-O0"]) for level in levels.levels_here()]
    assert [self_check.fault(ctypes.CDLL(str(path))) for path in found] == [None] * len(found)
    assert len({noise(path) for path in found}) == 1


@contextlib.contextmanager
def products_of_bfloat16():
    torch.set_float32_matmul_precision("medium")  # only where the processor has such products
    yield
    torch.set_float32_matmul_precision("highest")


@NEEDS_A_COMPILER
@pytest.mark.skipif(not levels.levels_here(), reason="no kernels for this processor")
@pytest.mark.parametrize("user", [products_of_bfloat16, partial(torch.autocast, "cpu", dtype=torch.bfloat16)])
def test_a_first_look_within_the_users_low_precision_keeps_the_kernels(user):
    path = native.build()
    with user():
        assert self_check.fault(ctypes.CDLL(str(path))) is None


@NEEDS_A_COMPILER
@pytest.mark.skipif(not levels.levels_here(), reason="no kernels for this processor")
def test_kernels_that_compute_something_else_are_switched_off_with_one_warning(fresh, monkeypatch):
    level = levels.levels_here()[0]
    (source,) = (path for path in compiling.SOURCES if path.name == "contraction.cpp")
    right, wrong = "acc[m][n] += y[m] * wide", "acc[m][n] += y[m] * y[m] * wide"
    for file in (source, *compiling.HEADERS):
        shutil.copy(file, fresh)
    header = fresh / "outer_products.h"
    assert right in header.read_text()
    header.write_text(header.read_text().replace(right, wrong))
    team = source.with_name("team.cpp")  # what the kernels' threads need
    monkeypatch.setattr(compiling, "SOURCES", (fresh / source.name, team))
    library.PACKAGED.mkdir()
    compiled(library.PACKAGED, level, ["-O0"])
    with pytest.warns(RuntimeWarning, match="switched off: contraction is wrong on this processor") as said:
        assert not native.available()
        assert not native.available() and "python -m dpcore.native" in native.description()
    assert len(said) == 1


def test_a_file_that_is_no_library_is_not_trusted(fresh, monkeypatch):
    monkeypatch.setattr(levels, "levels_here", lambda: levels.levels_of("x86_64", EPYC))
    library.PACKAGED.mkdir()
    (library.PACKAGED / "kernels-x86-64-v3.so").write_bytes(b"no library")
    with pytest.warns(RuntimeWarning, match="switched off"):
        assert not native.available()


def test_a_library_that_others_may_have_put_there_is_not_loaded(fresh, monkeypatch):
    monkeypatch.setattr(levels, "levels_here", lambda: levels.levels_of("x86_64", EPYC))
    path = library.compiled_path(levels.levels_here()[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"whatever it holds, it is not opened")
    path.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="every user may write to it"):
        assert not native.available()


def test_without_a_compiler_the_wheel_is_pure_and_holds_no_library(tmp_path):
    source = tmp_path / "dpcore"
    shutil.copytree(DPCORE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "DPCORE_KERNELS")}
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, env=kept | {"PATH": ""}, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "dpcore/native/levels.py" in names and not [name for name in names if name.endswith(".so")]
    assert "dpcore/setup.py" not in names
