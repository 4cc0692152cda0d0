"""Run by torchrun, once per number of ranks: correlated noise on several ranks, which a test compares with one process.

``torchrun ... correlated_ranks.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each
found.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import CorrelatedNoise, PrivacyEngine
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpcore.noise import GaussianNoise
from tests.dpcore.ranks import WORLD, noted, refusal, sharding, ways, weights

SETTINGS: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": 0.8, "expected_batch_size": 13}
MECHANISMS = {
    "previous": CorrelatedNoise.previous(0.9),
    "square root": CorrelatedNoise.square_root(4),
    "banded": CorrelatedNoise.banded(3),
    "optimised": CorrelatedNoise.banded(3, steps=8, momentum=0.5),
}
NUMBERS = 473
"""Of the model: no number of ranks divides them."""
SPLIT = ["split", *(["copies", "shards"] if WORLD == 4 else [])]
HOWS = [*ways(), *(how for how in SPLIT if how != "shards" or "sharded" in ways())]
ASKED = [(how, name) for how in HOWS for name in (MECHANISMS if how == "replicated" else ["banded"])]
"""How a model is held, and the mechanism."""
RESUMED = [(how, name) for how, name in ASKED if how in ("replicated", "sharded", "split") and name != "square root"]
Run = tuple[PrivacyEngine, Any, Any, Any]


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)
    ).to(dtype)


def split(module: nn.Module, how: str) -> nn.Module:
    """Return a module whose layers are split over all ranks, or over pairs of them, which hold copies or shards."""
    world, plan = dist.get_world_size(), {"3": ColwiseParallel(), "5": RowwiseParallel()}
    if how == "split":
        return parallelize_module(module, init_device_mesh("cpu", (world,)), plan)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(module, mesh["tensor"], plan)
    return DPDDP(module, device_mesh=mesh["data"]) if how == "copies" else fully_shard(module, mesh=mesh["data"])


def private(
    mechanism: CorrelatedNoise | None,
    how: str = "replicated",
    dtype: torch.dtype = torch.float64,
    seed: int | None = 7,
    examples: int = 41,
    batch: int = 13,
    loader: Any = None,
    **options: Any,
) -> Run:
    """Return a run over batches of 13, 13, 13 and 2, so that a rank of four may have none of the last one's."""
    module = model(dtype)
    if how in ("alone", "replicated"):
        module = module.to(memory_format=torch.channels_last)
    if how == "replicated":
        module = DPDDP(module)
    elif how in SPLIT:
        module = split(module, how)
    elif how != "alone":
        for layer in (module[0], module[3], module):  # type: ignore[index]
            fully_shard(layer, **sharding(how))
    x = torch.randn(examples, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = TensorDataset(x, torch.arange(examples) % 3, torch.arange(examples))
    engine = PrivacyEngine(seed=seed)
    return engine, *engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5),
        data_loader=DataLoader(data, batch_size=batch) if loader is None else loader,
        mechanism=mechanism,
        **SETTINGS | options,
    )


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def trained(run: Run, steps: int = 8, batches: Iterator[Any] | None = None, is_noise: bool = False) -> dict[str, Any]:
    """Return what steps have released, used, kept and spent; with ``is_noise`` no example moves a sum."""
    engine, module, optimizer, loader = run
    released: list[torch.Tensor] = []
    divide = optimizer.scale_grad
    optimizer.scale_grad = partial(noted, released, optimizer, divide)
    used: list[list[int]] = [[]]
    history = []
    last = optimizer.steps + steps
    for x, y, number in endless(loader) if batches is None else batches:
        made = optimizer.steps
        optimizer.zero_grad()
        (F.cross_entropy(module(x), y) * (0.0 if is_noise else 1.0)).backward()
        optimizer.step()
        used[-1] += number.tolist()
        if optimizer.steps > made:
            used.append([])
            history.append(weights(module))
        if optimizer.steps == last:
            break
    optimizer.scale_grad = divide
    ahead = [rows for _, rows in optimizer.run.correlation._ahead.values()]
    return {
        "released": torch.stack(released),
        "weights": torch.stack(history),
        "batches": used[:-1],
        "kept": sum(rows.shape[1] for rows in ahead),
        "epsilon": engine.get_epsilon(1e-3),
        "accounted": engine.accountant.history,
    }


def check_noise() -> Any:
    """Three rounds of noise alone."""
    return {
        f"{how} {name}": trained(private(MECHANISMS[name], how, torch.float32), 12, is_noise=True)
        for how, name in ASKED
    }


def check_update() -> Any:
    """Two rounds, however the model is held and batches are cut."""
    found = {f"{how} {name}": trained(private(MECHANISMS[name], how)) for how, name in ASKED}
    return found | {"pieces banded": trained(private(MECHANISMS["banded"], max_physical_batch_size=2))}


def check_secret() -> Any:
    """Ranks without a seed share secret ones."""
    return trained(private(MECHANISMS["banded"], seed=None), 2)["weights"]


def begun(folder: Path, name: str, how: str) -> tuple[Run, Iterator[Any]]:
    """Return a run behind five of its steps, within its second round, and a checkpoint of it."""
    run = private(MECHANISMS[name], how)
    batches = endless(run[3])
    trained(run, 5, batches)
    run[0].save_checkpoint(path=folder / f"{how} {name}", module=run[1], optimizer=run[2])
    return run, batches


def gone_on(folder: Path, name: str, how: str) -> dict[str, Any]:
    """Return the seven steps behind a checkpoint, made by new objects."""
    run = private(MECHANISMS[name], how, seed=99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new ranks have no random state there
        run[0].load_checkpoint(path=folder / f"{how} {name}", module=run[1], optimizer=run[2])
    return trained(run, 7)


def check_resume(folder: Path) -> Any:
    """Seven steps behind a checkpoint, in the run that wrote it and in a new one."""
    found = {}
    for how, name in RESUMED:
        run, batches = begun(folder, name, how)
        dist.barrier()
        found[f"{how} {name}"] = {"whole": trained(run, 7, batches), "resumed": gone_on(folder, name, how)}
    return found


def check_go_on(folder: Path) -> Any:
    """Seven steps behind checkpoints of other ranks."""
    return {f"{how} {name}": gone_on(folder, name, how) for how, name in RESUMED}


def _nothing(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    """Change nothing."""


def _left_out(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    if is_last:
        next(batches)


def _left_out_by_all(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    next(batches)


def _all_but_the_last(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    for _ in range(3):
        next(batches)


def _other_noise(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    if is_last:
        run[2].noise = GaussianNoise(5)


def _rank_of_noise(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    run[2].noise.rank = int(is_last)


def _other_weights(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    if is_last:
        run[2].run.correlation.mechanism = MECHANISMS["optimised"]


def _other_seed(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    if is_last:
        run[3].sampler_state.seed = 5


def _other_seed_of_all(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    run[3].sampler_state.seed = 5


def _other_bound(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    run[2].max_grad_norm = 0.4


def _copied(run: Run, batches: Iterator[Any], is_last: bool) -> Any:
    return next(iter(copy.deepcopy(run[3])))


def _accumulated(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    x, y, _ = next(batches)
    F.cross_entropy(run[1](x), y).backward()


def _failed_behind_the_release(run: Run, batches: Iterator[Any], is_last: bool) -> None:
    """On the last rank alone a step is not made whose release all have seen."""

    def fail(of: Any) -> None:
        raise RuntimeError("broken here")

    run[2].step_hooks += [fail] * is_last
    x, y, _ = next(batches)
    F.cross_entropy(run[1](x), y).backward()
    try:
        run[2].step()
        assert not is_last
    except RuntimeError:
        assert is_last
    run[2].step_hooks.clear()
    run[2].zero_grad()


CHANGES: dict[str, tuple[Callable[[Run, Iterator[Any], bool], Any], dict[str, Any]]] = {
    "nothing": (_nothing, {}),
    "left out": (_left_out, {}),
    "left out by all": (_left_out_by_all, {"steps": 0}),
    "certain on some ranks": (_all_but_the_last, {"steps": 0, "examples": 11, "batch": 3}),
    "noise": (_other_noise, {}),
    "rank of the noise": (_rank_of_noise, {}),
    "weights of the mechanism": (_other_weights, {}),
    "seed of the batches": (_other_seed, {}),
    "seed of the batches of all": (_other_seed_of_all, {}),
    "bound": (_other_bound, {}),
    "copied loader": (_copied, {}),
    "accumulated": (_accumulated, {}),
    "failed behind the release": (_failed_behind_the_release, {}),
}
"""What comes before a step, on the last rank or on all; a batch that is returned is the step's."""


def of_step(name: str) -> dict[str, Any]:
    """Return what a step says, whether it has moved weights or was counted, and what the next one says."""
    change, options = CHANGES[name]
    steps = options.get("steps", 2)
    run = private(MECHANISMS["banded"], **{key: value for key, value in options.items() if key != "steps"})
    engine, module, optimizer, loader = run
    batches = endless(loader)
    if steps:
        trained(run, steps, batches)
    given = change(run, batches, dist.get_rank() == dist.get_world_size() - 1)
    before, spent, said = weights(module), len(engine.accountant), []
    for _ in range(2):
        x, y, _ = next(batches) if given is None or said else given
        F.cross_entropy(module(x), y).backward()
        said.append(refusal(optimizer.step))
        if len(said) == 1:
            moved = not torch.equal(weights(module), before) or len(engine.accountant) > spent
        optimizer.zero_grad()
    return {"said": said, "moved": moved}


def check_refused() -> Any:
    rank = dist.get_rank()
    several = [MECHANISMS["banded"], MECHANISMS["previous"]]
    loader = copy.deepcopy(private(several[0])[3])
    found = {name: of_step(name) for name in CHANGES}
    found["made"] = {
        "mechanism": refusal(lambda: private(several[min(rank, 1)])),
        "weights": refusal(lambda: private(CorrelatedNoise.previous(0.5 + min(rank, 1) / 10))),
        "none": refusal(lambda: private(None if rank else several[0])),
        "seed": refusal(lambda: private(several[0], seed=7 + rank)),
        "batch": refusal(lambda: private(several[0], batch=13 - min(rank, 1))),
        "copied loader": refusal(lambda: private(several[0], loader=loader)),
        "unfollowed": refusal(lambda: private(several[0], check_batches=False)),
    }
    return found


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))  # a busy machine imports torch for long
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    found = {name: checks[name](folder) if name in ("resume", "go_on") else checks[name]() for name in names}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
