"""Gives Opacus' optimizer and its module the names that subclasses and users read beside the public ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from dpcore.data_loader import DPDataLoader
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers import DPOptimizer
from dpcore.utils.batch_memory_manager import BatchMemoryManager, PiecewiseLoader


def params(optimizer: Optimizer, accepted_names: Sequence[str] | None = None) -> list[Parameter]:
    """Return the trained parameters of an optimizer, of the groups with these names where any are given."""
    named = [g for g in optimizer.param_groups if accepted_names is None or g.get("name") in accepted_names]
    return [p for group in named for p in group["params"] if p.requires_grad]


def _each(obj: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    return [obj] if isinstance(obj, Tensor) else obj


def _mark_as_processed(obj: Tensor | Iterable[Tensor]) -> None:
    """Note on per-sample gradients that a sum has taken them."""
    for tensor in _each(obj):
        tensor._processed = True  # type: ignore[attr-defined]


def _check_processed_flag(obj: Tensor | Iterable[Tensor]) -> None:
    """Refuse per-sample gradients that a sum has taken.

    Raises:
        PrivacyError: it would be released twice.
    """
    if any(hasattr(tensor, "_processed") for tensor in _each(obj)):
        raise PrivacyError(
            "These per-sample gradients are in a sum already, and an example would be in it twice. Call zero_grad() "
            "before the next backward pass, and clip_and_accumulate() once behind it."
        )


def _generate_noise(
    std: float, reference: Tensor, generator: torch.Generator | None = None, secure_mode: bool = False
) -> Tensor:
    """Return normal noise of the shape of ``reference``: secret where there is no generator."""
    noise = torch.zeros_like(reference)
    if secure_mode:
        return SecureNoise().add_(noise, std, 0)
    if generator is None or std == 0.0:
        return GaussianNoise().add_(noise, std, 0)
    return noise.normal_(0.0, std, generator=generator)


def switch_generator(*, data_loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """Let a loader draw its order from ``generator``.

    Raises:
        UnsupportedError: it draws Poisson samples, which are functions of a seed.
    """
    if isinstance(data_loader, DPDataLoader):
        raise UnsupportedError(
            "The loader draws Poisson samples by a seed, or in secure mode from the operating system, and not by a "
            "generator that moves on. Pass PrivacyEngine(seed=...) or PrivacyEngine(secure_mode=True)."
        )
    for part in (data_loader, data_loader.sampler, data_loader.batch_sampler):
        if hasattr(part, "generator"):
            setattr(part, "generator", generator)  # noqa: B010
    return data_loader


class BatchSplittingSampler(Sampler[list[int]]):
    """The index lists of ``sampler`` in pieces of at most ``max_batch_size``, each announced to ``optimizer``."""

    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it must be at least 1.")
        self.sampler, self.max_batch_size, self.optimizer = sampler, int(max_batch_size), optimizer

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            starts = range(0, max(1, len(batch)), self.max_batch_size)
            for start in starts:
                self.optimizer.signal_skip_step(start != starts[-1])
                yield batch[start : start + self.max_batch_size]

    def __len__(self) -> int:
        """The number of batches, each of which is at least one piece."""
        return len(self.sampler)  # type: ignore[arg-type]


def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer) -> PiecewiseLoader:
    """Return the loader of a :class:`BatchMemoryManager`."""
    manager = BatchMemoryManager(data_loader=data_loader, max_physical_batch_size=max_batch_size, optimizer=optimizer)
    return manager.loader


# ---- attributes of the optimizer


def _step_hook(optimizer: DPOptimizer) -> Any:
    def hook(of: DPOptimizer) -> None:
        if of.stage != "counted":  # a step and its noise are the subclass's own
            of.count_step()
        for one in of.step_hooks:
            one(of)
        of.stage = "open"

    return hook if optimizer.step_hooks or optimizer.engine is not None else None


def _refuse_to_set(what: str, instead: str) -> Any:
    def set_it(optimizer: DPOptimizer, value: Any) -> None:
        raise UnsupportedError(f"{type(optimizer).__name__} sets {what}, which is read only; {instead}.")

    return set_it


def _check_skip_next_step(optimizer: DPOptimizer, pop_next: bool = True) -> bool:
    """Return whether the step at hand, whose piece was clipped, or with ``pop_next`` False the next one skips.

    Raises:
        UnsupportedError: whoever asks makes the step in the optimizer's place, and would release the clipped sum.
    """
    own_step = pop_next and type(optimizer).pre_step is DPOptimizer.pre_step
    if own_step and optimizer.logical_batch.pieces and not optimizer.logical_batch.unfinished:
        optimizer.discard()
        raise UnsupportedError(
            f"_check_skip_next_step() was called behind clip_and_accumulate(), outside of {type(optimizer).__name__}: "
            "a step of one's own would release the clipped sum with a noise that nobody sees. Call optimizer.step(), "
            "and put a mechanism of your own into add_noise() of a class derived from DPOptimizer, which an override "
            "of PrivacyEngine._prepare_optimizer() returns."
        )
    return optimizer.logical_batch.unfinished if pop_next else optimizer.logical_batch.goes_on


@torch.no_grad()
def _own_clipped(optimizer: DPOptimizer) -> bool:
    """Own ordinary gradients that were multiplied by one number, with a warning; False where they were not."""
    gradients = optimizer.module.ordinary_gradients
    changed = [p for p in optimizer.accumulator.parameters.values() if not gradients.owns(p)]
    pairs = [(p.grad, formed) for p in changed if p.grad is not None and (formed := gradients.as_formed(p)) is not None]
    if len(pairs) < len(changed) or sum(p.numel() for p in changed) < 2:  # one number is a multiple of any other
        return False
    now, then = ([pair[k] for pair in pairs] for k in range(2))
    lengths, before = (torch.stack(torch._foreach_norm(of)).tolist() for of in (now, then))
    share = math.hypot(*lengths) / (math.hypot(*before) or math.inf)
    if not 0.0 < share <= 1.0:
        return False
    rest = torch.stack(torch._foreach_norm(torch._foreach_sub(now, torch._foreach_mul(then, share)))).tolist()
    close = [max(1e-4, 4 * torch.finfo(grad.dtype).eps) for grad in now]
    if not all(far <= part * length for far, part, length in zip(rest, close, lengths, strict=True)):
        return False
    for param in changed:
        gradients.own(param)
    if "_clip_was_told" not in vars(optimizer):
        vars(optimizer)["_clip_was_told"] = True
        warn_caller(
            "p.grad was multiplied by a number since backward(), as clip_grad_norm_ does. That has no effect: step() "
            "replaces it by the noisy sum of gradients that it clips to max_grad_norm example by example. Leave the "
            "call out, in transformers' TrainingArguments by max_grad_norm=0."
        )
    return True


class _Queue(list[bool]):
    """The signals that are waiting, to be looked at: a loop that takes them out would change which piece is whose."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise UnsupportedError(
            "_step_skip_queue was changed, which shows what waits and holds nothing itself: without its signal a step "
            "would go into another batch. Call optimizer.signal_skip_step(), or optimizer.discard(), which empties it."
        )

    pop = remove = append = insert = extend = clear = __setitem__ = __delitem__ = __iadd__ = _refuse  # type: ignore[assignment]


def _refuse_overrides(kind: type[DPOptimizer]) -> None:
    """UnsupportedError where a class overrides what only Opacus' clipping reads, and has no clipping of its own."""
    if not kind.clip_and_accumulate.__module__.startswith("dpcore."):
        return
    for name in ("grad_samples", "params", "_get_flat_grad_sample"):
        if name in vars(kind):
            raise UnsupportedError(
                f"{kind.__name__} overrides {name}, from which dpcore's clipping reads nothing: it would do nothing. "
                "Change p.grad_sample behind backward(), leave parameters out of the optimizer, or override "
                "clip_and_accumulate()."
            )


class _Unset:
    """An attribute that has the value ``of(optimizer)`` until the optimizer's class gives it another one."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __get__(self, optimizer: Any, kind: Any = None) -> Any:
        return self if optimizer is None else self.of(optimizer)


PRE_STEP = "call super().pre_step(), which knows whether the batch goes on"
OF_OPTIMIZERS = {
    "step_hook": property(_step_hook, _refuse_to_set("step_hook", "call attach_step_hook(), which adds one")),
    "_is_last_step_skipped": property(
        lambda of: of.logical_batch.unfinished, _refuse_to_set("_is_last_step_skipped", PRE_STEP)
    ),
    "_step_skip_queue": property(
        lambda of: _Queue(piece.goes_on for piece in of.logical_batch.announced),
        _refuse_to_set("_step_skip_queue", "call signal_skip_step(), or discard(), which empties it"),
    ),
    "_check_skip_next_step": _check_skip_next_step,
    "owns_changed": _own_clipped,
    "__init_subclass__": classmethod(_refuse_overrides),
    "generator": _Unset(lambda of: None),
    "secure_mode": _Unset(lambda of: isinstance(of.noise, SecureNoise)),
}
"""Attributes of DPOptimizer while Opacus' names are handed out."""
