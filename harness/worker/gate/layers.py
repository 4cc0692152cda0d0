"""The correctness check of a layer's contestant, in the very process whose time counts: on a small batch, what a pass
leaves behind must equal a float64 reference, example by example. Standard library and numpy only."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from harness import layers
from harness.layer_contract import LayerAdapter, LayerSetting
from harness.layers import Arrays, Layer
from harness.worker.gate.check import Check
from harness.worker.gate.check import check as line

EXAMPLES = 4
SEED = 2021
TOLERANCE = 1e-4
"""Relative L2 error over all parameters. Float32 sums of up to a million terms stay below 1e-5; a dropped example, a
wrong factor or a mixed-up time axis shows as more than 1e-2."""


def checked_batch(layer: Layer) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random examples of a layer have gradients of nearly the same norm. A gradient is linear in its target, so targets
    4 times as large from example to example spread the norms: half are clipped hard, half not at all."""
    inputs, targets = layers.batch(layer, EXAMPLES, SEED)
    return inputs, targets * spread(EXAMPLES).reshape(-1, *(1 for _ in layer.output))


def spread(examples: int) -> np.ndarray:
    """Factors of the targets, [examples]: 1, 4, 16, 64, and again."""
    return 4.0 ** (np.arange(examples) % EXAMPLES).astype(np.float32)


def checked_weights(layer: Layer) -> dict[str, np.ndarray]:
    return layers.initial_parameters(layer, SEED)


def pack(gradients: Arrays) -> dict[str, np.ndarray]:
    """[n, *shape] by name -> arrays for a file: positions and values where less than half is not zero (embeddings)."""
    packed: dict[str, np.ndarray] = {}
    for name, value in gradients.items():
        packed[f"{name}:shape"] = np.array(value.shape)
        flat = value.reshape(len(value), -1)
        for row, example in enumerate(flat):
            positions = np.flatnonzero(example)
            if 2 * positions.size < example.size:
                packed[f"{name}:{row}:positions"] = positions
                packed[f"{name}:{row}:values"] = example[positions]
            else:
                packed[f"{name}:{row}"] = example
    return packed


@dataclass
class Reference:
    """Per-example gradients out of what :func:`pack` made; one example's are made dense at a time."""

    packed: Mapping[str, np.ndarray]
    examples: int = EXAMPLES

    def example(self, row: int) -> dict[str, np.ndarray]:
        """Flat float64 gradients of one example by parameter."""
        return {name: self._flat(name, row) for name in self.names()}

    def names(self) -> Iterator[str]:
        return (key.removesuffix(":shape") for key in self.packed if key.endswith(":shape"))

    def _flat(self, name: str, row: int) -> np.ndarray:
        if f"{name}:{row}" in self.packed:
            return self.packed[f"{name}:{row}"]
        dense = np.zeros(int(np.prod(self.packed[f"{name}:shape"][1:])))
        dense[self.packed[f"{name}:{row}:positions"]] = self.packed[f"{name}:{row}:values"]
        return dense

    def norms(self) -> list[float]:
        """Of the whole gradient of each example."""
        return [math.sqrt(sum(float(g @ g) for g in self.example(row).values())) for row in range(self.examples)]

    def bound(self) -> float:
        """A C that clips half of the examples."""
        ordered = sorted(self.norms())
        half = len(ordered) // 2
        return 0.5 * (ordered[half - 1] + ordered[half])

    def total(self, bound: float | None) -> dict[str, np.ndarray]:
        """sum_i min(1, C/|g_i|) g_i, flat; without a bound the plain sum."""
        sums: dict[str, np.ndarray] = {}
        for row, norm in enumerate(self.norms()):
            factor = 1.0 if bound is None else min(1.0, bound / norm)
            for name, value in self.example(row).items():
                sums[name] = sums[name] + factor * value if name in sums else factor * value
        return sums


NAMES = {"per_sample": "per-sample-gradients", "clipped": "clipped-sum", "plain": "sum"}
BATCH_DIMENSION = "batch-dimension"


def names(mode: str, passes: str) -> list[str]:
    """The checks of a process that passed them all."""
    return [NAMES[passes], BATCH_DIMENSION] if mode == "time" else [BATCH_DIMENSION]


def check(create: Callable[[], LayerAdapter], layer: Layer, setting: LayerSetting, reference: Reference) -> list[Check]:
    """What the contestant leaves behind on the checked batch, against the reference. The batch is the second that the
    same adapter sees: whoever serves old gradients fails."""
    bound = reference.bound()
    other = layers.batch(layer, EXAMPLES, SEED + 1)
    inputs, targets = checked_batch(layer)
    adapter = create()
    adapter.configure(
        layer, LayerSetting(setting.variant, setting.passes, EXAMPLES, bound, setting.device, setting.threads)
    )
    adapter.place_inputs([other[0], inputs])
    adapter.place_labels([other[1], targets])
    adapter.build(checked_weights(layer))
    for number in (0, 1):
        adapter.run(number)
        adapter.synchronize()
    found = adapter.gradients()
    per_sample = setting.passes == "per_sample"
    expected = {name: (EXAMPLES, *shape) if per_sample else shape for name, shape in layer.parameters.items()}
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    if shapes != expected:
        return [line("shapes", math.inf, 0.0, f"{shapes} instead of {expected}")]
    if per_sample:
        worst = max(
            _relative({name: found[name][row] for name in found}, reference.example(row)) for row in range(EXAMPLES)
        )
        return [line(NAMES[setting.passes], worst, TOLERANCE, "worst example, relative L2 over all parameters")]
    clipped = setting.passes == "clipped"
    error = _relative(found, reference.total(bound if clipped else None))
    return [line(NAMES[setting.passes], error, TOLERANCE, "relative L2 over all parameters")]


def _relative(found: Arrays, truth: Arrays) -> float:
    apart = size = 0.0
    for name, value in truth.items():
        difference = found[name].reshape(-1) - value
        apart += float(difference @ difference)
        size += float(value @ value)
    return math.sqrt(apart / size) if size else math.sqrt(apart)


LAST_PASS = "last-timed-pass"
COMPARED_ROWS = 64


def left_behind(setting: LayerSetting, gradients: Arrays) -> dict[str, np.ndarray]:
    """Arrays for a file: what a pass left, of per-sample gradients some rows, drawn now, as :func:`pack` makes them: of
    a large embedding they would be gigabytes."""
    if setting.passes != "per_sample":
        return {f"gradient/{name}": value for name, value in gradients.items()}
    entropy = np.random.default_rng(secrets.randbits(64))
    rows = np.sort(entropy.permutation(setting.batch_size)[:COMPARED_ROWS])
    return pack({name: value[rows] for name, value in gradients.items()}) | {"rows": rows}


def last_pass(layer: Layer, passes: str, left: Arrays, examples: Iterable[Arrays], bound: float) -> Check:
    """What a timed pass left on the measured batch, against the float64 gradients of its ``examples``, one by one."""
    is_per_sample = passes == "per_sample"
    kept = Reference(left)
    worst, count = 0.0, 0
    sums: dict[str, np.ndarray] = {name: np.zeros(shape) for name, shape in layer.parameters.items()}
    for place, example in enumerate(examples):
        count += 1
        flat = {name: value.reshape(-1) for name, value in example.items()}
        if is_per_sample:
            worst = max(worst, _relative(kept.example(place), flat))
            continue
        norm = math.sqrt(sum(float(value @ value) for value in flat.values()))
        factor = min(1.0, bound / norm) if passes == "clipped" and norm else 1.0
        for name, value in example.items():
            sums[name] += factor * value
    if not is_per_sample:
        found = {name: left[f"gradient/{name}"] for name in layer.parameters}
        worst = _relative(found, {name: value.reshape(-1) for name, value in sums.items()})
    detail = f"relative L2 error over {count} examples of the measured batch"
    return line(LAST_PASS, worst, TOLERANCE, detail)


def batch_dimension(layer: Layer, setting: LayerSetting, shapes: Mapping[str, tuple[int, ...]]) -> Check:
    """On the measured batch itself: every per-sample gradient has one entry per example, every sum none."""
    lead = (setting.batch_size,) if setting.passes == "per_sample" else ()
    wrong = {name: shapes.get(name) for name, shape in layer.parameters.items() if shapes.get(name) != (*lead, *shape)}
    return line(BATCH_DIMENSION, float(len(wrong)), 0.0, f"wrong shapes: {wrong}" if wrong else "")
