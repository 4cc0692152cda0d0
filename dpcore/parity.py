"""Test that private training without noise and clipping is ordinary training, for a model of yours.

    python -m dpcore.parity                       # a small convolutional network, on random images
    python -m dpcore.parity mymodule:setup        # yours

``setup()`` returns (model, loss, batches): a module, a loss that is the mean over the batch, ``loss(outputs,
targets)``, and an iterable of batches. A batch is (inputs, targets), with inputs a tensor, a tuple or a dict, or it is
a dict of inputs with the targets under "labels". The same steps are taken twice, by torch alone and by the two lines
that make a run private (``make_private``), with noise 0 and a bound that no gradient reaches, each batch in pieces
whose gradients add up. The exit code is 0 where both end at the same weights, 1 where they do not, and 2 where the
model or the batches cannot be used.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore.engine.checks import call
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.pieces import cut
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import PrivacyEngine
from dpcore.tree import batch_length

NO_CLIPPING = 1e30
"""A bound that no gradient reaches: those that do have squares beyond what float32 holds."""
LABELS = "labels"
"""Where a batch that is one dict has its targets, as those of transformers have."""
OWN = ("dpcore", "__main__")
"""The packages whose errors are sentences for the user; run as a script, this file is ``__main__``."""
Setup = tuple[nn.Module, Callable[[Any, Any], Tensor], Iterable[Any]]


def demo() -> Setup:
    """A small convolutional network with random images."""
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 25, 10)
    )
    images = ((torch.randn(32, 1, 12, 12), torch.randint(0, 10, (32,))) for _ in itertools.count())
    return network, F.cross_entropy, images


@torch.no_grad()
def _apart(start: Tensor, ordinary: Tensor, private: Tensor) -> float:
    """Return how far apart two runs ended, over how far the ordinary one went; infinity where that is no number."""
    apart = float((private - ordinary).norm() / (ordinary - start).norm().clamp(min=1e-300))
    return math.inf if math.isnan(apart) else apart  # NaN is above no tolerance


def compare(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    *,
    pieces: int = 4,
    learning_rate: float = 0.1,
) -> dict[str, float]:
    """Train twice on ``batches``, one step for each.

    Args:
        model: Left as it is.
        loss: The mean over the batch.
        batches: Batches (inputs, targets), or dicts of inputs with the targets under "labels". Empty ones are left out.
        pieces: Into how many pieces each batch is cut; their gradients add up.
        learning_rate: Of SGD.

    Returns:
        By trained parameter, how far apart the two ended over how far the ordinary run went, in L2; infinity where a
            run ended at no number.

    Raises:
        ValueError: a batch is neither of these.
        PrivacyError, UnsupportedError: the model cannot be trained privately.
    """
    pairs = [_pair(batch, i) for i, batch in enumerate(batches)]
    pairs = [pair for pair in pairs if batch_length(pair)]
    size = max(1, -(-max(map(batch_length, pairs), default=1) // pieces))
    ends = []
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for train in (_ordinarily, _privately):
        trained = copy.deepcopy(model).train()
        train(trained, loss, pairs, size, learning_rate)
        ends.append(dict(trained.named_parameters()))
    ordinary, without = ends
    return {name: _apart(before, ordinary[name], without[name]) for name, before in start.items()}


def _ordinarily(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batches: Sequence[Any], size: int, learning_rate: float
) -> None:
    """Train by torch alone, each batch in pieces of ``size`` at most, as the private run's loader cuts them."""
    optimizer = _optimizer(model, learning_rate)
    seeds = itertools.count()
    for batch in batches:
        rows = batch_length(batch)
        pieces = -(-rows // size)
        optimizer.zero_grad()
        for k in range(pieces):
            part = slice(k * rows // pieces, (k + 1) * rows // pieces)
            inputs, targets = cut(batch, part)
            torch.manual_seed(next(seeds))
            (loss(call(model, inputs), targets) * ((part.stop - part.start) / rows)).backward()
        optimizer.step()


def _privately(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batches: Sequence[Any], size: int, learning_rate: float
) -> None:
    """Train as a script does after ``make_private``, with the given batches in the place of Poisson samples."""
    with warnings.catch_warnings():
        # Neither noise nor Poisson sampling: what is compared needs no privacy.
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine(seed=0).make_private(
            module=model,
            optimizer=_optimizer(model, learning_rate),
            data_loader=_loader(batches),
            noise_multiplier=0.0,
            max_grad_norm=NO_CLIPPING,
            poisson_sampling=False,
            sample_rate=1.0,
            expected_batch_size=1.0,
            max_physical_batch_size=size,
        )
    assert isinstance(optimizer, DPOptimizer)
    lengths = map(batch_length, batches)
    seeds = itertools.count()
    begins = True
    for inputs, targets in loader:
        if begins:
            optimizer.expected_batch_size = next(lengths)
        optimizer.zero_grad()
        torch.manual_seed(next(seeds))
        loss(call(private, inputs), targets).backward()
        optimizer.step()
        begins = not optimizer.batch_goes_on


def _optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)


def _loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """A loader over the examples of all batches, by number, that hands out these batches in their order."""
    ends = list(itertools.accumulate(map(batch_length, batches)))
    numbers = [list(range(end - batch_length(batch), end)) for batch, end in zip(batches, ends, strict=True)]
    of_first = {rows[0]: batch for rows, batch in zip(numbers, batches, strict=True)}
    examples: Any = range(ends[-1] if ends else 0)
    return DataLoader(examples, batch_sampler=numbers, collate_fn=lambda rows: of_first[rows[0]])


def _pair(batch: Any, number: int) -> tuple[Any, Any]:
    """A batch as (inputs, targets); ValueError where it is none."""
    if isinstance(batch, Mapping) and LABELS in batch:
        return {name: value for name, value in batch.items() if name != LABELS}, batch[LABELS]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    what = f"{type(batch).__name__} with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else _what(batch)
    raise ValueError(
        f"Batch {number} is a {what}; it must be (inputs, targets), where inputs may be a dict of keyword arguments of "
        f"the model, or a dict with the targets under {LABELS!r}."
    )


def _what(batch: Any) -> str:
    entries = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    return f"{type(batch).__name__}{entries}"


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


def _is_own(error: Exception) -> bool:
    """Whether it is a sentence of dpcore's: a ValueError may come from the user's model, which needs its traceback."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in OWN


def _as(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a batch in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _as(part, dtype) for name, part in value.items()}
    if not isinstance(value, list | tuple):
        return value
    parts = [_as(part, dtype) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


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
    batches = [_as(batch, dtype) for batch in itertools.islice(source, options.steps)]
    if len(batches) < options.steps:
        parser.exit(2, f"There are {len(batches)} batches for --steps {options.steps}; ask for fewer.\n")
    if not any(p.requires_grad for p in model.parameters()):
        parser.exit(2, "The model has no trained parameters, so that nothing can end at other weights.\n")
    rates = {"pieces": options.pieces, "learning_rate": options.learning_rate}
    try:
        differences = compare(model.to(dtype), loss, batches, **rates)
    except (ValueError, PrivacyError, UnsupportedError) as error:
        if not _is_own(error):
            raise
        parser.exit(2, f"{error}\n")
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
