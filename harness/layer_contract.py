"""The contract of a layer's contestant: what ``frameworks/<name>/layers.py`` implements.

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
    """Settings of a layer's passes.

    Attributes:
        variant: the contestant's variant, from its ``layers.toml``.
        passes: ``plain`` (forward, backward, no DP), ``per_sample`` (backward leaves a gradient per example) or
            ``clipped`` (backward and the sum of the clipped gradients).
        batch_size: examples, b.
        max_grad_norm: C, the bound on one example's gradient norm.
        device: ``cpu`` or ``cuda``.
        threads: processor threads that the framework may use.
    """

    variant: str
    passes: str
    batch_size: int
    max_grad_norm: float
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Bytes:
    """Effect of a piece of work on the memory.

    Attributes:
        delta: bytes allocated less bytes freed.
        peak: the highest level above that at the start, in bytes.
    """

    delta: int
    peak: int


def of_events(sizes: Iterable[int]) -> Bytes:
    """Add up a trace of allocations.

    Args:
        sizes: bytes, in the order in which it happened: allocations > 0, releases < 0.

    Returns:
        The level at the end and the highest one.
    """
    level = peak = 0
    for size in sizes:
        level += size
        peak = max(peak, level)
    return Bytes(level, peak)


class CachingAllocator:
    """The counters of CUDA's caching allocator.

    Its blocks are released long after its tensors; *allocated* counts tensors, rounded up to 512 bytes.
    """

    def __init__(self, counters: Any, synchronize: Callable[[], None]) -> None:
        """Take the counters.

        Args:
            counters: ``torch.cuda``, or what has the same three functions.
            synchronize: returns when the device is at rest.
        """
        self.counters = counters
        self.synchronize = synchronize

    def count(self, work: Callable[[], None]) -> Bytes:
        """Do ``work`` and return what it did to the memory."""
        self.synchronize()
        before = self.allocated()
        self.counters.reset_peak_memory_stats()
        work()
        self.synchronize()
        return Bytes(self.allocated() - before, self.counters.max_memory_allocated() - before)

    def allocated(self) -> int:
        """Return the bytes of all tensors that are alive."""
        return int(self.counters.memory_allocated())


class LayerAdapter(ABC):
    """One framework's layer. It never reads a clock.

    Its life: ``configure``, ``place_inputs``, ``place_labels``, ``build``, then any number of ``run``. Each of the
    first four is called once; another batch size or bound gets another adapter.
    """

    instrument: str
    """What counts the bytes, for instance ``torch profiler``."""

    @abstractmethod
    def configure(self, layer: Layer, setting: LayerSetting) -> None:
        """Set device, threads and float32 arithmetic.

        Make one small matrix product with its gradient, so that a workspace which the BLAS library keeps is there
        before bytes are counted.

        Args:
            layer: the layer, as data.
            setting: how to run it.

        Raises:
            Unsupported: there is no such layer or pass; the message is the reason.
        """

    @abstractmethod
    def place_inputs(self, batches: Sequence[Mapping[str, Array]]) -> None:
        """Put the inputs of all batches onto the device, in the layer's best layout. Allocate nothing else.

        Args:
            batches: for each batch the inputs by name, [b, *shape], float32, or int64 token ids.
        """

    @abstractmethod
    def place_labels(self, batches: Sequence[Array]) -> None:
        """Put the targets of all batches onto the device. Allocate nothing else.

        Args:
            batches: for each batch [b, *layer.output].
        """

    @abstractmethod
    def build(self, initial: Mapping[str, Array]) -> None:
        """Make the layer.

        Args:
            initial: its weights, float32, under their canonical names and shapes.
        """

    @abstractmethod
    def run(self, batch: int) -> None:
        """Make one pass. This is the timed path. It may return before the device has finished.

        Forget the last pass's gradients, go forward, sum the examples' own losses, go backward, and do what
        ``setting.passes`` says. clipped: sum_i min(1, C/|g_i|) g_i, g_i over all parameters; C is
        ``setting.max_grad_norm``.

        Args:
            batch: the number of the batch among those that were placed.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all the work of earlier passes is done."""

    @abstractmethod
    def gradient_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of :meth:`gradients` without copying them."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Array]:
        """Return what the last pass left behind.

        Returns:
            Numpy copies by canonical name: the sum [shape], or for ``per_sample`` [b, *shape].
        """

    @abstractmethod
    def count(self, work: Callable[[], None]) -> Bytes:
        """Do ``work``, which allocates through this framework, and count its bytes."""

    @abstractmethod
    def allocated(self) -> int:
        """Return the bytes allocated now, by another way than adding up what :meth:`count` returned."""

    def plan(self) -> Mapping[str, int]:
        """Return what a framework that plans for itself says of the last pass.

        Returns:
            ``micro_batch``: examples at once; ``kept_bytes``: of per-sample gradients kept per example.
        """
        return {}

    def count_pass(self, batch: int) -> Bytes:
        """Count one :meth:`run`. Frameworks whose passes have to be counted in another way override it."""

        def work() -> None:
            self.run(batch)
            self.synchronize()

        return self.count(work)
