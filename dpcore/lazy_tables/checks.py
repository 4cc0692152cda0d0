"""Refuse tables, optimizers and noise for which noise cannot be drawn later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.lazy_tables.hooks import Watch
from dpcore.lazy_tables.share import Share
from dpcore.noise import GaussianNoise


def check_noise(noise: GaussianNoise) -> GaussianNoise:
    """Return ``noise``; UnsupportedError where parts of it cannot be drawn later."""
    if not noise.has_addresses:
        raise UnsupportedError(
            f"noise is a {type(noise).__name__} whose numbers have no addresses (secure mode, a generator of its own, "
            "or version 1 of the stream), so that a row's cannot be drawn later; use GaussianNoise()."
        )
    return noise


def check_table(model: nn.Module, name: str, share: Share) -> nn.Embedding | nn.EmbeddingBag:
    """Return the module of that name; UnsupportedError where its weight cannot be drawn lazily.

    Of several ranks each may hold a ``share``, or is to.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    module = modules.get(name)
    if not name or type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise UnsupportedError(
            f"tables names {name!r}, which is a {type(module).__name__}; it must be the name of an nn.Embedding or "
            "nn.EmbeddingBag within the model, as model.named_modules() has it."
        )
    assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    weight = module.weight
    owners = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    why, in_rows = None, weight.is_contiguous()
    if any(isinstance(hook, Watch) and hook.waits for hook in hooks):
        why = "rows of it wait for their noise in another LazyEngine, whose flush() comes first"
    elif len(owners) > 1:
        why = f"its weight is also {owners[1]}: a tied head reads all rows at every step"
    elif module.max_norm is not None or module.scale_grad_by_freq:
        why = "max_norm or scale_grad_by_freq is set, which lets examples change each other's rows"
    elif isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        why = 'its mode is "max", whose gradients are not those of whole rows'
    elif len(weight) not in {module.num_embeddings, len(range(module.num_embeddings)[share.rows])}:
        why = f"{len(weight)} of its {module.num_embeddings} rows are here, as of another number of ranks"
    elif weight.dtype != torch.float32 or weight.device.type != "cpu" or not (in_rows or share.ranks):
        why = f"its weight is {weight.dtype} on {weight.device}, and must be float32 on a CPU, in rows"
    elif not weight.requires_grad:
        why = "its weight is not trained"
    elif not all(isinstance(hook, Watch) for hook in hooks):
        why = "it has hooks, which would not see the window that stands for it"
    if why is not None:
        raise UnsupportedError(f"The table {name} cannot be lazy: {why}. Leave it out of tables.")
    return module


def check_unchanged(model: nn.Module, modules: Mapping[str, nn.Module], weights: Mapping[str, Parameter]) -> None:
    """PrivacyError where a step would leave a table's noise elsewhere than in the ``weights`` of these ``modules``."""
    if torch.is_inference_mode_enabled():
        raise PrivacyError("A step is made in torch.inference_mode(), which forms no gradients; leave it first.")
    for name, module in modules.items():
        weight = weights[name]
        why = None
        if _module(model, name) is not module:
            why = "its module is another one now"
        elif module.weight is not weight:
            why = "its weight is another one now, as after load_state_dict(assign=True)"
        elif not weight.requires_grad:
            why = "its weight is not trained any more"
        if why is not None:
            raise PrivacyError(
                f"The table {name} has changed since the LazyEngine was made: {why}. The step would leave its "
                "noise elsewhere; call flush(), and make a LazyEngine of the model as it is."
            )


def settings_of(optimizer: torch.optim.Optimizer, tables: Sequence[Parameter]) -> tuple[float, float, float]:
    """Return learning rate, weight decay and momentum of the tables.

    Raises:
        UnsupportedError: a step is not linear, or the tables have other settings than each other.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise UnsupportedError(
            f"The optimizer is a {type(optimizer).__name__}. The noise of skipped steps is added to a row at once, "
            "which equals one step after the other only where an update is linear in the gradient; Adam and others "
            "are not. Use torch.optim.SGD, or Engine, which adds all noise at every step."
        )
    groups = [g for p in tables for g in optimizer.param_groups if any(p is q for q in g["params"])]
    if len(groups) < len(tables):
        raise UnsupportedError("A table is not among the optimizer's parameters, and would not be updated: add it.")
    for group in groups:
        if group["dampening"] or group["nesterov"] or group["maximize"] or group["differentiable"]:
            raise UnsupportedError(
                "Lazy tables take SGD without dampening, nesterov, maximize and differentiable. Set them to 0 in the "
                "tables' group, or use Engine."
            )
    settings = {tuple(float(group[name]) for name in ("lr", "weight_decay", "momentum")) for group in groups}
    if len(settings) > 1:
        raise UnsupportedError(
            f"The tables have several learning rates, weight decays or momenta ({settings}); give all one."
        )
    lr, decay, momentum = settings.pop()
    if not (math.isfinite(lr) and 0.0 <= lr * decay < 1.0):
        raise UnsupportedError(f"lr is {lr} and weight_decay {decay}; their product must be at least 0 and below 1.")
    if not 0.0 <= momentum < 1.0:
        raise UnsupportedError(f"momentum is {momentum}; it must be at least 0 and below 1.")
    return lr, decay, momentum


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
