"""How long a run goes on: when time is up, and which blocks want further rounds."""

from __future__ import annotations

import pytest

from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import registry
from harness.run.pace import Pace
from tests.support import record_factory as factory


def rounds(count, spread, size=64, rivals=(2.0,)):
    """Rounds of PyTorch without DP, of a contestant with DP that takes 1.9 s, and of other frameworks' ``rivals``. What
    those take goes up and down by ``spread``."""
    others = [("opacus", "jax", "tfp")[i] for i in range(len(rivals))]
    private = [("dpcore", 1.9, 0.0), *((name, seconds, spread) for name, seconds in zip(others, rivals, strict=True))]
    return [
        factory.record(
            framework=framework,
            private=framework != "pytorch",
            batch_size=size,
            round=i,
            seconds=[s * (1 + e * (i % 2))],
        )
        for i in range(count)
        for framework, s, e in [("pytorch", 1.0, 0.0), *private]
    ]


@pytest.mark.parametrize(
    ("records", "known"),
    [
        (rounds(3, 0.001), {64: (3, "shown")}),
        (rounds(2, 0.001), {64: (2, None)}),
        (rounds(6, 0.3), {64: (6, None)}),
        (rounds(6, 0.002, rivals=(1.9, 3.0)), {64: (6, "equal")}),
        (rounds(6, 0.002, rivals=(2.0, 1.902, 3.0)) + rounds(4, 0.3, 512), {64: (6, "equal"), 512: (4, None)}),
        (rounds(6, 0.0, rivals=()), {64: (6, "narrow")}),
        (rounds(4, 0.0, rivals=()), {64: (4, None)}),
    ],
    ids=["shown", "two sessions", "wide", "equal", "two sizes", "nobody else", "nobody else, few"],
)
def test_sessions_go_on_until_the_fastest_is_known(tmp_path, records, known):
    factory.write(records, tmp_path / "records")
    assert Pace(minutes=1).known(tmp_path / "records", 12) == {("mnist-cnn", size): k for size, k in known.items()}


@pytest.mark.parametrize(("minutes", "seconds", "over"), [(None, 1e9, False), (2, 119, False), (2, 120, True)])
def test_time_is_up_after_the_minutes(minutes, seconds, over):
    assert Pace(minutes=minutes).is_over(seconds) is over


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_minutes_that_nobody_can_measure_for_are_refused(minutes):
    with pytest.raises(BadInput, match="--minutes"):
        Pace(minutes=minutes)


def test_a_further_round_holds_the_open_blocks_in_an_order_of_its_own():
    options = plan.preset("quick")
    contestants = registry.select(options.frameworks)
    blocks = [("mnist-cnn", 64), ("imdb-embedding", 512)]
    rounds = [plan.further_round(options, contestants, number, blocks) for number in range(6, 12)]
    for jobs in rounds:
        assert {(job.cell.task, job.cell.batch_size) for job in jobs} == set(blocks)
        assert len(jobs) == 2 * len(contestants) and {job.purpose for job in jobs} == {"time"}
    assert len({tuple(job.contestant.name for job in jobs) for jobs in rounds}) > 3
    assert rounds[0] == plan.further_round(options, contestants, 6, blocks)
