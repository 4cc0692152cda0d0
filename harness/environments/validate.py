"""What a worker answers is the contestant's word: its shape and its ranges are checked before anything relies on it,
wherever the worker ran.

Whether the numbers are true is for the gate and the clock; these checks are for the harness, which must not fall over
nonsense.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from harness.contract import Array
from harness.store.record import GateCheck, Timed
from harness.tasks import TASKS, known_task
from harness.worker.e2e import WINDOW_STEPS
from harness.worker.gate import checks as gate_checks
from harness.worker.gate import layers as layer_gate
from harness.worker.layer_request import LayerRequest
from harness.worker.request import Request
from harness.worker.result import NAMES, Result

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Layer(BaseModel):
    pass_seconds: list[Seconds] = Field(default_factory=list)


class _Probe(BaseModel):
    start_up_bytes: Count
    first_step_seconds: Seconds
    step_seconds: list[Seconds] = Field(min_length=1)


class _Timed(Timed):
    steps_per_epoch: int = Field(ge=1)
    steps_timed: int = Field(ge=1)
    epochs: int = Field(ge=1)
    measured_seconds: list[Seconds] = Field(min_length=1)
    first_pass_seconds: NotNegative | None = None
    padding_fraction: float = Field(default=0.0, ge=0, lt=1)
    parameters_read_seconds: list[NotNegative] = Field(default_factory=list)


class _Check(GateCheck):
    error: Annotated[float, Field(allow_inf_nan=False)] | None
    limit: Annotated[float, Field(allow_inf_nan=False)] | None

    @model_validator(mode="after")
    def _passes_as_it_says(self) -> _Check:
        within = self.error is not None and self.limit is not None and self.error <= self.limit
        if self.passed != within:
            raise ValueError(f"{self.check}: passed is {self.passed} with error {self.error} and limit {self.limit}")
        return self


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True))
class _Answer(Result):
    """A result within its ranges; its parts are checked as the record holds them."""

    epoch_seconds: list[Seconds] = field(default_factory=list)
    compile_seconds: NotNegative | None = None
    foreign_share: NotNegative = 0.0
    epsilon_steps: Count | None = None
    memory: dict[str, Count] = field(default_factory=dict)


PARTS: dict[str, type[BaseModel]] = {"timed": _Timed, "probe": _Probe, "layer": _Layer}


def _check_parts(result: Result) -> Iterator[tuple[str, str]]:
    """(where, what is wrong) in the parts of a result."""
    parts = [(name, getattr(result, name), model) for name, model in PARTS.items()]
    parts += [(f"checks.{i}", check, _Check) for i, check in enumerate(result.checks)]
    for name, part, model in parts:
        if part is not None:
            try:
                model.model_validate(part, strict=True)
            except ValidationError as error:
                yield _first(error, name)


def _first(error: ValidationError, *above: str) -> tuple[str, str]:
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, (*above, *first["loc"]))), first["msg"]


def _disagreement(result: Result) -> str | None:
    """Why the seconds of a result contradict each other, or None."""
    if result.timed is None or result.state != "ok":
        return None
    timed = _Timed.model_validate(result.timed)
    scale = timed.steps_per_epoch / timed.steps_timed if timed.extrapolated else 1.0
    if not len(timed.measured_seconds) == timed.epochs == len(result.epoch_seconds):
        return "epoch_seconds, timed.measured_seconds and timed.epochs do not agree"
    pairs = zip(result.epoch_seconds, timed.measured_seconds, strict=True)
    if not all(math.isclose(epoch, measured * scale, rel_tol=1e-6) for epoch, measured in pairs):
        return "epoch_seconds are not the measured seconds of the steps timed"
    return None


LARGEST_WEIGHTS = 256 * 2**20
"""Bytes of one file of arrays, unpacked."""

NEEDED = {
    "time": ("epoch_seconds", "timed", "epsilon_steps"),
    "memory": ("memory",),
    "gate": ("checks",),
    "probe": ("probe", "memory"),
}


def fault_of_result(said: Mapping[str, Any], mode: str) -> str | None:
    """Why this event is no answer to a request of that mode (of a layer: ``""``), or None."""
    try:
        _Answer(**{name: said[name] for name in NAMES & said.keys()})
    except ValidationError as error:
        return ": ".join(_first(error))
    except TypeError:  # a field that must be there is not
        return "state: Field required"
    result = Result.of(said)
    for where, what in _check_parts(result):
        return f"{where}: {what}"
    if fault := _disagreement(result):
        return fault
    missing = [name for name in NEEDED.get(mode, ()) if said.get(name) is None]
    return f"without {', '.join(missing)}" if result.state == "ok" and missing else None


def fault_of_answer(said: Mapping[str, Any], request: Request | LayerRequest) -> str | None:
    """Why this is no answer to ``request``, or None: as :func:`fault_of_result`, and, of a gate that passed, whether it
    made every check that there is; of a layer, whether it made its own."""
    fault = fault_of_result(said, request.mode if isinstance(request, Request) else "")
    if fault is not None or said["state"] != "ok":
        return fault
    result = Result.of(said)
    found = [check["check"] for check in result.checks]
    if isinstance(request, LayerRequest):
        missing = [name for name in layer_gate.names(request.mode, request.passes) if name not in found]
        if request.mode == "time" and not (result.layer or {}).get("pass_seconds"):
            missing.append("pass_seconds")
    elif request.mode == "gate" and all(check["passed"] for check in result.checks):
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
    """(result, names of the ``files`` that may be kept): what the event ``said``, or, where it or a file is no answer
    to ``request``, a crash with the reason in its place; how the process did stays known. ``who`` said it."""
    fault = fault_of_answer(said, request)
    kept = []
    for name, content in files.items():
        why = _fault_of_file(name, content, request) if fault is None else None
        fault = fault or (why and f"{name}.npz: {why}")
        kept += [name] if fault is None else []
    if fault is None:
        return Result.of(said), kept
    known = {name: said[name] for name in ("log_tail", "container", "machine") if name in said}
    return Result("crashed", f"{who} sent what is no result ({fault}).", **known), kept


def _fault_of_file(name: str, content: bytes, request: Request | LayerRequest) -> str | None:
    """Return what is wrong with the file. What a layer's pass left is looked at by the tool that compares it; here it
    is an archive of arrays."""
    if isinstance(request, LayerRequest):
        return _arrays(content, LARGEST_WEIGHTS)[1]
    look = fault_of_replay if name == "checked" else fault_of_weights
    return look(content, request.task, LARGEST_WEIGHTS)


def fault_of_weights(content: bytes, task: str, largest: int) -> str | None:
    """Why these are no weights of the task's model, or None. ``largest``: bytes that they may take unpacked."""
    found, fault = _arrays(content, largest)
    return fault or _fault_of_parts(found, task, [""])


REPLAY_PARTS = ("timed", "replayed", "timed_end", "replayed_end", "exact")
MOST_COMPARED = WINDOW_STEPS + 2
ONE_AXIS = tuple((length,) for length in range(1, MOST_COMPARED + 1))


def fault_of_replay(content: bytes, task: str, largest: int) -> str | None:
    """Why this is not what :func:`harness.worker.e2e.replay` makes, or None."""
    found, fault = _arrays(content, largest)
    if fault is not None:
        return fault
    for name, kind, shapes in (("steps", "i", ((2,),)), ("jump", "f", ((2,),)), ("numbers", "i", ONE_AXIS)):
        array = found.get(name)
        if array is None or array.shape not in shapes or array.dtype.kind != kind:
            return f"{name} is {'missing' if array is None else f'{array.dtype} {array.shape}'}"
    each = range(len(found["numbers"]))
    for name in (f"{i}/rows" for i in each):
        rows = found.get(name)
        if rows is None or rows.ndim != 1 or rows.dtype.kind != "i":
            return f"{name} are no row numbers"
    parts = [*REPLAY_PARTS, *(f"{i}/{part}" for i in each for part in ("before", "after"))]
    return _fault_of_parts(found, task, parts)


def _fault_of_parts(found: Mapping[str, Array], task: str, parts: Iterable[str]) -> str | None:
    """The first weight of the task's model that is not there, of each part."""
    expected = TASKS[task].parameters
    for name, shape in ((f"{p}/{n}" if p else n, shape) for p in parts for n, shape in expected.items()):
        array = found.get(name)
        if array is None or array.shape != shape or array.dtype.kind != "f":
            return f"{name} is {'missing' if array is None else f'{array.dtype} {array.shape}'}"
    return None


def _arrays(content: bytes, largest: int) -> tuple[dict[str, Array], str | None]:
    """(the arrays of an archive, or why it is none)."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > largest:
                return {}, f"more than {largest // 2**20} MiB unpacked"
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}, None
    except Exception as why:  # readers of archives raise whatever they stumble over
        return {}, f"no archive of arrays ({type(why).__name__})"
