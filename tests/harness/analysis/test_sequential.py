"""The sequential comparison: limits against simulation, error rates of whole calls, power, and what is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from harness.analysis import sequential
from harness.analysis.sequential import FIRST_LOOK, Rule, judge, limits
from tests.support.simulations import follow

ROUNDS = 20


def paths(effect: float, sd: float, trials: int, seed: int, heavy: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.standard_t(3, (trials, ROUNDS)) / math.sqrt(3) if heavy else rng.standard_normal((trials, ROUNDS))
    return math.log1p(effect) + sd * noise


@pytest.mark.parametrize("alpha", [0.05, 0.0125])
def test_limits_are_crossed_as_often_as_they_say(alpha):
    x = paths(0.0, 1.0, 200_000, seed=1)
    n = np.arange(1, ROUNDS + 1)
    mean = np.cumsum(x, 1) / n
    sd = np.sqrt((np.cumsum(x * x, 1) - n * mean**2) / np.maximum(n - 1, 1))[:, FIRST_LOOK - 1 :]
    t = np.abs(mean[:, FIRST_LOOK - 1 :]) * np.sqrt(n[FIRST_LOOK - 1 :]) / sd
    crossed = t > np.array(limits(alpha, FIRST_LOOK, ROUNDS))
    spread = 3 * math.sqrt(alpha / len(x))
    assert crossed.any(1).mean() == pytest.approx(alpha, abs=spread + 0.004 * alpha)
    for n_now in (8, 14):  # and at every look no more than was to be spent until then
        until = alpha * (n_now / ROUNDS) ** 2
        assert crossed[:, : n_now - FIRST_LOOK + 1].any(1).mean() == pytest.approx(until, rel=0.08)
    # The same looks with Student's own 95 % limit, for comparison: this is why it is not used.
    naive = t > special.stdtrit(n[FIRST_LOOK - 1 :] - 1, 0.975)
    assert naive.any(1).mean() > 0.15


def test_one_look_is_students_test():
    assert limits(0.05, 12, 12)[0] == pytest.approx(special.stdtrit(11, 0.975))


def test_a_finer_grid_changes_no_limit(monkeypatch):
    coarse = limits(0.01, 5, 20)
    monkeypatch.setattr(sequential, "GRID", 2 * sequential.GRID)
    assert limits.__wrapped__(0.01, 5, 20) == pytest.approx(coarse, rel=5e-3)


@pytest.mark.parametrize("bad", [(0.0, 5, 20), (1.0, 5, 20), (0.05, 1, 20), (0.05, 6, 5)])
def test_impossible_limits_are_refused(bad):
    with pytest.raises(ValueError, match="Limits need"):
        limits(*bad)


@pytest.mark.parametrize("cells", [1, 4, 8])
@pytest.mark.parametrize("heavy", [False, True])
def test_a_call_in_which_nothing_changed_raises_no_alarm_more_often_than_alpha(cells, heavy):
    """All looks and all cells of a call together; Student's t with 3 degrees of freedom as a machine with outliers."""
    calls = 4000
    course = follow(paths(0.0, 0.06, calls * cells, 7 + cells, heavy), Rule(cells=cells, threshold=0.001))
    different = course.different.reshape(calls, cells).any(1).mean()
    alarm = course.alert.reshape(calls, cells).any(1).mean()
    assert alarm <= different <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / calls)
    if not heavy:  # a test that never alarms would pass, too
        assert different > 0.03


@pytest.mark.parametrize(("sd", "most_pairs"), [(0.015, 5.5), (0.05, 10.0)])
def test_ten_percent_are_found_in_few_pairs(sd, most_pairs):
    course = follow(paths(0.10, sd, 4000, seed=3), Rule(cells=4))
    assert course.alert.mean() >= 0.99
    assert course.stopped.mean() <= most_pairs


def test_equal_sides_are_called_equivalent_and_soon_on_a_quiet_machine():
    quiet = follow(paths(0.0, 0.015, 4000, seed=4), Rule(cells=4))
    assert quiet.equivalent.mean() > 0.95 and quiet.stopped.mean() < 6
    noisy = follow(paths(0.0, 0.05, 4000, seed=5), Rule(cells=4))
    assert noisy.equivalent.mean() > 0.9 and noisy.stopped.mean() < 15


@pytest.mark.parametrize("sd", [0.02, 0.05])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_at_the_threshold_is_rarely_called_equivalent(sd, sign):
    """Or small: ``within`` counts whether or not a difference was found, too."""
    x = sign * paths(0.05, sd, 4000, seed=6)
    rule = Rule()
    within = [judge(row[: follow(row[None], rule).stopped[0]], rule).within for row in x[:600]]
    assert np.mean(within) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)


def test_the_interval_holds_the_truth_at_all_looks():
    rule = Rule(cells=2)
    found = [
        all(abs(f.low) <= 1.03 <= f.high for n in range(FIRST_LOOK, ROUNDS + 1) if (f := judge(row[:n], rule)).low)
        for row in paths(0.03, 0.04, 500, seed=8)
    ]
    assert np.mean(found) == pytest.approx(1 - 0.05 / 2, abs=0.024)


def test_one_judgement_and_many_agree():
    rule = Rule(cells=3)
    x = np.concatenate([paths(e, 0.03, 60, seed=i) for i, e in enumerate((0.0, 0.03, 0.06, -0.08))])
    course = follow(x, rule)
    for row, stopped, alert, different in zip(x, course.stopped, course.alert, course.different, strict=True):
        earlier = [judge(row[:n], rule) for n in range(1, stopped)]
        last = judge(row[:stopped], rule)
        assert not any(f.is_clear for f in earlier)
        assert last.is_clear or stopped == rule.rounds
        assert (last.alert, last.verdict in ("slower", "faster")) == (alert, different)
    with pytest.raises(ValueError, match="blocks"):
        follow(x[:, :5], rule)


def test_what_is_said_of_clear_cases():
    rule = Rule()
    slower = judge([0.10, 0.11, 0.09, 0.10, 0.10], rule)
    assert (slower.verdict, slower.alert, slower.beyond, slower.is_clear) == ("slower", True, True, True)
    faster = judge([-0.10, -0.11, -0.09, -0.10, -0.10], rule)
    assert (faster.verdict, faster.alert, faster.is_clear) == ("faster", False, True)
    equal = judge([0.001, -0.001, 0.002, -0.002, 0.0], rule)
    assert (equal.verdict, equal.is_clear) == ("equivalent", True)
    small = judge([0.020, 0.019, 0.021, 0.020, 0.020], rule)  # surely there, surely below the threshold
    assert (small.verdict, small.within, small.alert, small.is_clear) == ("slower", True, False, True)
    open_ = judge([0.2, -0.2, 0.1, -0.1, 0.05], rule)
    assert (open_.verdict, open_.is_clear) == ("ambiguous", False)
    # There beyond doubt and above the threshold by the estimate, though the interval reaches below the threshold.
    alert = judge([0.10, 0.05, 0.07, 0.08, 0.09, 0.06], rule)
    assert (alert.alert, alert.beyond) == (True, False)


def test_before_the_first_look_there_is_no_interval():
    assert judge([], Rule()).ratio is None
    early = judge([0.5] * (FIRST_LOOK - 1), Rule())
    assert early.verdict is None and early.low is None and not early.is_clear


@pytest.mark.parametrize(("cells", "n", "sd"), [(4, 12, 0.05), (1, 8, 0.03), (1, 12, 0.05), (1, 6, 0.01)])
def test_the_smallest_effect_is_found_four_times_out_of_five(cells, n, sd):
    """At a fixed number of pairs, as it says; where both conditions of an alert bind (the two in the middle), too."""
    rule = Rule(cells=cells)
    effect = sequential.smallest_effect(sd, n, rule)
    found = [judge(row[:n], rule).alert for row in paths(effect, sd, 3000, seed=9)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.025)


def test_without_noise_the_smallest_effect_is_the_threshold():
    rule, n = Rule(cells=4), 12
    assert sequential.smallest_effect(0.001, n, rule) == pytest.approx(0.05, abs=0.001)


def led(times: tuple[float, ...], sd: float, trials: int = 200) -> list[tuple[int, str | None, int]]:
    """(who led when it was known, what, after how many rounds), of contestants with these times."""
    rng = np.random.default_rng(len(times))
    found = []
    for _ in range(trials):
        logs = np.log(times)[:, None] + sd * rng.standard_normal((len(times), 12))
        for n in range(1, 13):
            first = int(logs[:, :n].mean(1).argmin())
            rivals = [logs[i, :n] - logs[first, :n] for i in range(len(times)) if i != first]
            told = sequential.lead(rivals, 0.05, 0.03, 12)
            if told or n == 12:
                found.append((first, told, n))
                break
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_of_equal_contestants_hardly_ever_one_is_shown_as_the_fastest(count):
    found = led((1.0,) * count, 0.02)
    assert sum(told == "shown" for _, told, _ in found) <= 10 + 3 * math.sqrt(10)
    if count == 2:
        assert sum(told == "equal" for _, told, _ in found) > 60


def test_the_fastest_is_shown_in_few_rounds_and_is_the_right_one():
    found = led((1.0, 1.06, 1.2, 2.0), 0.01)
    assert sum((first, told) == (0, "shown") for first, told, _ in found) > 190
    assert 3 < np.mean([n for _, _, n in found]) < 8


def test_a_difference_of_the_margin_is_hardly_ever_called_equal():
    assert sum(told == "equal" for _, told, _ in led((1.0, 1.03), 0.02)) <= 10 + 3 * math.sqrt(10)
