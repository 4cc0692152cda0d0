"""The engine: per physical micro-batch one forward and one backward pass, then norms, factors and clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore import native
from dpcore.clipping import clip_factors
from dpcore.engine.uncompiled import refuse_compiled, uncompiled
from dpcore.errors import PrivacyError
from dpcore.example_isolation.check import IsolationCheck
from dpcore.microbatch.accumulator import Accumulator, Factors
from dpcore.microbatch.layout import Layout, copies, probe_sizes
from dpcore.microbatch.planner import MicroBatches, choose, micro_batches
from dpcore.noise import GaussianNoise
from dpcore.rules.custom import custom_fallbacks
from dpcore.tape.deferred_lookups import SeenOtherwise
from dpcore.validators.parameters import check_hooks, check_recordable

if TYPE_CHECKING:
    from dpcore.engine.graphs import Graphs

LossFn = Callable[[Any, Any], Tensor]
Kind = tuple[Any, ...]
"""Shapes and dtypes of one example's inputs: what a plan of micro-batches holds for."""


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
        """How many examples contributed nothing because their gradient was not finite."""
        return int((~self.norms.isfinite()).reshape(-1, self.norms.shape[-1]).any(0).sum())


class Engine:
    """Clipped sums and DP-SGD steps for one model and loss, built once and used for every batch.

    ``loss_fn(outputs, y)`` returns one loss per example, [B]. ``max_grad_norm``: one bound for the whole gradient, or
    one per trained parameter (per-layer clipping). ``expected_batch_size``: the public divisor of every update,
    whatever the batch's length. ``physical_batch_size``: examples per forward pass, chosen from sizes and memory when
    None; the result does not depend on it. ``factors(norms, C)``: the clipping rule, flat by default.
    ``compile``: behind the first micro-batch the pass runs as one compiled graph of fixed length per kind of batch (see
    :mod:`dpcore.engine.graphs`), which takes ``torch.compile`` and its compiler some time once (True: inductor,
    or the name of another backend); Python values that model and loss hold are then those of its first call, while
    weights, buffers and clip bounds stay live. Raises UnsupportedError for recurrent layers, and at the first step for
    what cannot be traced. ``check_isolation``: the first batches, and rare random ones later, show by experiment
    whether model and loss keep examples apart (see :mod:`dpcore.example_isolation.check`).
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
        self._structure = _structure(model)
        self.loss_fn = loss_fn
        self.noise_multiplier = float(noise_multiplier)
        self.expected_batch_size = expected_batch_size
        self.optimizer = optimizer
        self.noise = GaussianNoise() if noise is None else noise
        self.steps = 0
        self.parameters: dict[str, Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.accumulator = Accumulator(self.parameters, max_grad_norm, factors)
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ValueError(f"physical_batch_size is {physical_batch_size}; it must be at least 1.")
        self._physical = physical_batch_size
        self._planned: dict[Kind, MicroBatches] = {}
        self._largest: dict[Kind, int] = {}
        self._layout = Layout(model, custom_fallbacks(model))
        self.isolation = IsolationCheck(model, self.accumulator.names, self._layout)
        if not check_isolation:
            self.isolation.switch_off()
        self._plan: list[tuple[str, str]] = []
        self._compile_by("inductor" if compile is True else compile or None)

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
        self._structure = _structure(self.model)
        self._compile_by(state["_graphs"])

    # ---- the clipped sum

    @uncompiled
    def clipped_sum(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Σ_i min(1, C/|g_i|) g_i for inputs x (a tensor [B, ...], a tuple or a dict of them) and targets y (likewise).

        ``mask`` bool [B]: examples whose entry is False contribute nothing. B may be 0. The sums live in the engine's
        buffer and hold until the next call. Raises UnsupportedError where a gradient cannot be told apart by example.
        """
        self._check_model()
        self._withdraw()
        self.accumulator.flat.zero_()
        return self._add_clipped_sum(x, y, mask, 1.0)

    def _add_clipped_sum(self, x: Any, y: Any, mask: Tensor | None, scale: float) -> ClippedSum:
        """The clipped sum times ``scale``, added to what the buffer holds."""
        batch_size = _length(x)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch_size,)):
            raise ValueError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)} for {batch_size} examples; it must be bool, one "
                "entry per example: a weight above 1 would let an example move the sum by more than max_grad_norm."
            )
        kind = _kind(x)
        if self._graphs is not None:
            # The eager pass comes first in every mode: it sees what a trace cannot (random numbers without a rule).
            kind = (*kind, tuple(module.training for module in self._modules))
        self._largest[kind] = max(batch_size, self._largest.get(kind, 0))
        norms: list[Tensor] = []
        factors: list[Tensor] = []
        losses: list[Tensor] = []
        if batch_size and kind not in self._planned:
            self._layout.learn(
                self.accumulator.names,
                lambda count: _call(self.model, copies(x, batch_size, count)),
                probe_sizes(x, batch_size, self.model),
            )
        if self._graphs is not None:
            self._layout.refuse_unrepeatable()
        if self.isolation.due(kind, batch_size):
            self.isolation.check(kind, self._losses, (x, y), batch_size, losses=True)
        start = graph_size = 0
        while start < batch_size:
            if self._graphs is not None and not graph_size and kind in self._planned:
                # What the caller has filled up is cut into equal graphs; the first batch, begun eagerly, just as later.
                filled = mask is not None
                graph_size = self._graph_size(kind, batch_size if filled else batch_size - start, filled)
            rest = batch_size - start
            stop = start + (min(graph_size, rest) if graph_size else self._next_size(kind, batch_size, rest))
            rows = slice(start, stop)
            whole = start == 0 and stop == batch_size
            part = self._accumulate(
                x if whole else _take(x, rows),
                y if whole else _take(y, rows),
                None if mask is None else mask[rows],
                stop - start,
                scale,
                kind,
                graph_size,
            )
            for kept, new in zip((norms, factors, losses), part, strict=True):
                kept.append(new)
            start = stop
        return ClippedSum(
            {name: self.accumulator.sums[p] for name, p in self.parameters.items()},
            self._join(norms),
            self._join(factors),
            self._join(losses, grouped=False),
            self.sensitivity,
        )

    def _losses(self, batch: tuple[Any, Any]) -> Tensor:
        """[B] losses of inputs and targets."""
        x, y = batch
        losses = self.loss_fn(_call(self.model, x), y)
        self._check_losses(losses, _length(x))
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
        plan = self._planned.get(kind)
        size = self._physical or (plan.size(batch_size) if plan else 16)
        pieces = -(-remaining // size)
        return -(-remaining // pieces)

    def _graph_size(self, kind: Kind, count: int, filled: bool) -> int:
        """Length of the compiled pieces of ``count`` examples."""
        from dpcore.engine.graphs import CPU_GRAPH_EXAMPLES

        assert self._graphs is not None
        plan, on_cpu = self._planned[kind], self.accumulator.device.type == "cpu"
        most = min(plan.most, max(plan.least, CPU_GRAPH_EXAMPLES)) if on_cpu else plan.most
        return self._graphs.length(kind, count, self._physical or most, filled)

    def _traced(self, x: Any, y: Any, mask: Tensor, bounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What :meth:`_accumulate` computes, as a function that looks at no value."""
        tape = self._layout.tape(self.accumulator.names, len(mask))
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            tape.backward(losses, mask.to(losses.dtype))
        with torch.no_grad():
            # Memory of their own: a loss may hand out what it was given, which the next piece is written over.
            return *self.accumulator.clipped(tape.uses, mask, bounds), losses.detach().clone()

    def _accumulate(
        self, x: Any, y: Any, mask: Tensor | None, batch_size: int, scale: float, kind: Kind, graph_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one micro-batch to the sums, times ``scale``; norms and factors [groups, m], losses [m]. ``graph_size``:
        by the compiled graph of that length, 0: eagerly."""
        if graph_size:
            assert self._graphs is not None
            depends = (self.loss_fn, self.accumulator.factors)
            part = self._graphs.run(x, y, mask, graph_size, self.accumulator.bounds, self.accumulator.device, depends)
            if part is not None:
                sums, norms, factors, per_example = part
                self.accumulator.flat.add_(sums, alpha=scale)
                return norms, factors, per_example
        tape = self._layout.tape(self.accumulator.names, batch_size)
        with torch.enable_grad():
            with self._layout.recording(tape):
                losses = self._losses((x, y))
            weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
            try:
                tape.backward(losses, weights)
            except SeenOtherwise:
                return self._accumulate(x, y, mask, batch_size, scale, kind, 0)
        with torch.no_grad():
            norms, factors = self.accumulator.add(tape.uses, batch_size, mask, scale)
        if kind not in self._planned:
            choices = choose(tape.uses)
            self._plan = [(self.accumulator.names[c.param], c.method) for c in choices]
            self._planned[kind] = micro_batches(choices, tape.uses, batch_size, self.accumulator.device)
        return norms, factors, losses.detach()

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return self.accumulator.sensitivity

    # ---- the step

    @uncompiled
    def privatize(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Sets every trained parameter's ``grad`` to (clipped sum + σ·C·N(0, I)) / expected_batch_size.

        The noise belongs to this step's number (``steps``), which then goes up by one. An empty batch is a noisy step.
        """
        if self.expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is not set; it is the public divisor of the update, never len(batch)."
            )
        self._check_model()
        # The divisor goes into the clip factors and the noise, and the noise is drawn where the sums are then added: no
        # pass over the sums is spent on either.
        scale = 1.0 / self.expected_batch_size
        flat, std = self.accumulator.flat, self.noise_multiplier * self.sensitivity * scale
        first = self.noise.may_come_first
        self._withdraw()
        try:
            if first:
                self.noise.fill_(flat, std, self.steps)
            else:
                flat.zero_()
            result = self._add_clipped_sum(x, y, mask, scale)
            if not first:
                self.noise.add_(flat, std, self.steps)
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
        """:meth:`privatize`, then ``optimizer.step()``. Afterwards ``sums`` of the result hold the released
        gradient.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer; pass one, or call privatize() and update the parameters.")
        result = self.privatize(x, y, mask)
        self.optimizer.step()
        return result

    def _withdraw(self) -> None:
        """No ``grad`` while the buffer in which the last one lies is written anew: it would show sums without noise,
        and what a loss does to it (``zero_grad(set_to_none=False)``, say) would be done to the noise."""
        for param in self.accumulator.sums:
            param.grad = None

    # ---- checks and explanation

    def _check_model(self) -> None:
        """Before every pass: the same parameters are trained, and nothing was compiled or exchanged since."""
        self.accumulator.check_unchanged()
        check_hooks(self.parameters)
        if torch.is_inference_mode_enabled():
            raise PrivacyError(
                "torch.inference_mode() records no gradients: every example's would count as zero; leave it."
            )
        if self._structure != _structure(self.model):
            raise PrivacyError(
                "A layer or a parameter of the model was added, removed or replaced by another object since the engine "
                "was built (load_state_dict(assign=True) does so); build a new engine."
            )
        if any(module._compiled_call_impl is not None for module in self._modules):
            refuse_compiled(self.model)

    def _check_losses(self, losses: Any, batch_size: int) -> None:
        if not isinstance(losses, Tensor) or losses.shape != (batch_size,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise PrivacyError(
                f"The loss has shape {shape} for {batch_size} examples; it must be one loss per example, so use "
                'reduction="none" (a mean would mix the examples before clipping and leak them).'
            )

    def explain(self) -> str:
        """One line per trained parameter: how its norm and its sum are computed; physical batch sizes, of the largest
        batch so far; kernels."""
        lines = [f"{name}: {method}" for name, method in self._plan]
        lines += [f"{name or 'the whole model'}: no rule, by vmap" for name in self._layout.fallbacks]
        planned = {plan.size(self._largest[kind]) for kind, plan in self._planned.items()}
        sizes = sorted(planned) if self._physical is None else [self._physical]
        if self._graphs is not None:
            sizes = self._graphs.sizes
            lines.append("pass: one compiled graph for each physical batch size")
        lines.append(f"physical batch size: {', '.join(map(str, sizes)) or 'not planned yet'}")
        return "\n".join([*lines, f"compiled kernels: {'in use' if native.available() else native.REMEDY}"])


def _structure(model: nn.Module) -> list[int]:
    """Which modules and parameters there are, as objects (which the engine keeps alive)."""
    ids: list[int] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        ids.append(id(module))
        ids.extend(map(id, module._parameters.values()))
        waiting.extend(child for child in module._modules.values() if child is not None)
    return ids


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Mapping):
        return list(x.values())
    return list(x) if isinstance(x, tuple) else [x]


def _length(x: Any) -> int:
    return len(_tensors(x)[0])


def _kind(x: Any) -> Kind:
    return tuple((t.shape[1:], t.dtype) for t in _tensors(x))


def _take(x: Any, rows: slice) -> Any:
    if isinstance(x, Mapping):
        return {name: t[rows] for name, t in x.items()}
    return tuple(t[rows] for t in x) if isinstance(x, tuple) else x[rows]
