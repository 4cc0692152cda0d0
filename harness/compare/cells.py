"""The cells of a comparison: what both sides have, why there is nothing to compare where one lacks it, and what has
been measured of them so far."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeVar

from harness import layers as layer_data
from harness.compare.options import ComparisonOptions
from harness.compare.record import ROLES, MemoryPair, Pair, Process, Role
from harness.errors import BadInput
from harness.layers import LAYERS
from harness.plan import e2e as plan
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.plan.layer_registry import LayerContestant
from harness.plan.registry import Contestant
from harness.store import cache
from harness.store.record import Cell, no_number

AnyContestant = LayerContestant | Contestant
Stored = TypeVar("Stored", Pair, MemoryPair)


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


@dataclass(frozen=True)
class Kept:
    """The folder of what was measured, a file a pair."""

    folder: Path

    def once(self, name: str, kind: type[Stored], measure: Callable[[], Stored]) -> Stored:
        """Return what an earlier call left under this name, or what is measured now and written there."""
        found = self.read(name, kind)
        if found is None:
            found = measure()
            cache.write_atomically(self.folder / name, found.model_dump_json().encode())
        return found

    def read(self, name: str, kind: type[Stored]) -> Stored | None:
        """Return what an earlier call left under this name; None where it left nothing, or a process of it was
        interrupted by somebody. Raises :class:`BadInput`, naming it, where it is corrupt."""
        path = self.folder / name
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
