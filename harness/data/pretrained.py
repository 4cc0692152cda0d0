"""The weights that a measured training starts from: random ones, or published ones that the data set brings along.

Standard library and numpy only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np

from harness.data import store
from harness.errors import BadInput
from harness.tasks import Task, initial_parameters

WEIGHTS = "model.safetensors"
PREFIX = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
"""Canonical layer to the name in a BERT of the library transformers."""
IN_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "wide": "intermediate.dense",
    "narrow": "output.dense",
    "norm2": "output.LayerNorm",
}


def starting_parameters(task: Task, seed: int, synthetic: bool = False) -> dict[str, np.ndarray]:
    """Return the canonical float32 weights from which a process starts.

    Args:
        task: the task; of a pretrained one all weights but those of heads and adapters are the published ones.
        seed: of the others.
        synthetic: with a synthetic twin of the data, which has no published weights, all are random.

    Returns:
        The weights by name.

    Raises:
        BadInput: the data set is not in the cache, or its weights are not those of this network.
    """
    values = initial_parameters(task, seed)
    if not task.pretrained or synthetic:
        return values
    stored = read_safetensors(store.further_file(task.dataset, WEIGHTS))
    for name, theirs in _published_names(task):
        found = stored.get(theirs)
        if found is None or found.shape != values[name].shape:
            shape = None if found is None else found.shape
            raise BadInput(f"{WEIGHTS} of {task.dataset}: {theirs} has the shape {shape}, {task.name} needs {name}.")
        values[name] = found
    return values


def _published_names(task: Task) -> Iterator[tuple[str, str]]:
    """Yield (canonical name, published name) of all weights but those of the head and of adapters."""
    for name in task.parameters:
        layer, _, kind = name.rpartition(".")
        if layer == "head" or kind in ("lora_a", "lora_b"):
            continue
        if layer in PREFIX:
            yield name, f"{PREFIX[layer]}.{kind}"
        else:
            block, _, part = layer.partition(".")
            yield name, f"encoder.layer.{block.removeprefix('h')}.{IN_BLOCK[part]}.{kind}"


def read_safetensors(content: bytes) -> dict[str, np.ndarray]:
    """Return the float32 arrays of a file in the format safetensors: the length of a header in JSON, the header with
    type, shape and place of every array, the bytes of the arrays.

    Raises:
        BadInput: the bytes are not of that format.
    """
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        data = memoryview(content)[8 + length :]
        found = {}
        for name, about in header.items():
            if name != "__metadata__" and about["dtype"] == "F32":
                first, last = about["data_offsets"]
                found[name] = np.frombuffer(data[first:last], "<f4").reshape(about["shape"]).copy()
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{WEIGHTS} is no file of arrays ({type(error).__name__}: {error}).") from error
    return found
