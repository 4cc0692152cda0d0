"""Clipped sums that no rank holds whole: formed for a few parameters at a time, added up over the ranks, dealt out.

Flat clipping needs an example's norm over all layers before any layer is summed. So a pass first gives norms and
factors alone; inputs and output gradients wait, which are needed for the sums and need no weights. Then, when all
passes of a piece are there, its sums are formed unit by unit, the last unit first: while the ranks exchange those of
one bundle, the next one's are formed. Two such bundles are all that a rank holds beside its shards.

An example's gradient that is formed by itself (because it is cheaper so, or because its norm cancels) is formed twice,
for its norm and for the sum, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.clipping import Factors
from dpcore.distributed import Ranks
from dpcore.microbatch.accumulator import Accumulator, without_autocast
from dpcore.microbatch.in_turn import example_gradient
from dpcore.microbatch.measured import Groups, Kept, Measured, measure
from dpcore.microbatch.planner import Choice
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import squares
from dpcore.reduction import Sharded
from dpcore.tape.uses import Use

BY_ITSELF = 2**18
"""A parameter of so many numbers is exchanged where it was summed; smaller ones of a unit are copied together."""


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter of ``shape``: ``rows`` from ``first`` on of dimension ``dim``.

    Each of ``ranks`` has ``chunk`` rows, the last ones fewer. ``offset``: the parameter's among all trained ones.
    ``within``: the part of the parameter of which this is a part, where it is not one of the whole.
    """

    shape: torch.Size
    dim: int
    ranks: int
    chunk: int
    first: int
    rows: int
    offset: int
    within: Part | None = None

    @classmethod
    def of(cls, shard: Any, ranks: Ranks, offset: int) -> Part:
        """Return the part that ``shard``, of this one of ``ranks``, is."""
        return cls.number(ranks, shard.shape, shard.placements[-1].dim, offset)

    @classmethod
    def number(cls, ranks: Ranks, shape: torch.Size, dim: int, offset: int, within: Part | None = None) -> Part:
        """Return the part of this one of ``ranks``."""
        chunk = -(-shape[dim] // ranks.size)
        first = min(ranks.rank * chunk, shape[dim])
        return cls(shape, dim, ranks.size, chunk, first, min(chunk, shape[dim] - first), offset, within)

    @property
    def local(self) -> list[int]:
        """The shape of the part."""
        return [*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :]]

    @property
    def numbers(self) -> int:
        """How many numbers a rank gets, with what fills up the last ones."""
        return self.chunk * prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    def runs(self, summed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Give the part's sums in runs of addresses, each with its first."""
        for start, run in self._placed(0, summed.view(-1)):
            yield from [(start, run)] if self.within is None else self.within._placed(start, run)

    def _placed(self, start: int, run: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Give a run of the part's own numbers, from number ``start`` on, in runs of addresses."""
        inner = prod(self.shape[self.dim + 1 :])
        while len(run):
            k, at = divmod(start, self.rows * inner)
            now, run = run[: self.rows * inner - at], run[self.rows * inner - at :]
            yield self.offset + (k * self.shape[self.dim] + self.first) * inner + at, now
            start += len(now)

    def zeros(self, like: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return zeros in the parameter's shape, and what makes chunks [ranks, n] of what was added to them."""
        if self.dim:
            whole = like.new_zeros(self.shape)
            return whole, lambda: torch.stack(whole.chunk(self.ranks, self.dim)).view(self.ranks, -1)
        filled = like.new_zeros(self.ranks * self.chunk, *self.shape[1:])
        return filled[: self.shape[0]], lambda: filled.view(self.ranks, -1)


@dataclass
class Clipped:
    """What is left of a pass until its sums are formed: uses, and ``factors`` [groups, B] of the examples.

    ``kept``: gradients of all examples, formed for their norms. ``formed``: the examples of which those of
    ``cancelling`` parameters are formed singly. ``good`` [m]: the examples that may be in one product, None where all
    are. ``left``: the others, in float64, with the factors of each.
    """

    choices: dict[Parameter, Choice]
    kept: dict[Parameter, Kept]
    factors: Tensor
    cancelling: set[Parameter] = field(default_factory=set)
    formed: list[int] = field(default_factory=list)
    good: Tensor | None = None
    left: list[tuple[list[Use], Tensor]] = field(default_factory=list)

    def add_to(self, out: Tensor, param: Parameter, group: int) -> None:
        """Add the clipped sum of one parameter, and let go of what was kept for it."""
        choice, kept, factors = self.choices.pop(param, None), self.kept.pop(param, None), self.factors[group]
        if kept is not None:
            if self.good is not None:
                kept, factors = kept.of(self.good), factors[self.good]
            kept.add_sum(factors, {param: out.view(-1)})
        elif choice is not None and choice.method == "turn":
            _add_formed(choice, range(len(factors)), factors, out)
        elif choice is not None:
            self._add_product(choice, factors, out)
        for uses, own in self.left:
            if bool(own[group] > 0):
                for gradient in _in_float64(uses, param):
                    out += (gradient * own[group]).to(out.dtype)

    def _add_product(self, choice: Choice, factors: Tensor, out: Tensor) -> None:
        together, use = factors, choice.uses[0]
        if choice.param in self.cancelling and self.formed:
            _add_formed(choice, self.formed, factors, out)
            together = factors.clone()
            together[self.formed] = 0.0
        if self.good is not None:
            # Not at a factor of zero beside the good ones: zero times infinity is none.
            use, together = use.rows(self.good, out.dtype), together[self.good]
        if bool(together.any()):
            use.add_clipped_sum(choice.param, together, out)


class ShardedSums(Accumulator):
    """Sums of clipped gradients of named ``parameters``, of which this rank holds shards.

    :meth:`add` takes norms and factors, :meth:`reduce` forms and exchanges the sums.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        max_grad_norm: float | Sequence[float],
        factors: Factors,
        reduction: Sharded,
    ) -> None:
        self.reduction = reduction
        self._waiting: list[Clipped] = []
        super().__init__(parameters, max_grad_norm, factors)

    @property
    def targets(self) -> dict[Parameter, Any]:
        return {param: self.reduction.shards.get(param, param) for param in self.parameters.values()}

    def _allocate(self) -> None:
        super()._allocate()
        offset = 0
        self._parts: dict[Parameter, Part] = {}
        for param, shard in self.targets.items():
            self._parts[param] = self._part(param, shard, offset)
            offset += shard.numel()
        self._local: Tensor | None = None
        self._bundles = [*self._bundled()]

    def _part(self, param: Parameter, shard: Any, offset: int) -> Part:
        return Part.of(shard, self.reduction.ranks, offset)

    def _bundled(self) -> Iterator[list[Parameter]]:
        """The parameters that are exchanged together, the last unit's first; the same on all ranks."""
        for unit in reversed(self.reduction.units):
            trained = [param for param in unit if param in self._parts]
            yield from ([param] for param in trained if param.numel() >= BY_ITSELF)
            if small := [param for param in trained if param.numel() < BY_ITSELF]:
                yield small

    # ---- what this rank holds

    @property
    def flat(self) -> Tensor:
        """[n]: the sums of this rank's shards, one after the other; they have memory from their first use on."""
        if self._local is None:
            length = sum(prod(part.local) for part in self._parts.values())
            self._local = torch.zeros(length, dtype=self.dtype, device=self.device)
        return self._local

    @property
    def sums(self) -> dict[Parameter, Tensor]:
        """None: there are no whole ones."""
        return {}

    @property
    def piece_bytes(self) -> int:
        """Return the bytes of the sums over one piece, which the ranks exchange."""
        return sum(param.numel() for param in self._parts) * self.dtype.itemsize

    def _shards(self) -> dict[Parameter, Tensor]:
        lengths = [prod(part.local) for part in self._parts.values()]
        held = zip(self._parts.items(), self.flat.split(lengths), strict=True)
        return {param: summed.view(part.local) for (param, part), summed in held}

    def by_address(self) -> Iterator[tuple[int, Tensor]]:
        for param, summed in self._shards().items():
            if summed.numel():
                yield from self._parts[param].runs(summed)

    def clear(self) -> None:
        self._local, self._waiting = None, []

    def released(self) -> dict[Parameter, Any]:
        return self.hand_over()

    def hand_over(self) -> dict[Parameter, Any]:
        grads = {self.targets[param]: _laid_as(self.targets[param], summed) for param, summed in self._shards().items()}
        self._local = None
        return grads

    # ---- norms and factors of a pass

    @without_autocast
    def add(
        self, uses: Sequence[Use], batch_size: int, mask: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        choices = self._choose(uses)
        in_turn = [choice for choice in choices if choice.method == "turn"]
        others = [choice for choice in choices if choice.method != "turn"]
        measured = measure(others, self._zeros(batch_size), self._places, self._order, None)
        with full_precision():
            for i in range(batch_size if in_turn else 0):
                own = self._norms_of_formed(in_turn, i, measured)
                for norms_sq in (measured.norms_sq, measured.certain):
                    if norms_sq is not None:
                        norms_sq[:, i : i + 1] += own
            measured = self._completed(measured)
            factors, wrong = self._rate(measured, mask)
            kept = {one.params[0]: one for one in measured.kept if isinstance(one, Kept)}
            clipped = Clipped({choice.param: choice for choice in choices}, kept, factors)
            norms = measured.norms
            if measured.any_doubtful(wrong):
                doubtful = measured.doubtful()
                self._check_rule(measured, wrong, doubtful)
                self._look_closely(clipped, measured, uses, doubtful, mask, norms)
        clipped.factors = clipped.factors * scale
        clipped.left = [(use, own * scale) for use, own in clipped.left]
        self._waiting.append(clipped)
        return norms, factors

    def _norms_of_formed(self, choices: Sequence[Choice], i: int, measured: Measured) -> Tensor:
        """Squared norms [groups, 1] of gradients of example i, each formed and let go of; notes their errors."""
        norms_sq = torch.zeros_like(measured.norms_sq[:, :1])
        for choice in choices:
            found = squares(_formed(choice, i, self.dtype).reshape(1, -1))
            norms_sq[self._places[choice.param]] += found.value
            measured.note(found, self._places[choice.param])
        return norms_sq

    @property
    def _places(self) -> Groups:
        """The row of squared norms to which a parameter adds, until they are completed."""
        return self._group

    def _completed(self, measured: Measured) -> Measured:
        """Return norms [groups, m] of whole gradients from those of what this rank has."""
        return measured

    def _look_closely(
        self,
        clipped: Clipped,
        measured: Measured,
        uses: Sequence[Use],
        doubtful: Tensor,
        mask: Tensor | None,
        norms: Tensor,
    ) -> None:
        """Take exact norms and factors of the ``doubtful`` examples [B]: of formed gradients, in float64 if need be."""
        clipped.cancelling, factors = {choice.param for choice in measured.cancelling}, clipped.factors
        good = torch.ones_like(doubtful)
        for i in doubtful.nonzero().squeeze(1).tolist():
            of_mask = None if mask is None else mask[i : i + 1]
            if measured.example(i).is_worth_forming():
                assert measured.certain is not None
                own = Measured(self._zeros(1), error=measured.error)
                own.norms_sq += self._norms_of_formed(measured.cancelling, i, own)
                own = self._completed(own)
                exact = Measured(measured.certain[:, i : i + 1] + own.norms_sq, error=own.error)
                if not exact.any_doubtful():
                    clipped.formed.append(i)
                    norms[:, i : i + 1], factors[:, i : i + 1] = exact.norms, self._factors(exact, of_mask)
                    continue
            good[i] = False
            singles = [use.rows(torch.tensor([i], device=self.device), torch.float64) for use in uses]
            exact = Measured(self._zeros(1).double())
            for param, place in self._places.items():
                for gradient in _in_float64(singles, param):
                    found = squares(gradient.reshape(1, -1))
                    exact.norms_sq[place] += found.value
                    exact.note(found, place)
            exact = self._completed(exact)
            factor = self._factors(exact, of_mask)
            norms[:, i : i + 1], factors[:, i : i + 1] = exact.norms.to(self.dtype), factor.to(self.dtype)
            clipped.left.append((singles, factor[:, 0]))
        if clipped.left:
            clipped.factors, clipped.good = factors * good, good.nonzero().squeeze(1)

    # ---- sums of a piece

    @without_autocast
    @torch.no_grad()
    def reduce(self) -> None:
        """Form the sums of the passes since the last call, and add this rank's part of them; all ranks call this."""
        self.reduction.check_no_ordinary_gradient()
        passes, self._waiting = self._waiting, []
        shards = self._shards()
        under_way: list[Callable[[], None]] = []
        with full_precision():
            for bundle in self._bundles:
                chunks = self._chunks(bundle, passes)
                for finish in under_way:
                    finish()
                under_way = [self._exchange(bundle, chunks, shards)]
                del chunks
        for finish in under_way:
            finish()

    def _chunks(self, bundle: Sequence[Parameter], passes: Sequence[Clipped]) -> Tensor:
        """Return [ranks, n]: what every rank gets of the bundle's sums over this rank's examples."""
        chunks = []
        for param in bundle:
            summed, chunked = self._parts[param].zeros(self._like)
            for clipped in passes:
                clipped.add_to(summed, param, self._group[param])
            chunks.append(chunked())
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)

    @property
    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def _exchange(
        self, bundle: Sequence[Parameter], chunks: Tensor, shards: Mapping[Parameter, Tensor]
    ) -> Callable[[], None]:
        """Begin to exchange ``chunks``; return what waits for it and adds this rank's part to the ``shards``."""
        mine, wait = self.reduction.begin_scatter(chunks)

        def finish() -> None:
            wait()
            for param, part in zip(bundle, mine.split([self._parts[p].numbers for p in bundle]), strict=True):
                shards[param].view(-1).add_(part[: shards[param].numel()])

        return finish


def _laid_as(shard: Any, summed: Tensor) -> Any:
    """Return a rank's sums as the gradient of the parameter that its optimizer steps."""
    if not hasattr(shard, "device_mesh"):
        return summed.to(shard.dtype).view(shard.shape)
    from torch.distributed.tensor import DTensor  # slow to import, and there is none without it

    return DTensor.from_local(
        summed.to(shard.dtype),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def _formed(choice: Choice, i: int, dtype: torch.dtype) -> Tensor:
    """The gradient of example i, with the same bits whenever it is formed."""
    if len(choice.uses) == 1:
        buffer = torch.empty(choice.param.numel(), dtype=dtype, device=choice.param.device)
        if choice.uses[0].write_example(choice.param, i, buffer) is not None:
            return buffer.view(choice.param.shape)
    return example_gradient(choice, i, dtype)


def _add_formed(choice: Choice, examples: Iterable[int], factors: Tensor, out: Tensor) -> None:
    of = factors.tolist()
    for i in examples:
        if of[i] > 0:
            out.add_(_formed(choice, i, out.dtype), alpha=of[i])


def _in_float64(uses: Sequence[Use], param: Parameter) -> list[Tensor]:
    """The gradient of a single example, over all its uses, where there are any."""
    parts = [use.grad_sample(param)[0] for use in uses if use.grad is not None and any(p is param for p in use.params)]
    return [sum(parts[1:], parts[0])] if parts else []
