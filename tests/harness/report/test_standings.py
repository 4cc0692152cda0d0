"""Who wins where and by how much, in words."""

from __future__ import annotations

import pytest

from harness.analysis import frames, pairs
from harness.analysis.pairs import foremost
from harness.analysis.standing import standings
from harness.report import standings as words
from tests.support import record_factory as factory


def built(seconds, disturbed=(), **more):
    """Tables of one task. ``seconds``: (framework, variant) -> {round: seconds}; ``disturbed``: rounds that are."""
    records = [
        factory.record(
            framework=framework,
            variant=variant,
            private=framework != "pytorch",
            seconds=[value],
            round=number,
            disturbed=number in disturbed,
            **more,
        )
        for (framework, variant), values in seconds.items()
        for number, value in values.items()
    ]
    return frames.build(records)


def rounds(*values):
    return dict(enumerate(values))


PLAIN = {("pytorch", "eager"): rounds(1.0, 1.0, 1.0)}
THREE = {("a", "x"): rounds(1.0, 1.02, 1.01), ("b", "x"): rounds(2.0, 2.1, 2.05)}


def only(tables):
    (found,) = standings(tables).values()
    return found


def test_a_lead_that_the_rounds_show_has_its_factor_its_interval_and_its_price():
    tables = built(PLAIN | THREE)
    found = only(tables)
    assert found.is_shown and (found.first, found.runner_up.contestant) == ("a-x", "b-x")
    assert found.runner_up.times.ratio == pytest.approx(2.03, abs=0.01) and found.runner_up.times.low > 1
    assert found.price.contestant == "pytorch-eager" and found.price.times.ratio == pytest.approx(1.01, abs=1e-3)
    told = words.text(tables)
    assert told.startswith(
        "**With DP the fastest is a-x on `mnist-cnn` at 512 (2.03×, shown).** 1 of 1 leads is shown."
    )
    assert "- `mnist-cnn` at 512: a-x is first; b-x, the next, takes 2.03 times its time [" in told
    assert ", n = 3 (shown). It takes 1.01 times the time of PyTorch without DP [" in told


def test_a_lead_within_its_interval_and_one_that_a_third_contestant_shares():
    near = built({("a", "x"): rounds(1.0, 1.1, 1.0), ("b", "x"): rounds(1.05, 1.0, 1.1)})
    assert not only(near).is_shown and "within the interval" in words.text(near)
    # The second is told from the leader, the third, whose rounds differ much, is not.
    third = built(THREE | {("c", "x"): rounds(0.9, 9.0, 9.0)})
    assert [p.contestant for p in only(third).level] == ["c-x"] and not only(third).is_shown
    assert "(2.03×, not shown of all).** 0 of 1 leads are shown" in words.text(third)
    assert "; the intervals of c-x hold 1." in words.text(third)


@pytest.mark.parametrize(("count", "many"), [(1, "one process each"), (2, "two processes each")])
def test_one_or_two_processes_are_named(count, many):
    told = words.text(built({("a", "x"): rounds(*[1.0] * count), ("b", "x"): rounds(*[2.0] * count)}))
    assert f"(2.00×, {many}).**" in told
    assert ("1 rests on one process each" in told) == (count == 1)


def test_disturbed_rounds_show_nothing():
    told = words.text(built(THREE, disturbed=(0, 1, 2)))
    assert "(2.03×, disturbed).** 0 of 1 leads are shown" in told


def test_who_was_timed_alone_leads_nobody_and_variants_of_a_framework_are_no_rivals():
    alone = built({("a", "x"): rounds(1.0), ("a", "y"): rounds(1.1)})
    assert only(alone).runner_up is None and "only a-x was timed with DP" in words.text(alone)
    assert only(built(THREE | {("a", "y"): rounds(1.01, 1.02, 1.01)})).runner_up.contestant == "b-x"


def test_the_leader_is_the_one_of_the_paired_rounds_not_of_the_median():
    # b has one round more, in which the machine was fast.
    sides = pairs.by_block(built({("a", "x"): {0: 1.0, 1: 1.0}, ("b", "x"): {0: 1.2, 1: 1.2, 2: 0.5, 3: 0.5}}).raw)
    assert min(pairs.medians_of(sides), key=pairs.medians_of(sides).__getitem__) == "b-x"
    assert foremost(sides) == "a-x"


def test_contestants_that_beat_each_other_in_a_circle_stand_by_their_medians():
    circle = {"a-x": {0: (1.0, False), 1: (3.0, False)}, "b-x": {0: (2.0, False), 2: (1.0, False)}}
    circle["c-x"] = {1: (2.0, False), 2: (2.5, False)}
    assert foremost(circle) == "b-x"


def test_tasks_stand_in_their_order_and_synthetic_data_are_named():
    both = frames.build(
        [
            factory.record(framework=f, task=task, synthetic=task == "mnist-cnn", extrapolated=True, seconds=[s])
            for task in ("imdb-lstm", "mnist-cnn")
            for f, s in (("a", 1.0), ("b", 1.5))
        ]
    )
    told = words.text(both)
    assert "a-hooks on `mnist-cnn` at 512 (synthetic data) (1.50×, one process each), `imdb-lstm` at 512" in told
    assert "2 rest on one process each" in told and "Times are extrapolated" in told


def test_nobody_with_dp_means_no_words():
    assert words.text(built(PLAIN)) == ""
