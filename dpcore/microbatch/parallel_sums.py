"""Clipped sums of ranks that hold a part of every layer each (tensor parallelism), and work on the same examples.

An example's squared norm is the sum of those of the parts, exchanged for all examples of a pass at once; what every
rank holds whole is counted once, as the first rank has it. Factors are then the same on all ranks, and each sums what
is its own, or of its own a shard (:class:`dpcore.reduction.ParallelSharded`). What is released of an example is so no
longer than the clip norm even where ranks would differ in what each holds whole; where they do, the model is none that
was split rightly, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.clipping import Factors
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.accumulator import Accumulator, without_autocast
from dpcore.microbatch.measured import Groups, Measured
from dpcore.microbatch.sharded_sums import Part, ShardedSums
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import gamma
from dpcore.reduction import Parallel, ParallelSharded, Reduction, Sharded

DIFFERENCE = 1e-3
"""Tolerated between squared norms, which on like ranks are the same to the bit."""


class ParallelSums(ShardedSums):
    """Sums of clipped gradients of named ``parameters``, of some of which this rank holds a part."""

    reduction: Parallel  # type: ignore[assignment]

    def _allocate(self) -> None:
        for name, param in self.parameters.items():
            if not param.is_contiguous():
                raise UnsupportedError(
                    f"Parameter {name} does not lie row by row in memory (channels_last?), and some layers of the "
                    "model are tensor-parallel; call contiguous() on it before parallelize_module."
                )
        super()._allocate()

    def _part(self, param: Parameter, shard: Any, offset: int) -> Part:
        part = super()._part(param, shard, offset) if param in self.reduction.split else None
        if isinstance(self.reduction, ParallelSharded):
            own = offset if part is None else 0
            return Part.number(self.reduction.of_shards, param.shape, shard.placements[0].dim, own, part)
        return part or Part(torch.Size([param.numel()]), 0, 1, param.numel(), 0, param.numel(), offset)

    def _bundled(self) -> Any:
        return super()._bundled() if isinstance(self.reduction, ParallelSharded) else ()

    def whole(self) -> dict[Parameter, Tensor]:
        """Return the sums of what every rank holds whole."""
        return {param: summed for param, summed in self._shards().items() if param not in self.reduction.split}

    # ---- norms

    def set_bounds(self, max_grad_norm: float | Sequence[float], noise_multiplier: float = 0.0) -> None:
        super().set_bounds(max_grad_norm, noise_multiplier)
        added = self.reduction.split | self.reduction.of_first
        self._rows = {p: group if p in added else group + len(self.bounds) for p, group in self._group.items()}

    @property
    def _places(self) -> Groups:
        """First the rows that are added up over the ranks, then those that are the same on each."""
        return self._rows

    def _zeros(self, batch_size: int) -> Tensor:
        return torch.zeros((2 * len(self.bounds), batch_size), dtype=self.dtype, device=self.device)

    def _completed(self, measured: Measured) -> Measured:
        mine, ranks, groups = measured.norms_sq, self.reduction.ranks, len(self.bounds)
        scales = torch.zeros_like(mine) if measured.scales is None else measured.scales
        certain = mine if measured.certain is None else measured.certain
        limits = (measured.error, measured.scaled_error, measured.tolerated, float(measured.scales is not None))
        numbers = torch.cat([torch.stack([mine, scales, certain]).double().view(-1), mine.new_tensor(limits).double()])
        everyone = ranks.stacked(numbers.to(ranks.device)).to(mine.device)
        error, scaled_error, any_scales = everyone[:, [-4, -3, -1]].amax(0).tolist()
        parts = everyone[:, :-4].view(ranks.size, 3, 2 * groups, -1)
        self._check_alike(parts[:, :2, groups:])
        norms_sq, scales, certain = (parts[:, :, :groups].sum(0) + parts[0, :, groups:]).to(mine.dtype)
        return Measured(
            norms_sq,
            measured.kept,
            scales if any_scales else None,
            error + gamma(ranks.size + 1, mine.dtype),
            scaled_error,
            float(everyone[:, -2].amin()),
            cancelling=measured.cancelling,
            certain=certain if any_scales else None,
        )

    def _check_alike(self, found: Tensor) -> None:
        """PrivacyError where squared norms and scales [ranks, 2, groups, m] are not those of the first rank."""
        norms_sq, first = found[:, 0], found[:1].sum(1)
        if bool(((norms_sq - norms_sq[:1]).abs() > DIFFERENCE * first).any()):
            raise PrivacyError(
                "The ranks have different gradients of the parameters that each of them holds whole. Either their "
                "examples or targets differ, or they draw other random numbers (dropout: call torch.manual_seed with "
                "one seed on all ranks), or such a parameter is used on activations of which each rank has a part "
                "(sequence parallelism, a norm within attention heads): freeze it, or leave that layer whole."
            )

    # ---- sums

    @without_autocast
    @torch.no_grad()
    def reduce(self) -> None:
        if isinstance(self.reduction, ParallelSharded):
            super().reduce()
            return
        self.reduction.check_no_ordinary_gradient()
        passes, self._waiting = self._waiting, []
        with full_precision():
            for param, summed in self._shards().items() if passes else ():
                for clipped in passes:
                    clipped.add_to(summed.view(param.shape), param, self._group[param])


def accumulator_for(
    parameters: Mapping[str, Parameter], max_grad_norm: float | Sequence[float], factors: Factors, reduction: Reduction
) -> Accumulator:
    """Return what adds up clipped gradients for ``reduction``: in one buffer, in shards, or in parts of layers."""
    if isinstance(reduction, Parallel):
        return ParallelSums(parameters, max_grad_norm, factors, reduction)  # type: ignore[arg-type]
    if isinstance(reduction, Sharded):
        return ShardedSums(parameters, max_grad_norm, factors, reduction)
    return Accumulator(parameters, max_grad_norm, factors)
