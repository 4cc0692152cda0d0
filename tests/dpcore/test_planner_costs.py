"""What the planner weighs may be measured on the processor at hand: a file that a variable names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore import Engine
from dpcore.numerics import costs, measure

WIDTH, POSITIONS = 200, 100
GOOD = {"planner": {"flops_per_kept_float": 500.0, "fewest_in_turn": 1e7}}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / f"costs-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(costs.VARIABLE, str(path))
        return path

    return write


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


def step(model: nn.Module) -> tuple[str, Tensor]:
    """How the weight's norms are taken, and its clipped sum."""

    def losses(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    x = torch.randn(6, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    engine = Engine(model, losses, max_grad_norm=0.5)
    found = engine.clipped_sum(x, torch.arange(6))
    return engine.explain().splitlines()[0], found.sums["layer.weight"].clone()


def test_what_was_measured_decides_how_norms_are_taken(written: Callable[[Any], Path]) -> None:
    assumed, expected = step(Sequences())
    written(GOOD)  # 2 * 100² * 400 operations are below 500 * 200²
    measured, found = step(Sequences())
    assert (assumed, measured) == ("layer.weight: turn", "layer.weight: ghost")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    written({"planner": {"flops_per_kept_float": 60.0, "fewest_in_turn": 1e7}})
    assert step(Sequences())[0] == "layer.weight: keep"  # too few numbers for turns


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "Expecting value"),
        ("[]", "indices"),
        ({}, "no entry 'planner'"),
        ({"planner": {"flops_per_kept_float": 60.0}}, "fewest_in_turn"),
        ({"planner": {"flops_per_kept_float": 0.0, "fewest_in_turn": 1}}, "is 0.0; it must be a positive number"),
        ({"planner": {"flops_per_kept_float": 1.0, "fewest_in_turn": math.nan}}, "is nan; it must be"),
    ],
)
def test_a_bad_file_gets_one_sentence(written: Callable[[Any], Path], content: Any, reason: str) -> None:
    path = written(content)
    with pytest.raises(ValueError, match=costs.VARIABLE) as refused:
        step(Sequences())
    message = str(refused.value)
    assert reason in message and str(path) in message and "python -m dpcore.numerics.measure" in message
    assert "\n" not in message


def test_the_command_writes_what_the_planner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = measure.Sizes(kept=(2, 256), product=(2, 8, 8), turns=2, repeats=1)
    monkeypatch.setattr(measure, "ON_A_CPU", small)
    path, threads = tmp_path / "costs.json", torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["measure", "--out", str(path)])
    assert measure.main() == 0 and "flops_per_kept_float" in capsys.readouterr().out
    assert json.loads(path.read_text())["threads"] == threads
    monkeypatch.setenv(costs.VARIABLE, str(path))
    found = costs.of_processor()
    assert found is not None and min(found.flops_per_kept_float, found.fewest_in_turn) > 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--out", "nowhere/costs.json"], "--out is nowhere"), (["--out", "x.json", "--threads", "0"], "--threads is 0")],
)
def test_bad_arguments_get_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr("sys.argv", ["measure", *arguments])
    assert measure.main() == 2
    assert sentence in capsys.readouterr().err
    assert not Path("x.json").exists()
