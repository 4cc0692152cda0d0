"""The parent's side of the admission gate: makes the reference, runs the gate in a contestant's own environment, and
remembers verdicts by what they depend on."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis import accounting
from harness.data import store
from harness.environments import variables
from harness.environments.backend import Log, Output, RunTool
from harness.environments.executor import Executor, Limits, ToolFault
from harness.errors import BadInput
from harness.paths import ROOT
from harness.plan.registry import Contestant, code_files
from harness.store import cache, seal
from harness.store.record import Gate, GateCheck
from harness.tasks import SMALL_GATE, definition_hash, known_task
from harness.worker import machine
from harness.worker.gate.check import RAISED
from harness.worker.request import Request
from harness.worker.result import Result, State
from harness.worker.sampling import steps_per_epoch

REFERENCE_SOURCES = (
    "dpcore/reference.py",
    "frameworks/_tools/bfloat16.py",
    "frameworks/_tools/reference.py",
    "frameworks/_shared/torch/models.py",
    "frameworks/_shared/torch/transformer.py",
    "harness/worker/gate/cases.py",
)
"""Beside the task's own definition (:func:`harness.tasks.definition_hash`)."""
GATE_SOURCES = (*REFERENCE_SOURCES, "harness/worker", "harness/environments/referee.py", "harness/gate/admission.py")
BUDGET_BATCH = 64
"""The ε of one epoch at this batch size is what an adapter's own accountant is asked for."""

TIMEOUT_SECONDS = 900.0
"""Longest time of a gate, in seconds; a run's own limit counts where it is shorter. Of several processes as many
times as they are: they exchange what they have in each of the gate's thousand steps."""
NOISE_MULTIPLIER = 1.1
DELTA = 1e-5


@dataclass(frozen=True)
class Verdict:
    """``state`` is ``ok`` where the gate ran; then ``gate`` says whether it passed. Else why it could not run."""

    state: State
    reason: str | None
    gate: Gate
    versions: dict[str, str]
    log_tail: str = ""
    cached: bool = False

    @property
    def passed(self) -> bool:
        return self.state == "ok" and self.gate.passed

    def result(self) -> Result:
        """Return it as that of a process, which a failed check makes ``rejected``."""
        state: State = "rejected" if self.state == "ok" and not self.gate.passed else self.state
        reason = self.reason or failures(self.gate) or None
        return Result(state, reason, versions=self.versions, log_tail=self.log_tail)


def key_of(
    contestant: Contestant, task: str, device: str, threads: int, identity: str = "", small: bool = False
) -> str:
    """Return hash of everything that the verdict depends on, and of every file that the adapter could read beside its
    code: all of its folder and the data set. ``identity``: :attr:`Executor.identity`."""
    framework = contestant.framework
    task = judged_task(task, small)
    parts = [task, contestant.name, device, framework.adapter_hash, framework.lock_hash, sources_hash(GATE_SOURCES)]
    parts += [definition_hash(known_task(task)), str(threads), framework.folder_hash]
    parts += _data_hashes(known_task(task).dataset)
    # What libraries read of the shell; a machine of another kind, which may share this cache, has other kernels.
    parts += [f"{name}={value}" for name, value in variables.named().items()]
    parts += [machine.kind(device)]
    parts += [identity] if identity else []
    parts += [] if accounting.available() else ["budget not checked"]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def judged_task(task: str, small: bool = False) -> str:
    """Return the name of the task on which the gate judges a contestant for this one. ``small``: the smaller one of
    the same structure, where there is one."""
    return (SMALL_GATE.get(task) if small else None) or known_task(task).judged_as or task


def _data_hashes(name: str) -> list[str]:
    """Return the hashes of the data set and of its synthetic twin, as far as they are in the cache."""
    found = []
    for synthetic in (False, True):
        with suppress(BadInput):
            found.append(str((store.describe(name, synthetic) or {}).get("sha256", "none")))
    return found


def sources_hash(sources: Iterable[str]) -> str:
    """Return the hash of all files of these sources."""
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(code_files(ROOT / source)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def reference(task: str, log: Log, run_tool: RunTool) -> Path:
    """Return the float64 reference of a task, which ``run_tool`` computes once.

    Raises:
        EnvironmentFault: there is no environment with PyTorch.
        ToolFault: it could not be computed.
    """
    folder = cache.folder("references")
    parts = task, definition_hash(known_task(task)), sources_hash(REFERENCE_SOURCES), machine.kind()
    path = folder / f"{'-'.join(parts)}.npz"
    with cache.locked(folder / f"{task}.lock"):
        if not seal.holds(path, log):
            log(f"Reference of {task}: float64, one example at a time")
            run_tool("frameworks._tools.reference", ["--task", task, "--out", Output(path)], log)
            seal.put(path)
    return path


def judge(
    contestant: Contestant,
    task: str,
    executor: Executor,
    limits: Limits,
    device: str,
    threads: int,
    log: Log,
    run_tool: RunTool,
    fresh: bool = False,
    small: bool = False,
) -> Verdict:
    """Return the verdict on one contestant and task (by that which is judged in its place, where it has one), from
    memory where nothing that it depends on has changed. ``run_tool`` computes the reference. ``small``: as
    :func:`judged_task` has it."""
    judged = judged_task(task, small)
    twin = judged if judged != task else None
    task = judged
    key = key_of(contestant, task, device, threads, executor.identity)
    folder = cache.folder("gate")
    path = folder / f"{key}.json"
    if path.exists() and not fresh:
        remembered = _remembered(path, key, twin)
        if remembered is not None:
            return remembered
        log(f"The remembered verdict {path} is damaged, or another hand has written it; the gate judges anew.")
    try:
        truth = reference(task, log, run_tool)
    except ToolFault as fault:
        nothing = Gate(passed=False, key=key, checks=[])
        return Verdict("crashed", f"the float64 reference of {task} could not be made: {fault}", nothing, {})
    rows = known_task(task).train_size
    steps = steps_per_epoch(rows, BUDGET_BATCH)
    budget = None
    if accounting.available():  # else the check of the adapter's own accountant is left out
        run = (BUDGET_BATCH / rows, NOISE_MULTIPLIER, steps, DELTA)
        rdp, pld = accounting.epsilons(*run)
        budget = {"steps": steps, "delta": DELTA, "rdp": rdp, "pld": pld}
        budget["of_2017"] = accounting.epsilon_as_of_2017(*run)
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
        learning_rate=known_task(task).learning_rate,
        delta=DELTA,
        device=device,
        threads=threads * contestant.world_size,
        world_size=contestant.world_size,
        initial_seed=0,
        batch_seed=0,
        noise_seed=1,
        reference=str(truth),
        budget=budget,
    )
    longest = min(TIMEOUT_SECONDS, limits.timeout_seconds) * contestant.world_size
    result = executor.run(request, replace(limits, timeout_seconds=longest), lambda event: None)
    verdict = _verdict(result, key, twin)
    if verdict.state == "ok":
        content = result.to_json()
        kept = {"seal": seal.of(key, content.encode()), "result": content}
        cache.write_atomically(path, json.dumps(kept).encode())
    return verdict


def _remembered(path: Path, key: str, twin: str | None) -> Verdict | None:
    """Return the verdict in a file of the cache; None where this harness has not written it, or not under this key."""
    try:
        kept = json.loads(path.read_bytes())
        content: str = kept["result"]
        if hmac.compare_digest(kept["seal"].encode(), seal.of(key, content.encode()).encode()):
            return replace(_verdict(Result.from_json(content), key, twin), cached=True, log_tail="")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _verdict(result: Result, key: str, twin: str | None) -> Verdict:
    checks = [GateCheck(**vars(check)) for check in result.checks]
    passed = result.state == "ok" and bool(checks) and all(check.passed for check in checks)
    state, reason = result.state, result.reason
    failed = [check for check in checks if not check.passed]
    if state == "ok" and failed and all(check.detail.startswith(RAISED) for check in failed):
        # No update was wrong: it raised, which surroundings bring about, too (no home folder, a full disk).
        state, reason = "crashed", f"{failed[0].check} {failed[0].detail} ({len(failed)} of {len(checks)} checks)"
    return Verdict(
        state=state,
        reason=reason,
        gate=Gate(passed=passed, key=key, checks=checks, judged_as=twin),
        versions=result.versions,
        log_tail=result.log_tail,
    )


def failures(gate: Gate) -> str:
    """Return one line: which checks failed, by how much."""
    failed = [check for check in gate.checks if not check.passed]
    return "; ".join(f"{c.check} (error {_number(c.error)}, limit {_number(c.limit)})" for c in failed)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
