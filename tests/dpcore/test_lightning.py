"""A Lightning Trainer trains privately, and a resumed one goes on with its budget. Needs the package ``lightning``."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch

pytest.importorskip("lightning")


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning_mnist", "--smoke", "--seed", "3", *arguments])
    runpy.run_module("dpcore.examples.lightning_mnist", run_name="__main__")
    return capsys.readouterr().out


def epsilons(output: str) -> list[float]:
    return [float(e) for e in re.findall(r"epsilon ([\d.]+)", output)]


def weights(folder) -> dict[str, torch.Tensor]:
    (path,) = folder.rglob("*.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_ends_where_the_uninterrupted_one_does(monkeypatch, capsys, tmp_path):
    whole = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "whole")))
    assert len(whole) == 2 and 0 < whole[0] < whole[1] and 2.99 < whole[1] <= 3.0
    half = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "half"), "--stop-after", "1"))
    assert half == whole[:1]
    (path,) = (tmp_path / "half").rglob("*.ckpt")
    rest = epsilons(run(monkeypatch, capsys, "--folder", str(tmp_path / "rest"), "--resume", str(path)))
    assert rest == whole[1:]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "rest")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_does_not_know_its_budget_is_refused(monkeypatch, capsys, tmp_path):
    run(monkeypatch, capsys, "--folder", str(tmp_path / "first"), "--stop-after", "1")
    (path,) = (tmp_path / "first").rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["dpcore"]
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match="budget would be counted anew"):
        run(monkeypatch, capsys, "--resume", str(path))
