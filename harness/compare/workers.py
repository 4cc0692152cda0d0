"""The processes of a comparison: one of either side, for its time, its memory or its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.analysis import turns
from harness.compare.cells import AnyContestant, PairedCell
from harness.compare.options import LAYER_SECONDS, ComparisonOptions
from harness.compare.record import ROLES, Pair, Process, Role
from harness.data.pretrained import starting_parameters
from harness.environments.backend import Backend, Log
from harness.environments.executor import WORKER, Executor, Limits, Venv
from harness.environments.turns import TURN_SECONDS, Seat
from harness.environments.unavailable import Unavailable
from harness.plan import e2e as plan
from harness.plan import layers as layer_plan
from harness.plan import protocol as protocols
from harness.plan.layer_registry import LayerContestant
from harness.run.progress import Progress
from harness.run.session import Moment, in_turns, undisturbed
from harness.store.record import Cell, GateCheck
from harness.tasks import TASKS
from harness.worker import memory as resident
from harness.worker import sketch
from harness.worker.batches import REPLAYED_STEPS
from harness.worker.gate import layers as layer_gate
from harness.worker.measurement import SETTLING_STEPS
from harness.worker.result import Result

LAYER_WORKER = "harness.worker.layers"
SINGLE_PASSES = 100_000
METRICS = ("cpu_peak_allocated", "cuda_peak_allocated", resident.GROWTH)
"""Counted by the framework's allocator in a layer; of a task, the growth of the resident set."""

INFINITE_DISTANCE = 1e6
"""Stands for an infinite distance, which JSON cannot carry."""
WEIGHTS_TOLERANCE = 1e-3
WEIGHTS_STEPS = REPLAYED_STEPS + SETTLING_STEPS

Purpose = Literal["time", "memory", "weights"]


class Workers:
    """The executors of both sides, and what their processes are asked for.

    Attributes:
        references: float64 gradients by layer; ``reference_fault`` says why there are none.
    """

    def __init__(self, options: ComparisonOptions, backends: Mapping[Role, Backend], limits: Limits) -> None:
        self.options, self.backends, self.limits = options, backends, limits
        self.executors: dict[tuple[Role, str, str], Executor | Unavailable] = {}
        self.references: dict[str, Path] = {}
        self.reference_fault: str | None = None

    def prepare(self, role: Role, contestant: AnyContestant, log: Log) -> Executor | Unavailable:
        """Return where it runs, or why it cannot."""
        module = _module_of(contestant)
        key = role, module, contestant.name
        if key not in self.executors:
            self.executors[key] = self.backends[role].executor(contestant, log, module)
        return self.executors[key]

    def executor(self, role: Role, contestant: AnyContestant) -> Executor:
        """Return where a prepared contestant runs."""
        executor = self.executors[role, _module_of(contestant), contestant.name]
        assert not isinstance(executor, Unavailable), executor.reason
        return executor

    def both(
        self,
        paired: PairedCell,
        order: tuple[Role, Role],
        purpose: Purpose,
        number: int,
        places: list[list[int]],
        progress: Progress,
    ) -> Pair:
        """Return a process of either side, and how far what they leave behind lies apart. ``places``: processors for
        as many as may start at once, the first of which both are timed on."""
        blocks: list[tuple[float, float]] = []
        if purpose == "time" and self._takes_turns(paired):
            processes, blocks = self._in_turns(paired, order, number, places, progress)
        else:
            processes = {role: self.one(paired, role, purpose, number, progress) for role in order}
        base, head = processes["base"], processes["head"]
        apart = limit = None
        if base.sketch and head.sketch:
            apart = min(sketch.apart(base.sketch, head.sketch), INFINITE_DISTANCE)
            limit = layer_gate.TOLERANCE if paired.cell.kind == "layer" else self._room(paired.cell, base.sketch)
        kept = {role: process.model_copy(update={"sketch": []}) for role, process in processes.items()}
        return Pair(
            number=number,
            order=order,
            processors=places[0] if places else [],
            base=kept["base"],
            head=kept["head"],
            apart=apart,
            limit=limit,
            blocks=blocks,
        )

    def _takes_turns(self, paired: PairedCell) -> bool:
        """Return whether both sides can be alive together: processes of this machine, on its processors."""
        executors = [self.executor(role, side) for role, side in paired.sides.items() if side is not None]
        return paired.cell.kind == "e2e" and self.options.device == "cpu" and all(type(e) is Venv for e in executors)

    def _in_turns(
        self, paired: PairedCell, order: tuple[Role, Role], number: int, places: list[list[int]], progress: Progress
    ) -> tuple[dict[Role, Process], list[tuple[float, float]]]:
        """Return the process of either side, and the seconds of a step of base and of head in each block."""
        progress.doing(f"{paired.name} · pair {number + 1} · taking turns")
        started = Moment()

        def process(role: Role) -> Callable[[Seat], Result]:
            contestant = paired.sides[role]
            assert contestant is not None
            executor = self.executor(role, contestant)
            assert isinstance(executor, Venv)
            request = self._request(paired.cell, contestant, "time", number, takes_turns=True)
            return lambda seat: executor.run(request, self.limits, progress.event, seat)

        seed = f"{self.options.seed} {paired.slug} {number}"
        found = in_turns({role: process(role) for role in order}, seed, paired.name, progress.log, places, equal=True)
        how: dict[str, Any] = {"started": started.text, "wall_seconds": started.seconds / len(ROLES)}
        processes = {
            role: _process(found[role][0], number == 0).model_copy(update={**how, "load": found[role][1]})
            for role in ROLES
        }
        timed = {role: found[role][0].timed for role in ROLES}
        base, head = timed["base"], timed["head"]
        return processes, [] if base is None or head is None else turns.shared(base.turns, head.turns)

    def _room(self, cell: Cell, moved: list[float]) -> float:
        """Return how far the weights of a task may lie apart, over the way travelled: sums in another order, and one
        float32 rounding of every weight in every step."""
        start = starting_parameters(TASKS[cell.task], self.options.seed * 1000, self.options.synthetic)
        rounding = math.sqrt(sum(float(np.sum(np.spacing(np.abs(w)).astype(np.float64) ** 2)) for w in start.values()))
        travelled = float(np.linalg.norm(moved))
        return WEIGHTS_TOLERANCE + (WEIGHTS_STEPS * rounding / travelled if travelled else 0.0)

    def one(self, paired: PairedCell, role: Role, purpose: Purpose, number: int, progress: Progress) -> Process:
        """Return a fresh process, never repeated by itself: a disturbed pair is repeated whole."""
        contestant = paired.sides[role]
        assert contestant is not None
        executor = self.executor(role, contestant)
        backend = self.backends[role]
        if paired.cell.layer is not None and self.reference_fault is not None:
            return Process(state="crashed", reason=self.reference_fault)
        request = self._request(paired.cell, contestant, purpose, number)
        progress.doing(f"{paired.name} · {'pair ' + str(number + 1) if purpose == 'time' else purpose} · {role}")
        started = Moment()
        quiet = Progress(progress.console, quiet=True)
        result, load = undisturbed(
            lambda: executor.run(request, self.limits, progress.event),
            0,
            purpose == "time",
            paired.name,
            quiet,
            backend.speed_probe,
        )
        how: dict[str, Any] = {"load": load, "started": started.text, "wall_seconds": started.seconds}
        how["container"] = backend.describe_process(contestant.framework, result).container
        return _process(result, number == 0).model_copy(update=how)

    def _request(
        self, cell: Cell, contestant: AnyContestant, purpose: Purpose, number: int, takes_turns: bool = False
    ) -> Any:
        options = self.options
        seed = options.seed * 1000 + number
        if isinstance(contestant, LayerContestant):
            return layer_plan.request_of(
                contestant,
                cell,
                mode="time" if purpose == "time" else "memory",
                max_grad_norm=1.0,
                threads=options.threads,
                seed=seed,
                reference=str(self.references[str(cell.layer)]),
                predicts=False,
                seconds=options.layer_seconds,
                most_passes=SINGLE_PASSES,
                least_passes=5,
                longest_pass=options.timeout_seconds,
                most_bytes=self.limits.memory_bytes,
                sketches=purpose == "time",
            )
        protocol = protocols.load("verified")
        return plan.request_of(
            contestant,
            cell,
            protocol,
            mode="time" if purpose == "time" else "memory",
            noise_multiplier=0.0 if purpose == "weights" else protocol.noise_multiplier,
            threads=options.threads,
            initial_seed=seed,
            batch_seed=seed,
            noise_seed=seed + 1,
            synthetic=options.synthetic,
            budget_seconds=options.task_seconds if purpose == "time" else LAYER_SECONDS,
            turn_seconds=TURN_SECONDS if purpose == "time" and takes_turns else None,
            sketches=purpose == "weights",
        )


def _module_of(contestant: AnyContestant) -> str:
    return LAYER_WORKER if isinstance(contestant, LayerContestant) else WORKER


def _process(result: Result, with_versions: bool) -> Process:
    """Return what is kept of a worker's result: of the passes, their median and spread."""
    seconds = (result.layer and result.layer.pass_seconds) or result.epoch_seconds
    low, middle, high = (float(q) for q in np.quantile(seconds, (0.1, 0.5, 0.9))) if seconds else (None, None, None)
    memory = result.memory
    return Process(
        state=result.state,
        reason=result.reason,
        seconds=middle,
        passes=len(seconds),
        low=low,
        high=high,
        bytes=next((memory[metric] for metric in METRICS if metric in memory), None),
        checks=[GateCheck(**vars(line)) for line in result.checks],
        versions=result.versions if with_versions else {},
        log_tail="" if result.state == "ok" else result.log_tail,
        interrupted=result.interrupted,
        sketch=result.sketch,
    )
