"""The faults that comparisons have to find: planted into a copy of dpcore, each still does what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.planted.faults import plant

CODE = """
import time, torch, dpcore.native
from torch import nn
from dpcore import Engine
engine = Engine(nn.Linear(600, 600), lambda out, y: (out - y).square().mean(1), check_isolation=False)
x = torch.randn(64, 600)
engine.clipped_sum(x, x)
engine.clipped_sum(x, x)
sums = engine._sums
print(int(hasattr(sums, "_planted")), type(sums).add.__qualname__, dpcore.__file__)
"""


@pytest.mark.parametrize(("name", "keeps", "made"), [("slow-10", "0", "_slowed"), ("memory", "1", "_hoarding")])
def test_a_planted_fault_is_at_work(name, keeps, made, tmp_path):
    plant(name, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found[0] == keeps and found[1].startswith(made) and found[2].startswith(str(tmp_path))
