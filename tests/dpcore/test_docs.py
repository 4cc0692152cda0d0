"""What the documents of dpcore name exists: links, headings, tests, files, modules."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
import torch
from setuptools.config.pyprojecttoml import read_configuration
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
import dpcore.accountants
import dpcore.schedulers

ROOT = Path(__file__).parents[2]
NAMES = (
    *("dpcore", "dpcore-engine", "dpcore-features", "dpcore-refusals", "dpcore-internals"),
    *("migration", "privacy", "exactness", "side_by_side", "patches"),
)
DOCUMENTS = [*(ROOT / "docs" / f"{name}.md" for name in NAMES), ROOT / "dpcore" / "examples" / "README.md"]
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _importable(name: str) -> bool:
    """Whether ``name`` is a module (which may need packages that are not here) or in one."""
    try:
        if importlib.util.find_spec(name):
            return True
    except ModuleNotFoundError:
        pass  # what the name lies in is no package
    parent, _, last = name.rpartition(".")
    return hasattr(pkgutil.resolve_name(parent), last)


@documents
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in _anchors(linked), f"{document.name} links to {target}, which has no such heading"


@documents
def test_named_tests_exist(document):
    for file, name in re.findall(r"\b(test_\w+\.py)(?:::(\w+))?", document.read_text()):
        path = ROOT / "tests" / "dpcore" / file
        assert path.exists(), f"{document.name} names {file}"
        if name:
            assert re.search(rf"^def {name}\(", path.read_text(), flags=re.MULTILINE), (
                f"{document.name}: {file}::{name}"
            )


@documents
def test_named_files_and_modules_exist(document):
    text = document.read_text()
    for path in re.findall(r"(?:docs|tests|dpcore)/[\w/]+\.\w+", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    for name in re.findall(r"\bdpcore(?:\.(?!md\b|py\b)\w+)+", text):
        assert _importable(name), f"{document.name} names {name}"


def test_the_package_lists_every_subpackage_and_its_version():
    project = tomllib.loads((ROOT / "dpcore" / "pyproject.toml").read_text())
    found = {name for _, name, package in pkgutil.walk_packages(dpcore.__path__, "dpcore.") if package}
    assert {"dpcore", *found} == set(project["tool"]["setuptools"]["packages"])
    assert read_configuration(ROOT / "dpcore" / "pyproject.toml")["project"]["version"] == dpcore.__version__


def test_the_api_page_holds_every_public_name():
    page = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    optional = ("dpcore.transformers.", "dpcore.accelerate.", "dpcore.lightning.")  # need packages that may not be here
    assert all(_importable(name) for name in page if not name.startswith(optional))
    names = {name.rpartition(".")[2] for name in page}
    guide = (ROOT / "docs" / "dpcore.md").read_text()
    told = {name for line in re.findall(r"from dpcore\S* import (.*)", guide) for name in re.split(r"[,\s]+", line)}
    unnamed = {"PLDAccountant"}  # another name of PRVAccountant
    schedules = {name for name in vars(dpcore.schedulers) if not name.startswith("_") and name[0].isupper()}
    assert names >= {*dpcore.__all__, *dpcore.accountants.__all__, *schedules} - unnamed | told


@pytest.mark.filterwarnings("ignore")
def test_the_guides_snippets_run_as_they_stand(tmp_path, monkeypatch):
    """One after the other, each on a model, an optimizer and a loader of its own where it makes them private."""
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "dpcore.md").read_text()
    own = guide[: guide.index("## In a training library")]
    space = {"F": F, "torch": torch, "steps": 0, "test_x": torch.randn(20, 6), "test_y": torch.arange(20) % 3}
    snippets = re.findall(r"```python\n(.*?)```", own, flags=re.DOTALL)
    assert len(snippets) == 7
    for snippet in snippets:
        if "make_private" in snippet:
            space["model"] = torch.nn.Linear(6, 3)
            space["optimizer"] = torch.optim.SGD(space["model"].parameters(), lr=0.1)
            rows = TensorDataset(torch.randn(400, 6), torch.arange(400) % 3)
            space["loader"] = DataLoader(rows, batch_size=40)
        exec(snippet, space)
    assert space["steps"] == 10 and 0.0 < space["accuracy"] < 1.0 and space["weights"].keys() == {"weight", "bias"}
