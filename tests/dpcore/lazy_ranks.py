"""Run by torchrun, once per number of ranks: lazy tables on copies of a model, which a test compares with one process.

``torchrun ... lazy_ranks.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpcore.errors import PrivacyError
from dpcore.lazy_tables import LazyEngine
from dpcore.lazy_tables import engine as engines
from dpcore.noise import GaussianNoise
from tests.dpcore.lazy import Model, batch, engine, momenta
from tests.dpcore.ranks import refusal

SETTINGS = {"plain": {"decay": 0.1}, "momentum": {"decay": 0.1, "momentum": 0.7}}
TABLES = ("module.items", "module.users")


def on_ranks(**options: Any) -> LazyEngine:
    """Return an engine of a copy on each rank."""
    return engine(DPDDP(options.pop("model", None) or Model()), lazy=options.pop("lazy", TABLES), **options)


def of_all(one: LazyEngine) -> dict[str, torch.Tensor]:
    """Return weights and momenta, named as in a model alone."""
    return {name.removeprefix("module."): value for name, value in (one.model.state_dict() | momenta(one)).items()}


def mine(x: Any, y: torch.Tensor) -> Any:
    """Return this rank's share of a batch, which may be empty."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return tuple(part[share] for part in x), y[share]


def trained(
    one: LazyEngine,
    share: Callable[..., Any],
    steps: int = 12,
    is_noise: bool = False,
    between: Callable[[int], object] = lambda step: None,
    chance: torch.Generator | None = None,
) -> dict[str, torch.Tensor]:
    """Train on a ``share`` of each batch; with ``is_noise`` no example counts, so that sums have nothing to round."""
    chance = torch.Generator().manual_seed(1) if chance is None else chance
    for step in range(steps):
        one.optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
        x, y = share(*batch(chance))
        one.step(x, y, torch.zeros(len(y), dtype=torch.bool) if is_noise else None)
        between(step)
    return of_all(one)


def check_update() -> Any:
    """Sums of dealt batches, some of which leave a rank without examples, and noise."""
    return {name: trained(on_ranks(exact_steps=12, **given), mine) for name, given in SETTINGS.items()}


def check_noise() -> Any:
    """Noise alone, of rows that waited for few steps and for many, with one seed and with secret ones."""
    found = {name: trained(on_ranks(exact_steps=2, **given), mine, is_noise=True) for name, given in SETTINGS.items()}
    found["secret"] = trained(on_ranks(exact_steps=2, noise=GaussianNoise()), mine, is_noise=True)
    return found


def check_shares() -> Any:
    """Return how many numbers of the last step's release this rank has drawn, and of how many."""
    one, drawn = on_ranks(), []
    noise = one.engine.noise
    put = noise._put
    noise._put = lambda target, *of, **more: drawn.append(len(target)) or put(target, *of, **more)
    one.step(*mine(*batch(torch.Generator().manual_seed(3), size=6)))
    return {"drawn": sum(drawn), "of": len(one.engine.accumulator.flat)}


def check_between() -> Any:
    """The first rank alone calls the model, and later saves it; the last one alone flushes."""
    one = on_ranks(exact_steps=1)
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def look(step: int) -> None:
        if step == 3 and rank == 0:
            one.model.module.items(torch.arange(0, 50, 3))
        if step == 6 and rank == 0:
            one.model.state_dict()
        if step == 9 and rank == last:
            one.flush()

    return trained(one, mine, is_noise=True, between=look)


def check_resume() -> Any:
    """Twelve steps, and twelve of which the last six are made by a new engine with the state of the first six."""
    given: dict[str, Any] = {"exact_steps": 2, "momentum": 0.7}
    chances = [torch.Generator().manual_seed(1) for _ in range(2)]
    whole, first = (on_ranks(**given) for _ in chances)
    for one, chance in zip((whole, first), chances, strict=True):
        trained(one, mine, steps=6, chance=chance)
    model, noise = Model(), GaussianNoise()
    model.load_state_dict({name.removeprefix("module."): v for name, v in first.model.state_dict().items()})
    noise.load_state_dict(first.noise.state_dict())
    resumed = on_ranks(model=model, noise=noise, **given)
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.steps = first.steps
    return {
        "whole": trained(whole, mine, 6, chance=chances[0]),
        "resumed": trained(resumed, mine, 6, chance=chances[1]),
    }


def check_failed() -> Any:
    """The last rank fails before rows are gathered, before they are brought up to date, and in its pass."""
    one, said = on_ranks(exact_steps=1), []
    other, is_last = batch(torch.Generator().manual_seed(9), size=8), dist.get_rank() == dist.get_world_size() - 1

    def fail(step: int) -> None:
        x, y = mine(*other)
        with patch.object(engines, "bring_up", _broken if is_last and step == 5 else engines.bring_up):
            group = one.optimizer.param_groups[0]
            group["weight_decay"] = 99.0 if is_last and step == 3 else 0.0
            if step in (3, 5, 7):
                said.append(_said(partial(one.step, x, y + 9 if is_last and step == 7 else y)))
            group["weight_decay"] = 0.0

    return {"weights": trained(one, mine, is_noise=True, between=fail), "said": said, "steps": one.steps}


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return "nothing was refused"


def _broken(*_: Any) -> None:
    raise PrivacyError("broken here")


def check_interrupted() -> Any:
    """On the last rank alone the writing of a step ends half-way; then all are asked for the next one."""
    one = on_ranks()
    x, y = mine(*batch(torch.Generator().manual_seed(9), size=8))
    one.step(x, y)
    if dist.get_rank() == dist.get_world_size() - 1:
        with patch.object(one.optimizer, "step", _broken):
            refusal(lambda: one.step(x, y))
    else:
        one.step(x, y)
    return [refusal(lambda: one.step(x, y)), refusal(lambda: one.step(x, y))]


def check_replaced() -> Any:
    """The last rank's table is replaced, or its seed is another one, for one step that would read many rows."""
    found: dict[str, Any] = {}
    for what in ("table", "seed"):
        one, is_last = on_ranks(exact_steps=1), dist.get_rank() == dist.get_world_size() - 1
        few, many = (
            mine(*batch(torch.Generator().manual_seed(9), size=size, rows=rows)) for size, rows in ((3, 5), (40, 50))
        )
        for _ in range(4):
            one.step(*few)
        if is_last and what == "table":
            one._weights["module.items"].data = torch.zeros(50, 8)
        elif is_last:
            one.noise.seed = 6
        said = _said(partial(one.step, *many))
        one.noise.seed = 5
        if is_last and what == "table":
            one.flush()
        one.step(*few)
        found[what] = {"said": said, "weights": of_all(one)}
    return found


def check_refused() -> Any:
    """Ranks of which one has something else than the others, and models in shards."""
    rank = dist.get_rank()
    x, y = mine(*batch(torch.Generator().manual_seed(9), size=8))
    found = {"exact": refusal(lambda: on_ranks(exact_steps=2 + rank))}
    for what in ("weights", "momentum", "steps", "rate", "tensor"):
        one = on_ranks(momentum=0.5)
        before = {name: value.clone() for name, value in one.model.state_dict().items()}
        weight = one.model.module.items.weight
        if rank and what == "weights":
            weight.data[17] += 1.0  # which no example has
            before["module.items.weight"][17] += 1.0
        if rank and what == "momentum":
            one.optimizer.state[weight] = {"momentum_buffer": torch.ones_like(weight)}
        if rank and what == "steps":
            one.steps = 1
        if rank and what == "rate":
            one.optimizer.param_groups[0]["lr"] = 0.2
        if what == "tensor":
            one.optimizer.param_groups[0]["lr"] = torch.tensor(0.3 + 1e-6 * rank)  # which its text does not tell
        found[what] = refusal(partial(one.step, x, y))
        assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    if hasattr(torch.cpu.Stream, "record_event"):
        model = Model()
        for part in (model.first, model):
            fully_shard(part)
        found["shards"] = refusal(lambda: engine(model))
    return found


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))  # a busy machine imports torch for long
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    torch.save({name: checks[name]() for name in names}, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
