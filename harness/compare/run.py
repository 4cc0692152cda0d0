"""Two states of the code against each other: both environments, one process per measurement, in randomised pairs on one
machine, until the verdict is clear."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from harness import layers as layer_data
from harness.analysis import turns
from harness.analysis.sequential import FIRST_LOOK, Rule
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
from harness.data.pretrained import starting_parameters
from harness.environments import memory_limit
from harness.environments.backend import Backend, Log, check_device, check_threads
from harness.environments.choose import backend_of, check_isolation
from harness.environments.executor import WORKER, Executor, Limits, ToolFault, Venv
from harness.environments.processors import quietest
from harness.environments.turns import TURN_SECONDS, Seat
from harness.environments.unavailable import Unavailable
from harness.environments.venv import EnvironmentFault
from harness.errors import BadInput
from harness.gate import admission
from harness.layers import LAYERS
from harness.plan import e2e as plan
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.plan import protocol as protocols
from harness.plan.layer_registry import LayerContestant
from harness.plan.registry import Contestant
from harness.run import layers as layer_run
from harness.run.e2e import ensure_data
from harness.run.progress import Progress
from harness.run.session import Moment, in_turns, undisturbed
from harness.store import cache
from harness.store.folder import RunFolder
from harness.store.record import Cell, GateCheck, no_number
from harness.tasks import TASKS
from harness.worker import machine, sketch
from harness.worker import memory as resident
from harness.worker.batches import REPLAYED_STEPS
from harness.worker.gate import layers as layer_gate
from harness.worker.measurement import SETTLING_STEPS
from harness.worker.result import Result

DEFAULT_LAYERS = ("linear", "embedding", "lstm")
DEFAULT_SIZES = (64,)
DEFAULT_CONTESTANTS = ("dpcore-native",)
LAYER_WORKER = "harness.worker.layers"
SINGLE_PASSES = 100_000
LAYER_SECONDS = 0.6
LAYER_ROUNDS = 20
TASK_SECONDS = 6.0
TASK_ROUNDS = 10
METRICS = ("cpu_peak_allocated", "cuda_peak_allocated", resident.GROWTH)
"""Counted by the framework's allocator in a layer; of a task, the growth of the resident set."""

INFINITE_DISTANCE = 1e6
"""Stands for an infinite distance, which JSON cannot carry."""
WEIGHTS_TOLERANCE = 1e-3
WEIGHTS_STEPS = REPLAYED_STEPS + SETTLING_STEPS
MEANT = "name it as a side (image:TAG) if it is the one that is meant"

AnyContestant = LayerContestant | Contestant
Purpose = Literal["time", "memory", "weights"]
Stored = TypeVar("Stored", Pair, MemoryPair)


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of a comparison. ``frameworks``: names as the other verbs take them. ``seconds``: timed, per process;
    None for LAYER_SECONDS or TASK_SECONDS. ``max_rounds``: None for LAYER_ROUNDS or TASK_ROUNDS.
    ``minutes``: after which no new pair is begun; environments and data do not count. ``threads``: 1 unless asked,
    which leaves processors to the rest of the machine. ``first_alert``: a cell ends with its first alert; where memory
    has grown for certain, no clock is started."""

    layers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = DEFAULT_SIZES
    frameworks: tuple[str, ...] = DEFAULT_CONTESTANTS
    passes: tuple[str, ...] = ("clipped",)
    threshold: float = 0.05
    alpha: float = 0.05
    max_rounds: int | None = None
    minutes: float | None = None
    seconds: float | None = None
    threads: int = 1
    isolation: str = "venv"
    device: str = "cpu"
    memory: bool = True
    first_alert: bool = False
    synthetic: bool = False
    seed: int = 0
    timeout_seconds: float = 300.0

    @property
    def rounds(self) -> int:
        """Most pairs of a cell. Of processes that take turns fewer are needed, and each costs more."""
        if self.max_rounds is not None:
            return self.max_rounds
        return LAYER_ROUNDS if self.layers else TASK_ROUNDS

    @property
    def layer_seconds(self) -> float:
        return LAYER_SECONDS if self.seconds is None else self.seconds

    @property
    def task_seconds(self) -> float:
        return TASK_SECONDS if self.seconds is None else self.seconds


def check(options: ComparisonOptions) -> None:
    """Raise :class:`BadInput` with the value, the rule and the remedy."""
    if not 0.0 < options.threshold < 1.0:
        raise BadInput(f"--threshold is {options.threshold}: it is a fraction above 0 and below 1, for instance 0.05.")
    # Equivalence takes an interval at 1 - 2 alpha, see harness.analysis.sequential.
    if not 0.0 < options.alpha < 0.5:
        raise BadInput(f"--alpha is {options.alpha}: it is a chance above 0 and below 0.5, for instance 0.05.")
    if options.rounds < FIRST_LOOK:
        raise BadInput(
            f"--max-rounds is {options.rounds}: fewer than {FIRST_LOOK} pairs give no verdict; ask for more."
        )
    plan.check_numbers({"threads": options.threads}, {"minutes": options.minutes}, 0, options.seed)
    check_isolation(options.isolation)
    if options.layers:
        layer_plan.preset(
            "small",
            layers=list(options.layers),
            batch_sizes=options.batch_sizes,
            passes=options.passes,
            seconds=options.layer_seconds,
        )
    if options.tasks:
        sizes, seconds = options.batch_sizes, options.task_seconds
        plan.preset("smoke", tasks=options.tasks, batch_sizes=sizes, budget_seconds=seconds)
    if not options.layers and not options.tasks:
        raise BadInput("There is nothing to compare: --layers and --tasks name nothing.")


def check_sides(options: ComparisonOptions, sides: dict[Role, Side]) -> None:
    """Raise :class:`BadInput` for a side that cannot run in isolation of that kind."""
    for role, side in sides.items():
        if side.image is not None and options.isolation != "docker":
            raise BadInput(
                f"--isolation is {options.isolation!r}, but --{role} is an image, and images run in containers only; "
                "leave --isolation out, or say docker."
            )
        if side.is_repinned and options.isolation == "docker":
            raise BadInput(
                f"--{role} is {side.asked!r}, which has no lock, and with --isolation docker only locked files run; "
                "put the pin into a tree, lock it there (`dpbench image lock`) and name the tree or its image, or use "
                "--isolation venv."
            )


def module_of(contestant: AnyContestant) -> str:
    """Return the worker that measures it."""
    return LAYER_WORKER if isinstance(contestant, LayerContestant) else WORKER


@dataclass
class PairedCell:
    """One cell with both sides' contestants (None where a side lacks it), and what was measured so far. ``refusal``:
    why there is nothing to compare, or None; ``is_failure``: base has the cell and head does not,
    or a side's environment could not be made."""

    cell: Cell
    sides: dict[Role, AnyContestant | None]
    refusal: str | None = None
    is_failure: bool = False
    pairs: list[Pair] = field(default_factory=list)
    memory: MemoryPair | None = None
    gates: dict[Role, Process] | None = None
    weights: Pair | None = None
    is_closed: bool = False

    @property
    def name(self) -> str:
        """``linear/dpcore-native/clipped/64`` or ``mnist-cnn/dpcore-native/64``."""
        middle = (self.cell.passes,) if self.cell.passes is not None else ()
        return "/".join((self.what, self.cell.contestant, *middle, str(self.cell.batch_size)))

    @property
    def what(self) -> str:
        return self.cell.layer or self.cell.task

    @property
    def slug(self) -> str:
        return self.name.replace("/", ".")


def paired_cells(options: ComparisonOptions, roots: dict[Role, Path]) -> list[PairedCell]:
    """Return every cell that the options name and at least one side has. Raises :class:`BadInput` where there is
    none."""
    found = [*_of_layers(options, roots), *_of_tasks(options, roots)]
    if not found:
        raise BadInput(
            "Neither side has a contestant for the chosen layers, tasks and passes; change --frameworks or --passes."
        )
    return found


def _of_layers(options: ComparisonOptions, roots: dict[Role, Path]) -> list[PairedCell]:
    if not options.layers:
        return []
    chosen = _both(options.frameworks, roots, lambda names, root: layer_registry.select(names, root=root))
    layer_options = layer_plan.preset("small", isolation=options.isolation, device=options.device)
    named = [passes for passes in layer_plan.ALL_PASSES if passes in options.passes]
    made: list[PairedCell] = []
    for layer, size, (sides, faults), passes in product(
        layer_data.select(options.layers), options.batch_sizes, chosen, named
    ):
        having = {
            role: c
            for role, c in sides.items()
            if isinstance(c, LayerContestant) and passes in c.variant.passes and c.variant.has(LAYERS[layer])
        }
        if having:
            cell = layer_plan.cell_of(layer_options, next(iter(having.values())), layer, passes, size)
            made.append(_paired_cell(cell, {role: having.get(role) for role in ROLES}, faults))
    return made


def _of_tasks(options: ComparisonOptions, roots: dict[Role, Path]) -> list[PairedCell]:
    if not options.tasks:
        return []
    task_options = plan.preset("smoke", isolation=options.isolation, device=options.device)
    chosen = _both(options.frameworks, roots, lambda names, root: registry.select(names, root=root))
    return [
        _paired_cell(
            plan.cell_of(task_options, next(c for c in sides.values() if isinstance(c, Contestant)), task, size),
            sides,
            faults,
        )
        for task in options.tasks
        for size in options.batch_sizes
        for sides, faults in chosen
    ]


def _both(
    names: Iterable[str], roots: dict[Role, Path], select: Callable[[list[str], Path], Iterable[AnyContestant]]
) -> list[tuple[dict[Role, AnyContestant | None], dict[Role, str]]]:
    """Return the chosen contestants by side, and why a side lacks one. Raises :class:`BadInput` for a name that neither
    side knows."""
    by_name: dict[str, dict[Role, AnyContestant | None]] = {}
    for name in names:
        faults = []
        for role in ROLES:
            try:
                for contestant in select([name], roots[role]):
                    by_name.setdefault(contestant.name, {"base": None, "head": None})[role] = contestant
            except BadInput as fault:
                faults.append(fault)
        if len(faults) == len(ROLES):
            raise faults[-1]
    return [(sides, _complete(name, sides, roots, select)) for name, sides in by_name.items()]


def _complete(
    name: str,
    sides: dict[Role, AnyContestant | None],
    roots: dict[Role, Path],
    select: Callable[[list[str], Path], Iterable[AnyContestant]],
) -> dict[Role, str]:
    """Ask a side that lacks the contestant for it by its full name: it may only have left the framework's defaults.
    Returns why a side has none, in the registry's words."""
    faults: dict[Role, str] = {}
    for role in ROLES:
        if sides[role] is None:
            try:
                sides[role] = next(iter(select([name], roots[role])))
            except BadInput as fault:
                faults[role] = str(fault)
    return faults


def _paired_cell(cell: Cell, sides: dict[Role, AnyContestant | None], faults: dict[Role, str]) -> PairedCell:
    """``faults``: of :func:`_both`; a side with neither contestant nor fault has the variant, but not this layer or
    pass."""
    reasons = []
    for role in ROLES:
        contestant = sides[role]
        if contestant is None and role in faults:
            reasons.append(f"{role} has no such contestant: {faults[role]}")
        elif contestant is None:
            reasons.append(f"{role} has {cell.contestant}, but not with this layer and pass")
        elif reason := _unsupported(contestant, cell):
            reasons.append(f"unsupported by {role}: {reason}")
    was = sides["base"]
    is_failure = sides["head"] is None and was is not None and not _unsupported(was, cell)
    return PairedCell(cell, sides, "; ".join(reasons) or None, is_failure)


def _unsupported(contestant: AnyContestant, cell: Cell) -> str | None:
    if isinstance(contestant, LayerContestant):
        return contestant.variant.why_unsupported(LAYERS[cell.layer or ""])
    return contestant.variant.why_unsupported(cell.task)


def first_of(seed: int, slug: str, number: int) -> tuple[Role, Role]:
    """Return the order inside a pair: random for every other one, reversed in the next, so that an effect of the order
    cancels."""
    flip = random.Random(f"dpbench comparison {seed} {slug} {number // 2}").random() < 0.5
    return ("base", "head") if flip == (number % 2 == 0) else ("head", "base")


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
        self.executors: dict[tuple[Role, str, str], Executor | Unavailable] = {}
        self.references: dict[str, Path] = {}
        self.reference_fault: str | None = None
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
        backends = {role: _backend_of(options, role, side) for role, side in sides.items()}
        return cls(options, base, head, folder, command, backends)

    def execute(self, progress: Progress, fresh: bool = False) -> Comparison:
        """Measure everything, or what is left of it. A kill at any moment loses at most the pair under way."""
        try:
            for role, backend in self.backends.items():
                backend.prepare([c for _, c in self._running(role)], progress.log)
            return self._execute(progress, fresh)
        finally:
            for backend in self.backends.values():
                backend.close()

    def _running(self, role: Role) -> Iterator[tuple[PairedCell, AnyContestant]]:
        """Yield the cells of both sides, each with the contestant of one."""
        for paired in self.paired_cells:
            contestant = paired.sides[role]
            if paired.refusal is None and contestant is not None:
                yield paired, contestant

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
            try:
                self.references = layer_run.ensure_references(names, log, self.backends["base"].run_tool)
            except (EnvironmentFault, ToolFault) as fault:
                self.reference_fault = f"the float64 references of the layers could not be made: {fault}"
                log(self.reference_fault)
        for dataset in sorted({TASKS[paired.cell.task].dataset for paired in self.paired_cells if paired.cell.task}):
            ensure_data(dataset, self.options.synthetic, log)

    def _prepare_executors(self, log: Log) -> None:
        for paired in self.paired_cells:
            for role, contestant in paired.sides.items():
                if paired.refusal is None and contestant is not None:
                    executor = self._prepare_executor(role, contestant, log)
                    if isinstance(executor, Unavailable):  # and the other side is not even installed
                        paired.refusal, paired.is_failure = f"{role} cannot run: {executor.reason}", True

    def _prepare_executor(self, role: Role, contestant: AnyContestant, log: Log) -> Executor | Unavailable:
        """Return where it runs, or why it cannot."""
        module = module_of(contestant)
        key = role, module, contestant.name
        if key not in self.executors:
            self.executors[key] = self.backends[role].executor(contestant, log, module)
        return self.executors[key]

    def _executor(self, role: Role, contestant: AnyContestant) -> Executor:
        executor = self.executors[role, module_of(contestant), contestant.name]
        assert not isinstance(executor, Unavailable), executor.reason
        return executor

    # ---- before the first pair

    def _open(self, paired: PairedCell, progress: Progress) -> None:
        """The gate of a task, the memory of both sides; closes a cell that cannot be timed."""
        if paired.refusal is None and paired.cell.task:
            paired.gates = {role: self._judge(paired, role, progress) for role in ROLES}
            paired.is_closed = any(process.state != "ok" for process in paired.gates.values())
            if not paired.is_closed:
                paired.weights = self._weights(paired, progress)
                paired.is_closed = paired.weights.differs or any(p.state != "ok" for p in paired.weights.processes)
        if paired.refusal is None and not paired.is_closed and self.options.memory:
            paired.memory = self._memory(paired, progress)
        has_grown = has_proven_growth(paired.memory, paired.cell.kind == "layer")
        if paired.refusal is not None or paired.is_closed or (self.options.first_alert and has_grown):
            self._close(paired, progress)

    def _judge(self, paired: PairedCell, role: Role, progress: Progress) -> Process:
        contestant = paired.sides[role]
        assert isinstance(contestant, Contestant)
        executor = self._executor(role, contestant)
        progress.doing(f"{paired.name} · gate of {role}")
        bounds = Limits(self.limits.memory_bytes, min(admission.TIMEOUT_SECONDS, self.limits.timeout_seconds))
        options, run_tool = self.options, self.backends[role].run_tool
        verdict = admission.judge(
            contestant, paired.cell.task, executor, bounds, options.device, options.threads, progress.log, run_tool
        )
        state = "rejected" if verdict.state == "ok" and not verdict.passed else verdict.state
        return Process.model_validate(
            {"state": state, "reason": verdict.reason, "checks": verdict.gate.checks, "log_tail": verdict.log_tail}
        )

    def _memory(self, paired: PairedCell, progress: Progress) -> MemoryPair:
        name = f"{paired.slug}.memory.json"
        stored = self._stored(name, MemoryPair)
        if stored is not None:
            return stored
        pair = MemoryPair(base=[], head=[])
        for _ in range(2):
            processes = {role: self._process(paired, role, "memory", 0, progress) for role in ROLES}
            pair = MemoryPair(base=[*pair.base, processes["base"]], head=[*pair.head, processes["head"]])
            if paired.cell.kind != "layer" or not needs_second(pair):
                break
        self._store(name, pair.model_dump_json())
        return pair

    def _weights(self, paired: PairedCell, progress: Progress) -> Pair:
        """Return the weights of either side after the first steps on the measured batch size, without noise, whose
        stream a newer version may draw in another order. Beside what the gate compares, these are real rows, and as
        many."""
        name = f"{paired.slug}.weights.json"
        stored = self._stored(name, Pair)
        if stored is not None:
            return stored
        order = first_of(self.options.seed, paired.slug, 0)
        pair = self._both(paired, order, "weights", 0, [], progress)
        self._store(name, pair.model_dump_json())
        return pair

    def _both(
        self,
        paired: PairedCell,
        order: tuple[Role, Role],
        purpose: Purpose,
        number: int,
        processors: list[int],
        progress: Progress,
    ) -> Pair:
        """Return a process of either side, and how far what they leave behind lies apart."""
        blocks: list[tuple[float, float]] = []
        if purpose == "time" and self._takes_turns(paired):
            processes, blocks = self._in_turns(paired, order, number, progress)
        else:
            processes = {role: self._process(paired, role, purpose, number, progress) for role in order}
        base, head = processes["base"], processes["head"]
        apart = limit = None
        if base.sketch and head.sketch:
            apart = min(sketch.apart(base.sketch, head.sketch), INFINITE_DISTANCE)
            limit = layer_gate.TOLERANCE if paired.cell.kind == "layer" else self._room(paired.cell, base.sketch)
        kept = {role: process.model_copy(update={"sketch": []}) for role, process in processes.items()}
        return Pair(
            number=number,
            order=order,
            processors=processors,
            base=kept["base"],
            head=kept["head"],
            apart=apart,
            limit=limit,
            blocks=blocks,
        )

    def _takes_turns(self, paired: PairedCell) -> bool:
        """Return whether both sides can be alive together: processes of this machine, on its processors."""
        executors = [self._executor(role, side) for role, side in paired.sides.items() if side is not None]
        return paired.cell.kind == "e2e" and self.options.device == "cpu" and all(type(e) is Venv for e in executors)

    def _in_turns(
        self, paired: PairedCell, order: tuple[Role, Role], number: int, progress: Progress
    ) -> tuple[dict[Role, Process], list[tuple[float, float]]]:
        """Return the process of either side, and the seconds of a step of base and of head in each block."""
        progress.doing(f"{paired.name} · pair {number + 1} · taking turns")
        started = Moment()

        def process(role: Role) -> Callable[[Seat], Result]:
            contestant = paired.sides[role]
            assert contestant is not None
            executor = self._executor(role, contestant)
            assert isinstance(executor, Venv)
            request = self._request(paired.cell, contestant, "time", number, takes_turns=True)
            return lambda seat: executor.run(request, self.limits, progress.event, seat)

        seed = f"{self.options.seed} {paired.slug} {number}"
        found = in_turns({role: process(role) for role in order}, seed, paired.name, progress.log, equal=True)
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

    # ---- pairs

    def _run_pairs(self, begun: float, progress: Progress) -> bool:
        """Measure pairs of all open cells in turn, in random order, until each is clear; return whether all ended."""
        number = 0
        while any(not paired.is_closed for paired in self.paired_cells):
            left = [paired for paired in self.paired_cells if not paired.is_closed]
            random.Random(f"dpbench comparison {self.options.seed} {number}").shuffle(left)
            for paired in left:
                is_late = self.options.minutes is not None and time.monotonic() - begun > 60.0 * self.options.minutes
                pair = self._pair(paired, number, progress, is_late)
                if pair is None:
                    return False
                paired.pairs.append(pair)
                if is_over(paired.pairs, self.rule):
                    self._close(paired, progress)
            number += 1
        return True

    def _close(self, paired: PairedCell, progress: Progress) -> None:
        paired.is_closed = True
        progress.doing(paired.name)
        progress.done(self._conclude(paired).verdict, counts=paired.refusal is None)

    def _pair(self, paired: PairedCell, number: int, progress: Progress, only_stored: bool) -> Pair | None:
        name = f"{paired.slug}.{number:03}.json"
        stored = self._stored(name, Pair)
        if stored is not None:
            return stored
        if only_stored:
            return None
        order = first_of(self.options.seed, paired.slug, number)
        with quietest(self.options.threads) as processors:
            pair = self._both(paired, order, "time", number, processors, progress)
        if pair.is_uneven:
            progress.log(f"{paired.name}: pair {number + 1} was unevenly disturbed by other work on this machine")
        self._store(name, pair.model_dump_json())
        return pair

    def _stored(self, name: str, kind: type[Stored]) -> Stored | None:
        """Return what an earlier call left under this name; None where it left nothing, or a process of it was
        interrupted by somebody. Raises :class:`BadInput`, naming it, where it is corrupt."""
        path = self.folder.records / name
        try:
            found = kind.model_validate(json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(
                f"{path} is corrupt ({type(error).__name__}); move it out of the folder, and the same command measures "
                "it anew."
            ) from None
        return None if any(process.interrupted for process in found.processes) else found

    def _store(self, name: str, text: str) -> None:
        cache.write_atomically(self.folder.records / name, text.encode())

    # ---- one process

    def _process(self, paired: PairedCell, role: Role, purpose: Purpose, number: int, progress: Progress) -> Process:
        """Return a fresh process, never repeated by itself: a disturbed pair is repeated whole."""
        contestant = paired.sides[role]
        assert contestant is not None
        executor = self._executor(role, contestant)
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

    # ---- what came of it

    def _conclude(self, paired: PairedCell) -> CellResult:
        kind: Literal["layer", "e2e"] = "layer" if paired.cell.kind == "layer" else "e2e"
        return conclude(
            paired.name,
            kind,
            paired.pairs,
            paired.memory,
            paired.gates,
            paired.refusal,
            self.rule,
            paired.is_failure,
            paired.weights,
        )

    def _comparison(self, finished: bool) -> Comparison:
        cells = [self._conclude(paired) for paired in self.paired_cells]
        processes = [p for paired in self.paired_cells for pair in paired.pairs for p in (pair.base, pair.head)]
        processes += [
            p for paired in self.paired_cells if paired.memory for p in (*paired.memory.base, *paired.memory.head)
        ]
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


def _backend_of(options: ComparisonOptions, role: Role, side: Side) -> Backend:
    """Return where one side runs. Raises :class:`BadInput` where it cannot."""
    return backend_of(options.isolation, options.device, otherwise=MEANT, named=side.image, option=f"--{role}")


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
