"""The plan: which cells are measured, in which randomised blocks, with which seeds. Pure data and pure functions."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from harness.errors import BadInput, did_you_mean
from harness.plan import protocol as protocols
from harness.plan import registry
from harness.plan.protocol import Protocol
from harness.plan.registry import Contestant
from harness.store.record import Cell, Purpose
from harness.tasks import FULL_TASKS, OUTSIDE, OUTSIDE_TASKS, PAPER_BATCH_SIZES, PAPER_TASKS, TASKS
from harness.worker.request import Request
from harness.worker.sampling import steps_per_epoch


@dataclass(frozen=True)
class Options:
    """Options of an end-to-end run. ``batch_sizes`` per task. ``subset``: fraction of an epoch's steps that is
    measured; ``budget_seconds``: measure about that long instead (both make the figures *extrapolated*). ``repeats``:
    how often a disturbed measurement is made again. ``time`` False: only the processes that measure peak memory.
    ``small_gate``: judge modern tasks by small networks of the same structure. ``world_size``: numbers of processes
    that train together; empty: contestants of one process; ``parallel``: only those that train in these ways."""

    tasks: tuple[str, ...]
    frameworks: tuple[str, ...] | None
    batch_sizes: dict[str, tuple[int, ...]]
    rounds: int
    epochs: int | None = None
    subset: float | None = None
    budget_seconds: float | None = None
    memory: bool = True
    time: bool = True
    protocol: str = "verified"
    device: str = "cpu"
    isolation: str = "venv"
    threads: int | None = None
    seed: int = 0
    timeout_seconds: float = 600.0
    memory_limit_bytes: int | None = None
    synthetic: bool = False
    sigma: float | None = None
    repeats: int = 1
    small_gate: bool = False
    world_size: tuple[int, ...] = ()
    parallel: tuple[str, ...] | None = None

    def contestants(self) -> list[Contestant]:
        """Return who takes part; raises :class:`BadInput` for a name that does not exist."""
        if not self.world_size:
            return registry.select(self.frameworks)
        return registry.ranked(self.frameworks, self.world_size, self.parallel)


AContestant = TypeVar("AContestant")


@dataclass(frozen=True)
class Planned(Generic[AContestant]):
    """One process of a plan."""

    contestant: AContestant
    cell: Cell
    round: int
    order: int
    purpose: Purpose

    @property
    def name(self) -> str:
        """Unique in a plan."""
        cell = self.cell
        what = cell.runner if cell.passes is None else f"{cell.runner}.{cell.passes}"
        return f"{cell.layer or cell.task}.{what}.b{cell.batch_size}.r{self.round}.{self.purpose}"


class Job(Planned[Contestant]):
    """One process of an end-to-end run; its ``purpose`` is ``memory`` or ``time``."""


ONE_OF_EACH_KIND = ("gpt2-lm", "llama-lora", "encoder-lora", "wrn-16-2", "recsys")
"""Of the modern tasks: all weights of a language model, adapters of another, published weights, convolutions, tables.
All ten would take an hour."""
QUICK_SIZES: dict[str, tuple[int, ...]] = {"imdb-lstm": (64,), "cifar10-cnn": (64,)}
"""CIFAR-10 at 512 alone took a third of the run: JAX compiles its network for a minute in every process."""

FULL_SIZES: dict[str, tuple[int, ...]] = {
    "gpt2-124m-bf16": (16,),
    "vit-b16-bf16": (16,),
    "encoder-355m-bf16": (16,),
    "wrn-40-4": (16,),
    "encoder-355m-lora": (16,),
    "llama-1b-lora-bf16": (4,),
}
"""Those of the full tasks whose measured cell 128 GB of host memory suffice for, and some minutes on 16 cores, by the
sums in docs/modern-tasks.md; the most important first, but adapters of a billion weights last, which take longest."""


def _sizes(
    tasks: tuple[str, ...], default: tuple[int, ...], special: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {task: special.get(task, default) for task in tasks}


PRESETS: dict[str, Options] = {
    "smoke": Options(
        tasks=("mnist-cnn",),
        frameworks=("core",),
        batch_sizes={"mnist-cnn": (64,)},
        rounds=1,
        budget_seconds=0.5,
        timeout_seconds=300.0,
    ),
    "quick": Options(
        tasks=PAPER_TASKS,
        frameworks=("core",),
        batch_sizes=_sizes(PAPER_TASKS, (64, 512), QUICK_SIZES),
        rounds=3,
        budget_seconds=3.0,
        timeout_seconds=300.0,
    ),
    "full": Options(
        tasks=PAPER_TASKS,
        frameworks=("all",),
        batch_sizes=_sizes(PAPER_TASKS, (16, 64, 512), {"imdb-lstm": (16, 64)}),
        rounds=5,
        budget_seconds=6.0,
    ),
    "modern": Options(
        tasks=ONE_OF_EACH_KIND,
        frameworks=("core",),
        batch_sizes=_sizes(ONE_OF_EACH_KIND, (16,), {"encoder-lora": (8,)}),
        rounds=2,
        budget_seconds=4.0,
        memory=False,
        # Twenty verdicts on the tasks themselves take two to three hours on two cores, the first time.
        small_gate=True,
    ),
    "gpu-full": Options(
        tasks=tuple(FULL_SIZES),
        frameworks=("core",),
        batch_sizes=FULL_SIZES,
        rounds=2,
        budget_seconds=1.0,
        timeout_seconds=1800.0,
    ),
    "paper": Options(
        tasks=PAPER_TASKS,
        frameworks=("all",),
        batch_sizes=_sizes(PAPER_TASKS, PAPER_BATCH_SIZES, {}),
        rounds=5,
        epochs=20,
        timeout_seconds=24 * 3600.0,
    ),
}


def preset(name: str, **changes: Any) -> Options:
    """Return a preset with the user's changes (None means unchanged). ``tasks`` and ``batch_sizes`` (a tuple) are
    expanded.

    Raises :class:`BadInput` for whatever cannot be measured.
    """
    if name not in PRESETS:
        raise BadInput(f"There is no preset {name!r}{did_you_mean(name, PRESETS)}; choose one of {', '.join(PRESETS)}.")
    base = PRESETS[name]
    named = changes.pop("tasks", None)
    tasks = tuple(dict.fromkeys(base.tasks if named is None else named))
    if not tasks or changes.get("frameworks") == ():
        raise BadInput(f"--{'frameworks' if tasks else 'tasks'} names nothing: leave it out, or name at least one.")
    for task in tasks:
        if task not in TASKS:
            raise BadInput(f"There is no task {task!r}{did_you_mean(task, TASKS)}; choose from {', '.join(TASKS)}.")
    if named is None and set(tasks) <= set(FULL_TASKS) and changes.get("device", base.device) == "cpu":
        raise BadInput(
            f"The tasks of preset {name} are for a GPU, and would take days on processors: give --device cuda, or name "
            "one of them by --tasks."
        )
    sizes = changes.pop("batch_sizes", None)
    fallback = base.batch_sizes.get(base.tasks[0], (64,))
    changes = {key: value for key, value in changes.items() if value is not None}
    if "world_size" in changes and "frameworks" not in changes:
        base = replace(base, frameworks=None)  # the preset's are of one process
    if "parallel" in changes and "world_size" not in changes:
        raise BadInput("--parallel says how several processes train together: say how many by --world-size 1,2.")
    if "subset" in changes and "budget_seconds" in changes:
        raise BadInput("--subset and --budget-seconds both say how much of an epoch is timed: choose one of them.")
    chosen = changes.get("protocol", base.protocol)
    only_whole = chosen in protocols.names() and protocols.load(chosen).needs_whole_epochs
    if only_whole and {"subset", "budget_seconds"} & changes.keys():
        raise BadInput(
            f"Protocol {chosen} times whole epochs (it counts the first one, compilation included, or times a "
            "library's own loop), so a part of one cannot be extrapolated; drop --subset and --budget-seconds."
        )
    if only_whole or ({"subset", "epochs"} & changes.keys() and "budget_seconds" not in changes):
        changes["budget_seconds"] = None
    options = replace(
        base,
        tasks=tasks,
        batch_sizes={
            task: tuple(dict.fromkeys(sizes)) if sizes else base.batch_sizes.get(task, fallback) for task in tasks
        },
        **changes,
    )
    check(options)
    return options


LARGEST_SEED = 2_000_000
"""A round's own seed is a thousand times it, and some frameworks take 32 bits (31, with the sign)."""


def check(options: Options) -> None:
    """Raise :class:`BadInput` with the value, the rule and the remedy."""
    known = [name for name in protocols.names() if protocols.load(name).times_epochs]
    if options.protocol not in known:
        raise BadInput(
            f"There is no protocol {options.protocol!r} that times epochs; choose one of {', '.join(known)}."
        )
    outside = [task for task in options.tasks if task in OUTSIDE_TASKS]
    if outside and options.isolation == "docker":
        raise BadInput(f"Containers do not see {outside[0]}, a task of {OUTSIDE}; measure it with --isolation venv.")
    for task, sizes in options.batch_sizes.items():
        for size in sizes:
            if not 1 <= size <= TASKS[task].train_size:
                raise BadInput(
                    f"Batch size {size} is impossible for {task}: it must lie between 1 and the "
                    f"{TASKS[task].train_size} training examples; change --batch-sizes."
                )
    if options.subset is not None and not 0.0 < options.subset <= 1.0:
        raise BadInput(f"--subset is {options.subset}: it is a fraction of an epoch above 0 and at most 1.")
    if not options.memory and not options.time:
        raise BadInput("--no-memory and --no-time leave nothing to measure: drop one of them.")
    if options.sigma is not None and not 0.0 <= options.sigma < float("inf"):
        raise BadInput(f"--sigma is {options.sigma}: a noise multiplier is a finite number of at least 0.")
    check_numbers(
        {"rounds": options.rounds, "epochs": options.epochs, "threads": options.threads},
        {"budget-seconds": options.budget_seconds, "timeout": options.timeout_seconds},
        options.repeats,
        options.seed,
    )


def check_numbers(
    counts: Mapping[str, int | None], seconds: Mapping[str, float | None], repeats: int, seed: int
) -> None:
    """Raise :class:`BadInput` for a count below 1, seconds that are not above 0 and finite, or a seed that the
    generators of random numbers do not take. ``counts``, ``seconds``: by name of the option; None: not given."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise BadInput(f"--{name} is {count}: it must be at least 1.")
    for name, value in seconds.items():
        if value is not None and not 0.0 < value < math.inf:
            raise BadInput(f"--{name} is {value}: it must be above 0 and finite.")
    if repeats < 0:
        raise BadInput(f"--repeats is {repeats}: it must be at least 0.")
    if not 0 <= seed <= LARGEST_SEED:
        raise BadInput(f"--seed is {seed}: it must be at least 0 and at most {LARGEST_SEED}.")


def jobs(options: Options, contestants: list[Contestant]) -> list[Job]:
    """Return all processes in the order in which they run.

    Round by round, so that drift of the machine spreads over all cells; within a round the (task, batch size) blocks in
    random order, in the first one every task at its smallest size before the others, so that each task's gates come
    right before it and a table of all tasks soon; within a block as :func:`_of_block` has it. The memory processes of
    the first round, the untimed replays that the timed weights are compared with, come after the timed ones: after
    those of every task at its smallest size, then block by block. Those of a library's own loop come before them.
    Where nothing is timed, every round has them.
    """
    rng = random.Random(f"dpbench {options.seed}")
    blocks = [(task, size) for task in options.tasks for size in options.batch_sizes[task]]
    is_own = protocols.load(options.protocol).sampling == "own"
    result: list[Job] = []
    for number in range(options.rounds):
        rng.shuffle(blocks)
        if number == 0:
            sizes = {task: sorted(options.batch_sizes[task]) for task in options.tasks}
            blocks.sort(key=lambda block: (sizes[block[0]].index(block[1]), options.tasks.index(block[0])))
        purposes: list[Purpose] = ["time"] if options.time else []
        if options.memory and (number == 0 or not options.time):
            purposes.insert(0 if is_own else 1, "memory")
        together = 1 if is_own else len(options.tasks)
        for some in (blocks[:together], *([block] for block in blocks[together:])):
            for purpose in purposes:
                for task, size in some:
                    result += _of_block(options, contestants, task, size, number, purpose)
    return result


def _of_block(
    options: Options, contestants: list[Contestant], task: str, size: int, number: int, purpose: Purpose
) -> list[Job]:
    """Return one process of each contestant, in an order drawn for this block alone: the same whether the block is
    measured by itself, on a machine of its own, or among all others."""
    order = sorted(contestants, key=lambda contestant: contestant.name)
    random.Random(f"dpbench {options.seed} {task} {size} {number}").shuffle(order)
    return [Job(c, cell_of(options, c, task, size), number, place, purpose) for place, c in enumerate(order)]


MOST_ROUNDS = 12
"""The most rounds of a run that may go on beyond its plan: an interval of 95 % is then 1.3 standard deviations wide,
and of twice as many rounds still 0.8."""


def further_round(options: Options, contestants: list[Contestant], number: int, blocks: Blocks) -> list[Job]:
    """Return the jobs of a round beyond the plan: the ``blocks`` (task, batch size) in random order, and within each of
    them all contestants in random order."""
    rng = random.Random(f"dpbench {options.seed} round {number}")
    drawn = rng.sample(list(blocks), len(blocks))
    return [job for task, size in drawn for job in _of_block(options, contestants, task, size, number, "time")]


Blocks = Sequence[tuple[str, int]]
"""Tasks with a batch size each."""


START_UP_SECONDS = {
    "mnist-cnn": {"time": 10.0, "memory": 6.0},
    "cifar10-cnn": {"time": 19.0, "memory": 11.0},
    "imdb-embedding": {"time": 6.0, "memory": 5.0},
    "imdb-lstm": {"time": 20.0, "memory": 10.0},
    "gpt2-lm": {"time": 30.0, "memory": 20.0},
    "llama-lora": {"time": 30.0, "memory": 20.0},
    "vit": {"time": 20.0, "memory": 20.0},
    "wrn-16-2": {"time": 20.0, "memory": 20.0},
    "encoder-lora": {"time": 40.0, "memory": 25.0},
    "recsys": {"time": 15.0, "memory": 8.0},
    "recsys-1m": {"time": 200.0, "memory": 60.0},
}
"""Seconds that a process takes beside those that it times, its two replays and the check of a step by the reference
included, two of them starting and ending at once. The tasks of 2021: means of a quick run on two busy cores of a Zen 4,
2026-11-28. The modern tasks' are a guess from single steps. The tables of the adult data set take what the embedding
did alone."""

GATE_SECONDS = 21.0
"""Seconds of a gate, two of them at once: mean of the core contestants' on the tasks of 2021, Zen 4, 2026-11-29."""
STEPS_OF_A_PROCESS = {"time": 30, "memory": 8}
"""Steps of a process of few timed ones, untimed and replayed ones included."""
EXAMPLES_IN_FLOAT64 = {"float32": 6, "bfloat16": 10}
"""Gradients of the reference for one example of a batch: four compared steps, and what rounding does to one."""
FLOPS_PER_SECOND = {"cpu": 5e10, "cuda": 2e13}
FLOAT64_FLOPS_PER_SECOND = 2.5e10
"""On each of the harness's processors."""
MOVED_PER_SECOND = 5e8
"""Bytes of weights that are read, compared, written and read again."""
TIMES_MOVED = {"time": 60, "memory": 15}
"""How often all weights are."""


def _full_seconds(job: Job) -> float:
    """Return about how long a process of a full task takes beside the timed steps: computed, nothing is measured."""
    task, size = TASKS[job.cell.task], job.cell.batch_size
    work = size * task.training_flops
    seconds = STEPS_OF_A_PROCESS[job.purpose] * work / FLOPS_PER_SECOND[job.cell.device]
    seconds += TIMES_MOVED[job.purpose] * task.weight_bytes / MOVED_PER_SECOND
    if job.purpose == "time":
        cores = len(os.sched_getaffinity(0))
        seconds += EXAMPLES_IN_FLOAT64[task.precision] * work / FLOAT64_FLOPS_PER_SECOND / cores
    return seconds + START_UP_SECONDS["imdb-embedding"][job.purpose]


def expected_seconds(options: Options, planned: Sequence[Job]) -> float | None:
    """About how long the processes take on two cores (those of full tasks on the cores that there are), apart from
    environments, data and gates; None where whole epochs are timed, because nobody knows how long they are."""
    if options.budget_seconds is None:
        return None
    timed = {"time": options.budget_seconds}
    other = dict.fromkeys(("time", "memory"), START_UP_SECONDS["imdb-embedding"]["time"])
    return sum(
        timed.get(job.purpose, 0.0)
        + (
            _full_seconds(job)
            if job.cell.task in FULL_TASKS
            else START_UP_SECONDS.get(job.cell.task, other)[job.purpose]
        )
        for job in planned
    )


def cell_of(options: Options, contestant: Contestant, task: str, batch_size: int) -> Cell:
    """Return the cell of a contestant, a task and a batch size."""
    return Cell(
        task=task,
        framework=contestant.framework.name,
        variant=contestant.variant.name,
        private=contestant.variant.private,
        batch_size=batch_size,
        protocol=protocols.load(options.protocol).label,
        device=options.device,
        isolation=options.isolation,
        parallel=contestant.variant.parallel,
        world_size=contestant.world_size if contestant.variant.parallel else None,
    )


def request_of(contestant: Contestant, cell: Cell, protocol: Protocol, **more: Any) -> Request:
    """Return what a worker is asked for in this cell under the protocol; ``more``: the request's other fields, or
    others than the protocol's."""
    task = TASKS[cell.task]
    by_plan: dict[str, Any] = {
        "folder": str(contestant.framework.folder),
        "variant": cell.variant,
        "private": cell.private,
        "static_shapes": contestant.variant.static_shapes,
        "turn_steps": contestant.variant.turn_steps,
        "task": cell.task,
        "batch_size": cell.batch_size,
        "dataset_size": task.train_size,
        "sampling": protocol.sampling,
        "warm_up": protocol.warm_up,
        "noise_multiplier": protocol.noise_multiplier,
        "max_grad_norm": protocol.max_grad_norm,
        "learning_rate": task.learning_rate,
        "delta": protocol.delta,
        "device": cell.device,
        "data": task.dataset,
    }
    return Request(**by_plan | more)


def steps_of(options: Options, task: str, batch_size: int) -> int | None:
    """Fixed number of steps that ``subset`` means, or None."""
    if options.subset is None:
        return None
    return max(1, round(options.subset * steps_per_epoch(TASKS[task].train_size, batch_size)))
