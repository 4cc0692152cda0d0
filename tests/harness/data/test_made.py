"""The data of the full tasks: made up, of the tasks' shapes, and the same on every call."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli import data
from harness.data import clicks, fetch, store, synthetic
from harness.tasks import FULL_TASKS, TASKS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", FULL_TASKS)
def test_a_full_task_has_data_of_its_shape(name: str) -> None:
    task = TASKS[name]
    expected = fetch.SOURCES[task.dataset].expected
    assert expected.train_shape == (task.train_size, *task.input_shape)
    assert expected.test_shape == (task.test_size, *task.input_shape)
    assert expected.label_shape == task.label_shape
    if expected.train_counts:
        assert len(expected.train_counts) == task.classes and sum(expected.train_counts) == task.train_size


def test_those_sets_are_what_full_tasks_alone_read_and_none_is_genuine() -> None:
    others = {task.dataset for name, task in TASKS.items() if name not in FULL_TASKS}
    assert {TASKS[name].dataset for name in FULL_TASKS} - others == {*store.OF_FULL_TASKS}
    assert {*store.OF_FULL_TASKS} < {*store.MADE} and not any(fetch.SOURCES[n].routes for n in store.MADE)


def test_words_follow_each_other_and_have_words_frequencies(cache: Path) -> None:
    meta = fetch.fetch("words-gpt2")
    assert meta["synthetic"] is True and "synthetic" in meta["title"]
    found = store.load("words-gpt2")
    assert found.x.dtype == found.y.dtype == np.int32 and found.x.shape == found.y.shape == (4096, 100)
    assert found.x.min() == 0 and 50_000 < found.x.max() < 50_257
    np.testing.assert_array_equal(found.x[:, 1:], found.y[:, :-1])
    ranks = np.bincount(found.x.ravel(), minlength=50_257)
    assert ranks[0] == ranks.max() and ranks[:100].sum() > 10 * ranks[1000:1100].sum()
    assert store.digest(synthetic.make(fetch.SOURCES["words-gpt2"]).arrays) == meta["sha256"]
    assert not np.array_equal(found.x[:256], store.load("words-gpt2", "test").x)


def test_texts_of_two_classes_have_words_of_their_own() -> None:
    found = synthetic.make(fetch.SOURCES["words-roberta"]).arrays
    x, y = found["train_x"], found["train_y"]
    assert x.shape == (4096, 256) and x.max() < 50_265 and np.bincount(y).tolist() == [2048, 2048]
    one, other = (np.bincount(x[y == label].ravel(), minlength=50_265)[:50] for label in (0, 1))
    assert (np.abs(one - other) > 5 * np.sqrt(one + other)).sum() > 10


def test_large_pictures_are_bytes_around_grey_each_of_a_class_of_its_own() -> None:
    found = synthetic.make(fetch.SOURCES["pictures-224"]).arrays
    assert found["train_x"].shape == (512, 3, 224, 224) and found["train_x"].dtype == np.uint8
    assert 119 < found["train_x"][:8].mean() < 121 and sorted(found["train_y"]) == [*range(512)]
    assert found["test_y"].max() < 64


def test_large_clicks_name_rows_of_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    bags = clicks.BAGS["clicks-large"]
    assert bags.rows == (2_000_000,) * 26 and (bags.counts, bags.ids) == (13, 4)
    # Fewer fields, for they are alike and take a fifth of a second each.
    monkeypatch.setitem(clicks.BAGS, "clicks-large", type(bags)("bags", 13, bags.rows[:2], 4, 16))
    found, again = (synthetic.make(fetch.SOURCES["clicks-large"]).arrays for _ in range(2))
    assert store.digest(found) == store.digest(again)
    x = found["train_x"]
    assert x.shape == (20_000, 13 + 2 * 4) and x.min() >= 0 and 1_900_000 < x[:, 13:].max() < 2_000_000


def test_where_all_data_are_meant_those_of_full_tasks_are_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(name: str, *_: object) -> dict[str, object]:
        asked.append(name)
        return {"synthetic": True}

    monkeypatch.setattr(fetch, "fetch", fetched)
    assert CliRunner().invoke(data.app, ["fetch"]).exit_code == 0
    assert asked == [name for name in store.NAMES if name not in store.OF_FULL_TASKS]
    listed = json.loads(CliRunner().invoke(data.app, ["list", "--json"]).stdout)
    assert [row["name"] for row in listed] == list(store.NAMES)
