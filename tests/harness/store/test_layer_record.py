"""How a layer's record looks."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.analysis import frames
from harness.errors import BadInput
from harness.store import record
from tests.support.record_factory import layer_record
from tests.support.record_factory import record as e2e_record


def test_a_layers_record_survives_the_store_and_keeps_out_of_the_tables_of_tasks():
    mine = layer_record(purpose="memory")
    again = record.parse(mine.to_json(), "here")
    assert again == mine
    assert again.cell.name == "linear/opacus-hooks/clipped/16/layers-v1/cpu/venv"
    parts = again.layer.parts
    assert parts.peak == parts.input + parts.labels + parts.module + parts.gradients + parts.intermediate
    tables = frames.build([mine, e2e_record()])
    assert set(tables.raw.task) == {"mnist-cnn"}
    with pytest.raises(BadInput, match=r"no end-to-end records here \(only of: layer"):
        frames.build([mine])


def test_a_cell_is_either_a_task_or_a_layer_with_its_passes():
    for change in ({"task": "mnist-cnn"}, {"passes": None}, {"layer": None}, {"kind": "e2e"}):
        cell = {**layer_record().cell.model_dump(), **change}
        with pytest.raises(ValidationError, match="a cell names a task, or, of kind layer"):
            record.Cell.model_validate(cell)
