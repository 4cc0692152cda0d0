"""Refuse settings, states and loops that do not fit a private optimizer, and gradients that were not clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from dpcore.arguments import check_divisor
from dpcore.distributed import Ranks, order_of
from dpcore.errors import PrivacyError, UnsupportedError, trainer_hint, warn_caller
from dpcore.grad_sample.hooks import AbstractGradSampleHooks

MEAN_RULE = "with loss_reduction='mean' the update needs a positive, public divisor"
SPENT = "privacy"
"""The entry of a state's first group that says what its steps have spent: torch's optimizers keep it when they load."""
SCHEDULED = {"initial_lr", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names", SPENT}
"""Entries that schedules, torch and dpcore put into groups of any optimiser."""


def check_takes_one_gradient(optimizer: Any) -> None:
    """UnsupportedError where an optimiser cannot make one update of one dense gradient, which is what a step has."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the same batch several times in a step, each of which would be a release; use SGD, "
            "Adam or another optimizer that takes one gradient per step."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam takes sparse gradients alone, and a private gradient is dense: noise on the rows of a batch's "
            "tokens only would tell which these are. Use Adam."
        )


def check_same_settings(
    module: AbstractGradSampleHooks, loss_reduction: str | None, max_grad_norm: Any, expected_batch_size: float | None
) -> None:
    """ValueError where the settings of an optimizer are not those of its module, or lack a divisor."""
    if loss_reduction not in (None, module.loss_reduction):
        raise ValueError(
            f"loss_reduction is {loss_reduction!r} here and {module.loss_reduction!r} in the module; gradients "
            "would be scaled by the batch's length in one place only. Give both the reduction of your loss."
        )
    if module.loss_reduction == "mean":
        check_divisor(expected_batch_size, MEAN_RULE)
    if module.max_grad_norm not in (None, max_grad_norm):
        raise ValueError(
            f"max_grad_norm is {max_grad_norm} here and {module.max_grad_norm} in the module; give both the same."
        )


def ordered_bounds(
    max_grad_norm: float | Sequence[float], module: AbstractGradSampleHooks, params: Sequence[Parameter]
) -> float | Sequence[float]:
    """Bounds per parameter come in the optimiser's order and go to the module's."""
    if not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != len(params):
        return max_grad_norm  # which the accumulator refuses where there are too many or too few
    bounds = dict(zip(params, max_grad_norm, strict=True))
    return [bounds[p] for p in module.trained.values() if p in bounds]


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """ValueError where a state is that of an optimiser of another kind, whose settings this one does not have."""
    known = {name for group in optimizer.param_groups for name in group}
    for group in state_dict.get("param_groups", []):
        missing, unknown = known - set(group), set(group) - known - SCHEDULED
        if missing - SCHEDULED and unknown:
            kind = type(optimizer).__name__
            raise ValueError(
                f"The state is that of another optimizer than {kind}: it has {', '.join(sorted(unknown))} and "
                f"lacks {', '.join(sorted(missing))}. Build the optimizer that it was saved with, or begin {kind} "
                "anew and load the rest alone."
            )


def check_unchanged(optimizer: Any) -> None:
    """PrivacyError where module and optimizer are no longer those that were made private."""
    optimizer.module.check_unchanged()
    released = optimizer.accumulator.names
    for param in (p for group in optimizer.param_groups for p in group["params"] if p not in released):
        if param.requires_grad:
            raise PrivacyError(
                "A parameter was added to the optimizer after make_private; it would be updated without clipping "
                "and noise. Make the module private again with an optimizer that holds it from the start."
            )
        if param.grad is not None:  # of an earlier pass; torch's optimizers apply it all the same
            raise PrivacyError(
                f"The optimizer holds a parameter of shape {tuple(param.shape)} that is not trained "
                "(requires_grad=False) and has a gradient: step() would apply it without clipping and noise. Call "
                "optimizer.zero_grad() before the backward pass, or set that parameter's grad to None."
            )


def check_no_ordinary_gradient(optimizer: Any) -> None:
    """PrivacyError where a parameter has a gradient that is not of recorded examples."""
    for name, param in optimizer.accumulator.parameters.items():
        if optimizer.module.ordinary_gradients.owns(param) or optimizer.owns_changed():
            continue
        if not optimizer.module._module.training:
            raise PrivacyError(
                f"Parameter {name} has an ordinary, unclipped gradient: the module is in evaluation mode, in which "
                "gradients are not recorded by example. Call model.train() before the training loop."
            )
        raise PrivacyError(f"Parameter {name} has an ordinary, unclipped gradient: {_whence(optimizer.module, param)}")


def _whence(module: AbstractGradSampleHooks, param: Parameter) -> str:
    """Say where an ordinary gradient may come from, and what to write instead."""
    if module.ordinary_gradients.formed(param):
        return (
            "p.grad was changed by hand since backward() (by clip_grad_norm_, say), which the step would undo. "
            f"Leave clipping to step(), or change p.grad in optimizer.register_step_pre_hook.{trainer_hint()}"
        )
    if not module.has_passes:
        return (
            "the loss did not come through the private module in training mode. Call the module that make_private "
            f"returned, not the one that it was given.{trainer_hint()}"
        )
    return (
        "the loss uses it beside the private module (a penalty, a distance to other weights, a learned variance), "
        "where its gradient has no examples. Put a penalty on the weights' squares into the optimizer's "
        "weight_decay; anything else into the module: let forward() return the parameter expanded to one row for "
        f"every example, param.expand(len(x), *param.shape), or the loss itself by example.{trainer_hint()}"
    )


def check_ranks(optimizer: Any, ranks: Ranks) -> None:
    """Refuse a step that is not the same on all ranks, or on weights that are not."""
    groups = [{name: v for name, v in g.items() if name not in ("params", SPENT)} for g in optimizer.param_groups]
    optimizer.same_weights.agree(
        {
            "the number of steps": optimizer.steps,
            "the number of accumulated batches": optimizer.logical_batch.batches,
            "noise_multiplier": optimizer.noise_multiplier,
            "the kind of the noise": (type(optimizer.noise).__name__, optimizer.noise.version),
            "max_grad_norm": optimizer.max_grad_norm,
            "expected_batch_size": optimizer.expected_batch_size,
            "the optimizer's settings": groups,
            "the batches (their seed, or one that a rank has left out)": _drawn(optimizer.run, ranks),
        },
        ranks,
        optimizer.reduction,
        optimizer.module._module.parameters(),
        optimizer.original_optimizer,
    )
    if ranks.draw_one(optimizer.run.loader) and optimizer.run.ledger is not None:
        draws = tuple(batch.draw for batch in optimizer.run.ledger.used)
        ranks.agree_where_known("the draws of the batches of this step", draws if draws and None not in draws else None)


def _drawn(run: Any, ranks: Ranks) -> Any:
    """Return what must be the same on all ranks where they draw one batch: parts of two may overlap."""
    if not ranks.draw_one(run.loader):
        return order_of(run.loader)
    is_followed = run.ledger is not None and run.ledger.checks
    return run.loader.sampler_state.seed, run.loader.where if is_followed else None


def check_count(optimizer: Any) -> None:
    """PrivacyError where a subclass tells another number of batches than the step adds up, which counts nowhere."""
    told, batches = optimizer.accumulated_iterations, optimizer.logical_batch.batches
    if told != batches:
        raise PrivacyError(
            f"{type(optimizer).__name__}.accumulated_iterations is {told}, and the step adds up {batches} "
            f"batch{'es' if batches > 1 else ''}, by whose number it is divided and counted. Leave the override out."
        )


def admit(optimizer: Any) -> None:
    """Ask the guards, and name the noise of the step that is to be released."""
    for guard in optimizer.step_guards:
        guard(optimizer)
    optimizer.logical_batch.check(optimizer.noise_multiplier)  # the budget's guard has looked at it
    optimizer.run.name_noise(optimizer.noise, optimizer.steps)
    if optimizer.ranks is not None and optimizer.noise.has_addresses:
        optimizer.ranks.join_seed(optimizer.noise)
    optimizer.stage = "prepared"


def check_counts(optimizer: Any) -> None:
    """PrivacyError where nobody counts what the optimizer's new state says was spent."""
    if optimizer.engine is None:
        raise PrivacyError(
            "The optimizer's state is that of a private run, and says what its steps have spent, but no "
            "PrivacyEngine counts those of this optimizer, which would begin anew. Load it into the optimizer "
            "that make_private returned; or count by yourself what stands in its entry, and take it out: "
            f"optimizer.param_groups[0].pop({SPENT!r})."
        )


def see_division(module: AbstractGradSampleHooks, k: int) -> None:
    """Warn once where the loop divides its losses by the number ``k`` of batches that it accumulates."""
    if k > 1 and module.divided_by(k):
        warn_caller(
            f"The loop accumulates {k} batches for a step and divides their losses by {k}, and step() divides by "
            "their number, too: every gradient is that much too small before it is clipped. Leave the division of "
            "the loss out."
        )


def check_loop(optimizer: Any) -> None:
    """Refuse a step whose loss a GradScaler has multiplied, or whose update the next pass would not see."""
    # After its unscale_() a scaler shows only what it has found; p.grad was divided, and no example's gradient.
    if getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf"):
        raise UnsupportedError(
            "A GradScaler has multiplied the loss, and every gradient would be clipped at its scaled size. Use "
            "torch.autocast with bfloat16, which needs no scaling, and call optimizer.step() without a scaler."
        )
    if torch.is_inference_mode_enabled():
        raise PrivacyError(
            "step() was called within torch.inference_mode(), in which the weights cannot be updated in a way that "
            "the next backward pass sees; leave it before the step (torch.no_grad() is fine)."
        )


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return what a schedule may change."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def check_settings(optimizer: Any, before: Any) -> None:
    """UnsupportedError where something that cannot be told to wait counts the pieces of a batch: it would run ahead."""
    if settings_of(optimizer) != before:
        raise UnsupportedError(
            "The optimizer's settings (its learning rate, say) were changed within a batch, which "
            "max_physical_batch_size hands out in pieces: what changes them for every piece runs ahead, and tells how "
            "many pieces there were, which depends on the private length of the batch. Schedules of torch's classes "
            "wait by themselves if they are stepped after optimizer.step(); change anything else once per batch: if "
            "not optimizer.batch_goes_on: scheduler.step()."
        )
