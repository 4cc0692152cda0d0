"""Answer what ``ranks.py`` asks of loads, and of other writes to weights, that one rank makes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dpcore import same_weights
from tests.dpcore.engines import engine_of, held
from tests.dpcore.ranks import data, private, refusal, step, ways, weights


def _by_optimizer(how: str) -> tuple[Any, Any, Callable[[], object]]:
    _, module, optimizer, _ = private(1.0, torch.float32, how=how, check_batches=False)
    return module, optimizer, lambda: step(module, optimizer, *_mine())


def _by_engine(how: str) -> tuple[Any, Any, Callable[[], object]]:
    engine = engine_of(held(how))
    return engine.model, engine.optimizer, lambda: engine.step(*_mine())


def _mine() -> Any:
    return data(torch.float32)[dist.get_rank() :: dist.get_world_size()][:2]


def _loaded(module: Any, optimizer: Any, first: Any, now: Any) -> None:
    module.load_state_dict(first)


def _there_and_back(module: Any, optimizer: Any, first: Any, now: Any) -> None:
    module.load_state_dict(first)
    module.load_state_dict(now)


def _written(module: Any, optimizer: Any, first: Any, now: Any) -> None:
    with torch.no_grad():
        for param in module.parameters():
            getattr(param, "_local_tensor", param).add_(1.0)


def _other_momenta(module: Any, optimizer: Any, first: Any, now: Any) -> None:
    state = optimizer.state_dict()
    momenta = {n: {"momentum_buffer": -of["momentum_buffer"]} for n, of in state["state"].items()}
    optimizer.load_state_dict({**state, "state": momenta})


ALONE = {"loaded": _loaded, "back": _there_and_back, "written": _written, "momenta": _other_momenta}


def _after(built: Callable[[str], Any], how: str, alone: Callable[..., None]) -> dict[str, Any]:
    """Return what two steps say behind what the last rank did ``alone``, and two behind what then all did."""
    module, optimizer, make_step = built(how)
    first = {key: value.clone() for key, value in module.state_dict().items()}
    with patch.object(same_weights, "fingerprint", side_effect=same_weights.fingerprint) as seen:
        for _ in range(3):
            make_step()
    kept = optimizer.state_dict()
    given = module, optimizer, first, {key: value.clone() for key, value in module.state_dict().items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        alone(*given)
    before = weights(module)
    said = [refusal(make_step) for _ in range(2)]
    moved = not torch.equal(weights(module), before)
    module.load_state_dict(first)
    optimizer.load_state_dict(kept)
    said += [refusal(make_step) for _ in range(2)]
    return {"compared": seen.call_count, "said": said, "moved": moved, "weights": weights(module)}


def found() -> dict[str, Any]:
    """Return the reports of each way to hold a model, by what makes its steps and what is done to it."""
    by = {"optimizer": _by_optimizer, "engine": _by_engine}
    return {
        (how, name, what): _after(built, how, alone)
        for how in ways()
        for name, built in by.items()
        for what, alone in ALONE.items()
    }
