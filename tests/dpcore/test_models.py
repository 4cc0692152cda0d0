"""Models of transformers, PEFT and timm have right clipped sums in every mode, without fallbacks.

Only where these libraries are: ``make test-models``.
"""

import pytest

pytest.importorskip("transformers", reason="needs tests/requirements-models.txt")

from tests.dpcore.architectures import architectures
from tests.dpcore.models import MODES, row


@pytest.mark.parametrize("architecture", architectures(), ids=lambda architecture: architecture.name)
def test_architecture(architecture):
    found = row(architecture)
    assert {mode: found.outcomes[mode].what for mode in MODES} == dict.fromkeys(MODES, "right"), found
    assert not found.fallbacks
