"""The statement of what the records took to make."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from harness.published import compute, index, pages


def made(machine: str, *seconds: float) -> Any:
    return SimpleNamespace(machine=machine), [SimpleNamespace(wall_seconds=each) for each in seconds]


def test_hours_are_those_of_all_processes_of_a_machine() -> None:
    told = compute.statement([made("A", 3600, 1800), made("B", 7200), made("A", 1800)])
    assert "of the 3 cited runs took 4.0 hours on 2 machines" in told
    assert told.endswith("Hours by machine: A: 2.0; B: 2.0.")


def test_a_page_says_how_many_hours_its_records_took() -> None:
    told = pages.fill(index.ROOT / "README.md", "<!-- compute: grid-lstm-2 recsys-zen4-2026-11-29 -->\n<!-- end -->")
    ((total, machines),) = re.findall(r"took (\d+\.\d) hours on (\d+) machines", told)
    each = [float(hours) for hours in re.findall(r": (\d+\.\d)", told)]
    assert int(machines) == len(each) == 2 and float(total) == pytest.approx(sum(each), abs=0.2) and min(each) > 0.0
