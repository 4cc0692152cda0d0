"""Turning recorded uses into clipped sums: norms, factors, and their accumulation over micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.clipping import MARGIN_UNITS, check_max_grad_norm, clip_factors
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.planner import Choice, choose
from dpcore.grad_sample.tape import Use

Factors = Callable[[Tensor, float], Tensor]

# A squared ghost norm is off by about eps times the sum of its absolute terms. While that sum is within this factor
# of the squared norm, the norm is good to a few eps, well inside the clip factor's margin of 32; beyond, the
# example's gradient is formed in float64. Convolutional networks stay below 1.
TOLERATED_CANCELLATION = 8.0


Method = TypeVar("Method", bound=Callable[..., Any])


def _without_autocast(method: Method) -> Method:
    """A forward pass may run in bfloat16; norms that decide on clipping, and what is clipped, are taken in full."""

    @functools.wraps(method)
    def run(self: Accumulator, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args, **kwargs)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Accumulator:
    """Sums of clipped gradients of named ``parameters``, in one flat buffer.

    ``max_grad_norm``: one bound for the whole gradient, or one per parameter (per-layer clipping). ``factors(norms,
    C)`` is the clipping rule.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        max_grad_norm: float | Sequence[float],
        factors: Factors = clip_factors,
    ) -> None:
        if not parameters:
            raise ValueError("The model has no parameter with requires_grad=True; there is nothing to train.")
        self.parameters = dict(parameters)
        self.names = {p: n for n, p in self.parameters.items()}
        self.factors = factors
        self.set_bounds(max_grad_norm)
        self._allocate()

    def set_bounds(self, max_grad_norm: float | Sequence[float]) -> None:
        """Groups of parameters that are clipped together: all of them, or each on its own."""
        if isinstance(max_grad_norm, Sequence):
            self.bounds = tuple(check_max_grad_norm(c) for c in max_grad_norm)
            if len(self.bounds) != len(self.parameters):
                raise ValueError(
                    f"max_grad_norm has {len(self.bounds)} bounds for {len(self.parameters)} trained parameters; give "
                    "one per parameter, or a single number."
                )
            self._group = {p: i for i, p in enumerate(self.parameters.values())}
        else:
            self.bounds = (check_max_grad_norm(max_grad_norm),)
            self._group = dict.fromkeys(self.parameters.values(), 0)

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return sum(c * c for c in self.bounds) ** 0.5

    def _allocate(self) -> None:
        """One flat buffer for all sums, so that noise and scaling are one pass each."""
        params = list(self.parameters.values())
        self._kinds = {(p.dtype, p.device) for p in params}
        dtypes = {torch.promote_types(p.dtype, torch.float32) for p in params}
        devices = {p.device for p in params}
        if len(dtypes) > 1 or len(devices) > 1:
            raise UnsupportedError(
                f"The trained parameters have dtypes {sorted(map(str, dtypes))} on {sorted(map(str, devices))}; "
                f"bring the "
                "model to one precision and one device with model.to(...)."
            )
        self.dtype, self.device = dtypes.pop(), devices.pop()
        # In memory each sum is laid out as its parameter is (channels-last, for instance), so that updates run
        # straight.
        self._order = {p: [d for _, d in sorted((-stride, d) for d, stride in enumerate(p.stride()))] for p in params}
        self.flat = torch.zeros(sum(p.numel() for p in params), dtype=self.dtype, device=self.device)
        self._segments, self.sums = self._views(self.flat)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pickled views come back with memory of their own: noise and zeroing would no longer reach the sums."""
        self.__dict__.update(state)
        self._segments, self.sums = self._views(self.flat)

    def _views(self, flat: Tensor) -> tuple[dict[Parameter, Tensor], dict[Parameter, Tensor]]:
        """Every parameter's part of ``flat`` as it lies in memory, and in the parameter's shape."""
        params = list(self.parameters.values())
        segments = dict(zip(params, torch.split(flat, [p.numel() for p in params]), strict=True))
        sums = {}
        for p, segment in segments.items():
            order = self._order[p]
            permuted = segment.view([p.shape[d] for d in order])
            sums[p] = permuted.permute([order.index(d) for d in range(p.dim())])
        return segments, sums

    def follow(self) -> None:
        """Empty sums where the parameters are now, if ``module.to(...)`` has moved them."""
        if self._kinds != {(p.dtype, p.device) for p in self.names}:
            self._allocate()

    @_without_autocast
    def add(
        self, uses: Sequence[Use], batch_size: int, mask: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch of ``batch_size`` examples to the sums, times ``scale``; returns norms and factors,
        [groups, batch_size].
        """
        choices = self._choose(uses)
        norms_sq, errors, kept = self._measure(choices, batch_size)
        if not self._any_doubtful(norms_sq, errors):
            norms = norms_sq.sqrt_()
            factors = self._factors(norms, mask)
            self._add(choices, kept, factors, scale)
            return norms, factors
        doubtful = self._doubtful(norms_sq, errors)
        norms = norms_sq
        factors = torch.zeros_like(norms)
        good = (~doubtful).nonzero().squeeze(1)
        if len(good):
            part_mask = None if mask is None else mask[good]
            part = self._choose([use.rows(good, self.dtype) for use in uses])
            part_norms_sq, _, kept = self._measure(part, len(good))
            norms[:, good] = part_norms_sq.sqrt()
            factors[:, good] = self._factors(norms[:, good], part_mask)
            self._add(part, kept, factors[:, good], scale)
        for i in doubtful.nonzero():
            singles = [use.rows(i, torch.float64) for use in uses]
            norms[:, i], factors[:, i] = self._add_singly(singles, mask, i, scale)
        return norms, factors

    @_without_autocast
    def clipped(
        self, uses: Sequence[Use], mask: Tensor, bounds: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`add` does, without a look at any value, so that it can be traced: the sums as a new flat tensor,
        norms and factors [groups, m], and whether any example is doubtful, which makes all the rest worthless.

        ``bounds``: one number tensor per group in place of the floats, which a graph would keep as they are now.
        """
        choices = self._choose(uses)
        norms_sq, errors, kept = self._measure(choices, len(mask))
        norms = norms_sq.sqrt()
        factors = self._factors(norms, mask, bounds)
        flat = torch.zeros_like(self.flat)
        self._add(choices, kept, factors, 1.0, self._views(flat))
        return flat, norms, factors, self._doubtful(norms_sq, errors).any()

    def _choose(self, uses: Sequence[Use]) -> list[Choice]:
        """The choices for the parameters of the sums; others may be recorded too, and are not released."""
        return [choice for choice in choose(uses) if choice.param in self._group]

    def _measure(
        self, choices: Sequence[Choice], batch_size: int
    ) -> tuple[Tensor, Tensor | None, dict[Parameter, Tensor]]:
        """Squared norms [groups, m], the scale of their rounding errors [groups, m] or None, kept gradients [m, n]."""
        norms_sq = torch.zeros((len(self.bounds), batch_size), dtype=self.dtype, device=self.device)
        groups = norms_sq.unbind(0)
        scales: Tensor | None = None
        kept = {}
        for choice in choices:
            group = self._group[choice.param]
            if choice.method == "ghost":
                norm_sq, scale = choice.uses[0].norm_sq(choice.param)
                if scale is not None:
                    scales = torch.zeros_like(norms_sq) if scales is None else scales
                    scales[group] += scale
            else:
                order = [0, *(d + 1 for d in self._order[choice.param])]
                kept[choice.param] = _kept(choice).permute(order).reshape(batch_size, -1)
                norm_sq = torch.linalg.vector_norm(kept[choice.param], dim=1).square_()
            groups[group].add_(norm_sq)
        return norms_sq, scales, kept

    def _any_doubtful(self, norms_sq: Tensor, scales: Tensor | None) -> bool:
        """Whether :meth:`_doubtful` has any example; the usual answer costs the fewest operators."""
        # The sum of squares is below infinity only if each of them is.
        if scales is None and bool(norms_sq.sum() < torch.inf):
            return False
        return bool(self._doubtful(norms_sq, scales).any())

    def _doubtful(self, norms_sq: Tensor, scales: Tensor | None) -> Tensor:
        """[m] bool: examples whose squared norm overflowed, is not a number, or may be rounding error."""
        doubtful = ~(norms_sq < torch.inf)
        if scales is not None:
            doubtful |= scales > TOLERATED_CANCELLATION * norms_sq
        return doubtful.any(0)

    def _factors(self, norms: Tensor, mask: Tensor | None, bounds: Sequence[Any] | None = None) -> Tensor:
        bounds = self.bounds if bounds is None else bounds
        if len(bounds) == 1:
            factors = self.factors(norms[0], bounds[0]).unsqueeze(0)
        else:
            factors = torch.stack([self.factors(norms[i], c) for i, c in enumerate(bounds)])
        return factors if mask is None else factors * mask

    def _add(
        self,
        choices: Sequence[Choice],
        kept: Mapping[Parameter, Tensor],
        factors: Tensor,
        scale: float,
        into: tuple[Mapping[Parameter, Tensor], Mapping[Parameter, Tensor]] | None = None,
    ) -> None:
        """``into``: the views of another flat tensor than the buffer."""
        segments, sums = (self._segments, self.sums) if into is None else into
        if scale != 1.0:
            factors = factors * scale
        for choice in choices:
            of = factors[self._group[choice.param]]
            if choice.method == "ghost":
                choice.uses[0].add_clipped_sum(choice.param, of, sums[choice.param])
            else:
                segments[choice.param].addmv_(kept[choice.param].t(), of)

    def _add_singly(self, uses: Sequence[Use], mask: Tensor | None, i: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """One example by its float64 gradient: exact under cancellation, and 1e30 does not overflow when squared."""
        grads: dict[Parameter, Tensor] = {}
        norms_sq = torch.zeros((len(self.bounds), 1), dtype=torch.float64, device=self.device)
        for use in uses:
            for param in use.params if use.grad is not None else ():
                if param not in self._group:
                    continue
                grad = use.grad_sample(param)[0]
                grads[param] = grads[param] + grad if param in grads else grad
        for param, grad in grads.items():
            norms_sq[self._group[param]] += grad.square().sum()
        norms = norms_sq.sqrt_()
        # The scaled gradient is rounded to the sums' precision, so the margin must be that precision's too.
        rounded = norms / (1.0 - MARGIN_UNITS * torch.finfo(self.dtype).eps)
        factors = self._factors(rounded, None if mask is None else mask[i])
        for param, grad in grads.items():
            factor = factors[self._group[param], 0]
            if factor > 0:
                self.sums[param].add_((grad * (factor * scale)).to(self.dtype))
        return norms.to(self.dtype), factors.to(self.dtype)

    def check_unchanged(self) -> None:
        """PrivacyError where a parameter was frozen since: its sum would no longer be formed."""
        for name, param in self.parameters.items():
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )


def weighted_sum(choice: Choice, weights: Tensor, out: Tensor) -> None:
    """out += Σ_i weights[i] * gradient of example i, for one parameter and weights [B]."""
    if choice.method == "ghost":
        choice.uses[0].add_clipped_sum(choice.param, weights, out)
    else:
        out += torch.tensordot(weights, _kept(choice).to(weights.dtype), dims=1)


def _kept(choice: Choice) -> Tensor:
    """[m, ...] per-sample gradient of a parameter over all its uses."""
    total = choice.uses[0].grad_sample(choice.param)
    for use in choice.uses[1:]:
        total = total + use.grad_sample(choice.param)
    return total
