"""The clipped sums of all parameters, in one flat buffer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError

LARGE_BUFFER = 2**18
"""Numbers in a buffer that is not copied: the views of a new one take less time."""


@dataclass(frozen=True)
class Buffer:
    """``flat`` [n], and every parameter's part of it as it lies in memory and in the parameter's shape."""

    flat: Tensor
    segments: dict[Parameter, Tensor]
    sums: dict[Parameter, Tensor]

    @functools.cached_property
    def turned(self) -> list[tuple[Tensor, Tensor]]:
        """Both parts of the parameters whose memory is not row-major."""
        return [(self.segments[p], summed) for p, summed in self.sums.items() if not summed.is_contiguous()]


class SumBuffer:
    """A sum for each of the named ``parameters``, laid out in memory as the parameter is."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        if not parameters:
            raise ValueError("The model has no parameter with requires_grad=True; there is nothing to train.")
        self.parameters = dict(parameters)
        self.names = {p: n for n, p in self.parameters.items()}
        self._themselves = {p: p for p in self.names}
        self._allocate()

    @property
    def targets(self) -> dict[Parameter, Any]:
        """The parameter into whose gradient a parameter's sum is released: itself, or its shard."""
        return self._themselves

    def _allocate(self) -> None:
        """One flat buffer for all sums, so that noise and scaling are one pass each."""
        params = list(self.parameters.values())
        self._kinds = {(p.dtype, p.device) for p in params}
        self._layout = [(p.shape, p.stride()) for p in params]
        released = list(self.targets.values())
        dtypes = {torch.promote_types(p.dtype, torch.float32) for p in released}
        devices = {p.device for p in released}
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
        self._narrowest = min((p.dtype for p in released), key=lambda dtype: torch.finfo(dtype).max)
        # In memory each sum is laid out as its parameter is (channels-last, for instance), so that updates run
        # straight.
        self._order = {p: [d for _, d in sorted((-stride, d) for d, stride in enumerate(p.stride()))] for p in params}
        self._numbers = sum(p.numel() for p in params)
        self._buffer: Buffer | None = None

    @property
    def _held(self) -> Buffer:
        """The buffer, which has memory from its first use on."""
        if self._buffer is None:
            flat = torch.zeros(self._numbers, dtype=self.dtype, device=self.device)
            self._buffer = Buffer(flat, *self._views(flat))
        return self._buffer

    @property
    def flat(self) -> Tensor:
        """[n]: all sums, one after the other."""
        return self._held.flat

    @property
    def sums(self) -> dict[Parameter, Tensor]:
        """Every parameter's sum, a view of ``flat`` in the parameter's shape."""
        return self._held.sums

    def by_address(self) -> Iterator[tuple[int, Tensor]]:
        """Give the sums in parts, each with the place of its first number among all: noise has that address.

        A parameter whose memory is row-major lies in ``flat`` as it is numbered; such ones come together, as vectors.
        """
        first = last = 0
        for param, summed in self.sums.items():
            if not summed.is_contiguous():
                if last > first:
                    yield first, self.flat[first:last]
                yield last, summed
                first = last + param.numel()
            last += param.numel()
        if last > first:
            yield first, self.flat[first:last]

    def turn_round(self) -> None:
        """Bring numbers that were written to ``flat`` row by row of each parameter into the order of its memory."""
        for segment, summed in self._held.turned:
            summed.copy_(segment.clone().view(summed.shape))

    def reduce(self) -> None:
        """Finish a piece of a batch, whose passes were added."""

    def clear(self) -> None:
        """Make the sums zero."""
        if self._buffer is not None:
            self._buffer.flat.zero_()

    def released(self) -> dict[Parameter, Any]:
        """Return what was released as gradients of :attr:`targets`, which may lie in the buffer."""
        return {p: summed if p.dtype == summed.dtype else summed.to(p.dtype) for p, summed in self.sums.items()}

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
        self._buffer = None if flat is None else Buffer(flat, *self._views(flat))

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
        """Return whether a parameter has another size or order in memory than its sum, which rules write in order."""
        return self._layout != [(p.shape, p.stride()) for p in self.parameters.values()]

    def follow(self) -> bool:
        """Empty sums where the parameters are now, if ``module.to(...)`` has moved them or turned them in memory."""
        moved = self._kinds != {(p.dtype, p.device) for p in self.names} or self.lies_otherwise
        if moved:
            self._allocate()
        return moved

    def check_unchanged(self) -> None:
        """PrivacyError where a parameter was frozen since: its sum would no longer be formed."""
        for name, param in self.parameters.items():
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )
