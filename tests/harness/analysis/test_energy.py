"""Joules per example of records with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.analysis import energy
from harness.analysis.frames import build
from harness.report import contents
from harness.report.chapters import throughput
from harness.store.energy import Energy
from harness.store.record import Record
from tests.support import record_factory as factory

WHO = {"framework": "opacus", "variant": "hooks"}
NONE = "the kernel shows no RAPL counters here"
KNOWN = {
    "joules": {"gpu": 900.0},
    "seconds": 5.0,
    "stretches": 3,
    "idle_watts": {"gpu": 60.0},
    "step_seconds": {"gpu": 0.02},
}
"""900 J in 5 s, of which 300 J are the idle machine's: 600 J, of which 3 stretches may miss 6 steps of 3.6 J."""


def record(number: int = 0, rows: int | None = 200, **of_energy: object) -> Record:
    made = factory.record(task="mnist-cnn", seconds=[10.0 + number], round=number, **WHO)
    assert made.timed is not None
    update = {"timed": replace(made.timed, rows_timed=rows)}
    return made.model_copy(update={**update, "energy": Energy(**of_energy) if of_energy else None})


def test_what_the_idle_machine_takes_is_taken_off() -> None:
    assert energy.per_example(record(**KNOWN)) == ({"gpu": pytest.approx(3.0)}, {})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (record(**{**KNOWN, "idle_watts": {}}), "was not measured"),
        (record(**{**KNOWN, "idle_watts": {"gpu": 180.0}}), "no more than when it was idle"),
        (record(**{**KNOWN, "idle_watts": {"gpu": 170.0}}), "may hide 43% of the figure"),
        (record(**{**KNOWN, "step_seconds": {"gpu": 0.1}}), "moves every 0.1 s, which in 3 timed stretches of 5 s"),
        (record(rows=None, **KNOWN), "how many examples"),
        (record(seconds=0.5, unavailable={"gpu": "there is none"}), "there is none"),
        (record(**KNOWN, unavailable={"gpu": "the machine was not idle"}), "the machine was not idle"),
    ],
)
def test_without_a_figure_there_is_a_reason(made: Record, words: str) -> None:
    found, reasons = energy.per_example(made)
    assert found == {} and words in reasons["gpu"]
    assert energy.missing([made]) == f"Joules per example: gpu: not available: {reasons['gpu']}."


def test_records_of_before_counters_were_read_say_nothing() -> None:
    assert energy.per_example(record()) == ({}, {}) and energy.missing([record()]) is None


def grids(*records: Record) -> list[tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]]:
    tables = build(list(records), factory.PAPER_ROWS, {})
    chapters = {chapter.title: chapter for chapter in contents.end_to_end(tables)}
    return [(g.header, g.rows, " ".join(g.notes)) for g in chapters["Examples and tokens per second"].grids]


def test_a_column_stands_where_there_are_figures() -> None:
    ((header, rows, notes),) = grids(*(record(n, **KNOWN, unavailable={"processors": NONE}) for n in range(3)))
    assert "J/example, gpu" in header and rows[0][header.index("J/example, gpu")] == "3.00"
    assert notes.count(f"processors: not available: {NONE}") == 1
    tables = build([record(**KNOWN)], factory.PAPER_ROWS, {})
    assert throughput.frame(tables).joules_gpu.tolist() == [3.0]


def test_without_any_figure_the_reason_stands_once_and_no_column() -> None:
    unread = {"seconds": 0.5, "unavailable": {"processors": NONE}}
    other = factory.record(task="cifar10-cnn", seconds=[3.0], **WHO).model_copy(update={"energy": Energy(**unread)})
    found = grids(*(record(number, **unread) for number in range(3)), other)
    assert len(found) == 2 and not any("J/example" in name for header, _, _ in found for name in header)
    assert sum(notes.count("not available") for _, _, notes in found) == 1
    ((_, _, notes),) = grids(record())
    assert "Joules" not in notes
