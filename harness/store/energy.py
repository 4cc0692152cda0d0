"""Hold what a record says of energy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

GPU = "gpu"
"""The device with an energy counter; records of before 27 November 2026 may name "processors" besides."""


class Energy(BaseModel):
    """Readings of the machine's energy counters, which count all that runs there. ``joules``: of the
    timed ``stretches``, ``seconds`` in all; ``idle_watts``: before the run, when nothing of it ran; ``step_seconds``: a
    counter moves once in so many. ``unavailable``: by counter, why it says nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    joules: dict[str, float] = Field(default_factory=dict)
    seconds: float = 0.0
    stretches: int = 0
    idle_watts: dict[str, float] = Field(default_factory=dict)
    step_seconds: dict[str, float] = Field(default_factory=dict)
    unavailable: dict[str, str] = Field(default_factory=dict)
