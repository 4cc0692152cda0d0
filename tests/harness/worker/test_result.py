"""What a worker answers, on its way to the harness."""

from __future__ import annotations

import json

from harness.environments.executor import event_of
from harness.worker.result import BY_THE_HARNESS, Check, Layer, LayerParts, Probe, Result, Timed, of_error

FULL = Result(
    "ok",
    epoch_seconds=[1.0, 1.5],
    timed=Timed(8, 4, 1, True, [0.5]),
    epsilon_steps=0,
    memory={"peak_resident_growth": 3},
    checks=[Check("clip", 0.0, 1.0, True)],
    probe=Probe(1, 0.5, [0.25]),
    layer=Layer(parts=LayerParts(1, 2, 3, 4, 5, 15, 0, "profiler"), plan={"micro_batch": 4}),
    container={"exit_code": 0},
    log_tail="x",
    energy={"joules": {"gpu": 1.0}},
    clock_fault="late",
)


def test_a_result_comes_back_as_it_was() -> None:
    for result in (FULL, Result("crashed", "why", interrupted=True), Result("ok")):
        assert Result.from_json(result.to_json()) == result


def test_what_a_later_version_says_more_is_left_out() -> None:
    assert Result.of({"event": "result", "state": "ok", "of_tomorrow": 1}) == Result("ok")


def test_a_worker_does_not_say_how_its_process_did() -> None:
    heard = event_of(FULL.to_json().encode())
    assert heard == {name: value for name, value in json.loads(FULL.to_json()).items() if name not in BY_THE_HARNESS}
    assert "machine" not in heard and heard["epsilon_steps"] == 0
    started = {"event": "started", "machine": {"id": "elsewhere"}}
    assert event_of(json.dumps(started).encode()) == started


def test_memory_that_ran_out_is_told_from_other_errors() -> None:
    assert of_error(MemoryError("all gone")) == Result("oom", "MemoryError: all gone")
    assert of_error(RuntimeError("CUDA out of memory")).state == "oom"
    assert of_error(ValueError("no")) == Result("crashed", "ValueError: no")
