"""Try what installs an environment: uv, told what pip is told, and pip where uv has no word for it or fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.environments import installer


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}


def configure(tmp_path: Path, text: str) -> None:
    (tmp_path / "pip.conf").write_text(text)


def test_uv_is_told_where_pip_finds_packages(tmp_path: Path, variables: dict[str, str]) -> None:
    configure(tmp_path, "[global]\nindex-url = https://a.example/simple\nextra-index-url = file:///b\n  file:///c\n")
    told = installer.uv_variables({**variables, "PIP_FIND_LINKS": "/w /v", "PIP_USER": "0"})
    assert told is not None
    assert told["UV_DEFAULT_INDEX"] == "https://a.example/simple"
    assert told["UV_INDEX"].split() == ["file:///b", "file:///c"]
    assert told["UV_FIND_LINKS"] == "/w,/v"


def test_a_variable_comes_before_a_file(tmp_path: Path, variables: dict[str, str]) -> None:
    configure(tmp_path, "[install]\nindex-url = https://a.example/simple\n")
    told = installer.uv_variables({**variables, "PIP_INDEX_URL": "https://b.example/simple"})
    assert told is not None and told["UV_DEFAULT_INDEX"] == "https://b.example/simple"


def test_what_uv_has_no_word_for_is_left_to_pip(tmp_path: Path, variables: dict[str, str]) -> None:
    configure(tmp_path, "[install]\nplatform = manylinux1_x86_64\n")
    assert installer.uv_variables(variables) is None


@pytest.mark.parametrize("uv", ["exit 2", "exit 0"], ids=["fails", "works"])
def test_pip_installs_where_uv_fails_and_not_where_it_works(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, uv: str
) -> None:
    (tmp_path / "bin").mkdir()
    for name, does in (("uv", uv), ("python", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with (tmp_path / "log").open("w") as output:
        assert installer.install(tmp_path, ["first==1.0"], output, variables, compiled=False) == 0
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert ("pip install --disable-pip-version-check --quiet first==1.0" in asked) == (uv == "exit 2")


def test_the_command_line_needs_the_standard_library_alone() -> None:
    code = "import sys, harness.environments.installer; print([m for m in sys.modules if m in ('psutil', 'numpy')])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
