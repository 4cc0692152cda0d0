"""The memory frontier in the report, from records of known content."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.report import contents
from harness.report.chapters import frontier
from harness.report.formats import markdown
from harness.store.record import Probe, Record
from tests.support import figures
from tests.support.record_factory import record

MIB = 2**20
BUDGET = 100 * MIB


def probe(
    size: int, contestant: tuple[str, str, bool], mib: float, stage: str = "search", round: int = 0, **more: Any
) -> Record:
    """One process: it fits if its peak is within the budget; 100 examples a second and one more per round."""
    framework, variant, private = contestant
    state = more.pop("state", "ok" if mib * MIB <= BUDGET else "oom")
    base = record(
        framework=framework, variant=variant, private=private, batch_size=size, state=state, round=round, **more
    )
    seconds = [size / (100.0 + round)] * 3 if state == "ok" else []
    return base.model_copy(
        update={
            "purpose": "probe",
            "cell": base.cell.model_copy(update={"kind": "frontier", "protocol": "frontier-v2"}),
            "memory": {"peak_resident_growth_with_compile": int(mib * MIB)} if state in {"ok", "oom"} else {},
            "probe": Probe(
                stage=stage,  # type: ignore[arg-type]
                budget_bytes=BUDGET,
                start_up_bytes=300 * MIB,
                first_step_seconds=1.0,
                step_seconds=seconds,
            ),
        }
    )


HOOKS, PLAIN, ENGINE = ("opacus", "hooks", True), ("pytorch", "eager", False), ("dpcore", "engine", True)


def searched() -> list[Record]:
    """Opacus: 1 MiB an example, so 100; PyTorch 0.25 MiB, cut at 256; dpcore crashes at 128."""
    records = [probe(size, HOOKS, size) for size in (64, 128, 96, 112, 104, 100)]
    records += [probe(100, HOOKS, 100, "throughput", round) for round in (1, 2, 3)]
    records += [probe(size, PLAIN, size / 4) for size in (64, 128, 256)]
    records += [probe(256, PLAIN, 64, "throughput", round) for round in (1, 2, 3)]
    return [*records, probe(64, ENGINE, 5), probe(128, ENGINE, 5, state="crashed", reason="it fell over")]


def found(records: list[Record]) -> pd.DataFrame:
    return frontier.frontiers(frontier.probes(records)).set_index("contestant")


def test_the_frontier_is_the_largest_that_fits_below_what_does_not() -> None:
    rows = found(searched())
    hooks, plain, engine = rows.loc["opacus-hooks"], rows.loc["pytorch-eager"], rows.loc["dpcore-engine"]
    assert (hooks.batch_size, hooks.misfit, hooks.ended) == (100, 104, "oom")
    assert [hooks.examples_per_second, hooks.low, hooks.high] == pytest.approx([102.0, 101.0, 103.0])
    assert hooks.n == 3
    assert hooks.bytes_per_example == MIB
    assert (plain.batch_size, plain.ended) == (256, "ok") and pd.isna(plain.misfit)
    assert (engine.batch_size, engine.ended, engine.n) == (64, "crashed", 0)


def test_a_size_that_fitted_once_and_then_not_is_above_the_frontier() -> None:
    records = [probe(size, HOOKS, size) for size in (64, 128, 100)] + [probe(100, HOOKS, 101, "throughput", 1)]
    records += [probe(90, HOOKS, 90, "throughput", round) for round in (1, 2, 3)]
    rows = found(records)
    hooks = rows.loc["opacus-hooks"]
    assert (hooks.batch_size, hooks.misfit, hooks.n, hooks.failed) == (90, 100, 3, 0)
    chapter = next(c for c in contents.build(records).chapters if c.title == "Memory frontier")
    assert "opacus-hooks: 100 fitted in the search and did not in a further process." in markdown.table(
        chapter.grids[0]
    )


def test_lower_bounds_and_endings_are_marked_and_explained() -> None:
    chapter = next(c for c in contents.build(searched()).chapters if c.title == "Memory frontier")
    text = markdown.table(chapter.grids[0])
    assert "| opacus-hooks | 100 | 104 | 100 | 1020 | 102 [101, 103] | 300 |" in text
    assert "≥ 256" in text and "≥ 64" in text
    assert "crashed: dpcore-engine: it fell over" in text
    assert "no larger size was tried" in text and "pytorch-eager" in text
    assert chapter.in_terminal and set(chapter.frames) == {"frontier", "frontier-probes"}


def test_only_the_latest_run_of_a_contestant_counts_and_other_kinds_are_left_out() -> None:
    older = [probe(64, HOOKS, 50, run="run-0", started="2026-11-19T08:00:00+00:00")]
    assert found([*older, *searched(), record()]).loc["opacus-hooks"].probes == 6


def test_a_probe_without_a_gate_does_not_count() -> None:
    records = [r.model_copy(update={"gate": None}) for r in searched()]
    assert found(records).batch_size.isna().all()


def test_the_figure_stands_alone() -> None:
    chapter = next(c for c in contents.build(searched()).chapters if c.title == "Memory frontier")
    figure = chapter.pictures[0].draw()
    words = figures.words(figure)
    assert "AMD EPYC" in words and "20 Nov 2026" in words and "fits into 100 MiB" in words
    titles = [one["layer"][0]["encoding"]["y"]["axis"]["title"] for one in figures.panels(figure)]
    assert titles == ["examples per second (log)", "peak MiB (log)"]
