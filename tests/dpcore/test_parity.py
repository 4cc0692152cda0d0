"""``python -m dpcore.parity`` tells runs that end at the same weights from others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpcore import parity


def _batches(rows):
    return [(torch.randn(rows, 4), torch.arange(rows) % 3) for _ in range(20)]


def with_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), F.cross_entropy, _batches(7)


def with_a_dict():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, features):
            return self.layer(features)

    return Model(), F.cross_entropy, [({"features": x}, y) for x, y in _batches(8)]


def nothing():
    return None


@pytest.mark.parametrize("setup", [None, "with_dropout", "with_a_dict"])
def test_runs_without_noise_and_clipping_are_the_same(setup, capsys):
    assert parity.main([] if setup is None else [f"{__name__}:{setup}"]) == 0
    assert "\nthe same: 20 steps of 4 pieces, in float64" in capsys.readouterr().out


def test_a_run_that_clips_is_not_the_same(monkeypatch, capsys):
    monkeypatch.setattr(parity, "NO_CLIPPING", 1e-3)
    assert parity.main([]) == 1
    assert "\nNOT the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1."),
        (["nowhere:setup"], "'nowhere:setup' cannot be called: No module named 'nowhere'."),
        (["nowhere"], "'nowhere' names no function; write module:function"),
        ([f"{__name__}:nothing"], "returned NoneType; it must return (model, loss, batches)."),
        ([f"{__name__}:with_a_dict", "--steps", "21"], "There are 20 batches for --steps 21; ask for fewer."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parity.main(arguments)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
