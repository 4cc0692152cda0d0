"""The record: what one measuring process leaves behind. A failure is a record too.

One JSON file per process. A finished run may be packed into one ``.jsonl`` (a record a line); readers take both. Old
schemas are upgraded on reading and never rewritten; a newer one is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import BadInput

SCHEMA = 1

State = Literal["ok", "rejected", "oom", "timeout", "crashed", "unsupported"]
Purpose = Literal["time", "memory", "gate"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(_Model):
    """What is measured. Two records of one cell differ in their block only."""

    kind: Literal["e2e"] = "e2e"
    task: str
    framework: str
    variant: str
    private: bool
    batch_size: int
    protocol: str
    device: str
    isolation: str

    @property
    def contestant(self) -> str:
        """``opacus-hooks``; plain ``pytorch-eager``."""
        return f"{self.framework}-{self.variant}"

    @property
    def name(self) -> str:
        """What ``dpbench explain`` takes."""
        return "/".join((self.task, self.contestant, str(self.batch_size), self.protocol, self.device, self.isolation))


class Data(_Model):
    name: str
    synthetic: bool
    origin: str
    sha256: str
    train_size: int


class Timed(_Model):
    """How the seconds came about. ``extrapolated``: epoch_seconds are the measured ones times
    steps_per_epoch / steps_timed. ``replay_error``: distance of the weights after the first timed steps from an untimed
    replay, over the distance travelled; None where they were not compared (later rounds, no memory process).

    Protocol ``as_shipped`` only: ``own_sampling`` (``poisson``, ``shuffled`` or ``fixed``) is how the library's own
    loop draws its batches, ``updates`` how many it made in the first timed epoch (None: it does not say)."""

    steps_per_epoch: int
    steps_timed: int
    epochs: int
    extrapolated: bool
    measured_seconds: list[float]
    first_pass_seconds: float | None = None
    warm_up_steps: int = 0
    padding_fraction: float = 0.0
    parameters_read_seconds: list[float] = Field(default_factory=list)
    rows_timed: int | None = None
    replay_error: float | None = None
    own_sampling: str | None = None
    updates: int | None = None


class GateCheck(_Model):
    """One line of the admission gate. ``error`` and ``limit`` in the check's own measure; passes if error <= limit."""

    check: str
    error: float | None
    limit: float | None
    passed: bool
    detail: str = ""


class Gate(_Model):
    passed: bool
    key: str
    checks: list[GateCheck]


class Epsilon(_Model):
    """After ``steps`` steps at ``delta``; ``own`` is the library's. None where batches are no Poisson samples."""

    delta: float
    steps: int
    rdp: float | None
    pld: float | None
    own: float | None


class Accuracy(_Model):
    test: float
    after_steps: int


class Load(_Model):
    """``foreign_share``: share of the machine's processors that other processes took inside the clock.
    ``canary_before``/``after``: seconds of a fixed matrix product and copy, by the harness itself."""

    foreign_share: float
    disturbed: bool
    repeats: int
    canary_before: float | None = None
    canary_after: float | None = None


class Seeds(_Model):
    initial: int
    batches: int
    noise: int


class Block(_Model):
    """``round`` is the replicate; ``order`` the place inside the randomised block of (task, batch size, round)."""

    run: str
    round: int
    order: int


class Source(_Model):
    commit: str | None
    dirty: bool | None
    adapter_hash: str
    lock_hash: str


class Record(_Model):
    schema_: int = Field(SCHEMA, alias="schema")
    purpose: Purpose
    state: State
    reason: str | None = None
    cell: Cell
    key: str
    data: Data | None = None
    epoch_seconds: list[float] = Field(default_factory=list)
    compile_seconds: float | None = None
    timed: Timed | None = None
    memory: dict[str, int] = Field(default_factory=dict)
    gate: Gate | None = None
    epsilon: Epsilon | None = None
    accuracy: Accuracy | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    image: str | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    seeds: Seeds | None = None
    block: Block
    source: Source
    load: Load | None = None
    started: str
    wall_seconds: float
    command: str = ""
    log_tail: str = ""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)


def parse(text: str, origin: str) -> Record:
    """Raises :class:`BadInput`, naming ``origin``, for a corrupt record or one of a newer schema."""
    try:
        data = json.loads(text)
        schema = data["schema"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInput(
            f"{origin} is not a record ({type(error).__name__}: {error}); move it out of the folder and run again "
            "to measure that cell anew."
        ) from None
    if not isinstance(schema, int) or schema > SCHEMA:
        raise BadInput(
            f"{origin} has record schema {schema!r}, this dpbench reads up to {SCHEMA}; update dpbench to read it."
        )
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(
            f"{origin} is a corrupt record (at {where}: {first['msg']}); move it out of the folder and run again to "
            "measure that cell anew."
        ) from None


def read(path: Path) -> list[Record]:
    """All records of one ``.json`` or ``.jsonl`` file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [parse(line, f"{path}:{i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [parse(text, str(path))]
