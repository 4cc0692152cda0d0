"""The adapter contract: everything that a framework's author implements, and all that the worker knows of a framework.

Standard library and numpy only: this module is imported inside every framework's environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.tasks import Task

Array = np.ndarray


class Unsupported(Exception):
    """Raised by an adapter that cannot do what is asked; the message is the reason and becomes the record's state."""


NO_OWN_LOOP = "has no loop of its own, so there is nothing to run as shipped."


@dataclass(frozen=True)
class Setting:
    """How a task is trained. Everything an adapter may depend on beyond the task itself.

    ``batch_size`` is the *expected* (nominal) batch size: the divisor of every update, private or not, whatever the
    length of the index list handed to :meth:`Adapter.step`.
    """

    variant: str
    private: bool
    batch_size: int
    dataset_size: int
    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    seed: int
    device: str = "cpu"
    threads: int = 1
    precision: str = "float32"
    padded_sizes: tuple[int, ...] = ()

    @property
    def sample_rate(self) -> float:
        """Probability with which each example is in a batch, batch_size / dataset_size."""
        return self.batch_size / self.dataset_size


@dataclass(frozen=True)
class Memory:
    """Peak memory that the framework itself counts, in bytes by named notion, for instance ``cuda_peak_allocated``.

    Empty on a CPU: there the worker measures the process's resident growth for every framework alike.
    """

    bytes_by_notion: Mapping[str, int]


class Adapter(ABC):
    """One framework training one task. Never reads a clock; never draws its own batches, except in ``epoch``.

    Life: ``build``, ``place``, then any number of ``step``; ``build`` may be called again at any time with the same
    task and resets parameters, optimiser and noise stream to what (setting, initial) say, keeping compiled code and
    placed data where they are still valid. The same (setting, initial, index lists) gives the same parameters.
    """

    @abstractmethod
    def build(self, task: Task, setting: Setting, initial: Mapping[str, Array]) -> None:
        """Untimed. Makes the model with the canonical float32 weights ``initial`` (as in ``task.parameters``).

        Raises :class:`Unsupported` with a reason where the framework cannot train this task or setting.
        """

    @abstractmethod
    def place(self, x: Array, y: Array) -> None:
        """Untimed. Puts the whole training set onto the device.

        ``x``: float32 [n, *task.input_shape] or int32 [n, tokens]; ``y``: int32 [n]. The arrays must not be written to.
        """

    @abstractmethod
    def step(self, indices: Array, mask: Array | None) -> None:
        """The timed path: one update. May return before the device has finished; :meth:`synchronize` waits.

        ``indices``: int64 [k] rows of the placed data. ``mask``: None, or bool [k] for variants that declare
        ``static_shapes`` (then k is one of ``setting.padded_sizes``; rows whose mask is False are padding, point to row
        0 and contribute nothing). k, or the number of True rows, may be zero: a private step then still adds its noise.

        Private: w <- w - lr/B * (sum_i min(1, C/|g_i|) g_i + sigma*C*N(0, I)). Not private: w <- w - lr/B * sum_i g_i.
        g_i is the gradient of example i's own loss over all trained parameters, B is ``setting.batch_size``.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all the work of earlier steps is done."""

    @abstractmethod
    def parameters(self) -> Mapping[str, Array]:
        """Current weights as float32 numpy copies under the canonical names and layouts."""

    def epoch(self, seed: int) -> int | None:
        """Optional, only for protocol ``as_shipped``: one epoch by the library's own public loop, loader and sampler.

        Called after ``build`` and ``place``, and timed as a whole. Like ``step`` it goes on from the current weights
        with the same sigma, C, learning rate and (expected) batch size, and may return before the device has finished.
        The loader takes the training set from where its user would have it. ``seed`` fixes its order and its noise: the
        same (build, seed) gives the same weights, unless the variant declares ``own_replays = false``.

        Returns how many updates were made, or None where the library does not say. How the loop samples stands in the
        variant's ``own_sampling``. Raises :class:`Unsupported` where there is no such loop.
        """
        raise Unsupported(NO_OWN_LOOP)

    def peak_memory(self) -> Memory:
        """What the framework's own allocator counted since :meth:`build`; nothing on a CPU."""
        return Memory({})

    def epsilon(self, steps: int, delta: float) -> float | None:
        """The library's own privacy accountant after ``steps`` steps of this setting; None where it has none."""
        return None
