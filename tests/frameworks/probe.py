"""What a contestant must do besides being right: one process in its own environment, findings as JSON on the last line.

``python -m tests.frameworks.probe FOLDER VARIANT TASK private|plain static|any``; standard library and numpy only.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract import Adapter, Setting, Unsupported
from harness.tasks import TASKS, Task, check_parameters, initial_parameters
from harness.worker import memory as resident
from harness.worker import sampling
from harness.worker.process import load_create

BATCH = 16
ROWS = 256
LARGE_BYTES = 64 * 2**20
CYCLES = 2
SEED = 11


class Probe:
    """An adapter in a task's smallest honest surroundings: ROWS made-up examples."""

    def __init__(self, folder: Path, variant: str, task: Task, static: bool, private: bool) -> None:
        self.task = task
        self.create = load_create(folder / "adapter.py")
        self.variant = variant
        self.setting = Setting(
            variant=variant,
            private=private,
            batch_size=BATCH,
            dataset_size=ROWS,
            noise_multiplier=1.1 if private else 0.0,
            max_grad_norm=1.0,
            learning_rate=task.learning_rate,
            seed=SEED,
            precision=task.precision,
            padded_sizes=sampling.padded_sizes(BATCH, ROWS) if static else (),
        )
        self.initial = initial_parameters(task, 3)
        self.adapter: Adapter = self.create(variant)

    def examples(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(5)
        shape = (rows, *self.task.input_shape)
        if self.task.input_dtype == "float32":
            x = rng.standard_normal(shape, dtype=np.float32)
        else:
            x = rng.integers(0, 10_000, shape, dtype=np.int32)
        return x, rng.integers(0, self.task.classes, rows).astype(np.int32)

    def build(self, seed: int = SEED) -> None:
        setting = self.setting if seed == SEED else Setting(**{**vars(self.setting), "seed": seed})
        self.adapter.build(self.task, setting, self.initial)

    def step(self, size: int) -> None:
        rows = np.arange(size, dtype=np.int64)
        sizes = self.setting.padded_sizes
        self.adapter.step(*(sampling.pad(rows, sizes) if sizes else (rows, None)))

    def weights(self) -> np.ndarray:
        self.adapter.synchronize()
        values = self.adapter.parameters()
        return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in self.task.parameters])

    def after(self, *sizes: int, seed: int = SEED) -> np.ndarray:
        """The way from the starting weights to those after steps of these sizes."""
        self.build(seed)
        start = self.weights()
        for size in sizes:
            self.step(size)
        return self.weights() - start

    def parameters(self) -> dict[str, Any]:
        self.build()
        values = self.adapter.parameters()
        return {
            "fault": check_parameters(self.task, values),
            "count": sum(value.size for value in values.values()),
            "dtypes": sorted({str(value.dtype) for value in values.values()}),
            "copies": not any(
                np.shares_memory(value, again)
                for value, again in zip(values.values(), self.adapter.parameters().values(), strict=True)
            ),
        }

    def batches(self) -> dict[str, Any]:
        """Length of the way that one step of each size goes; NaN passes nothing."""
        return {name: _length(self.after(size)) for name, size in SIZES.items()}

    def seeds(self) -> dict[str, float]:
        """Relative difference of the same steps with the same and with another seed."""
        sizes = (BATCH, BATCH - 5, 0, 1)
        first = self.after(*sizes)
        return {
            "same": _length(self.after(*sizes) - first) / _length(first),
            "other": _length(self.after(*sizes, seed=SEED + 1) - first) / _length(first),
        }

    def memory(self) -> dict[str, int]:
        return dict(self.adapter.peak_memory().bytes_by_metric)

    def own_loop(self) -> dict[str, Any]:
        """An epoch of the library's own loop, twice from the start, or why there is none: after an epoch with another
        seed, as when it is timed, and by an adapter that has just been made, as in the replay."""
        ways = []
        try:
            self.build()
            self.adapter.epoch(SEED + 1)
            for _ in range(2):
                self.build()
                start = self.weights()
                updates = self.adapter.epoch(SEED)
                ways.append(self.weights() - start)
                self.adapter = self.create(self.variant)
                self.adapter.build(self.task, self.setting, self.initial)
                self.adapter.place(*self.examples(ROWS))
        except Unsupported as error:
            return {"unsupported": str(error)}
        return {
            "updates": updates,
            "length": _length(ways[0]),
            "difference": _length(ways[1] - ways[0]) / _length(ways[0]),
        }

    def kept(self) -> dict[str, int]:
        """Resident growth over CYCLES lives of an adapter with much data, after one life that may leave what stays."""
        bytes_per_row = 4 * int(np.prod(self.task.input_shape))
        rows = LARGE_BYTES // bytes_per_row
        self.adapter = None  # type: ignore[assignment]
        sizes = []
        for _ in range(CYCLES + 1):
            self.adapter = self.create(self.variant)
            self.build()
            self.adapter.place(*self.examples(rows))
            self.step(BATCH)
            self.weights()
            self.adapter = None  # type: ignore[assignment]
            gc.collect()
            sizes.append(resident.steady())
        return {"growth": sizes[-1] - sizes[0], "placed": CYCLES * LARGE_BYTES}


SIZES = {"empty": 0, "single": 1, "partial": BATCH - 5, "full": BATCH, "large": BATCH + 5}


def _length(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def main(folder: str, variant: str, task: str, private: str, static: str) -> dict[str, Any]:
    probe = Probe(Path(folder), variant, TASKS[task], static == "static", private == "private")
    try:
        found: dict[str, Any] = {"parameters": probe.parameters()}
    except Unsupported as error:
        return {"unsupported": str(error)}
    probe.adapter.place(*probe.examples(ROWS))
    return {
        **found,
        "batches": probe.batches(),
        "seeds": probe.seeds(),
        "memory": probe.memory(),
        "own_loop": probe.own_loop(),
        "kept": probe.kept(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
