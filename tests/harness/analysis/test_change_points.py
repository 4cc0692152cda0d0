"""Change points: false alarms, power and delay by simulation with fixed seeds; exact series with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis import change_points
from tests.support import simulations


@pytest.mark.parametrize("kind", simulations.INDEPENDENT)
def test_noise_alone_raises_no_more_alarms_than_stated(kind):
    """40 series-years expect 0.1 of the stated 1 in 100; two would come by chance in less than 6 % at that bound."""
    found = [change_points.find(values) for values in simulations.series(365, 40, seed=3, kind=kind)]
    assert sum(len(f.alarms) for f in found) <= 1
    assert sum(len(f.steps) for f in found) <= 1


def test_runs_on_two_levels_are_no_steps_and_a_step_among_them_is_one():
    """30 % of the runs take 4 % longer, which is eight times the noise of either level."""
    noise = list(simulations.series(365, 20, seed=12, kind="levels"))
    found = [change_points.find(values) for values in noise]
    assert not any(f.alarms for f in found)
    assert all(f.noise is not None and f.noise.heaviness > 2 for f in found)
    for values in simulations.series(365, 10, seed=13, kind="levels", effect=0.2, at=180):
        (step,) = change_points.find(values).steps
        assert step.first - 2 <= 180 <= step.last + 2 and step.alarm - 180 < 40


def test_normal_noise_pays_no_more_for_a_step_than_before():
    for values in simulations.series(365, 10, seed=14):
        found = change_points.find(values).noise
        assert found is not None and found.heaviness < 1.15


def test_correlated_noise_raises_no_more_alarms_than_its_own_figure():
    """Which is above the bound of independent noise, and says so."""
    one_year, two_years = change_points.ALARMS_PER_100_YEARS["correlated"]
    assert min(one_year, two_years) > 1.0 and max(one_year, two_years) < 5.0
    found = [change_points.find(values) for values in simulations.series(365, 100, seed=15, kind="correlated")]
    assert sum(len(f.alarms) for f in found) <= 9  # 3.75 are expected, and more than 9 come in 0.5 % of cases


@pytest.mark.slow
@pytest.mark.parametrize("kind", simulations.INDEPENDENT)
def test_the_stated_false_alarm_rate_over_400_series_years(kind):
    alarms = sum(len(change_points.find(v).alarms) for v in simulations.series(730, 200, seed=5, kind=kind))
    assert alarms <= 8  # 4 are the stated bound; more than 8 would come in 2 % of cases at that rate


@pytest.mark.parametrize(
    ("noise", "effect", "found_share", "delay"),
    [
        (0.015, 0.10, 1.0, 5),
        (0.015, 0.05, 1.0, 8),
        (0.015, 0.02, 0.9, 40),
        (0.05, 0.10, 1.0, 16),
        (0.05, 0.05, 0.8, 80),
    ],
)
def test_steps_are_found_with_the_delay_that_is_stated(noise, effect, found_share, delay):
    """100 runs before, 150 after; the place within 95 % ranges, the ratio within its interval."""
    hits = []
    for values in simulations.series(250, 20, seed=11, sd=noise, effect=effect, at=100):
        found = change_points.find(values)
        hits += [s for s in found.steps if s.first - 5 <= 100 <= s.last + 5]
        assert len(found.steps) <= 1, "one step, not a staircase"
    assert len(hits) >= found_share * 20
    assert np.median([s.alarm - 100 + 1 for s in hits]) <= delay
    assert np.mean([s.low <= 1 + effect <= s.high for s in hits]) >= 0.8
    assert np.mean([s.first <= 100 <= s.last for s in hits]) >= 0.8
    assert all(s.confidence >= 0.99 for s in hits)


def test_a_step_down_is_found_like_one_up():
    (values,) = simulations.series(120, 1, seed=2, effect=-0.1, at=60)
    (step,) = change_points.find(values).steps
    assert step.at == 60 and 0.88 < step.low < step.ratio < step.high < 0.92


def test_slow_runs_that_go_back_are_no_steps():
    (values,) = simulations.series(200, 1, seed=4)
    values[100] *= 5
    values[150:153] *= 1.5
    assert change_points.find(values).steps == ()


def test_a_step_needs_as_many_runs_after_it_as_stated():
    (values,) = simulations.series(400, 1, seed=6, effect=1.0, at=300)
    needed = change_points.find(values[:300]).shortest
    assert 3 <= needed <= 6
    assert change_points.find(values[: 300 + needed - 1]).steps == ()
    (step,) = change_points.find(values[: 300 + needed + 1]).steps
    assert step.at == 300 and step.alarm - 300 + 1 in (needed, needed + 1)


def test_an_alarm_stays_what_it_was_when_runs_are_added():
    (values,) = simulations.series(300, 1, seed=8, effect=0.05, at=150)
    (final,) = change_points.find(values).steps
    for until in (final.alarm + 1, final.alarm + 20, 299):
        (step,) = change_points.find(values[:until]).steps
        assert step.alarm == final.alarm
    assert change_points.find(values[: final.alarm]).steps == ()


def test_two_steps_near_each_other_keep_their_alarms_when_runs_are_added():
    """The second is so near that it moves the first alarm's place no further than a re-placed step would."""
    (values,) = simulations.series(120, 1, seed=2, effect=0.2, at=60)
    values[66:] *= 1.2
    found = [change_points.find(values[:until]).steps for until in (80, 85, 90, 120)]
    assert [s.at for s in found[0]] == [60, 66]
    assert len({tuple(s.alarm for s in each) for each in found}) == 1
    assert all(s.alarm <= s.at + 8 for s in found[0])


def test_correlated_noise_raises_the_bar_by_itself():
    independent = change_points.noise(np.log(simulations.series(700, 1, seed=1)[0]))
    correlated = change_points.noise(np.log(simulations.series(700, 1, seed=1, kind="correlated")[0]))
    assert independent.inflation < 1.2 < 1.8 < correlated.inflation


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=60), st.integers(0, 3))
def test_segments_tile_any_series_and_steps_lie_between_them(values, repeats):
    found = change_points.find(values * (repeats + 1))
    n = len(values) * (repeats + 1)
    ends = [0, *(s.stop for s in found.segments)]
    assert ends[-1] == n and [s.start for s in found.segments] == ends[:-1]
    assert [s.at for s in found.steps] == ends[1:-1]
    for s in found.steps:
        assert 0 < s.first <= s.at <= s.last < n and s.at <= s.alarm < n and 0.99 <= s.confidence <= 1
        assert s.low <= s.ratio <= s.high


def test_few_runs_and_bad_values():
    assert change_points.find([]).segments == ()
    few = change_points.find([1.0] * 3 + [9.0] * 6)
    assert few.steps == () and few.noise is None and len(few.segments) == 1
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive"):
            change_points.find([1.0, bad])


def test_exact_bytes_step_at_any_lasting_change():
    found = change_points.exact([100, 100, 104, 104, 104, 999, 104, 90, 90])
    assert [(s.at, s.ratio, s.alarm) for s in found.steps] == [(2, 1.04, 3), (7, 90 / 104, 8)]
    assert [(s.start, s.stop, s.level) for s in found.segments] == [(0, 2, 100), (2, 7, 104), (7, 9, 90)]
    assert change_points.exact([100, 101]).steps == () and change_points.exact([]).segments == ()
    assert change_points.exact([7, 100, 100, 100]).steps == (), "the very first run may be the odd one"
