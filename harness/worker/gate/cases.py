"""What the admission gate trains on: starting weights, and the list of batches with known updates.

All of it follows from the task alone, so the process that computes the float64 truth and the one that drives an adapter
agree without exchanging anything but the truth. Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.network import parameter_shapes, walk
from harness.optimizer import SGD, AdamW
from harness.tasks import (
    NOT_OWN,
    TOKEN_LOSS,
    Embedding,
    GroupNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Task,
    initial_parameters,
)
from harness.worker.gate.pool import BLANK, COPIES, OUTLIER_EMBEDDING_SCALE, OUTLIERS, POOL_SIZE, SEED, pool

Values = dict[str, np.ndarray]

BATCH = 16
LARGE_BATCH = 95
"""With it no power of two, and no multiple of 100, divides the large batch: a short last piece that an adapter leaves
out is missed."""
LARGE_DIVISOR = 80
"""The large batch has more rows than its expected size says, as every other Poisson batch has: noise that is divided by
the number of rows, where that is the larger one, comes out too small."""
LARGE_REPEATS = (5, 22)
"""The adapter's data set holds every row of the pool many times, so that a batch of copies has a multiple of the known
sum: more rows than adapters that cut a batch into chunks are likely to take at once, and no further truth. 2,090 rows
where they fit into LARGE_BYTES and LARGE_FLOPS, at least 475."""
DEAR_FLOPS = 1e9
"""Size of one example from which on the large batch holds every row once."""
LARGE_BYTES = 2 * 2**30
"""Of per-example gradients, which some libraries keep."""
LARGE_FLOPS = 1.3e11
RELU_GAIN = np.float32(6**0.5)
"""Turns uniform +-1/sqrt(fan_in) into He's variance 2/fan_in. Otherwise the gradient of a deep ReLU network is nearly
that of its last bias, the same for every example, and a fault in an early layer would hardly show."""
CORE = 48
"""So many rows, those farthest from a kink of a ReLU or max-pooling, make up the small batches."""
FAINT = 0.01
"""Of the pool's median norm: rows with less are in no small batch, for the float32 rounding of the weights would hide
the whole update of one of them. A recommender that is sure of a click has such rows."""
MOST_ROWS = 48
SOME_ROWS = (2, 3, 4, 5, 7, 12, 17, 24, 31, 32, 33, MOST_ROWS)
FEW_ROWS = (3, 7)
"""Batches of every size up to MOST_ROWS are driven where rows cost next to nothing, of some where they are cheap, and
elsewhere of few."""
FREE_FLOPS, CHEAP_FLOPS = 1e6, 1e7
"""Arithmetic of one example: up to the first, rows cost next to nothing, and up to the second they are cheap."""
LATE_STEPS = (40, 130)
LATE_LAST = 4
"""Many steps in one build, and so many at their end that are looked at by themselves. The second number of steps is
that of cheap tasks without kinks: it passes the 64th and the 128th, where authors like to do something."""
LATE_RATE = (BATCH / 1024, BATCH / 256)
"""So small that the weights stay near the start, where no ReLU changes its mind in float32."""
TOLERANCE = 5e-5
"""Relative L2 error of an update. Float32 arithmetic gives 1e-7 to 1e-5; the rest is room for clip factors with a
margin, C/(|g| + 1e-6) or C(1 - 2^-16)/|g|, which are right too."""
LATE_SLACK = (200.0, 2.0)
"""After many steps float32 weights may stand on the other side of a kink than float64 ones: in the deepest network
2e-3 of the last four updates was seen. A step left out of forty is 2e-2 or more. The second is that of networks without
kinks. Near kinks the reference also takes the many steps with a bound that is lower by the tolerance, and what that
moves is allowed besides: in float64 a bound lower by 3e-5 moved the last four of CIFAR-10's updates by 1.2e-2, one
lower by 5e-6 by 4e-6."""
DRIFT = 0.2
"""So far, as a share of their own length, several steps may move the weights of a transformer at most. Further away a
step may be too long for the curvature, and rounding grows with every step: at a rate of 1 float32 was 1.6e-3 off after
three steps of LoRA, whose weights are few."""
MATRIX_GAIN = np.float32(5.0)
"""Turns a transformer's starting deviation of 0.02 into about 1/sqrt(128): attention that is nearly uniform has hardly
a gradient for queries and keys."""
NORM_DEVIATION = 0.1
"""Norms' weights and biases are given other values than ones and zeros, which hide a fault."""
LORA_DEVIATION = 0.3
"""Size of lora_b, which is zero at the start of a training: then lora_a has no gradient."""
UNCLIPPED = 4.0
"""Times the largest norm: a bound that clips nobody."""
ADAM_RATE = 1e-3
ADAM_DECAY = 0.1
ADAM_WARM_UP = 3
"""Of the steps of AdamW: the rate rises, and then it stays."""
ADAM_EMPTY = 6
ADAM_SHORT_MEMORY = 0.9
"""Of the steps of AdamW so many are empty, before the last one, and the mean of squares forgets fast: it falls, which
shows whether a library keeps the largest one."""
ADAM_STEPS = "steps of AdamW"
OWN_TOKENS = "short and long, none clipped"
SATURATION = 300.0
"""exp(-300) is zero in float32 and logits of ordinary examples stay far below: softmax and sigmoid give 1 exactly."""
ROUNDING_FACTOR = 3.0
"""Where a task's precision is lower, an update may be off by so many times what the reference finds that this rounds
away of that very batch. It rounds what goes into products and what comes out of them; frameworks round GELU, norms
and sums of gradients, too: at most twice as many places, whose errors add as squares. And two draws of one error
differ."""


@dataclass(frozen=True)
class Case:
    """One or more steps from the starting weights, whose total displacement is known.

    ``slack``: factor on the tolerance of the precision. ``stored``: the case whose truth this one shares. ``repeats``:
    so many copies of every row make up the driven batch, and so many times ``batch_size`` is the divisor.
    ``optimizer``: that of the steps; None for one that moves the weights by the rate times the gradient.
    """

    name: str
    batches: tuple[np.ndarray, ...]
    max_grad_norm: float
    batch_size: int = BATCH
    learning_rate: float = float(BATCH)
    saturated: bool = False
    slack: float = 1.0
    stored: str = ""
    repeats: int = 1
    optimizer: AdamW | None = None

    @property
    def truth(self) -> str:
        return self.stored or self.name


class Layout:
    """The adapter's whole data set: as large as the task's own, each row of the pool many times, at random places.

    ``ends``: two rows of the pool, of which one copy each lies at the last place and at the first, to which padding
    points; wherever a single copy of them is asked for, it is that one.
    """

    def __init__(self, task: Task, ends: tuple[int, int], rng: np.random.Generator) -> None:
        self.rng = rng
        self.task = task
        self.owner = rng.permutation(task.train_size) % POOL_SIZE
        for place, row in ((-1, ends[0]), (0, ends[1])):
            here = np.flatnonzero(self.owner == row)[0]
            self.owner[[place, here]] = self.owner[[here, place]]
        self.places = {row: np.flatnonzero(self.owner == row) for row in range(POOL_SIZE)}
        self.fixed = {ends[0]: task.train_size - 1, ends[1]: 0}

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) to place."""
        x, y = pool(self.task)
        return x[self.owner], y[self.owner]

    def rows(self, rows: np.ndarray, repeats: int = 1) -> np.ndarray:
        """Places of ``repeats`` copies of each of these rows of the pool, none twice."""
        chosen = [self._copies(int(row), repeats) for row in rows]
        return np.array(chosen, dtype=np.int64).T.ravel()

    def _copies(self, row: int, repeats: int) -> np.ndarray:
        if repeats == 1 and row in self.fixed:
            return np.array([self.fixed[row]])
        return self.rng.choice(self.places[row], size=repeats, replace=False)


def large_repeats(task: Task) -> int:
    """How many copies of LARGE_BATCH rows the large batch holds."""
    most = min(LARGE_BYTES // task.weight_bytes, LARGE_FLOPS // task.training_flops) // LARGE_BATCH
    least, at_most = LARGE_REPEATS
    return int(np.clip(most, least if task.training_flops < DEAR_FLOPS else 1, at_most))


def large_rows(task: Task) -> int:
    """Size of the large batch."""
    return LARGE_BATCH * large_repeats(task)


def starting_weights(task: Task, saturated: bool = False) -> Values:
    """The task's own kind of starting weights, rescaled so that every layer matters. ``saturated``: the last bias is so
    large that class 1 has p = 1 exactly, and the gradient of every ordinary example with that label is zero; not where
    examples are token sequences, of which some have no token of their own and no gradient."""
    values = initial_parameters(task, SEED)
    if task.initial_deviation is not None:
        values = _lively(values)
    else:
        _rescale(task, values)
    if saturated and task.loss != TOKEN_LOSS:
        last = list(values)[-1]
        values[last][-1 if task.loss == "binary_cross_entropy" else 1] += SATURATION
    return values


def _rescale(task: Task, values: Values) -> None:
    rng = np.random.default_rng([SEED, 0x11FE])
    if any(isinstance(layer, ReLU) for layer in walk(task.layers)):
        for name, value in values.items():
            if value.ndim > 1:
                values[name] = RELU_GAIN * value
    for layer in walk(task.layers):
        if isinstance(layer, Embedding):
            values[f"{layer.name}.weight"][-1] *= OUTLIER_EMBEDDING_SCALE  # the outliers' row
        elif isinstance(layer, GroupNorm):
            for name, shape in parameter_shapes(layer).items():
                values[name] += (NORM_DEVIATION * rng.standard_normal(shape)).astype(np.float32)


def _lively(values: Values) -> Values:
    """A transformer's starting weights such that every one of its parameters has a gradient that shows."""
    rng = np.random.default_rng([SEED, 0x11FE])
    found = {}
    for name, value in values.items():
        if name.endswith(".lora_b"):
            change = LORA_DEVIATION * rng.standard_normal(value.shape)
        elif name.endswith(".lora_a"):
            change = np.zeros(value.shape)
        elif value.ndim > 1:
            change = (MATRIX_GAIN - 1) * value
        else:
            change = NORM_DEVIATION * rng.standard_normal(value.shape)
        found[name] = (value + change).astype(np.float32)
    return found


def zero_gradient_rows(task: Task) -> np.ndarray:
    """Ordinary rows whose gradient is zero at the saturated weights, at least 8."""
    _, y = pool(task)
    if task.loss == TOKEN_LOSS:
        return np.arange(BLANK.start, BLANK.stop, dtype=np.int64)
    return np.flatnonzero(y[: POOL_SIZE - COPIES - OUTLIERS] == 1).astype(np.int64)[:8]


def clipping_norm(reference: Mapping[str, np.ndarray]) -> float:
    """The median norm of the core rows, as a float32 so that every framework clips at the same number."""
    return float(np.float32(np.median(reference["norms"][_core(reference)])))


def _core(reference: Mapping[str, np.ndarray]) -> np.ndarray:
    norms, instability = (reference[name][: POOL_SIZE - COPIES - OUTLIERS] for name in ("norms", "instability"))
    is_faint = norms < FAINT * np.median(norms)
    return np.argsort(np.where(is_faint, np.inf, instability), kind="stable")[:CORE]


def _near_rate(task: Task, reference: Mapping[str, np.ndarray], rate: float, steps: int) -> float:
    """Return the rate of several steps: ``rate``, or of a task with AdamW, which are the transformers, the one at which
    so many steps of the longest gradient would move the trained weights by DRIFT of their length, if it is lower."""
    if not isinstance(task.optimizer, AdamW):
        return rate
    start = starting_weights(task)
    length = float(np.sqrt(sum(np.square(start[name], dtype=float).sum() for name in task.trained_parameters)))
    longest = float(reference["norms"][_core(reference)].max())
    return min(rate, float(np.float32(DRIFT * length / (steps * longest))))


def cases(task: Task, reference: Mapping[str, np.ndarray], private: bool) -> list[Case]:
    """The batches of the gate, given ``norms`` and ``instability`` [POOL_SIZE] of the pool's examples. Those of an
    adapter without privacy are some of the private ones.

    Most cases share clipping norm, batch size and rate (= batch size, so that the update is the sum itself), since a
    framework may have to compile for a new setting.
    """
    norms, instability = reference["norms"], reference["instability"]
    core = _core(reference)
    by_norm = core[np.argsort(norms[core], kind="stable")].astype(np.int64)
    low, high = by_norm[:8], by_norm[-8:][::-1].copy()
    some = np.stack([high, low], axis=1).ravel()
    steady_copies = 1 + np.argsort(instability[1 : 1 + COPIES], kind="stable")[:2]
    copied = np.concatenate([[i, POOL_SIZE - COPIES - 1 + i] for i in steady_copies] + [high[:1], low[:1]])
    outlier = POOL_SIZE - COPIES - OUTLIERS + int(np.argmax(norms[-COPIES - OUTLIERS : -COPIES]))
    zero = zero_gradient_rows(task)
    labels = pool(task)[1][core]
    not_zero = (core if labels.ndim > 1 else core[labels != 1])[:4].astype(np.int64)
    everyone = np.argsort(instability[: POOL_SIZE - COPIES - OUTLIERS], kind="stable")[:LARGE_BATCH].astype(np.int64)
    c = clipping_norm(reference)
    shared = [
        Case("some clipped", (some,), c),
        Case("permuted", (np.roll(some[::-1], 3).copy(),), c, stored="some clipped"),
        Case("one, clipped", (high[:1],), c),
        Case("duplicates", (copied.astype(np.int64),), c),
        Case("empty", (np.zeros(0, dtype=np.int64),), c),
        Case("other C, B and rate", (some,), 0.37 * c, batch_size=10, learning_rate=5.0),
        # Sums of so many rows: a right one was 1.07 off, one that keeps rows in half precision 1.7.
        Case(
            "large batch", (everyone,), c, LARGE_DIVISOR, float(LARGE_DIVISOR), slack=1.5, repeats=large_repeats(task)
        ),
        # After the first step the weights may come near a kink, hence the slack.
        Case("three steps", (some, low, high), c, learning_rate=_near_rate(task, reference, BATCH / 16, 3), slack=20.0),
    ]
    shared += _further_cases(task, reference, core, [some, low, high, some[::2].copy(), some])
    if not private:
        return shared
    return [
        Case("all clipped", (high,), c),
        Case("none clipped", (low,), c),
        *shared[:2],
        shared[2],
        Case("one, not clipped", (low[:1],), c),
        *shared[3:5],
        Case("outlier", (np.append(low[:5], outlier),), c),
        Case("zero gradients", (zero,), c, saturated=True),
        Case("zero and other gradients", (np.append(zero[:4], not_zero),), c, saturated=True),
        *shared[5:],
    ]


def _further_cases(
    task: Task, reference: Mapping[str, np.ndarray], core: np.ndarray, steps: list[np.ndarray]
) -> list[Case]:
    """Return the cases that only some tasks have: own tokens, whose mean is an example's loss; Adam, whose memory
    and decay show over some steps. Its eps is about as large as the gradient's values, so that all of its
    parts matter alike."""
    found = []
    c = clipping_norm(reference)
    if task.loss == TOKEN_LOSS:
        own = (pool(task)[1][core] != NOT_OWN).sum(axis=1)
        by_length = core[np.argsort(own, kind="stable")].astype(np.int64)
        ends = np.concatenate([by_length[:3], by_length[-3:]])
        found.append(Case(OWN_TOKENS, (ends,), float(np.float32(UNCLIPPED * reference["norms"][core].max()))))
    if isinstance(task.optimizer, AdamW):
        eps = float(np.float32(c / np.sqrt(task.trained_count)))
        optimizer = AdamW(task.optimizer.beta1, ADAM_SHORT_MEMORY, eps, ADAM_DECAY, ADAM_WARM_UP)
        steps = [*steps, *[steps[0][:0]] * ADAM_EMPTY, steps[0]]
        found.append(Case(ADAM_STEPS, tuple(steps), c, learning_rate=ADAM_RATE, slack=20.0, optimizer=optimizer))
    return found


SHARED = ("some clipped", "permuted", "one, clipped", "duplicates", "empty")
SHARED_LAST = ("other C, B and rate", "large batch", "three steps")


def names(private: bool, task: Task | None = None) -> list[str]:
    """Return the names of :func:`cases`, in their order; without a task, those that every one has."""
    last = [*SHARED_LAST]
    if task is not None:
        last += [OWN_TOKENS] if task.loss == TOKEN_LOSS else []
        last += [ADAM_STEPS] if isinstance(task.optimizer, AdamW) else []
    if not private:
        return [*SHARED, *last]
    first = ["all clipped", "none clipped", *SHARED[:3], "one, not clipped", *SHARED[3:]]
    return [*first, "outlier", "zero gradients", "zero and other gradients", *last]


def is_cheap(task: Task) -> bool:
    return task.training_flops <= CHEAP_FLOPS


def size_cases(task: Task, reference: Mapping[str, np.ndarray]) -> list[Case]:
    """Batches of every size up to MOST_ROWS, of SOME_ROWS or of FEW_ROWS; each holds all rows of the one before."""
    order = np.random.default_rng([SEED, 0x512E]).permutation(_core(reference)).astype(np.int64)
    is_free = task.training_flops <= FREE_FLOPS
    sizes = range(1, MOST_ROWS + 1) if is_free else SOME_ROWS if is_cheap(task) else FEW_ROWS
    return [Case(f"{size} rows", (order[:size],), clipping_norm(reference)) for size in sizes]


def has_kinks(task: Task) -> bool:
    """Return whether the network has layers whose derivative jumps."""
    return any(isinstance(layer, ReLU | MaxPool2d) for layer in walk(task.layers))


def late_cases(task: Task, reference: Mapping[str, np.ndarray]) -> tuple[Case, Case]:
    """Many steps in one build, without the last few and with them: some of its examples clipped, some steps empty."""
    some = next(case for case in cases(task, reference, private=True) if case.name == "some clipped").batches[0]
    parts = [*some.reshape(-1, 4), some[:0]]
    is_smooth = is_cheap(task) and not has_kinks(task)
    batches = [parts[t % len(parts)] for t in range(LATE_STEPS[is_smooth] - LATE_LAST)]
    batches += [some, some[::3], some[1::3], some]
    c = clipping_norm(reference)
    rate = _near_rate(task, reference, LATE_RATE[is_smooth], len(batches))
    whole = Case("many steps", tuple(batches), c, learning_rate=rate, slack=LATE_SLACK[is_smooth])
    return replace(whole, name="the first of many steps", batches=whole.batches[:-LATE_LAST]), whole


def last_case(task: Task, reference: Mapping[str, np.ndarray]) -> Case:
    """The last few of the many steps by themselves: the name under which their rounding is stored."""
    _, whole = late_cases(task, reference)
    return replace(whole, name="the last of many steps", batches=whole.batches[-LATE_LAST:])


def stored_cases(task: Task, reference: Mapping[str, np.ndarray], private: bool) -> list[Case]:
    """All cases that have a truth of their own."""
    every = [*cases(task, reference, private), *size_cases(task, reference), *late_cases(task, reference)]
    return [case for case in every if not case.stored]


def sensitivity_pairs(task: Task, reference: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, batch, the same batch with one example more)."""
    by_name = {case.name: case.batches[0] for case in cases(task, reference, private=True)}
    some, outlier = by_name["some clipped"], by_name["outlier"]
    return [
        ("a clipped one", some[1:], some),
        ("one that is not clipped", some[:-1], some),
        ("an outlier", outlier[:-1], outlier),
        ("the first one", some[:0], some[:1]),
    ]


LARGE_WIDTH = 3072
LARGE_GAIN = np.float32(8.0)
"""On the last layer, so that nearly all of the gradient is that of the large parameter."""
LARGE_PARAMETER = Task(
    name="large-parameter",
    title="One example, one large parameter",
    dataset="",
    input_shape=(LARGE_WIDTH,),
    input_dtype="float32",
    classes=2,
    loss="cross_entropy",
    layers=(Linear("fc1", LARGE_WIDTH, LARGE_WIDTH), Linear("fc2", LARGE_WIDTH, 2)),
    train_size=2,
    test_size=0,
    in_paper=False,
    optimizer=SGD(),
)
"""The squares of its first parameter's gradient are of one size, and so many that a float32 sum of one after the other
loses some: the norm comes out too small, and the clipped gradient too long."""


@dataclass(frozen=True)
class LargeExample:
    """Starting weights and data of LARGE_PARAMETER, and the norm of the first example's gradient."""

    weights: Values
    x: np.ndarray
    y: np.ndarray
    norm: float


def large_example() -> LargeExample:
    """In closed form: the network is linear up to its loss."""
    weights = initial_parameters(LARGE_PARAMETER, SEED)
    weights["fc2.weight"] = LARGE_GAIN * weights["fc2.weight"]
    x = np.random.default_rng([SEED, 0x1A26]).standard_normal((2, LARGE_WIDTH)).astype(np.float32)
    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    hidden = exact["fc1.weight"] @ x[0].astype(np.float64) + exact["fc1.bias"]
    logits = exact["fc2.weight"] @ hidden + exact["fc2.bias"]
    label = int(np.argmin(logits))
    by_logit = np.exp(logits - logits.max())
    by_logit /= by_logit.sum()
    by_logit[label] -= 1.0
    by_hidden = exact["fc2.weight"].T @ by_logit
    squares = (by_logit @ by_logit) * (hidden @ hidden + 1.0)
    squares += (by_hidden @ by_hidden) * (float(np.square(x[0], dtype=np.float64).sum()) + 1.0)
    return LargeExample(weights, x, np.array([label, 1 - label], dtype=np.int32), float(np.sqrt(squares)))


def pack(name: str, values: Mapping[str, np.ndarray]) -> Values:
    """Arrays for an npz file: of a matrix with mostly empty rows (an embedding's gradient) only the others are kept."""
    packed = {}
    for parameter, value in values.items():
        rows = np.flatnonzero(value.any(axis=tuple(range(1, value.ndim)))) if value.ndim > 1 else np.arange(len(value))
        if 2 * len(rows) < len(value):
            packed[f"{name}/{parameter}:rows"], packed[f"{name}/{parameter}:values"] = rows, value[rows]
        else:
            packed[f"{name}/{parameter}"] = value
    return packed


def unpack(name: str, task: Task, packed: Mapping[str, np.ndarray]) -> Values:
    """What :func:`pack` was given, float64."""
    values = {}
    for parameter, shape in task.parameters.items():
        key = f"{name}/{parameter}"
        if key in packed:
            values[parameter] = packed[key]
        else:
            values[parameter] = np.zeros(shape)
            values[parameter][packed[f"{key}:rows"]] = packed[f"{key}:values"]
    return values


def truth_name(case: Case, private: bool) -> str:
    return f"{'clipped' if private else 'plain'}/{case.truth}"


def rounding_name(case: Case, private: bool) -> str:
    return f"rounding/{truth_name(case, private)}"
