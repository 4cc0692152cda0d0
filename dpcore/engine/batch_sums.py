"""The clipped sum of a batch: its pieces, and for each a forward and a backward pass, norms, factors and sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpcore import native
from dpcore.engine import checks
from dpcore.engine.checks import length_of
from dpcore.engine.plans import Kind, Plans
from dpcore.example_isolation.check import IsolationCheck
from dpcore.microbatch.accumulator import Accumulator
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.looks import looks
from dpcore.microbatch.memory import give_back_everything, ran_out
from dpcore.microbatch.pieces import cut
from dpcore.microbatch.planner import choose, micro_batches
from dpcore.privacy_unit import of_units, shares_of, units_in
from dpcore.rerun.batch_start import BatchStart
from dpcore.rerun.heap import give_back
from dpcore.rules import bfloat16
from dpcore.rules.custom import custom_fallbacks
from dpcore.tape import own_passes
from dpcore.tape.deferred_lookups import SeenOtherwise
from dpcore.tape.tape import Tape
from dpcore.tape.uses import in_units

if TYPE_CHECKING:
    from dpcore.engine.graphs import Graphs

LossFn = Callable[[Any, Any], Tensor]
FIRST_EXAMPLES = 16
"""The first piece of a kind of batch that is not known yet; fewer of large examples."""


@dataclass(frozen=True)
class ClippedSum:
    """Σ_i f_i g_i over a batch, and what it took.

    ``sums``: by parameter name, the parameter's shape, float32 or better; none of a model in shards. ``norms`` [B]:
    |g_i| before clipping (not finite where the example's gradient is not). ``factors`` [B]: f_i (per-layer clipping:
    [groups, B] for both). ``losses`` [B]. ``sensitivity``: adding or removing one example moves ``sums`` by at most
    this in L2.
    """

    sums: Mapping[str, Tensor]
    norms: Tensor
    factors: Tensor
    losses: Tensor
    sensitivity: float

    @property
    def nonfinite(self) -> int:
        """The number of examples that contributed nothing because their gradient was not finite."""
        return int((~self.norms.isfinite()).reshape(-1, self.norms.shape[-1]).any(0).sum())


class BatchSums:
    """Adds the clipped sums of batches to an accumulator's buffer, in pieces that are planned by what the first left.

    ``physical_batch_size``, ``compile``, ``check_isolation`` and ``group`` are those of :class:`dpcore.Engine`. Model,
    loss and tape see rows; batches, pieces, plans and what is accumulated are of units.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        accumulator: Accumulator,
        *,
        physical_batch_size: int | None,
        compile: bool | str,
        check_isolation: bool,
        group: int = 1,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.group = group
        self.accumulator = accumulator
        self.plans = Plans(physical_batch_size)
        self._modules = tuple(model.modules())
        self._rows = 0  # of the batch under way, which is cut into pieces
        self._layout = Layout(model, custom_fallbacks(model))
        self.isolation = IsolationCheck(model, accumulator.names, self._layout, group)
        if not check_isolation:
            self.isolation.switch_off()
        self._methods: list[tuple[str, str]] = []
        self._compile_by("inductor" if compile is True else compile or None)

    def _compile_by(self, backend: str | None) -> None:
        self.graphs: Graphs | None = None
        if backend is not None:
            from dpcore.engine.graphs import Graphs  # brings in the compiler: not for those who do not ask

            self.graphs = Graphs(self.model, self._traced, backend, self.group)

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles for itself: a graph belongs to the objects that it was made of."""
        return {**self.__dict__, "graphs": self.graphs.backend if self.graphs else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile_by(state["graphs"])

    def settle(self) -> None:
        """Bring the model into the state in which it is between batches."""

    def add(self, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]) -> ClippedSum:
        """The clipped sum times ``scale``, added to what ``begin`` has brought into the buffer."""
        self._rows = length_of(x)
        batch_size = units_in(self._rows, self.group)
        checks.check_mask(mask, batch_size, self._rows)
        checks.check_targets(y, self._rows)
        if mask is not None and len(mask) != self._rows:
            mask = mask.repeat_interleave(self.group)
        kind = self._kind(x)
        self._prepare(kind, x, y, batch_size)
        while (parts := self._add_pieces(kind, x, y, mask, scale, begin)) is None:
            # Here, where the error and all that its traceback held are gone.
            give_back_everything(self.accumulator.device)
        norms, factors, losses = map(list, zip(*parts, strict=True)) if parts else ([], [], [])
        return ClippedSum(
            {self.accumulator.names[param]: summed for param, summed in self.accumulator.sums.items()},
            self._join(norms),
            self._join(factors),
            self._join(losses, grouped=False),
            self.accumulator.sensitivity,
        )

    def _add_pieces(
        self, kind: Kind, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]
    ) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Return what :meth:`_accumulate` does for all pieces of a batch; None where memory ran out.

        The next attempt starts the batch anew, in smaller pieces: the one that failed may have been added in part.
        """
        batch_size, at_once, parts = self._rows // self.group, 0, []
        as_found: BatchStart | None = None
        begin()
        try:
            for units, graph_size in self._pieces(kind, batch_size, filled=mask is not None):
                at_once = units.stop - units.start
                whole, rows = at_once == batch_size, slice(units.start * self.group, units.stop * self.group)
                if as_found is not None:
                    as_found.restore()
                elif not whole:
                    as_found = BatchStart(self.model)
                inputs, targets = (x, y) if whole else cut((x, y), rows, self._rows)
                of_piece = None if mask is None else mask[rows]
                parts.append(self._accumulate(inputs, targets, of_piece, scale, kind, graph_size))
        except Exception as error:
            if not ran_out(error):
                raise
            self.plans.shrink(kind, at_once, error)
            if as_found is not None:
                as_found.restore()
            return None
        return parts

    def _kind(self, x: Any) -> Kind:
        """Return the key of a batch's plan.

        With graphs every mode has its own, so that the eager pass comes first in each: it sees what a trace cannot
        (random numbers without a rule).
        """
        kind = tuple((t.shape[1:], t.dtype) for t in checks.tensors_of(x))
        return kind if self.graphs is None else (*kind, tuple(module.training for module in self._modules))

    def _prepare(self, kind: Kind, x: Any, y: Any, batch_size: int) -> None:
        """Before a batch: finds what has no rule, and whether examples are kept apart, where either is due."""
        self.plans.note(kind, batch_size)
        if batch_size and kind not in self.plans.of:
            self._look(x)
        if self.graphs is not None:
            self._layout.refuse_unrepeatable()
        self._check_isolation(kind, x, y)

    def _check_isolation(self, kind: Kind, x: Any, y: Any) -> None:
        if self.isolation.due(kind, length_of(x)):
            self.isolation.check(kind, self._losses, (x, y), length_of(x), losses=True)

    def _look(self, x: Any, again: bool = False) -> None:
        call = functools.partial(checks.call, self.model)
        ways, variants = looks(self.model, call, x, length_of(x), again, self.group)
        self._layout.learn(self.accumulator.names, ways, variants, again)

    def _look_again(self, kind: Kind, x: Any, y: Any) -> None:
        """Look at all examples of a piece that has led to a part of the model that is not known."""
        self._look(x, again=True)
        self.isolation.begin_anew()
        self._check_isolation(kind, x, y)

    def _pieces(self, kind: Kind, batch_size: int, filled: bool) -> Iterator[tuple[slice, int]]:
        """The schedule of a batch: (rows, length of the compiled graph that they go through, 0: eagerly).

        The first batch of a kind is planned by its first piece: the second is cut when the first was accumulated. What
        the caller has filled up to a length (``filled``) is cut into equal graphs, the first batch just as later ones.
        """
        start = graph_size = 0
        while start < batch_size:
            rest = batch_size - start
            if self.graphs is not None and not graph_size and kind in self.plans.of:
                graph_size = self._graph_size(kind, batch_size if filled else rest, filled)
            size = min(graph_size, rest) if graph_size else self._next_size(kind, batch_size, rest)
            yield slice(start, start + size), graph_size
            start += size

    def _losses(self, batch: tuple[Any, Any]) -> Tensor:
        """[R] losses of inputs and targets, by row."""
        x, y = batch
        losses = self.loss_fn(checks.call(self.model, x), y)
        checks.check_losses(losses, length_of(x), self._rows)
        return losses

    def _join(self, parts: list[Tensor], grouped: bool = True) -> Tensor:
        if parts:
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        else:
            joined = torch.zeros(
                (len(self.accumulator.bounds), 0) if grouped else (0,),
                dtype=self.accumulator.dtype,
                device=self.accumulator.device,
            )
        return joined[0] if grouped and len(self.accumulator.bounds) == 1 else joined

    def _next_size(self, kind: Kind, batch_size: int, remaining: int) -> int:
        """Size of the next micro-batch; the first batch of a kind starts small, to measure what an example leaves."""
        plan = self.plans.of.get(kind)
        first = max(1, self._layout.at_first(FIRST_EXAMPLES * self.group) // self.group)
        planned = plan.size(batch_size) if plan else first
        size = self.plans.at_once(kind, planned)
        pieces = -(-remaining // size)
        return -(-remaining // pieces)

    def _graph_size(self, kind: Kind, count: int, filled: bool) -> int:
        """Length of the compiled pieces of ``count`` examples."""
        from dpcore.engine.graphs import CPU_GRAPH_EXAMPLES

        assert self.graphs is not None
        plan, on_cpu = self.plans.of[kind], self.accumulator.device.type == "cpu"
        most = min(plan.most, max(plan.least, CPU_GRAPH_EXAMPLES)) if on_cpu else plan.most
        return self.graphs.length(kind, count, self.plans.at_once(kind, most), filled)

    def _traced(self, x: Any, y: Any, mask: Tensor, bounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute what :meth:`_accumulate` does without looking at any value."""
        tape = self._layout.tape(self.accumulator.names, len(mask))
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            own_passes.backward(tape, losses, self._weights(losses, mask))
        with torch.no_grad():
            found = self.accumulator.clipped(in_units(tape.uses, self.group), self._units(mask), bounds)
            # Memory of their own: a loss may hand out what it was given, which the next piece is written over.
            return *found, self._by_unit(losses.detach(), mask).clone()

    def _weights(self, losses: Tensor, mask: Tensor | None) -> Tensor:
        """[R]: what a row's loss counts for in its unit's, which is their mean."""
        mask = torch.ones_like(losses) if mask is None else mask
        return (mask if self.group == 1 else shares_of(mask, self.group)).to(losses.dtype)

    def _units(self, mask: Tensor) -> Tensor:
        return mask if self.group == 1 else of_units(mask, self.group)

    def _by_unit(self, losses: Tensor, mask: Tensor | None) -> Tensor:
        """The losses of units."""
        if self.group == 1:
            return losses
        return (losses * self._weights(losses, mask)).unflatten(0, (-1, self.group)).sum(1)

    def _accumulate(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, kind: Kind, graph_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one micro-batch to the sums, times ``scale``; norms and factors [groups, m], losses [m]."""
        if graph_size:
            assert self.graphs is not None
            depends, held = (self.loss_fn, self.accumulator.factors), self.accumulator
            part = self.graphs.run(x, y, mask, graph_size, held.bounds, held.device, depends)
            if part is not None:  # there is a graph for this micro-batch
                sums, norms, factors, losses = part
                held.flat.add_(sums, alpha=scale)
                return norms, factors, losses
        if self.graphs is None:
            return self._accumulate_eagerly(x, y, mask, scale, kind)
        with bfloat16.disabled():  # as in graphs: that one example sends the others here may not change their rounding
            return self._accumulate_eagerly(x, y, mask, scale, kind)

    def _accumulate_eagerly(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, kind: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_accumulate` by torch's own passes; the first of a kind is what its micro-batches are planned by."""
        batch_size = length_of(x) // self.group
        tape, losses = self._layout.attempt(
            lambda: self._passes(x, y, mask), functools.partial(self._look_again, kind, x, y)
        )
        with torch.no_grad():
            uses = in_units(tape.uses, self.group)
            norms, factors = self.accumulator.add(uses, batch_size, None if mask is None else self._units(mask), scale)
            losses = self._by_unit(losses.detach(), mask)
        if kind not in self.plans.of:
            choices = choose(uses, turns=self.graphs is None)
            self._methods = [(self.accumulator.names[c.param], c.method) for c in choices]
            self.plans.of[kind] = micro_batches(choices, uses, batch_size, self.accumulator.device)
            del tape, uses, choices
            give_back()
        return norms, factors, losses

    def _passes(self, x: Any, y: Any, mask: Tensor | None) -> tuple[Tape, Tensor]:
        """The tape of a forward and a backward pass, and losses by row."""
        tape = self._layout.tape(self.accumulator.names, length_of(x))
        tape.drops_activations = self._layout.drops_activations
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            try:
                own_passes.backward(tape, losses, self._weights(losses, mask))
            except SeenOtherwise:
                return self._passes(x, y, mask)
        return tape, losses

    def explain(self) -> str:
        """Return how every parameter's norm and sum are computed, then physical batch sizes and kernels."""
        lines = [f"{name}: {method}" for name, method in self._methods]
        lines += [f"{name or 'the whole model'}: no rule, by vmap" for name in self._layout.fallbacks]
        sizes = self.plans.sizes()
        if self.graphs is not None:
            sizes = self.graphs.sizes
            lines.append("pass: one compiled graph for each physical batch size")
        lines.append(f"physical batch size: {', '.join(map(str, sizes)) or 'not planned yet'}")
        return "\n".join([*lines, f"compiled kernels: {native.description()}"])
