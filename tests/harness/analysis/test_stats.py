"""Statistics against answers computed by hand or by another route, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from harness.analysis import stats
from tests.support import simulations


def test_a_process_contributes_the_median_of_its_epochs():
    assert stats.process_value([3.0, 1.0, 100.0]) == 3.0


@pytest.mark.parametrize("epochs", [[], [1.0, float("nan")], [0.0], [-1.0], [float("inf")]])
def test_impossible_epochs_are_refused(epochs):
    with pytest.raises(ValueError, match="positive finite"):
        stats.process_value(epochs)


def test_median_interval_of_ten_values_is_second_to_ninth():
    # Bin(10, 1/2): 1 - 2 * (1 + 10) / 1024 = 0.9785; the next narrower one, 1 - 2 * 56 / 1024 = 0.891, is too narrow.
    result = stats.median_interval([10, 9, 8, 7, 6, 5, 4, 3, 2, 1])
    assert (result.median, result.low, result.high, result.n) == (5.5, 2.0, 9.0, 10)
    assert result.coverage == pytest.approx(1 - 22 / 1024)


def test_few_values_give_their_range_with_its_true_coverage():
    result = stats.median_interval([2.0, 1.0, 4.0])
    assert (result.median, result.low, result.high) == (2.0, 1.0, 4.0)
    assert result.coverage == pytest.approx(0.75)
    assert stats.median_interval([7.0]).coverage == 0.0
    with pytest.raises(ValueError):
        stats.median_interval([])


def test_median_interval_covers_as_stated():
    rng = np.random.default_rng(5)
    results = [stats.median_interval(row) for row in rng.exponential(size=(3000, 9))]
    hits = np.mean([r.low <= math.log(2) <= r.high for r in results])
    assert hits == pytest.approx(results[0].coverage, abs=0.012)


def test_log_ratios_pair_only_blocks_that_hold_both():
    x = stats.paired_log_ratios({1: 1.0, 2: 2.0, 3: 3.0}, {3: 6.0, 1: 1.0, 9: 5.0})
    assert x == pytest.approx([0.0, math.log(2)])


def test_interval_equals_a_paired_t_test_of_another_library():
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0, 0.1, 8), rng.lognormal(0.1, 0.1, 8)
    ours = stats.compare(np.log(b / a))
    theirs = scipy_stats.ttest_rel(np.log(b), np.log(a)).confidence_interval(0.95)
    assert math.log(ours.low) == pytest.approx(theirs.low)
    assert math.log(ours.high) == pytest.approx(theirs.high)


@pytest.mark.parametrize(
    ("x", "verdict", "not_slower"),
    [
        ([0.69, 0.70, 0.69, 0.70, 0.69], "faster", True),
        ([-0.69, -0.70, -0.69, -0.70, -0.69], "slower", False),
        ([0.001, -0.001, 0.002, -0.002, 0.0], "equivalent", True),
        ([0.5, -0.5, 0.3, -0.3, 0.0], "ambiguous", False),
        # found, but smaller than the margin: named slower, and still not slower by more than 5 %
        ([-0.010, -0.011, -0.009, -0.010, -0.010], "slower", True),
    ],
)
def test_verdicts_on_series_with_known_answers(x, verdict, not_slower):
    result = stats.compare(x)
    assert (result.verdict, result.not_slower) == (verdict, not_slower)


def test_a_small_but_certain_difference_is_named_and_marked_as_within_the_margin():
    result = stats.compare([0.020, 0.019, 0.021, 0.020, 0.020])
    assert (result.verdict, result.within_margin) == ("faster", True)


def test_under_five_rounds_there_is_an_interval_and_no_verdict():
    result = stats.compare([0.7, 0.7, 0.71, 0.69])
    assert result.verdict is None and result.not_slower is None
    assert result.low < 2.02 < result.high
    single = stats.compare([0.7])
    assert single.verdict is None and math.isnan(single.low)


def test_equivalence_needs_evidence_and_not_only_a_missing_difference():
    noisy = [0.09, -0.08, 0.07, -0.09, 0.02]
    assert stats.compare(noisy).verdict == "ambiguous"
    assert stats.compare(noisy, margin=0.5).verdict == "equivalent"


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="at least one block"):
        stats.compare([])
    with pytest.raises(ValueError, match="margin"):
        stats.compare([0.1, 0.2], margin=0.0)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12))
def test_swapping_the_contestants_mirrors_the_answer(x):
    there, back = stats.compare(x), stats.compare([-v for v in x])
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert back.low == pytest.approx(1 / there.high)
    mirror = {"faster": "slower", "slower": "faster"}
    assert back.verdict == mirror.get(there.verdict, there.verdict)


@pytest.mark.parametrize("rounds", [5, 10])
def test_equal_contestants_are_called_different_in_at_most_six_percent(rounds):
    shares = simulations.verdicts(rounds, effect=0.0, trials=4000, seed=rounds)
    assert 0.035 <= shares["faster"] + shares["slower"] <= 0.06
    assert shares["none"] == 0


def test_a_true_two_percent_is_found_at_ten_rounds():
    assert simulations.verdicts(10, effect=0.02, trials=2000, seed=1)["faster"] >= 0.9
    assert simulations.verdicts(10, effect=-0.02, trials=2000, seed=2)["slower"] >= 0.9


def test_drift_between_blocks_changes_nothing():
    calm = simulations.verdicts(10, 0.02, 500, 3, simulations.Noise(drift_sd=0.0))
    stormy = simulations.verdicts(10, 0.02, 500, 3, simulations.Noise(drift_sd=0.5))
    assert stormy["faster"] == pytest.approx(calm["faster"], abs=0.01)


def test_a_difference_at_the_margin_is_called_equivalent_in_at_most_six_percent():
    # A noisy pair: with the standard noise a 5 % difference is always found, and "slower" goes before "equivalent".
    shares = simulations.verdicts(10, effect=0.05, trials=4000, seed=4, noise=simulations.Noise(paired_sd=0.03))
    assert shares["equivalent"] <= 0.06


def test_too_few_rounds_never_give_a_verdict():
    assert simulations.verdicts(4, 0.5, 50, 0)["none"] == 1.0


def against_equals(rounds: int, others: int, trials: int, slower: float = 0.0):
    """[trials] of (log of the ratio against the one that looked fastest, its Student's interval, the interval against
    the truly fastest), where all others are equal and the contestant takes ``slower`` (log) longer."""
    rng = np.random.default_rng(17)
    own = slower + rng.normal(0.0, 0.01, (trials, rounds, 1))
    ratios = own - rng.normal(0.0, 0.01, (trials, rounds, others))
    for several in ratios:
        fastest = several[:, int(np.argmax(several.mean(axis=0)))]
        yield (
            float(fastest.mean()),
            stats.t_interval(fastest, 0.95),
            stats.against_fastest(list(several.T)),
        )


@pytest.mark.parametrize("rounds", [3, 5])
def test_against_the_fastest_of_twelve_equals_the_interval_keeps_its_promise(rounds):
    """Student's does not: whoever looks fastest was lucky, too."""
    seen = list(against_equals(rounds, 12, 800))
    naive = np.mean([low <= 0 <= high for _, (low, high), _ in seen])
    kept = np.mean([low <= 0 <= high for _, _, (low, high) in seen])
    called_slower = np.mean([low > 0 for _, _, (low, _) in seen])
    assert naive < 0.94 <= kept and called_slower <= 0.035, (naive, kept, called_slower)  # 0.025, and twice its error
    assert all(low <= mean <= high for mean, _, (low, high) in seen)
    assert 0.005 < np.mean([mean for mean, _, _ in seen]) < 0.02, "the bias that the note names"


def test_against_a_single_other_it_is_students_interval():
    x = np.array([0.01, 0.03, -0.02, 0.02])
    assert stats.against_fastest([x]) == stats.t_interval(x, 0.95)
    assert stats.against_fastest([x, np.array([5.0])]) == stats.t_interval(x, 0.95)
    assert all(math.isnan(end) for end in stats.against_fastest([np.array([0.1])]))


def test_who_is_slower_than_the_fastest_is_called_so_where_rounds_suffice():
    ends = [low for _, _, (low, _) in against_equals(8, 12, 300, slower=0.10)]
    assert np.mean([low > 0 for low in ends]) > 0.95
