"""Holds what a comparison is asked for, and refuses what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass

from harness.analysis.sequential import FIRST_LOOK
from harness.compare.record import Role
from harness.compare.sides import Side
from harness.environments.choose import check_isolation
from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import layers as layer_plan

DEFAULT_LAYERS = ("linear", "embedding", "lstm")
DEFAULT_SIZES = (64,)
DEFAULT_CONTESTANTS = ("dpcore-native",)
LAYER_SECONDS = 0.6
LAYER_ROUNDS = 20
TASK_SECONDS = 6.0
TASK_ROUNDS = 10


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
