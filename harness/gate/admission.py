"""The parent's side of the admission gate: makes the reference, runs the gate in a contestant's own environment, and
remembers verdicts by what they depend on."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.analysis import accounting
from harness.data import store
from harness.environments import executor, venv
from harness.environments.executor import Limits, Place
from harness.errors import BadInput
from harness.paths import ROOT
from harness.plan.registry import Contestant, code_files, frameworks
from harness.store import cache, seal
from harness.store.record import Gate, GateCheck
from harness.tasks import TASKS
from harness.worker.request import Request
from harness.worker.sampling import steps_per_epoch

REFERENCE_SOURCES = (
    "dpcore/reference.py",
    "frameworks/_tools/reference.py",
    "frameworks/_shared/torch/models.py",
    "harness/worker/gate/cases.py",
    "harness/tasks.py",
)
GATE_SOURCES = (
    *REFERENCE_SOURCES,
    "harness/worker",
    "harness/environments/referee.py",
    "harness/gate/admission.py",
)
BUDGET_BATCH = 64
"""The ε of one epoch at this batch size is what an adapter's own accountant is asked for."""

TIMEOUT_SECONDS = 900.0
"""At most: a run's own limit, where that is less."""
NOISE_MULTIPLIER = 1.1
DELTA = 1e-5


@dataclass(frozen=True)
class Verdict:
    """``state`` is ``ok`` where the gate ran; then ``gate`` says whether it passed. Else why it could not run.
    ``machine``: where it ran, None for this one."""

    state: str
    reason: str | None
    gate: Gate
    versions: dict[str, str]
    log_tail: str = ""
    cached: bool = False
    machine: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return self.state == "ok" and self.gate.passed


def key_of(contestant: Contestant, task: str, device: str, threads: int, identity: str = "") -> str:
    """Hash of everything that the verdict depends on, and of every file that the adapter could read beside its code:
    all of its folder and the data set. ``identity``: :attr:`Place.identity`."""
    framework = contestant.framework
    parts = [task, contestant.name, device, framework.adapter_hash, framework.lock_hash, sources_hash(GATE_SOURCES)]
    parts += [str(threads), framework.folder_hash, *_data_hashes(TASKS[task].dataset)]
    parts += [identity] if identity else []
    parts += [] if accounting.available() else ["budget not checked"]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _data_hashes(name: str) -> list[str]:
    """Of the data set and of its synthetic twin, as far as they are in the cache."""
    found = []
    for synthetic in (False, True):
        with suppress(BadInput):
            found.append(str((store.describe(name, synthetic) or {}).get("sha256", "none")))
    return found


def sources_hash(sources: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(code_files(ROOT / source)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def reference(task: str, say: Callable[[str], None], make: Callable[[str, list[str]], object] | None = None) -> Path:
    """The float64 reference of a task, computed once: by ``make``, given a module and its arguments, or in the
    environment of plain PyTorch."""
    folder = cache.folder("references")
    path = folder / f"{task}-{sources_hash(REFERENCE_SOURCES)}.npz"
    with cache.locked(folder / f"{task}.lock"):
        if not seal.holds(path, say):
            if make is None:
                python = venv.ensure(frameworks()["pytorch"], say).python
                make = functools.partial(executor.run_tool, python)
            say(f"Reference of {task}: float64, one example at a time")
            make("frameworks._tools.reference", ["--task", task, "--out", str(path)])
            seal.put(path)
    return path


def judge(
    contestant: Contestant,
    task: str,
    place: Place,
    limits: Limits,
    device: str,
    threads: int,
    say: Callable[[str], None],
    fresh: bool = False,
) -> Verdict:
    """The verdict on one contestant and task, from memory where nothing that it depends on has changed."""
    key = key_of(contestant, task, device, threads, place.identity)
    folder = cache.folder("gate")
    path = folder / f"{key}.json"
    if path.exists() and not fresh:
        remembered = _remembered(path, key)
        if remembered is not None:
            return remembered
        say(f"The remembered verdict {path} is damaged, or another hand has written it; the gate judges anew.")
    try:
        truth = reference(task, say)
    except (venv.EnvironmentFault, executor.ToolFault) as fault:
        nothing = Gate(passed=False, key=key, checks=[])
        return Verdict("crashed", f"the float64 reference of {task} could not be made: {fault}", nothing, {})
    rows = TASKS[task].train_size
    steps = steps_per_epoch(rows, BUDGET_BATCH)
    budget = None
    if accounting.available():  # else the check of the adapter's own accountant is left out
        rdp, pld = accounting.epsilons(BUDGET_BATCH / rows, NOISE_MULTIPLIER, steps, DELTA)
        budget = {"steps": steps, "delta": DELTA, "rdp": rdp, "pld": pld}
    request = Request(
        mode="gate",
        folder=str(contestant.framework.folder),
        variant=contestant.variant.name,
        private=contestant.variant.private,
        static_shapes=contestant.variant.static_shapes,
        task=task,
        batch_size=BUDGET_BATCH,
        dataset_size=rows,
        sampling="poisson",
        warm_up=False,
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=1.0,
        learning_rate=TASKS[task].learning_rate,
        delta=DELTA,
        device=device,
        threads=threads,
        precision="float32",
        initial_seed=0,
        batch_seed=0,
        noise_seed=1,
        reference=str(truth),
        budget=budget,
    )
    result = place.run(request, limits, lambda event: None)
    verdict = _verdict(result, key)
    if verdict.state == "ok":
        content = json.dumps(result)
        kept = {"seal": seal.of(key, content.encode()), "result": content}
        cache.write_atomically(path, json.dumps(kept).encode())
    return verdict


def _remembered(path: Path, key: str) -> Verdict | None:
    """The verdict in a file of the cache; None where this harness has not written it, or not under this key."""
    try:
        kept = json.loads(path.read_bytes())
        content: str = kept["result"]
        if hmac.compare_digest(kept["seal"].encode(), seal.of(key, content.encode()).encode()):
            return replace(_verdict(json.loads(content), key), cached=True, log_tail="")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _verdict(result: dict[str, Any], key: str) -> Verdict:
    checks = [GateCheck.model_validate(check) for check in result.get("checks", [])]
    passed = result["state"] == "ok" and bool(checks) and all(check.passed for check in checks)
    return Verdict(
        state=result["state"],
        reason=result.get("reason"),
        gate=Gate(passed=passed, key=key, checks=checks),
        versions=result.get("versions", {}),
        log_tail=result.get("log_tail", ""),
        machine=result.get("machine"),
    )


def failures(gate: Gate) -> str:
    """One line: which checks failed, by how much."""
    failed = [check for check in gate.checks if not check.passed]
    return "; ".join(f"{c.check} (error {_number(c.error)}, limit {_number(c.limit)})" for c in failed)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
