"""Validation of a worker's answer, which is the contestant's word: its shape and its ranges are checked before anything
relies on it, wherever the worker ran.

Whether the numbers are true is for the gate and the clock; these checks are for the harness, which must not fall over
nonsense.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from harness.store.record import Timed
from harness.tasks import TASKS, known_task
from harness.worker.gate import checks as gate_checks
from harness.worker.gate import layers as layer_gate
from harness.worker.layer_request import LayerRequest
from harness.worker.replay import FEWEST_COMPARED, WINDOW_STEPS
from harness.worker.request import Request
from harness.worker.result import NAMES, Check, Layer, Probe, Result

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Some = Annotated[list[Seconds], Field(min_length=1)]


STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


@dataclass(frozen=True, config=STRICT)
class _Layer(Layer):
    pass_seconds: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class _Probe(Probe):
    start_up_bytes: Count
    first_step_seconds: Seconds
    step_seconds: Some


@dataclass(frozen=True, config=STRICT)
class _Timed(Timed):
    steps_per_epoch: Positive
    steps_timed: Positive
    epochs: Positive
    measured_seconds: Some
    first_pass_seconds: NotNegative | None = None
    padding_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    parameters_read_seconds: list[NotNegative] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class _Check(Check):
    @model_validator(mode="after")
    def _passes_as_it_says(self) -> _Check:
        within = self.error is not None and self.limit is not None and self.error <= self.limit
        if self.passed != within:
            raise ValueError(f"{self.check}: passed is {self.passed} with error {self.error} and limit {self.limit}")
        return self


@dataclass(frozen=True, config=ConfigDict(strict=True))
class _Answer(Result):
    """A result within its ranges."""

    epoch_seconds: list[Seconds] = field(default_factory=list)
    compile_seconds: NotNegative | None = None
    timed: _Timed | None = None
    foreign_share: NotNegative = 0.0
    throttled: NotNegative = 0.0
    epsilon_steps: Count | None = None
    memory: dict[str, Count] = field(default_factory=dict)
    probe: _Probe | None = None
    layer: _Layer | None = None
    checks: list[_Check] = field(default_factory=list)


ANSWER = TypeAdapter(_Answer)


def _disagreement(result: Result) -> str | None:
    """Return why the seconds of a result contradict each other, or None."""
    if result.timed is None or result.state != "ok":
        return None
    timed = result.timed
    if not len(timed.measured_seconds) == timed.epochs == len(result.epoch_seconds):
        return "epoch_seconds, timed.measured_seconds and timed.epochs do not agree"
    pairs = zip(result.epoch_seconds, timed.measured_seconds, strict=True)
    if not all(math.isclose(epoch, measured * timed.scale, rel_tol=1e-6) for epoch, measured in pairs):
        return "epoch_seconds are not the measured seconds of the steps timed"
    return None


LARGEST_WEIGHTS = 256 * 2**20
"""Bytes of one file of arrays, unpacked, unless the least that a replay leaves of the task's weights is more."""

NEEDED = {
    "time": ("epoch_seconds", "timed", "epsilon_steps"),
    "memory": ("memory",),
    "gate": ("checks",),
    "probe": ("probe", "memory"),
}


def fault_of_result(said: Mapping[str, Any], mode: str) -> str | None:
    """Return why this event is no answer to a request of that mode (of a layer: ``""``), or None."""
    try:
        # As JSON, of which the strict rules take an object for a part.
        ANSWER.validate_json(json.dumps({name: said[name] for name in NAMES & said.keys()}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    result = Result.of(said)
    if fault := _disagreement(result):
        return fault
    missing = [name for name in NEEDED.get(mode, ()) if said.get(name) is None]
    return f"without {', '.join(missing)}" if result.state == "ok" and missing else None


def fault_of_answer(said: Mapping[str, Any], request: Request | LayerRequest) -> str | None:
    """Return why this is no answer to ``request``, or None: as :func:`fault_of_result`, and, of a gate that passed,
    whether it made every check that there is; of a layer, whether it made its own."""
    fault = fault_of_result(said, request.mode if isinstance(request, Request) else "")
    if fault is not None or said["state"] != "ok":
        return fault
    result = Result.of(said)
    found = [check.check for check in result.checks]
    if isinstance(request, LayerRequest):
        missing = [name for name in layer_gate.names(request.mode, request.passes) if name not in found]
        if request.mode == "time" and not (result.layer and result.layer.pass_seconds):
            missing.append("pass_seconds")
    elif request.mode == "gate" and all(check.passed for check in result.checks):
        expected = gate_checks.names(request.private, request.budget is not None, known_task(request.task))
        missing = [name for name in expected if name not in found]
        if not missing and found != expected:
            return "the gate's checks are not those that there are, each once and in order"
    else:
        return None
    return f"without {', '.join(missing)}" if missing else None


def examined(
    said: Mapping[str, Any], request: Request | LayerRequest, files: Mapping[str, bytes], who: str
) -> tuple[Result, list[str]]:
    """Return (result, names of the ``files`` that may be kept): what the event ``said``, or, where it or a file is no
    answer to ``request``, a crash with the reason in its place; how the process did stays known. ``who`` said it."""
    fault = fault_of_answer(said, request)
    kept = []
    for name, content in files.items():
        why = _fault_of_file(name, content, request) if fault is None else None
        fault = fault or (why and f"{name}.npz: {why}")
        kept += [name] if fault is None else []
    if fault is None:
        return Result.of(said), kept
    known = {name: said[name] for name in ("log_tail", "container") if name in said}
    return Result("crashed", f"{who} sent what is no result ({fault}).", **known), kept


def _fault_of_file(name: str, content: bytes, request: Request | LayerRequest) -> str | None:
    """Return what is wrong with the file. What a layer's pass left is looked at by the tool that compares it; here it
    is an archive of arrays."""
    if isinstance(request, LayerRequest):
        return _forms(content, LARGEST_WEIGHTS)[1]
    look = fault_of_replay if name == "checked" else fault_of_weights
    return look(content, request.task, largest_file(request.task))


def largest_file(task: str) -> int:
    """Return the bytes that a file of a task may take unpacked: of a large model, the weights of the fewest steps that
    are compared, before and after each, with a tenth more for what else there is."""
    parts = len(REPLAY_PARTS) + 2 * (FEWEST_COMPARED + 2)
    return max(LARGEST_WEIGHTS, parts * known_task(task).weight_bytes * 11 // 10)


def fault_of_weights(content: bytes, task: str, largest: int) -> str | None:
    """Return why these are no weights of the task's model, or None. ``largest``: bytes that they may take unpacked."""
    found, fault = _forms(content, largest)
    return fault or _fault_of_parts(found, task, [""])


REPLAY_PARTS = ("timed", "replayed", "timed_end", "replayed_end", "exact")
MOST_COMPARED = WINDOW_STEPS + 2
ONE_AXIS = tuple((length,) for length in range(1, MOST_COMPARED + 1))


def fault_of_replay(content: bytes, task: str, largest: int) -> str | None:
    """Return why this is not what :func:`harness.worker.replay.replay` makes, or None."""
    found, fault = _forms(content, largest)
    if fault is not None:
        return fault
    for name, kind, shapes in (("steps", "i", ((2,),)), ("jump", "f", ((2,),)), ("numbers", "i", ONE_AXIS)):
        array = found.get(name)
        if array is None or array.shape not in shapes or array.dtype.kind != kind:
            return f"{name} is {'missing' if array is None else f'{array.dtype} {array.shape}'}"
    each = range(found["numbers"].shape[0])
    for name in (f"{i}/rows" for i in each):
        rows = found.get(name)
        if rows is None or len(rows.shape) != 1 or rows.dtype.kind != "i":
            return f"{name} are no row numbers"
    parts = [*REPLAY_PARTS, *(f"{i}/{part}" for i in each for part in ("before", "after"))]
    return _fault_of_parts(found, task, parts)


class Form(NamedTuple):
    """Shape and type of an array of an archive. Its values are nobody's here, and those of large weights many."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _fault_of_parts(found: Mapping[str, Form], task: str, parts: Iterable[str]) -> str | None:
    """Return the first weight of the task's model that is not there, of each part."""
    expected = TASKS[task].parameters
    for name, shape in ((f"{p}/{n}" if p else n, shape) for p in parts for n, shape in expected.items()):
        array = found.get(name)
        if array is None or array.shape != shape or array.dtype.kind != "f":
            return f"{name} is {'missing' if array is None else f'{array.dtype} {array.shape}'}"
    return None


def _forms(content: bytes, largest: int) -> tuple[dict[str, Form], str | None]:
    """Return (the arrays of an archive, each of which was read to its end, or why it is none)."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > largest:
                return {}, f"more than {largest // 2**20} MiB unpacked"
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: _form(archive[name]) for name in archive.files}, None
    except Exception as why:  # readers of archives raise whatever they stumble over
        return {}, f"no archive of arrays ({type(why).__name__})"


def _form(array: np.ndarray) -> Form:
    return Form(array.shape, array.dtype)
