"""Run by torchrun: trains shards in pieces between which parameters stay gathered, and in pieces that gather each.

``torchrun ... kept.py FOLDER``: every rank writes FOLDER/<rank>.pt, a dictionary of what each way has found.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine, gathering
from tests.dpcore import engines, shards
from tests.dpcore.ranks import DIVISOR, WORLD, data, private, refusal, sharding, step, weights

PIECE = 4 // WORLD
HOWS = ["sharded", "columns", *(["hybrid"] if WORLD > 2 else [])]
Interruption = Callable[[Any, Any, Any, torch.Tensor], Any]


class Gathers(TorchDispatchMode):
    """Counts gathered parameters' collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_allgather_base_" in str(function)
        return function(*args, **(kwargs or {}))


def whole(module: Any) -> int:
    """Return how many parameters the user's module shows whole."""
    return sum(not isinstance(param, DTensor) for param in module._module.module.parameters())


def trained(how: str, keep: bool | None, interruption: Interruption | None = None, rounds: int = 1) -> dict[str, Any]:
    """Train in pieces of some examples; once, behind the second batch's first piece, there is an interruption.

    Where that returns True the loop is left, and begun anew.
    """
    options = {"how": how, "max_physical_batch_size": PIECE, "keep_gathered": keep}
    engine, module, optimizer, loader = private(1.0, torch.float32, **options)
    found: dict[str, Any] = {"within": set(), "behind": set(), "gathers": []}
    waiting, rest = interruption, rounds
    with Gathers() as gathers:
        while (rest := rest - 1) >= 0:
            for x, y, _ in loader:
                step(module, optimizer, x, y)
                found["within" if optimizer.batch_goes_on else "behind"].add(whole(module))
                if not optimizer.batch_goes_on:
                    found["gathers"].append(gathers.count)
                    gathers.count = 0
                elif waiting is not None and optimizer.steps:
                    found["said"], waiting = waiting(engine, module, optimizer, x), None
                    if found["said"] is True:
                        rest += 1
                        break
    module.eval()
    module(data(torch.float32)[:2][0])
    return found | {"weights": weights(module), "engine": repr(engine), "accounted": engine.accountant.history}


@torch.no_grad()
def evaluate(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    module.eval()
    module(x)
    module.train()


def save(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    """One rank looks at the shards by itself."""
    if dist.get_rank() == 0:
        assert all(isinstance(value, DTensor) for value in module.state_dict().values())


def save_checkpoint(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    return refusal(lambda: engine.save_checkpoint(path=sys.argv[1] + "/run.pt", module=module, optimizer=optimizer))


def fail(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    """A step fails, and the loop goes on with another batch."""
    assert "no backward pass" in refusal(optimizer.step)
    return whole(module) == 0


def leave(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    return True


INTERRUPTIONS = (evaluate, save, save_checkpoint, fail, leave)


def chosen(free_of_last: int) -> dict[str, Any]:
    """Let ranks choose by memory, of which the last one has so much at first, and nothing later."""
    sizes = [free_of_last if dist.get_rank() + 1 == WORLD else 2**60]
    gathering.free_bytes = lambda device: sizes.pop() if sizes else 0
    return trained("sharded", None, rounds=2)


def failing_engine(keep: bool) -> dict[str, Any]:
    """Let an engine's loss fail in a batch's second piece, and go on with the same batch."""
    module, calls = engines.held("sharded"), [0]

    def losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError
        return engines._losses(outputs, y)

    engine = engines.engine_of(module, physical_batch_size=2, keep_gathered=keep)
    x, y, _ = data(torch.float32)[dist.get_rank() : DIVISOR : WORLD]
    engine.step(x, y)
    shown, engine.loss_fn = [], losses
    for _ in range(2):
        try:
            engine.step(x, y)
        except OSError:
            shown.append(engine.accumulator.flat.any().item())
        shown.append(sum(not isinstance(param, DTensor) for param in module.parameters()))
    return {"weights": weights(module), "shown": shown, "said": engine.explain()}


def looked_at(keep: bool) -> torch.Tensor:
    """Let one rank look at its shards between a pass and its step, which reads weights once more."""
    torch.manual_seed(0)
    whole = nn.Sequential(shards.Derived(shards.READ_BACK[0]), nn.Linear(3, 2))
    fully_shard(whole, **sharding("sharded"))
    module, optimizer, loader = PrivacyEngine(seed=7).make_private(
        module=whole, optimizer=torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=10), noise_multiplier=1.0,
        max_grad_norm=1.0, max_physical_batch_size=2, loss_reduction="sum", keep_gathered=keep,
    )  # fmt: skip
    for (x,) in loader:
        optimizer.zero_grad()
        module(x).sum().backward()
        if dist.get_rank() == 0:
            module.state_dict()
        optimizer.step()
    return weights(module)


def change(engine: Any, module: Any, optimizer: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for param in module._module.module.parameters():
            param.mul_(1.1)


def warned(how: str, interruption: Interruption | None) -> bool:
    """Return whether a run that keeps parameters says that a change of them is lost."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(how, True, interruption)
    return any("the change is lost" in str(warning.message) for warning in caught)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for how in HOWS:
        found[how] = {str(keep): trained(how, keep) for keep in (False, True, None)}
    for interruption in INTERRUPTIONS:
        found[interruption.__name__] = [trained("sharded", keep, interruption) for keep in (False, True)]
    by_engine = partial(engines.train_by_engine, False, "sharded", physical_batch_size=PIECE)
    found["engine"] = [by_engine(keep_gathered=keep)["weights"] for keep in (False, True)]
    found["failing engine"] = [failing_engine(keep) for keep in (False, True)]
    found["warned"] = [warned("sharded", change), *(warned(how, None) for how in ("sharded", "columns", "narrow"))]
    found["looked at"] = [looked_at(keep) for keep in (False, True)]
    found["much"], found["little"] = chosen(2**60), chosen(1)
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
