"""Wherever two measurements meet, what differs keeps them apart, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis import frames, naming, tidy
from harness.errors import BadInput
from harness.history import runs
from harness.store import surroundings
from harness.store.folder import RunFolder
from tests.support import record_factory as factory

OTHERS: list[dict[str, Any]] = [
    {"quota": 0.5},
    {"variables": {"DPCORE_NATIVE": "0"}},
    {"variables": {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}},
    {"card": "NVIDIA H100 GPU-bbbb"},
    {"threads": 2},
    {"id": "11111111"},
]


def rounds(machine: dict[str, Any], **more: Any) -> list[Any]:
    return [
        factory.record(framework=name, variant=variant, private=name != "pytorch", round=i, machine=machine, **more)
        for i in range(3)
        for name, variant in (("pytorch", "eager"), ("opacus", "hooks"))
    ]


@pytest.mark.parametrize("other", OTHERS, ids=[next(iter(o)) for o in OTHERS])
def test_what_differs_is_never_pooled_in_a_report_nor_in_the_history(other: dict[str, Any]) -> None:
    both = rounds(factory.MACHINE) + rounds({**factory.MACHINE, **other})
    tables = frames.build(both)
    assert sorted(tables.cells.n) == [3, 3, 3, 3] and len(set(tables.cells.machine)) == 2
    assert len(tables.ratios) == 2 and set(tables.ratios.n) == {3}
    assert len({run.machine_key for run in runs.condense(both)}) == 2
    assert surroundings.of(both[0]).key != surroundings.of(both[-1]).key


def test_what_was_installed_is_a_part_of_the_code() -> None:
    source = {**factory.record().source.model_dump(), "content": "0" * 12}
    old, new = factory.record(), factory.record(round=1, started="2026-11-21T08:00:00+00:00", source=source)
    raw = tidy.tidy([old, new])
    assert list(raw.superseded) == [True, False]


def test_halves_of_a_block_that_lie_apart_are_no_pair() -> None:
    """Identical code, one half measured while the machine was slow."""

    def at(moment: str, name: str, i: int, seconds: float) -> Any:
        block = {"run": "run-1", "round": i, "order": 0, "moment": moment}
        private = name != "pytorch"
        return factory.record(framework=name, variant="eager", private=private, seconds=[seconds], block=block)

    together = [at(f"{i}", name, i, 1.0) for i in range(3) for name in ("pytorch", "opacus")]
    apart = [at(f"{i} {name}", name, i, 1.0 + (name == "opacus")) for i in (3, 4, 5) for name in ("pytorch", "opacus")]
    (ratio,) = frames.build(together + apart).ratios.to_dict("records")
    assert ratio["n"] == 3 and ratio["ratio"] == 1.0


def test_a_label_names_what_is_unusual_and_keeps_paths_to_itself() -> None:
    facts = {**factory.MACHINE, "quota": 0.5, "variables": {"DPCORE_NATIVE": "0", "LD_PRELOAD": "/home/me/libx.so.1.2"}}
    label = naming.machine_label(facts)
    assert "quota of 0.5 processors" in label and "DPCORE_NATIVE=0" in label
    assert "LD_PRELOAD=" in label and "/home" not in label
    assert "quota of 0.5 processors" in naming.where(label, ["2026-11-27"])


def test_a_run_that_goes_on_elsewhere_is_refused_with_the_names_of_what_differs(tmp_path: Path) -> None:
    place = surroundings.facts(factory.MACHINE)
    with RunFolder(tmp_path / "run").open({"place": place}, fresh=False):
        pass
    folder, other = RunFolder(tmp_path / "run"), {**place, "quota": 0.5, "variables": {"DPCORE_NATIVE": "0"}}
    with (
        pytest.raises(BadInput, match=r"place\.quota \(None then, 0\.5 now\), place\.variables"),
        folder.open({"place": other}, fresh=False),
    ):
        pass


def test_the_order_of_contestants_and_sizes_is_no_difference(tmp_path: Path) -> None:
    def plan(names: tuple[str, ...], sizes: list[int]) -> dict[str, Any]:
        options = {"frameworks": names, "tasks": ["logreg"], "batch_sizes": {"logreg": sizes}, "rounds": 2}
        return {"options": options, "contestants": {name: {"adapter": "a"} for name in names}, "tasks": {"logreg": "t"}}

    folder = RunFolder(tmp_path / "run")
    with folder.open(plan(("jax", "opacus"), [16, 64]), fresh=False):
        pass
    with folder.open(plan(("opacus", "jax"), [64, 16]), fresh=False):
        pass
    with pytest.raises(BadInput, match="contestants"), folder.open(plan(("opacus",), [16, 64]), fresh=False):
        pass


def test_a_comparison_never_grows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "comparison")
    with folder.open({"sides": [1, 2], "options": {"tasks": ["logreg"], "batch_sizes": [16]}}, fresh=False):
        pass
    more = {"sides": [1, 2], "options": {"tasks": ["logreg", "ffnn"], "batch_sizes": [16, 64]}}
    with pytest.raises(BadInput, match="differs in"), folder.open(more, fresh=False):
        pass
