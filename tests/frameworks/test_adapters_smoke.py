"""Every adapter that this environment can import, on every task: its update against a float64 loop over examples.

Run it inside a framework's environment (two minutes): ``python -m pytest tests/frameworks/test_adapters_smoke.py``.
Where there is no PyTorch, DPBENCH_TORCH_PYTHON names an interpreter that has it and computes the truth.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from harness import registry
from harness.contract import Setting
from harness.tasks import TASKS
from tests.frameworks import naive

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = {"pytorch": "torch", "opacus": "opacus", "jax": "jax", "dpcore": "torch"}
BATCH = 9
LIMIT = 2e-5

pytestmark = pytest.mark.slow


def _contestants():
    for framework in registry.frameworks().values():
        module = LIBRARY.get(framework.name)
        if module is None or importlib.util.find_spec(module) is None:
            continue
        for variant in framework.variants:
            for task in TASKS:
                if task not in variant.unsupported:
                    yield pytest.param(framework, variant, task, id=f"{framework.name}-{variant.name}-{task}")


CASES = list(_contestants())
if not CASES:
    pytest.skip("no contestant's library is installed here", allow_module_level=True)


@functools.cache
def _gradients(task: str) -> np.ndarray:
    if importlib.util.find_spec("torch"):
        return naive.gradients(TASKS[task])
    python = os.environ.get("DPBENCH_TORCH_PYTHON")
    if not python:
        pytest.skip("no PyTorch here, and DPBENCH_TORCH_PYTHON names no interpreter that has it")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gradients.npz"
        subprocess.run([python, "-m", "tests.frameworks.naive", task, str(out)], cwd=ROOT, check=True)
        return np.load(out)["gradients"]


@functools.cache
def _adapter(name: str, variant: str):
    return importlib.import_module(f"frameworks.{name}.adapter").create(variant)


def _setting(variant: registry.Variant, max_grad_norm: float, sigma: float = 0.0, seed: int = 1) -> Setting:
    return Setting(
        variant=variant.name,
        private=variant.private,
        batch_size=BATCH,
        dataset_size=naive.EXAMPLES,
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        learning_rate=float(BATCH),
        seed=seed,
        threads=2,
        padded_sizes=(naive.EXAMPLES,),
    )


def _flat(values) -> np.ndarray:
    return np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in values.values()])


def _step(adapter, variant: registry.Variant, indices: list[int]) -> None:
    rows, mask = np.array(indices, np.int64), None
    if variant.static_shapes:
        mask = np.arange(naive.EXAMPLES) < len(rows)
        rows = np.concatenate([rows, np.zeros(naive.EXAMPLES - len(rows), np.int64)])
    adapter.step(rows, mask)
    adapter.synchronize()


@pytest.mark.parametrize(("framework", "variant", "task_name"), CASES)
def test_update_equals_float64_loop(framework, variant, task_name, record_property) -> None:
    task = TASKS[task_name]
    x, y, initial = naive.pool(task)
    truth = _gradients(task_name)
    norms = np.linalg.norm(truth, axis=1)
    adapter = _adapter(framework.name, variant.name)
    start = _flat({name: initial[name] for name in task.parameters})

    def update(indices: list[int], bound: float, sigma: float = 0.0, seed: int = 1) -> np.ndarray:
        adapter.build(task, _setting(variant, bound, sigma, seed), initial)
        adapter.place(x, y)
        _step(adapter, variant, indices)
        return start - _flat({name: adapter.parameters()[name] for name in task.parameters})

    some_clipped = float(np.median(norms))
    worst = 0.0
    for indices in (list(range(1, 10)), [4], [3, 3, 5], list(range(naive.EXAMPLES))):
        for bound in (some_clipped, 0.5 * norms.min(), 2 * norms.max()):
            factor = np.minimum(1.0, bound / norms) if variant.private else np.ones_like(norms)
            expected = sum(factor[i] * truth[i] for i in indices)
            error = np.linalg.norm(update(indices, bound) - expected) / np.linalg.norm(expected)
            worst = max(worst, float(error))
    record_property("relative_error", worst)
    print(f"ERROR {framework.name}-{variant.name} {task_name} {worst:.2e}")
    assert worst <= LIMIT

    assert not update([], some_clipped).any()
    once, again = (update([1, 2, 8], some_clipped, sigma=1.0) for _ in range(2))
    assert np.array_equal(once, again)
    if variant.private:
        noise = update([], 2.0, sigma=1.5)
        assert abs(noise.std() / 3.0 - 1) < 5 / np.sqrt(2 * noise.size)
        assert not np.array_equal(noise, update([], 2.0, sigma=1.5, seed=2))
        first = _flat(adapter.parameters())
        _step(adapter, variant, [])
        second = first - _flat(adapter.parameters())
        assert abs(np.corrcoef(noise, second)[0, 1]) < 5 / np.sqrt(noise.size)
