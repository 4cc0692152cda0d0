"""Checks of what make_private is given: module, optimizer, loader, and how many rows an example has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scipy.stats import binom
from torch import nn
from torch.optim import Optimizer

from dpcore.accountants import get_noise_multiplier
from dpcore.accountants.accountant import History
from dpcore.accountants.utils import counted_as
from dpcore.arguments import number_of
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.loading.epoch_sampler import CYCLE, EPOCHS, bins_for, check_sampling
from dpcore.loading.uniform_sampler import UniformWithReplacementSampler, overflow, steps_per_epoch
from dpcore.loading.units import rows_per_unit, unit_words
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers.checks import check_takes_one_gradient
from dpcore.privacy_unit import check_group

RARE = 1e-12
"""Chance of a cut batch beyond which there is a warning: 10,000 steps at epsilon 8 then charge 6e-5 to delta."""
MANY_STEPS = 10**6
"""Beyond which nobody trains."""


def check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """PrivacyError where the optimiser would update what is not clipped and noised once."""
    if isinstance(optimizer, DPOptimizer):
        raise PrivacyError(
            "The optimizer is private already; a second make_private would add its noise twice. Go on with the objects "
            "that the first call returned, or build model, optimizer and loader anew (run those cells again, too)."
        )
    known = {id(p) for p in module.parameters()}
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not in_optimizer <= known:
        raise PrivacyError(
            "The optimizer holds parameters that are not the module's: they would be updated without clipping and "
            "noise. Build the optimizer from module.parameters(), behind whatever replaces them (fully_shard)."
        )


def check_types(module: Any, optimizer: Any) -> None:
    """Refuse what is no module or no optimiser that can be made private."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is of type {type(module).__name__}; pass the torch.nn.Module that is to be trained.")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; pass one torch.optim.Optimizer, with "
            "parameter groups where layers need settings of their own."
        )
    check_takes_one_gradient(optimizer)


def check_unprepared(settings: Mapping[str, Any]) -> None:
    """Refuse what accelerate has wrapped already, and what is no loader."""
    if not hasattr(loader := settings["data_loader"], "dataset"):
        raise TypeError(
            f"data_loader is of type {type(loader).__name__}; pass a torch.utils.data.DataLoader over the data set: "
            "DataLoader(data, batch_size=...)."
        )
    for value in (settings["module"], settings["optimizer"], loader):
        if type(value).__module__.startswith("accelerate."):
            raise UnsupportedError(
                f"The {type(value).__name__} was made by accelerate's prepare(), and make_private cannot wrap it. Call "
                "dpcore.accelerate.prepare(accelerator, engine, module=..., optimizer=..., data_loader=..., ...) "
                "instead of both."
            )


def check_length(data_loader: Any, *given: float | None) -> None:
    """Refuse a data set without a length where a number is to be derived from it."""
    if None in given and not hasattr(data_loader.dataset, "__len__"):
        raise ValueError(
            f"The data set, of type {type(data_loader.dataset).__name__}, has no length from which the sample rate and "
            "the divisor could be derived; pass sample_rate= and expected_batch_size=. (Poisson sampling needs a "
            "map-style data set, with __len__ and __getitem__.)"
        )


def group_of(given: int | None, dataset: Any) -> int:
    """Return the rows of an example: as ``given``, or as the data set lays them out; ValueError where these differ."""
    laid_out = rows_per_unit(dataset)
    if given is None:
        return laid_out or 1
    if laid_out not in (None, given):
        raise ValueError(
            f"group is {given}, and the data set gives every unit {laid_out} rows; leave group out, or give that one."
        )
    return check_group(given)


def unit_of(dataset: Any, group: int) -> str:
    """Return what is one unit of a run, in words."""
    return unit_words(dataset) or ("one example" if group == 1 else f"one example, of {group} rows")


def warn_of_overflow(sampler: UniformWithReplacementSampler) -> None:
    """Warn where batches are cut so often that epsilon is charged for it."""
    most, chance = sampler.max_batch_size, sampler.overflow
    if chance > RARE:
        draws = sampler.num_samples + 1, sampler.sample_rate
        enough = int(binom.isf(RARE, *draws))
        while binom.sf(enough, *draws) > RARE**1.5:
            enough += 1
        # At a delta of 1 / n, which is too large already, epsilon = 0 is charged no more than this.
        steps = math.ceil(1 / (2.0 * sampler.num_samples * chance))
        until = f" At any delta up to 1 / {sampler.num_samples} epsilon is infinite after {number_of(steps, 'step')}."
        warn_caller(
            f"A batch is longer than max_batch_size={most} with the chance {chance:.3g}, and every step charges 2 "
            f"exp(epsilon) times that to delta, an upper bound.{until if steps <= MANY_STEPS else ''} With "
            f"max_batch_size={enough} it is nothing.",
        )


def longest_batch(settings: Mapping[str, Any]) -> int | None:
    """Return the most examples of a batch: as given, or that of a loader that draws its batches already."""
    given, drawn = settings["max_batch_size"], getattr(settings["data_loader"], "batch_sampler", None)
    return getattr(drawn, "max_batch_size", None) if given is None else given


def sampling_of(settings: Mapping[str, Any]) -> str:
    """Return how batches are drawn: as given, or as a loader does that draws its batches already."""
    given: str | None = check_sampling(settings["sampling"], longest_batch(settings))
    if not settings["poisson_sampling"]:
        if given is not None:
            raise ValueError(
                f"sampling is {given!r} with poisson_sampling=False, which keeps your loader; leave one of the two out."
            )
        return "ordinary"
    own: str | None = getattr(settings["data_loader"], "kind", None)
    found = own or given or ("poisson" if settings["mechanism"] is None else CYCLE)
    if (found == CYCLE) != (settings["mechanism"] is not None):
        raise ValueError(
            f"sampling is {found!r} with mechanism={settings['mechanism']}: a cycle of the same batches is for "
            "correlated noise, and that for nothing else. Leave sampling= out."
        )
    return found


def rate_of(settings: Mapping[str, Any]) -> float:
    """Return the chance of an example to be in a batch: that of a loader which draws its batches, or as given."""
    loader = settings["data_loader"]
    drawn = getattr(loader, "batch_sampler", None)
    if isinstance(drawn, UniformWithReplacementSampler) and settings["poisson_sampling"]:
        return drawn.sample_rate
    rate: float = 1 / len(loader) if settings["sample_rate"] is None else settings["sample_rate"]
    # In epochs the rate is one over the number of batches.
    return 1 / bins_for(rate) if sampling_of(settings) in EPOCHS else rate


def steps_that_fit(
    settings: Mapping[str, Any], rate: float, epsilon: float, delta: float, epochs: float, mechanism: str
) -> tuple[float, History, float]:
    """Return the noise multiplier with which the steps fit a budget, and what is counted for them.

    And the chance that one of them fails because its batch was cut; ValueError where that takes all of δ.
    """
    steps = math.ceil(epochs * steps_per_epoch(rate) * (1 - 1e-12))
    most, examples = longest_batch(settings), settings["data_loader"].dataset
    # A little more, for the sum of many such chances is rounded.
    failing = 0.0 if most is None else 2.0 * steps * overflow(len(examples), rate, most) * (1 + 1e-9)
    # What an accountant finds with a chance of failures is up to 1e-6 above the truth.
    target = epsilon - 2e-6 if failing else epsilon
    left = delta - math.exp(min(target, 600.0)) * failing if failing else delta
    if failing and left <= 0.0:
        raise ValueError(
            f"Of all {steps} batches {failing / 2:.3g} are longer than max_batch_size={most} on average, which at "
            f"epsilon {epsilon:g} takes all of delta {delta:g}; give a larger max_batch_size."
        )
    if (correlated := settings["mechanism"]) is not None:
        gaussian = get_noise_multiplier(
            target_epsilon=target, target_delta=left, sample_rate=1.0, steps=1, accountant=mechanism
        )
        costs = correlated.costs(steps_per_epoch(rate), math.ceil(epochs * (1 - 1e-12)))
        noise = gaussian * math.fsum(costs) ** 0.5 * (1 + 1e-9)
        return noise, [(noise / cost**0.5, 1.0, 1) for cost in costs], failing
    sampling = sampling_of(settings) if sampling_of(settings) in EPOCHS else "poisson"
    noise = get_noise_multiplier(
        target_epsilon=target,
        target_delta=left,
        sample_rate=rate,
        epochs=epochs,
        accountant=mechanism,
        sampling=sampling,
    )
    return noise, [(noise, *counted_as(sampling, rate, steps=steps))], failing
