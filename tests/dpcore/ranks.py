"""Run by torchrun, once per number of ranks: trains together what the tests compare with one process.

``torchrun ... ranks.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each check found.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from dpcore import PrivacyEngine, PrivacyError, UnsupportedError, views
from dpcore.data_loader import DPDataLoader
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpcore.noise import GaussianNoise, grid_spacing
from dpcore.utils.batch_memory_manager import BatchMemoryManager

EXAMPLES, RATE, CLIP, DIVISOR = 40, 0.25, 0.5, 10
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def model(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(dropout), nn.Linear(48, 8), nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)  # fmt: skip


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """x [40, 1, 6, 6], y [40], and the example's number [40]."""
    x = torch.randn(EXAMPLES, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x.to(dtype), torch.arange(EXAMPLES) % 3, torch.arange(EXAMPLES))


def private(
    sigma: float = 0.0,
    dtype: torch.dtype = torch.float64,
    rate: float = RATE,
    seed: int | None = 7,
    dropout: float = 0.0,
    how: str = "replicated",
    loader: DataLoader[Any] | None = None,
    **options: Any,
) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine = PrivacyEngine(seed=seed)
    module = model(dtype, dropout)
    if how == "replicated":
        module = DPDDP(module)
    elif how != "alone":
        for layer in (module[0], module[4], module):
            fully_shard(layer, **sharding(how))
    return engine, *engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5),
        data_loader=DataLoader(data(dtype), batch_size=10) if loader is None else loader,
        noise_multiplier=sigma,
        **{"max_grad_norm": CLIP, "sample_rate": rate, "expected_batch_size": DIVISOR} | options,
    )


def sharding(how: str) -> dict[str, Any]:
    """Arguments of fully_shard: one mesh, two groups with a copy each, columns of matrices, or narrow computing."""
    size = dist.get_world_size()
    grouped = how in ("hybrid", "one group") and size > 1
    shape, names = ((2, size // 2), ("copies", "shards")) if grouped else ((size,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh["shards"] if how == "one group" else mesh}
    if how == "columns":
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 2 else None
    if how == "narrow":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return options


def ways() -> list[str]:
    """How a model can be held here."""
    shards = hasattr(torch.cpu.Stream, "record_event")
    return ["replicated", *(["sharded", "columns"] if shards else []), *(["hybrid"] if shards and WORLD > 1 else [])]


def step(module: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(module(x), y).backward()
    optimizer.step()


def weights(module: nn.Module) -> torch.Tensor:
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters())
    return torch.cat([p.detach().double().flatten() for p in whole])


def train(
    sigma: float, dtype: torch.dtype, size: int | str | None = None, rounds: int = 2, **options: Any
) -> dict[str, Any]:
    """Weights after every step, and the examples of each batch, on this rank."""
    engine, module, optimizer, loader = private(sigma, dtype, **options)
    drawn: list[list[int]] = []
    history = []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=size or EXAMPLES, optimizer=optimizer
    ) as pieces:
        for _ in range(rounds):
            batch: list[int] = []
            for x, y, number in pieces:
                batch += number.tolist()
                before = optimizer.steps
                step(module, optimizer, x, y)
                if optimizer.steps > before:
                    drawn.append(batch)
                    history.append(weights(module))
                    batch = []
    return {"batches": drawn, "weights": torch.stack(history), "accounted": engine.accountant.history}


def refusal(action: Any) -> str:
    try:
        action()
    except (PrivacyError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def check_sums() -> Any:
    return {str(dtype): train(0.0, dtype) for dtype in (torch.float64, torch.float32)}


def check_pieces() -> Any:
    """Physical batches of two: the ranks go through different numbers of pieces."""
    return train(1.0, torch.float64, size=2)


def check_units() -> Any:
    """Two equal views of each example, in pieces of three examples: as the examples themselves."""
    loader = DataLoader(views(data(), None, 2), batch_size=10)
    found = train(1.0, torch.float64, size=3, loader=loader)
    assert all(batch[::2] == batch[1::2] for batch in found["batches"])
    return found | {"batches": [batch[::2] for batch in found["batches"]]}


def check_noise() -> Any:
    return {"same seed": train(1.0, torch.float64), "secret": train(1.0, torch.float64, seed=None, rounds=1)}


def check_generator() -> Any:
    """The seeds of the batches where every rank has a generator of its own, twice, and where rank 0 has none."""
    seeds = []
    for kind in ("own", "own", "rank 0 without"):
        own = torch.Generator().manual_seed(50 + dist.get_rank())
        generator = own if kind == "own" or dist.get_rank() else None
        _, _, _, loader = private(seed=None, loader=DataLoader(data(), batch_size=10, generator=generator))
        seeds.append(str(loader.sampler_state.seed))
    return seeds


def check_secure() -> Any:
    """What two steps in secure mode release, in units of the grid."""
    engine = PrivacyEngine(secure_mode=True)
    module = DPDDP(model())
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10),
        noise_multiplier=0.7,
        max_grad_norm=CLIP,
        sample_rate=RATE,
        expected_batch_size=DIVISOR,
    )
    released: list[torch.Tensor] = []
    divide = optimizer.scale_grad

    def note() -> None:
        """Keep what was released, before it is divided by the expected batch size."""
        flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        released.append(flat / grid_spacing(0.7 * CLIP))
        divide()

    optimizer.scale_grad = note
    for (x, y, _), _ in zip(loader, range(2), strict=False):
        step(module, optimizer, x, y)
    return torch.stack(released)


def check_adaptive() -> Any:
    """The clip norm follows the unclipped examples of all ranks; the weights stay where they are."""
    _, module, optimizer, loader = private(0.0, clipping="adaptive", max_grad_norm=0.8)
    optimizer.param_groups[0]["lr"] = 0.0
    batches, bounds = [], []
    for x, y, number in loader:
        step(module, optimizer, x, y)
        batches.append(number.tolist())
        bounds.append(optimizer.max_grad_norm)
    return {"batches": batches, "bounds": bounds}


def check_empty() -> Any:
    """Hardly any example is ever drawn: empty local batches, and empty global ones, all of them noisy steps."""
    _, module, optimizer, loader = private(2.0, torch.float64, rate=1e-9, seed=None)
    optimizer.original_optimizer.param_groups[0].update(lr=1.0, momentum=0.0)
    draws, before = [], weights(module)
    for _, (x, y, _) in zip(range(150), loader, strict=False):
        step(module, optimizer, x, y)
        draws.append(weights(module) - before)
        before = weights(module)
    return torch.stack(draws)


def _counted(drawn: list[int], add: Any, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    drawn.append(target.numel())
    return add(target, *rest)


def noted(released: list[torch.Tensor], optimizer: Any, divide: Any) -> None:
    grads = (p.grad for p in optimizer.accumulator.targets.values())
    released.append(torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads]))
    divide()


def check_shares() -> Any:
    """Noise alone, of an empty batch: whether it is one process's, and how many numbers this rank has drawn."""
    found = {}
    for how in ways():
        _, module, optimizer, _ = private(1.0, torch.float32, how=how, check_batches=False)
        drawn: list[int] = []
        optimizer.noise.add_ = partial(_counted, drawn, optimizer.noise.add_)
        released: list[torch.Tensor] = []
        optimizer.scale_grad = partial(noted, released, optimizer, optimizer.scale_grad)
        x, y = data(torch.float32)[:0][:2]
        step(module, optimizer, x, y)
        alone = GaussianNoise(7).add_(torch.zeros_like(released[0]), CLIP, 0)
        found[how] = {"equal": torch.equal(released[0], alone), "drawn": sum(drawn), "of": len(alone)}
    return found


def check_same() -> Any:
    """Noisy steps in float32 by every way to hold the model."""
    return {how: train(1.0, torch.float32, how=how) for how in ways()}


def check_cut() -> Any:
    """Batches of six examples at most, of all ranks together."""
    return train(0.0, torch.float64, max_batch_size=6)


def check_engine() -> Any:
    from tests.dpcore import engines  # which imports this file

    return engines.found()


def check_loads() -> Any:
    from tests.dpcore import loads  # which imports this file

    return loads.found()


def check_run_again() -> Any:
    from tests.dpcore import run_again  # which imports this file

    return run_again.found()


def check_branches() -> Any:
    """The noise's seeds of all ranks behind a step before which the last rank went on with other noise, alone."""
    _, module, optimizer, _ = private(1.0, torch.float32, check_batches=False)
    before = optimizer.noise.seed
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.noise.branch("alone", known=True)
    step(module, optimizer, *data(torch.float32)[:2][:2])
    return {"seed": optimizer.noise.seed, "moved": optimizer.noise.seed != before, "weights": weights(module)}


def step_in_half_precision() -> bool:
    """Return whether a step of a sharded bfloat16 model, of whose batch rank 0 has nothing, leaves finite weights."""
    _, module, optimizer, _ = private(1.0, torch.bfloat16, how="sharded", check_batches=False)
    x, y = data(torch.bfloat16)[: dist.get_rank()][:2]
    F.cross_entropy(module(x).float(), y).backward()
    optimizer.step()
    return bool(weights(module).isfinite().all())


def check_sharded(folder: Path) -> Any:
    """The same by fully_shard; whole batches, then pieces of two, then a resume."""
    from tests.dpcore import shards  # which imports this file

    found = {
        "sums": {str(dtype): train(0.0, dtype, how="sharded") for dtype in (torch.float64, torch.float32)},
        "pieces": train(1.0, torch.float64, size=2, how="sharded"),
        "auto": train(1.0, torch.float64, size="auto", how="sharded"),
        "hybrid": train(1.0, torch.float64, size=2, how="hybrid" if WORLD > 1 else "columns"),
        "resume": check_resume(folder, how="sharded"),
    }
    found["moved at a learning rate of 0"] = [shards.moved_at_a_rate_of_0(of_private) for of_private in (True, False)]
    found["secure"] = [shards.released_securely(how) for how in ways()[1:]]
    found["rounded"] = [shards.rounded_in_mixed_precision(sigma) for sigma in (0.0, 1.0)]
    found["extremes"] = [[shards.extremes(length, how) for how in ("alone", "sharded")] for length in (6, 400)]
    found["words"] = [shards.of_words(how) for how in ("alone", "sharded")]
    found |= shards.refused_in_shards()
    found["half precision"] = step_in_half_precision()
    _, module, optimizer, _ = private(1.0, how="sharded", check_batches=False)
    step(module, optimizer, *data()[: dist.get_rank()][:2])
    inner = module.to_standard_module()
    found["local"] = [(p.numel(), p.to_local().numel(), p.grad.to_local().numel()) for p in inner.parameters()]
    found["read back"] = [[shards.of_derived(way, how) for how in ("alone", "sharded")] for way in shards.READ_BACK]
    engine, module, optimizer, _ = private(1.0, how="hybrid" if WORLD > 1 else "sharded", check_batches=False)
    if (whole := folder / "replicated.pt").exists():  # by the check before
        kept = {"path": whole, "module": module, "optimizer": optimizer}
        found["of copies"] = refusal(lambda: engine.load_checkpoint(**kept))
    if WORLD > 1:  # as on machines that share no disk
        (disk := folder / f"disk of rank {dist.get_rank()}").mkdir()
        kept = {"path": disk / "run.pt", "module": module, "optimizer": optimizer}
        found["shards on several disks"] = refusal(lambda: engine.save_checkpoint(**kept))
        if dist.get_rank() == 0:
            kept["path"].touch()
        go_on = engine.load_checkpoint if kept["path"].exists() else engine.save_checkpoint
        found["a file on one disk"] = refusal(lambda: go_on(**kept))
    if dist.get_rank() + 1 == WORLD:  # of the copies of one shard one
        with torch.no_grad():
            next(reversed([*module._module.module.parameters()])).to_local().add_(1.0)
    before = weights(module)
    found["unequal copies"] = refusal(lambda: step(module, optimizer, *data()[: dist.get_rank()][:2]))
    assert WORLD == 1 or torch.equal(weights(module), before)
    part = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(part[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found["in part"] = refusal(lambda: PrivacyEngine(seed=7).make_private(
        module=part, optimizer=torch.optim.SGD(part.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(5, 3))), noise_multiplier=1.0, max_grad_norm=1.0,
    ))  # fmt: skip
    return found


def check_resume(folder: Path, how: str = "replicated") -> Any:
    """Three steps, a checkpoint, and the rest in new objects; dropout draws from the ranks' own random state."""

    def run(steps: int, resumed: bool = False) -> Any:
        engine, module, optimizer, loader = private(1.0, dropout=0.5, seed=99 if resumed else 7, how=how)
        kept = {"path": folder / f"{how}.pt", "module": module, "optimizer": optimizer, "data_loader": loader}
        torch.manual_seed(100 + dist.get_rank())
        if resumed:
            engine.load_checkpoint(**kept)
        for _, (x, y, _) in zip(range(steps), loader, strict=False):  # in this order: no batch is lost
            step(module, optimizer, x, y)
        if steps == 3:
            engine.save_checkpoint(**kept)
            dist.barrier()
        return {"weights": weights(module), "accounted": engine.accountant.history}

    found = {"whole": run(4), "first": run(3), "resumed": run(4, resumed=True)}
    if how == "replicated" and dist.get_world_size() > 1:
        _, module, optimizer, _ = private(1.0, check_batches=False)
        with torch.no_grad():
            next(module.parameters())[0] += dist.get_rank()
        found["unequal weights"] = refusal(lambda: step(module, optimizer, *data()[:4][:2]))
    return found


def _steps(count: int, engine: PrivacyEngine, module: nn.Module, optimizer: Any, loader: Any) -> torch.Tensor:
    for _, (x, y, _) in zip(range(count), loader, strict=False):
        step(module, optimizer, x, y)
    return weights(module)


def check_keep(folder: Path) -> Any:
    """Three steps of a sharded model, a checkpoint in which an earlier one is lost, and three more steps."""
    found = {}
    for how in ("sharded", "hybrid") if WORLD > 1 else ("sharded",):
        run = private(1.0, how=how)
        (folder / f"{how}.rank1").touch()  # of an earlier version
        for count in (2, 1):
            _steps(count, *run)
            run[0].save_checkpoint(path=folder / how, module=run[1], optimizer=run[2])
        dist.barrier()
        assert len([*folder.glob(f"{how}.*-shards")]) == 1 and not (folder / f"{how}.rank1").exists()
        found[how] = _steps(3, *run)
    return found


def check_go_on(folder: Path) -> Any:
    """The three steps behind the checkpoints of ranks that may have been more, or fewer."""
    found: dict[str, Any] = {}
    hows = ("sharded", "hybrid")
    for saved in (how for how in hows if (folder / how).exists()):
        found[saved] = {}
        for how in hows[: 2 if WORLD > 1 else 1]:
            run = private(1.0, how=how, seed=99)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # new ranks have no random state there
                run[0].load_checkpoint(path=folder / saved, module=run[1], optimizer=run[2])
            found[saved][how] = _steps(3, *run)
    return found


def check_refusals() -> Any:
    rank = dist.get_rank()
    loader = DataLoader(data(), batch_size=5)
    repeating = DistributedSampler(TensorDataset(torch.zeros(41)))
    shuffled = torch.randperm(len(data()), generator=torch.Generator().manual_seed(rank)).tolist()
    found = {
        "seeds": refusal(lambda: private(seed=rank)),
        "sigma": refusal(lambda: private(sigma=1.0 + rank)),
        "clip": refusal(lambda: private(max_grad_norm=1.0 + rank)),
        "torch": refusal(lambda: PrivacyEngine().make_private(
            module=nn.parallel.DistributedDataParallel(module := model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        )),
        "whole loader": refusal(lambda: private(loader=DPDataLoader(data(), sample_rate=0.1))),
        "no sharding": refusal(lambda: private(loader=loader, poisson_sampling=False)),
        "other order": refusal(lambda: private(loader=DataLoader(Subset(data(), shuffled), batch_size=5))),
        "other order of shares": refusal(lambda: private(
            loader=DataLoader(mine := Subset(data(), shuffled), sampler=DistributedSampler(mine)),
            poisson_sampling=False,
        )),
        "repeats": refusal(lambda: private(
            loader=DataLoader(TensorDataset(torch.zeros(41)), sampler=repeating), poisson_sampling=False
        )),
    }  # fmt: skip
    _, module, optimizer, _ = private(1.0, check_batches=False)
    optimizer.noise_multiplier = 1.0 + rank
    found["schedule"] = refusal(lambda: step(module, optimizer, *data()[:4][:2]))
    _, module, optimizer, batches = private(1.0)
    handed_out = iter(batches)
    for _ in range(rank):
        next(handed_out)
    x, y, _ = next(handed_out)
    found["left out"] = refusal(lambda: step(module, optimizer, x, y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private(how="alone")
    found["alone"] = " ".join(str(w.message) for w in caught)
    return found


def check_absent() -> Any:
    """Rank 0 steps, the others do not; last, because the group is unusable afterwards."""
    _, module, optimizer, _ = private(1.0, check_batches=False)
    before = weights(module)
    dist.barrier()
    if dist.get_rank() > 0:
        return "absent"
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))  # only now: nobody else is waited for
    message = refusal(lambda: step(module, optimizer, *data()[:4][:2]))
    return message if torch.equal(weights(module), before) else "the weights moved"


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))  # a busy machine imports torch for long
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    found = {}
    for name in names:
        found[name] = checks[name](folder) if name in ("resume", "sharded", "keep", "go_on") else checks[name]()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    if "absent" in names:
        # The group cannot be taken apart in order, and gloo's threads, still waiting for each other, now and then
        # abort an interpreter that ends with them ("terminate called without an active exception").
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
