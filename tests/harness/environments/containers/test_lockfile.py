"""Locks: every framework has one that covers its pins, and nothing without a hash gets into one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.environments.containers import lockfile
from harness.environments.containers.lockfile import Lock, Pin
from harness.environments.venv import EnvironmentFault
from harness.plan import registry

A, B = "a" * 64, "b" * 64
FRAMEWORKS = registry.frameworks(hidden=True)
FROM_GIT = {"fastdp", "jax_privacy_git", "private_transformers", "pyvacy_git"}


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_every_framework_is_locked_or_says_why_not(name: str) -> None:
    if name in FROM_GIT:
        with pytest.raises(EnvironmentFault, match=r"not installable offline.*git commit"):
            lockfile.load(FRAMEWORKS[name])
    else:
        assert all(pin.hashes for pin in lockfile.load(FRAMEWORKS[name]).pins)


def test_equal_pins_have_equal_locks() -> None:
    by_pins: dict[str, set[str]] = {}
    for name in FRAMEWORKS.keys() - FROM_GIT:
        by_pins.setdefault(FRAMEWORKS[name].lock_hash, set()).add(lockfile.load(FRAMEWORKS[name]).sha256)
    assert all(len(locks) == 1 for locks in by_pins.values())


def test_a_lock_says_what_it_was_made_of() -> None:
    lock = Lock((Pin("numpy", "2.4.6", (A, B)), Pin("six", "1.17.0", (A,))))
    assert lockfile.parse(lock.text) == lock
    assert lockfile.parse("# another comment\n" + lock.text).sha256 == lock.sha256
    assert lockfile.parse(lock.text.replace(A, B)).sha256 != lock.sha256


@pytest.mark.parametrize(
    "line", ["numpy==2.4.6", f"numpy>=2 --hash=sha256:{A}", "numpy==2.4.6 --hash=md5:abc", "-r other.txt"]
)
def test_a_line_without_pin_and_hash_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        lockfile.parse(line)


@pytest.mark.parametrize(
    ("file", "name", "version"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch", "2.13.0"),
        ("tensorflow_privacy-0.9.0-py3-none-any.whl", "tensorflow-privacy", "0.9.0"),
        ("pyvacy-0.0.32.tar.gz", "pyvacy", "0.0.32"),
    ],
)
def test_names_of_files(file: str, name: str, version: str) -> None:
    assert lockfile.name_and_version(file) == (name, version)


def test_a_lock_older_than_its_pins_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "optax"
    shutil.copytree(FRAMEWORKS["optax"].folder, folder)
    pins = folder / "requirements.txt"
    pins.write_text(pins.read_text().replace("optax==0.2.8", "optax==0.2.9"))
    with pytest.raises(
        EnvironmentFault, match=r"says 0\.2\.8 where the pin is optax==0\.2\.9; run `dpbench image lock"
    ):
        lockfile.load(registry.load(folder))
    (folder / "requirements.lock").unlink()
    with pytest.raises(EnvironmentFault, match=r"has no requirements\.lock"):
        lockfile.load(registry.load(folder))


def test_files_come_from_the_wheelhouse_by_their_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds of one version: the one that is locked is taken, and a changed file is not."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    wrong, right = (
        lockfile.folder() / "six-1.17.0-py2-none-any.whl",
        lockfile.folder() / "six-1.17.0-py3-none-any.whl",
    )
    wrong.write_bytes(b"another build")
    right.write_bytes(b"the locked one")
    lock = Lock((Pin("six", "1.17.0", (lockfile.sha256(right), A)),))
    assert lockfile.collect(FRAMEWORKS["optax"], lock, print) == [right]


def test_a_new_build_joins_the_hashes_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    folder = tmp_path / "small"
    shutil.copytree(FRAMEWORKS["optax"].folder, folder)
    (folder / "requirements.txt").write_text("six==1.17.0\n")
    (folder / "requirements.lock").write_text(Lock((Pin("six", "1.17.0", (A,)), Pin("gone", "1", (A,)))).text)

    def download(framework: object, target: str, arguments: object) -> None:
        Path(target, "six-1.17.0-py3-none-any.whl").write_bytes(b"from here")

    monkeypatch.setattr(lockfile, "_pip", download)
    lock = lockfile.write_lock(registry.load(folder), print)
    assert [pin.name for pin in lock.pins] == ["six"]
    assert A in lock.pins[0].hashes and len(lock.pins[0].hashes) == 2
    assert lockfile.load(registry.load(folder)) == lock


def test_the_container_sdk_is_imported_only_when_it_is_asked_for() -> None:
    """It takes longer than the harness may take to start."""
    code = "import sys, harness.cli.main, harness.run.e2e, harness.cli.doctor; print('docker' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=registry.ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
