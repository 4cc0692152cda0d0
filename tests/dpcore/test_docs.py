"""What the documents of dpcore name exists: links, headings, tests, files, modules."""

from __future__ import annotations

import importlib.util
import json
import math
import pkgutil
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

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
    *("primer", "hyperparameters", "dpcore", "dpcore-engine", "dpcore-features", "dpcore-refusals", "dpcore-internals"),
    *("migration", "privacy", "privacy-unit", "exactness", "side_by_side", "patches"),
)
DOCUMENTS = [*(ROOT / "docs" / f"{name}.md" for name in NAMES), ROOT / "dpcore" / "examples" / "README.md"]
SETTINGS = ROOT / "docs" / "hyperparameters.md"
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


def _snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def _run(snippet: str, space: dict[str, Any]) -> None:
    """Run a snippet, on a model, an optimizer and a loader of its own where it makes them private."""
    if "make_private" in snippet:
        space["model"] = torch.nn.Linear(6, 3)
        space["optimizer"] = torch.optim.SGD(space["model"].parameters(), lr=0.1)
        rows = TensorDataset(torch.randn(400, 6), torch.arange(400) % 3)
        space["loader"] = DataLoader(rows, batch_size=40)
    exec(snippet, space)


def _test_rows() -> dict[str, Any]:
    return {"F": F, "torch": torch, "steps": 0, "test_x": torch.randn(20, 6), "test_y": torch.arange(20) % 3}


@pytest.mark.filterwarnings("ignore")
def test_the_guides_snippets_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "dpcore.md").read_text()
    snippets, space = _snippets(guide[: guide.index("## In a training library")]), _test_rows()
    assert len(snippets) == 8
    for snippet in snippets:
        _run(snippet, space)
    assert space["steps"] == 10 and 0.0 < space["accuracy"] < 1.0 and space["weights"].keys() == {"weight", "bias"}


def test_the_primer_is_one_page_and_computes_its_epsilon():
    primer = (ROOT / "docs" / "primer.md").read_text()
    (snippet,), space = _snippets(primer), _test_rows()
    _run(snippet, space)
    assert len(primer.split()) <= 700 and snippet.endswith(f"# {space['epsilon']:.2f}\n")


@pytest.mark.filterwarnings("ignore")
def test_the_snippets_on_settings_run_behind_the_guides_first():
    first, *_ = _snippets((ROOT / "docs" / "dpcore.md").read_text())
    norms, averaging = _snippets(SETTINGS.read_text())
    space = _test_rows() | {"model": torch.nn.Linear(6, 3)}
    _run(norms, space)
    assert 0.0 < space["C"] < 100.0
    _run(first, space)
    _run(averaging, space)
    assert space["averaged"](space["test_x"]).shape == (20, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_snippets_on_units_run():
    space = _test_rows() | {"DataLoader": DataLoader}
    for snippet in _snippets((ROOT / "docs" / "privacy-unit.md").read_text()):
        _run(snippet, space)
    assert len(space["users"]) == 50 and space["engine"].group == 4


def test_the_noise_of_each_batch_size_is_what_the_accountant_says():
    number = r" ([\d.e-]+) \|"
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|" + 3 * number, SETTINGS.read_text(), flags=re.MULTILINE)
    assert len(rows) == 6
    for batch, epochs, steps, sigma, update, run in (map(float, row) for row in rows):
        assert steps == epochs * 50_000 / batch
        accountant = dpcore.accountants.PRVAccountant()
        accountant.step(noise_multiplier=sigma, sample_rate=batch / 50_000, steps=int(steps))
        assert accountant.get_epsilon(1e-5) == pytest.approx(3, rel=2e-3)
        assert sigma / batch == pytest.approx(update, rel=0.03)
        assert sigma / batch / math.sqrt(steps) == pytest.approx(run, rel=0.03)


def test_our_accuracies_are_those_of_the_committed_runs():
    told = SETTINGS.read_text()
    runs = [json.loads(path.read_text()) for path in (ROOT / "results").glob("minilm-imdb/*-dpcore-seed*.json")]
    kinds = {name: [run["accuracy"] for run in runs if run["train"] == name] for name in ("full", "lora", "bias")}
    beside = (ROOT / "results" / "accuracy-beside-opacus").glob("*.json")
    every = [run for path in beside for run in json.loads(path.read_text())["runs"]]
    kinds["mnist"] = [run["accuracy"] for run in every if run["library"] == "dpcore"]
    for found in kinds.values():
        assert f"| {statistics.mean(found):.4f} [{min(found):.4f}, {max(found):.4f}] | {len(found)} |" in told
    once = re.findall(r"\| (0\.\d{4}) \| 1 \| .* ¹ \|", told)
    examples = (ROOT / "dpcore" / "examples" / "README.md").read_text()
    assert len(once) == 4 and all(f"| {accuracy} |" in examples for accuracy in once)
