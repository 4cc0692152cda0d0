"""Buffers and numbers that a model writes by itself, as a batch finds them: each of its pieces is to find the same.

A count of passes (a warm-up, an annealed weight), the vectors of a spectral norm or the averages of a teacher move with
every pass. Of a batch that is cut, the number of passes depends on its length, which is private: one example more would
change the gradients of all others, and the buffers would tell the length without noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class _Buffer:
    """A buffer among those of its part, its values, and its version when it had them."""

    of: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    value: Tensor
    version: int

    def restore(self) -> None:
        if self.tensor._version != self.version:
            self.tensor.copy_(self.value)
            self.version = self.tensor._version
        else:  # a write through .data leaves no version; to look for one a GPU would have to be waited for
            self.tensor.data.copy_(self.value)
        self.of[self.name] = self.tensor


class BatchStart:
    """Buffers of a model's parts, and whole and real numbers in their attributes, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._buffers: list[_Buffer] = []
        for part in model.modules():
            attributes = vars(part)
            self._numbers += [(attributes, n, v) for n, v in attributes.items() if type(v) in (int, float)]
            for name, buffer in part._buffers.items():
                if buffer is not None and _is_written(buffer):
                    value = buffer.detach().clone()
                    self._buffers.append(_Buffer(part._buffers, name, buffer, value, buffer._version))

    @torch.no_grad()
    def restore(self) -> None:
        """Give them back to the model, before the batch's next piece."""
        for attributes, name, number in self._numbers:
            if attributes.get(name) is not number:
                attributes[name] = number
        for buffer in self._buffers:
            buffer.restore()


def _is_written(buffer: Tensor) -> bool:
    """Return whether a pass may write to a buffer: not to one that ranks hold together, to a sparse one, or to one with
    a number for several places.
    """
    if buffer.layout != torch.strided or buffer.is_inference() or hasattr(buffer, "device_mesh"):
        return False
    return not any(step == 0 and n > 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True))
