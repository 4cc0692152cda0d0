"""What comes out of a container is the contestant's word: its shape is checked before anything here relies on it.

Whether the numbers are true is for the gate; these checks are for the harness, which must not fall over nonsense.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from harness.contract import Array
from harness.record import GateCheck, State, Timed
from harness.tasks import TASKS, initial_parameters


class _Layer(BaseModel):
    pass_seconds: list[float] = Field(default_factory=list)


class _Answer(BaseModel):
    """What is read of a ``result`` event, each as the record holds it; what is missing must have been optional."""

    state: State
    reason: str | None = None
    epoch_seconds: list[float] = Field(default_factory=list)
    compile_seconds: float | None = None
    timed: Timed = Field(default=None, validate_default=False)  # type: ignore[assignment]
    foreign_share: float = 0.0
    epsilon_steps: int = Field(default=0, ge=0)
    epsilon_own: float | None = None
    memory: dict[str, int] = Field(default_factory=dict)
    checks: list[GateCheck] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    layer: _Layer = Field(default_factory=_Layer)
    output: str = ""


NEEDED = {
    "time": ("epoch_seconds", "timed", "epsilon_steps"),
    "memory": ("memory",),
    "gate": ("checks",),
    "tool": ("output",),
}


def fault_of_result(result: Mapping[str, Any], mode: str) -> str | None:
    """Why this is no answer to a request of that mode (of a layer: ``""``), or None."""
    try:
        _Answer.model_validate(dict(result), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    missing = [name for name in NEEDED.get(mode, ()) if name not in result]
    return f"without {', '.join(missing)}" if result["state"] == "ok" and missing else None


def fault_of_weights(content: bytes, task: str, largest: int) -> str | None:
    """Why these are no weights of the task's model, or None. ``largest``: bytes that they may take unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > largest:
                return f"more than {largest // 2**20} MiB unpacked"
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            found: dict[str, Array] = {name: archive[name] for name in archive.files}
    except Exception as why:  # readers of archives raise whatever they stumble over
        return f"no archive of arrays ({type(why).__name__})"
    for name, expected in initial_parameters(TASKS[task], 0).items():
        array = found.get(name)
        if array is None or array.shape != expected.shape or array.dtype.kind != "f":
            return f"{name} is {'missing' if array is None else f'{array.dtype} {array.shape}'}"
    return None
