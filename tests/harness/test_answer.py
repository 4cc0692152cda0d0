"""What a container may say: true answers pass, nonsense is named."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from harness import answer
from harness.tasks import TASKS, initial_parameters

TIMED = {"steps_per_epoch": 8, "steps_timed": 4, "epochs": 1, "extrapolated": True, "measured_seconds": [0.5]}
TIME = {"state": "ok", "epoch_seconds": [1, 1.5], "timed": TIMED, "epsilon_steps": 8, "versions": {"numpy": "2"}}
CHECK = {"check": "clip", "error": None, "limit": 1e-4, "passed": False}


@pytest.mark.parametrize(
    ("mode", "result"),
    [
        ("time", TIME),
        ("time", {"state": "crashed", "reason": "no"}),
        ("memory", {"state": "ok", "memory": {"peak_resident_growth": 3}}),
        ("gate", {"state": "ok", "checks": [CHECK], "anything": "else"}),
        ("", {"state": "ok", "layer": {"pass_seconds": [0.1], "batches": 4}}),
    ],
)
def test_an_answer_has_no_fault(mode: str, result: dict[str, Any]) -> None:
    assert answer.fault_of_result(result, mode) is None


@pytest.mark.parametrize(
    ("mode", "change", "words"),
    [
        ("time", {"state": "fine"}, "state"),
        ("time", {"epoch_seconds": "soon"}, "epoch_seconds"),
        ("time", {"epoch_seconds": ["1"]}, "epoch_seconds.0"),
        ("time", {"timed": None}, "timed"),
        ("time", {"timed": {**TIMED, "steps_timed": "4"}}, "timed.steps_timed"),
        ("time", {"foreign_share": "much"}, "foreign_share"),
        ("time", {"epsilon_steps": -1}, "epsilon_steps"),
        ("time", {"versions": ["numpy"]}, "versions"),
        ("memory", {}, "without memory"),
        ("gate", {"checks": [{"check": "clip"}]}, "checks.0"),
        ("", {"layer": {"pass_seconds": 3}}, "layer.pass_seconds"),
    ],
)
def test_nonsense_is_named(mode: str, change: dict[str, Any], words: str) -> None:
    assert words in str(answer.fault_of_result({**TIME, **change}, mode))


def packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_weights_are_arrays_of_the_task() -> None:
    weights: dict[str, Any] = initial_parameters(TASKS["logreg"], 3)
    name = next(iter(weights))

    def fault(content: bytes, largest: int = 2**20) -> str:
        return str(answer.fault_of_weights(content, "logreg", largest))

    assert fault(packed(**weights)) == "None"
    assert "no archive" in fault(b"nothing") and "no archive" in fault(packed(**weights)[:-30])
    assert "no archive" in fault(packed(**{**weights, "more": np.array([{}], dtype=object)}))
    assert f"{name} is missing" in fault(packed(other=np.zeros(3)))
    assert f"{name} is float32 (1, 1)" in fault(packed(**{**weights, name: np.zeros((1, 1), np.float32)}))
    assert "unpacked" in fault(packed(**weights, more=np.zeros(2**18)))
