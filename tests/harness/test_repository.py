"""Tests of the files around the code: licence, citation, changelog, `make help`, links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
FRONT = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dpcore/**/*.md"), *ROOT.glob("frameworks/**/*.md")]
PAGES = sorted({*FRONT, *(p for p in ROOT.glob("results/**/*.md") if "local" not in p.parts)})


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def schema(name: str, *files: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", name, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", [ROOT, ROOT / "dpcore"], ids=["dpbench", "dpcore"])
def test_both_packages_carry_the_licence(folder: Path) -> None:
    assert project(folder)["license"] == "Apache-2.0"
    for name in project(folder)["license-files"]:
        assert (folder / name).read_text() == (ROOT / "LICENSE").read_text()


def test_the_versions_agree() -> None:
    version = project(ROOT)["version"]
    said = re.search(r"^__version__ = \"(.*)\"$", (ROOT / "dpcore" / "__init__.py").read_text(), re.MULTILINE)
    assert said is not None and said[1] == version
    citation = YAML(typ="safe", pure=True).load(ROOT / "CITATION.cff")
    assert str(citation["version"]) == version
    assert citation["license"] == project(ROOT)["license"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_files_for_other_tools_are_what_those_read() -> None:
    schema("vendor.citation-file-format", ROOT / "CITATION.cff")
    schema("vendor.dependabot", ROOT / ".github" / "dependabot.yml")


def test_make_help_explains_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    user, ci = said.split("For maintainers")
    explained = re.findall(r"^  make (\S+) +\S", said, re.MULTILINE)
    assert sorted(explained) == sorted(phony.split())
    assert "make bench-e2e" in user and user.count("\n  make ") <= 15
    assert "make history-publish" in ci


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        to = page if not path else (page.parent / path).resolve()
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", h).lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("index", ["docs/README.md", "docs/mkdocs.yml"])
def test_an_index_names_every_page_of_the_documentation(index: str) -> None:
    text = (ROOT / index).read_text()
    missing = [page.name for page in ROOT.glob("docs/*.md") if page.name not in text]
    assert not missing, f"{index} leads nowhere to {missing}"


def test_the_api_page_shows_every_public_name_of_dpcore() -> None:
    names = re.findall(r'^    "(\w+)",$', (ROOT / "dpcore" / "__init__.py").read_text(), re.MULTILINE)
    shown = re.findall(r"^::: dpcore\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert names and set(names) == set(shown)


GROUPED = """
import os
import pytest

pytestmark = pytest.mark.xdist_group("one")


@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with open("processes.txt", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """With some pairs of versions pytest-xdist loses the groups without a word, and what they share is made twice."""
    (tmp_path / "test_group.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    processes = (tmp_path / "processes.txt").read_text().split()
    assert len(processes) == 4 and len(set(processes)) == 1
