"""What a container may say: true answers pass, nonsense is named."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest

from harness.environments import validate
from harness.tasks import TASKS, initial_parameters
from harness.worker.gate import checks as gate_checks
from harness.worker.request import Request
from harness.worker.result import Result

TIMED = {"steps_per_epoch": 8, "steps_timed": 4, "epochs": 1, "extrapolated": True, "measured_seconds": [0.5]}
TIME = {"state": "ok", "epoch_seconds": [1.0], "timed": TIMED, "epsilon_steps": 8, "versions": {"numpy": "2"}}
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
    assert validate.fault_of_result(result, mode) is None


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
        ("", {"layer": {"pass_seconds": [-0.1]}}, "layer.pass_seconds.0"),
        ("time", {"epoch_seconds": [-1.0]}, "epoch_seconds.0"),
        ("time", {"epoch_seconds": [float("nan")]}, "epoch_seconds.0"),
        ("time", {"epoch_seconds": [float("inf")]}, "epoch_seconds.0"),
        ("time", {"epoch_seconds": [0.001]}, "not the measured seconds"),
        ("time", {"epoch_seconds": []}, "do not agree"),
        ("time", {"compile_seconds": -2.0}, "compile_seconds"),
        ("time", {"foreign_share": float("nan")}, "foreign_share"),
        ("time", {"timed": {**TIMED, "measured_seconds": [0.0]}}, "timed.measured_seconds.0"),
        ("time", {"timed": {**TIMED, "steps_timed": 0}}, "timed.steps_timed"),
        ("memory", {"memory": {"peak_resident_growth": -1}}, "memory.peak_resident_growth"),
        (
            "probe",
            {"probe": {"start_up_bytes": 1, "first_step_seconds": 0.1, "step_seconds": []}},
            "probe.step_seconds",
        ),
        ("gate", {"checks": [{**CHECK, "passed": True}]}, "passed is True with error None"),
        ("gate", {"checks": [{**CHECK, "error": 1.0, "limit": float("inf"), "passed": True}]}, "checks.0.limit"),
    ],
)
def test_nonsense_is_named(mode: str, change: dict[str, Any], words: str) -> None:
    assert words in str(validate.fault_of_result({**TIME, **change}, mode))


def request(mode: str, **more: Any) -> Request:
    given: dict[str, Any] = {field.name: None for field in dataclasses.fields(Request)}
    return Request(**{**given, "mode": mode, "task": "logreg", "private": True, **more})


def passed(names: list[str]) -> dict[str, Any]:
    return {"state": "ok", "checks": [{"check": n, "error": 0.0, "limit": 1.0, "passed": True} for n in names]}


def test_a_gate_that_passed_has_made_every_check() -> None:
    names = gate_checks.names(private=True, has_budget=False)
    asked = request("gate")
    assert validate.fault_of_answer(passed(names), asked) is None
    assert "without parameters" in str(validate.fault_of_answer(passed(names[1:]), asked))
    assert "without" in str(validate.fault_of_answer(passed(["all is well"]), asked))
    assert "without" in str(validate.fault_of_answer(passed([]), asked))
    assert "in order" in str(validate.fault_of_answer(passed([*names, names[0]]), asked))
    assert validate.fault_of_answer(passed(names), request("gate", budget={"steps": 1.0})) == "without budget"
    failed = {**passed(names[:3]), "state": "ok"}
    failed["checks"][0] |= {"error": 2.0, "passed": False}
    assert validate.fault_of_answer(failed, asked) is None, "a gate that rejects needs no more than its reason"


def test_an_answer_that_is_none_leaves_no_weights() -> None:
    weights = packed(**initial_parameters(TASKS["logreg"], 3))
    asked = request("time")
    assert validate.examined(TIME, asked, {"snapshot": weights}, "the worker") == (Result.of(TIME), ["snapshot"])
    result, kept = validate.examined({**TIME, "log_tail": "x"}, asked, {"snapshot": b"no"}, "the worker")
    assert kept == [] and result.state == "crashed" and result.log_tail == "x"
    assert "the worker sent what is no result (snapshot.npz: no archive" in str(result.reason)
    result, kept = validate.examined({**TIME, "epoch_seconds": [-1.0]}, asked, {"snapshot": weights}, "the container")
    assert kept == [] and "the container sent what is no result (epoch_seconds.0" in str(result.reason)


def packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_weights_are_arrays_of_the_task() -> None:
    weights: dict[str, Any] = initial_parameters(TASKS["logreg"], 3)
    name = next(iter(weights))

    def fault(content: bytes, largest: int = 2**20) -> str:
        return str(validate.fault_of_weights(content, "logreg", largest))

    assert fault(packed(**weights)) == "None"
    assert "no archive" in fault(b"nothing") and "no archive" in fault(packed(**weights)[:-30])
    assert "no archive" in fault(packed(**{**weights, "more": np.array([{}], dtype=object)}))
    assert f"{name} is missing" in fault(packed(other=np.zeros(3)))
    assert f"{name} is float32 (1, 1)" in fault(packed(**{**weights, name: np.zeros((1, 1), np.float32)}))
    assert "unpacked" in fault(packed(**weights, more=np.zeros(2**18)))


def test_a_file_may_be_as_large_as_the_steps_of_a_large_model_are() -> None:
    assert validate.largest_file("mnist-cnn") == validate.LARGEST_WEIGHTS
    weights = 4 * 22_566_146
    assert 13 * weights < validate.largest_file("encoder-full") < 15 * weights
