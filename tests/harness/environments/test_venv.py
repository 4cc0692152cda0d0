"""Environments: built once, shared by equal pins, rebuilt when half-built, removed on request. With no pins at all."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from harness import tasks
from harness.data import store
from harness.environments import venv
from harness.gate import admission
from harness.plan import registry
from harness.plan.registry import Framework


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Framework:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# nothing\n")
    return Framework("empty", "t", "h", "l", "3.11", folder, ())


def test_built_once_and_removed(framework: Framework) -> None:
    said: list[str] = []
    first = venv.ensure(framework, said.append)
    assert first.python.exists() and len(said) == 2
    assert venv.ensure(framework, said.append) == first and len(said) == 2
    venv.remove(first)
    assert not first.folder.exists() and venv.existing() == []


def test_a_half_built_one_is_made_anew(framework: Framework) -> None:
    folder = venv.parent() / framework.lock_hash
    folder.mkdir()
    (folder / "rubbish").touch()
    venv.ensure(framework, lambda text: None)
    assert not (folder / "rubbish").exists()


def test_what_cannot_be_installed_is_a_reason(framework: Framework) -> None:
    framework.requirements.write_text("/nowhere/no-such-package-1.0.whl\n")
    with pytest.raises(venv.EnvironmentFault, match="not installable here"):
        venv.ensure(framework, lambda text: None)
    assert venv.existing() == []


def test_what_git_cannot_reach_is_not_installable_offline_and_tried_once(framework: Framework) -> None:
    commit = "0" * 40
    framework.requirements.write_text("no-such-package-anywhere==1.0\n")  # which is not tried before
    no_dependencies = framework.requirements_without_dependencies
    no_dependencies.write_text(f"nothing @ git+http://127.0.0.1:9/nothing@{commit}\n")
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(venv.EnvironmentFault, match="not installable offline: nothing comes from a git commit"):
            venv.ensure(framework, said.append)
    assert len(said) == 1


def _package(folder: Path, name: str, requires: str, code: str = "") -> str:
    """The line that pins a package, made on the spot as a wheel."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {
        f"{name}-1.0.dist-info/METADATA": metadata,
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.py": code,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "".join(f"{inner},,\n" for inner in files))
    return f"{path}\n"


def test_the_second_file_is_installed_without_dependencies_and_belongs_to_the_lock(
    framework: Framework, tmp_path: Path
) -> None:
    framework.requirements.write_text(_package(tmp_path, "first", ""))
    before = framework.lock_hash
    framework.requirements_without_dependencies.write_text("# nothing yet\n")
    assert framework.lock_hash == before
    framework.requirements_without_dependencies.write_text(_package(tmp_path, "second", "no-such-package-anywhere"))
    assert framework.lock_hash != before
    made = venv.ensure(framework, lambda text: None)
    code = "import importlib.metadata as m; print(m.version('first'), m.version('second'))"
    done = subprocess.run([str(made.python), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "1.0"]


def test_a_wheel_that_is_built_again_makes_another_environment_and_voids_the_verdict(
    framework: Framework, tmp_path: Path
) -> None:
    """Same name, same version, other code."""
    contestant = registry.Contestant(framework, registry.Variant("v", "t", True))
    framework.requirements.write_text(_package(tmp_path, "private", "", "clips = True"))
    said: list[tuple[str, str, str]] = []
    for code in ("clips = True", "clips = False"):
        _package(tmp_path, "private", "", code)
        made = venv.ensure(framework, lambda text: None)
        asked = [str(made.python), "-c", "import private; print(private.clips)"]
        clips = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        identity = venv.content(made.folder)
        said.append((clips, identity, admission.key_of(contestant, "logreg", "cpu", 1, identity)))
    assert [clips for clips, *_ in said] == ["True", "False"]
    assert said[0][1] != said[1][1] and said[0][2] != said[1][2]


def test_folders_and_states_of_repositories_belong_to_the_lock(framework: Framework, tmp_path: Path) -> None:
    place = tmp_path / "own package"
    place.mkdir()
    (place / "code.py").write_text("a = 1\n")
    git = ["git", "-C", str(place), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", "-b", "trunk", str(place)], check=True)
    for pin in (f"-e {place}", f"own @ {place.as_uri()}", f"own @ git+{place.as_uri()}@trunk"):
        framework.requirements.write_text(pin + "\n")
        before = framework.lock_hash
        assert framework.lock_hash == before
        (place / "code.py").write_text((place / "code.py").read_text() + "a += 1\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
        assert framework.lock_hash != before, pin
    (place / "__pycache__").mkdir()
    before = framework.lock_hash
    (place / "__pycache__" / "code.pyc").touch()
    assert framework.lock_hash == before


def test_what_the_shell_has_elsewhere_is_no_part_of_an_environment(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework.requirements.write_text(_package(tmp_path, "first", ""))
    elsewhere = tmp_path / "elsewhere"
    with zipfile.ZipFile(tmp_path / "first-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(elsewhere)
    for variable in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX"):
        monkeypatch.setenv(variable, str(elsewhere))
    monkeypatch.setenv("PIP_USER", "1")
    made = venv.ensure(framework, lambda text: None)
    done = subprocess.run([str(made.python), "-I", "-c", "import first"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_environment_that_lacks_a_pin_or_its_python_is_made_anew(framework: Framework, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    _package(tmp_path / "wheels", "first", "")
    framework.requirements.write_text(f"--no-index\n--find-links {tmp_path}/wheels\nfirst==1.0\n")
    made = venv.ensure(framework, lambda text: None)
    for what in (made.python, *made.folder.glob("lib/python*/site-packages/first-1.0.dist-info")):
        if what.is_dir():
            shutil.rmtree(what)
        else:
            what.unlink()
            what.symlink_to("/usr/bin/python-that-was-upgraded")
        said: list[str] = []
        assert venv.ensure(framework, said.append) == venv.ensure(framework, said.append)
        assert "it is made anew" in said[0] and ("is gone" in said[0] or "it lacks first==1.0" in said[0])
        assert made.python.exists()


def test_what_pip_leaves_out_is_no_environment(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework.requirements.write_text("first==1.0\n")
    monkeypatch.setattr(venv.installer, "install", lambda *given, **options: 0)
    with pytest.raises(venv.EnvironmentFault, match=r"its installer ended well, and first==1\.0 is not in"):
        venv.ensure(framework, lambda text: None)
    assert venv.existing() == []


def test_a_missing_python_is_a_reason(framework: Framework) -> None:
    with pytest.raises(venv.EnvironmentFault, match=r"needs Python 3\.99"):
        venv.ensure(replace(framework, python="3.99"), lambda text: None)


def test_equal_pins_share_an_environment_and_comments_do_not_matter(framework: Framework, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "requirements.txt").write_text("# another comment\n\n")
    assert replace(framework, folder=other).lock_hash == framework.lock_hash
    (other / "requirements.txt").write_text("six==1.16.0\n")
    assert replace(framework, folder=other).lock_hash != framework.lock_hash


def test_the_adapter_hash_follows_the_code(framework: Framework) -> None:
    before = framework.adapter_hash
    (framework.folder / "adapter.py").write_text("x = 1\n")
    changed = framework.adapter_hash
    assert changed != before
    assert replace(framework, sources=("dpcore",)).adapter_hash != changed


def test_building_a_package_from_its_sources_changes_no_hash(framework: Framework, tmp_path: Path) -> None:
    (tmp_path / "lib" / "inner").mkdir(parents=True)
    (tmp_path / "lib" / "inner" / "code.py").write_text("a = 1\n")
    own = replace(framework, root=tmp_path, sources=("lib",))
    before = own.adapter_hash
    for folder in ("build/lib/inner", "dist", "lib.egg-info", "inner/__pycache__"):
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / "code.py").write_text("a = 1\n")
    assert own.adapter_hash == before
    (tmp_path / "lib" / "inner" / "code.py").write_text("a = 2\n")
    assert own.adapter_hash != before


def test_another_task_voids_no_verdict_and_another_definition_does(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    contestant = registry.Contestant(framework, registry.Variant("v", "t", True))
    known = {**tasks.GATE_TASKS, **tasks.TASKS}

    def key() -> str:
        return admission.key_of(contestant, "logreg", "cpu", 1)

    before = key()
    monkeypatch.setitem(tasks.GATE_TASKS, "another", replace(known["logreg"], name="another", learning_rate=1.0))
    assert key() == before
    place = tasks.GATE_TASKS if "logreg" in tasks.GATE_TASKS else tasks.TASKS
    monkeypatch.setitem(place, "logreg", replace(known["logreg"], learning_rate=1.0))
    assert key() != before
    assert len({tasks.definition_hash(task) for task in known.values()}) == len(known)


def test_a_verdict_holds_for_one_thread_count_and_every_file_of_the_folder(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    contestant = registry.Contestant(framework, registry.Variant("v", "t", True))

    def key(threads: int = 1) -> str:
        return admission.key_of(contestant, "logreg", "cpu", threads)

    before = key()
    assert key() == before != key(threads=2)
    (framework.folder / "way.txt").write_text("honest")
    with_file = key()
    (framework.folder / "way.txt").write_text("cheats")
    assert len({before, with_file, key()}) == 3
    changed = key()
    with monkeypatch.context() as patch:
        patch.setattr(store, "describe", lambda name, synthetic=False: {"sha256": "other"})
        assert key() != changed


def test_selecting_contestants() -> None:
    assert {c.name for c in registry.select(["opacus:all"])} >= {"opacus-hooks", "opacus-ghost"}
    assert [c.name for c in registry.select(["opacus-ghost", "opacus-ghost"])] == ["opacus-ghost"]
    core, defaults, everything = ({c.name for c in registry.select([w])} for w in ("core", "defaults", "all"))
    assert {"pytorch-eager", "opacus-hooks", "jax-vmap", "dpcore-native"} <= core <= defaults <= everything
    assert {c.name for c in registry.select(None)} == defaults and "opacus-ghost" in everything - defaults
    assert "mutants" not in registry.frameworks() and "mutants" in registry.frameworks(hidden=True)
