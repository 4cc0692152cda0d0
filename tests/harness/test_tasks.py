"""The tasks' networks, counted."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.paths import ROOT
from harness.tasks import (
    FULL_TASKS,
    GATE_TASKS,
    TASKS,
    check_parameters,
    definition_hash,
    initial_parameters,
    known_task,
)

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
    "gpt2-lm-bf16": 1_858_304,
    "llama-lora-bf16": 3_256_000,
    "wrn-16-4": 2_751_146,
    "wrn-16-4-k4": 2_751_146,
    "wrn-16-4-k16": 2_751_146,
    "llama-full": 3_147_456,
    "encoder-full": 22_566_146,
    "encoder-lora": 22_897_922,
    "encoder-bias": 22_566_146,
    "recsys": 788_801,
    "recsys-1m": 1_000_000 * 16 + 11_201,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts(name: str, count: int) -> None:
    assert TASKS[name].parameter_count == count
    values = initial_parameters(TASKS[name], seed=0)
    assert sum(v.size for v in values.values()) == count
    assert all(v.dtype == np.float32 for v in values.values())
    assert check_parameters(TASKS[name], values) is None


VIT_B16 = 86_567_656
FULL_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-774m": 774_030_080,
    "llama-1b": 1_235_814_400,
    "llama-1b-lora": 1_235_814_400 + 16 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192)),
    "encoder-355m": 355_359_744 - 1024 * 1025 + 2 * 1025,  # published, without its pooler, with a head of two
    "encoder-355m-lora": 354_312_194 + 24 * 8 * (4 * 2 * 1024 + 2 * (1024 + 4096)),
    "vit-b16": VIT_B16 - 2 * 768,  # no class token, and no position of it
    "wrn-40-4": 8_955_050,
    "recsys-large": 26 * 2_000_000 * 16 + (13 + 26 * 16 + 1) * 512 + 513 * 256 + 257,
}


@pytest.mark.parametrize("name", FULL_TASKS)
def test_full_tasks_have_the_published_shapes(name: str) -> None:
    task = TASKS[name]
    assert task.parameter_count == FULL_PARAMETERS[name.removesuffix("-bf16")]
    assert task.judged_as in GATE_TASKS and not task.pretrained
    assert (task.precision == "bfloat16") is name.endswith("-bf16") is task.judged_as.endswith("-bf16")


def test_the_large_wide_resnet_is_the_family_of_16_4_with_24_layers_more() -> None:
    middle = [2 * (width * width * 9 + width + 2 * width) for width in (64, 128, 256)]
    assert TASKS["wrn-40-4"].parameter_count == TASKS["wrn-16-4"].parameter_count + 4 * sum(middle)


def test_floor_of_gpt_2_by_hand() -> None:
    task, tokens, dim = TASKS["gpt2-124m"], 100, 768
    maps = 12 * 2 * tokens * 12 * dim * dim
    seen = tokens * (tokens + 1) // 2
    assert task.forward_flops == maps + 12 * 2 * 2 * seen * dim + 2 * tokens * dim * 50_257
    assert task.training_flops == 3 * task.forward_flops


def test_floor_of_the_large_vision_transformer_by_hand() -> None:
    task, places, dim = TASKS["vit-b16"], 196, 768
    patches = 2 * places * dim * 3 * 16 * 16
    maps = 12 * 2 * places * 12 * dim * dim
    assert task.forward_flops == patches + maps + 12 * 2 * 2 * places * places * dim + 2 * dim * 1000


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
    blocks, tokens, dim, words = 2, 40, 16, 307
    maps = blocks * 2 * tokens * (4 * dim * dim + 2 * dim * 4 * dim)
    seen = tokens * (tokens + 1) // 2
    assert task.forward_flops == maps + blocks * 2 * 2 * seen * dim + 2 * tokens * dim * words
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
    blocks, places, dim = 2, 16, 16
    patches = 2 * places * dim * 3 * 2 * 2
    maps = blocks * 2 * places * (4 * dim * dim + 2 * dim * 4 * dim)
    assert task.forward_flops == patches + maps + blocks * 2 * 2 * places * places * dim + 2 * dim * 5
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


def test_the_encoder_is_bert_without_its_pooler_and_with_a_head() -> None:
    tables = (30_522 + 512 + 2) * 384
    block = 4 * 384 * 385 + 384 * 1536 + 1536 + 1536 * 384 + 384 + 2 * 2 * 384
    assert TASKS["encoder-full"].parameter_count == tables + 2 * 384 + 6 * block + 2 * 385


def test_what_the_encoders_train() -> None:
    full, lora, bias = (TASKS[f"encoder-{part}"] for part in ("full", "lora", "bias"))
    assert full.trained_count == full.parameter_count
    head = {"head.weight", "head.bias"}
    assert {n.rpartition(".")[2] for n in lora.trained_parameters.keys() - head} == {"lora_a", "lora_b"}
    assert lora.trained_count == 6 * 8 * (4 * 2 * 384 + 2 * (384 + 1536)) + 2 * 385
    assert all(name.endswith(".bias") for name in bias.trained_parameters.keys() - head)
    assert bias.trained_count == 6 * (4 * 384 + 1536 + 384 + 2 * 384) + 384 + 2 * 385
    assert bias.training_flops < lora.training_flops < full.training_flops


def test_floor_of_the_small_encoder_by_hand() -> None:
    task = GATE_TASKS["small-encoder-full"]
    blocks, tokens, dim, hidden = 2, 16, 16, 40
    maps = blocks * 2 * tokens * (4 * dim * dim + 2 * dim * hidden)
    assert task.forward_flops == maps + blocks * 2 * 2 * tokens * tokens * dim + 2 * dim * 2
    assert task.training_flops == 3 * task.forward_flops, "tokens are looked up, not multiplied"


def test_floor_of_the_small_recommender_by_hand() -> None:
    task = GATE_TASKS["small-recsys"]
    width = 3 + 3 * 4
    assert task.forward_flops == 2 * (width * 16 + 16 * 8 + 8)
    assert task.training_flops == 3 * task.forward_flops, "ids are looked up, and the tables need the first gradient"
    assert task.parameters["bags.f1.weight"] == (40, 4)
    assert task.tokens is None and GATE_TASKS["small-gpt2"].tokens == 40


def test_a_tied_table_has_two_uses_only_where_it_is_trained() -> None:
    assert TASKS["gpt2-lm"].trains_tied_table and not TASKS["llama-lora"].trains_tied_table
    assert TASKS["llama-full"].trains_tied_table


@pytest.mark.parametrize("name", ["gpt2-lm", "llama-lora", "small-gpt2", "small-llama", "small-vit"])
def test_a_task_in_bfloat16_is_the_same_but_for_its_products(name: str) -> None:
    task, lowered = known_task(name), known_task(f"{name}-bf16")
    assert (task.precision, lowered.precision) == ("float32", "bfloat16")
    assert dataclasses.replace(lowered, name=task.name, title=task.title, precision=task.precision) == task
    assert lowered.title == f"{task.title}, in bfloat16"
    assert lowered.weight_bytes == task.weight_bytes and 2 * lowered.activation_bytes == task.activation_bytes
    ours, theirs = (initial_parameters(t, 0) for t in (task, lowered))
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


OWN = """
from harness.tasks import TASKS as KNOWN, Linear, Task, in_bfloat16
mine = Task("mine", "Mine", "own-mine", (4,), "float32", 2, "cross_entropy", (Linear("fc", 4, 2),), 3000, 10)
TASKS = [mine, in_bfloat16(KNOWN["ffnn"])]
"""
SHOW = "from harness import tasks as t; print(*map(t.definition_hash, t.TASKS.values())); print(t.known_task('mine'))"


def _with_tasks(file: Path, *command: str) -> subprocess.CompletedProcess[str]:
    there = {**os.environ, "PYTHONPATH": str(ROOT), "DPBENCH_TASKS": file.name}
    return subprocess.run([sys.executable, *command], env=there, cwd=file.parent, capture_output=True, text=True)


def test_tasks_from_outside_stand_beside_the_others_and_void_no_verdict(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    hashes, shown = _with_tasks(file, "-c", SHOW).stdout.splitlines()
    assert hashes.split()[:-2] == [definition_hash(task) for task in TASKS.values()] and "own-mine" in shown
    run = ("-m", "harness", "run", "e2e", "--tasks", "mine", "--isolation", "docker")
    refused = _with_tasks(file, *run)
    assert refused.returncode == 2 and "--isolation venv" in refused.stderr


@pytest.mark.parametrize("text", ["", "TASKS = [", OWN.replace("3000", "500"), OWN.replace('"mine"', '"vit"')])
def test_a_file_without_tasks_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    refused = _with_tasks(file, "-m", "harness", "list")
    assert refused.returncode == 2 and "mine.py, which gives no tasks" in refused.stderr, refused.stderr
