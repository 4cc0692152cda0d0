"""The scores under their null distribution: right noise passes over many seeds, and known faults have known sizes."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from harness.gate import sampling as gate_sampling
from harness.gate.sampling import sampler_checks
from harness.worker.gate import correlation
from harness.worker.gate import noise as gate_noise

SHAPES = {"w": (40, 30), "b": (40,), "v": (30, 40), "c": (3,)}


def slices():
    found, end = {}, 0
    for name, shape in SHAPES.items():
        found[name] = slice(end, end + math.prod(shape))
        end = found[name].stop
    return found


PARAMETERS = sum(math.prod(shape) for shape in SHAPES.values())


def scores_of(seed, steps=16):
    rng = np.random.default_rng(seed)
    z, *others = rng.standard_normal((4, steps, PARAMETERS)).astype(np.float32)
    mean, spread = gate_noise.moments(z, slices())
    return {
        "mean": mean,
        "spread": spread,
        "normality": gate_noise.normality(z),
        "tails": gate_noise.tails(z),
        "fineness": gate_noise.fineness(z, np.zeros(PARAMETERS)),
        "coordinates": gate_noise.independent_coordinates(z, slices(), SHAPES),
        "alike": gate_noise.alike(z[:, :100], {"w": slice(0, 100)}),
        "shifts": gate_noise.independent_shifts(z),
        "steps": gate_noise.independent_steps(z, slices()),
        "runs": gate_noise.independent_runs(z, {k: other[:4] for k, other in enumerate(others)}, slices()),
        "again": gate_noise.repeated(z, slices()),
    }


def test_right_noise_passes_a_hundred_gates():
    for seed in range(100):
        failed = {name: score for name, score in scores_of(seed).items() if not score.passed}
        assert not failed, seed


def test_each_check_rejects_right_noise_no_more_often_than_it_says(monkeypatch):
    """At a level that can be counted; the limits of all checks follow from ALPHA."""
    monkeypatch.setattr(gate_noise, "ALPHA", 0.1)
    runs = 150
    rejected = Counter(name for seed in range(runs) for name, score in scores_of(seed).items() if not score.passed)
    most = stats.binom.isf(1e-4, runs, 0.1)
    assert all(count <= most for count in rejected.values()), rejected
    assert sum(rejected.values()) > 0.2 * runs, "checks that never reject would be no checks"


@pytest.mark.parametrize("expected", [6.0, 50.0, 2000.0])
def test_a_count_score_is_the_poisson_tail(expected):
    for score in (2.0, 4.5):
        few, many = (int(stats.poisson.ppf(p, expected)) for p in (stats.norm.cdf(-score), stats.norm.cdf(score)))
        for found, tail in ((few, stats.poisson.cdf(few, expected)), (many, stats.poisson.sf(many - 1, expected))):
            if tail < 0.4 and found:
                assert gate_noise.count_score(found, expected) == pytest.approx(stats.norm.isf(tail), abs=0.05)


@pytest.mark.parametrize("n", [20, 100, 3000])
def test_a_cosine_score_is_students_tail(n):
    for cosine in (0.3, 3.0 / math.sqrt(n)):
        a = np.zeros((1, n))
        b = np.zeros((1, n))
        a[0, 0] = 1.0
        b[0, :2] = cosine, math.sqrt(1 - cosine**2)
        t = cosine * math.sqrt((n - 1) / (1 - cosine**2))
        expected = stats.norm.isf(stats.t.sf(t, n - 1)) if t < 30 else None
        if expected is not None and np.isfinite(expected):
            assert gate_noise.cosine_score(a, b)[0, 0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("n", [gate_noise.SMALLEST_FOR_SPREAD, 30, 1000])
def test_spread_score_is_the_chi_square_tail(n):
    for probability in (1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6):
        square = stats.chi2.ppf(probability, n)
        score = gate_noise.spread_score(np.full(n, math.sqrt(square / n)))
        expected = stats.norm.ppf(probability)
        assert abs(score) <= abs(expected) + 0.12
        if n > gate_noise.SMALLEST_FOR_SPREAD or probability >= 0.5:
            assert score == pytest.approx(expected, abs=0.12)


def test_limits_are_bonferroni_tails():
    assert gate_noise.normal_limit(1) == pytest.approx(stats.norm.isf(gate_noise.ALPHA / 2), rel=1e-6)
    assert gate_noise.normal_limit(50) == pytest.approx(stats.norm.isf(gate_noise.ALPHA / 100), rel=1e-6)


def test_kolmogorov_distance_is_that_of_scipy():
    z = np.random.default_rng(3).uniform(-1.7, 1.7, 500)
    expected = stats.kstest(z, "norm").statistic * math.sqrt(500)
    assert gate_noise.normality(z[None]).value == pytest.approx(expected, rel=1e-12)


def test_nan_never_passes():
    z = np.random.default_rng(0).standard_normal((8, PARAMETERS))
    z[3, 5] = np.nan
    found = (gate_noise.normality(z), gate_noise.independent_steps(z, {}), gate_noise.tails(z))
    for score in (*gate_noise.moments(z, slices()), *found, gate_noise.independent_shifts(z)):
        assert not score.passed


def test_the_same_numbers_in_two_tensors_or_rows_show():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((8, PARAMETERS))
    parts = slices()
    shared = z.copy()
    shared[:, parts["v"]] = shared[:, parts["w"]]
    assert not gate_noise.independent_coordinates(shared, parts, SHAPES).passed
    repeated = z.copy()
    repeated[:, parts["w"]] = np.tile(rng.standard_normal((8, 30)), (1, 40))
    score = gate_noise.independent_coordinates(repeated, parts, SHAPES)
    assert not score.passed and score.where == "rows of w"


@pytest.mark.parametrize("parameters", [200, 3000])
@pytest.mark.parametrize("sign", [1, -1])
def test_two_coordinates_with_the_same_noise_show_and_are_named(parameters, sign):
    z = np.random.default_rng(0).standard_normal((42, parameters)).astype(np.float32)
    parts = {"w": slice(0, parameters - 10), "b": slice(parameters - 10, parameters)}
    assert gate_noise.alike(z, parts).passed
    z[:, -3] = sign * z[:, 17]
    score = gate_noise.alike(z, parts)
    assert not score.passed and set(score.where.split(" and ")) == {"value 17 of w", "value 7 of b"}


def toeplitz(column):
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(len(column))] for i in range(len(column))])


def test_noise_is_made_white_by_its_factor_and_by_no_other():
    steps = 60
    column = special.binom(-0.5, np.arange(steps)) * (-1.0) ** np.arange(steps)  # of (1 - x)^(-1/2), the prefix sums'
    z = np.random.default_rng(0).standard_normal((steps, PARAMETERS)).astype(np.float32)
    noise = np.linalg.solve(toeplitz(column), z)
    found = correlation.white(noise, correlation.factor(column, steps))
    assert found == pytest.approx(z, abs=1e-4)
    for right in (gate_noise.independent_steps(found, slices()), *gate_noise.moments(found, slices())):
        assert right.passed
    for wrong in (noise, correlation.white(noise, np.linalg.inv(toeplitz(column))[:, 0]), toeplitz(column) @ found):
        assert not gate_noise.independent_steps(wrong, slices()).passed
    assert correlation.white(noise, correlation.factor(None, steps)) is noise


@pytest.mark.parametrize("apart", [1, 4])
def test_a_tensor_with_another_ones_noise_of_an_earlier_step_shows(apart):
    z = np.random.default_rng(1).standard_normal((42, PARAMETERS)).astype(np.float32)
    assert gate_noise.independent_steps(z, slices()).passed
    parts = slices()
    z[apart:, parts["b"]] = z[:-apart, parts["w"]][:, :40]
    score = gate_noise.independent_steps(z, parts)
    assert not score.passed and score.where == f"w and b {apart} steps later"


def test_noise_on_a_grid_shows_but_not_what_float32_makes_of_fine_noise():
    fine = np.random.default_rng(0).standard_normal((42, 1000))
    grid = np.full(1000, 8e-6)
    assert gate_noise.fineness(np.round(fine / grid) * grid, grid).passed
    assert not gate_noise.fineness(fine.astype(np.float16).astype(float), grid).passed
    assert not gate_noise.fineness(np.round(fine / 1e-4) * 1e-4, grid).passed
    coarse = gate_noise.fineness(np.round(fine / 1e-3) * 1e-3, np.full(1000, 1e-3))
    assert coarse.passed and "too few" in coarse.where, "nothing can be told of it"


@pytest.mark.parametrize("n", [4000, 2**16])
def test_close_pairs_are_counted_as_the_law_says(n):
    scores = []
    for seed in range(150):
        z = np.random.default_rng(seed).standard_normal((1, n))
        found, _, _, values = gate_noise.fineness(z, np.zeros(n)).where.split()[:4]
        scores.append(int(found))
        assert int(values) == n
    expected = n * (n - 1) / 2 * math.erf(gate_noise.CLOSE / 2)
    assert np.mean(scores) == pytest.approx(expected, abs=5 * np.std(scores) / math.sqrt(150))
    assert np.var(scores) == pytest.approx(expected + n**3 * 4 * gate_noise.CLOSE**2 * 0.0123, rel=0.5)


def test_one_coordinate_without_noise_shows_and_is_named():
    z = np.random.default_rng(0).standard_normal((40, PARAMETERS))
    z[:, slices()["v"].start + 7] = 0.0
    mean, spread = gate_noise.moments(z, slices())
    assert mean.passed and not spread.passed and spread.where == "value 7 of v"


def test_little_of_an_earlier_step_in_each_later_one_shows_at_its_distance():
    fresh = np.random.default_rng(0).standard_normal((103, 105))
    score = gate_noise.independent_steps(fresh[3:] + 0.1 * fresh[:-3], {})
    assert not score.passed and score.where == "all steps 3 apart"


def test_values_that_serve_two_coordinates_show_in_the_spread_of_all_pairs():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((40, PARAMETERS))[:, rng.permutation(PARAMETERS) // 2]
    score = gate_noise.independent_steps(z, {})
    assert not score.passed and score.where == "spread over all pairs"


@pytest.mark.parametrize(("steps", "size"), [(60, 30), (40, 2000)])
def test_the_spread_over_all_pairs_of_right_noise_is_a_normal_score(steps, size):
    pairs = np.triu_indices(steps, 1)

    def score(seed):
        z = np.random.default_rng(seed).standard_normal((steps, size))
        return gate_noise.pairs_score(gate_noise.cosines(z, z)[pairs], steps, size)

    scores = [score(seed) for seed in range(200)]
    assert stats.kstest(scores, "norm").pvalue > 1e-3


def test_the_harness_samples_pass_and_other_samplers_fail_by_name():
    assert [check for check in sampler_checks() if not check["passed"]] == []
    rng = np.random.default_rng(1)
    rows, rate, steps = gate_sampling.ROWS, gate_sampling.RATE, gate_sampling.STEPS
    size = round(rows * rate)

    def failed(batches):
        return {check["check"] for check in sampler_checks(batches) if not check["passed"]}

    fixed = [rng.choice(rows, size, replace=False) for _ in range(steps)]
    assert failed(fixed) == {"sampler: batch sizes are binomial"}
    again = [rng.integers(rows, size=rng.binomial(rows, rate)) for _ in range(steps)]
    assert "sampler: no row twice in a batch" in failed(again)
    shuffled = np.concatenate([rng.permutation(rows) for _ in range(-(-steps * size // rows))])
    epochs = [shuffled[t * size : (t + 1) * size] for t in range(steps)]
    assert "sampler: every row at rate q" in failed(epochs)
    favoured = [np.flatnonzero(rng.random(rows) < np.where(np.arange(rows) == 7, 2 * rate, rate)) for _ in range(steps)]
    assert failed(favoured) == {"sampler: every row at rate q"}
    sticky = [np.flatnonzero(rng.random(rows) < rate) for _ in range(steps)]
    sticky[1::2] = sticky[::2]
    assert "sampler: rows and steps independent" in failed(sticky)
