"""Does the harness draw Poisson samples? The one sampler serves every framework, so this runs once. numpy only."""

from __future__ import annotations

import numpy as np

from harness.worker import sampling
from harness.worker.gate import noise as gate_noise
from harness.worker.gate.noise import Score

ROWS = 500
RATE = 0.06
STEPS = 4000
SEED = 20_260


def sampler_checks(batches: list[np.ndarray] | None = None) -> list[dict]:
    """Return checks of ``batches``, STEPS Poisson samples of ROWS rows at RATE; without an argument, of the harness's
    own."""
    if batches is None:
        batches = sampling.poisson_batches(ROWS, RATE, STEPS, SEED)
    taken = np.zeros((len(batches), ROWS))
    for t, rows in enumerate(batches):
        np.add.at(taken[t], rows, 1)
    repeated = int((taken > 1).sum())
    unit = (taken - RATE) / np.sqrt(RATE * (1 - RATE))
    """Mean 0 and variance 1 for each (step, row), all independent."""
    sizes = unit.sum(axis=1) / np.sqrt(ROWS)
    rows = unit.sum(axis=0) / np.sqrt(len(batches))
    return [
        _check("sampler: no row twice in a batch", Score(repeated, 0.0, f"{repeated} rows repeated")),
        _check(
            "sampler: batch sizes are binomial",
            gate_noise.largest({"mean": gate_noise.mean_score(sizes), "spread": gate_noise.spread_score(sizes)}),
        ),
        _check(
            "sampler: every row at rate q",
            gate_noise.largest(
                {"spread over rows": gate_noise.spread_score(rows)} | {f"row {i}": r for i, r in enumerate(rows)}
            ),
        ),
        _check(
            "sampler: rows and steps independent",
            gate_noise.largest(
                {
                    "consecutive steps": gate_noise.correlation_score(unit[:-1], unit[1:]),
                    "neighbouring rows": gate_noise.correlation_score(unit[:, :-1], unit[:, 1:]),
                    "sizes of consecutive steps": gate_noise.correlation_score(sizes[:-1], sizes[1:]),
                }
            ),
        ),
    ]


def _check(name: str, score: Score) -> dict:
    return {
        "check": name,
        "error": float(score.value),
        "limit": float(score.limit),
        "passed": score.passed,
        "detail": score.where,
    }
