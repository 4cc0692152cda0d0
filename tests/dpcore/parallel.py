"""Run by torchrun: trains tensor-parallel models, which the tests compare with one process.

``torchrun ... parallel.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each check found.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, GradSampleModule, PrivacyEngine
from dpcore.noise import grid_spacing
from tests.dpcore.ranks import noted, refusal, step, weights
from tests.dpcore.shards import Positions, cancelling_inputs

EXAMPLES, RATE, DIVISOR, WORDS = 32, 0.25, 8, 23
CLIPS = {"perceptron": 2.7, "block": 2.0}
"""Bounds that some examples exceed and others do not."""


class Perceptron(nn.Module):
    """Seven hidden units, so that two ranks have parts of different sizes."""

    PLAN: ClassVar[dict[str, Any]] = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.up, self.down, self.norm, self.head = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words).mean(1)
        return self.head(self.norm(x + self.down(self.up(x).tanh())))


class Block(nn.Module):
    """A transformer's block with tables split by words and by features, and a head whose output is gathered."""

    PLAN: ClassVar[dict[str, Any]] = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "places": ColwiseParallel(output_layouts=Replicate()),
        **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
        **dict.fromkeys(("out", "down"), RowwiseParallel()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 8, padding_idx=12), nn.Embedding(5, 8)
        self.first, self.second, self.last = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words) + self.places(torch.arange(words.shape[1]).expand_as(words))
        h = self.first(x)
        q, k, v = (f(h).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(h))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return self.head(self.last(x)).mean(1)


class SplitHead(Perceptron):
    """A head of which each rank hands out its own two of four outputs."""

    PLAN: ClassVar[dict[str, Any]] = {**Perceptron.PLAN, "head": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


MODELS = {"perceptron": Perceptron, "block": Block, "split head": SplitHead}
SHARDS_HERE = hasattr(torch.cpu.Stream, "record_event")
"""Whether this torch's fully_shard works on a CPU."""


def data() -> TensorDataset:
    """Words [32, 5], targets [32], and the example's number [32]."""
    words = torch.randint(0, WORDS, (EXAMPLES, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words, torch.arange(EXAMPLES) % 3, torch.arange(EXAMPLES))


def split(module: nn.Module, plan: dict[str, Any]) -> nn.Module:
    return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def private(
    kind: str = "block",
    sigma: float = 1.0,
    dtype: torch.dtype = torch.float64,
    alone: bool = False,
    seed: int | None = 7,
    make: Callable[[], nn.Module] | None = None,
    put: Callable[[nn.Module, dict[str, Any]], nn.Module] = split,
    **options: Any,
) -> tuple[PrivacyEngine, Any, Any, Any]:
    torch.manual_seed(0)
    module = (make or MODELS[kind])().to(dtype)
    if not alone:
        module = put(module, MODELS[kind].PLAN)  # type: ignore[attr-defined]
    engine = PrivacyEngine(seed=seed, secure_mode=options.pop("secure", False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine, *engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5),
            data_loader=options.pop("loader", None) or DataLoader(data(), batch_size=8),
            noise_multiplier=sigma,
            **{"max_grad_norm": CLIPS.get(kind), "sample_rate": RATE, "expected_batch_size": DIVISOR} | options,
        )


def train(steps: int = 4, **options: Any) -> dict[str, Any]:
    """Weights before and after every step, batches, and the norms of the examples."""
    engine, module, optimizer, loader = private(**options)
    found: dict[str, Any] = {"batches": [], "weights": [weights(module)], "norms": []}
    observe, batch = optimizer._observe, []
    optimizer._observe = lambda norms: (found["norms"].append(norms.clone()), observe(norms))
    while optimizer.steps < steps:
        for x, y, number in loader:
            batch += number.tolist()
            before = optimizer.steps
            step(module, optimizer, x, y)
            if optimizer.steps > before:
                found["batches"].append(batch)
                found["weights"].append(weights(module))
                batch = []
            if optimizer.steps == steps:
                break
    return found | {"weights": torch.stack(found["weights"]), "accounted": engine.accountant.history}


SAME: dict[str, dict[str, Any]] = {
    "perceptron": {"kind": "perceptron", "dtype": torch.float32},
    "block": {},
    "block in float32": {"dtype": torch.float32},
    "pieces": {"max_physical_batch_size": 2, "steps": 2},
    "automatic pieces": {"kind": "perceptron", "max_physical_batch_size": "auto", "steps": 2},
    "by layer": {"kind": "perceptron", "clipping": "per_layer", "max_grad_norm": [0.5] * 9, "steps": 2},
    "adaptive": {"kind": "perceptron", "clipping": "adaptive", "sigma": 0.5, "steps": 2},
    "empty": {"sample_rate": 1e-9, "steps": 2},
}
"""Runs that are the same in one process and in several."""


def check_same() -> Any:
    return {name: train(**options) for name, options in SAME.items()}


def check_noise(**held: Any) -> Any:
    """Return what an empty batch releases: noise alone."""
    found: dict[str, Any] = {}
    for name, options in {"seed": {}, "secret": {"seed": None}, "secure": {"seed": None, "secure": True}}.items():
        _, module, optimizer, _ = private(dtype=torch.float32, check_batches=False, **options | held)  # type: ignore[arg-type]
        released: list[torch.Tensor] = []
        optimizer.scale_grad = partial(noted, released, optimizer, optimizer.scale_grad)
        x, y = data()[:0][:2]
        step(module, optimizer, x, y)
        found[name] = released[0]
    on_grid = found["secure"] / grid_spacing(CLIPS["block"])
    return found | {"on grid": torch.equal(on_grid, on_grid.round())}


def check_extremes() -> Any:
    """Return what a step moves on examples whose positions cancel more and more, in one process and in parts."""
    return [[extremes(length, alone) for alone in (True, False)] for length in (6, 400)]


def extremes(length: int, alone: bool) -> torch.Tensor:
    torch.manual_seed(0)
    module: nn.Module = Positions()
    start = weights(module)
    if not alone:
        module = split(module, {"layer": ColwiseParallel(output_layouts=Replicate())})
    x = cancelling_inputs(length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private_module, optimizer, _ = PrivacyEngine(seed=7).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1e4),
            data_loader=DataLoader(TensorDataset(x), batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=0.01,
            expected_batch_size=1,
            check_batches=False,
            check_isolation=False,
        )
    F.cross_entropy(private_module(x), torch.arange(8) % 2).backward()
    optimizer.step()
    return weights(module) - start


def check_resume(folder: Path, **held: Any) -> Any:
    """Three steps, a checkpoint, and the rest in new objects, with dropout."""

    def run(steps: int, resumed: bool = False) -> Any:
        made = private(seed=99 if resumed else 7, make=lambda: Block(0.5), **held)
        engine, module, optimizer, loader = made
        kept = {"path": folder / "run.pt", "module": module, "optimizer": optimizer, "data_loader": loader}
        torch.manual_seed(100)
        if resumed:
            engine.load_checkpoint(**kept)
        for _, (x, y, _) in zip(range(steps), loader, strict=False):  # in this order: no batch is lost
            step(module, optimizer, x, y)
        if steps == 3:
            engine.save_checkpoint(**kept)
            dist.barrier()
        found = {"weights": weights(module), "accounted": engine.accountant.history}
        ended = module.to_standard_module()
        return found | {"saved": get_model_state_dict(ended, options=StateDictOptions(full_state_dict=True))}

    return {"whole": run(4), "first": run(3), "resumed": run(1, resumed=True)}


def check_keep(folder: Path, **held: Any) -> None:
    """Two steps and a checkpoint."""
    engine, module, optimizer, loader = private(**held)
    for _, (x, y, _) in zip(range(2), loader, strict=False):
        step(module, optimizer, x, y)
    engine.save_checkpoint(path=folder / "kept.pt", module=module, optimizer=optimizer)
    dist.barrier()


def check_go_on(folder: Path, **held: Any) -> Any:
    """Two steps behind the checkpoint of ranks that were more, or fewer."""
    engine, module, optimizer, loader = private(seed=99, **held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new ranks have no random state there
        engine.load_checkpoint(path=folder / "kept.pt", module=module, optimizer=optimizer)
    for _, (x, y, _) in zip(range(2), loader, strict=False):
        step(module, optimizer, x, y)
    return weights(module)


class Refused(Perceptron):
    """A norm of each head's own features, with one weight for all heads, between layers that are split by heads.

    ``scale``: of the weights behind it, by which its gradient is small beside others.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.of_head = nn.LayerNorm(2)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        with torch.no_grad():
            self.down.weight.mul_(scale)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.of_head(self.up(self.table(words).mean(1)).unflatten(-1, (-1, 2))).flatten(-2)
        return self.head(self.norm(self.down(h)))


def of_plan(plan: dict[str, Any], make: Callable[[], nn.Module] = Perceptron, mesh: Any = None) -> str:
    """Say how a perceptron that is split by ``plan`` is refused."""
    module = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    parallelize_module(module, mesh, plan)
    return made_private(module)


def made_private(module: nn.Module) -> str:
    return refusal(
        lambda: PrivacyEngine(seed=7).make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
            data_loader=DataLoader(data(), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    )


def of_step(
    differ: Callable[[Any, Any], tuple[Any, Any]] = lambda x, y: (x, y),
    change: Callable[[nn.Module], Any] = lambda module: None,
    **options: Any,
) -> str:
    """Say how a step is refused, and whether weights moved, whose batch or model is changed on this rank."""
    _, module, optimizer, _ = private(**{"kind": "perceptron", "check_batches": False} | options)
    change(module._module.module)
    before = weights(module)
    said = refusal(lambda: step(module, optimizer, *differ(*data()[:6][:2])))
    return said if torch.equal(weights(module), before) else "the weights moved"


def of_penalty(**held: Any) -> str:
    """Say how a step is refused whose loss uses a split weight beside the model."""
    _, module, optimizer, _ = private("perceptron", check_batches=False, **held)
    x, y = data()[:6][:2]
    F.cross_entropy(module(x), y).backward()
    (module._module.module.up.weight**2).sum().backward()
    return refusal(optimizer.step)


def check_refused() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    columns, rows = Perceptron.PLAN["up"], Perceptron.PLAN["down"]
    sequence = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    table = {"table": ColwiseParallel(output_layouts=Replicate())}
    grid = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "parts"))
    return {
        "sequence": of_plan({**Perceptron.PLAN, "norm": SequenceParallel()}),
        "inputs": of_plan({**Perceptron.PLAN, "norm": gathered}),
        "of sequence": of_plan({"up": sequence["up"], "down": rows}),
        "to sequence": of_plan({"up": columns, "down": sequence["down"]}),
        "DTensors between": of_plan({"up": ColwiseParallel(use_local_output=False), "down": rows}),
        "partial": of_plan({"up": columns, "down": RowwiseParallel(output_layouts=Partial())}),
        "part of the mesh": of_plan(Perceptron.PLAN, mesh=grid["parts"]),
        "too many ranks": of_plan({"head": ColwiseParallel()}, lambda: with_one_output(Perceptron())),
        "max_norm": of_plan(table, lambda: with_max_norm(Perceptron())),
        "wrapped": refusal(lambda: GradSampleModule(split(Perceptron(), Perceptron.PLAN))),
        "engine": refusal(lambda: Engine(
            split(Perceptron(), Perceptron.PLAN), F.cross_entropy, noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=8,
        )),
        "no wrapper": refusal(lambda: private(wrap_model=False)),
        "other weights": refusal(lambda: private(make=lambda: moved(Perceptron(), rank), kind="perceptron")),
        "other inputs": of_step(lambda x, y: (x.roll(rank, 0), y)),
        "other targets": of_step(lambda x, y: (x, y.roll(rank, 0))),
        "other targets of a split head": of_step(lambda x, y: (x, y.roll(rank, 0)), kind="block"),
        "head that is not gathered": of_step(lambda x, y: (x, y % 2), kind="split head", max_grad_norm=1.0),
        "partial gradient": of_step(make=Refused),
        "small partial gradient": of_step(make=partial(Refused, 0.01)),
        "another order": of_plan(Perceptron.PLAN, mesh=DeviceMesh("cpu", [*range(size)][::-1])),
        "dropout": of_step(change=lambda module: torch.manual_seed(rank), make=lambda: Block(0.5), kind="block"),
        "no rule": of_step(make=lambda: with_rule_free(Perceptron())),
        "replaced": of_step(change=lambda module: replace(module.up)),
        "moved": of_step(change=lambda module: module.bfloat16().double()),
        "penalty": of_penalty(),
    }  # fmt: skip


def with_max_norm(module: Perceptron) -> Perceptron:
    module.table.max_norm = 1.0
    return module


def with_one_output(module: Perceptron) -> Perceptron:
    module.head = nn.Linear(6, 1)
    return module


def with_rule_free(module: Perceptron) -> Perceptron:
    """The perceptron with a layer whose weight is used in a way that has no rule."""
    module.head = nn.Sequential(RuleFree(), module.head)  # type: ignore[assignment]
    return module


class RuleFree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.atan2(x, self.weight)


def moved(module: nn.Module, by: float) -> nn.Module:
    with torch.no_grad():
        next(module.parameters()).add_(by)
    return module


def replace(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def main(known: dict[str, Any]) -> None:
    """Make the checks of the command line, among the functions ``known`` by name."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))  # a busy machine imports torch for long
    checks = {name.removeprefix("check_"): check for name, check in known.items() if name.startswith("check_")}
    found = {}
    for name in names:
        found[name] = checks[name](folder) if name.split("_")[0] in ("resume", "keep", "go") else checks[name]()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
