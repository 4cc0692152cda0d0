"""No case leaks, computes wrong numbers or crashes; what remains unseen is what docs/privacy.md says."""

from pathlib import Path

import pytest

from tests.dpcore.case_runner import run
from tests.dpcore.cases import CASES

PRIVACY = " ".join((Path(__file__).parents[2] / "docs" / "privacy.md").read_text().split())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    outcome = run(case)
    assert outcome.fits(case), f"{outcome.what}: {outcome.line}"
    assert case.unseen in PRIVACY


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)
