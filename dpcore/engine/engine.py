"""The engine: per physical micro-batch one forward and one backward pass, then norms, factors and clipped sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore import native
from dpcore.arguments import check_divisor, check_noise_multiplier
from dpcore.clipping import clip_factors
from dpcore.engine import checks
from dpcore.engine.checks import length_of
from dpcore.engine.plans import Kind, Plans
from dpcore.engine.uncompiled import refuse_compiled, uncompiled
from dpcore.errors import PrivacyError
from dpcore.example_isolation.check import IsolationCheck
from dpcore.microbatch.accumulator import Accumulator, Factors
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.looks import looks
from dpcore.microbatch.memory import give_back_everything, ran_out
from dpcore.microbatch.pieces import cut
from dpcore.microbatch.planner import choose, micro_batches, trains_all
from dpcore.noise import GaussianNoise
from dpcore.release import Release
from dpcore.rerun.heap import give_back
from dpcore.rules import bfloat16
from dpcore.rules.custom import custom_fallbacks
from dpcore.tape.deferred_lookups import SeenOtherwise
from dpcore.tape.tape import Tape
from dpcore.validators.parameters import check_hooks, check_recordable

if TYPE_CHECKING:
    from dpcore.engine.graphs import Graphs

LossFn = Callable[[Any, Any], Tensor]
FIRST_EXAMPLES = 16
"""The first piece of a kind of batch that is not known yet; fewer of large examples."""


@dataclass(frozen=True)
class ClippedSum:
    """Σ_i f_i g_i over a batch, and what it took.

    ``sums``: by parameter name, the parameter's shape, float32 or better. ``norms`` [B]: |g_i| before clipping (not
    finite where the example's gradient is not). ``factors`` [B]: f_i (per-layer clipping: [groups, B] for both).
    ``losses`` [B]. ``sensitivity``: adding or removing one example moves ``sums`` by at most this in L2.
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


class Engine:
    """Clipped sums and DP-SGD steps for one model and loss, built once and used for every batch.

    Args:
        model: The module, in training mode; its parameters with ``requires_grad`` are trained.
        loss_fn: ``loss_fn(outputs, y)`` returns one loss per example, [B].
        max_grad_norm: C, the L2 bound to which each example's gradient is clipped; or one bound per trained parameter
            (per-layer clipping).
        noise_multiplier: σ; the noise of a step has the standard deviation σ times the L2 norm of the bounds.
        expected_batch_size: The public divisor of every update, whatever the batch's length. :meth:`clipped_sum` needs
            none.
        optimizer: The torch optimizer that :meth:`step` calls.
        noise: The source of noise; None draws a secret seed.
        physical_batch_size: Examples per forward pass. None chooses by sizes and memory, and where memory runs out
            starts the batch anew with half as many at once, so that nothing is counted twice. The result does not
            depend on it.
        factors: The clipping rule, ``factors(norms, C)``, without state, because it is called several times for a
            batch; flat by default.
        compile: Whether, behind the first micro-batch, the pass runs as one compiled graph of fixed length per kind of
            batch (:mod:`dpcore.engine.graphs`). True takes inductor, a name another backend; compiling takes some time
            once. Python values that model and loss hold are then those of the first call, while weights, buffers and
            clip bounds stay live.
        check_isolation: Whether the first batches, and rare random ones later, show by experiment if model and loss mix
            examples (:mod:`dpcore.example_isolation.check`).

    Raises:
        UnsupportedError: the model is compiled already, or cannot be recorded. With ``compile``: recurrent layers, and
            at the first step what cannot be traced.
        ValueError: a bound or a size is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float = 0.0,
        expected_batch_size: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        noise: GaussianNoise | None = None,
        physical_batch_size: int | None = None,
        factors: Factors = clip_factors,
        compile: bool | str = False,
        check_isolation: bool = True,
    ) -> None:
        refuse_compiled(model)
        check_recordable(model)
        self.model = model
        self._modules = tuple(model.modules())
        self._structure = checks.structure_of(model)
        self.loss_fn = loss_fn
        sigma = check_noise_multiplier(noise_multiplier)
        scale = 1.0 if expected_batch_size is None else 1.0 / check_divisor(expected_batch_size)
        self.expected_batch_size = expected_batch_size
        self.optimizer = optimizer
        self.noise = GaussianNoise() if noise is None else noise
        self.steps = 0
        self._batch_size = 0  # of the batch under way, which is cut into pieces
        self.parameters: dict[str, Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.accumulator = Accumulator(self.parameters, max_grad_norm, factors)
        self.accumulator.check_noise(sigma, scale)
        self.noise_multiplier = sigma
        self._plans = Plans(physical_batch_size)
        self._layout = Layout(model, custom_fallbacks(model))
        self.isolation = IsolationCheck(model, self.accumulator.names, self._layout)
        if not check_isolation:
            self.isolation.switch_off()
        self._plan: list[tuple[str, str]] = []
        self._compile_by("inductor" if compile is True else compile or None)

    def __repr__(self) -> str:
        bounds = self.accumulator.bounds
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {len(self.parameters)} trained parameters, "
            f"max_grad_norm={bounds[0] if len(bounds) == 1 else bounds}, noise_multiplier={self.noise_multiplier:.6g}, "
            f"expected_batch_size={self.expected_batch_size}, optimizer={optimizer}, steps={self.steps})"
        )

    def _compile_by(self, backend: str | None) -> None:
        self._graphs: Graphs | None = None
        if backend is not None:
            from dpcore.engine.graphs import Graphs  # brings in the compiler: not for those who do not ask

            self._graphs = Graphs(self.model, self._traced, backend)

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles for itself: a graph belongs to the objects that it was made of."""
        return {**self.__dict__, "_graphs": self._graphs.backend if self._graphs else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_plans" not in state:  # a pickle of an earlier version: batches are planned anew
            self._plans = Plans(state["_physical"])
        self._structure = checks.structure_of(self.model)
        self._compile_by(state["_graphs"])

    @property
    def noise_multiplier(self) -> float:
        """σ; the noise of a step has the standard deviation σ times the L2 norm of the bounds."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = check_noise_multiplier(value)

    # ---- the clipped sum

    @uncompiled
    def clipped_sum(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Compute Σ_i min(1, C/|g_i|) g_i over one batch, without noise.

        Args:
            x: Inputs: a tensor [B, ...], a tuple (positional) or a dict (keyword arguments) of them. B may be 0.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The sums with norms, factors, losses and sensitivity. The sums live in the engine's buffer and hold until
                the next call.

        Raises:
            UnsupportedError: a gradient cannot be told apart by example.
            PrivacyError: model or loss mix examples, the loss is no [B], or the model was changed since the engine was
                built.
            ValueError: the mask is not bool [B].
        """
        self._check_model()
        self._withdraw()
        return self._add_clipped_sum(x, y, mask, 1.0, self.accumulator.clear)

    def _add_clipped_sum(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]
    ) -> ClippedSum:
        """The clipped sum times ``scale``, added to what ``begin`` has brought into the buffer."""
        batch_size = self._batch_size = length_of(x)
        checks.check_mask(mask, batch_size)
        checks.check_targets(y, batch_size)
        kind = self._kind(x)
        self._prepare(kind, x, y, batch_size)
        while (parts := self._add_pieces(kind, x, y, mask, scale, begin)) is None:
            # Here, where the error and all that its traceback held are gone.
            give_back_everything(self.accumulator.device)
        norms, factors, losses = ([part[k] for part in parts] for k in range(3))
        return ClippedSum(
            {name: self.accumulator.sums[p] for name, p in self.parameters.items()},
            self._join(norms),
            self._join(factors),
            self._join(losses, grouped=False),
            self.sensitivity,
        )

    def _add_pieces(
        self, kind: Kind, x: Any, y: Any, mask: Tensor | None, scale: float, begin: Callable[[], object]
    ) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Return what :meth:`_accumulate` does for all pieces of a batch; None where memory ran out.

        The next attempt starts the batch anew, in smaller pieces: the one that failed may have been added in part.
        """
        batch_size, at_once, parts = self._batch_size, 0, []
        begin()
        try:
            for rows, graph_size in self._pieces(kind, batch_size, filled=mask is not None):
                at_once = rows.stop - rows.start
                whole = at_once == batch_size
                inputs, targets = (x, y) if whole else cut((x, y), rows, batch_size)
                of_piece = None if mask is None else mask[rows]
                parts.append(self._accumulate(inputs, targets, of_piece, scale, kind, graph_size))
        except Exception as error:
            if not ran_out(error):
                raise
            self._plans.shrink(kind, at_once, error)
            return None
        return parts

    def _kind(self, x: Any) -> Kind:
        """Return the key of a batch's plan.

        With graphs every mode has its own, so that the eager pass comes first in each: it sees what a trace cannot
        (random numbers without a rule).
        """
        kind = tuple((t.shape[1:], t.dtype) for t in checks.tensors_of(x))
        return kind if self._graphs is None else (*kind, tuple(module.training for module in self._modules))

    def _prepare(self, kind: Kind, x: Any, y: Any, batch_size: int) -> None:
        """Before a batch: finds what has no rule, and whether examples are kept apart, where either is due."""
        self._plans.note(kind, batch_size)
        if batch_size and kind not in self._plans.of:
            self._look(x, batch_size)
        if self._graphs is not None:
            self._layout.refuse_unrepeatable()
        if self.isolation.due(kind, batch_size):
            self.isolation.check(kind, self._losses, (x, y), batch_size, losses=True)

    def _look(self, x: Any, batch_size: int, again: bool = False) -> None:
        ways, variants = looks(self.model, functools.partial(checks.call, self.model), x, batch_size, again)
        self._layout.learn(self.accumulator.names, ways, variants, again)

    def _look_again(self, kind: Kind, x: Any, y: Any) -> None:
        """Look at all examples of a piece that has led to a part of the model that is not known."""
        self._look(x, length_of(x), again=True)
        self.isolation.begin_anew()
        if self.isolation.due(kind, length_of(x)):
            self.isolation.check(kind, self._losses, (x, y), length_of(x), losses=True)

    def _pieces(self, kind: Kind, batch_size: int, filled: bool) -> Iterator[tuple[slice, int]]:
        """The schedule of a batch: (rows, length of the compiled graph that they go through, 0: eagerly).

        The first batch of a kind is planned by its first piece: the second is cut when the first was accumulated. What
        the caller has filled up to a length (``filled``) is cut into equal graphs, the first batch just as later ones.
        """
        start = graph_size = 0
        while start < batch_size:
            rest = batch_size - start
            if self._graphs is not None and not graph_size and kind in self._plans.of:
                graph_size = self._graph_size(kind, batch_size if filled else rest, filled)
            size = min(graph_size, rest) if graph_size else self._next_size(kind, batch_size, rest)
            yield slice(start, start + size), graph_size
            start += size

    def _losses(self, batch: tuple[Any, Any]) -> Tensor:
        """[B] losses of inputs and targets."""
        x, y = batch
        losses = self.loss_fn(checks.call(self.model, x), y)
        checks.check_losses(losses, length_of(x), self._batch_size)
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
        plan = self._plans.of.get(kind)
        planned = plan.size(batch_size) if plan else self._layout.at_first(FIRST_EXAMPLES)
        size = self._plans.at_once(kind, planned)
        pieces = -(-remaining // size)
        return -(-remaining // pieces)

    def _graph_size(self, kind: Kind, count: int, filled: bool) -> int:
        """Length of the compiled pieces of ``count`` examples."""
        from dpcore.engine.graphs import CPU_GRAPH_EXAMPLES

        assert self._graphs is not None
        plan, on_cpu = self._plans.of[kind], self.accumulator.device.type == "cpu"
        most = min(plan.most, max(plan.least, CPU_GRAPH_EXAMPLES)) if on_cpu else plan.most
        return self._graphs.length(kind, count, self._plans.at_once(kind, most), filled)

    def _traced(self, x: Any, y: Any, mask: Tensor, bounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute what :meth:`_accumulate` does without looking at any value."""
        tape = self._layout.tape(self.accumulator.names, len(mask))
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            tape.backward(losses, mask.to(losses.dtype))
        with torch.no_grad():
            # Memory of their own: a loss may hand out what it was given, which the next piece is written over.
            return *self.accumulator.clipped(tape.uses, mask, bounds), losses.detach().clone()

    def _accumulate(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, kind: Kind, graph_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one micro-batch to the sums, times ``scale``; norms and factors [groups, m], losses [m]."""
        if graph_size:
            assert self._graphs is not None
            depends, held = (self.loss_fn, self.accumulator.factors), self.accumulator
            part = self._graphs.run(x, y, mask, graph_size, held.bounds, held.device, depends)
            if part is not None:  # there is a graph for this micro-batch
                sums, norms, factors, losses = part
                held.flat.add_(sums, alpha=scale)
                return norms, factors, losses
        if self._graphs is None:
            return self._accumulate_eagerly(x, y, mask, scale, kind)
        with bfloat16.disabled():  # as in graphs: that one example sends the others here may not change their rounding
            return self._accumulate_eagerly(x, y, mask, scale, kind)

    def _accumulate_eagerly(
        self, x: Any, y: Any, mask: Tensor | None, scale: float, kind: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_accumulate` by torch's own passes; the first of a kind is what its micro-batches are planned by."""
        batch_size = length_of(x)
        tape, losses = self._layout.attempt(
            lambda: self._passes(x, y, mask), functools.partial(self._look_again, kind, x, y)
        )
        with torch.no_grad():
            norms, factors = self.accumulator.add(tape.uses, batch_size, mask, scale)
        if kind not in self._plans.of:
            choices = choose(tape.uses, turns=self._graphs is None)
            self._plan = [(self.accumulator.names[c.param], c.method) for c in choices]
            self._plans.of[kind] = micro_batches(
                choices, tape.uses, batch_size, self.accumulator.device, trains_all(self.model)
            )
            del tape
            give_back()
        return norms, factors, losses.detach()

    def _passes(self, x: Any, y: Any, mask: Tensor | None) -> tuple[Tape, Tensor]:
        """The tape of a forward and a backward pass, and [B] losses."""
        tape = self._layout.tape(self.accumulator.names, length_of(x))
        tape.drops_activations = self._layout.drops_activations
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
            try:
                tape.backward(losses, weights)
            except SeenOtherwise:
                return self._passes(x, y, mask)
        return tape, losses

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return self.accumulator.sensitivity

    # ---- the step

    @uncompiled
    def privatize(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Set every trained parameter's ``grad`` to (clipped sum + σ·C·N(0, I)) / expected_batch_size.

        The noise belongs to this step's number (``steps``), which then goes up by one. An empty batch is a noisy step.

        Args:
            x: Inputs, as for :meth:`clipped_sum`.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The result of :meth:`clipped_sum`, whose ``sums`` hold the released gradient.

        Raises:
            ValueError: ``expected_batch_size`` is not set; or as :meth:`clipped_sum`.
            PrivacyError: as :meth:`clipped_sum`.
            UnsupportedError: as :meth:`clipped_sum`.
        """
        if self.expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is not set; it is the public divisor of the update, never len(batch)."
            )
        self._check_model()
        # The divisor goes into the clip factors and the noise, and the noise is drawn where the sums are then added: no
        # pass over the sums is spent on either.
        scale = 1.0 / check_divisor(self.expected_batch_size)
        flat = self.accumulator.flat
        release = Release.by(self, self.accumulator.check_noise(self.noise_multiplier, scale))
        self._withdraw()
        try:
            result = self._add_clipped_sum(x, y, mask, scale, functools.partial(release.begin, flat))
            if not self.noise.may_come_first:
                release.finish(flat)
        except BaseException:
            # The next attempt draws the same noise: nothing of this one may stay.
            flat.zero_()
            raise
        self.steps += 1
        for param, summed in self.accumulator.sums.items():
            param.grad = summed if param.dtype == summed.dtype else summed.to(param.dtype)
        return result

    @uncompiled
    def step(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Make one private update: :meth:`privatize`, then ``optimizer.step()``.

        Args:
            x: Inputs, as for :meth:`clipped_sum`.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The result of :meth:`privatize`.

        Raises:
            ValueError: the engine has no optimizer; or as :meth:`privatize`.
            PrivacyError: as :meth:`clipped_sum`.
            UnsupportedError: as :meth:`clipped_sum`.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer; pass one, or call privatize() and update the parameters.")
        checks.check_optimizer(self.optimizer, self.accumulator.names)
        result = self.privatize(x, y, mask)
        self.optimizer.step()
        return result

    def _withdraw(self) -> None:
        """Set ``grad`` to None while the buffer in which the last one lies is written anew.

        It would show sums without noise, and what a loss does to it (``zero_grad(set_to_none=False)``, say) would be
        done to the noise.
        """
        for param in self.accumulator.names:
            param.grad = None

    # ---- checks and explanation

    def _check_model(self) -> None:
        """Before every batch: the same parameters are trained, and nothing was compiled or exchanged since."""
        self.accumulator.check_unchanged()
        check_hooks(self.parameters)
        if torch.is_inference_mode_enabled():
            raise PrivacyError(
                "torch.inference_mode() records no gradients: every example's would count as zero; leave it."
            )
        if self._structure != checks.structure_of(self.model):
            raise PrivacyError(
                "A layer or a parameter of the model was added, removed or replaced by another object since the engine "
                "was built (load_state_dict(assign=True) does so); build a new engine."
            )
        if self.accumulator.lies_otherwise:  # model.to(memory_format=torch.channels_last), say
            self.accumulator.follow()
        if any(module._compiled_call_impl is not None for module in self._modules):
            refuse_compiled(self.model)

    def explain(self) -> str:
        """Return how the engine computes, one line per trained parameter, then physical batch sizes and kernels.

        A parameter's line says how its norm and its sum are computed; sizes are those of the largest batch so far.
        """
        lines = [f"{name}: {method}" for name, method in self._plan]
        lines += [f"{name or 'the whole model'}: no rule, by vmap" for name in self._layout.fallbacks]
        sizes = self._plans.sizes()
        if self._graphs is not None:
            sizes = self._graphs.sizes
            lines.append("pass: one compiled graph for each physical batch size")
        lines.append(f"physical batch size: {', '.join(map(str, sizes)) or 'not planned yet'}")
        return "\n".join([*lines, f"compiled kernels: {native.description()}"])
