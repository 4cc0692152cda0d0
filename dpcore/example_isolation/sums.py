"""The comparison of what was recorded with the ordinary gradient: nothing of a parameter's gradient may be missing.

The unclipped gradients of all examples add up to the ordinary gradient of the summed loss, parameter by parameter. A
place in the graph that is lost, or counted twice, shows there whatever its cause; the noise hides it from everybody
else. Of both sums only the product with a fixed random direction is kept, so that no second gradient is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

HIDDEN, HALF_HIDDEN = 1e-3, 5e-2
"""Shares of a parameter's gradient that rounding may be."""
OF_ALL, HALF_OF_ALL = 3e-5, 1e-2
"""Shares of the gradient of all parameters that rounding may be: where a parameter's own one cancels, as a key's bias'
does."""
NOTHING = 1e-5
"""The same where nothing of it was recorded. Torch's own gradient of a group norm over one number, which is nothing,
was 2e-6 of all others in 150 models."""
CANCELLED = 1e-4
"""Share of the scale of a norm's rounding errors."""


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a parameter.

    ``projection``: the sum of the examples' gradients, times :func:`direction`. ``norm_sq``: the sum of their squared
    norms. ``scale``: of the squares that cancelled there.
    """

    projection: float = 0.0
    norm_sq: float = 0.0
    scale: float = 0.0

    @classmethod
    def of(
        cls, param: Parameter, total: Tensor, norms_sq: Tensor | None = None, scale: Tensor | None = None
    ) -> Recorded:
        """Return it for the sum ``total`` of gradients whose squared norms and their scale [B] may be known."""
        norm_sq = total.square().sum() if norms_sq is None else norms_sq.clamp(min=0.0).sum()
        return cls(
            projection(param, total), float(norm_sq), 0.0 if scale is None else float(scale.clamp(min=0.0).sum())
        )

    def with_more(self, other: Recorded) -> Recorded:
        """Return it for the gradients of both."""
        return Recorded(self.projection + other.projection, self.norm_sq + other.norm_sq, max(self.scale, other.scale))


def direction(param: Parameter, dtype: torch.dtype) -> Tensor:
    """Return a fixed random tensor of the shape of ``param``."""
    numbers = torch.Generator().manual_seed(param.numel())
    return torch.empty(param.shape, dtype=dtype).uniform_(-1.0, 1.0, generator=numbers).to(param.device)


def projection(param: Parameter, gradient: Tensor) -> float:
    """Return the product of a gradient with its parameter's direction."""
    wide = gradient.detach().to(torch.promote_types(param.dtype, torch.float32))
    return float((wide * direction(param, wide.dtype)).sum())


def ordinary(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], params: Sequence[Parameter]
) -> dict[Parameter, float]:
    """Return the projections of the ordinary gradients of ``params`` from outputs weighted by ``weights``."""
    found: dict[Parameter, float] = {}
    params = [param for param in params if param.requires_grad]

    def take(param: Parameter, gradient: Tensor) -> Tensor:
        found[param] = projection(param, gradient.to_dense())
        if gradient.is_sparse:  # Embedding(sparse=True)
            return gradient
        return gradient.new_zeros(()).expand(gradient.shape)  # which torch keeps in the gradient's place

    hooks = [p.register_hook(lambda gradient, p=p: take(p, gradient)) for p in params]
    try:
        torch.autograd.grad(outputs, params, weights, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def differs(recorded: Mapping[Parameter, Recorded], found: Mapping[Parameter, float], half: bool) -> Parameter | None:
    """Return the parameter whose recorded gradients miss its ordinary gradient by most, or None: all is rounding.

    Args:
        recorded: What was recorded.
        found: The projections of ordinary gradients.
        half: Whether something was computed in half precision.
    """
    share, of_all = (HALF_HIDDEN, HALF_OF_ALL) if half else (HIDDEN, OF_ALL)
    total = sum(r.norm_sq for r in recorded.values()) ** 0.5
    worst, name = 1.0, None
    for param in recorded.keys() | found.keys():
        if not param.requires_grad:
            continue  # frozen since: the step says so
        of, ordinary = recorded.get(param, Recorded()), found.get(param, 0.0)
        floor = NOTHING if of.norm_sq == 0.0 and not half else of_all
        allowed = share * of.norm_sq**0.5 + CANCELLED * of.scale**0.5 + floor * max(total, abs(ordinary)) + 1e-30
        if (off := abs(ordinary - of.projection) / allowed) > worst:
            worst, name = off, param
    return name
