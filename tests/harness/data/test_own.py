"""A data set of the user's own: put into the cache, verified and loaded as any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli.data import app
from harness.data import fetch, store
from harness.errors import BadInput


def arrays(**others: np.ndarray) -> dict[str, np.ndarray]:
    x, y = np.ones((6, 4), np.float32), np.arange(6, dtype=np.int32) % 2
    return {"train_x": x, "train_y": y, "test_x": x[:2], "test_y": y[:2]} | others


def test_a_data_set_of_one_s_own_is_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BadInput, match=r"data add own-mine FILE\.npz"):
        fetch.fetch("own-mine")
    np.savez(tmp_path / "mine.npz", **arrays())
    assert CliRunner().invoke(app, ["add", "own-mine", str(tmp_path / "mine.npz")]).exit_code == 0
    assert fetch.fetch("own-mine")["arrays"]["train_x"]["shape"] == [6, 4]
    assert (store.load("own-mine").x == 1).all()
    assert "own-mine" in CliRunner().invoke(app, ["list"]).stdout
    with pytest.raises(BadInput, match="no synthetic twin"):
        fetch.make_synthetic("own-mine")


@pytest.mark.parametrize(
    ("name", "others", "said"),
    [
        ("mine", {}, "own-xrays"),
        ("own-mine", {"train_x": np.ones((6, 4))}, "train_x is float64"),
        ("own-mine", {"test_y": np.zeros(3, np.int32)}, "test_x is float32"),
        ("own-mine", {"train_y": np.zeros(6)}, "train_y is float64"),
        ("own-mine", None, "is no .npz"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    tmp_path: Path, name: str, others: dict[str, np.ndarray] | None, said: str
) -> None:
    file = tmp_path / "mine.npz"
    if others is None:
        file.write_text("no arrays")
    else:
        np.savez(file, **arrays(**others))
    with pytest.raises(BadInput, match=said):
        store.add(name, file)
