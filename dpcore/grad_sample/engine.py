"""The engine: per physical micro-batch one forward and one backward pass, then norms, factors and clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore import native
from dpcore.clipping import clip_factors
from dpcore.errors import PrivacyError
from dpcore.grad_sample import rules  # noqa: F401  (registers them)
from dpcore.grad_sample.accumulator import Accumulator, Factors
from dpcore.grad_sample.layout import Layout, copies, probe_sizes
from dpcore.grad_sample.planner import choose, physical_batch_size, stash_bytes
from dpcore.grad_sample.samplers import custom_fallbacks
from dpcore.grad_sample.tape import Tape
from dpcore.noise import GaussianNoise

LossFn = Callable[[Any, Any], Tensor]


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
    ) -> None:
        self.model = model
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
        self._planned: dict[tuple[Any, ...], int] = {}
        self._layout = Layout(model, custom_fallbacks(model))
        self._plan: list[tuple[str, str]] = []

    # ---- the clipped sum

    def clipped_sum(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Σ_i min(1, C/|g_i|) g_i for inputs x (a tensor [B, ...], a tuple or a dict of them) and targets y (likewise).

        ``mask`` bool [B]: examples whose entry is False contribute nothing. B may be 0. The sums live in the engine's
        buffer and hold until the next call. Raises UnsupportedError where a gradient cannot be told apart by example.
        """
        self.accumulator.check_unchanged()
        self.accumulator.flat.zero_()
        batch_size = _length(x)
        norms: list[Tensor] = []
        factors: list[Tensor] = []
        losses: list[Tensor] = []
        if batch_size and _kind(x) not in self._planned:
            self._layout.learn(
                self.accumulator.names,
                lambda count: _call(self.model, copies(x, batch_size, count)),
                probe_sizes(x, batch_size),
            )
        start = 0
        while start < batch_size:
            stop = start + self._next_size(x, batch_size - start)
            rows = slice(start, stop)
            whole = start == 0 and stop == batch_size
            part = self._accumulate(
                x if whole else _take(x, rows),
                y if whole else _take(y, rows),
                None if mask is None else mask[rows],
                stop - start,
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

    def _next_size(self, x: Any, remaining: int) -> int:
        """Size of the next micro-batch; the first batch of a kind starts small, to measure what an example leaves."""
        size = self._physical or self._planned.get(_kind(x), 16)
        pieces = -(-remaining // size)
        return -(-remaining // pieces)

    def _accumulate(self, x: Any, y: Any, mask: Tensor | None, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one micro-batch to the sums; norms and factors [groups, m], losses [m]."""
        tape = Tape(self.accumulator.names, batch_size, layout=self._layout)
        with torch.enable_grad():
            with tape:
                losses = self.loss_fn(_call(self.model, x), y)
            self._check_losses(losses, batch_size)
            weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
            tape.backward(losses, weights)
        with torch.no_grad():
            norms, factors = self.accumulator.add(tape.uses, batch_size, mask)
        kind = _kind(x)
        if kind not in self._planned:
            choices = choose(tape.uses)
            self._plan = [(self.accumulator.names[c.param], c.method) for c in choices]
            per_example = stash_bytes(choices, tape.uses, batch_size)
            self._planned[kind] = physical_batch_size(max(per_example, 1.0), tape.uses, self.accumulator.device)
        return norms, factors, losses.detach()

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return self.accumulator.sensitivity

    # ---- the step

    def privatize(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Sets every trained parameter's ``grad`` to (clipped sum + σ·C·N(0, I)) / expected_batch_size.

        The noise belongs to this step's number (``steps``), which then goes up by one. An empty batch is a noisy step.
        """
        if self.expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is not set; it is the public divisor of the update, never len(batch)."
            )
        result = self.clipped_sum(x, y, mask)
        self.noise.add_(self.accumulator.flat, self.noise_multiplier * self.sensitivity, self.steps)
        self.accumulator.flat.div_(self.expected_batch_size)
        self.steps += 1
        for param, summed in self.accumulator.sums.items():
            param.grad = summed if param.dtype == summed.dtype else summed.to(param.dtype)
        return result

    def step(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """:meth:`privatize`, then ``optimizer.step()``. Afterwards ``sums`` of the result hold the released
        gradient.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer; pass one, or call privatize() and update the parameters.")
        result = self.privatize(x, y, mask)
        self.optimizer.step()
        return result

    # ---- checks and explanation

    def _check_losses(self, losses: Any, batch_size: int) -> None:
        if not isinstance(losses, Tensor) or losses.shape != (batch_size,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise PrivacyError(
                f"The loss has shape {shape} for {batch_size} examples; it must be one loss per example, so use "
                'reduction="none" (a mean would mix the examples before clipping and leak them).'
            )

    def explain(self) -> str:
        """One line per trained parameter: how its norm and its sum are computed; physical batch sizes; kernels."""
        lines = [f"{name}: {method}" for name, method in self._plan]
        lines += [f"{name or 'the whole model'}: no rule, by vmap" for name in self._layout.fallbacks]
        sizes = sorted(set(self._planned.values())) if self._physical is None else [self._physical]
        lines.append(f"physical batch size: {', '.join(map(str, sizes)) or 'not planned yet'}")
        return "\n".join([*lines, f"compiled kernels: {'in use' if native.available() else native.REMEDY}"])


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


def _kind(x: Any) -> tuple[Any, ...]:
    return tuple((t.shape[1:], t.dtype) for t in _tensors(x))


def _take(x: Any, rows: slice) -> Any:
    if isinstance(x, Mapping):
        return {name: t[rows] for name, t in x.items()}
    return tuple(t[rows] for t in x) if isinstance(x, tuple) else x[rows]
