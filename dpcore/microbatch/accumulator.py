"""Turning recorded uses into clipped sums: norms, factors, and their accumulation over micro-batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.in_turn import InTurn, Sums
from dpcore.microbatch.planner import Choice, choose
from dpcore.native.parts import Part, Parts
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import (
    BLOCK,
    TOLERATED_WHEN_FORMED,
    SquaredNorm,
    gamma,
    side_by_side,
    squares,
)
from dpcore.rules.linear import wide
from dpcore.tape.uses import Use

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


@dataclass(frozen=True)
class _Kept:
    """Gradients ``rows`` [m, n] of m examples, those of several parameters one after the other, in memory's order."""

    params: tuple[Parameter, ...]
    rows: Tensor

    def of(self, index: Tensor) -> _Kept:
        return _Kept(self.params, self.rows[index])

    def add_sum(self, factors: Tensor, segments: Mapping[Parameter, Tensor]) -> None:
        """Adds Σ_i factors[i] rows[i] to the parameters' ``segments``."""
        if len(self.params) == 1:
            segments[self.params[0]].addmv_(self.rows.t(), factors)
            return
        into = [segments[p] for p in self.params]
        lengths = [len(segment) for segment in into]
        # Beyond them lie the zeros of side_by_side.
        torch._foreach_add_(into, torch.mv(self.rows.t(), factors)[: sum(lengths)].split(lengths))


@dataclass(frozen=True)
class _Together:
    """Gradients of m examples of which kernels add the clipped sums at once; ``index``: which of all B these are."""

    params: tuple[Parameter, ...]
    parts: Parts
    batch_size: int
    index: Tensor | None = None

    def of(self, index: Tensor) -> _Together:
        return _Together(self.params, self.parts, self.batch_size, index)

    def add_sum(self, factors: Tensor, segments: Mapping[Parameter, Tensor]) -> None:
        """Adds Σ_i factors[i] gradient_i to the sums, which the kernels know."""
        if self.index is not None:
            factors = factors.new_zeros(self.batch_size).index_copy_(0, self.index, factors)
        self.parts.add_sums(factors)


@dataclass
class _Measured:
    """``norms_sq`` [groups, m] of m examples; ``kept``: gradients that were formed for them.

    ``scales`` [groups, m]: sums of the absolute terms of those norms whose terms may cancel.

    A true squared norm is at most norms_sq (1 + error) + scaled_error * scales, and worth something while scales are
    at most ``tolerated`` * norms_sq. ``cancelling``: the choices whose norms those are; ``certain`` [groups, m]: the
    squared norms of all others.
    """

    norms_sq: Tensor
    kept: list[_Kept | _Together] = field(default_factory=list)
    scales: Tensor | None = None
    error: float = 0.0
    scaled_error: float = 0.0
    tolerated: float = math.inf
    below_infinity: bool = False
    """True where that is known of ``norms_sq``."""
    cancelling: list[Choice] = field(default_factory=list)
    certain: Tensor | None = None

    def note(self, found: SquaredNorm, group: int) -> None:
        """Adds what rounding may hide of one parameter's norms."""
        if found.scale is None:
            self.error = max(self.error, found.error)
            return
        self.scaled_error = max(self.scaled_error, found.error)
        self.tolerated = min(self.tolerated, found.tolerated)
        self.scales = torch.zeros_like(self.norms_sq) if self.scales is None else self.scales
        self.scales[group] += found.scale

    @functools.cached_property
    def norms(self) -> Tensor:
        """[groups, m]."""
        return self.norms_sq.sqrt()

    def example(self, i: int) -> _Measured:
        """Return what was measured of example i, to which more can be added; its norms lie in these."""
        scales = None if self.scales is None else self.scales[:, i : i + 1]
        return _Measured(self.norms_sq[:, i : i + 1], [], scales, self.error, self.scaled_error, self.tolerated)

    def of(self, index: Tensor) -> _Measured:
        """Return what was measured of the examples ``index`` [k]."""
        scales = None if self.scales is None else self.scales[:, index]
        return _Measured(self.norms_sq[:, index], [], scales, self.error, self.scaled_error, self.tolerated)

    def upper_norms(self) -> Tensor:
        """[groups, m], not below the true ones but for ``error``."""
        if self.scales is None:
            return self.norms
        return torch.add(self.norms_sq, self.scales, alpha=self.scaled_error).sqrt_()


MOST_TOGETHER = 2**14
"""Numbers in gradients that are put side by side, so that norms and sums of many of them take a few operators."""
LARGE_BUFFER = 2**18
"""Numbers in a buffer that is not copied: the views of a new one take less time."""


@dataclass(frozen=True)
class _Buffer:
    """``flat`` [n], and every parameter's part of it as it lies in memory and in the parameter's shape."""

    flat: Tensor
    segments: dict[Parameter, Tensor]
    sums: dict[Parameter, Tensor]


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
        self._allocate()
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

    def _allocate(self) -> None:
        """One flat buffer for all sums, so that noise and scaling are one pass each."""
        params = list(self.parameters.values())
        self._kinds = {(p.dtype, p.device) for p in params}
        self._strides = [p.stride() for p in params]
        dtypes = {torch.promote_types(p.dtype, torch.float32) for p in params}
        devices = {p.device for p in params}
        if any(dtype.is_complex for dtype in dtypes):
            raise UnsupportedError(
                "A trained parameter is complex, and norms, sums and noise are those of real numbers; keep its real "
                "and imaginary parts as one real parameter [..., 2], and look at it through torch.view_as_complex."
            )
        if len(dtypes) > 1 or len(devices) > 1:
            raise UnsupportedError(
                f"The trained parameters have dtypes {sorted(map(str, dtypes))} on {sorted(map(str, devices))}; "
                f"bring the "
                "model to one precision and one device with model.to(...)."
            )
        self.dtype, self.device = dtypes.pop(), devices.pop()
        self._narrowest = min((p.dtype for p in params), key=lambda dtype: torch.finfo(dtype).max)
        # In memory each sum is laid out as its parameter is (channels-last, for instance), so that updates run
        # straight.
        self._order = {p: [d for _, d in sorted((-stride, d) for d, stride in enumerate(p.stride()))] for p in params}
        self._numbers = sum(p.numel() for p in params)
        self._buffer: _Buffer | None = None

    @property
    def _held(self) -> _Buffer:
        """The buffer, which has memory from its first use on."""
        if self._buffer is None:
            flat = torch.zeros(self._numbers, dtype=self.dtype, device=self.device)
            self._buffer = _Buffer(flat, *self._views(flat))
        return self._buffer

    @property
    def flat(self) -> Tensor:
        """[n]: all sums, one after the other."""
        return self._held.flat

    @property
    def sums(self) -> dict[Parameter, Tensor]:
        """Every parameter's sum, a view of ``flat`` in the parameter's shape."""
        return self._held.sums

    def clear(self) -> None:
        """Make the sums zero."""
        if self._buffer is not None:
            self._buffer.flat.zero_()

    def hand_over(self) -> dict[Parameter, Tensor]:
        """Return the sums in their parameters' precisions as gradients that are the caller's; the next ones are zero.

        Where they are large they are not copied: a buffer is made anew when the next batch is added, and none is held
        during the forward and backward passes.
        """
        sums = self.sums
        if self._numbers < LARGE_BUFFER:
            grads = {param: summed.to(param.dtype, copy=True) for param, summed in sums.items()}
            self.clear()
            return grads
        self._buffer = None
        return {param: summed.to(param.dtype) for param, summed in sums.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Views would come back with memory of their own: noise and zeroing would no longer reach the sums."""
        return {**self.__dict__, "_buffer": None if self._buffer is None else self._buffer.flat}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        flat = state["_buffer"]
        self._buffer = None if flat is None else _Buffer(flat, *self._views(flat))

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

    @property
    def lies_otherwise(self) -> bool:
        """Whether a parameter has another order in memory than its sum, which rules write in memory's order."""
        return self._strides != [p.stride() for p in self.parameters.values()]

    def follow(self) -> None:
        """Empty sums where the parameters are now, if ``module.to(...)`` has moved them or turned them in memory."""
        if self._kinds != {(p.dtype, p.device) for p in self.names} or self.lies_otherwise:
            self._allocate()
            self.set_bounds(self.bounds if len(self.bounds) > 1 else self.bounds[0])

    @_without_autocast
    def add(
        self, uses: Sequence[Use], batch_size: int, mask: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch of ``batch_size`` examples to the sums, times ``scale``; returns norms and factors,
        [groups, batch_size].
        """
        choices = self._choose(uses)
        in_turn = [choice for choice in choices if choice.method == "turn"]
        others = [choice for choice in choices if choice.method != "turn"]
        measured = self._measure(others, batch_size)
        if in_turn:
            return self._add_by_example(uses, in_turn, others, measured, mask, scale)
        factors, wrong = self._rate(measured, mask)
        # One look at both: on a GPU each would wait for the device.
        if self._any_doubtful(measured, wrong):
            self._check_rule(measured, wrong, self._doubtful(measured))
            return self._add_by_example(uses, in_turn, others, measured, mask, scale)
        self._add(others, measured.kept, factors, scale)
        return measured.norms, factors

    def _add_by_example(
        self,
        uses: Sequence[Use],
        in_turn: Sequence[Choice],
        others: Sequence[Choice],
        measured: _Measured,
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
            doubtful = self._doubtful(measured)
            waiting, good = doubtful.nonzero().squeeze(1).tolist(), (~doubtful).nonzero().squeeze(1)
            if len(good):
                factors[:, good] = self._factors(measured.of(good), None if mask is None else mask[good])
        large = InTurn(in_turn, self._where)
        measured.error = max(measured.error, large.error)
        cancelling: InTurn | None = None
        with full_precision():
            for i in waiting:
                one, turns = measured.example(i), [large]
                # By themselves where they may have to be added to what is certain.
                own = torch.zeros_like(one.norms_sq) if measured.cancelling else one.norms_sq
                self._form_in_turn(large, i, own, one)
                if measured.cancelling:
                    one.norms_sq += own
                if self._any_doubtful(one):
                    if not self._is_worth_forming(one):
                        left[i] = True
                        continue
                    assert measured.certain is not None
                    cancelling = cancelling or InTurn(measured.cancelling, self._where)
                    exact = _Measured(measured.certain[:, i : i + 1] + own, error=max(one.error, cancelling.error))
                    self._form_in_turn(cancelling, i, exact.norms_sq, exact)
                    if self._any_doubtful(exact):
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

    @staticmethod
    def _form_in_turn(turn: InTurn, i: int, norms_sq: Tensor, measured: _Measured) -> None:
        """Add the squared norms of example i to ``norms_sq`` [groups, 1], and their errors to ``measured``."""
        for found, group in turn.form(i, norms_sq):
            norms_sq[group] += found.value
            measured.note(found, group)

    def _is_worth_forming(self, measured: _Measured) -> bool:
        """Return whether one example's gradients can be formed in the precision of the sums: of extreme ones, and of
        positions that cancel nearly all, too little would be left.
        """
        norms_sq, scales = measured.norms_sq, measured.scales
        if scales is None or not bool((norms_sq < torch.inf).all()):
            return False
        return bool((scales <= TOLERATED_WHEN_FORMED * norms_sq).all())

    def _add_others(
        self,
        uses: Sequence[Use],
        others: Sequence[Choice],
        measured: _Measured,
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

    @_without_autocast
    def clipped(
        self, uses: Sequence[Use], mask: Tensor, bounds: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute what :meth:`add` does without looking at any value, so that it can be traced.

        ``bounds``: one number tensor per group in place of the floats, which a graph would keep as they are now.
        Returns the sums as a new flat tensor, norms and factors [groups, m], and whether any example is doubtful or any
        factor wrong, which makes all the rest worthless.
        """
        choices = self._choose(uses, turns=False)
        measured = self._measure(choices, len(mask), together=False)
        factors, wrong = self._rate(measured, mask, bounds)
        flat = torch.zeros(self._numbers, dtype=self.dtype, device=self.device)
        self._add(choices, measured.kept, factors, 1.0, self._views(flat))
        doubtful = self._doubtful(measured).any()
        # Where a factor is wrong the eager pass, which comes next, says so.
        return flat, measured.norms, factors, doubtful if wrong is None else doubtful | wrong.any()

    def _choose(self, uses: Sequence[Use], turns: bool = True) -> list[Choice]:
        """The choices for the parameters of the sums; others may be recorded too, and are not released."""
        return [choice for choice in choose(uses, turns) if choice.param in self._group]

    def _measure(self, choices: Sequence[Choice], batch_size: int, together: bool = True) -> _Measured:
        """The norms of ``batch_size`` examples, and the gradients that were formed for them.

        ``together``: whether small ones may be put side by side.
        """
        norms_sq = torch.zeros((len(self.bounds), batch_size), dtype=self.dtype, device=self.device)
        measured = _Measured(norms_sq)
        together = together and len(self.bounds) == 1
        if together and self.dtype == torch.float32 and native.serves(norms_sq):
            choices = self._measure_together(choices, measured, batch_size)
        if not choices:
            return measured
        formed = self._form(choices, batch_size, together)
        measured.kept += formed
        measured.below_infinity = False
        groups = norms_sq.unbind(0)
        with full_precision():
            for kept in formed:
                self._note(measured, groups, squares(kept.rows), kept.params[0])
            ghosts = [(c, c.uses[0].norm_sq(c.param)) for c in choices if c.method == "ghost"]
            for choice, found in ghosts:
                if found.scale is None:
                    self._note(measured, groups, found, choice.param)
            measured.cancelling = [choice for choice, found in ghosts if found.scale is not None]
            if measured.cancelling:
                measured.certain = norms_sq.clone()
            for choice, found in ghosts:
                if found.scale is not None:
                    self._note(measured, groups, found, choice.param)
        return measured

    def _measure_together(self, choices: Sequence[Choice], measured: _Measured, batch_size: int) -> list[Choice]:
        """Adds the norms of what kernels take in one call, and returns the other choices."""
        others: list[Choice] = []
        parts: list[Part] = []
        targets: list[Tensor] = []
        params: list[Parameter] = []
        held = self._held
        for choice in choices:
            param = choice.param
            part = choice.uses[0].for_kernels(param, choice.method == "keep") if len(choice.uses) == 1 else None
            if part is None:
                others.append(choice)
                continue
            parts.append(part)
            params.append(param)
            targets.append((held.sums if part.x is not None else held.segments)[param])
        if not parts:
            return others
        found = Parts(parts, targets, batch_size)
        measured.below_infinity = found.add_norms(measured.norms_sq)
        # Float64's own is far below; but what is released is to be the same with and without kernels.
        measured.error = max(measured.error, gamma(BLOCK + 4, self.dtype))
        measured.kept.append(_Together(tuple(params), found, batch_size))
        return others

    def _note(self, measured: _Measured, groups: Sequence[Tensor], found: SquaredNorm, param: Parameter) -> None:
        """Adds squared norms of one parameter, or of several of one group."""
        group = self._group[param]
        groups[group].add_(found.value)
        measured.note(found, group)

    def _form(self, choices: Sequence[Choice], batch_size: int, together: bool) -> list[_Kept]:
        """The gradients of ``batch_size`` examples that are kept, small ones side by side."""
        formed: list[_Kept] = []
        small: list[_Kept] = []
        for choice in choices:
            if choice.method == "keep":
                order = [0, *(d + 1 for d in self._order[choice.param])]
                kept = _Kept((choice.param,), kept_gradient(choice).permute(order).reshape(batch_size, -1))
                (small if together and choice.param.numel() <= MOST_TOGETHER else formed).append(kept)
        if len(small) < 2:
            return formed + small
        return [*formed, _Kept(tuple(kept.params[0] for kept in small), side_by_side([kept.rows for kept in small]))]

    def _any_doubtful(self, measured: _Measured, wrong: Tensor | None = None) -> bool:
        """Return whether :meth:`_doubtful` has any example, or any factor is ``wrong``.

        The usual answer costs the fewest operators.
        """
        if wrong is not None:
            return bool((self._doubtful(measured) | wrong).any())
        # The sum of squares is below infinity only if each of them is.
        if measured.scales is None and (measured.below_infinity or bool(measured.norms_sq.sum() < torch.inf)):
            return False
        return bool(self._doubtful(measured).any())

    def _doubtful(self, measured: _Measured) -> Tensor:
        """[m] bool: examples whose squared norm overflowed, is not a number, or may be rounding error."""
        doubtful = ~(measured.norms_sq < torch.inf)
        if measured.scales is not None:
            doubtful |= measured.scales > measured.tolerated * measured.norms_sq
        return doubtful.any(0)

    def _factors(self, measured: _Measured, mask: Tensor | None) -> Tensor:
        """Return the clip factors; PrivacyError where a user's rule gives wrong ones."""
        factors, wrong = self._rate(measured, mask)
        self._check_rule(measured, wrong)
        return factors

    def _rate(
        self, measured: _Measured, mask: Tensor | None, bounds: Sequence[Any] | None = None
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

    def _share(self, measured: _Measured) -> float:
        """How much of C is left to a rule, given what rounding may hide."""
        return bound_with_margin(1.0, measured.error + gamma(len(self.parameters) + 2, self.dtype), self.dtype)

    def _check_rule(self, measured: _Measured, wrong: Tensor | None, doubtful: Tensor | None = None) -> None:
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
        kept: Sequence[_Kept | _Together],
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
            added = {param for formed in kept for param in formed.params}
            for choice in choices:
                if choice.method == "ghost" and choice.param not in added:
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
        measured = _Measured(norms_sq)
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

    def check_unchanged(self) -> None:
        """PrivacyError where a parameter was frozen since: its sum would no longer be formed."""
        for name, param in self.parameters.items():
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )


def weighted_sum(choice: Choice, weights: Tensor, out: Tensor) -> None:
    """Out += Σ_i weights[i] * gradient of example i, for one parameter and weights [B]."""
    if choice.method != "keep":
        for use in choice.uses:
            use.add_clipped_sum(choice.param, weights, out)
    else:
        out += torch.tensordot(weights, kept_gradient(choice).to(weights.dtype), dims=1)


def kept_gradient(choice: Choice) -> Tensor:
    """Return the [m, ...] per-sample gradient of a parameter over all its uses."""
    total = wide(choice.uses[0].grad_sample(choice.param))
    for use in choice.uses[1:]:
        total = total + use.grad_sample(choice.param)
    return total
