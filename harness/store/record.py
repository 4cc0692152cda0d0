"""The record: what one measuring process leaves behind. A failure is a record too.

One JSON file per process. A finished run may be packed into one ``.jsonl`` or ``.jsonl.gz`` (a record a line);
readers take all three. Old schemas are upgraded on reading and never rewritten; a newer one is refused.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass

from harness.contract import PARALLEL
from harness.errors import BadInput
from harness.store.energy import Energy
from harness.tasks import FLOAT32, OUTSIDE, TASKS
from harness.worker import result
from harness.worker.request import name_of
from harness.worker.result import State

SCHEMA = 1
OWN = f'{{"schema":{SCHEMA},'
# How the names of packed files end.
PACKED = (".jsonl", ".jsonl.gz")

UNPINNED = "unpinned"
"""Isolation of a record whose versions nobody pinned: the environment was used as it was."""
Purpose = Literal["time", "memory", "gate", "probe"]
Passes = Literal["plain", "per_sample", "clipped"]
"""The computation of a timed pass of a layer. ``plain``: forward and backward without DP. ``per_sample``: the paper's,
forward and backward with per-sample gradients left behind. ``clipped``: the honest one, with clipping to a sum."""
Column = Literal["module", "own_module", "dp"]
"""The columns of the paper's layer tables: plain module, the DP library's own module without DP, with DP."""


Seconds = Annotated[float, Field(gt=0.0)]
"""Seconds that were timed: a clock that stood still or ran backwards measured nothing."""
Bytes = Annotated[int, Field(ge=0)]
Words = Annotated[str, AfterValidator(lambda text: CONTROLS.sub("", text))]
"""Text by a contestant or a library that it uses. Terminals show it, so nothing in it may steer one."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def _with_its_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time has its offset from UTC, as 2026-11-20T08:00:00+00:00")
    return text


Time = Annotated[str, AfterValidator(_with_its_zone)]


class _Model(BaseModel):
    """Numbers are finite: JSON has no others, so that a file with one could not be read again."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Cell(_Model):
    """The thing that is measured. Two records of one cell differ in their block only.

    ``kind`` e2e, frontier: a ``task``. ``kind`` layer: no task, but a ``layer`` and which ``passes`` over it are made.
    ``parallel``, ``world_size``: how processes train together, and how many; None where one trains by itself.
    """

    kind: Literal["e2e", "layer", "frontier"] = "e2e"
    task: str = ""
    layer: str | None = None
    passes: Passes | None = None
    framework: str
    variant: str
    private: bool
    batch_size: int = Field(ge=1)
    protocol: str
    device: str
    isolation: str
    parallel: Literal["ddp", "fsdp2"] | None = None
    world_size: int | None = Field(None, ge=1)

    @property
    def contestant(self) -> str:
        """``opacus-hooks``; plain ``pytorch-eager``."""
        return f"{self.framework}-{self.variant}"

    @property
    def runner(self) -> str:
        """The contestant, and how many processes of it train together where they are several."""
        return name_of(self.framework, self.variant, self.world_size or 1)

    @property
    def surroundings(self) -> str:
        """The isolation, with what must be known wherever a figure of several processes is shown."""
        if self.parallel is None:
            return self.isolation
        return f"{self.isolation}, W={self.world_size}, {PARALLEL[self.parallel]}, gloo: says nothing about scaling"

    @property
    def name(self) -> str:
        """The name that ``dpbench explain`` takes."""
        what = (self.task, self.contestant) if self.layer is None else (self.layer, self.contestant, self.passes or "")
        ranks = () if self.parallel is None else (f"w{self.world_size}",)
        return "/".join((*what, str(self.batch_size), self.protocol, self.device, self.isolation, *ranks))

    @model_validator(mode="after")
    def _names_what_it_measures(self) -> Cell:
        is_layer = self.kind == "layer"
        if is_layer != (self.layer is not None and self.passes is not None) or is_layer == bool(self.task):
            raise ValueError("a cell names a task, or, of kind layer, a layer and its passes")
        if (self.parallel is None) != (self.world_size is None):
            raise ValueError("a cell of several processes has a world size and a way of parallelism")
        if not is_layer and self.task not in TASKS:
            raise ValueError(f"there is no task {self.task!r}; one of your own needs {OUTSIDE}")
        return self


class Data(_Model):
    """The data set that was trained on."""

    name: str
    synthetic: bool
    origin: str
    sha256: str
    train_size: int


class Compared(_Model):
    """Comparison of the measured cell itself with its replay and with the reference. The weights where the referee
    halted the clock, after ``steps`` steps, are ``replay_error`` from an untimed replay's, those after ``all_steps``
    are ``end_error`` from it. Of one step of that replay, ``step``, drawn at random, with ``rows`` examples: its update
    without noise is off from the float64 reference's by ``update_error``, relative. What noise adds to it and to those
    after it, to the step at the halt and to the last one, ``compared_steps`` in all, has the scores ``noise_scores``,
    in standard deviations. ``longest_step`` of the replay: its length over what rows and noise explain."""

    step: int
    steps: int
    rows: int
    replay_error: float
    replay_limit: float
    update_error: float
    update_limit: float
    noise_scores: dict[str, float] = Field(default_factory=dict)
    noise_limit: float | None = None
    all_steps: int | None = None
    end_error: float | None = None
    end_limit: float | None = None
    compared_steps: int = 1
    longest_step: float | None = None
    longest_step_number: int | None = None


STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
class Timed(result.Timed):
    """Timing behind the seconds of a record."""

    measured_seconds: list[Seconds]
    compared: Compared | None = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LayerResult(result.Layer):
    """Measurements of a cell of kind layer, and its layer: ``input_bytes`` to ``output_bytes`` are of one example
    (their sum is the memory law's C), ``parameter_bytes`` is its L."""

    kind: str
    description: str
    column: Column
    paper_row: str | None = None
    input_bytes: int
    label_bytes: int
    output_bytes: int
    parameter_bytes: int
    pass_seconds: list[Seconds] = field(default_factory=list)

    @property
    def example_bytes(self) -> int:
        """C: input, label and output of one example."""
        return self.input_bytes + self.label_bytes + self.output_bytes


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Probe(result.Probe):
    """One process of the search for the memory frontier. ``budget_bytes``: above ``start_up_bytes``, what was resident
    with model and data in place; None on CUDA, where it is ``device_bytes``, all of the device. ``stage``: ``search``
    or ``throughput``."""

    stage: Literal["search", "throughput"]
    budget_bytes: int | None = None
    device_bytes: int | None = None
    first_step_seconds: Seconds | None = None
    step_seconds: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=True))
class GateCheck(result.Check):
    """One line of the admission gate, as the record keeps it."""

    detail: Words = ""


class Gate(_Model):
    """A verdict of the admission gate. ``key``: hash of all that it depends on. ``judged_as``: the smaller task that
    was judged in place of the record's; None: the record's own."""

    passed: bool
    key: str
    checks: list[GateCheck]
    judged_as: str | None = None


class Epsilon(_Model):
    """Privacy spent after ``steps`` steps at ``delta``; ``own`` is the library's figure. None where batches are no
    Poisson samples."""

    delta: float
    steps: int
    rdp: float | None
    pld: float | None
    own: float | None


class Accuracy(_Model):
    """Share of the test set that is classified right after so many steps."""

    test: float
    after_steps: int


class Load(_Model):
    """``foreign_share``: share of the machine's processors that other processes took inside the clock. ``throttled``:
    share of the periods in which a quota of processors stopped it there.
    ``canary_before``/``after``: seconds of a fixed matrix product and copy, by the harness itself."""

    foreign_share: float
    disturbed: bool
    repeats: int
    throttled: float = 0.0
    canary_before: float | None = None
    canary_after: float | None = None


class Seeds(_Model):
    """Seeds of the starting weights, of the batches and of the noise."""

    initial: int
    batches: int
    noise: int


class Block(_Model):
    """``round`` is the replicate; ``order`` the place inside the randomised block of (task, batch size, round).
    ``moment``: when the block that it was measured in began: only what was is paired. Empty in older records."""

    run: str
    round: int
    order: int
    moment: str = ""


class Source(_Model):
    """The code that was measured: commit of the checkout, hashes of the contestant's code, of its pins, and of what was
    installed (:func:`harness.environments.venv.content`; empty in older records and in containers)."""

    commit: str | None
    dirty: bool | None
    adapter_hash: str
    lock_hash: str
    content: str = ""


class Image(_Model):
    """The image that a container was made of. ``digest`` and ``base``: the engine's hashes of the image and of what it
    stands on; ``lock``: SHA-256 of the lock of its files. ``matches_lock`` is False only where the user insisted."""

    tag: str
    digest: str
    base: str
    lock: str
    matches_lock: bool


class Container(_Model):
    """The container of this process and how it ended. ``startup_seconds``: from asking for it to its first word,
    outside of every clock."""

    engine: str
    startup_seconds: float | None
    exit_code: int | None
    oom_killed: bool = False
    engine_restarts: int = 0


class Record(_Model):
    """``interrupted``: what ended the process came from outside, so that it says nothing of the cell and the next run
    measures it again. ``sequence``: orders the records of a machine, whatever its clock does (see
    :mod:`harness.store.sequence`); None in older ones, of which ``started`` decides. ``precision``: of the products."""

    schema_: int = Field(SCHEMA, alias="schema")
    purpose: Purpose
    state: State
    reason: Words | None = None
    cell: Cell
    precision: str = FLOAT32
    key: str
    data: Data | None = None
    epoch_seconds: list[Seconds] = Field(default_factory=list)
    compile_seconds: float | None = None
    timed: Timed | None = None
    probe: Probe | None = None
    memory: dict[str, Bytes] = Field(default_factory=dict)
    ranks: list[result.Rank] = Field(default_factory=list)
    layer: LayerResult | None = None
    gate: Gate | None = None
    epsilon: Epsilon | None = None
    accuracy: Accuracy | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    image: Image | None = None
    container: Container | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    seeds: Seeds | None = None
    block: Block
    source: Source
    load: Load | None = None
    energy: Energy | None = None
    started: Time
    wall_seconds: float
    command: str = ""
    log_tail: Words = ""
    interrupted: bool = False
    sequence: int | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    @property
    def file_name(self) -> str:
        """The name of its file in a run's folder, which says what is in it."""
        cell = self.cell
        if self.purpose == "gate":
            return f"{cell.task}.{cell.runner}.gate.{self.gate.key[:8] if self.gate else ''}.json"
        what = cell.task if cell.layer is None else cell.layer
        passes = "" if cell.passes is None else f".{cell.passes}"
        place = f"b{cell.batch_size}.r{self.block.round}.{self.purpose}"
        return f"{what}.{cell.runner}{passes}.{place}.{self.key[:8]}.json"

    @property
    def when(self) -> int:
        """Larger for the later of two records of one machine: ``sequence``, or ``started`` in milliseconds."""
        return int(datetime.fromisoformat(self.started).timestamp() * 1e3) if self.sequence is None else self.sequence

    @field_validator("machine")
    @classmethod
    def _is_a_machine(cls, facts: dict[str, Any]) -> dict[str, Any]:
        for name, kind in MACHINE_FACTS.items():
            if facts.get(name) is not None and (not isinstance(facts[name], kind) or isinstance(facts[name], bool)):
                raise ValueError(f"{name} is {str(facts[name])[:40]!r}")
        if not all(isinstance(gpu, str) for gpu in facts.get("gpus") or []):
            raise ValueError("gpus are names")
        return facts

    @model_validator(mode="after")
    def _is_whole(self) -> Record:
        """Refuse a record that is ``ok`` without what it was made for."""
        if self.state != "ok":
            return self
        if self.cell.kind == "e2e" and self.purpose == "time" and not (self.epoch_seconds and self.timed):
            raise ValueError("the state is ok, but there are no epoch_seconds, or nothing says how they were timed")
        if self.cell.kind == "layer" and self.purpose == "time" and not (self.layer and self.layer.pass_seconds):
            raise ValueError("the state is ok, but there are no pass_seconds")
        return self


MACHINE_FACTS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "cpu": str,
    "cores": int,
    "memory_bytes": int,
    "threads": int,
    "gpus": list,
    "card": str,
    "quota": (int, float),
    "variables": dict,
    "load_average": (int, float),
    "peaks": dict,
}
"""Facts of ``machine`` that reports read, where they are there."""


def parse(text: str, origin: str, gates: dict[str, Gate] | None = None) -> Record:
    """Return the record in a text.

    Args:
        text: JSON.
        origin: where it stands, for errors.
        gates: verdicts of records that were parsed before, by their text: many records share one, and it is most of
            what they hold. Gets those that it lacks.

    Raises:
        BadInput: it is corrupt, or of a newer schema.
    """
    if text.startswith(OWN) and "NaN" not in text and "Infinity" not in text:
        # What dpbench wrote itself. Whatever is wrong with it is found and told below, by the slower way.
        with suppress(ValidationError):
            value = Record.model_validate_json(text) if gates is None else _sharing_gates(text, gates)
            if value.schema_ == SCHEMA:
                return value
    try:
        data = json.loads(text, parse_constant=no_number)
        if isinstance(data, dict) and "schema" not in data:
            raise BadInput(
                f"{origin} is not a record: it has no `schema`, which every record has; name the files with records "
                "one by one, or move it out of the folder."
            )
        schema = data["schema"]
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_record(origin, f"{type(error).__name__}: {error}") from None
    if type(schema) is not int or schema < 1:
        raise _no_record(origin, f"its `schema` is {str(schema)[:40]!r}, which never was")
    if schema > SCHEMA:
        raise BadInput(
            f"{origin} has record schema {schema!r}, this dpbench reads up to {SCHEMA}; update dpbench to read it."
        )
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(
            f"{origin} is a corrupt record (at {where or 'the whole'}: {first['msg']}); move it out of the folder and "
            "run again to measure that cell anew."
        ) from None


def _sharing_gates(text: str, gates: dict[str, Gate]) -> Record:
    """Return the record in a text, with the verdict that others have where its text is the same. Raises ValidationError
    where it is not as dpbench writes it."""
    before, mark, rest = text.partition(',"gate":{')
    verdict, end, after = rest.partition('},"epsilon":')
    if not mark or not end or '"machine":' in before:  # whose facts may have any name
        return Record.model_validate_json(text)
    value = Record.model_validate_json(f'{before},"gate":null{end[1:]}{after}')
    if value.gate is not None:  # the mark stood elsewhere
        return Record.model_validate_json(text)
    if verdict not in gates:
        gates[verdict] = Gate.model_validate_json(f"{{{verdict}}}")
    return value.model_copy(update={"gate": gates[verdict]})


def no_number(text: str) -> float:
    """Refuse a constant, as ``parse_constant`` of ``json.loads``: raises ValueError for NaN and the infinities."""
    raise ValueError(f"{text} is no JSON number")


def _no_record(origin: str, why: str) -> BadInput:
    return BadInput(
        f"{origin} is not a record ({why}); move it out of the folder and run again to measure that cell anew."
    )


def read(path: Path, gates: dict[str, Gate] | None = None) -> list[Record]:
    """Return all records of one ``.json``, ``.jsonl`` or ``.jsonl.gz`` file; ``gates`` as :func:`parse` has it. Raises
    :class:`BadInput`, naming it, where one cannot be read, and FileNotFoundError where the file is gone."""
    return [parse(text, origin, gates) for text, origin in texts(path)]


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what :func:`read` parses, each record's text and where it stands, one by one: all of a large grid would
    take as much memory as its records. Raises as it does, perhaps after some."""
    packed, before = path.name.endswith(PACKED), 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file if packed else (file.read(),), 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                before += len(line)
                if not packed:
                    yield text, str(path)
                elif text.strip():
                    yield text.removesuffix("\n"), f"{path}:{number}"
    except FileNotFoundError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path} is no complete gzip file ({error}); fetch it again, or restore it from git.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); move it away, or make it a readable file.") from None
    except UnicodeDecodeError as error:
        raise _no_record(str(path), f"{error.reason} at byte {before + error.start}") from None
