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


def with_labels():
    """Batches as transformers has them, the last of them shorter."""
    model, loss, batches = with_a_dict()
    return (
        model,
        loss,
        [{**x, "labels": y} for x, y in batches[:-1]] + [{"features": torch.randn(3, 4), "labels": torch.arange(3)}],
    )


def with_heavy_gradients():
    """Far above any usual bound."""
    return nn.Linear(4, 3), lambda outputs, y: 1e9 * F.cross_entropy(1e3 * outputs, y), _batches(8)


def with_an_empty_batch():
    return nn.Linear(4, 3), F.cross_entropy, [*_batches(8)[:19], (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))]


def with_a_dict_without_labels():
    return with_a_dict()[0], F.cross_entropy, [{"features": x, "y": y} for x, y in _batches(8)]


def with_three():
    return nn.Linear(4, 3), F.cross_entropy, [(x, y, y) for x, y in _batches(8)]


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), F.cross_entropy, _batches(8)


def frozen():
    return nn.Linear(4, 3).requires_grad_(False), F.cross_entropy, _batches(8)


def with_a_fault_of_its_own():
    class Model(nn.Linear):
        def forward(self, x):
            raise ValueError("of the model")

    return Model(4, 3), F.cross_entropy, _batches(8)


def that_ends_at_no_number():
    class WithUnused(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.used = nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    batches = _batches(4)
    batches[0][0][1, 2] = float("nan")  # dpcore leaves that example out
    return WithUnused(), F.cross_entropy, batches


def nothing():
    return None


@pytest.mark.parametrize(
    "setup", [None, "with_dropout", "with_a_dict", "with_labels", "with_heavy_gradients", "with_an_empty_batch"]
)
def test_runs_without_noise_and_clipping_are_the_same(setup, capsys):
    assert parity.main([] if setup is None else [f"{__name__}:{setup}"]) == 0
    assert "\nthe same: 20 steps of 4 pieces, in float64" in capsys.readouterr().out


def test_a_run_that_clips_is_not_the_same(monkeypatch, capsys):
    monkeypatch.setattr(parity, "NO_CLIPPING", 1e-3)
    assert parity.main([]) == 1
    assert "\nNOT the same" in capsys.readouterr().out


def test_a_run_that_ends_at_no_number_is_not_the_same(capsys):
    assert parity.main([f"{__name__}:that_ends_at_no_number"]) == 1
    assert "\nNOT the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1."),
        (["nowhere:setup"], "'nowhere:setup' cannot be called: No module named 'nowhere'."),
        (["nowhere"], "'nowhere' names no function; write module:function"),
        ([f"{__name__}:nothing"], "returned NoneType; it must return (model, loss, batches)."),
        ([f"{__name__}:with_a_dict", "--steps", "21"], "There are 20 batches for --steps 21; ask for fewer."),
        (
            [f"{__name__}:with_a_dict_without_labels"],
            "Batch 0 is a dict with 'features', 'y'; it must be (inputs, targets)",
        ),
        ([f"{__name__}:with_three"], "Batch 0 is a tuple of 3; it must be (inputs, targets)"),
        ([f"{__name__}:with_batch_norm"], "is a BatchNorm1d, which normalises an example by the others"),
        ([f"{__name__}:frozen"], "no trained parameters"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parity.main(arguments)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_fault_of_the_model_keeps_its_traceback():
    with pytest.raises(ValueError, match="of the model"):
        parity.main([f"{__name__}:with_a_fault_of_its_own"])


def test_the_private_run_is_what_users_run(monkeypatch):
    """The two lines, with pieces: not an optimizer or wrapper that is built by hand."""
    calls = []
    own = parity.PrivacyEngine.make_private

    def make_private(self, **options):
        calls.append(options)
        return own(self, **options)

    monkeypatch.setattr(parity.PrivacyEngine, "make_private", make_private)
    assert parity.main(["--steps", "2"]) == 0
    assert len(calls) == 1 and calls[0]["max_physical_batch_size"] == 8 and calls[0].get("check_batches", True)
