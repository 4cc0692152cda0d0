"""Rules for custom layers, by decorator: ``f(layer, activations, backprops)`` -> {parameter: per-sample gradients}.

``activations`` are the tensors among the layer's inputs, ``backprops`` is the gradient at its (first) output, both
batch first. Check a new rule with ``dpcore.utils.per_sample_gradients_utils.check_per_sample_gradients_are_correct``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.numerics.rounding import SquaredNorm, gamma
from dpcore.rules.module_use import Fallback, ModuleUse, in_dtype

Sampler = Callable[[Any, list[Tensor], Tensor], dict[Parameter, Tensor]]
GRAD_SAMPLERS: dict[type[nn.Module], Sampler] = {}
NORM_SAMPLERS: dict[type[nn.Module], Sampler] = {}
SAMPLER_ROUNDINGS = 4096
"""Roundings that are allowed for in the square of a norm from a user's rule. An assumption, not a bound."""


def register_grad_sampler(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
) -> Callable[[Sampler], Sampler]:
    """Decorator: ``f(layer, activations, backprops)`` gives {parameter: [B, *parameter.shape]} for layers of exactly
    these classes, in place of dpcore's own rules.
    """
    return _register(GRAD_SAMPLERS, target_class_or_classes)


def register_norm_sampler(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
) -> Callable[[Sampler], Sampler]:
    """Decorator: ``f(layer, activations, backprops)`` gives {parameter: [B] norms}, without per-sample gradients.

    The clipped sum is then taken by a second pass through the layer. A norm that is too small voids the privacy
    guarantee; the checker compares it with the truth. Norms are taken at their word but for ``SAMPLER_ROUNDINGS``
    roundings, theirs and those of the second pass (1.2e-4 of the norm in float32). In half precision they are not asked
    for.
    """
    return _register(NORM_SAMPLERS, target_class_or_classes)


def _register(
    table: dict[type[nn.Module], Sampler], target: type[nn.Module] | Sequence[type[nn.Module]]
) -> Callable[[Sampler], Sampler]:
    def register(sampler: Sampler) -> Sampler:
        for kind in target if isinstance(target, Sequence) else [target]:
            table[kind] = sampler
        return sampler

    return register


def custom_fallbacks(model: nn.Module) -> dict[str, Fallback]:
    """The modules by name that have a rule of the user's, and trained parameters."""
    found: dict[str, Fallback] = {}
    for name, module in model.named_modules():
        kind = type(module)
        within = any(outer == "" or name.startswith(outer + ".") for outer in found)
        if within or not (kind in GRAD_SAMPLERS or kind in NORM_SAMPLERS):
            continue
        if any(p.requires_grad for p in module.parameters()):
            found[name] = Fallback(name, module, use=SamplerUse)
    return found


class SamplerUse(ModuleUse):
    """A call of a layer with a rule of the user's."""

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        # What the layer's own backward pass would sum in half precision has not the norm that was taken.
        halves = self.grad is not None and self.grad.dtype in (torch.float16, torch.bfloat16)
        return type(self.module) in NORM_SAMPLERS and not halves

    def _sample(self, sampler: Sampler, what: str) -> dict[Parameter, Tensor]:
        gradients = list(self.grads.values())
        if len(gradients) != 1:
            raise UnsupportedError(
                f"{self.name} has {len(gradients)} outputs with a gradient, and a custom rule knows of one; return one "
                "tensor, or leave the layer without a rule."
            )
        leaves = [leaf for leaf in self.given() if isinstance(leaf, Tensor)]
        if self.dtype is not None:
            leaves = [leaf.to(self.dtype) if leaf.is_floating_point() else leaf for leaf in leaves]
        module = in_dtype(self.module, gradients[0].dtype)
        names = {p: name for name, p in module.named_parameters()}
        values = {names[p]: value.detach() for p, value in sampler(module, leaves, gradients[0]).items() if p in names}
        missing = [name for name in self.trained if name not in values]
        if missing:
            raise UnsupportedError(
                f"The custom rule of {self.name} returns no {what} for {missing[0]}; it must for every trained "
                "parameter of the layer."
            )
        return {self.trained[name]: values[name] for name in self.trained}

    def _all(self) -> dict[Parameter, Tensor]:
        sampler = GRAD_SAMPLERS.get(type(self.module))
        if sampler is None:
            return super()._all()
        values = self._sample(sampler, "per-sample gradient")
        for param, value in values.items():
            size = len(next(iter(self.grads.values())))
            if value.shape != (size, *param.shape):
                raise UnsupportedError(
                    f"The custom rule of {self.name} returns a gradient of shape {tuple(value.shape)}; it must be "
                    f"{(size, *param.shape)}, the batch first."
                )
        return values

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        norms = self._sample(NORM_SAMPLERS[type(self.module)], "norm")[param]
        assert self.grad is not None
        return SquaredNorm(norms.double().square().reshape(len(norms)), gamma(SAMPLER_ROUNDINGS, self.grad.dtype))

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        params = {name: p.detach().requires_grad_(p is param) for name, p in self.trained.items()}
        with torch.enable_grad():
            results = self.call.again(params, self.given())
            total = sum(
                (results[k] * g * factors.view(-1, *[1] * (g.dim() - 1)).to(g.dtype)).sum()
                for k, g in self.grads.items()
            )
            name = next(name for name, p in self.trained.items() if p is param)
            (gradient,) = torch.autograd.grad(total, params[name])  # type: ignore[arg-type]
        out.add_(gradient)
