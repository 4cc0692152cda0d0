"""Is it Gaussian noise? Statistics with known distributions under "independent N(0, 1)", as pure functions.

Each returns an absolute standard score (or D sqrt(n)) and belongs to a limit that a right adapter exceeds with
probability below ALPHA, Bonferroni's bound over the number of scores taken. Standard library and numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

ALPHA = 7e-8
"""Chance of one false alarm per check; a gate has fourteen of them (docs/protocol.md): 1e-6 together."""

SMALLEST_FOR_SPREAD = 8
"""Wilson and Hilferty's approximation of chi-square is good from about here; where it errs, below, it errs to the side
of admitting."""

SMALLEST_FOR_CORRELATION = 1000
"""A sum of n products of normals has excess kurtosis 6/n: at 5 standard deviations the normal tail is right to 16 %."""

KOLMOGOROV_SAMPLE = 100_000
STREAM_VALUES = 2**21
PAIR_VALUES = 2**23
"""So many values, and so many products of pairs of steps at one shift, are looked at for shifts. A copy of m values
among n shows as m / sqrt(n) standard deviations; the limit is about 7.5."""

CLOSE = 1e-5
CLOSE_SAMPLE = 2**16
SMALLEST_FOR_CLOSE = 4_000
"""Distance below which two values are close; how many values are looked at; how few are too few."""

FEW_COORDINATES = 2**10
COMPARED_STEPS = 32
MEDIAN = 0.6744897501960817
"""Median of |N(0, 1)|."""

TENSOR_VALUES, NEAR_STEPS = 16, 4
"""First values of a tensor's noise that are compared with those of others under neighbouring seeds, of the first step,
and the most steps that the others are later by."""

LATE_FROM = 16
"""From so many steps on, the last quarter of every tensor is looked at by itself."""

SMALLEST_FOR_SHIFTS = 32
TAIL_THRESHOLDS = (2.0, 3.0, 4.0)
SMALLEST_COUNT = 5.0
"""Fewer values expected beyond a threshold say nothing."""


@dataclass(frozen=True)
class Score:
    """The largest of several scores, its limit and what it was the score of."""

    value: float
    limit: float
    where: str

    @property
    def passed(self) -> bool:
        return bool(self.value <= self.limit)


def normal_limit(tests: int) -> float:
    """|z| that the largest of ``tests`` standard normal scores exceeds with probability at most ALPHA."""
    return NormalDist().inv_cdf(1.0 - ALPHA / (2 * max(1, tests)))


def largest(scores: Mapping[str, float], share: int = 1) -> Score:
    """NaN counts as infinitely large. ``share``: so many such scores share ALPHA."""
    known = {name: math.inf if math.isnan(score) else abs(score) for name, score in scores.items()}
    where = max(known, key=lambda name: known[name])
    return Score(known[where], normal_limit(share * len(known)), where)


def worst(scores: Sequence[Score]) -> Score:
    """The one that comes nearest to its own limit, or passes it by most."""
    return max(scores, key=lambda score: score.value / score.limit)


def mean_score(z: np.ndarray) -> float:
    """The mean of n values has standard deviation 1/sqrt(n)."""
    return float(z.mean(dtype=np.float64) * math.sqrt(z.size))


def spread_score(z: np.ndarray) -> float:
    """Of the second moment around zero."""
    return float(square_score(np.square(z).sum(dtype=np.float64), z.size))


def square_score(squares: np.ndarray | float, n: float) -> np.ndarray:
    """Of sums of n squares, chi-square with n degrees of freedom, whose cube root is nearly normal (Wilson & Hilferty
    1931). In tails as far out as the limits of this module it errs to the side of admitting."""
    variance = 2.0 / (9.0 * n)
    return (np.cbrt(np.asarray(squares) / n) - (1.0 - variance)) / math.sqrt(variance)


def correlation_score(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of products of n independent pairs: mean 0, variance n."""
    return float((a * b).sum(dtype=np.float64) / math.sqrt(a.size))


def moments(z: np.ndarray, slices: Mapping[str, slice], share: int = 1) -> tuple[Score, Score]:
    """(means, spreads) over everything, for each parameter tensor and for each step of z [steps, parameters]; of
    LATE_FROM steps or more, for each single coordinate and for the last quarter of each tensor, too. Tensors have half
    of the chance of a false alarm, lest many steps and coordinates hide a few. ``share``: see :func:`largest`."""
    steps, size = z.shape
    late = steps - steps // 4 if steps >= LATE_FROM else steps
    sums, squares = np.zeros((2, size)), np.zeros((2, size))
    by_step = np.empty((2, steps))
    for t, row in enumerate(z):
        exact = row.astype(np.float64)
        square = np.square(exact)
        sums[int(t >= late)] += exact
        squares[int(t >= late)] += square
        by_step[:, t] = exact.sum(), square.sum()
    both = sums.sum(0), squares.sum(0)
    groups = {"all": (both[0].sum(), both[1].sum(), z.size)}
    for name, part in slices.items():
        width = part.stop - part.start
        groups[name] = (both[0][part].sum(), both[1][part].sum(), steps * width)
        if late < steps:
            groups[f"{name} late"] = (sums[1, part].sum(), squares[1, part].sum(), (steps - late) * width)
    means = {name: float(total / math.sqrt(n)) for name, (total, _, n) in groups.items()}
    large = {name: (square, n) for name, (_, square, n) in groups.items() if n >= SMALLEST_FOR_SPREAD}
    spreads = {name: float(square_score(square, n)) for name, (square, n) in large.items()}
    if steps == 1:
        return largest(means, share), largest(spreads, share)
    single = [by_step[0] / math.sqrt(size)], [square_score(by_step[1], size)] if size >= SMALLEST_FOR_SPREAD else []
    if late < steps:
        single[0].append(both[0] / math.sqrt(steps))
        single[1].append(square_score(both[1], steps))
    return (
        worst([largest(means, 2 * share), _largest_single(single[0], slices, 2 * share)]),
        worst([largest(spreads, 2 * share), _largest_single(single[1], slices, 2 * share)]),
    )


def _largest_single(scores: Sequence[np.ndarray], slices: Mapping[str, slice], share: int) -> Score:
    """Return the largest score of all steps and, where there are more, of all coordinates."""
    found = [_infinite_for_nan(each) for each in scores]
    limit = normal_limit(share * sum(each.size for each in found))
    named = {}
    if found:
        step = int(np.argmax(found[0]))
        named[f"step {step}"] = float(found[0][step])
    if len(found) > 1:
        place = int(np.argmax(found[1]))
        named[_name_of(place, slices)] = float(found[1][place])
    where = max(named, key=lambda name: named[name], default="nothing")
    return Score(named.get(where, 0.0), limit, where)


def _name_of(place: int, slices: Mapping[str, slice]) -> str:
    tensor = next(name for name, part in slices.items() if part.start <= place < part.stop)
    return f"value {place - slices[tensor].start} of {tensor}"


def normality(z: np.ndarray) -> Score:
    """Kolmogorov and Smirnov's D sqrt(n) against N(0, 1) on a random subsample.

    P(D sqrt(n) > t) <= 2 exp(-2 t^2) (Massart 1990), for every n.
    """
    values = z.ravel()
    if values.size > KOLMOGOROV_SAMPLE:
        values = values[np.random.default_rng(0).choice(values.size, KOLMOGOROV_SAMPLE, replace=False)]
    limit = math.sqrt(-math.log(ALPHA / 2) / 2)
    if not np.isfinite(values).all():
        return Score(math.inf, limit, "a value that is not finite")
    n = values.size
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in np.sort(values)])
    steps = np.arange(n)
    distance = max(float(((steps + 1) / n - cdf).max()), float((cdf - steps / n).max()))
    return Score(distance * math.sqrt(n), limit, f"{n} values")


def independent_coordinates(z: np.ndarray, slices: Mapping[str, slice], shapes: Mapping[str, tuple[int, ...]]) -> Score:
    """Neighbours in memory, neighbouring rows of a matrix (one vector used for all rows?), and any two tensors
    element by element (one stream started anew for each tensor?)."""
    scores = {"neighbours": correlation_score(z[:, :-1], z[:, 1:])}
    for name, part in slices.items():
        row = math.prod(shapes[name][1:])
        if len(shapes[name]) > 1 and (part.stop - part.start - row) * len(z) >= SMALLEST_FOR_CORRELATION:
            values = z[:, part]
            scores[f"rows of {name}"] = correlation_score(values[:, :-row], values[:, row:])
    for (one, a), (other, b) in itertools.combinations(slices.items(), 2):
        common = min(a.stop - a.start, b.stop - b.start)
        if common * len(z) >= SMALLEST_FOR_CORRELATION:
            first, second = z[:, a.start : a.start + common], z[:, b.start : b.start + common]
            scores[f"{one} and {other}"] = correlation_score(first, second)
    return largest(scores)


def tails(z: np.ndarray) -> Score:
    """The largest value, above, below and of both, and how many lie beyond 2, 3 and 4: bounded noise keeps no (epsilon,
    delta), and outliers are no Gaussian's either."""
    scores = {}
    n = z.size
    ends = float(z.max()), -float(z.min())
    for side, highest, sides in (("above", ends[0], 1), ("below", ends[1], 1), ("either way", max(ends), 2)):
        beyond = sides * upper_tail(highest)
        # P(largest <= highest) = (1 - beyond)^n
        smaller = math.exp(n * math.log1p(-min(beyond, 1.0 - 1e-16))) if math.isfinite(highest) else 0.0
        larger = min(1.0, n * beyond)
        scores[f"largest {side}, {highest:.2f}"] = max(_score_of(smaller), _score_of(larger))
    for threshold in TAIL_THRESHOLDS:
        expected = n * upper_tail(threshold)
        if expected >= SMALLEST_COUNT:
            for side, found in (("above", int((z > threshold).sum())), ("below", int((z < -threshold).sum()))):
                scores[f"{found} values beyond {threshold} {side}, {expected:.0f} expected"] = count_score(
                    found, expected
                )
    if not np.isfinite(z).all():
        scores["a value that is not finite"] = math.inf
    return largest(scores)


def fineness(z: np.ndarray, grid: np.ndarray) -> Score:
    """Values nearer to each other than CLOSE: noise from few random bits, or in half precision, repeats its values.

    ``grid`` [parameters]: how coarsely float32 tells a coordinate's noise. A random fraction of that is added, so that
    only the noise's own grid is left; coordinates whose is too coarse are left out.

    The count is a U-statistic; its variance is known, and it stands for one of a Poisson count as widely spread.
    """
    fine = np.flatnonzero(grid <= CLOSE)
    whole = z.shape[0] * fine.size
    if whole < SMALLEST_FOR_CLOSE:
        return Score(0.0, normal_limit(1), f"{whole} values that float32 tells well enough are too few")
    n = min(whole, CLOSE_SAMPLE)
    chosen = np.arange(n, dtype=np.int64) * (whole // n)
    steps, places = chosen // fine.size, fine[chosen % fine.size]
    dither = np.random.default_rng(0).uniform(-0.5, 0.5, n) * grid[places]
    values = np.sort(z[steps, places] + dither)
    if not np.isfinite(values).all():
        return Score(math.inf, normal_limit(1), "a value that is not finite")
    found = int((np.searchsorted(values, values + CLOSE, "right") - np.arange(1, n + 1)).sum())
    one = math.erf(CLOSE / 2)  # of two independent values
    both = 2 * CLOSE**2 / (math.pi * math.sqrt(3))  # of one with each of two others
    expected = n * (n - 1) / 2 * one
    spread = 1 - one + 2 * (n - 2) * (both - one**2) / one
    where = f"{found} pairs of {n} values within {CLOSE:g}, {expected:.0f} expected"
    return Score(count_score(found / spread, expected / spread), normal_limit(1), where)


def alike(z: np.ndarray, slices: Mapping[str, slice]) -> Score:
    """Do two coordinates, of whichever tensors, have the same noise, or the negated? Of few coordinates all pairs are
    correlated. Of many the signs and halves of COMPARED_STEPS steps make a number each, and equal ones are counted:
    two independent coordinates share theirs with probability 2^(1 - 2 COMPARED_STEPS), by sign."""
    size = z.shape[1]
    if size <= FEW_COORDINATES:
        columns = z.T
        cosine = np.abs(cosines(columns, columns))
        np.fill_diagonal(cosine, 0.0)
        worst_pair = np.unravel_index(np.argmax(np.where(np.isnan(cosine), np.inf, cosine)), cosine.shape)
        score = float(_infinite_for_nan(_student_score(cosine[worst_pair], columns.shape[1])))
        where = " and ".join(_name_of(int(place), slices) for place in worst_pair)
        return Score(score, normal_limit(math.comb(size, 2)), where)
    numbers = _numbers(z[:COMPARED_STEPS])
    order = np.argsort(numbers)
    same = np.flatnonzero(np.diff(numbers[order]) == 0)
    where = f"{size} coordinates"
    if same.size:
        where = " and ".join(_name_of(int(order[same[0] + k]), slices) for k in (0, 1))
    return Score(float(same.size), 0.0, where)


def _numbers(z: np.ndarray) -> np.ndarray:
    """Return for each column of z [at most COMPARED_STEPS, n] a number that it shares with its negation: signs beside
    that of its first value, and halves."""
    numbers = np.zeros(z.shape[1], dtype=np.uint64)
    for row in z:
        numbers = numbers << np.uint64(2) | ((row > 0) == (z[0] > 0)) << np.uint64(1) | (np.abs(row) > MEDIAN)
    return numbers


def repeated(z: np.ndarray, slices: Mapping[str, slice]) -> Score:
    """How many steps of z [steps, parameters] have the noise of an earlier one, or the negated, in any tensor: a
    generator that is started again. Of each step COMPARED_STEPS values are looked at, as :func:`alike` does."""
    found: dict[str, int] = {}
    for name, part in slices.items():
        if part.stop - part.start >= COMPARED_STEPS:
            places = np.linspace(part.start, part.stop - 1, COMPARED_STEPS).astype(np.int64)
            _, first, times = np.unique(_numbers(z[:, places].T), return_index=True, return_counts=True)
            again = f"{name}, first at step {first[times > 1].min() if len(first) < len(z) else 0}"
            found[again] = len(z) - len(first)
    where = max(found, key=lambda name: found[name], default="no tensor is large enough")
    return Score(float(found.get(where, 0)), 0.0, f"{len(z)} steps; {where}")


def upper_tail(value: float) -> float:
    """P(N(0, 1) > value)."""
    return 0.5 * math.erfc(value / math.sqrt(2))


def _score_of(probability: float) -> float:
    """The normal score that is exceeded with this probability."""
    if probability >= 1.0:
        return 0.0
    return -NormalDist().inv_cdf(probability) if probability > 1e-300 else math.inf


def count_score(found: float, expected: float) -> float:
    """Of a Poisson count: its tails are those of a gamma variable, whose cube root is nearly normal."""

    def gamma_score(shape: float) -> float:
        mean = 1.0 - 1.0 / (9.0 * shape)
        return float((np.cbrt(expected / shape) - mean) * 3.0 * math.sqrt(shape))

    too_few = gamma_score(found + 1)
    too_many = -gamma_score(found) if found else 0.0
    return max(too_few, too_many, 0.0)


def cosine_score(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[rows of a, rows of b]: normal scores of the cosines of vectors."""
    return _student_score(cosines(a, b), a.shape[1])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[rows of a, rows of b] of vectors; NaN where one is zero."""
    with np.errstate(invalid="ignore"):
        left, right = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
        return left @ right.T


def _student_score(cosine: np.ndarray, size: int) -> np.ndarray:
    """By Wallace's (1959) score of Student's t. Unlike a sum of products, whose tails are heavier than normal, this
    holds for short vectors, too."""
    freedom = size - 1
    wide = np.sqrt(-freedom * np.log1p(-np.minimum(np.square(cosine), 1.0 - 2.0**-20)))
    return (8 * freedom + 1) / (8 * freedom + 3) * wide


def independent_steps(z: np.ndarray, slices: Mapping[str, slice]) -> Score:
    """Every pair of steps: one noise for all of them, one that goes round in a cycle. All pairs at one distance
    together: a little of an earlier step's noise in a later one. Next steps of every tensor: a small one may keep its
    noise. The spread of the scores of all pairs: noise that has less room than it has coordinates."""
    steps, size = z.shape
    cosine = cosines(z, z)
    pairs = np.triu_indices(steps, 1)
    each = _infinite_for_nan(_student_score(cosine[pairs], size))
    worst = int(np.argmax(each))
    scores = {f"steps {pairs[0][worst]} and {pairs[1][worst]}": float(each[worst])}
    # Cosines of pairs at one distance are independent: no such pairs ever close a circle.
    apart = {k: float(np.trace(cosine, k)) * math.sqrt(size / (steps - k)) for k in range(1, steps)}
    scores |= {f"all steps {k} apart": score for k, score in apart.items()}
    kept = {}
    for name, part in slices.items():
        if (part.stop - part.start) * (steps - 1) >= SMALLEST_FOR_CORRELATION:
            kept[f"next steps of {name}"] = correlation_score(z[:-1, part], z[1:, part])
    crossed, count = _across_tensors(z, slices)
    found = largest(scores | kept | crossed | {"spread over all pairs": pairs_score(cosine[pairs], steps, size)})
    return Score(found.value, normal_limit(len(each) + len(apart) + len(kept) + 1 + count), found.where)


def _across_tensors(z: np.ndarray, slices: Mapping[str, slice]) -> tuple[dict[str, float], int]:
    """Return the largest scores of how one tensor's noise begins and how another's does some steps later, and how many
    there were: where each has a stream of its own, one's key may be the other's in another step (step + tensor)."""
    names, places = _beginnings(slices)
    begun = z[:, places].swapaxes(0, 1)
    found = {}
    for k in range(1, min(NEAR_STEPS + 1, len(z)) if len(names) > 1 else 1):
        scores = _infinite_for_nan(cosine_score(*(v.reshape(len(names), -1) for v in (begun[:, :-k], begun[:, k:]))))
        np.fill_diagonal(scores, 0.0)
        a, b = np.unravel_index(np.argmax(scores), scores.shape)
        found[f"{names[a]} and {names[b]} {k} steps later"] = float(scores[a, b])
    return found, len(found) * len(names) * (len(names) - 1)


def _beginnings(slices: Mapping[str, slice]) -> tuple[list[str], np.ndarray]:
    """Return the tensors of TENSOR_VALUES or more, and the places [tensors, TENSOR_VALUES] of their first ones."""
    names = [name for name, part in slices.items() if part.stop - part.start >= TENSOR_VALUES]
    starts = np.array([slices[name].start for name in names], dtype=np.int64)[:, None]
    return names, starts + np.arange(TENSOR_VALUES)


def pairs_score(cosine: np.ndarray, steps: int, size: int) -> float:
    """Of the sum of squared cosines of every pair of ``steps`` independent directions in ``size`` dimensions.

    The squares are uncorrelated; the skewness is that of chi-square and of the triangles among the pairs. A chi-square
    of the same skewness stands for the sum.
    """
    count = cosine.size
    variance = count * 2.0 * (size - 1) / (size + 2)
    third = 8.0 * count + math.comb(steps, 3) * 24.0 * (size - 1) / (size + 2) ** 2
    standard = (size * float(np.square(cosine, dtype=np.float64).sum()) - count) / math.sqrt(variance)
    freedom = 8.0 * variance**3 / third**2
    return float(square_score(freedom + standard * math.sqrt(2.0 * freedom), freedom))


def independent_runs(one: np.ndarray, others: Mapping[int, np.ndarray], slices: Mapping[str, slice]) -> Score:
    """Every step of runs with other seeds against every step of one run and of each other; and how the first
    noise of every tensor begins in one against that of every other tensor in another: each may have a stream of its
    own, whose seed is another tensor's under the next seed."""
    names, starts = _beginnings(slices)
    runs: dict[str, np.ndarray] = {"the first run": one} | {f"seed {seed}": z for seed, z in others.items()}
    found = []
    for (name, a), (other, b) in itertools.combinations(runs.items(), 2):
        scores = cosine_score(a, b)
        found.append((_infinite_for_nan(scores).max(), scores.size, f"{name} and {other}"))
        crossed = _infinite_for_nan(cosine_score(a[0, starts], b[0, starts]))
        if crossed.size:
            i, j = np.unravel_index(np.argmax(crossed), crossed.shape)
            found.append((crossed[i, j], crossed.size, f"{names[i]} of {name} and {names[j]} of {other}"))
    value, _, where = max(found)
    return Score(float(value), normal_limit(sum(count for _, count, _ in found)), where)


def independent_shifts(z: np.ndarray) -> Score:
    """One stream read twice, at any distance or backwards: the values of a step against themselves at every shift,
    forwards and reversed, summed over the steps; and every two of some steps at every shift.

    Sums over cycles, so that every shift has as many products and the same variance. A few values at the end are left
    out, so that the transforms are fast.
    """
    n = _composite(z.shape[1])
    if n < SMALLEST_FOR_SHIFTS:
        return Score(0.0, normal_limit(1), f"{n} values a step are too few")
    steps = z[-max(1, STREAM_VALUES // n) :, :n].astype(np.float64)
    found = []
    for way, scores in zip(("shifted by", "reversed around"), _cyclic_scores(steps), strict=True):
        worst = int(np.argmax(scores))
        found.append((float(scores[worst]), scores.size, f"a step {way} {worst + 1}"))
    some = steps[-math.isqrt(2 * PAIR_VALUES // n) :]
    # A shift keeps a vector's length, so that these are cosines: in few dimensions sums of products are not normal.
    with np.errstate(invalid="ignore"):
        transform = np.fft.rfft(some / np.linalg.norm(some, axis=1, keepdims=True), axis=1)
    for t in range(len(some) - 1):
        crossed = _infinite_for_nan(np.fft.irfft(transform[t].conj() * transform[t + 1 :], n, axis=1))
        other, shift = np.unravel_index(np.argmax(crossed), crossed.shape)
        where = f"steps {t} and {t + 1 + other} of the last {len(some)}, shifted by {shift}"
        found.append((float(_student_score(crossed[other, shift], n)), crossed.size, where))
    value, _, where = max(found)
    return Score(value, normal_limit(sum(size for _, size, _ in found)), where)


def _composite(n: int) -> int:
    """The largest number up to n without a prime factor above 11."""
    for candidate in range(n, 0, -1):
        rest = candidate
        for prime in (2, 3, 5, 7, 11):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return candidate
    return 0


def _cyclic_scores(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(|score| at shifts 1, 2, ..., |score| of reversals around 1, 2, ...), summed over the rows [steps, n]."""
    steps, n = rows.shape
    transform = np.fft.rfft(rows, axis=1)
    shifted = np.fft.irfft(np.square(np.abs(transform)).sum(0), n)[1 : (n + 1) // 2]
    around = np.fft.irfft(np.square(transform).sum(0), n)
    # Index i meets c - i: itself where 2 i = c, which adds its square; every other pair is counted twice.
    themselves = np.ones(n) if n % 2 else np.where(np.arange(n) % 2, 0.0, 2.0)
    reversed_ = np.roll(around - steps * themselves, -1)
    return _infinite_for_nan(shifted) / math.sqrt(steps * n), _infinite_for_nan(reversed_) / math.sqrt(2 * steps * n)


def _infinite_for_nan(scores: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(scores), np.inf, np.abs(scores))


def residual_scores(
    z: np.ndarray, updates: np.ndarray, differences: np.ndarray, numbers: Sequence[int], alone: Mapping[str, int]
) -> dict[str, float]:
    """Of what is left of noised updates [steps, parameters]: mean and spread, what of the updates themselves is in it,
    and of the differences of the sums over the two halves of their rows; whether one step's is in the next one's, and
    the spread over all pairs. ``numbers`` of the steps; ``alone``: those whose spread is scored by itself, by name."""
    scores = {
        "mean": mean_score(z),
        "spread": spread_score(z),
        "along the update": _along(z, updates),
        "along the difference of halves": _along(z, differences),
    }
    scores |= {f"spread {name}": spread_score(z[list(numbers).index(t)]) for name, t in alone.items()}
    steps, size = z.shape
    if steps > 1:
        cosine = cosines(z, z)
        next_ones = [cosine[i, j] for i, j in itertools.permutations(range(steps), 2) if numbers[j] == numbers[i] + 1]
        if next_ones:
            scores["from step to step"] = float(np.sum(next_ones)) * math.sqrt(size / len(next_ones))
        scores["over all pairs of steps"] = pairs_score(cosine[np.triu_indices(steps, 1)], steps, size)
    return {name: abs(score) if math.isfinite(score) else math.inf for name, score in scores.items()}


def _along(z: np.ndarray, directions: np.ndarray) -> float:
    """The sum of the components of each row along its direction, over the root of how many there are."""
    sizes = np.linalg.norm(directions, axis=1)
    there = sizes > 0
    components = np.einsum("tp,tp->t", z[there], directions[there]) / sizes[there]
    return float(components.sum() / math.sqrt(len(components))) if there.any() else 0.0
