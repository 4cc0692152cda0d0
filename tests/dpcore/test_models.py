"""Models of transformers, PEFT and timm have right clipped sums in every mode, without fallbacks.

Only where these libraries are: ``make test-models``.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs tests/requirements-models.txt")

from tests.dpcore import torchvision_on_cpu
from tests.dpcore.models import MODES, every, row


@pytest.mark.parametrize("architecture", every(), ids=lambda architecture: architecture.name)
def test_architecture(architecture):
    found = row(architecture)
    assert {mode: found.outcomes[mode].what for mode in MODES} == dict.fromkeys(MODES, "right"), found
    assert not found.fallbacks


def test_the_tutorial_on_adapters(monkeypatch, capsys):
    torchvision_on_cpu.make_importable()
    script = Path(__file__).parents[2] / "docs" / "tutorials" / "private_lora.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke", "--seed", "1"])
    runpy.run_path(str(script), run_name="__main__")
    output = capsys.readouterr().out
    assert "synthetic data" in output and "epsilon" in output
    before, *_, by_loop, by_trainer = map(float, re.findall(r"([\d.]+) of the tokens right", output))
    assert before < 0.1 and by_loop > 0.5 and by_trainer > 0.3
