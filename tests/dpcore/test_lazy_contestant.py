"""The benchmark's contestants for huge tables: ``dpcore-lazy``, its tables, what it refuses, and weights that are there
when they are waited for; ``pytorch-sparse`` beside it, without DP. The gate judges their updates and the noise
(tests/frameworks/test_conformance.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from frameworks.dpcore.adapter import create
from frameworks.dpcore.lazy import tables_of
from frameworks.pytorch.adapter import create as create_pytorch
from harness.contract import Adapter, Setting, Unsupported, require
from harness.tasks import GATE_TASKS, TASKS, Bags, Task, initial_parameters
from harness.worker.gate import pool as gate_pool

TASK = GATE_TASKS["small-recsys"]
SETTING = Setting(
    variant="lazy",
    private=True,
    batch_size=16,
    dataset_size=gate_pool.POOL_SIZE,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
    learning_rate=TASK.learning_rate,
    seed=5,
)


def weights_after(
    adapter: Adapter, steps: int, waits_after_each: bool = True, setting: Setting = SETTING
) -> dict[str, np.ndarray]:
    """Build, and return the weights after so many steps on batches drawn here."""
    adapter.build(TASK, setting, initial_parameters(TASK, 3))
    adapter.place(*gate_pool.pool(TASK))
    rng = np.random.default_rng(7)
    for _ in range(steps):
        adapter.step(rng.choice(gate_pool.POOL_SIZE, SETTING.batch_size, replace=False), None)
        if waits_after_each:
            adapter.synchronize()
    return dict(adapter.parameters())


def test_every_field_reads_the_rows_of_its_own_ids() -> None:
    task = TASKS["recsys-1m"]
    bags = task.layers[0]
    assert isinstance(bags, Bags)
    x = torch.arange(2 * task.input_shape[0]).reshape(2, -1)
    found = {name: rows_of(x) for name, rows_of in tables_of(task).items() if rows_of is not None}
    assert list(found) == [f"bags.f{i}" for i in range(8)]
    for i, ids in enumerate(found.values()):
        torch.testing.assert_close(ids, x[:, bags.counts + 4 * i : bags.counts + 4 * i + 4])


def test_up_to_eight_steps_at_once_are_those_of_the_dense_engine() -> None:
    dense, single = (weights_after(create(variant), 8) for variant in ("native", "lazy"))
    burst = weights_after(create("lazy"), 8, False)
    for name, value in dense.items():
        np.testing.assert_allclose(single[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(burst[name], single[name], err_msg=name)


def test_weights_are_there_whenever_they_are_read_and_again_after_build() -> None:
    adapter = create("lazy")
    long, again = (weights_after(adapter, 40, False) for _ in range(2))
    for name, value in long.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["mnist-cnn", "logreg", "small-wrn"])
def test_a_task_without_tables_is_refused(name: str) -> None:
    task: Task = {**TASKS, **GATE_TASKS}[name]
    with pytest.raises(Unsupported, match="no tables that are read by ids"):
        create("lazy").build(task, SETTING, initial_parameters(task, 3))


@pytest.mark.parametrize("name", ["small-gpt2", "small-encoder-full", "small-gpt2-bf16"])
def test_a_task_by_another_optimizer_or_precision_is_refused(name: str) -> None:
    task = GATE_TASKS[name]
    with pytest.raises(Unsupported, match=r"SGD only|float32 only"):
        require(create("lazy"), dataclasses.replace(SETTING, optimizer=task.optimizer, precision=task.precision))


def test_sparse_gradients_make_the_update_of_dense_ones() -> None:
    public = dataclasses.replace(SETTING, variant="sparse", private=False)
    sparse, dense = (weights_after(create_pytorch(name), 4, setting=public) for name in ("sparse", "eager"))
    for name, value in dense.items():
        np.testing.assert_allclose(sparse[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    adapter = create_pytorch("sparse")
    adapter.build(TASK, public, initial_parameters(TASK, 3))
    adapter.place(*gate_pool.pool(TASK))
    adapter.optimizer.zero_grad = lambda set_to_none: None
    adapter.step(np.arange(4), None)
    assert {value.grad.is_sparse for name, value in adapter.model.named_parameters() if "bags.f" in name} == {True}
    with pytest.raises(Unsupported, match="no tables"):
        task = TASKS["mnist-cnn"]
        create_pytorch("sparse").build(task, public, initial_parameters(task, 3))
