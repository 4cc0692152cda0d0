"""What the harness asks of one process that measures a layer: plain data, sent as JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.worker.request import Message


@dataclass(frozen=True)
class LayerRequest(Message):
    """``folder`` holds ``layers.py``; ``reference``: the layer's .npz of :mod:`frameworks._tools.layer_reference`.

    A cell is measured until ``seconds`` or ``most_passes`` are reached, but at least ``least_passes``. With
    ``predicts`` two small batches are looked at first, and a pass that would take more than ``longest_pass`` seconds
    or ``most_bytes`` is not tried. With ``sketches`` the result holds a sketch (:mod:`harness.worker.sketch`) of
    what one more, untimed, pass leaves of a whole batch of that size.
    """

    mode: Literal["time", "memory"]
    folder: str
    variant: str
    layer: str
    passes: str
    batch_size: int
    max_grad_norm: float
    device: str
    threads: int
    seed: int
    reference: str
    predicts: bool
    seconds: float
    most_passes: int
    least_passes: int
    longest_pass: float
    most_bytes: int
    left: str | None = None
    """Where a timed process writes what its last timed pass left behind."""
    sketches: bool = False
