"""What kernels for GPUs find along with norms, for the clipped sums of the same output gradients."""

from __future__ import annotations

from torch import Tensor


class Limits:
    """The squares of the tiles [B, tiles] that a parameter's norms are the sums of, none of which a sum may exceed.

    They hold for the output gradients that they were found with, until these are others or have been changed.
    """

    def __init__(self) -> None:
        self._found: tuple[Tensor, int, Tensor] | None = None

    def note(self, grad: Tensor, limits: Tensor | None) -> None:
        self._found = None if limits is None else (grad, grad._version, limits)

    def of(self, grad: Tensor | None) -> Tensor | None:
        """Return those that were found with these very output gradients, or None."""
        if self._found is None or grad is None:
            return None
        found, version, limits = self._found
        return limits if found is grad and version == grad._version else None

    def rows(self, grad: Tensor | None, index: Tensor, of_rows: Tensor | None) -> Limits:
        """Return the limits for the examples ``index`` [k], whose output gradients are now ``of_rows``."""
        part, limits = Limits(), self.of(grad)
        if limits is not None and of_rows is not None:
            part.note(of_rows, limits.index_select(0, index))
        return part
