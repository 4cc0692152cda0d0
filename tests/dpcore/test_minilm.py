"""The encoder of the fine-tuning tasks beside the library transformers, its word pieces beside tokenizers, the example
that fine-tunes it, and its series."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpcore.examples import minilm_imdb
from frameworks._shared.torch import models
from harness.data import pretrained, store
from harness.data.wordpiece import WordPiece
from harness.tasks import GATE_TASKS
from tests.dpcore import minilm_agreement, minilm_series, torchvision_on_cpu

TASK = replace(GATE_TASKS["small-encoder-lora"], dataset="imdb-wordpiece", pretrained=True)


def test_the_task_s_network_with_published_weights_is_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torchvision_on_cpu.make_importable()
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    torch.manual_seed(0)
    sizes = {"vocab_size": 311, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 19, "initializer_range": 0.5}
    bert = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in bert.parameters():  # norms other than ones, biases other than zeros
            parameter.add_(0.3 * torch.randn_like(parameter))
    bert.save_pretrained(tmp_path / "bert")
    rows = {f"{s}_{k}": np.zeros((1, 16) if k == "x" else 1, np.int32) for s in ("train", "test") for k in "xy"}
    weights = (tmp_path / "bert" / "model.safetensors").read_bytes()
    store.write("imdb-wordpiece", False, rows, {}, further={"model.safetensors": weights})

    values = pretrained.starting_parameters(TASK, 0)
    values = {name: np.zeros_like(v) if name.endswith("lora_b") else v for name, v in values.items()}
    ours = models.build_model(TASK, values, torch.float64)
    tokens = torch.randint(1, 311, (5, 16))
    states = bert.double()(tokens).last_hidden_state
    logits = states.mean(1) @ ours.head.weight.T + ours.head.bias
    assert torch.allclose(ours(tokens), logits, rtol=1e-9, atol=1e-9)


WORDS = [
    "film",
    "##s",
    "##'",
    "un",
    "##watch",
    "##able",
    "a",
    "b",
    "é",
    "!",
    ".",
    "中",
    "国",
    "<",
    ">",
    "1",
    "##1",
    "ß",
]
IDS = {piece: i for i, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
TEXTS = [
    "A film. Films! UNWATCHABLE unwatchables",
    "a\tb\nb\x00a\u200bb a\u00a0b \u2028 \x1c\x85b",
    "É e\u0301 \u00df \u1e9e ſ İ",
    "中国film中",
    "<b>11.1</b> $a^b` ~|+=",
    "\ufffd\u00ad\U0001f600 a\u0300b",
    "x" * 101 + " a " + "1" * 100,
    "",
]


def test_word_pieces_are_those_of_the_library() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(IDS, unk_token="[UNK]", max_input_chars_per_word=100))
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ours = WordPiece(IDS)
    for text in TEXTS:
        pieces = [2, *theirs.encode(text).ids, 3]
        assert ours.encode(text, 160) == pieces + [0] * (160 - len(pieces)), repr(text)


@pytest.mark.parametrize("library", minilm_series.LIBRARIES)
@pytest.mark.parametrize("trained", minilm_series.TRAINED)
def test_the_example_spends_its_budget(trained: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if trained == "lora":
        pytest.importorskip("peft")
    path = tmp_path / "run.json"
    command = [sys.executable, *minilm_series.EXAMPLE, "--smoke", "--train", trained, "--library", library]
    done = subprocess.run([*command, "--write", str(path)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "synthetic data" in done.stdout and re.search(r"accuracy 0\.\d+|accuracy 1\.0", done.stdout)
    record = json.loads(path.read_text())
    assert 7.9 < record["epsilon"] < (8.0 + 1e-9 if library == "dpcore" else 8.05)
    assert record["trained_parameters"] == {"full": 28_962, "lora": 3_650, "bias": 386}[trained]
    assert record["steps"] == 4 == round(1 / record["sample_rate"])


def test_a_series_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        made.append(command)
        Path(command[command.index("--write") + 1]).write_text("{}")
        return subprocess.CompletedProcess(command, int("bias" in command))

    monkeypatch.setattr(subprocess, "run", run)
    runs = minilm_series.all_runs()
    assert len(set(runs)) == 18
    rates = {"full": 1.0, "lora": 2.0, "bias": 3.0}
    assert minilm_series.make(runs[:1], rates, Path("d"), tmp_path, []) == []
    failed = minilm_series.make(runs[:6], rates, Path("d"), tmp_path, ["--epochs", "2"])
    assert len(made) == 6 and made[-1][-2:] == ["--epochs", "2"]
    given = {c[c.index("--train") + 1]: float(c[c.index("--learning-rate") + 1]) for c in made}
    assert given == rates
    assert {trained for _, trained, _ in failed} == {"bias"} and len(failed) == 2


def test_the_best_rate_of_each_kind_is_taken_and_no_try_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        rate = float(command[command.index("--learning-rate") + 1])
        trained = command[command.index("--train") + 1]
        made.append((trained, rate))
        accuracy = -rate if trained == "bias" else rate
        Path(command[command.index("--write") + 1]).write_text(json.dumps({"accuracy": accuracy}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        best = minilm_series.tune(Path("d"), tmp_path, [])
    assert best == {"full": 1e-3, "lora": 5e-3, "bias": 2e-3} and len(made) == len(set(made)) == 6
    assert minilm_series.TUNING_SEED not in minilm_series.SEEDS


@pytest.mark.parametrize("trained", minilm_agreement.KINDS)
def test_both_libraries_do_the_same_on_the_same_batches(trained: str) -> None:
    for package in ("transformers", "peft", "opacus"):
        pytest.importorskip(package)
    compared = minilm_agreement.compare(trained, ["--smoke"])
    assert minilm_agreement.agrees(compared), compared
    options = minilm_imdb.parse(["--smoke", "--train", trained, "--max-grad-norm", "0.11"])
    batches = [list(range(40))]
    (other,) = minilm_agreement.run(options, batches, 0.0, 1).gradients
    options.max_grad_norm = 0.1
    (found,) = minilm_agreement.run(options, batches, 0.0, 1).gradients
    assert (found - other).norm() > 0.01 * other.norm()
