"""All verbs share one results/local: what one of them leaves there must not stop another."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.paths import LOCAL_RESULTS
from harness.store.folder import RunFolder
from tests.support import record_factory as factory

VERBS = {
    "report": ["report"],
    "compare": ["compare", "jax-vmap", "pytorch-eager"],
    "explain": ["explain", "mnist-cnn/jax-vmap/64"],
    "dashboard": ["dashboard"],
}


def every_pair(verbs):
    """A sequence in which each verb comes directly after every other verb."""
    names = list(verbs)
    left = {(a, b) for a in names for b in names if a != b}
    sequence = [names[0]]
    while left:
        here = sequence[-1]
        nexts = [b for b in names if (here, b) in left] or [next(a for a, _ in sorted(left) if a != here)]
        # The verb with most pairs still open, so that the walk does not get stuck.
        chosen = max(nexts, key=lambda b: sum(a == b for a, _ in left))
        left.discard((here, chosen))
        sequence.append(chosen)
    return sequence


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A results/local with one run, which is in the history too, and one comparison of two commits."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder(LOCAL_RESULTS / "tiny")
    with run.open({"preset": "tiny"}, fresh=False):
        factory.write(factory.quick_run(rounds=1, batch_sizes=(64,), tasks=("mnist-cnn",)), run.records)
    compared = RunFolder(LOCAL_RESULTS / "compare" / "a-b")
    with compared.open({"sides": {"base": {}, "head": {}}}, fresh=False):
        (compared.records / "linear.000.json").write_text('{"base": {}, "head": {}}')
        (compared.path / "comparison.json").write_text('{"cells": []}')
    added = CliRunner().invoke(app, ["history", "add", str(LOCAL_RESULTS)])
    assert added.exit_code == 0, added.exception


def test_every_verb_works_after_every_other(local):
    for verb in every_pair(VERBS):
        result = CliRunner().invoke(app, VERBS[verb])
        # 3: not one cell could be compared, here for too few rounds.
        assert result.exit_code in ({0, 3} if verb == "compare" else {0}), (verb, result.output, result.exception)


def test_a_dashboard_alone_holds_no_records(local, tmp_path):
    site = tmp_path / "site"
    assert CliRunner().invoke(app, ["dashboard", "--out", str(site)]).exit_code == 0
    result = CliRunner().invoke(app, ["report", str(site)])
    assert "There are no records in" in str(result.exception or result.output)
