"""What was measured on a GPU, as data: who reads it, and what is no such file."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter

from dpcore.gpu import tuned
from dpcore.gpu.tune import fastest
from dpcore.gpu.tuned import Sizes
from dpcore.microbatch.planner import choose
from dpcore.numerics.costs import Costs
from dpcore.rules.linear import ContractionUse

GOOD = {
    "simulated": False,
    "planner": {"flops_per_kept_float": 500.0, "fewest_in_turn": 1e7},
    "tiles": {"float32": {"tile": 128, "depth": 64, "warps": 8, "stages": 2}},
    "gram": {},
    "windows": {"float32": {"tile": 32}, "half": {"tile": 32, "depth": 64}},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a file and names it."""

    def write(content) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(tuned.VARIABLE, str(path))

    return write


def test_kernels_have_the_sizes_of_the_file_and_one_tile_for_all_types(written):
    assert tuned.chosen("tiles", torch.float32) == Sizes()
    written(GOOD)
    assert tuned.chosen("tiles", torch.float32) == Sizes(128, 64, 8, 2)
    assert tuned.chosen("tiles", torch.bfloat16) == Sizes(128)
    assert tuned.chosen("gram", torch.bfloat16) == Sizes()
    assert tuned.chosen("windows", torch.float16) == tuned.chosen("windows", torch.bfloat16) == Sizes(32, 64)


def method(device: str, steps: int) -> str:
    """How the planner takes a linear map of 200 by 200 numbers over so many steps, on a device without values."""
    with FakeTensorMode():
        weight = Parameter(torch.empty(200, 200, device=device))
        use = ContractionUse("map", {weight: torch.empty(4, steps, 200, device=device)}, ())
        use.grad = torch.empty(4, steps, 200, device=device)
        (choice,) = choose([use])
    return choice.method


def test_the_planner_weighs_what_was_measured_on_a_gpu_and_there_only(written):
    assert method("cpu", 100) == method("cuda", 100) == "turn"
    assert method("cpu", 20) == method("cuda", 20) == "ghost"
    written(GOOD)
    assert method("cuda", 300) == "keep"  # too few numbers for turns
    assert method("cuda", 100) == "ghost"  # 2 * 100² * 400 operations are below 500 * 200²
    assert method("cpu", 100) == "turn"
    written(GOOD | {"planner": {"flops_per_kept_float": 1.0, "fewest_in_turn": 1}})
    assert method("cuda", 20) == "turn"
    assert method("cpu", 20) == "ghost"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "Expecting value"),
        ("[]", "indices"),
        ({k: v for k, v in GOOD.items() if k != "planner"}, "no entry 'planner'"),
        (GOOD | {"planner": {"flops_per_kept_float": 60.0}}, "fewest_in_turn"),
        (
            GOOD | {"planner": {"flops_per_kept_float": 0.0, "fewest_in_turn": 1}},
            "is 0.0; it must be a positive number",
        ),
        (GOOD | {"planner": {"flops_per_kept_float": 1.0, "fewest_in_turn": math.nan}}, "is nan; it must be"),
        (GOOD | {"planner": {"flops_per_kept_float": 1.0, "fewest_in_turn": "many"}}, "'many'; it must be"),
        (GOOD | {"gram": {"float32": {"tile": 65}}}, "tile is 65; it must be a power of two, from 16 to 256"),
        (GOOD | {"gram": {"float64": {}}}, "float64"),
        (GOOD | {"gram": {"float32": {"rows": 64}}}, "rows"),
        (GOOD | {"windows": {"float32": {"tile": 32}, "half": {}}}, "windows differ between types"),
        (GOOD | {"simulated": True}, "whose times are the interpreter's"),
    ],
)
def test_a_bad_file_gets_one_sentence_that_names_it(written, content, reason):
    written(content)
    for ask in (lambda: tuned.chosen("tiles", torch.float32), lambda: tuned.costs(torch.device("cuda"))):
        with pytest.raises(ValueError, match=tuned.VARIABLE) as refused:
            ask()
        assert reason in str(refused.value) and "python -m dpcore.gpu.tune" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert tuned.costs(torch.device("cpu")) is None


def test_a_file_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, "nowhere.json")
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        tuned.costs(torch.device("cuda"))


def test_costs_are_positive_numbers():
    assert Costs(60.0, 32768).fewest_in_turn == 32768
    with pytest.raises(ValueError, match="flops_per_kept_float is True"):
        Costs(True, 1.0)


def test_the_fastest_sizes_have_the_tile_that_is_fastest_for_all_types_together():
    deep = Sizes(32, 64)
    times = {
        Sizes(): {"float32": [1.0, 4.0], "half": [1.0, 1.0]},
        Sizes(32): {"float32": [0.5, 3.0], "half": [2.0, 1.0]},
        deep: {"float32": [0.5, 4.0], "half": [0.5, 1.0]},
        Sizes(128): {"float32": [0.1, 0.1]},  # half precision could not run
    }
    assert fastest(times) == {"float32": Sizes(32), "half": deep}
    assert fastest({Sizes(32): {"float32": [1.0]}}) == {}
