"""The heap keeps its pages from step to step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from dpcore.rerun.heap import OF_USER

STEPS = """
import resource, sys
import torch
from dpcore.rerun.heap import give_back

if sys.argv[1:]:
    give_back()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(125_000) for _ in range(40)] + [torch.ones(12_000_000)]
    while blocks:
        blocks.pop()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_step_asks_for_no_page_that_the_last_one_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OF_USER, "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", STEPS, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults() > 2000  # pages of the 68 MB that every step takes: otherwise this test shows nothing
    assert faults("given back") < 200
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    assert faults("given back") > 2000  # what the user says of the heap holds
