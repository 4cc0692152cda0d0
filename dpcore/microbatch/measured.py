"""The norms of a micro-batch's examples, and the gradients that were formed for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore import native
from dpcore.microbatch.in_turn import InTurn
from dpcore.microbatch.planner import Choice
from dpcore.microbatch.sum_buffer import Buffer
from dpcore.native.parts import Part, Parts
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import TOLERATED_WHEN_FORMED, SquaredNorm, gamma, side_by_side, squares
from dpcore.rules.linear import wide

Groups = Mapping[Parameter, int]
Orders = Mapping[Parameter, list[int]]
MOST_TOGETHER = 2**14
"""Numbers in gradients that are put side by side, so that norms and sums of many of them take a few operators."""


@dataclass(frozen=True)
class Kept:
    """Gradients ``rows`` [m, n] of m examples, those of several parameters one after the other, in memory's order."""

    params: tuple[Parameter, ...]
    rows: Tensor

    def of(self, index: Tensor) -> Kept:
        return Kept(self.params, self.rows[index])

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
class Together:
    """Gradients of m examples of which kernels add the clipped sums at once; ``index``: which of all B these are."""

    params: tuple[Parameter, ...]
    parts: Parts
    batch_size: int
    index: Tensor | None = None

    def of(self, index: Tensor) -> Together:
        return Together(self.params, self.parts, self.batch_size, index)

    def add_sum(self, factors: Tensor, segments: Mapping[Parameter, Tensor]) -> None:
        """Adds Σ_i factors[i] gradient_i to the sums, which the kernels know."""
        if self.index is not None:
            factors = factors.new_zeros(self.batch_size).index_copy_(0, self.index, factors)
        self.parts.add_sums(factors)


@dataclass
class Measured:
    """``norms_sq`` [groups, m] of m examples; ``kept``: gradients that were formed for them.

    ``scales`` [groups, m]: sums of the absolute terms of those norms whose terms may cancel.

    A true squared norm is at most norms_sq (1 + error) + scaled_error * scales, and worth something while scales are
    at most ``tolerated`` * norms_sq. ``cancelling``: the choices whose norms those are; ``certain`` [groups, m]: the
    squared norms of all others.
    """

    norms_sq: Tensor
    kept: list[Kept | Together] = field(default_factory=list)
    scales: Tensor | None = None
    error: float = 0.0
    scaled_error: float = 0.0
    tolerated: float = math.inf
    below_infinity: bool = False
    """True where that is known of ``norms_sq``."""
    cancelling: list[Choice] = field(default_factory=list)
    certain: Tensor | None = None

    @functools.cached_property
    def _groups(self) -> Sequence[Tensor]:
        return self.norms_sq.unbind(0)

    def add(self, found: SquaredNorm, group: int) -> None:
        """Add squared norms of one parameter, or of several of one group."""
        self._groups[group].add_(found.value)
        self.note(found, group)

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

    def example(self, i: int) -> Measured:
        """Return what was measured of example i, to which more can be added; its norms lie in these."""
        scales = None if self.scales is None else self.scales[:, i : i + 1]
        return Measured(self.norms_sq[:, i : i + 1], [], scales, self.error, self.scaled_error, self.tolerated)

    def of(self, index: Tensor) -> Measured:
        """Return what was measured of the examples ``index`` [k]."""
        scales = None if self.scales is None else self.scales[:, index]
        return Measured(self.norms_sq[:, index], [], scales, self.error, self.scaled_error, self.tolerated)

    def upper_norms(self) -> Tensor:
        """[groups, m], not below the true ones but for ``error``."""
        if self.scales is None:
            return self.norms
        return torch.add(self.norms_sq, self.scales, alpha=self.scaled_error).sqrt_()

    def any_doubtful(self, wrong: Tensor | None = None) -> bool:
        """Return whether :meth:`doubtful` has any example, or any factor is ``wrong``.

        The usual answer costs the fewest operators.
        """
        if wrong is not None:
            return bool((self.doubtful() | wrong).any())
        # The sum of squares is below infinity only if each of them is.
        if self.scales is None and (self.below_infinity or bool(self.norms_sq.sum() < torch.inf)):
            return False
        return bool(self.doubtful().any())

    def doubtful(self) -> Tensor:
        """[m] bool: examples whose squared norm overflowed, is not a number, or may be rounding error."""
        doubtful = ~(self.norms_sq < torch.inf)
        if self.scales is not None:
            doubtful |= self.scales > self.tolerated * self.norms_sq
        return doubtful.any(0)

    def is_worth_forming(self) -> bool:
        """Return whether one example's gradients can be formed in the precision of the sums: of extreme ones, and of
        positions that cancel nearly all, too little would be left.
        """
        norms_sq, scales = self.norms_sq, self.scales
        if scales is None or not bool((norms_sq < torch.inf).all()):
            return False
        return bool((scales <= TOLERATED_WHEN_FORMED * norms_sq).all())

    def form_in_turn(self, turn: InTurn, i: int, norms_sq: Tensor) -> None:
        """Add the squared norms of example i to ``norms_sq`` [groups, 1], and their errors to these."""
        for found, group in turn.form(i, norms_sq):
            norms_sq[group] += found.value
            self.note(found, group)


def measure(
    choices: Sequence[Choice], norms_sq: Tensor, groups: Groups, orders: Orders, buffer: Buffer | None
) -> Measured:
    """Return the norms of examples, and the gradients that were formed for them.

    Args:
        choices: How each parameter's norms are to be found.
        norms_sq: Zeros [groups, examples], which are filled in.
        groups: The number of the bound that a parameter counts for.
        orders: The order of its dimensions in memory.
        buffer: Where the sums will be added; None where small gradients may not be put side by side.
    """
    measured, batch_size = Measured(norms_sq), norms_sq.shape[1]
    together = buffer is not None and len(norms_sq) == 1
    if buffer is not None and together and norms_sq.dtype == torch.float32 and native.serves(norms_sq):
        choices = _measure_together(choices, measured, batch_size, buffer)
    if not choices:
        return measured
    formed = _form(choices, orders, batch_size, together)
    measured.kept += formed
    measured.below_infinity = False
    with full_precision():
        for kept in formed:
            measured.add(squares(kept.rows), groups[kept.params[0]])
        ghosts = [(c, c.uses[0].norm_sq(c.param)) for c in choices if c.method == "ghost"]
        for choice, found in ghosts:
            if found.scale is None:
                measured.add(found, groups[choice.param])
        measured.cancelling = [choice for choice, found in ghosts if found.scale is not None]
        if measured.cancelling:
            measured.certain = norms_sq.clone()
        for choice, found in ghosts:
            if found.scale is not None:
                measured.add(found, groups[choice.param])
    return measured


def _measure_together(choices: Sequence[Choice], measured: Measured, batch_size: int, held: Buffer) -> list[Choice]:
    """Adds the norms of what kernels take in one call, and returns the other choices."""
    others: list[Choice] = []
    parts: list[Part] = []
    targets: list[Tensor] = []
    params: list[Parameter] = []
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
    roundings = max(part.roundings for part in parts)
    measured.error = max(measured.error, gamma(roundings, measured.norms_sq.dtype))
    measured.kept.append(Together(tuple(params), found, batch_size))
    return others


def _form(choices: Sequence[Choice], orders: Orders, batch_size: int, together: bool) -> list[Kept]:
    """The gradients of ``batch_size`` examples that are kept, small ones side by side."""
    formed: list[Kept] = []
    small: list[Kept] = []
    for choice in choices:
        if choice.method == "keep":
            order = [0, *(d + 1 for d in orders[choice.param])]
            kept = Kept((choice.param,), kept_gradient(choice).permute(order).reshape(batch_size, -1))
            (small if together and choice.param.numel() <= MOST_TOGETHER else formed).append(kept)
    if len(small) < 2:
        return formed + small
    return [*formed, Kept(tuple(kept.params[0] for kept in small), side_by_side([kept.rows for kept in small]))]


def kept_gradient(choice: Choice) -> Tensor:
    """Return the [m, ...] per-sample gradient of a parameter over all its uses."""
    total = wide(choice.uses[0].grad_sample(choice.param))
    for use in choice.uses[1:]:
        total = total + use.grad_sample(choice.param)
    return total
