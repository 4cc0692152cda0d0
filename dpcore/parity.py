"""Test that private training without noise and clipping is ordinary training, for a model of yours.

    python -m dpcore.parity                       # a small convolutional network, on random images
    python -m dpcore.parity mymodule:setup        # yours

``setup()`` returns (model, loss, batches): a module, a loss that is the mean over the batch, ``loss(outputs,
targets)``, and an iterable of batches (inputs, targets), with inputs a tensor, a tuple or a dict. The same steps are
taken twice, by torch alone and by dpcore with noise 0 and a bound that clips nothing, each batch in pieces whose
gradients add up. The exit code is 0 where both end at the same weights, and 1 where they do not.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore.grad_sample import GradSampleModule
from dpcore.optimizers import DPOptimizer
from dpcore.tree import batch_length
from dpcore.utils.batch_memory_manager import cut

NO_CLIPPING = 1e6
"""A bound that no gradient reaches."""
Setup = tuple[nn.Module, Callable[[Any, Any], Tensor], Iterable[tuple[Any, Any]]]


def demo() -> Setup:
    """A small convolutional network with random images."""
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 25, 10)
    )
    images = ((torch.randn(32, 1, 12, 12), torch.randint(0, 10, (32,))) for _ in itertools.count())
    return network, F.cross_entropy, images


@torch.no_grad()
def _apart(start: Tensor, ordinary: Tensor, private: Tensor) -> float:
    """Return how far apart two runs ended, over how far the ordinary one went."""
    return float((private - ordinary).norm() / (ordinary - start).norm().clamp(min=1e-300))


def compare(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[tuple[Any, Any]],
    *,
    pieces: int = 4,
    learning_rate: float = 0.1,
) -> dict[str, float]:
    """Train twice on ``batches``, one step for each.

    Args:
        model: Left as it is.
        loss: The mean over the batch.
        batches: Batches (inputs, targets).
        pieces: Into how many pieces each batch is cut; their gradients add up.
        learning_rate: Of SGD.

    Returns:
        By trained parameter, how far apart the two ended over how far the ordinary run went, in L2.
    """
    ends = []
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for private in (False, True):
        torch.manual_seed(0)
        trained = copy.deepcopy(model).train()
        _train(trained, loss, batches, pieces, learning_rate, private)
        ends.append(dict(trained.named_parameters()))
    ordinary, without = ends
    return {name: _apart(before, ordinary[name], without[name]) for name, before in start.items()}


def _train(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[tuple[Any, Any]],
    pieces: int,
    learning_rate: float,
    private: bool,
) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=learning_rate
    )
    if private:
        model = GradSampleModule(model, ordinary_grad=False)
        sizes: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": NO_CLIPPING, "expected_batch_size": 1.0}
        optimizer = DPOptimizer(optimizer, **sizes)
    for inputs, targets in batches:
        rows = batch_length(inputs)
        if isinstance(optimizer, DPOptimizer):
            optimizer.expected_batch_size = rows
        optimizer.zero_grad()
        for k in range(pieces):
            part = slice(k * rows // pieces, (k + 1) * rows // pieces)
            share = (part.stop - part.start) / rows
            if not share:
                continue
            value = loss(_call(model, cut(inputs, part)), cut(targets, part))
            (value if private else value * share).backward()
            if isinstance(optimizer, DPOptimizer) and k + 1 < pieces:
                optimizer.signal_skip_step()
                optimizer.step()
        optimizer.step()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _setup(name: str) -> Setup:
    """Return what the function ``module:function`` returns; ValueError where it cannot be had."""
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} names no function; write module:function, for instance mymodule:setup.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be called: {error}.") from error
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module)):
        raise ValueError(f"{name!r} returned {type(found).__name__}; it must return (model, loss, batches).")
    return found


def _as(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a batch in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _as(part, dtype) for name, part in value.items()}
    return type(value)(_as(part, dtype) for part in value) if isinstance(value, list | tuple) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences; 0 where the two runs end at the same weights, 1 where not, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m dpcore.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setup", nargs="?", help="module:function; without it a small network on random images")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pieces", type=int, default=4, help="pieces of a batch whose gradients add up")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative, of what a parameter has moved")
    options = parser.parse_args(arguments)
    for name in ("steps", "pieces"):
        if getattr(options, name) < 1:
            parser.exit(2, f"--{name} is {getattr(options, name)}; it must be at least 1.\n")
    torch.manual_seed(0)
    try:
        model, loss, source = demo() if options.setup is None else _setup(options.setup)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    dtype = getattr(torch, options.dtype)
    batches = [(_as(x, dtype), _as(y, dtype)) for x, y in itertools.islice(source, options.steps)]
    if len(batches) < options.steps:
        parser.exit(2, f"There are {len(batches)} batches for --steps {options.steps}; ask for fewer.\n")
    differences = compare(model.to(dtype), loss, batches, pieces=options.pieces, learning_rate=options.learning_rate)
    for name, difference in differences.items():
        print(f"{difference:8.1e}  {name}")
    worst = max(differences.values())
    same = worst <= options.tolerance
    print(
        f"{'the same' if same else 'NOT the same'}: {options.steps} steps of {options.pieces} pieces, in "
        f"{options.dtype}, end at most {worst:.1e} apart, of how far a parameter went ({options.tolerance:g} allowed)"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
