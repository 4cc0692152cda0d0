"""What the harness asks of one worker process: plain data that travels as JSON. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal, Self

Mode = Literal["time", "memory", "gate", "probe"]


def name_of(framework: str, variant: str, world_size: int) -> str:
    """Return ``opacus-hooks``, or of several processes ``opacus-ddp-w2``."""
    return f"{framework}-{variant}" + (f"-w{world_size}" if world_size > 1 else "")


@dataclass(frozen=True)
class Message:
    """Travels as JSON."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Request(Message):
    """``steps``: fixed number of steps of an epoch, or None; then ``budget_seconds`` decides after the warm-up, or,
    where that is None too, the whole epoch is run. ``snapshot``: where the weights after the first steps are
    written, for comparison with the untimed replay. ``checked``: where a replay in the same process and one of its
    steps in detail go, for the reference. ``weights``: where the final weights go, for evaluation. ``sketches``: a
    memory process adds a sketch (:mod:`harness.worker.sketch`) of how far its steps moved the weights. ``order_seed``:
    of the order in which the batches of a stretch come, which a worker is told stretch by stretch. ``turn_seconds``:
    length of a turn of a process that takes turns with others. ``turn_steps``: the least steps of a turn, all of them
    counted, and those from which is planned what a step takes: above 1 for a variant whose ``synchronize`` does work
    for all steps before it, and whose weights depend on where that was. ``world_size``: processes that train together,
    which share the ``threads``."""

    mode: Mode
    folder: str
    variant: str
    private: bool
    static_shapes: bool
    task: str
    batch_size: int
    dataset_size: int
    sampling: str
    warm_up: bool
    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    delta: float
    device: str
    threads: int
    initial_seed: int
    batch_seed: int
    noise_seed: int
    data: str = ""
    synthetic: bool = False
    epochs: int = 1
    steps: int | None = None
    budget_seconds: float | None = None
    snapshot: str | None = None
    checked: str | None = None
    weights: str | None = None
    reference: str | None = None
    budget: dict[str, float] | None = None
    sketches: bool = False
    order_seed: int = 0
    turn_seconds: float | None = None
    turn_steps: int = 1
    world_size: int = 1

    @property
    def is_partial(self) -> bool:
        """Whether less than an epoch may be timed, so that the figure is extrapolated."""
        return self.steps is not None or self.budget_seconds is not None
