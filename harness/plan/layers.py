"""The plan of a run over layers: which cells, in which randomised blocks. Pure data and pure functions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, get_args

from harness import layers
from harness.errors import BadInput, did_you_mean
from harness.layers import LAYERS
from harness.plan import protocol as protocols
from harness.plan.e2e import Planned, check_numbers
from harness.plan.layer_registry import LayerContestant
from harness.store.record import Cell, Passes
from harness.worker.layer_request import LayerRequest

PROTOCOL = "layers"
PAPER_SIZES = (16, 32, 64, 128, 256, 512)
ALL_PASSES: tuple[Passes, ...] = get_args(Passes)
PAPER_LAYERS = tuple(layer.name for layer in layers.PAPER)


@dataclass(frozen=True)
class LayerOptions:
    """Options of a run over layers. ``batch_sizes`` per layer. A cell stops at ``seconds`` or ``most_passes``, after at
    least ``least_passes``; on a CPU, one predicted above ``longest_pass`` seconds or ``most_bytes`` a pass is not
    tried. ``repeats``: how often a disturbed measurement is made again."""

    layers: tuple[str, ...]
    frameworks: tuple[str, ...]
    batch_sizes: dict[str, tuple[int, ...]]
    rounds: int
    passes: tuple[Passes, ...] = ALL_PASSES
    memory: bool = True
    seconds: float = 10.0
    most_passes: int = 200
    least_passes: int = 5
    longest_pass: float = 5.0
    most_bytes: int = 16 * 2**30
    max_grad_norm: float = 1.0
    protocol: str = PROTOCOL
    device: str = "cpu"
    isolation: str = "venv"
    threads: int | None = None
    seed: int = 0
    timeout_seconds: float = 300.0
    memory_limit_bytes: int | None = None
    repeats: int = 1


class LayerJob(Planned[LayerContestant]):
    """One process of a run over layers."""


def _sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, sizes)


SWEEP_LAYERS = tuple(layer.name for layer in layers.SWEEP)
SWEEP_SIZES = (128,)
CONV_SIZES = {"conv": (16, 64)}
"""On one core its pass takes more than 5 s at 512, whoever makes it."""

EVERY_LAYER = tuple(LAYERS)

PRESETS: dict[str, LayerOptions] = {
    "smoke": LayerOptions(
        layers=("layer-norm", "linear"),
        frameworks=("core",),
        batch_sizes=_sizes(("layer-norm", "linear"), (16,)),
        rounds=1,
        most_passes=50,
    ),
    "small": LayerOptions(
        layers=tuple(layer.name for layer in layers.PAPER if layer.paper_row),
        frameworks=("pytorch-eager", "opacus-hooks", "opacus-ghost", "dpcore-native"),
        batch_sizes=_sizes(tuple(layer.name for layer in layers.PAPER if layer.paper_row), (16, 128)),
        passes=("plain", "clipped"),
        rounds=3,
        memory=False,
    ),
    "quick": LayerOptions(
        layers=(*PAPER_LAYERS, *SWEEP_LAYERS),
        frameworks=("core",),
        batch_sizes=_sizes(PAPER_LAYERS, (16, 512)) | CONV_SIZES | _sizes(SWEEP_LAYERS, SWEEP_SIZES),
        rounds=1,
    ),
    "full": LayerOptions(
        layers=EVERY_LAYER, frameworks=("all",), batch_sizes=_sizes(EVERY_LAYER, (16, 128, 512)), rounds=3
    ),
    "paper": LayerOptions(
        layers=(*PAPER_LAYERS, *SWEEP_LAYERS),
        frameworks=("all",),
        batch_sizes=_sizes((*PAPER_LAYERS, *SWEEP_LAYERS), PAPER_SIZES),
        rounds=5,
        seconds=600.0,
        most_passes=2000,
        timeout_seconds=3600.0,
    ),
}


ON_CUDA: dict[str, Any] = {"most_passes": 2000, "seconds": 60.0}
"""The paper's number of passes; its seconds only stop what has gone wrong."""


def preset(name: str, **changes: Any) -> LayerOptions:
    """Return a preset with the user's changes (None means unchanged). ``layers`` may name sets, ``batch_sizes`` is a
    tuple.

    Raises :class:`BadInput` for whatever cannot be measured.
    """
    if name not in PRESETS:
        raise BadInput(f"There is no preset {name!r}{did_you_mean(name, PRESETS)}; choose one of {', '.join(PRESETS)}.")
    base = PRESETS[name]
    named = changes.pop("layers", None)
    chosen = base.layers if named is None else layers.select(named)
    if not chosen or changes.get("frameworks") == ():
        raise BadInput(f"--{'frameworks' if chosen else 'layers'} names nothing: leave it out, or name at least one.")
    sizes = changes.pop("batch_sizes", None)
    fallback = base.batch_sizes[base.layers[0]]
    changes = {key: value for key, value in changes.items() if value is not None}
    if changes.get("device", base.device) == "cuda":
        changes = {**ON_CUDA, **changes}
    options = replace(
        base,
        layers=chosen,
        batch_sizes={
            layer: tuple(dict.fromkeys(sizes)) if sizes else base.batch_sizes.get(layer, fallback) for layer in chosen
        },
        **changes,
    )
    check(options)
    return options


def check(options: LayerOptions) -> None:
    """Raise :class:`BadInput` with the value, the rule and the remedy."""
    for value in {size for sizes in options.batch_sizes.values() for size in sizes}:
        if not 1 <= value <= 8192:
            raise BadInput(f"Batch size {value} is not measured: give --batch-sizes between 1 and 8192.")
    unknown = set(options.passes) - set(ALL_PASSES)
    if unknown or not options.passes:
        raise BadInput(f"--passes is {','.join(options.passes)!r}: choose from {', '.join(ALL_PASSES)}.")
    check_numbers(
        {"rounds": options.rounds, "most-passes": options.most_passes, "threads": options.threads},
        {"seconds": options.seconds, "timeout": options.timeout_seconds, "longest-pass": options.longest_pass},
        options.repeats,
        options.seed,
    )


def cell_of(options: LayerOptions, contestant: LayerContestant, layer: str, passes: Passes, batch_size: int) -> Cell:
    """Return the cell of a contestant, a layer, a kind of pass and a batch size."""
    return Cell(
        kind="layer",
        layer=layer,
        passes=passes,
        framework=contestant.framework.name,
        variant=contestant.variant.name,
        private=contestant.variant.column == "dp",
        batch_size=batch_size,
        protocol=protocols.load(options.protocol).label,
        device=options.device,
        isolation=options.isolation,
    )


def request_of(contestant: LayerContestant, cell: Cell, **more: Any) -> LayerRequest:
    """Return what a worker is asked for in this cell; ``more``: the request's other fields."""
    assert cell.layer is not None and cell.passes is not None
    return LayerRequest(
        folder=str(contestant.framework.folder),
        variant=cell.variant,
        layer=cell.layer,
        passes=cell.passes,
        batch_size=cell.batch_size,
        device=cell.device,
        **more,
    )


def jobs(options: LayerOptions, contestants: list[LayerContestant]) -> list[LayerJob]:
    """Return all processes in the order in which they run: round by round; within a round the (layer, batch size)
    blocks in random order; within a block all (contestant, passes) in random order. In the first round the memory
    process of a cell comes right before its timed one, and says where the cell is too large to be tried."""
    rng = random.Random(f"dpbench layers {options.seed}")
    blocks = [(layer, size) for layer in options.layers for size in options.batch_sizes[layer]]
    result: list[LayerJob] = []
    for number in range(options.rounds):
        rng.shuffle(blocks)
        for layer, size in blocks:
            modes = [
                (contestant, passes)
                for contestant in contestants
                for passes in contestant.variant.passes
                if passes in options.passes and contestant.variant.has(LAYERS[layer])
            ]
            rng.shuffle(modes)
            for place, (contestant, passes) in enumerate(modes):
                cell = cell_of(options, contestant, layer, passes, size)
                if number == 0 and options.memory:
                    result.append(LayerJob(contestant, cell, number, place, "memory"))
                result.append(LayerJob(contestant, cell, number, place, "time"))
    return result
