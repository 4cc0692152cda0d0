"""The tasks' networks, counted; their batches, drawn; their plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.plan import e2e as plan
from harness.plan import protocol, registry
from harness.tasks import GATE_TASKS, TASKS, check_parameters, initial_parameters
from harness.worker import sampling

PARAMETERS = {
    "mnist-cnn": 26_010,
    "cifar10-cnn": 605_226,
    "imdb-embedding": 160_098,
    "imdb-lstm": 1_081_002,
    "logreg": 105,
    "ffnn": 5_352,
    "gpt2-lm": 1_858_304,
    "llama-lora": 3_256_000,
    "vit": 809_098,
    "wrn-16-2": 692_810,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts(name: str, count: int) -> None:
    assert TASKS[name].parameter_count == count
    values = initial_parameters(TASKS[name], seed=0)
    assert sum(v.size for v in values.values()) == count
    assert all(v.dtype == np.float32 for v in values.values())
    assert check_parameters(TASKS[name], values) is None


def test_wrong_weights_are_named() -> None:
    task = TASKS["logreg"]
    values = initial_parameters(task, 0)
    assert "fc.bias has shape (2,)" in str(check_parameters(task, {**values, "fc.bias": np.zeros(2)}))
    assert "parameter names" in str(check_parameters(task, {"fc.weight": values["fc.weight"]}))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    task = TASKS["mnist-cnn"]
    one, again, other = (initial_parameters(task, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(one[k], again[k]) for k in one)
    assert not np.array_equal(one["conv1.weight"], other["conv1.weight"])


def test_floor_of_the_mnist_network_by_hand() -> None:
    task = TASKS["mnist-cnn"]
    conv1 = 2 * 16 * 14 * 14 * 1 * 8 * 8
    conv2 = 2 * 32 * 5 * 5 * 16 * 4 * 4
    linear = 2 * (512 * 32 + 32 * 10)
    assert task.forward_flops == conv1 + conv2 + linear
    assert task.training_flops == 3 * task.forward_flops - conv1
    maps = 16 * 14 * 14 * 2 + 16 * 13 * 13 + 32 * 5 * 5 * 2 + 32 * 4 * 4
    assert task.activation_bytes == 4 * (maps + 512 + 32 * 2 + 10)


def test_floor_of_the_small_transformer_by_hand() -> None:
    task = GATE_TASKS["small-gpt2"]
    tokens, dim, words = 12, 16, 61
    maps = 2 * tokens * (4 * dim * dim + 2 * dim * 4 * dim)
    seen = tokens * (tokens + 1) // 2
    assert task.forward_flops == maps + 2 * 2 * seen * dim + 2 * tokens * dim * words
    assert task.training_flops == 3 * task.forward_flops, "tokens are looked up, not multiplied"


def test_floor_of_the_small_wide_resnet_by_hand() -> None:
    task = GATE_TASKS["small-wrn"]
    stem = 2 * 8 * 8 * 8 * 3 * 9
    first = 2 * 8 * 8 * 8 * (8 * 9 + 8 * 9)
    second = 2 * 4 * 4 * 12 * (8 * 9 + 12 * 9 + 8)
    assert task.forward_flops == stem + first + second + 2 * 12 * 5
    assert task.training_flops == 3 * task.forward_flops - stem


def test_floor_of_the_small_vision_transformer_by_hand() -> None:
    task = GATE_TASKS["small-vit"]
    places, dim = 16, 16
    patches = 2 * places * dim * 3 * 2 * 2
    maps = 2 * places * (4 * dim * dim + 2 * dim * 4 * dim)
    assert task.forward_flops == patches + maps + 2 * 2 * places * places * dim + 2 * dim * 5
    assert task.training_flops == 3 * task.forward_flops - patches


def test_norms_start_with_ones_and_zeros() -> None:
    for name in ("wrn-16-2", "vit"):
        start = initial_parameters(TASKS[name], 0)
        norms = {key: value for key, value in start.items() if "norm" in key}
        assert norms and all((value == (0 if key.endswith("bias") else 1)).all() for key, value in norms.items())


def test_lora_trains_its_adapters_alone_and_pays_no_gradient_of_the_base() -> None:
    task = TASKS["llama-lora"]
    assert all(name.endswith((".lora_a", ".lora_b")) for name in task.trained_parameters)
    widths = [(192, 192), (192, 64), (192, 64), (192, 192), (192, 512), (192, 512), (512, 192)]
    assert task.trained_count == 4 * 8 * sum(a + b for a, b in widths)
    assert 2 * task.forward_flops < task.training_flops < 2.2 * task.forward_flops
    start = initial_parameters(task, 0)
    assert not start["h0.mlp.up.lora_b"].any() and start["h0.mlp.up.lora_a"].any()
    assert (start["h0.norm1.weight"] == 1).all()


def test_a_tied_table_has_two_uses_only_where_it_is_trained() -> None:
    assert TASKS["gpt2-lm"].trains_tied_table and not TASKS["llama-lora"].trains_tied_table


def test_poisson_batches_have_the_right_distribution() -> None:
    n, rate, steps = 2000, 0.03, 4000
    batches = sampling.poisson_batches(n, rate, steps, seed=5)
    sizes = np.array([len(b) for b in batches])
    mean, variance = n * rate, n * rate * (1 - rate)
    assert abs(sizes.mean() - mean) < 5 * math.sqrt(variance / steps)
    assert abs(sizes.var() / variance - 1) < 5 * math.sqrt(2 / steps)
    counts = np.bincount(np.concatenate(batches), minlength=n)
    deviations = (counts - steps * rate) / math.sqrt(steps * rate * (1 - rate))
    assert abs(deviations).max() < 5.5
    assert all(len(np.unique(b)) == len(b) for b in batches)
    together = np.mean([np.isin([0, 1], b).all() for b in batches])
    assert together < 5 * rate**2 + 0.002


def test_poisson_batches_may_be_empty() -> None:
    assert any(len(b) == 0 for b in sampling.poisson_batches(100, 0.01, 50, seed=0))


def test_the_same_seed_gives_the_same_lists() -> None:
    a, b = (sampling.poisson_batches(500, 0.1, 5, seed=9) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_consecutive_batches_keep_the_partial_one() -> None:
    batches = sampling.consecutive_batches(10, 4)
    assert [b.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("batch_size", [1, 16, 64, 512, 2048, 60_000])
def test_padded_sizes_hold_every_batch_with_little_waste(batch_size: int) -> None:
    n = 60_000
    sizes = sampling.padded_sizes(batch_size, n)
    assert len(sizes) <= 6 and sizes[-1] <= n
    assert max(sizes) <= n
    batches = sampling.poisson_batches(n, batch_size / n, 300, seed=1)
    padded = [sampling.pad(b, sizes) for b in batches]
    for indices, (rows, mask) in zip(batches, padded, strict=True):
        assert np.array_equal(rows[mask], indices) and len(rows) in sizes and not rows[~mask].any()
    if batch_size >= 64:
        waste = 1 - sum(map(len, batches)) / sum(len(rows) for rows, _ in padded)
        assert waste < 0.09


@pytest.mark.parametrize("count", [7, 8, 118, 938])
def test_balanced_batches_are_the_same_ones_and_few_of_them_have_the_average_size(count: int) -> None:
    lists = sampling.poisson_batches(60_000, 64 / 60_000, count, seed=3)
    ordered = sampling.balanced(lists)
    assert sorted(map(tuple, ordered)) == sorted(map(tuple, lists))
    sizes = np.array([len(b) for b in ordered])
    mean = sizes.mean()
    for k in range(4, count, 2):
        assert abs(sizes[:k].mean() / mean - 1) < 0.05
    if count > 100:
        assert sizes[: 2 * (count // 4)].std() > 0.5 * sizes.std(), "sizes must still vary"
        errors = [
            abs(np.mean([len(b) for b in f(sampling.poisson_batches(60_000, 64 / 60_000, 938, seed=s))[:4]]) / 64 - 1)
            for f in (sampling.balanced, list)
            for s in range(20)
        ]
        assert np.mean(errors[:20]) < 0.5 * np.mean(errors[20:])


def test_padding_never_cuts_a_batch() -> None:
    with pytest.raises(ValueError, match="larger than every compiled size"):
        sampling.pad(np.arange(9), (4, 8))


def test_protocols_are_data_and_the_page_quotes_every_rule() -> None:
    page = (registry.ROOT / "docs" / "protocol.md").read_text()
    for name in protocol.names():
        loaded = protocol.load(name)
        noise = 0.0 if name == "layers" else 1.1  # whose passes end with the clipped sum
        assert loaded.name == name and (loaded.noise_multiplier, loaded.max_grad_norm) == (noise, 1.0)
        for rule in loaded.rules:
            assert f"**{rule.id}** {rule.text}" in page


def test_every_block_of_the_quick_plan_is_whole() -> None:
    options = plan.preset("quick")
    contestants = registry.select(options.frameworks)
    jobs = [j for j in plan.jobs(options, contestants) if j.purpose == "time"]
    blocks: dict[tuple[str, int, int], list[str]] = {}
    for job in jobs:
        blocks.setdefault((job.cell.task, job.cell.batch_size, job.round), []).append(job.contestant.name)
    assert len(blocks) == sum(len(options.batch_sizes[t]) * options.rounds_of(t) for t in options.tasks) == 31
    names = sorted(c.name for c in contestants)
    assert all(sorted(block) == names for block in blocks.values())
    assert len({job.name for job in jobs}) == len(jobs)


def test_the_plan_depends_on_its_seed_alone() -> None:
    contestants = registry.select(None)
    names = [[j.name for j in plan.jobs(plan.preset("quick", seed=s), contestants)] for s in (1, 1, 2)]
    assert names[0] == names[1] != names[2] and sorted(names[0]) == sorted(names[2])
