"""A process that a busy machine may have spoilt is run again before it is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from harness.run.session import READ_REPEATS, undisturbed
from harness.worker.result import Result

OK = Result("ok", epoch_seconds=[1.0])
SLOW = Result("rejected", "reading the weights took too long.", deferred=True)


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def judged(results: Iterator[Result], repeats: int = 0) -> tuple[Result, Any, list[str]]:
    log = Log()
    result, load = undisturbed(lambda: next(results), repeats, True, "cell", cast(Any, log), lambda: None)
    return result, load, log.lines


def test_a_slow_reading_of_the_weights_is_no_verdict_where_it_does_not_come_back() -> None:
    result, load, lines = judged(iter([SLOW, SLOW, OK]))
    assert result == OK and load.repeats == 2 and not load.disturbed
    assert len(lines) == 2 and all("reading the weights" in line and "repeated" in line for line in lines)


def test_one_that_comes_back_every_time_rejects() -> None:
    result, load, _ = judged(iter([SLOW] * (READ_REPEATS + 1)))
    assert result == SLOW and load.repeats == READ_REPEATS


def test_another_rejection_is_final_at_once() -> None:
    wrong = Result("rejected", "the weights after the timed steps are not finite.")
    result, load, _ = judged(iter([wrong]))
    assert result == wrong and load.repeats == 0
