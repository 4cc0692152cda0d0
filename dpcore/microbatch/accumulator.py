"""Turning recorded uses into clipped sums: norms, factors, and their accumulation over micro-batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore import native
from dpcore.clipping import (
    Factors,
    bound_with_margin,
    check_max_grad_norm,
    check_noise,
    clip_factors,
    factors_of_own_rule,
    is_proven,
    largest_max_grad_norm,
    refuse_factor,
)
from dpcore.microbatch.in_turn import InTurn, Sums
from dpcore.microbatch.measured import Kept, Measured, Together, kept_gradient, measure
from dpcore.microbatch.planner import Choice, Choices
from dpcore.microbatch.sum_buffer import SumBuffer
from dpcore.native.parts import clip_factors as clip_by_kernel
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import (
    gamma,
    squares,
)
from dpcore.tape.uses import Use

Method = TypeVar("Method", bound=Callable[..., Any])


def without_autocast(method: Method) -> Method:
    """A forward pass may run in bfloat16; norms that decide on clipping, and what is clipped, are taken in full."""

    @functools.wraps(method)
    def run(self: Accumulator, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args, **kwargs)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Accumulator(SumBuffer):
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
        super().__init__(parameters)
        self.factors, self._choices = factors, Choices()
        self.set_bounds(max_grad_norm)

    def set_bounds(self, max_grad_norm: float | Sequence[float], noise_multiplier: float = 0.0) -> None:
        """Groups of parameters that are clipped together: all of them, or each on its own.

        Args:
            max_grad_norm: One bound, or one per parameter.
            noise_multiplier: σ, whose product with the bounds the parameters have to hold.

        Raises:
            ValueError: a bound is out of its range, or there are too many or too few. The former ones stay.
        """
        each = isinstance(max_grad_norm, Sequence) and not isinstance(max_grad_norm, str)
        bounds = tuple(check_max_grad_norm(c, self.dtype) for c in (max_grad_norm if each else (max_grad_norm,)))  # type: ignore[union-attr]
        if each and len(bounds) != len(self.parameters):
            raise ValueError(
                f"max_grad_norm has {len(bounds)} bounds for {len(self.parameters)} trained parameters; give one per "
                "parameter, or a single number."
            )
        self._check_noise(noise_multiplier, math.hypot(*bounds))
        self.bounds = bounds
        self._group = {p: i if each else 0 for i, p in enumerate(self.parameters.values())}

    def largest_bound(self, noise_multiplier: float) -> float:
        """Return the largest single bound that :meth:`set_bounds` takes beside noise of this σ."""
        return largest_max_grad_norm(noise_multiplier, self.dtype, self._narrowest)

    def check_noise(self, noise_multiplier: float, scale: float = 1.0) -> float:
        """Return the noise's standard deviation, times ``scale``; ValueError where a parameter cannot hold it."""
        return self._check_noise(noise_multiplier, self.sensitivity, scale)

    def _check_noise(self, noise_multiplier: float, sensitivity: float, scale: float = 1.0) -> float:
        std = noise_multiplier * sensitivity * scale
        check_noise(noise_multiplier, sensitivity, std, self._narrowest)
        return std

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return math.hypot(*self.bounds)

    def follow(self) -> bool:
        if moved := super().follow():
            self.set_bounds(self.bounds if len(self.bounds) > 1 else self.bounds[0])
        return moved

    @without_autocast
    def add(
        self, uses: Sequence[Use], batch_size: int, mask: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch of ``batch_size`` examples to the sums, times ``scale``; returns norms and factors,
        [groups, batch_size].
        """
        choices = self._choose(uses)
        in_turn = [choice for choice in choices if choice.method == "turn"]
        others = [choice for choice in choices if choice.method != "turn"]
        measured = measure(others, self._zeros(batch_size), self._group, self._order, self._held)
        if in_turn:
            return self._add_by_example(uses, in_turn, others, measured, mask, scale)
        if mask is None and self.factors is clip_factors and _is_for_kernel(measured):
            factors, scaled, below = clip_by_kernel(measured.norms, self.bounds[0] * self._share(measured), scale)
            if below:
                self._add(others, measured.kept, scaled, 1.0)
                return measured.norms, factors
        factors, wrong = self._rate(measured, mask)
        # One look at both: on a GPU each would wait for the device.
        if measured.any_doubtful(wrong):
            self._check_rule(measured, wrong, measured.doubtful())
            return self._add_by_example(uses, in_turn, others, measured, mask, scale)
        self._add(others, measured.kept, factors, scale)
        return measured.norms, factors

    def _add_by_example(
        self,
        uses: Sequence[Use],
        in_turn: Sequence[Choice],
        others: Sequence[Choice],
        measured: Measured,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`add` where some gradients are too large to be formed for all examples at once, or some norms cancel.

        The large ones come last, example by example: with their squares an example's norm is complete, and they are
        added to the sums at its factor before the next example's are formed. An example whose norm is then mostly
        rounding has the gradients formed of which only norms were taken. What happens to an example depends on its own
        numbers alone.
        """
        factors = torch.zeros_like(measured.norms_sq)
        left, formed = (torch.zeros(factors.shape[1], dtype=torch.bool, device=self.device) for _ in range(2))
        waiting: Sequence[int] = range(len(left))
        if not in_turn:
            doubtful = measured.doubtful()
            waiting, good = doubtful.nonzero().squeeze(1).tolist(), (~doubtful).nonzero().squeeze(1)
            if len(good):
                factors[:, good] = self._factors(measured.of(good), None if mask is None else mask[good])
        large = InTurn(in_turn, self._where)
        measured.error = max(measured.error, large.error)
        if len(self.bounds) == 1 and self.factors is clip_factors and measured.scales is None and mask is None:
            bound = self.bounds[0] * self._share(measured)
            waiting = waiting[large.clip(measured.norms_sq[0], factors[0], bound, scale) :]
        cancelling: InTurn | None = None
        with full_precision():
            for i in waiting:
                one, turns = measured.example(i), [large]
                # By themselves where they may have to be added to what is certain.
                own = torch.zeros_like(one.norms_sq) if measured.cancelling else one.norms_sq
                one.form_in_turn(large, i, own)
                if measured.cancelling:
                    one.norms_sq += own
                if one.any_doubtful():
                    if not one.is_worth_forming():
                        left[i] = True
                        continue
                    assert measured.certain is not None
                    cancelling = cancelling or InTurn(measured.cancelling, self._where)
                    exact = Measured(measured.certain[:, i : i + 1] + own, error=max(one.error, cancelling.error))
                    exact.form_in_turn(cancelling, i, exact.norms_sq)
                    if exact.any_doubtful():
                        left[i] = True
                        continue
                    one.norms_sq.copy_(exact.norms_sq)
                    one, turns, formed[i] = exact, [large, cancelling], True
                factors[:, i : i + 1] = self._factors(one, None if mask is None else mask[i : i + 1])
                of = (factors[:, i] * scale).tolist()
                for turn in turns:
                    turn.add(of)
        self._add_others(uses, others, measured, factors, formed, left, scale)
        norms = measured.norms
        self._add_doubtful(uses, left, mask, scale, norms, factors)
        return norms, factors

    @property
    def _where(self) -> Sums:
        return Sums(self._held.segments, self._order, self._group, self.dtype)

    def _add_others(
        self,
        uses: Sequence[Use],
        others: Sequence[Choice],
        measured: Measured,
        factors: Tensor,
        formed: Tensor,
        left: Tensor,
        scale: float,
    ) -> None:
        """Add what is not added example by example; of the examples ``formed`` [m] not what cancels."""
        kept = measured.kept
        if not bool((measured.norms_sq < torch.inf).all()):
            # Not at a factor of zero beside the good ones: zero times infinity is none.
            good = (~left).nonzero().squeeze(1)
            if not len(good):
                return
            methods = {choice.param: choice.method for choice in others}
            chosen = self._choose([use.rows(good, self.dtype) for use in uses])
            # By the methods by which they were measured: uses of fewer rows may be of another kind.
            others = [replace(c, method=methods[c.param]) for c in chosen if c.param in methods]
            kept, factors, formed = [part.of(good) for part in kept], factors[:, good], formed[good]
        cancelling = {choice.param for choice in measured.cancelling}
        certain = [choice for choice in others if choice.param not in cancelling]
        self._add(certain, kept, factors, scale)
        rest = [choice for choice in others if choice.param in cancelling]
        if rest and not bool(formed.all()):
            self._add(rest, [], factors.masked_fill(formed, 0.0), scale)

    def _add_doubtful(
        self, uses: Sequence[Use], doubtful: Tensor, mask: Tensor | None, scale: float, norms: Tensor, factors: Tensor
    ) -> None:
        """Adds the ``doubtful`` examples [m], each by itself, and fills in their norms and factors."""
        for i in doubtful.nonzero():
            singles = [use.rows(i, torch.float64) for use in uses]
            norms[:, i], factors[:, i] = self._add_singly(singles, mask, i, scale)

    @without_autocast
    def clipped(
        self, uses: Sequence[Use], mask: Tensor, bounds: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute what :meth:`add` does without looking at any value, so that it can be traced.

        ``bounds``: one number tensor per group in place of the floats, which a graph would keep as they are now.
        Returns the sums as a new flat tensor, norms and factors [groups, m], and whether any example is doubtful or any
        factor wrong, which makes all the rest worthless.
        """
        choices = self._choose(uses, turns=False)
        measured = measure(choices, self._zeros(len(mask)), self._group, self._order, None)
        factors, wrong = self._rate(measured, mask, bounds)
        flat = torch.zeros(self._numbers, dtype=self.dtype, device=self.device)
        self._add(choices, measured.kept, factors, 1.0, self._views(flat))
        doubtful = measured.doubtful().any()
        # Where a factor is wrong the eager pass, which comes next, says so.
        return flat, measured.norms, factors, doubtful if wrong is None else doubtful | wrong.any()

    def _zeros(self, batch_size: int) -> Tensor:
        return torch.zeros((len(self.bounds), batch_size), dtype=self.dtype, device=self.device)

    def _choose(self, uses: Sequence[Use], turns: bool = True) -> list[Choice]:
        """The choices for the parameters of the sums; others may be recorded too, and are not released."""
        known = {id(param) for param in self._group}
        return [choice for choice in self._choices(uses, turns) if id(choice.param) in known]

    def _factors(self, measured: Measured, mask: Tensor | None) -> Tensor:
        """Return the clip factors; PrivacyError where a user's rule gives wrong ones."""
        factors, wrong = self._rate(measured, mask)
        self._check_rule(measured, wrong)
        return factors

    def _rate(
        self, measured: Measured, mask: Tensor | None, bounds: Sequence[Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The clip factors, by the clipping rule, from upper bounds of the norms; and where a user's rule is wrong.

        The rule is given a norm that is at most the true one times 1 + error / 2, and a C that is lower by that much.
        """
        upper, share = measured.upper_norms(), self._share(measured)
        bounds = self.bounds if bounds is None else bounds
        if is_proven(self.factors):
            rated = [self.factors(upper[i], c * share) for i, c in enumerate(bounds)]
            wrong = None
        else:
            found = [factors_of_own_rule(self.factors, upper[i], c * share, c) for i, c in enumerate(bounds)]
            rated = [factors for factors, _ in found]
            wrong = torch.stack([wrong for _, wrong in found])
        factors = rated[0].unsqueeze(0) if len(rated) == 1 else torch.stack(rated)
        return (factors if mask is None else factors * mask), wrong

    def _share(self, measured: Measured) -> float:
        """How much of C is left to a rule, given what rounding may hide."""
        return bound_with_margin(1.0, measured.error + gamma(len(self.parameters) + 2, self.dtype), self.dtype)

    def _check_rule(self, measured: Measured, wrong: Tensor | None, doubtful: Tensor | None = None) -> None:
        """PrivacyError where a factor is ``wrong`` [groups, m] whose example's norm is not ``doubtful`` [m]."""
        if wrong is None:
            return
        wrong = wrong if doubtful is None else wrong & ~doubtful
        places = wrong.nonzero()
        if len(places):
            group, i = places[0].tolist()
            c = self.bounds[group]
            refuse_factor(self.factors, measured.upper_norms()[group], i, c * self._share(measured), c)

    def _add(
        self,
        choices: Sequence[Choice],
        kept: Sequence[Kept | Together],
        factors: Tensor,
        scale: float,
        into: tuple[Mapping[Parameter, Tensor], Mapping[Parameter, Tensor]] | None = None,
    ) -> None:
        """``into``: the views of another flat tensor than the buffer."""
        segments, sums = (self._held.segments, self.sums) if into is None else into
        if scale != 1.0:
            factors = factors * scale
        with full_precision():
            for formed in kept:
                formed.add_sum(factors[self._group[formed.params[0]]], segments)
            added = {id(param) for formed in kept for param in formed.params}
            for choice in choices:
                if choice.method == "ghost" and id(choice.param) not in added:
                    of = factors[self._group[choice.param]]
                    choice.uses[0].add_clipped_sum(choice.param, of, sums[choice.param])

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
        measured = Measured(norms_sq)
        for param, grad in grads.items():
            found = squares(grad.reshape(1, -1))
            norms_sq[self._group[param]] += found.value
            measured.note(found, self._group[param])
        norms = measured.norms
        # The margin is that of the sums' precision: the scaled gradient is rounded to it.
        factors = self._factors(measured, None if mask is None else mask[i])
        for param, grad in grads.items():
            factor = factors[self._group[param], 0]
            if factor > 0:
                self.sums[param].add_((grad * (factor * scale)).to(self.dtype))
        return norms.to(self.dtype), factors.to(self.dtype)


def _is_for_kernel(measured: Measured) -> bool:
    """Return whether a kernel computes flat clipping's factors: where one bound is for norms whose terms all add up."""
    return measured.scales is None and len(measured.norms_sq) == 1 and native.serves(measured.norms_sq)


def weighted_sum(choice: Choice, weights: Tensor, out: Tensor) -> None:
    """Out += Σ_i weights[i] * gradient of example i, for one parameter and weights [B]."""
    if choice.method != "keep":
        for use in choice.uses:
            use.add_clipped_sum(choice.param, weights, out)
    else:
        out += torch.tensordot(weights, kept_gradient(choice).to(weights.dtype), dims=1)
