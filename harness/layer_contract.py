"""The contract of a layer's contestant: everything that ``frameworks/<name>/layers.py`` implements.

Standard library and numpy only: this module is imported inside every framework's environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.contract import Unsupported
from harness.layers import Layer

__all__ = ["Bytes", "CachingAllocator", "LayerAdapter", "LayerSetting", "Unsupported", "of_events"]

Array = np.ndarray


@dataclass(frozen=True)
class LayerSetting:
    """``passes``: ``plain`` (forward, backward, no DP), ``per_sample`` (backward leaves a gradient per example) or
    ``clipped`` (backward and the sum of the clipped gradients)."""

    variant: str
    passes: str
    batch_size: int
    max_grad_norm: float
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Bytes:
    """Over a piece of work: bytes allocated less bytes freed at its end, and the highest above its start."""

    delta: int
    peak: int


def of_events(sizes: Iterable[int]) -> Bytes:
    """From allocations (> 0) and releases (< 0) in the order in which they happened."""
    level = peak = 0
    for size in sizes:
        level += size
        peak = max(peak, level)
    return Bytes(level, peak)


class CachingAllocator:
    """The counters of CUDA's caching allocator, whose blocks are released long after its tensors: *allocated* counts
    tensors, rounded up to 512 bytes. ``counters``: ``torch.cuda``, or what has the same three functions."""

    def __init__(self, counters: Any, synchronize: Callable[[], None]) -> None:
        self.counters = counters
        self.synchronize = synchronize

    def count(self, work: Callable[[], None]) -> Bytes:
        self.synchronize()
        before = self.allocated()
        self.counters.reset_peak_memory_stats()
        work()
        self.synchronize()
        return Bytes(self.allocated() - before, self.counters.max_memory_allocated() - before)

    def allocated(self) -> int:
        return int(self.counters.memory_allocated())


class LayerAdapter(ABC):
    """One framework's layer. Never reads a clock.

    Life: ``configure``, ``place_inputs``, ``place_labels``, ``build``, then any number of ``run``. Each of the first
    four is called once; another batch size or bound gets another adapter.
    """

    instrument: str
    """What counts the bytes, for instance ``torch profiler``."""

    @abstractmethod
    def configure(self, layer: Layer, setting: LayerSetting) -> None:
        """Device, threads, float32 arithmetic; and one small matrix product with its gradient, so that a workspace
        which the BLAS library keeps is there before bytes are counted.

        Raises :class:`Unsupported` with the reason where there is no such layer or pass.
        """

    @abstractmethod
    def place_inputs(self, batches: Sequence[Mapping[str, Array]]) -> None:
        """The inputs of all batches onto the device, in the layout that the layer likes best; allocates nothing else.

        Each batch: inputs by name, [b, *shape], float32, or int64 token ids.
        """

    @abstractmethod
    def place_labels(self, batches: Sequence[Array]) -> None:
        """Targets [b, *layer.output] of all batches onto the device; allocates nothing else."""

    @abstractmethod
    def build(self, initial: Mapping[str, Array]) -> None:
        """The layer with the canonical float32 weights ``initial``."""

    @abstractmethod
    def run(self, batch: int) -> None:
        """The timed path, one pass over that batch: forget the last pass's gradients, forward, the sum of the examples'
        own losses, backward, and what ``setting.passes`` says. May return before the device has finished.

        clipped: sum_i min(1, C/|g_i|) g_i, g_i over all parameters; C is ``setting.max_grad_norm``.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all the work of earlier passes is done."""

    @abstractmethod
    def gradient_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what :meth:`gradients` would return, without copying it."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Array]:
        """What the last pass left behind, by canonical name, as numpy copies: the sum [shape], or for ``per_sample``
        [b, *shape]."""

    @abstractmethod
    def count(self, work: Callable[[], None]) -> Bytes:
        """Does ``work``, which allocates through this framework, and counts its bytes."""

    @abstractmethod
    def allocated(self) -> int:
        """Bytes allocated now, by another way than adding up what :meth:`count` returned."""

    def plan(self) -> Mapping[str, int]:
        """After a pass: what a framework that plans for itself says of it: ``micro_batch`` examples at once,
        ``kept_bytes`` of per-sample gradients kept per example."""
        return {}

    def count_pass(self, batch: int) -> Bytes:
        """:meth:`run` counted; for frameworks whose passes have to be counted in another way."""

        def work() -> None:
            self.run(batch)
            self.synchronize()

        return self.count(work)
