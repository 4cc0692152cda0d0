"""Variables of the shell reach a worker and pip by a list, and a record names those that times depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.environments import variables
from harness.environments.backend import LocalBackend
from harness.plan import registry

SECRET = {
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
    "PYTHONDEVMODE": "1",
    "PYTHONMALLOC": "debug",
    "OMP_SCHEDULE": "dynamic",
    "XLA_FLAGS": "--anything",
    "SOMEBODY_S": "own",
}


def test_a_variable_that_is_on_no_list_reaches_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    assert not SECRET.keys() & variables.of_worker(1, {}).keys()
    assert variables.of_worker(1, {"XLA_FLAGS": "declared"})["XLA_FLAGS"] == "declared"


@pytest.mark.parametrize("name", ["DPCORE_NATIVE", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "CXX"])
def test_what_a_worker_gets_and_a_time_depends_on_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    free = LocalBackend().place("cpu", 1)
    monkeypatch.setenv(name, "0")
    assert variables.of_worker(1, {})[name] == "0"
    assert LocalBackend().place("cpu", 1) != free
    assert LocalBackend().place("cpu", 1)["variables"][name] == "0"


def test_a_path_of_libraries_is_named_where_it_holds_one_that_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    (tmp_path / "libpython3.11.so.1.0").touch()
    assert "LD_LIBRARY_PATH" not in variables.named()
    (tmp_path / "libmkl_rt.so.2").touch()
    assert "LD_LIBRARY_PATH" in variables.named()
    assert variables.of_worker(1, {})["LD_LIBRARY_PATH"] == f"/nowhere:{tmp_path}"


def test_pip_gets_its_index_and_no_other_place_to_install_to(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"PIP_INDEX_URL": "a", "https_proxy": "b", "PIP_FIND_LINKS": "c"}
    untold = {"PYTHONPATH": "d", "PIP_CONSTRAINT": "e", "GIT_DIR": "f", "PIP_REQUIRE_HASHES": "1"}
    for name, value in {**told, **untold, "PIP_TARGET": "g", "PIP_USER": "1"}.items():
        monkeypatch.setenv(name, value)
    given = variables.of_installer({})
    assert told.items() <= given.items() and not untold.keys() & given.keys()
    assert "PIP_TARGET" not in given and given["PIP_USER"] == "0"


def test_a_worker_of_a_user_without_a_home_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    assert variables.of_worker(1, {})["HOME"] == str(tmp_path)


def test_a_peak_is_weighed_with_the_heap_as_it_is_installed() -> None:
    declared = next(v.environment for v in registry.frameworks()["pytorch"].variants if v.name == "eager")
    assert declared["MALLOC_MMAP_MAX_"] == "0"
    assert variables.declared(declared, "time", {}) == declared
    more = {**declared, "KERAS_BACKEND": "jax"}
    for mode, shell in (
        ("memory", {}),
        ("probe", {}),
        ("time", {"MALLOC_TOP_PAD_": "1"}),
        ("time", {"GLIBC_TUNABLES": ""}),
    ):
        assert variables.declared(more, mode, shell) == {"KERAS_BACKEND": "jax"}
