"""Two states of the code against each other: both environments, one process per measurement, in randomised pairs on one
machine, until the verdict is clear."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from harness.analysis.sequential import Rule
from harness.compare.cells import Kept, PairedCell, first_of, paired_cells
from harness.compare.options import ComparisonOptions, check, check_sides
from harness.compare.record import (
    ROLES,
    CellResult,
    Comparison,
    MemoryPair,
    Pair,
    Process,
    Role,
    SideFacts,
    conclude,
    has_proven_growth,
    is_over,
    needs_second,
)
from harness.compare.sides import Side
from harness.compare.workers import Workers
from harness.environments import memory_limit
from harness.environments.backend import Backend, Log, check_device, check_threads
from harness.environments.choose import backend_of
from harness.environments.executor import Limits
from harness.environments.processors import quietest
from harness.environments.unavailable import Unavailable
from harness.gate import admission
from harness.plan.registry import Contestant
from harness.run import layers as layer_run
from harness.run.e2e import ensure_data
from harness.run.progress import Progress
from harness.run.session import Moment
from harness.store import cache
from harness.store.folder import RunFolder
from harness.tasks import TASKS
from harness.worker import machine

MEANT = "name it as a side (image:TAG) if it is the one that is meant"


class ComparisonRun:
    """One folder's comparison. ``command`` reproduces it. ``backends``: where each side runs."""

    def __init__(
        self,
        options: ComparisonOptions,
        base: Side,
        head: Side,
        folder: RunFolder,
        command: str,
        backends: Mapping[Role, Backend],
    ) -> None:
        self.options = options
        self.backends = backends
        self.sides: dict[Role, Side] = {"base": base, "head": head}
        self.folder = folder
        self.command = command
        self.paired_cells = paired_cells(options, {role: side.folder for role, side in self.sides.items()})
        timed = sum(paired.refusal is None for paired in self.paired_cells)
        self.rule = Rule(options.alpha, max(1, timed), options.threshold, options.rounds)
        self.timed = timed
        self.limits = Limits(memory_limit.default_limit(), options.timeout_seconds)
        self.workers = Workers(options, backends, self.limits)
        self.kept = Kept(folder.records)
        self.started = Moment().text

    @classmethod
    def connected(
        cls, options: ComparisonOptions, base: Side, head: Side, folder: RunFolder, command: str
    ) -> ComparisonRun:
        """Return the comparison where ``options.isolation`` says. Raises :class:`BadInput` where it cannot be held."""
        sides: dict[Role, Side] = {"base": base, "head": head}
        check(options)
        check_sides(options, sides)
        check_device(options.device)
        check_threads(options.threads)
        isolation, device = options.isolation, options.device
        backends = {
            role: backend_of(isolation, device, otherwise=MEANT, named=side.image, option=f"--{role}")
            for role, side in sides.items()
        }
        return cls(options, base, head, folder, command, backends)

    def execute(self, progress: Progress, fresh: bool = False) -> Comparison:
        """Measure everything, or what is left of it. A kill at any moment loses at most the pair under way."""
        try:
            for role, backend in self.backends.items():
                sides = [paired.sides[role] for paired in self.paired_cells if paired.refusal is None]
                backend.prepare([side for side in sides if side is not None], progress.log)
            return self._execute(progress, fresh)
        finally:
            for backend in self.backends.values():
                backend.close()

    def _execute(self, progress: Progress, fresh: bool) -> Comparison:
        with self.folder.open(self._description(), fresh):
            self._prepare(progress.log)
            begun = time.monotonic()
            progress.begin(len(self.paired_cells), "cells")
            for paired in self.paired_cells:
                self._open(paired, progress)
            finished = self._run_pairs(begun, progress)
            comparison = self._comparison(finished)
            cache.write_atomically(self.folder.path / "comparison.json", comparison.to_json().encode())
            return comparison

    def _description(self) -> dict[str, Any]:
        """Return what a resumed comparison must have in common with its beginning; how long it may take is not among
        it. Images are prepared by now."""
        parts = {role: backend.describe() for role, backend in self.backends.items()}
        images = {role: part["images"] for role, part in parts.items() if "images" in part}
        options = {key: value for key, value in asdict(self.options).items() if key != "minutes"}
        return {
            "options": options,
            "sides": {role: {"content": side.content, "package": side.package} for role, side in self.sides.items()},
            "place": self.backends["head"].place(self.options.device, self.options.threads),
            **parts["head"],
            **({"images": images} if images else {}),
        }

    def _prepare(self, log: Log) -> None:
        """Make environments, references and data."""
        self._prepare_executors(log)
        names = tuple(dict.fromkeys(paired.cell.layer for paired in self.paired_cells if paired.cell.layer is not None))
        if names:
            found = layer_run.references(names, log, self.backends["base"].run_tool)
            self.workers.references, self.workers.reference_fault = found
        for dataset in sorted({TASKS[paired.cell.task].dataset for paired in self.paired_cells if paired.cell.task}):
            ensure_data(dataset, self.options.synthetic, log)

    def _prepare_executors(self, log: Log) -> None:
        for paired in self.paired_cells:
            for role, contestant in paired.sides.items():
                if paired.refusal is None and contestant is not None:
                    executor = self.workers.prepare(role, contestant, log)
                    if isinstance(executor, Unavailable):  # and the other side is not even installed
                        paired.refusal, paired.is_failure = f"{role} cannot run: {executor.reason}", True

    # ---- before the first pair

    def _open(self, paired: PairedCell, progress: Progress) -> None:
        """The gate of a task, the memory of both sides; closes a cell that cannot be timed."""
        if paired.refusal is None and paired.cell.task:
            paired.gates = {role: self._judge(paired, role, progress) for role in ROLES}
            paired.is_closed = any(process.state != "ok" for process in paired.gates.values())
            if not paired.is_closed:
                measure = partial(self._weights, paired, progress)
                paired.weights = self.kept.once(f"{paired.slug}.weights.json", Pair, measure)
                paired.is_closed = paired.weights.differs or any(p.state != "ok" for p in paired.weights.processes)
        if paired.refusal is None and not paired.is_closed and self.options.memory:
            name = f"{paired.slug}.memory.json"
            paired.memory = self.kept.once(name, MemoryPair, partial(self._memory, paired, progress))
        has_grown = has_proven_growth(paired.memory, paired.cell.kind == "layer")
        if paired.refusal is not None or paired.is_closed or (self.options.first_alert and has_grown):
            self._close(paired, progress)

    def _judge(self, paired: PairedCell, role: Role, progress: Progress) -> Process:
        contestant = paired.sides[role]
        assert isinstance(contestant, Contestant)
        executor = self.workers.executor(role, contestant)
        progress.doing(f"{paired.name} · gate of {role}")
        device, threads, run_tool = self.options.device, self.options.threads, self.backends[role].run_tool
        verdict = admission.judge(
            contestant, paired.cell.task, executor, self.limits, device, threads, progress.log, run_tool
        )
        said = verdict.result()
        return Process(state=said.state, reason=verdict.reason, checks=verdict.gate.checks, log_tail=verdict.log_tail)

    def _memory(self, paired: PairedCell, progress: Progress) -> MemoryPair:
        pair = MemoryPair(base=[], head=[])
        for _ in range(2):
            processes = {role: self.workers.one(paired, role, "memory", 0, progress) for role in ROLES}
            pair = MemoryPair(base=[*pair.base, processes["base"]], head=[*pair.head, processes["head"]])
            if paired.cell.kind != "layer" or not needs_second(pair):
                break
        return pair

    def _weights(self, paired: PairedCell, progress: Progress) -> Pair:
        """Return the weights of either side after the first steps on the measured batch size, without noise, whose
        stream a newer version may draw in another order. Beside what the gate compares, these are real rows, and as
        many."""
        order = first_of(self.options.seed, paired.slug, 0)
        return self.workers.both(paired, order, "weights", 0, [], progress)

    # ---- pairs

    def _run_pairs(self, begun: float, progress: Progress) -> bool:
        """Measure pairs of all open cells in turn, in random order, until each is clear; return whether all ended."""
        number = 0
        while any(not paired.is_closed for paired in self.paired_cells):
            left = [paired for paired in self.paired_cells if not paired.is_closed]
            random.Random(f"dpbench comparison {self.options.seed} {number}").shuffle(left)
            for paired in left:
                name = f"{paired.slug}.{number:03}.json"
                is_late = self.options.minutes is not None and time.monotonic() - begun > 60.0 * self.options.minutes
                if is_late and self.kept.read(name, Pair) is None:
                    return False
                measure = partial(self._pair, paired, number, progress)
                paired.pairs.append(self.kept.once(name, Pair, measure))
                if is_over(paired.pairs, self.rule):
                    self._close(paired, progress)
            number += 1
        return True

    def _close(self, paired: PairedCell, progress: Progress) -> None:
        paired.is_closed = True
        progress.doing(paired.name)
        progress.done(self._conclude(paired).verdict, counts=paired.refusal is None)

    def _pair(self, paired: PairedCell, number: int, progress: Progress) -> Pair:
        order = first_of(self.options.seed, paired.slug, number)
        with quietest(self.options.threads) as places:
            pair = self.workers.both(paired, order, "time", number, places, progress)
        if pair.is_uneven:
            progress.log(f"{paired.name}: pair {number + 1} was unevenly disturbed by other work on this machine")
        return pair

    # ---- what came of it

    def _conclude(self, paired: PairedCell) -> CellResult:
        kind: Literal["layer", "e2e"] = "layer" if paired.cell.kind == "layer" else "e2e"
        measured = paired.pairs, paired.memory, paired.gates, paired.refusal
        return conclude(paired.name, kind, *measured, self.rule, paired.is_failure, paired.weights)

    def _comparison(self, finished: bool) -> Comparison:
        cells = [self._conclude(paired) for paired in self.paired_cells]
        pairs = [pair for paired in self.paired_cells for pair in (*paired.pairs, paired.memory) if pair is not None]
        processes = [process for pair in pairs for process in pair.processes]
        return Comparison(
            started=min((p.started for p in processes if p.started), default=self.started),
            command=self.command,
            base=self._facts("base"),
            head=self._facts("head"),
            alpha=self.options.alpha,
            threshold=self.options.threshold,
            max_rounds=self.options.rounds,
            timed_cells=self.timed,
            isolation=self.options.isolation,
            engine=next((p.container.engine for p in processes if p.container is not None), None),
            threads=self.options.threads,
            seconds=self.options.task_seconds if self.options.tasks else self.options.layer_seconds,
            machine={**machine.state(), **self.backends["head"].place(self.options.device, self.options.threads)},
            minutes=sum(p.wall_seconds for p in processes) / 60.0,
            finished=finished,
            cells=cells,
        )

    def _facts(self, role: Role) -> SideFacts:
        side, backend = self.sides[role], self.backends[role]
        contestants = [paired.sides[role] for paired in self.paired_cells]
        frameworks = {c.framework.name: c.framework for c in contestants if c is not None}
        images = {name: backend.describe_process(framework, None).image for name, framework in frameworks.items()}
        return SideFacts(
            asked=side.asked,
            title=side.title,
            commit=side.commit,
            dirty=side.dirty,
            content=side.content,
            package=side.package,
            locks={name: backend.environment_id(framework) for name, framework in frameworks.items()},
            versions=self._versions(role),
            images={name: image for name, image in images.items() if image is not None},
        )

    def _versions(self, role: Role) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for paired in self.paired_cells:
            for process in (getattr(pair, role) for pair in paired.pairs[:1]):
                found.setdefault(paired.cell.framework, process.versions)
        return found
