"""Titles of figures: whole, on the page, and beside each other, whatever a task is called."""

from __future__ import annotations

import pytest

from harness.analysis.frames import build
from harness.report import model
from harness.report.figures import panel, tasks
from harness.report.figures.drawing import width
from harness.tasks import TASKS
from tests.support import record_factory as factory


@pytest.mark.parametrize("task", TASKS)
def test_a_pages_title_is_whole_and_ends_on_the_page(task):
    title = f"{model.task_title(task, True)}: seconds per epoch"
    (text,) = panel.page(title).texts
    assert text.text == title
    assert text.x + width(text.text, text.size, "bold") <= panel.PAGE and text.size > 6


@pytest.mark.parametrize("task", TASKS)
def test_a_title_in_lines_has_all_words_and_none_that_is_too_wide(task):
    lines = panel.folded(model.task_title(task, True), 176.0)
    assert " ".join(lines).split() == model.task_title(task, True).split()
    assert all(width(line, 9) <= 176.0 for line in lines)


@pytest.mark.parametrize("sizes", [(32,), (32, 64, 128)], ids=["a table", "curves"])
def test_titles_of_panels_end_where_the_next_begins(sizes):
    records = [
        factory.record(task=task, framework=framework, private=framework != "pytorch", batch_size=size, seconds=seconds)
        for task in ("recsys", "vit", "llama-lora")
        for framework, seconds in (("pytorch", (2.0,)), ("dpcore", (3.0,)))
        for size in sizes
    ]
    built = build(records, factory.PAPER_ROWS)
    shown = tasks.pictures(built, model.sections(built)[0])
    drawn = [text for part in shown.values() for picture in part for text in picture.draw().texts]
    assert any("Recommender" in text.text for text in drawn)
    for text in drawn:
        if text.anchor == "start" and not text.turned:
            assert text.x + width(text.text, text.size, text.style) <= panel.PAGE + 1, text.text
