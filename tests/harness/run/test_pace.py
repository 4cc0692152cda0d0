"""How long a run goes on: when time is up, and which blocks want further rounds."""

from __future__ import annotations

import pytest

from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import registry
from harness.run.pace import Pace
from tests.support import record_factory as factory


def pairs(rounds, spread, size=64):
    """Rounds of a private contestant and of PyTorch without DP, whose ratio varies by ``spread``."""
    return [
        factory.record(
            framework=framework,
            variant=variant,
            private=private,
            batch_size=size,
            round=i,
            order=order,
            seconds=[seconds],
        )
        for i in range(rounds)
        for order, (framework, variant, private, seconds) in enumerate(
            (("pytorch", "eager", False, 1.0), ("opacus", "hooks", True, 2.0 * (1 + spread * (i % 2))))
        )
    ]


@pytest.mark.parametrize(
    ("records", "still_open"),
    [
        (pairs(6, 0.005), []),
        (pairs(6, 0.5), [("mnist-cnn", 64)]),
        (pairs(4, 0.0), [("mnist-cnn", 64)]),
        (pairs(6, 0.005) + pairs(6, 0.5, size=512), [("mnist-cnn", 512)]),
    ],
    ids=["narrow", "wide", "too few rounds", "one of two"],
)
def test_blocks_are_open_while_an_interval_is_wide_or_its_rounds_are_few(tmp_path, records, still_open):
    factory.write(records, tmp_path / "records")
    assert Pace(minutes=1).open_blocks(tmp_path / "records") == still_open


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
    seventh, eighth = (plan.further_round(options, contestants, number, blocks) for number in (6, 7))
    for jobs in (seventh, eighth):
        assert {(job.cell.task, job.cell.batch_size) for job in jobs} == set(blocks)
        assert len(jobs) == 2 * len(contestants) and {job.purpose for job in jobs} == {"time"}
    assert [job.contestant for job in seventh] != [job.contestant for job in eighth]
    assert seventh == plan.further_round(options, contestants, 6, blocks)
