"""Generated records for tests: what a run could have left behind. Never written into results/ or plots/."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harness.layers import LAYERS
from harness.store.record import Record

MACHINE: dict[str, Any] = {
    "cpu": "AMD EPYC 7B13",
    "cores": 2,
    "memory_bytes": 16 * 2**30,
    "gpus": [],
    "kernel": "6.1",
    "id": "3f2a91c0",
    "load_average": 0.3,
}
OTHER_MACHINE: dict[str, Any] = {
    **MACHINE,
    "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.00GHz",
    "gpus": ["NVIDIA H200, 143771 MiB, 570.1"],
    "id": "77aa77aa",
}

LEVEL = {"mnist-cnn": 8.0, "cifar10-cnn": 180.0, "imdb-embedding": 1.1, "imdb-lstm": 260.0}
"""Seconds per epoch of the plain baseline at batch size 512."""
CONTESTANTS = {
    ("jax", "vmap", True): (1.4, 6.0),
    ("pytorch", "eager", False): (1.0, 0.0),
    ("opacus", "hooks", True): (2.9, 0.0),
    ("opacus", "ghost", True): (2.6, 0.0),
    ("dpcore", "book-keeping", True): (1.3, 0.1),
}
"""(framework, variant, private) -> (factor over the baseline, compile seconds)."""
NO_LSTM: dict[str, Any] = {
    "state": "unsupported",
    "reason": "ghost clipping has no rule for an LSTM layer",
    "gate_passed": None,
}
PAPER_ROWS = {"jax-vmap": "JAX (DP)", "pytorch-eager": "PyTorch without DP", "opacus-hooks": "Opacus"}
PARAMETERS = {"mnist-cnn": 26_010, "cifar10-cnn": 605_226, "imdb-embedding": 160_098, "imdb-lstm": 1_081_002}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def record(
    *,
    task: str = "mnist-cnn",
    framework: str = "opacus",
    variant: str = "hooks",
    private: bool = True,
    batch_size: int = 512,
    protocol: str = "verified-v1",
    device: str = "cpu",
    isolation: str = "venv",
    purpose: str = "time",
    state: str = "ok",
    reason: str | None = None,
    seconds: Iterable[float] = (1.0,),
    compile_seconds: float | None = None,
    round: int = 0,
    order: int = 0,
    run: str = "run-1",
    synthetic: bool = False,
    extrapolated: bool = False,
    disturbed: bool = False,
    gate_passed: bool | None = True,
    machine: dict[str, Any] | None = None,
    started: str = "2026-11-20T08:00:00+00:00",
    adapter_hash: str | None = None,
    **more: Any,
) -> Record:
    """A valid record; every argument has a plain default. ``more``: any other top-level field of the record."""
    ok = state == "ok"
    seconds = list(seconds) if ok and purpose == "time" else []
    adapter_hash = adapter_hash or sha(framework)
    fields: dict[str, Any] = {
        "schema": 1,
        "purpose": purpose,
        "state": state,
        "reason": reason if reason or ok else f"{state} on purpose",
        "cell": {
            "kind": "e2e",
            "task": task,
            "framework": framework,
            "variant": variant,
            "private": private,
            "batch_size": batch_size,
            "protocol": protocol,
            "device": device,
            "isolation": isolation,
        },
        "key": sha(f"{task}{framework}{variant}{batch_size}{protocol}{device}{isolation}{adapter_hash}"),
        "data": {
            "name": task.split("-")[0],
            "synthetic": synthetic,
            "origin": "generated for a test",
            "sha256": "0" * 64,
            "train_size": 60_000,
        },
        "epoch_seconds": seconds,
        "compile_seconds": compile_seconds,
        "timed": {
            "steps_per_epoch": -(-60_000 // batch_size),
            "steps_timed": 8 if extrapolated else -(-60_000 // batch_size),
            "epochs": len(seconds),
            "extrapolated": extrapolated,
            "measured_seconds": seconds,
            "first_pass_seconds": seconds[0] + (compile_seconds or 0.0),
            "warm_up_steps": 2,
        }
        if seconds
        else None,
        "gate": None
        if gate_passed is None
        else {
            "passed": gate_passed,
            "key": sha(adapter_hash),
            # As in a real run: the checks stand in the record of the gate, the others only point to it.
            "checks": []
            if purpose != "gate"
            else [
                {"check": "update-equality", "error": 3.1e-7, "limit": 1e-4, "passed": True, "detail": "relative L2"},
                {"check": "sensitivity", "error": 0.9999, "limit": 1.0001, "passed": True},
                {
                    "check": "noise-standard-deviation",
                    "error": 0.004 if gate_passed else 0.9,
                    "limit": 0.02,
                    "passed": gate_passed,
                    "detail": "" if gate_passed else "the noise is 10 times too small",
                },
            ],
        },
        "versions": {"python": "3.11.9", framework: "1.6.0"},
        "machine": MACHINE if machine is None else machine,
        "seeds": {"initial": 1, "batches": 2 + round, "noise": 3 + round},
        "block": {"run": run, "round": round, "order": order},
        "source": {
            "commit": "b618197aa",
            "dirty": False,
            "adapter_hash": adapter_hash,
            "lock_hash": sha("lock" + framework),
        },
        "load": {"foreign_share": 0.2 if disturbed else 0.01, "disturbed": disturbed, "repeats": int(disturbed)},
        "started": started,
        "wall_seconds": 12.5,
        "command": f"dpbench run e2e --tasks {task} --frameworks {framework}-{variant} --batch-sizes {batch_size}",
    }
    return Record.model_validate({**fields, **more})


def layer_record(
    *,
    layer: str = "linear",
    framework: str = "opacus",
    variant: str = "hooks",
    passes: str = "clipped",
    column: str = "dp",
    batch_size: int = 16,
    purpose: str = "time",
    state: str = "ok",
    reason: str | None = None,
    seconds: Iterable[float] = (1e-3, 1.1e-3, 0.9e-3, 1e-3, 1.2e-3),
    gradients: int | None = None,
    intermediate: int | None = None,
    round: int = 0,
    order: int = 0,
    run: str = "run-1",
    **more: Any,
) -> Record:
    """One process of a cell of kind layer. By default memory follows the law of today's Opacus: L + bC + bL remain, and
    another L + bL are there for a moment."""
    facts = LAYERS[layer]
    ok = state == "ok"
    data, own = batch_size * facts.example_bytes, facts.parameter_bytes
    parts: dict[str, Any] = {
        "input": batch_size * facts.input_bytes,
        "labels": batch_size * facts.label_bytes,
        "module": own,
        "gradients": (batch_size * own if column == "dp" else own) if gradients is None else gradients,
        "intermediate": batch_size * facts.output_bytes + (own + batch_size * own if column == "dp" else 0)
        if intermediate is None
        else intermediate,
    }
    assert data >= parts["input"] + parts["labels"]
    peak = sum(parts.values())
    time, memory = ok and purpose == "time", ok and purpose == "memory"
    fields: dict[str, Any] = {
        "schema": 1,
        "purpose": purpose,
        "state": state,
        "reason": reason if reason or ok else f"{state} on purpose",
        "cell": {
            "kind": "layer",
            "layer": layer,
            "passes": passes,
            "framework": framework,
            "variant": variant,
            "private": column == "dp",
            "batch_size": batch_size,
            "protocol": "layers-v1",
            "device": "cpu",
            "isolation": "venv",
        },
        "key": sha(f"{layer}{framework}{variant}{passes}{batch_size}"),
        "memory": {"cpu_peak_allocated": peak} if memory else {},
        "layer": {
            "kind": facts.kind,
            "description": facts.description,
            "column": column,
            "paper_row": facts.paper_row,
            "input_bytes": facts.input_bytes,
            "label_bytes": facts.label_bytes,
            "output_bytes": facts.output_bytes,
            "parameter_bytes": facts.parameter_bytes,
            "pass_seconds": list(seconds) if time else [],
            "batches": 20,
            "warm_up": 3,
            "stopped_by": "passes" if time else None,
            "parts": {**parts, "peak": peak, "baseline": 0, "instrument": "profiler", "unexplained": 0}
            if memory
            else None,
        },
        "gate": {
            "passed": state != "rejected",
            "key": sha(framework),
            "checks": [{"check": "clipped-sum", "error": 2e-7, "limit": 1e-4, "passed": state != "rejected"}],
        }
        if time
        else None,
        "versions": {"python": "3.11.9", framework: "1.6.0"},
        "machine": MACHINE,
        "block": {"run": run, "round": round, "order": order},
        "source": {"commit": "b618197aa", "dirty": False, "adapter_hash": sha(framework), "lock_hash": sha("lock")},
        "load": {"foreign_share": 0.01, "disturbed": False, "repeats": 0},
        "started": "2026-11-20T08:00:00+00:00",
        "wall_seconds": 4.5,
        "command": "dpbench run layers",
    }
    return Record.model_validate({**fields, **more})


def quick_run(
    rounds: int = 3,
    seed: int = 0,
    batch_sizes: Iterable[int] = (64, 512),
    machine: dict[str, Any] | None = None,
    extrapolated_tasks: Iterable[str] = ("cifar10-cnn", "imdb-lstm"),
    synthetic_tasks: Iterable[str] = (),
    epochs: int = 1,
    run: str = "run-1",
    tasks: Iterable[str] = tuple(LEVEL),
) -> list[Record]:
    """Five contestants x tasks x batch sizes x rounds, with memory, epsilon, accuracy, and some failures:
    opacus-ghost does not support the LSTM, and opacus-hooks runs out of memory there at the largest batch size."""
    rng = np.random.default_rng(seed)
    records = [
        record(
            purpose="gate",
            task=task,
            framework=framework,
            variant=variant,
            private=private,
            batch_size=16,
            machine=machine,
            synthetic=task in set(synthetic_tasks),
            run=run,
            **NO_LSTM if (variant, task) == ("ghost", "imdb-lstm") else {},
        )
        for task in tasks
        for framework, variant, private in CONTESTANTS
    ]
    sizes = list(batch_sizes)
    for task in tasks:
        level = LEVEL[task]
        for size in sizes:
            for r in range(rounds):
                drift = rng.normal(0, 0.03)
                for place, order in enumerate(rng.permutation(len(CONTESTANTS))):
                    (framework, variant, private), (factor, compiled) = list(CONTESTANTS.items())[order]
                    common = {
                        "task": task,
                        "framework": framework,
                        "variant": variant,
                        "private": private,
                        "batch_size": size,
                        "machine": machine,
                        "synthetic": task in set(synthetic_tasks),
                        "run": run,
                        "round": r,
                        "order": place,
                        "started": f"2026-11-20T08:{r:02d}:{place:02d}+00:00",
                    }
                    if (variant, task) == ("ghost", "imdb-lstm"):
                        records.append(record(**common, **NO_LSTM))
                        continue
                    if framework == "opacus" and variant == "hooks" and task == "imdb-lstm" and size == max(sizes):
                        records.append(
                            record(**common, state="oom", reason="resident memory passed the limit of 12 GiB")
                        )
                        continue
                    base = level * factor * (512 / size) ** (0.5 if private else 0.35) * np.exp(drift)
                    seconds = [float(base * np.exp(rng.normal(0, 0.01))) for _ in range(epochs)]
                    steps = 2 * -(-60_000 // size)
                    records.append(
                        record(
                            **common,
                            seconds=seconds,
                            compile_seconds=compiled * (4 if "lstm" in task else 1) if compiled else None,
                            extrapolated=task in set(extrapolated_tasks),
                            disturbed=bool(rng.random() < 0.02),
                            epsilon={"delta": 1e-5, "steps": steps, "rdp": 0.61, "pld": 0.55, "own": 0.61}
                            if private
                            else None,
                            accuracy={"test": 0.91 + rng.normal(0, 0.004), "after_steps": steps},
                        )
                    )
                    if r == 0:
                        per_example = PARAMETERS[task] * 4 * size if variant == "hooks" else PARAMETERS[task] * 40
                        records.append(
                            record(
                                **common,
                                purpose="memory",
                                memory={"peak_resident_growth": 90 * 2**20 + per_example},
                            )
                        )
    return records


def write(records: Iterable[Record], folder: Path, packed: bool = False) -> Path:
    """One file per record, or one ``.jsonl``; returns the folder. In a run's folder each has the name that a run gives
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    if packed:
        (folder / "records.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
        return folder
    in_run = (folder.parent / "plan.json").exists()
    for i, r in enumerate(records):
        (folder / (r.file_name if in_run else f"{i:05d}.json")).write_text(r.to_json())
    return folder
