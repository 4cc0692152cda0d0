"""Change points of a history: where a series of runs became lastingly slower or faster. Pure functions, no files.

**Model.** The log-values of one cell on one machine, y[0..n-1], one per run, are

    y[t] = level of t's segment + sigma e[t],    e independent with median 0, now and then far out (one slow run).

A *step* is where one segment ends and the next begins.

**Cost.** A segmentation costs, in units of the noise variance,

    sum over runs of min(((y[t] - level) / sigma)^2, CAP)   +   penalty x number of steps,

and the cheapest one is taken (optimal partitioning). The square is what makes it the likelihood of normal noise; the
cap, 3 sigma, is what makes it robust (the biweight loss: Fearnhead and Rigaill, "Changepoint detection in the presence
of outliers", 2019): however slow a run is, it costs at most CAP = 9. From that follows the delay, whatever the size:

- a new level at the end saves at most CAP a run and costs one penalty, so a step needs at least
  k = floor(penalty / CAP) + 1 runs after it: 3 with PENALTY = 24, more where noise is correlated or runs are few;
- an excursion that goes back costs two penalties: up to 5 runs that go back are outliers, not two steps.

**How it is computed.** Levels are taken from a grid of sigma / 8, so that no level of a segment is missed by more than
sigma / 16 (over two years that costs 3, where the penalty is 24). With cost[t, l] the cheapest history of runs 0..t
that ends on level l,

    cost[t, l] = min(cost[t-1, l], min over m of cost[t-1, m] + penalty) + min(((y[t] - l) / sigma)^2, CAP)

which is exact on the grid and takes n x levels operations. Beside the cost runs the first run of the last segment; from
those of all t the whole segmentation is read backwards, and so is what an observer would have been told after every
single run: the *alarm* of a step is the first run after which it was part of the answer. An alarm never depends on
what came later: sigma is that of the runs before a checkpoint (CHECKPOINTS), and is held until it is another one by
more than RENEWED. So an alarm can name a step for ever.

**Noise.** sigma = 1.4826 MAD(y[t+1] - y[t]) / sqrt(2): a step changes one difference, an outlier two, the median of
them hardly. Real series are not always independent. Differences over 4 to 8 runs see all of the noise where neighbours
are alike: rho = 1 - sigma_1^2 / sigma_4..8^2, taken as 0 below its own sampling error of about TOLD / sqrt(n). Few runs
cannot tell, so rho is averaged with a guess, PRIOR, that weighs as much as WEIGHT runs. Means of m correlated runs vary
(1 + rho) / (1 - rho) times as much, and by that the penalty is multiplied. sigma from few runs may be much too small,
so it is raised by SMALL_SAMPLE / n; it is never below FLOOR, because nobody believes 0.3 %.

**Noise that is not normal.** Runs that jump between two levels, 30 % of them on the upper one, say, are soon on it four
times in a row, which is no step. What a false step saves grows and shrinks run by run by G = cost at the old level -
cost at the new one, and of independent runs the chance that it ever saves the penalty falls as exp(-theta x penalty),
with theta > 0 from E exp(theta G) = 1 (Cramer and Lundberg's exponent). Of normal noise theta = 1/2 for every new
level. So E is taken over the runs themselves (their distances from a running median, with FAR runs' weight put far out
on both sides, because few runs say nothing of tails), theta is the least over all new levels, and the penalty is
multiplied by ``heaviness`` = (1/2) / theta, where that is above 1: about 4 for those two levels, 2 for exponential
noise, 1.05 for one outlier in 20. A true step of such a series is known later by as much.

**False-alarm rate.** PENALTY is chosen by simulation so that independent noise alone raises at most **one alarm in 100
series-years of daily runs**, counting every alarm that was ever raised on any day, also those that later data took
back. ALARMS_PER_100_YEARS holds what 1,600 series-years of each kind of noise gave in series of one and of two years,
with all of the above estimated from the series itself (`tests/harness/analysis/test_change_points.py` repeats it
with fewer). The bound
is shown for these kinds only. It does not hold where neighbouring runs are correlated by 0.4: there are more alarms,
most of them in the first 100 runs, from which a correlation cannot be told, as the figure says.

The *confidence* of a step falls out of the same: beyond the penalty the tail of the cost that the best false step saves
is that of a chi-square, exp(-x / 2), so a step that saves ``gain`` would come from noise in RATE exp(-(gain - penalty)
/ 2) of the series-years, and confidence is 1 minus that.

**Where.** A small step can be placed to some runs only. With flat prior and the levels at hand, run t is the first of
the new level with probability proportional to exp(-cost of placing it there / 2); ``first``..``last`` is the smallest
range around the best place that holds 95 %. The step lies between the runs ``first - 1`` and ``last``.

**Bytes** (:func:`exact`) do not jitter: every change that lasts LASTING runs is a step, of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAP = 9.0
PENALTY = 24.0
PLACING_CAP = 16.0
"""Cap for the place of a step: an outlier seldom lands on the very level that comes next."""
FLOOR = 0.005
"""Least noise that is believed, as a standard deviation of log values."""
SMALL_SAMPLE = 6.0
TOLD = 2.0
PRIOR, WEIGHT = 0.3, 30.0
"""Correlation of neighbours before anything is known, and how many runs that counts for."""
LEAST_RUNS = 10
"""Below, noise cannot be told from change."""
LASTING = 2
"""Runs for which bytes must stay at a new value."""
RATE = 0.01
"""Stated upper bound of false alarms in a series-year of daily runs."""
ALARMS_PER_100_YEARS = {
    "normal": (0.0, 0.125),
    "tails": (0.0, 0.0),
    "outliers": (0.063, 0.125),
    "exponential": (0.063, 0.063),
    "levels": (0.0, 0.0),
    "correlated": (3.75, 2.19),
}
"""Simulated (tests/support/simulations.py) with seed 1; in 1,600 series of 365 runs each, and in 800 of 730."""
WINDOW = 21
FAR, FAR_OUT = 1.0, 5.0
LEVELS = np.arange(-8.0, 8.5, 0.5)
APART = 1.0
"""Smallest distance of the two levels of a simulated false step, in standard deviations."""
LEAST_EXPONENT = 0.01
GRID = 8
RENEWED = 0.1
"""Change of log noise (or of the penalty) at a checkpoint by which the old noise is given up."""
CHECKPOINTS = tuple(int(LEAST_RUNS * 1.5**i) for i in range(24))
PLACED = 0.95


@dataclass(frozen=True)
class Noise:
    """``sd`` of one log value; ``correlation`` of neighbouring runs as far as it could be told from none;
    ``heaviness``: by how much more than normal noise of this sd it takes for a step, by chance."""

    sd: float
    correlation: float = 0.0
    heaviness: float = 1.0

    @property
    def inflation(self) -> float:
        """Return how much more means vary than those of independent runs."""
        return (1 + self.correlation) / (1 - self.correlation)

    @property
    def penalty(self) -> float:
        """Return the penalty of a step, in units of the noise variance."""
        return PENALTY * self.inflation * self.heaviness


@dataclass(frozen=True)
class Step:
    """A lasting change. Indices count the runs of the series that was given.

    ``at``: most probable first run of the new level; it lies in ``first``..``last`` with 95 %. ``alarm``: the run after
    which it was first reported. ``ratio`` = new level / old level with its 95 % interval ``low``, ``high``.
    ``runs_after``: of the segment of the new level.
    """

    at: int
    first: int
    last: int
    alarm: int
    ratio: float
    low: float
    high: float
    runs_after: int
    confidence: float


@dataclass(frozen=True)
class Segment:
    """Runs ``start``..``stop - 1`` at ``level`` (of the values, not of their logs)."""

    start: int
    stop: int
    level: float


@dataclass(frozen=True)
class Found:
    """Result of the search in one series of n values. ``alarms``: every run after which a step was reported that had
    not been before, or elsewhere; ``shortest``: runs after a step that it needs at least."""

    segments: tuple[Segment, ...]
    steps: tuple[Step, ...]
    alarms: tuple[int, ...]
    noise: Noise | None
    shortest: int


def noise(y: Floats) -> Noise:
    """Robust noise of log values y [n], n >= 3; see the module's docstring."""
    near = _difference_sd(y, 1)
    lags = [lag for lag in range(4, 9) if y.size > 3 * lag]
    far = math.sqrt(sum(_difference_sd(y, lag) ** 2 for lag in lags) / len(lags)) if lags else near
    n = y.size
    correlation = 1 - (near / far) ** 2 if far > 0 else 0.0
    if correlation < TOLD / math.sqrt(n):
        correlation, far = 0.0, near
    correlation = (n * correlation + WEIGHT * PRIOR) / (n + WEIGHT)
    sd = max(FLOOR, far) * (1 + SMALL_SAMPLE / n)
    return Noise(sd, min(correlation, 0.9), _heaviness(y / sd))


def _heaviness(z: Floats) -> float:
    """Return how heavy the tails of runs z [n] (in standard deviations) are; see the module's docstring."""
    half = min(WINDOW, z.size - 1 + z.size % 2) // 2
    mirrored = np.concatenate([z[:half][::-1], z, z[z.size - half :][::-1]])
    middles = np.median(np.lib.stride_tricks.sliding_window_view(mirrored, 2 * half + 1), axis=1)
    distances = np.concatenate([z - middles, [-FAR_OUT, FAR_OUT]])
    weights = np.concatenate([np.ones(z.size), [FAR / 2, FAR / 2]]) / (z.size + FAR)
    costs = np.minimum((distances - LEVELS[:, None]) ** 2, CAP)
    old = int(np.argmin(costs @ weights))
    gains = costs[old] - costs[np.abs(LEVELS - LEVELS[old]) >= APART]
    low, high = np.zeros(len(gains)), np.full(len(gains), 0.5)
    for _ in range(12):
        middle = 0.5 * (low + high)
        is_above = np.exp(middle[:, None] * gains) @ weights > 1.0
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    return 0.5 / max(float(high.min()), LEAST_EXPONENT)


def _difference_sd(y: Floats, lag: int) -> float:
    differences = y[lag:] - y[:-lag]
    return 1.4826 * float(np.median(np.abs(differences - np.median(differences)))) / math.sqrt(2)


def find(values: Sequence[float] | Floats) -> Found:
    """Steps of a series of positive values [n] in order of the runs.

    Raises ValueError for a value that is not positive and finite.
    """
    raw = np.asarray(values, dtype=float)
    if raw.size and not (np.all(np.isfinite(raw)) and np.all(raw > 0)):
        raise ValueError("A history needs positive finite values.")
    y = np.log(raw)
    n = y.size
    if n < LEAST_RUNS:
        whole = (Segment(0, n, float(np.median(raw))),) if n else ()
        return Found(whole, (), (), None, _shortest(PENALTY))
    reported: list[int] = []
    seen, starts = Noise(FLOOR), np.zeros(n, dtype=np.int64)
    for until, seen in _epochs(y):
        starts = _partition(y[:until], seen)
        # What was said after run t, with the noise that was known from the runs before the epoch.
        reported += [int(s) if t >= LEAST_RUNS - 1 else 0 for t, s in enumerate(starts)][len(reported) :]
    bounds = _bounds(starts)
    segments = tuple(Segment(a, b, math.exp(_level(y[a:b], seen.sd))) for a, b in pairwise(bounds))
    alarms = _alarms(reported, _shortest(seen.penalty))
    steps = tuple(
        _step(y, left, right, seen, _told(reported, alarms, left.start, right.start))
        for left, right in pairwise(segments)
    )
    return Found(segments, steps, tuple(run for run, _ in alarms), seen, _shortest(seen.penalty))


def _epochs(y: Floats) -> list[tuple[int, Noise]]:
    """Return (end, noise known in it) of the stretches in which one noise was held to be true: it is looked at anew at
    every checkpoint, and replaced where it is another by more than RENEWED."""
    marks = [c for c in CHECKPOINTS if c < y.size] or [y.size]
    epochs: list[tuple[int, Noise]] = []
    held = noise(y[: marks[0]])
    for mark in marks[1:]:
        now = noise(y[:mark])
        changes = (now.sd / held.sd, now.penalty / held.penalty)
        if any(abs(math.log(change)) > RENEWED for change in changes):
            epochs.append((mark, held))
            held = now
    return [*epochs, (y.size, held)]


def _shortest(penalty: float) -> int:
    return math.floor(penalty / CAP) + 1


def _partition(y: Floats, seen: Noise) -> NDArray[np.int64]:
    """First run of the last segment of the cheapest segmentation of y[: t + 1], for every t. Int [n]."""
    penalty = seen.penalty
    z = y / seen.sd
    levels = _levels(z)
    cost, here = np.zeros(levels.size), np.empty(levels.size)
    start = np.zeros(levels.size, dtype=np.int64)
    starts = np.zeros(z.size, dtype=np.int64)
    best = 0
    for t, value in enumerate(z.tolist()):
        if t:
            fresh = cost[best] + penalty
            np.copyto(start, t, where=cost > fresh)
            np.minimum(cost, fresh, out=cost)
        np.subtract(levels, value, out=here)
        np.multiply(here, here, out=here)
        np.minimum(here, CAP, out=here)
        cost += here
        best = int(cost.argmin())
        starts[t] = start[best]
    return starts


def _levels(z: Floats) -> Floats:
    """Return points of the grid near which some five neighbouring runs have their median: no level can pay
    elsewhere."""
    window = min(5, z.size)
    middles = np.median(np.lib.stride_tricks.sliding_window_view(z, window), axis=1)
    near = np.unique(np.round(middles * GRID).astype(np.int64))
    spread = np.arange(-2 * GRID // 2, 2 * GRID // 2 + 1)
    return np.unique((near[:, None] + spread[None, :]).ravel()) / GRID


def _bounds(starts: NDArray[np.int64]) -> list[int]:
    """0, every first run of a segment, n."""
    bounds = [starts.size]
    while bounds[-1] > 0:
        bounds.append(int(starts[bounds[-1] - 1]))
    return bounds[::-1]


def _level(y: Floats, sd: float) -> float:
    """Return mean of the runs within the cap around the median; the median where it lies between two levels, far from
    both."""
    middle = float(np.median(y))
    near = y[np.abs(y - middle) <= math.sqrt(CAP) * sd]
    return float(np.mean(near)) if y.size > 2 and near.size else middle


def _alarms(reported: Sequence[int], tolerance: int) -> list[tuple[int, int]]:
    """Return (run after which it was said, where the step was placed then), once per step however its place moved
    since."""
    alarms: list[tuple[int, int]] = []
    before = 0
    for t, start in enumerate(reported):
        if start > before + tolerance or (start > 0 and before == 0):
            alarms.append((t, start))
        before = start
    return alarms


def _told(reported: Sequence[int], alarms: Sequence[tuple[int, int]], a: int, at: int) -> int:
    """Return the first run after which the step at ``at`` was known, where the one before it is at ``a``. Of two steps
    that are near each other ``_alarms`` counts one: then it is the first run after which a step was placed nearer to
    ``at`` than to ``a``, or beyond. Later runs change neither, and the last one places the last step: there always is
    one."""
    raised = set(alarms)
    return next(
        t
        for t, place in enumerate(reported)
        if t >= at and (2 * place >= a + at or (place > a and (t, place) in raised))
    )


def _step(y: Floats, left: Segment, right: Segment, seen: Noise, alarm: int) -> Step:
    a, at, b = left.start, right.start, right.stop
    z = y[a:b] / seen.sd
    low_level, high_level = math.log(left.level) / seen.sd, math.log(right.level) / seen.sd
    one, other = ((z - level) ** 2 for level in (low_level, high_level))
    apart = float(np.sum(np.minimum(one[: at - a], CAP)) + np.sum(np.minimum(other[at - a :], CAP)))
    one, other = np.minimum(one, PLACING_CAP), np.minimum(other, PLACING_CAP)
    # Cost of placing the step before run a + 1 + i.
    placing = np.cumsum(one)[:-1] + (np.sum(other) - np.cumsum(other)[:-1])
    first, last = _range(placing / seen.inflation, at - a - 1)
    together = min(float(np.sum(np.minimum((z - level) ** 2, CAP))) for level in _levels(z))
    gain = max(0.0, together - apart)
    difference = (high_level - low_level) * seen.sd
    half = 1.96 * seen.sd * math.sqrt(seen.inflation * (1 / (at - a) + 1 / (b - at)))
    saved = (gain - seen.penalty) / (seen.inflation * seen.heaviness)
    return Step(
        at=at,
        first=a + 1 + first,
        last=a + 1 + last,
        alarm=alarm,
        ratio=math.exp(difference),
        low=math.exp(difference - half),
        high=math.exp(difference + half),
        runs_after=b - at,
        confidence=1 - RATE * math.exp(-max(0.0, saved) / 2),
    )


def _range(cost: Floats, best: int) -> tuple[int, int]:
    """Return smallest range around ``best`` that holds PLACED of exp(-cost / 2); grows to the heavier side."""
    weight = np.exp(-(cost - cost.min()) / 2)
    weight /= weight.sum()
    low = high = best
    held = float(weight[best])
    while held < PLACED and (low > 0 or high < weight.size - 1):
        left = float(weight[low - 1]) if low > 0 else -1.0
        right = float(weight[high + 1]) if high < weight.size - 1 else -1.0
        if left >= right:
            low, held = low - 1, held + left
        else:
            high, held = high + 1, held + right
    return low, high


def exact(values: Sequence[int]) -> Found:
    """Steps of exact bytes [n]: a value that differs from the one before and stays for LASTING runs. What does not last
    counts with the runs before it; the interval of the ratio is the ratio itself.

    Values are >= 0; a ratio over 0 bytes is infinite.
    """
    n = len(values)
    if n == 0:
        return Found((), (), (), None, LASTING)
    bounds, level = [0], values[0]
    levels = [level]
    for t in range(n - LASTING + 1):
        if values[t] != level and all(values[t + i] == values[t] for i in range(LASTING)):
            level = values[t]
            if t and len(bounds) == 1 and t < LASTING:
                levels[-1] = level  # the very first run was the odd one
                continue
            bounds.append(t)
            levels.append(level)
    stops = [*bounds[1:], n]
    segments = tuple(Segment(a, b, float(v)) for a, b, v in zip(bounds, stops, levels, strict=True))
    steps = []
    for left, right in pairwise(segments):
        ratio = right.level / left.level if left.level else math.inf
        alarm = right.start + LASTING - 1
        at, runs = right.start, right.stop - right.start
        steps.append(Step(at, at, at, alarm, ratio, ratio, ratio, runs, confidence=1.0))
    return Found(segments, tuple(steps), tuple(step.alarm for step in steps), None, LASTING)
