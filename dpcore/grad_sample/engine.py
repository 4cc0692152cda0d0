"""The engine: per physical micro-batch one forward and one backward pass, then norms, factors and clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.clipping import check_max_grad_norm, clip_factors
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample import convolution, embedding, recurrent  # noqa: F401  (registers the rules)
from dpcore.grad_sample.planner import Choice, choose, physical_batch_size, stash_bytes
from dpcore.grad_sample.tape import Tape, Use
from dpcore.noise import GaussianNoise

LossFn = Callable[[Any, Any], Tensor]
Factors = Callable[[Tensor, float], Tensor]

# A squared ghost norm is off by about eps times the sum of its absolute terms. While that sum is within this factor
# of the squared norm, the norm is good to a few eps, well inside the clip factor's margin of 32; beyond, the
# example's gradient is formed in float64. Convolutional networks stay below 1.
TOLERATED_CANCELLATION = 8.0


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
        self.factors = factors
        self.parameters: dict[str, Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = {p: n for n, p in self.parameters.items()}
        if not self.parameters:
            raise ValueError("The model has no parameter with requires_grad=True; there is nothing to train.")
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ValueError(f"physical_batch_size is {physical_batch_size}; it must be at least 1.")
        self._set_bounds(max_grad_norm)
        self._physical = physical_batch_size
        self._planned: dict[tuple[Any, ...], int] = {}
        self._plan: list[tuple[str, str]] = []
        self._allocate()

    def _set_bounds(self, max_grad_norm: float | Sequence[float]) -> None:
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
        dtypes = {torch.promote_types(p.dtype, torch.float32) for p in params}
        devices = {p.device for p in params}
        if len(dtypes) > 1 or len(devices) > 1:
            raise UnsupportedError(
                f"The trained parameters have dtypes {sorted(map(str, dtypes))} on {sorted(map(str, devices))}; "
                f"bring the "
                "model to one precision and one device with model.to(...)."
            )
        self._dtype, self._device = dtypes.pop(), devices.pop()
        self._flat = torch.zeros(sum(p.numel() for p in params), dtype=self._dtype, device=self._device)
        segments = torch.split(self._flat, [p.numel() for p in params])
        self._segments = dict(zip(params, segments, strict=True))
        # In memory each sum is laid out as its parameter is (channels-last, for instance), so that updates run
        # straight.
        self._order = {p: sorted(range(p.dim()), key=lambda d, p=p: -p.stride(d)) for p in params}
        self._sums = {}
        for p, segment in self._segments.items():
            order = self._order[p]
            permuted = segment.view([p.shape[d] for d in order])
            self._sums[p] = permuted.permute([order.index(d) for d in range(p.dim())])

    # ---- the clipped sum

    def clipped_sum(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Σ_i min(1, C/|g_i|) g_i for inputs x (a tensor [B, ...], a tuple or a dict of them) and targets y (likewise).

        ``mask`` bool [B]: examples whose entry is False contribute nothing. B may be 0. The sums live in the engine's
        buffer and hold until the next call. Raises UnsupportedError where a gradient cannot be told apart by example.
        """
        self._check_unchanged()
        self._flat.zero_()
        batch_size = _length(x)
        norms, factors, losses = [], [], []
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
            {name: self._sums[p] for name, p in self.parameters.items()},
            self._join(norms),
            self._join(factors),
            self._join(losses, grouped=False),
            self.sensitivity,
        )

    def _join(self, parts: list[Tensor], grouped: bool = True) -> Tensor:
        if parts:
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        else:
            joined = torch.zeros((len(self.bounds), 0) if grouped else (0,), dtype=self._dtype, device=self._device)
        return joined[0] if grouped and len(self.bounds) == 1 else joined

    def _next_size(self, x: Any, remaining: int) -> int:
        """Size of the next micro-batch; the first batch of a kind starts small, to measure what an example leaves."""
        size = self._physical or self._planned.get(_kind(x), 16)
        pieces = -(-remaining // size)
        return -(-remaining // pieces)

    def _accumulate(self, x: Any, y: Any, mask: Tensor | None, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one micro-batch to the sums; norms and factors [groups, m], losses [m]."""
        tape = Tape(self._names, batch_size)
        with torch.enable_grad():
            with tape:
                losses = self.loss_fn(_call(self.model, x), y)
            self._check_losses(losses, batch_size)
            weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
            tape.backward(losses, weights)
        with torch.no_grad():
            norms, factors = self._clip(tape.uses, batch_size, mask)
        kind = _kind(x)
        if kind not in self._planned:
            choices = choose(tape.uses)
            self._plan = [(self._names[c.param], c.method) for c in choices]
            per_example = stash_bytes(choices, tape.uses, batch_size)
            self._planned[kind] = physical_batch_size(max(per_example, 1.0), tape.uses, self._device)
        return norms, factors, losses.detach()

    def _clip(self, uses: Sequence[Use], batch_size: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        choices = choose(uses)
        norms_sq, errors, kept = self._measure(choices, batch_size)
        doubtful = self._doubtful(norms_sq, errors)
        if not bool(doubtful.any()):
            norms = norms_sq.sqrt_()
            factors = self._factors(norms, mask)
            self._add(choices, kept, factors)
            return norms, factors
        norms = norms_sq
        factors = torch.zeros_like(norms)
        good = (~doubtful).nonzero().squeeze(1)
        if len(good):
            part_mask = None if mask is None else mask[good]
            part = choose([use.rows(good, self._dtype) for use in uses])
            part_norms_sq, _, kept = self._measure(part, len(good))
            norms[:, good] = part_norms_sq.sqrt()
            factors[:, good] = self._factors(norms[:, good], part_mask)
            self._add(part, kept, factors[:, good])
        for i in doubtful.nonzero():
            norms[:, i], factors[:, i] = self._add_singly([use.rows(i, torch.float64) for use in uses], mask, i)
        return norms, factors

    def _measure(
        self, choices: Sequence[Choice], batch_size: int
    ) -> tuple[Tensor, Tensor | None, dict[Parameter, Tensor]]:
        """Squared norms [groups, m], the scale of their rounding errors [groups, m] or None, kept gradients [m, n]."""
        norms_sq = torch.zeros((len(self.bounds), batch_size), dtype=self._dtype, device=self._device)
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
            norms_sq[group] += norm_sq
        return norms_sq, scales, kept

    def _doubtful(self, norms_sq: Tensor, scales: Tensor | None) -> Tensor:
        """[m] bool: examples whose squared norm overflowed, is not a number, or may be rounding error."""
        doubtful = ~(norms_sq < torch.inf)
        if scales is not None:
            doubtful |= scales > TOLERATED_CANCELLATION * norms_sq
        return doubtful.any(0)

    def _factors(self, norms: Tensor, mask: Tensor | None) -> Tensor:
        factors = torch.stack([self.factors(norms[i], c) for i, c in enumerate(self.bounds)])
        return factors if mask is None else factors * mask

    def _add(self, choices: Sequence[Choice], kept: Mapping[Parameter, Tensor], factors: Tensor) -> None:
        for choice in choices:
            out = self._sums[choice.param]
            of = factors[self._group[choice.param]]
            if choice.method == "ghost":
                choice.uses[0].add_clipped_sum(choice.param, of, out)
            else:
                self._segments[choice.param].addmv_(kept[choice.param].t(), of)

    def _add_singly(self, uses: Sequence[Use], mask: Tensor | None, i: Tensor) -> tuple[Tensor, Tensor]:
        """One example by its float64 gradient: exact under cancellation, and 1e30 does not overflow when squared."""
        grads: dict[Parameter, Tensor] = {}
        norms_sq = torch.zeros((len(self.bounds), 1), dtype=torch.float64, device=self._device)
        for use in uses:
            for param in use.params if use.grad is not None else ():
                grad = use.grad_sample(param)[0]
                grads[param] = grads[param] + grad if param in grads else grad
        for param, grad in grads.items():
            norms_sq[self._group[param]] += grad.square().sum()
        norms = norms_sq.sqrt_()
        factors = self._factors(norms, None if mask is None else mask[i])
        for param, grad in grads.items():
            factor = factors[self._group[param], 0]
            if factor > 0:
                self._sums[param].add_((grad * factor).to(self._dtype))
        return norms.to(self._dtype), factors.to(self._dtype)

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
        self.noise.add_(self._flat, self.noise_multiplier * self.sensitivity, self.steps)
        self._flat.div_(self.expected_batch_size)
        self.steps += 1
        for param, summed in self._sums.items():
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

    def _check_unchanged(self) -> None:
        for name, param in self.parameters.items():
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )

    def _check_losses(self, losses: Any, batch_size: int) -> None:
        if not isinstance(losses, Tensor) or losses.shape != (batch_size,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise PrivacyError(
                f"The loss has shape {shape} for {batch_size} examples; it must be one loss per example, so use "
                'reduction="none" (a mean would mix the examples before clipping and leak them).'
            )

    def explain(self) -> str:
        """One line per trained parameter: how its norm and its sum are computed; and the physical batch sizes."""
        lines = [f"{name}: {method}" for name, method in self._plan]
        sizes = sorted(set(self._planned.values())) if self._physical is None else [self._physical]
        return "\n".join([*lines, f"physical batch size: {', '.join(map(str, sizes)) or 'not planned yet'}"])


def _kept(choice: Choice) -> Tensor:
    """[m, ...] per-sample gradient of a parameter over all its uses."""
    total = choice.uses[0].grad_sample(choice.param)
    for use in choice.uses[1:]:
        total = total + use.grad_sample(choice.param)
    return total


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
