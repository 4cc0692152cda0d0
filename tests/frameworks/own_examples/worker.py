"""One adapter beside its library's own example, in the library's environment; findings as JSON on the last line.

``python -m tests.frameworks.own_examples.worker CONTESTANT update|turns TASK [TURNS]``
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract import Adapter, Setting
from harness.optimizer import PLAIN, AdamW, Optimizer
from harness.tasks import Task, initial_parameters, known_task
from harness.worker.process import load_create
from tests.frameworks.own_examples.terms import Example, Terms

ROOT = Path(__file__).parents[3]
BATCH_SIZE = {"update": 24, "turns": 32}
"""Not a power of two where updates are compared: dividing by one is exact, wherever it is done."""
BOUNDS = (0.03, 2.2, 100.0)
"""All examples of the small networks are clipped, some, none: their norms are 1.5 to 3.3."""
OTHER_BOUNDS = {"mnist-cnn": (0.03, 4.8, 100.0), "small-llama": (0.03, 0.9, 100.0)}
"""The same where norms are others, on mnist-cnn 4.0 to 6.1, on small-llama 0.13 to 1.4."""
LORA_DEVIATION = 0.3
SIGMA = 1.0
WARM_UP = 3
"""dpcore examines its first three batches."""
LOOPS = {
    "backpack-batch-grad": "torch_loops",
    "dp_lora-hooks": "torch_loops",
    "dpcore-native": "torch_loops",
    "fastdp-flat": "torch_loops",
    "jax-vmap": "jax_loops",
    "jax_privacy-clipped-grad": "jax_loops",
    "jax_privacy_git-trainer": "jax_loops",
    "keras-make-private": "keras_loops",
    "microbatch-loop": "torch_loops",
    "objax-private-gradients": "jax_loops",
    "opacus-ghost": "torch_loops",
    "opacus-hooks": "torch_loops",
    "opake-vmap": "torch_loops",
    "optax-aggregate": "jax_loops",
    "private_transformers-default": "torch_loops",
    "pyvacy_git-microbatch": "torch_loops",
    "tfp-dpmodel": "keras_loops",
    "torch_func-eager": "torch_loops",
}
"""Module of a contestant's example."""


def optimizer_of(task: Task) -> Optimizer:
    """The task's optimizer at a constant rate, as every library's page has it. The gate checks the warm-up."""
    return replace(task.optimizer, warm_up=0) if isinstance(task.optimizer, AdamW) else task.optimizer


def terms_of(task: Task, size: int, bound: float, sigma: float, rate: float, optimizer: Optimizer) -> Terms:
    """Made-up examples: normal numbers, or ids below the vocabulary."""
    rng = np.random.default_rng(5)
    shape = (size, *task.input_shape)
    if task.input_dtype == "float32":
        x = rng.standard_normal(shape, dtype=np.float32)
    else:
        x = rng.integers(0, task.classes, shape, dtype=np.int32)
    y = rng.integers(0, task.classes, (size, *task.label_shape)).astype(np.int32)
    return Terms(task, _starting_weights(task), x, y, sigma, bound, rate, optimizer)


def _starting_weights(task: Task) -> dict[str, np.ndarray]:
    """The task's, but for LoRA's second matrix: zero as at the start of a training, it gives the first no gradient."""
    rng = np.random.default_rng(7)
    values = initial_parameters(task, 3)
    for name in values:
        if name.endswith(".lora_b"):
            values[name] = (LORA_DEVIATION * rng.standard_normal(values[name].shape)).astype(np.float32)
    return values


def adapter_of(contestant: str) -> Adapter:
    """The benchmark's adapter."""
    framework, variant = contestant.split("-", 1)
    return load_create(ROOT / "frameworks" / framework / "adapter.py")(variant)


def build(adapter: Adapter, contestant: str, terms: Terms) -> None:
    """Build the adapter, from the start where it was built before, and put the batch into its place."""
    setting = Setting(
        variant=contestant.split("-", 1)[1],
        private=True,
        batch_size=terms.batch_size,
        dataset_size=100 * terms.batch_size,
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        learning_rate=terms.learning_rate,
        seed=11,
        padded_sizes=(terms.batch_size,),
        optimizer=terms.optimizer,
    )
    adapter.build(terms.task, setting, terms.initial)
    adapter.place(terms.x, terms.y)


def example_of(contestant: str, terms: Terms) -> Example:
    """The library's own example."""
    loops = importlib.import_module(f"tests.frameworks.own_examples.{LOOPS[contestant]}")
    made: Example = getattr(loops, contestant.replace("-", "_"))(terms)
    return made


def update(contestant: str, task: Task) -> dict[str, Any]:
    """Distances of the example's updates from the adapter's, over the length of those, without noise.

    Returns:
        ``sgd``: the largest of one step at each bound; that of three steps of the task's optimizer, under its name,
        where that is another one;
        ``control``: that of a step at the lowest bound where the example's is 1 % higher, which must be seen.
    """
    size = BATCH_SIZE["update"]
    bounds = OTHER_BOUNDS.get(task.name, BOUNDS)

    def plain(bound: float) -> Terms:
        # A rate by which an update is no smaller than the weights, which are rounded.
        return terms_of(task, size, bound, 0.0, 1.0 / min(bound, 1.0), PLAIN)

    own = terms_of(task, size, 1.0, 0.0, task.learning_rate, optimizer_of(task))
    lowest = plain(min(bounds))
    adapter = adapter_of(contestant)  # one, since it may keep what it has compiled
    distance = partial(_distance, adapter, contestant)
    return {
        "sgd": max(distance(terms, terms, 1) for terms in map(plain, bounds)),
        **({} if task.optimizer == PLAIN else {task.optimizer.name: distance(own, own, 3)}),
        "control": distance(lowest, replace(lowest, max_grad_norm=1.01 * lowest.max_grad_norm), 1),
    }


def _distance(adapter: Adapter, contestant: str, ours: Terms, theirs: Terms, steps: int) -> float:
    """NaN where the adapter does not move.

    Raises:
        ValueError: weights of either have moved that are frozen.
    """
    build(adapter, contestant, ours)
    example = example_of(contestant, theirs)
    start = _flat(ours.initial)
    for _ in range(steps):
        adapter.step(np.arange(ours.batch_size), None)
        example.step(example.draw())
    adapter.synchronize()
    found = [made.parameters() for made in (adapter, example)]
    for values in found:
        check_frozen(ours, values)
    way, other = (_flat(values) - start for values in found)
    return float(np.linalg.norm(way - other) / np.linalg.norm(way))


def check_frozen(terms: Terms, values: Mapping[str, np.ndarray]) -> None:
    """Compare the frozen weights with those of the start.

    Raises:
        ValueError: one has moved.
    """
    frozen = [name for name in terms.task.parameters if name not in terms.task.trained_parameters]
    moved = [name for name in frozen if not np.array_equal(values[name], terms.initial[name])]
    if moved:
        raise ValueError(f"{terms.task.name}: frozen weights have moved: {', '.join(moved)}.")


def _flat(values: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in sorted(values)])


def turns(contestant: str, task: Task, count: int) -> dict[str, Any]:
    """Processor seconds of whole steps, noise included, in turns: adapter, example, example, adapter, adapter ..."""
    terms = terms_of(task, BATCH_SIZE["turns"], 1.0, SIGMA, task.learning_rate, optimizer_of(task))
    rows = np.arange(terms.batch_size)
    adapter = adapter_of(contestant)
    build(adapter, contestant, terms)  # first: TensorFlow takes its threads before anything runs
    example = example_of(contestant, terms)

    def ours() -> float:
        begin = time.process_time()
        adapter.step(rows, None)
        adapter.synchronize()
        return time.process_time() - begin

    def theirs() -> float:
        batch = example.draw()
        begin = time.process_time()
        example.step(batch)
        return time.process_time() - begin

    for _ in range(WARM_UP):
        ours(), theirs()
    pairs = []
    for k in range(count):
        pairs.append((ours(), theirs()) if k % 2 == 0 else (theirs(), ours())[::-1])
    return {
        "adapter_seconds": [a for a, _ in pairs],
        "example_seconds": [e for _, e in pairs],
        "ratio": statistics.median(a / e for a, e in pairs),
    }


def main(contestant: str, kind: str, task: str, count: int = 0) -> dict[str, Any]:
    """Return what was found, with what it was found of."""
    if LOOPS[contestant] != "torch_loops":  # which take as many threads as they have cores
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    measured = update(contestant, known_task(task)) if kind == "update" else turns(contestant, known_task(task), count)
    return {"contestant": contestant, "task": task, kind: measured}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4], *map(int, sys.argv[4:]))))
