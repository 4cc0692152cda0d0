"""The identity of a machine: neither a kernel update nor a driver changes it, and the GPU that is used is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.environments.backend import check_device
from harness.errors import BadInput
from harness.worker import machine

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
  MIG 1g.10gb     Device  0: (UUID: MIG-cccc)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
"""


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    machine.describe.cache_clear()
    yield
    machine.describe.cache_clear()


def test_some_pages_less_make_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.describe()
    machine.describe.cache_clear()
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sysconf(name) - 37 * (name == "SC_PHYS_PAGES"))
    assert machine.describe() == before


def test_twice_the_memory_makes_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.describe()["id"]
    machine.describe.cache_clear()
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sysconf(name) * (1 + (name == "SC_PHYS_PAGES")))
    assert machine.describe()["id"] != before


def test_another_generation_of_one_name_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for model in (49, 17):
        text = f"model name\t: AMD EPYC\ncpu family\t: 23\nmodel\t\t: {model}\nflags\t\t: avx2 fma\n"
        monkeypatch.setattr(machine, "_read", lambda path, text=text: text)
        machine.describe.cache_clear()
        found.append(machine.describe()["id"])
    assert found[0] != found[1]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program nvidia-smi that tells of two equal cards, of which the first has a slice."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ $1 = -L ]; then cat <<'END'\n{LISTED}END\nelse echo 'NVIDIA H100, 1, 2'; fi\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "card"),
    [
        (None, "NVIDIA H100 80GB HBM3 GPU-aaaa"),
        ("1", "NVIDIA H100 80GB HBM3 GPU-bbbb"),
        ("1,0", "NVIDIA H100 80GB HBM3 GPU-bbbb"),
        ("GPU-bb", "NVIDIA H100 80GB HBM3 GPU-bbbb"),
        ("MIG-cccc", "NVIDIA H100 80GB HBM3 MIG 1g.10gb MIG-cccc"),
        ("-1", None),
        ("", None),
        ("7", None),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_the_card_is_the_first_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.card() == card
    if card is None:
        with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES"):
            check_device("cuda")
    else:
        check_device("cuda")
