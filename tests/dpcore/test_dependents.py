"""A package that is built on Opacus runs unchanged on dpcore; ``make dependents`` runs the others, too."""

import importlib.util
import sys

import pytest

from proofs.dependents import USES, outcome


@pytest.mark.skipif(importlib.util.find_spec("secureml") is None, reason="secureml is not installed")
def test_secureml_spends_no_more_by_the_same_steps() -> None:
    program = next(program for name, program in USES.items() if name.startswith("secureml"))
    theirs, ours = (outcome(sys.executable, program, as_opacus) for as_opacus in (False, True))
    assert theirs.said and ours.said, (theirs.error, ours.error)
    assert ours.said["steps"] == theirs.said["steps"] > 0
    assert 0 < ours.said["epsilon"] <= theirs.said["epsilon"]
