"""A generated history with known truth: two years of 100 cells with planted steps, drift, outliers, missing runs, and
a second machine. Everything made here is marked *simulated*, in every file and on every page.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from harness.history.runs import CellResult, Run

DAYS = 730
START = datetime(2024, 11, 20, 2, 0, tzinfo=UTC)
TASKS = {"mnist-cnn": 8.0, "cifar10-cnn": 180.0, "imdb-embedding": 1.1, "imdb-lstm": 260.0}
"""Seconds per epoch of plain PyTorch."""
CONTESTANTS = {
    ("pytorch", "eager", False): 1.0,
    ("opacus", "hooks", True): 2.9,
    ("opacus", "ghost", True): 2.6,
    ("dpcore", "engine", True): 1.3,
    ("dpcore", "native", True): 1.1,
    ("jax", "vmap", True): 1.4,
    ("jax_privacy", "clipped-grad", True): 1.7,
    ("fastdp", "flat", True): 1.6,
}
LAYERS = {"linear": 8e-4, "conv": 0.4, "embedding": 2e-3, "layer-norm": 6e-4, "mha": 0.02, "lstm": 0.09}
LAYER_CONTESTANTS = (
    ("pytorch", "eager", "plain", 1.0),
    ("opacus", "hooks", "per_sample", 3.1),
    ("opacus", "hooks", "clipped", 3.6),
    ("opacus", "ghost", "clipped", 2.2),
    ("dpcore", "engine", "clipped", 1.5),
    ("dpcore", "grad-sample", "per_sample", 1.8),
)
NOISE = (0.01, 0.015, 0.03, 0.05)
SIZES = (0.02, 0.05, 0.10, 0.25)
MACHINE: dict[str, Any] = {
    "cpu": "AMD EPYC 7B13",
    "cores": 16,
    "memory_bytes": 64 * 2**30,
    "id": "51ab0001",
    "threads": 16,
}
GPU_MACHINE: dict[str, Any] = {
    "cpu": "Intel(R) Xeon(R) Platinum 8481C",
    "cores": 26,
    "memory_bytes": 234 * 2**30,
    "gpus": ["NVIDIA H200, 143771 MiB, 570.1"],
    "id": "51ab0002",
    "threads": 26,
}
VERSIONS = {"pytorch": "torch", "opacus": "opacus", "jax": "jax", "jax_privacy": "jax-privacy", "fastdp": "fastDP"}


@dataclass(frozen=True)
class Planted:
    """A step that is truly there. ``run`` is the machine's first run with it; ``ratio`` None for a state."""

    machine: str
    series: str
    metric: str
    run: int
    ratio: float | None
    noise: float
    state: str = "ok"


@dataclass(frozen=True)
class Demo:
    """A made-up history: its runs, and the faults that were planted in them."""

    runs: tuple[Run, ...]
    planted: tuple[Planted, ...]


@dataclass
class _Cell:
    """A cell while it is made: ``log_factor`` [days] and ``log_bytes`` [days] hold the plants, ``state`` [days] too."""

    fields: dict[str, Any]
    name: str
    seconds: float
    noise: float
    bytes: int
    log_factor: np.ndarray
    log_bytes: np.ndarray
    state: list[str]


def history(seed: int = 0, days: int = DAYS) -> Demo:
    """Return a made-up history; the same seed gives the same one."""
    rng = np.random.default_rng(seed)
    commits = _commits(rng, days)
    runs: list[Run] = []
    planted: list[Planted] = []
    for facts, device, every, since in ((MACHINE, "cpu", 1, 0), (GPU_MACHINE, "cuda", 3, days // 3)):
        cells = _cells(rng, days, device)
        when = [d for d in range(since, days, every) if rng.random() > 0.05 and not 300 <= d < 314]
        plants, releases = _plant(rng, cells, days, since, device)
        made = _runs(rng, cells, facts, device, when, commits, releases)
        key = made[0].machine_key
        for name, metric, day, ratio, noise, state in plants:
            # The plant shows from the first run on or after its day.
            index = next((i for i, d in enumerate(when) if d >= day), None)
            if index:
                planted.append(Planted(key, name, metric, index, ratio, noise, state))
        runs += made
    return Demo(tuple(sorted(runs, key=lambda r: r.time)), tuple(planted))


def _commits(rng: np.random.Generator, days: int) -> list[str]:
    commits: list[str] = []
    for day in range(days):
        idle = commits and rng.random() < 0.25
        commits.append(commits[-1] if idle else hashlib.sha1(f"simulated {day}".encode()).hexdigest())
    return commits


def _cells(rng: np.random.Generator, days: int, device: str) -> list[_Cell]:
    cells = []
    on_gpu = device == "cuda"
    for task, seconds in TASKS.items():
        for (framework, variant, private), factor in CONTESTANTS.items():
            for batch in (512,) if on_gpu else (64, 512):
                value = seconds * factor * (512 / batch) ** 0.4 / (12 if on_gpu else 1)
                name = f"{task}/{framework}-{variant}/{batch}/verified-v1/{device}/venv"
                fields = {"kind": "e2e", "subject": task, "protocol": "verified-v1"}
                cells.append(_cell(rng, days, name, fields, framework, variant, private, batch, device, value))
    for layer, seconds in {} if on_gpu else LAYERS.items():
        for framework, variant, passes, factor in LAYER_CONTESTANTS:
            name = f"{layer}/{framework}-{variant}/{passes}/64/layers-v1/{device}/venv"
            fields = {"kind": "layer", "subject": layer, "protocol": "layers-v1", "passes": passes}
            private = passes != "plain"
            cells.append(_cell(rng, days, name, fields, framework, variant, private, 64, device, seconds * factor))
    return cells


def _cell(
    rng: np.random.Generator,
    days: int,
    name: str,
    fields: dict[str, Any],
    framework: str,
    variant: str,
    private: bool,
    batch: int,
    device: str,
    seconds: float,
) -> _Cell:
    fields = {
        **fields,
        "name": name,
        "framework": framework,
        "variant": variant,
        "private": private,
        "batch_size": batch,
        "device": device,
        "isolation": "venv",
        "gate": "passed",
        "code": "simulated",
    }
    size = int(rng.integers(40, 1500)) * 2**20 + int(rng.integers(0, 2**20)) * 4
    noise = float(NOISE[rng.integers(len(NOISE))])
    return _Cell(fields, name, seconds, noise, size, np.zeros(days), np.zeros(days), ["ok"] * days)


def _plant(
    rng: np.random.Generator, cells: Sequence[_Cell], days: int, since: int, device: str
) -> tuple[list[tuple[str, str, int, float | None, float, str]], dict[str, list[int]]]:
    """Return (what was planted, framework -> days of its releases). Two steps of one cell are 120 days apart."""
    plants: list[tuple[str, str, int, float | None, float, str]] = []
    taken: dict[tuple[str, str], list[int]] = {}
    releases: dict[str, list[int]] = {}

    def free(cell: _Cell, metric: str, day: int) -> bool:
        return all(abs(day - other) >= 120 for other in taken.get((cell.name, metric), []))

    def change(cell: _Cell, metric: str, day: int, ratio: float) -> None:
        taken.setdefault((cell.name, metric), []).append(day)
        (cell.log_factor if metric == "time" else cell.log_bytes)[day:] += math.log(ratio)
        plants.append((cell.name, metric, day, ratio, cell.noise, "ok"))

    def day_in(first: float, last: float) -> int:
        span = days - since
        return since + int(rng.integers(int(first * span), int(last * span)))

    for framework in ("dpcore", "opacus", "jax", "fastdp"):  # one cause, several cells
        for _ in range(2):
            day, ratio = day_in(0.15, 0.9), 1 + float(rng.choice(SIZES[1:])) * float(rng.choice([-1, 1]))
            releases.setdefault(framework, []).append(day)
            for cell in (c for c in cells if c.fields["framework"] == framework and rng.random() < 0.5):
                if free(cell, "time", day):
                    change(cell, "time", day, ratio * float(np.exp(rng.normal(0, 0.004))))
    for i in range(6 * len(SIZES) if device == "cpu" else len(SIZES)):  # alone
        cell, day = cells[int(rng.integers(len(cells)))], day_in(0.1, 0.9)
        if free(cell, "time", day):
            change(cell, "time", day, 1 + SIZES[i % len(SIZES)] * float(rng.choice([-1, 1])))
    for ratio in (1.03, 1.001, 1.12, 0.9, 0.7, 1.5):
        cell, day = cells[int(rng.integers(len(cells)))], day_in(0.1, 0.95)
        if free(cell, "memory", day):
            change(cell, "memory", day, ratio)
    for ratio, metric, age in ((1.12, "time", 14), (1.04, "memory", 9), (0.85, "time", 20)):  # news
        cell = next(c for c in (*cells[int(rng.integers(len(cells))) :], *cells) if c.noise <= 0.015)
        if free(cell, metric, days - age):
            change(cell, metric, days - age, ratio)
    for state, first, length in (
        ("crashed", 0.3, 25),
        ("oom", 0.6, 60),
        ("timeout", 0.8, 3),
        ("rejected", 0.985, days),
    ):
        cell = cells[int(rng.integers(len(cells)))]
        day = since + int(first * (days - since))
        cell.state[day : day + length] = [state] * len(cell.state[day : day + length])
        plants.append((cell.name, "state", day, None, cell.noise, state))
    return plants, releases


def _runs(
    rng: np.random.Generator,
    cells: Sequence[_Cell],
    facts: dict[str, Any],
    device: str,
    when: Sequence[int],
    commits: Sequence[str],
    releases: dict[str, list[int]],
) -> list[Run]:
    days = len(commits)
    season = 0.03 * np.sin(np.arange(days) / 58) + np.cumsum(rng.normal(0, 0.002, days))
    runs = []
    for day in when:
        disturbed = rng.random() < 0.01
        drift = float(np.exp(season[day]))
        # A GPU does not share the processor's drift.
        own = drift if device == "cpu" else 1.0
        made = [_measured(rng, cell, day, own, disturbed, device) for cell in cells]
        time = START + timedelta(days=day, minutes=int(rng.integers(0, 40)))
        runs.append(
            Run(
                run=f"simulated-{facts['id']}-{day:04d}",
                time=time.isoformat(),
                commit=commits[day],
                dirty=False,
                machine=facts,
                canary_seconds=float(f"{0.0142 * drift * float(np.exp(rng.normal(0, 0.003))):.6g}"),
                versions={
                    framework: {
                        "python": "3.11.9",
                        package: f"1.{sum(r <= day for r in releases.get(framework, []))}.0",
                    }
                    for framework, package in VERSIONS.items()
                },
                simulated=True,
                cells=made,
            )
        )
    return runs


def _measured(
    rng: np.random.Generator, cell: _Cell, day: int, drift: float, disturbed: bool, device: str
) -> CellResult:
    state = cell.state[day]
    if state != "ok":
        reasons = {
            "rejected": "update-equality: relative error 0.21, limit 0.0001 (simulated)",
            "crashed": "the process ended with signal 11 (simulated)",
            "oom": "resident memory passed the limit of 12 GiB (simulated)",
            "timeout": "no word for 1800 s (simulated)",
        }
        gate = "failed" if state == "rejected" else "passed"
        return CellResult.model_construct(
            **{**_DEFAULTS, **cell.fields, "state": state, "reason": reasons[state], "gate": gate}
        )
    outlier = float(rng.exponential(0.15)) if rng.random() < 0.02 else 0.0
    common = cell.log_factor[day] + rng.normal(0, cell.noise) + outlier + (0.2 if disturbed else 0.0)
    values = [float(f"{cell.seconds * drift * math.exp(common + e):.6g}") for e in rng.normal(0, 0.004, 3)]
    memory_metric = "cuda_peak_allocated" if device == "cuda" else "cpu_peak_allocated"
    return CellResult.model_construct(
        **{
            **_DEFAULTS,
            **cell.fields,
            "state": "ok",
            "seconds": values,
            "disturbed": [disturbed] * 3,
            "memory": {memory_metric: int(cell.bytes * math.exp(cell.log_bytes[day])) // 4 * 4},
        }
    )


_DEFAULTS: dict[str, Any] = {
    "passes": None,
    "synthetic": False,
    "reason": "",
    "failures": "",
    "seconds": [],
    "disturbed": [],
    "extrapolated": False,
    "memory": {},
}
"""Values that validation would fill in; 100,000 results are made without it."""
