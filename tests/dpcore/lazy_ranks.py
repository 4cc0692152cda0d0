"""Run by torchrun, once per number of ranks: lazy tables on copies of a model, which a test compares with one process.

``torchrun ... lazy_ranks.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each found.
"""

from __future__ import annotations

import copy
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
    """Return weights and momenta, named as in a model alone; of tables whole."""
    found = {name.removeprefix("module."): value for name, value in (one.model.state_dict() | momenta(one)).items()}
    return {name: whole(value) for name, value in found.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which ranks have every ``size``-th row; one that each has all of as it is."""
    if not dist.is_initialized():
        return value
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    rows = sum(map(len, parts))
    if rows not in (3, 20, 50):  # of Model's tables
        return value
    found = torch.empty(rows, value.shape[1])
    for rank, part in enumerate(parts):
        found[rank :: len(parts)] = part
    return found


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


def check_update(**more: Any) -> Any:
    """Sums of dealt batches, some of which leave a rank without examples, and noise."""
    return {name: trained(on_ranks(exact_steps=12, **given, **more), mine) for name, given in SETTINGS.items()}


def check_noise(**more: Any) -> Any:
    """Noise alone, of rows that waited for few steps and for many, with one seed and with secret ones."""
    more = {"exact_steps": 2} | more
    found = {name: trained(on_ranks(**given, **more), mine, is_noise=True) for name, given in SETTINGS.items()}
    found["secret"] = trained(on_ranks(noise=GaussianNoise(), **more), mine, is_noise=True)
    return found


def check_shares(**more: Any) -> Any:
    """Return how many numbers of the last step's release this rank has drawn, and of how many."""
    one, drawn = on_ranks(**more), []
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


def check_resume(**more: Any) -> Any:
    """Twelve steps, and twelve of which the last six are made by a new engine with the state of the first six."""
    given: dict[str, Any] = {"exact_steps": 2, "momentum": 0.7} | more
    chances = [torch.Generator().manual_seed(1) for _ in range(2)]
    whole, first = (on_ranks(**given) for _ in chances)
    for one, chance in zip((whole, first), chances, strict=True):
        trained(one, mine, steps=6, chance=chance)
    noise = GaussianNoise()
    noise.load_state_dict(first.noise.state_dict())
    resumed = on_ranks(noise=noise, **given)
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.steps = first.steps
    return {
        "whole": trained(whole, mine, 6, chance=chances[0]),
        "resumed": trained(resumed, mine, 6, chance=chances[1]),
    }


def check_failed(**more: Any) -> Any:
    """The last rank fails before rows are gathered, before they are brought up to date, and in its pass."""
    one, said = on_ranks(exact_steps=1, **more), []
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


def check_interrupted(**more: Any) -> Any:
    """On the last rank alone the writing of a step ends half-way; then all are asked for the next one."""
    one = on_ranks(**more)
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


def check_loads(**more: Any) -> Any:
    """The last rank alone loads weights, momenta, or other weights and then its own again; later all load."""
    found: dict[str, Any] = {}
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for what in ("weights", "momenta", "back"):
        one = on_ranks(momentum=0.5, exact_steps=1, **more)
        first = {name: value.clone() for name, value in one.model.state_dict().items()}
        trained(one, mine, steps=5)
        if is_last and what == "weights":
            one.model.load_state_dict(first)
        if is_last and what == "back":
            now = {name: value.clone() for name, value in one.model.state_dict().items()}
            one.model.load_state_dict(first)
            one.model.load_state_dict(now)
        kept = one.optimizer.state_dict()
        if is_last and what == "momenta":
            momenta = {n: {"momentum_buffer": -of["momentum_buffer"]} for n, of in kept["state"].items()}
            one.optimizer.load_state_dict({**kept, "state": momenta})
        x, y = mine(*batch(torch.Generator().manual_seed(9), size=8))
        said = [refusal(partial(one.step, x, y)) for _ in range(2)]
        one.model.load_state_dict(first)
        one.optimizer.load_state_dict(kept)
        said += [refusal(partial(one.step, x, y)) for _ in range(2)]
        found[what] = {"said": said, "weights": of_all(one)}
    return found


def check_elsewhere() -> Any:
    """Six steps in shares, and six more by them, and by one process that has their rows together."""
    found = {}
    for name, given in SETTINGS.items():
        one = on_ranks(exact_steps=2, shard_tables=True, **given)
        chance = torch.Generator().manual_seed(1)
        state = trained(one, mine, 6, is_noise=True, chance=chance)
        model, noise = Model(), GaussianNoise()
        noise.load_state_dict(one.noise.state_dict())
        model.load_state_dict({key: value for key, value in state.items() if not key.isdigit()})
        alone = engine(model, exact_steps=2, noise=noise, **given)
        for number, param in enumerate(model.parameters()):
            if str(number) in state:
                alone.optimizer.state[param] = {"momentum_buffer": state[str(number)].clone()}
        alone.steps = one.steps
        again = torch.Generator()
        again.set_state(chance.get_state())
        found[name] = {
            "shares": trained(one, mine, 6, is_noise=True, chance=chance),
            "alone": trained(alone, lambda x, y: (x, y), 6, is_noise=True, chance=again),
        }
    return found


def check_placeholder() -> Any:
    """A table whose rows are written once ranks have their share; sizes, and what calls of the model say."""
    model, filled = Model(), Model()
    model.items = torch.nn.Embedding(50, 8, _weight=torch.zeros(1, 1).expand(50, 8))
    one = on_ranks(model=model, exact_steps=2, shard_tables=True, momentum=0.7)
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        model.items.weight.copy_(filled.items.weight[rank::size])
    weights = trained(one, mine, is_noise=True)
    state = one.optimizer.state[model.items.weight]["momentum_buffer"]
    held = [model.items.weight, state]
    return {
        "weights": weights,
        "rows": [len(part) for part in held],
        "bytes": [part.untyped_storage().nbytes() for part in held],
        "called": refusal(lambda: model.items(torch.tensor([1]))),
        "copied": refusal(lambda: copy.deepcopy(model.items)(torch.tensor([1]))),
        "alone": refusal(lambda: engine(model)),
        "ordinary": refusal(lambda: engine(model, lazy=()).step(*batch(torch.Generator().manual_seed(3), size=6))),
    }


def check_few() -> Any:
    """A table of three rows."""
    one = on_ranks(model=Model(rows=3), exact_steps=2, shard_tables=True)
    return trained(one, lambda x, y: mine((x[0] % 3, *x[1:]), y), is_noise=True)


def check_reading() -> Any:
    """What the model says of batches, between steps, and behind a flush, on each rank, and where it then is."""
    one, outputs = on_ranks(exact_steps=1, shard_tables=True), []

    def look(step: int) -> None:
        x, _ = mine(*batch(torch.Generator().manual_seed(step), size=7))
        if step == 9:
            one.flush()
        if step in (3, 6, 9):
            one.model.eval()
            with torch.no_grad(), one.reading(x):
                outputs.append(one.model(*x))
            one.model.train()

    found = {"weights": trained(one, mine, is_noise=True, between=look), "outputs": outputs}
    x, y = mine(*batch(torch.Generator().manual_seed(3), size=8))
    one = on_ranks(shard_tables=True)
    by_rank = partial(one.step, x, y) if dist.get_rank() == 0 else lambda: one.reading(x).__enter__()
    return {**found, "one steps": refusal(by_rank)}


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
    found = {}
    for name in names:
        shared = {"shard_tables": True} if name.startswith("shared ") else {}
        found[name] = checks[name.removeprefix("shared ")](**shared)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
