"""The adapter contract: everything that a framework's author implements, and all that the worker knows of a framework.

Standard library and numpy only: this module is imported inside every framework's environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.optimizer import PLAIN, SGD, Optimizer
from harness.tasks import FLOAT32, Task

Array = np.ndarray


class Unsupported(Exception):
    """Raised by an adapter that cannot do what is asked; the message is the reason and becomes the record's state."""


PARALLEL = {"ddp": "DDP", "fsdp2": "FSDP2"}
"""Ways of training in several processes, with their titles: a copy of the weights in each, or a share of them."""
NO_OWN_LOOP = "has no loop of its own, so there is nothing to run as shipped."


@dataclass(frozen=True)
class Setting:
    """Settings of the training of a task: everything an adapter may depend on beyond the task itself.

    Attributes:
        variant: the contestant's variant, from its ``framework.toml``.
        private: whether updates are clipped and noised.
        batch_size: the *expected* (nominal) batch size B, in examples: the divisor of every update, private or not,
            whatever the length of the index list handed to :meth:`Adapter.step`.
        dataset_size: training examples, N.
        noise_multiplier: sigma, the noise's standard deviation over C.
        max_grad_norm: C, the bound on one example's gradient norm.
        learning_rate: lr.
        seed: of the noise.
        device: ``cpu`` or ``cuda``.
        threads: processor threads that the framework may use.
        precision: of the products of the forward and the backward pass, ``float32`` or ``bfloat16``. Weights, losses,
            norms, clipped sums, noise and the optimizer are float32 whatever it is.
        padded_sizes: the lengths of index lists that a variant with ``static_shapes`` may get, in examples.
        optimizer: what turns the gradient of a step into an update, with its constants.
        world_size: processes that train together, for variants that declare ``parallel``; ``threads`` are of each.
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
    precision: str = FLOAT32
    padded_sizes: tuple[int, ...] = ()
    optimizer: Optimizer = PLAIN
    world_size: int = 1

    @property
    def sample_rate(self) -> float:
        """Probability with which each example is in a batch, batch_size / dataset_size."""
        return self.batch_size / self.dataset_size


@dataclass(frozen=True)
class Memory:
    """Peak memory that the framework itself counts.

    Attributes:
        bytes_by_metric: bytes by the name of what was counted, for instance ``cuda_peak_allocated``. Empty on a CPU:
            there the worker measures the process's resident growth for every framework alike.
    """

    bytes_by_metric: Mapping[str, int]


class Adapter(ABC):
    """One framework that trains one task. It never reads a clock and never draws its own batches, except in ``epoch``.

    Its life: ``build``, ``place``, then any number of ``step``. ``build`` may be called again at any time with the same
    task; it then resets parameters, optimiser and noise stream to what (setting, initial) say, and may keep compiled
    code and placed data where they are still valid. The same (setting, initial, index lists) gives the same parameters.

    Attributes:
        optimizers: names of the optimizers that it trains by; the harness asks for no other one.
        precisions: those of ``setting.precision`` in which it trains; likewise.
    """

    optimizers: tuple[str, ...] = (SGD.name,)
    precisions: tuple[str, ...] = (FLOAT32,)

    @abstractmethod
    def build(self, task: Task, setting: Setting, initial: Mapping[str, Array]) -> None:
        """Make the model and its optimiser. Not timed.

        Args:
            task: the network, its loss and its data.
            setting: how to train it.
            initial: the weights to start from, float32, under the canonical names and shapes of ``task.parameters``,
                frozen ones included.

        Raises:
            Unsupported: the framework cannot train this task or setting; the message is the reason.
        """

    @abstractmethod
    def place(self, x: Array, y: Array) -> None:
        """Put the whole training set onto the device. Not timed.

        Args:
            x: float32 [n, *task.input_shape] or int32 [n, tokens]; must not be written to.
            y: labels, int32 [n, *task.label_shape]; must not be written to.
        """

    @abstractmethod
    def step(self, indices: Array, mask: Array | None) -> None:
        """Make one update. This is the timed path. It may return before the device has finished.

        The optimizer gets, private, g = (sum_i min(1, C/|g_i|) g_i + sigma*C*N(0, I)) / B, and g = sum_i g_i / B
        otherwise; of plain SGD that is w <- w - lr * g. g_i is the gradient of example i's own loss over
        ``task.trained_parameters``, B is ``setting.batch_size``. Frozen parameters are neither counted nor changed.

        Args:
            indices: rows of the placed data, int64 [k]. k, or the number of True rows in ``mask``, may be zero: a
                private step then still adds its noise.
            mask: None, or bool [k] for variants that declare ``static_shapes``. Then k is one of
                ``setting.padded_sizes``; rows whose mask is False are padding, point to row 0 and contribute nothing.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all the work of earlier steps is done."""

    @abstractmethod
    def parameters(self) -> Mapping[str, Array]:
        """Return the current weights.

        Returns:
            Float32 numpy copies under the canonical names and shapes of ``task.parameters``, frozen ones included.
        """

    def epoch(self, seed: int) -> int | None:
        """Run one epoch by the library's own public loop, loader and sampler. Optional, for protocol ``as_shipped``.

        Called after ``build`` and ``place``, and timed as a whole. Like ``step`` it goes on from the current weights
        with the same sigma, C, learning rate and (expected) batch size, and may return before the device has finished.
        The loader takes the training set from where its user would have it. How the loop samples is declared by the
        variant's ``own_sampling``.

        Args:
            seed: fixes the loader's order and the noise: the same (build, seed) gives the same weights, unless the
                variant declares ``own_replays = false``.

        Returns:
            How many updates were made, or None where the library does not say.

        Raises:
            Unsupported: there is no such loop.
        """
        raise Unsupported(NO_OWN_LOOP)

    def peak_memory(self) -> Memory:
        """Return what the framework's own allocator counted since :meth:`build`; nothing on a CPU."""
        return Memory({})

    def exchanged(self, indices: Array, mask: Array | None) -> Mapping[int, Mapping[str, int]]:
        """Make one more step and tell what each process gave to the others in it, for variants that train in several.

        Args:
            indices: as of ``step``.
            mask: likewise.

        Returns:
            Bytes by kind of collective, the larger side of each, by the number of the process.
        """
        return {}

    def epsilon(self, steps: int, delta: float) -> float | None:
        """Ask the library's own privacy accountant.

        Args:
            steps: steps of this setting.
            delta: of (epsilon, delta)-DP.

        Returns:
            Epsilon after ``steps`` steps, or None where the library has no accountant.
        """
        return None

    def noise_factor(self, steps: int) -> Array | None:
        """State how the noise of the first ``steps`` steps is correlated (DP-FTRL, the matrix mechanism).

        Their noise is sigma*C times the rows of F^-1 Z, with independent N(0, I) in the rows of Z and a lower
        triangular Toeplitz matrix F. The gate multiplies it by F and judges what is left as it judges independent
        noise.

        Args:
            steps: steps since ``build``.

        Returns:
            The first column of F, float [steps], which begins with 1; None where each step's noise is its own.
        """
        return None


def require(adapter: Adapter, setting: Setting) -> None:
    """Raise :class:`Unsupported` where the adapter does not train by the optimizer of ``setting``, or in its precision.

    Args:
        adapter: the contestant.
        setting: what will be asked of it.

    Raises:
        Unsupported: it would train by another one, or in another one.
    """
    if setting.optimizer.name not in adapter.optimizers:
        known = " and ".join(name.upper() for name in adapter.optimizers)
        raise Unsupported(f"its adapter trains by {known} only; the task's optimizer is {setting.optimizer.name}.")
    if setting.precision not in adapter.precisions:
        known = " and ".join(adapter.precisions)
        raise Unsupported(f"its adapter trains in {known} only; the task's precision is {setting.precision}.")
