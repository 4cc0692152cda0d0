"""Short generated histories for tests: one machine, cells that differ in their task's name only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from harness.history.runs import Run

MACHINE = {"cpu": "AMD EPYC 7B13", "cores": 2, "memory_bytes": 16 * 2**30, "id": "3f2a91c0", "threads": 2}


def runs(
    count: int,
    *,
    cells: Sequence[str] = ("a",),
    time: Mapping[int, float] | None = None,
    memory: Mapping[int, float] | None = None,
    drift: Mapping[int, float] | None = None,
    states: Mapping[tuple[str, int], str] | None = None,
    versions: Mapping[int, str] | None = None,
    only: Iterable[str] | None = None,
    disturbed: Iterable[int] = (),
    device: str = "cpu",
    framework: str = "dpcore",
    machine: Mapping[str, Any] = MACHINE,
    noise: float = 0.01,
    seed: int = 0,
) -> list[Run]:
    """Daily runs. ``time``, ``memory``, ``drift``: run -> factor from then on; ``only``: whom ``time`` concerns."""
    rng = np.random.default_rng(seed)
    concerned = set(cells if only is None else only)
    made = []
    for i in range(count):
        own = [_product(time, i) if cell in concerned else 1.0 for cell in cells]
        slow = _product(drift, i)
        made.append(
            Run(
                run=f"simulated-{i}",
                time=(datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=i)).isoformat(),
                commit=hashlib.sha1(str(i).encode()).hexdigest(),
                dirty=False,
                machine=dict(machine),
                canary_seconds=0.014 * slow * float(np.exp(rng.normal(0, 0.002))),
                versions={framework: {framework: next((v for d, v in (versions or {}).items() if i >= d), "1.6.0")}},
                simulated=True,
                cells=[
                    _cell(
                        name,
                        framework,
                        device,
                        (states or {}).get((name, i), "ok"),
                        float(own[j] * slow * np.exp(rng.normal(0, noise))),
                        int(64_000_000 * _product(memory, i)),
                        i in set(disturbed),
                    )
                    for j, name in enumerate(cells)
                ],
            )
        )
    return made


def _product(changes: Mapping[int, float] | None, run: int) -> float:
    return float(np.prod([factor for at, factor in (changes or {}).items() if run >= at]))


def _cell(
    subject: str, framework: str, device: str, state: str, seconds: float, count: int, disturbed: bool
) -> dict[str, Any]:
    ok = state == "ok"
    return {
        "name": f"{subject}/{framework}-engine/512/verified-v1/{device}/venv",
        "kind": "e2e",
        "subject": subject,
        "framework": framework,
        "variant": "engine",
        "private": True,
        "batch_size": 512,
        "protocol": "verified-v1",
        "device": device,
        "isolation": "venv",
        "state": state,
        "reason": "" if ok else f"{state} on purpose",
        "seconds": [seconds] * 3 if ok else [],
        "disturbed": [disturbed] * 3 if ok else [],
        "memory": {"cpu_peak_allocated": count} if ok else {},
        "gate": "failed" if state == "rejected" else "passed",
    }
