"""The record: what one measuring process leaves behind. A failure is a record too.

One JSON file per process. A finished run may be packed into one ``.jsonl`` (a record a line); readers take both. Old
schemas are upgraded on reading and never rewritten; a newer one is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import BadInput

SCHEMA = 1

State = Literal["ok", "rejected", "oom", "timeout", "crashed", "unsupported"]
Purpose = Literal["time", "memory", "gate", "probe"]
Passes = Literal["plain", "per_sample", "clipped"]
"""Over a layer. ``plain``: forward and backward without DP. ``per_sample``: the paper's, forward and backward with
per-sample gradients left behind. ``clipped``: the honest one, with clipping to a sum."""
Column = Literal["module", "own_module", "dp"]
"""The columns of the paper's layer tables: plain module, the DP library's own module without DP, with DP."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(_Model):
    """What is measured. Two records of one cell differ in their block only.

    ``kind`` e2e, frontier: a ``task``. ``kind`` layer: no task, but a ``layer`` and which ``passes`` over it are made.
    """

    kind: Literal["e2e", "layer", "frontier"] = "e2e"
    task: str = ""
    layer: str | None = None
    passes: Passes | None = None
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
        what = (self.task, self.contestant) if self.layer is None else (self.layer, self.contestant, self.passes or "")
        return "/".join((*what, str(self.batch_size), self.protocol, self.device, self.isolation))

    @model_validator(mode="after")
    def _names_what_it_measures(self) -> Cell:
        is_layer = self.kind == "layer"
        if is_layer != (self.layer is not None and self.passes is not None) or is_layer == bool(self.task):
            raise ValueError("a cell names a task, or, of kind layer, a layer and its passes")
        return self


class Data(_Model):
    name: str
    synthetic: bool
    origin: str
    sha256: str
    train_size: int


class Compared(_Model):
    """What was compared of the measured cell itself. The weights where the referee halted the clock, after ``steps``
    steps, are ``replay_error`` from an untimed replay's. Of one step of that replay, ``step``, drawn at random, with
    ``rows`` examples: its update without noise is off from the float64 reference's by ``update_error``, relative, and
    what noise adds to it has the scores ``noise_scores``, in standard deviations."""

    step: int
    steps: int
    rows: int
    replay_error: float
    replay_limit: float
    update_error: float
    update_limit: float
    noise_scores: dict[str, float] = Field(default_factory=dict)
    noise_limit: float | None = None


class Timed(_Model):
    """How the seconds came about. ``extrapolated``: epoch_seconds are the measured ones times
    steps_per_epoch / steps_timed. ``replay_error``: distance of the weights after the first timed steps from an untimed
    replay, over the distance travelled; None where they were not compared (later rounds, no memory process).
    ``part_seconds`` of each timed stretch by the worker's clock, ``referee_seconds`` by the harness's own.

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
    part_seconds: list[float] = Field(default_factory=list)
    referee_seconds: list[float] = Field(default_factory=list)
    compared: Compared | None = None
    own_sampling: str | None = None
    updates: int | None = None


class LayerParts(_Model):
    """Bytes of one pass, one by one. ``gradients`` is what the pass leaves behind beside the first three, ``peak`` the
    highest sum at any moment; ``intermediate`` = peak - input - labels - module - gradients. ``baseline``: allocated
    before anything of the layer was (workspaces of the BLAS library), not in the peak. ``instrument`` counted the
    bytes. ``unexplained``: what an independent count of the arrays alive after the pass found more (or less, below 0)
    than input + labels + module + gradients; None where the instrument cannot count them."""

    input: int
    labels: int
    module: int
    gradients: int
    intermediate: int
    peak: int
    baseline: int
    instrument: str
    unexplained: int | None = None


class LayerResult(_Model):
    """Of a cell of kind layer. ``input_bytes`` to ``output_bytes`` are of one example (their sum is the memory law's
    C), ``parameter_bytes`` is its L. Time: ``pass_seconds`` of each timed pass, in order, on ``batches`` different
    batches in turn, after ``warm_up`` passes; ``stopped_by`` the number of ``passes`` or their ``seconds``. Memory:
    ``parts``. Both: ``predicted_seconds`` and ``predicted_bytes`` of one pass, from two small batches, where they were
    made before the cell was let run. ``plan``: what a framework that plans for itself says of it: ``micro_batch``
    examples at once, ``kept_bytes`` of per-sample gradients kept per example."""

    kind: str
    description: str
    column: Column
    paper_row: str | None = None
    input_bytes: int
    label_bytes: int
    output_bytes: int
    parameter_bytes: int
    pass_seconds: list[float] = Field(default_factory=list)
    batches: int = 1
    warm_up: int = 0
    stopped_by: Literal["passes", "seconds"] | None = None
    parts: LayerParts | None = None
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    plan: dict[str, int] = Field(default_factory=dict)

    @property
    def example_bytes(self) -> int:
        """C: input, label and output of one example."""
        return self.input_bytes + self.label_bytes + self.output_bytes


class Probe(_Model):
    """One process of the search for the memory frontier. ``budget_bytes``: above ``start_up_bytes``, what was resident
    with model and data in place; None on CUDA, where it is ``device_bytes``, all of the device. ``stage``: ``search``
    or ``throughput``. ``step_seconds``: those after the first."""

    stage: Literal["search", "throughput"]
    budget_bytes: int | None = None
    device_bytes: int | None = None
    start_up_bytes: int | None = None
    first_step_seconds: float | None = None
    step_seconds: list[float] = Field(default_factory=list)


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


class Image(_Model):
    """What a container was made of. ``digest`` and ``base``: the engine's hashes of the image and of what it stands on;
    ``lock``: SHA-256 of the lock of its files. ``matches_lock`` is False only where the user insisted."""

    tag: str
    digest: str
    base: str
    lock: str
    matches_lock: bool


class Container(_Model):
    """How the container of this process did. ``startup_seconds``: from asking for it to its first word, outside of
    every clock."""

    engine: str
    startup_seconds: float | None
    exit_code: int | None
    oom_killed: bool = False
    engine_restarts: int = 0


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
    probe: Probe | None = None
    memory: dict[str, int] = Field(default_factory=dict)
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
        if isinstance(data, dict) and "schema" not in data:
            raise BadInput(
                f"{origin} is not a record: it has no `schema`, which every record has; name the files with records "
                "one by one, or move it out of the folder."
            )
        schema = data["schema"]
    except (json.JSONDecodeError, TypeError) as error:
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
