"""The plan of the short run on a GPU: what is measured, the most important first. Pure data and pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.plan.e2e import Job, Options
from harness.plan.layer_registry import LayerContestant
from harness.plan.layers import LayerJob, LayerOptions
from harness.plan.registry import Contestant
from harness.store.record import UNPINNED
from harness.tasks import BF16_TASKS, FULL_TASKS

FIRST = ("pytorch-eager", "dpcore-engine", "opacus-ghost", "opacus-hooks", "jax-vmap", "jax-non-private")
"""Contestants that every comparison needs."""
GRAPHS = ("dpcore-compiled", "pytorch-compiled")
"""Captured graphs: they compile for long."""
LATER = (
    "opake-vmap",
    "fastdp-flat",
    "torch_func-eager",
    "torch_func-compiled",
    "backpack-batch-grad",
    "optax-aggregate",
    "jax_privacy-clipped-grad",
)
"""Peers that compile for long, were slower on a CPU, or are rarely installed (Opake, fastDP): a cell of one that is
missing ends at once and says so."""

FLOAT32_TASKS = ("gpt2-lm", "llama-lora", "vit", "wrn-16-2")
TODAY = (*BF16_TASKS, *FLOAT32_TASKS)
TASKS = ("mnist-cnn", "imdb-embedding", "cifar10-cnn", "imdb-lstm", *TODAY)
FULL = ("gpt2-124m-bf16", "vit-b16-bf16", "encoder-355m-bf16", "wrn-40-4")
"""Tasks of published shapes, the most important first; on a GPU only. LoRA on a billion weights is not among them: its
replay alone outlasts LONGEST_SECONDS."""
BATCH_SIZES = (512, 64, 2048)
MODERN_BATCH_SIZES = (64, 512)
"""Batch sizes of the tasks of today, whose examples are larger."""
SIZES_OF_OTHER_FULL = (4,)
"""Of full tasks that the user names and that are in no preset."""
ROUNDS = 2
SECONDS_PER_CELL = 0.5
"""Timed steps of a cell; the epoch is extrapolated."""
LAYER_SECONDS = 1.0
LAYER_PASSES = 200

LAYERS = (
    "conv3x3-16px",
    "embedding-50k",
    "lstm",
    "linear-t128",
    "mha-512",
    "gru",
    "conv3x3-32px",
    "layer-norm",
    "linear",
    "embedding",
)
FIRST_LAYERS = 3
FIRST_TASKS = 2
LAYER_CONTESTANTS = ("pytorch-eager", "dpcore-engine", "opacus-ghost", "opacus-hooks", "jax-non-private", "jax-vmap")

FRONTIER_TASKS = BF16_TASKS[:1]
"""Tasks whose largest physical batch is searched, last of all."""
FRONTIER_FIRST = 512
FRONTIER_RESOLUTION = 0.25
FRONTIER_STEP_SECONDS = 5.0
FRONTIER_BYTES_ON_CPU = 3 * 2**29
"""Memory budget above start-up, in bytes; on CUDA it is the device's memory."""

LONGEST_SECONDS = 120.0
"""Longest time of one process: one that hangs must not take the whole run with it."""

AnyJob = Job | LayerJob


@dataclass(frozen=True)
class Choice:
    """Options of the short run on a GPU; None: the defaults above. ``batch_sizes``: the most important first."""

    frameworks: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    layers: tuple[str, ...] | None = None
    frontier: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    rounds: int = ROUNDS
    device: str = "cuda"
    threads: int | None = None
    seed: int = 0


def tasks(choice: Choice) -> tuple[str, ...]:
    """Return the tasks that are measured, the most important first: those that the user names, or TASKS, with FULL on
    a GPU, where the user's own batch sizes do not ask for more than fits."""
    if choice.tasks is not None:
        return choice.tasks
    return (*TASKS, *FULL) if choice.device == "cuda" and choice.batch_sizes is None else TASKS


def _sizes(task: str) -> tuple[int, ...]:
    if task in FULL_TASKS:
        return plan.FULL_SIZES.get(task, SIZES_OF_OTHER_FULL)
    return MODERN_BATCH_SIZES if task in TODAY else BATCH_SIZES


def contestants(choice: Choice) -> list[Contestant]:
    """Return the layers, the most important first."""
    return registry.select(choice.frameworks if choice.frameworks is not None else (*FIRST, *GRAPHS, *LATER))


def layer_contestants(choice: Choice) -> list[LayerContestant]:
    """Return the contestants of the chosen frameworks: those among LAYER_CONTESTANTS, or the core ones of a framework
    that has none there."""
    chosen = {c.framework.name for c in contestants(choice)}
    every = layer_registry.contestants()
    usual = [c for name in LAYER_CONTESTANTS for c in every if c.name == name and c.framework.name in chosen]
    known = {c.framework.name for c in usual}
    return usual + [c for c in every if c.variant.core and c.framework.name in chosen - known]


def first_file(contestant: Contestant | LayerContestant) -> Path:
    """Return the file that its workers import first."""
    name = "layers.py" if isinstance(contestant, LayerContestant) else "adapter.py"
    return contestant.framework.folder / name


def options(choice: Choice, synthetic: bool) -> Options:
    """Return the end-to-end options of the short GPU run. Raises :class:`BadInput`."""
    made = plan.preset(
        "smoke",
        tasks=tasks(choice),
        frameworks=choice.frameworks or (*FIRST, *GRAPHS, *LATER),
        batch_sizes=choice.batch_sizes or SIZES_OF_OTHER_FULL,
        rounds=choice.rounds,
        budget_seconds=SECONDS_PER_CELL,
        device=choice.device,
        threads=choice.threads,
        seed=choice.seed,
        timeout_seconds=LONGEST_SECONDS,
        synthetic=synthetic,
        repeats=0,
    )
    if choice.batch_sizes is None:
        made = replace(made, batch_sizes={task: _sizes(task) for task in made.tasks})
    return replace(made, isolation=UNPINNED)


def layer_options(choice: Choice) -> LayerOptions:
    """Return the options of the part about single layers, at the first of the batch sizes. Raises :class:`BadInput`."""
    made = layer_plan.preset(
        "smoke",
        layers=LAYERS if choice.layers is None else choice.layers,
        batch_sizes=(choice.batch_sizes or BATCH_SIZES)[:1],
        passes=("plain", "clipped"),
        rounds=1,
        seconds=LAYER_SECONDS,
        most_passes=LAYER_PASSES,
        device=choice.device,
        threads=choice.threads,
        seed=choice.seed,
        timeout_seconds=LONGEST_SECONDS,
        repeats=0,
    )
    return replace(made, isolation=UNPINNED)


def frontier_tasks(choice: Choice) -> tuple[str, ...]:
    """Return the tasks whose memory frontier is searched: those that the user names, or those of FRONTIER_TASKS that
    are measured. Raises :class:`BadInput` for one that is not measured, for it is not judged."""
    measured = tasks(choice)
    for task in choice.frontier or ():
        if task not in measured:
            raise BadInput(
                f"--frontier names {task!r}, which is not among the tasks of this run ({', '.join(measured)}); add it "
                "to --tasks, or leave it out."
            )
    return tuple(t for t in FRONTIER_TASKS if t in measured) if choice.frontier is None else choice.frontier


def frontier_contestants(choice: Choice, here: Sequence[Contestant]) -> list[Contestant]:
    """Return those of ``here`` whose frontier is searched: the contestants of FIRST, or all where the user named
    some."""
    return [c for c in here if choice.frameworks is not None or c.name in FIRST]


@dataclass(frozen=True)
class Tier:
    """Jobs of equal importance. ``untimed`` ones may run side by side; then the ``timed``, alone, one by one."""

    untimed: tuple[AnyJob, ...]
    timed: tuple[AnyJob, ...]


def tiers(choice: Choice, options: Options | None, e2e: Sequence[Job], layer_jobs: Sequence[LayerJob]) -> list[Tier]:
    """Return all jobs by importance; those of one tier in the order of their plans, where what is compared stands
    together.

    First the paper's table: its tasks at the first batch size by the contestants of FIRST (all, where the user named
    some), the first two tasks before the others. Then the tasks of today in bfloat16, a few layers, the other layers,
    captured graphs; then the tasks of today in float32, the other sizes, tasks of published shapes, one by one, the
    other contestants, and the second round.
    """
    ranked: dict[tuple[int, int], list[AnyJob]] = {}
    for job in e2e:
        assert options is not None
        ranked.setdefault((job.round, _stage(job, choice, options)), []).append(job)
    names = sorted({job.cell.layer or "" for job in layer_jobs}, key=_place_of_layer)
    for layer_job in layer_jobs:
        is_first = layer_job.cell.layer in names[:FIRST_LAYERS]
        ranked.setdefault((0, 3 if is_first else 4), []).append(layer_job)
    return [_tier(ranked[rank]) for rank in sorted(ranked)]


def _stage(job: Job, choice: Choice, options: Options) -> int:
    """Return the place of a job in its round; 3 and 4 are those of the layers."""
    name, task = job.contestant.name, job.cell.task
    size = options.batch_sizes[task].index(job.cell.batch_size)
    is_first = choice.frameworks is not None or name in FIRST
    if task in FULL_TASKS and choice.tasks is None:
        return (10 if is_first else 60) + FULL.index(task)
    is_later = task in FLOAT32_TASKS and choice.tasks is None
    if size == 0 and is_first and not is_later:
        return 2 if task in TODAY or task in FULL_TASKS else int(options.tasks.index(task) >= FIRST_TASKS)
    if size == 0 and name in GRAPHS and not is_later:
        return 5
    return 6 + size if is_first else 20 if size == 0 else 40 + size


def _place_of_layer(name: str) -> tuple[int, str]:
    return LAYERS.index(name) if name in LAYERS else len(LAYERS), name


def _tier(jobs: list[AnyJob]) -> Tier:
    timed = tuple(job for job in jobs if job.purpose == "time")
    return Tier(tuple(job for job in jobs if job.purpose != "time"), timed)
