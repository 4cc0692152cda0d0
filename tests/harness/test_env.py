"""Environments: built once, shared by equal pins, rebuilt when half-built, removed on request. With no pins at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import env, registry
from harness.registry import Framework


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Framework:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# nothing\n")
    return Framework("empty", "t", "h", "l", "3.11", folder, ())


def test_built_once_and_removed(framework: Framework) -> None:
    said: list[str] = []
    first = env.ensure(framework, said.append)
    assert first.python.exists() and len(said) == 2
    assert env.ensure(framework, said.append) == first and len(said) == 2
    env.remove(first)
    assert not first.folder.exists() and env.existing() == []


def test_a_half_built_one_is_made_anew(framework: Framework) -> None:
    folder = env.parent() / framework.lock_hash
    folder.mkdir()
    (folder / "rubbish").touch()
    env.ensure(framework, lambda text: None)
    assert not (folder / "rubbish").exists()


def test_what_cannot_be_installed_is_a_reason(framework: Framework) -> None:
    framework.requirements.write_text("/nowhere/no-such-package-1.0.whl\n")
    with pytest.raises(env.EnvironmentFault, match="not installable here"):
        env.ensure(framework, lambda text: None)
    assert env.existing() == []


def test_a_missing_python_is_a_reason(framework: Framework) -> None:
    with pytest.raises(env.EnvironmentFault, match=r"needs Python 3\.99"):
        env.ensure(replace(framework, python="3.99"), lambda text: None)


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


def test_selecting_contestants() -> None:
    assert {c.name for c in registry.select(["opacus:all"])} >= {"opacus-hooks", "opacus-ghost"}
    assert [c.name for c in registry.select(["opacus-ghost", "opacus-ghost"])] == ["opacus-ghost"]
    assert "mutants" not in registry.frameworks() and "mutants" in registry.frameworks(hidden=True)
