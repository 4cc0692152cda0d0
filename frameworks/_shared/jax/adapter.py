"""What every adapter on functional JAX does alike: device, precision, resident data, the compiled step, weights out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from frameworks._shared.jax import models as jax_models
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import Task

Tree = dict[str, jax.Array]
Update = Callable[..., tuple[Tree, Any]]


class JaxAdapter(Adapter):
    """Data and weights stay on the device. Hyper-parameters are traced scalars, so that another setting of the same
    task needs no compilation. Leaves :meth:`update` and :meth:`noise_state` to the framework."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.private = variant != "non-private"
        self.task: Task | None = None

    @abstractmethod
    def update(self, task: Task, platform: str) -> Update:
        """The step: (params, state, all x, all y, rows [k], mask [k], :meth:`numbers`) -> (params, state)."""

    def numbers(self) -> np.ndarray:
        """Return what the step is given beside data: rate, C, sigma. ``rate`` is the learning rate over the nominal
        batch size: it multiplies the sum."""
        s = self.setting
        return np.array((s.learning_rate / s.batch_size, s.max_grad_norm, s.noise_multiplier), np.float32)

    def noise_state(self, key: jax.Array) -> Any:
        """What the step carries on from one draw of noise to the next."""
        return key

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != self.private:
            raise Unsupported(f"The variant {self.variant} is {'not ' * setting.private}private; use the other one.")
        self.device = configure(setting)
        if task != self.task:
            self.compiled = self.update(task, setting.device)
        self.task = task
        self.setting = setting
        self.params = jax_models.parameters(task, initial, self.device)
        self.hyper = jax.device_put(self.numbers(), self.device)
        self.state = self.noise_state(jax.device_put(jax.random.key(setting.seed), self.device))

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = jax.device_put(x, self.device), jax.device_put(y, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        mask = np.ones(len(indices), bool) if mask is None else mask
        rows = indices.astype(np.int32)
        self.params, self.state = self.compiled(self.params, self.state, self.x, self.y, rows, mask, self.hyper)

    def synchronize(self) -> None:
        jax.block_until_ready(self.params)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {name: np.array(value) for name, value in self.params.items()}

    def peak_memory(self) -> Memory:
        return peak_memory(self.device)


def in_pieces(rows: jax.Array, mask: jax.Array, largest: int | None) -> tuple[jax.Array, jax.Array, int]:
    """(rows, mask, pieces): padded so that they fall into that many equal pieces of at most ``largest`` rows (None: one
    piece). As equal as they can be, so that padding stays below one row each."""
    size = max(1, len(rows))
    pieces = -(-size // (largest or size))
    excess = size + -size % pieces - len(rows)
    return jnp.pad(rows, (0, excess)), jnp.pad(mask, (0, excess)), pieces


def configure(setting: Setting) -> jax.Device:
    """Turns TF32 off in this process; the device of ``setting``.

    Raises :class:`Unsupported` where the machine has none.
    """
    try:
        device = jax.devices(setting.device)[0]
    except RuntimeError as error:
        raise Unsupported(f"JAX finds no device {setting.device!r} here ({error}).") from None
    jax.config.update("jax_default_matmul_precision", "highest")
    return device


def peak_memory(device: jax.Device) -> Memory:
    """Most bytes that live arrays and running programs held at once on ``device``: a part of the pool that JAX
    reserves in advance, not that pool. Since the process began, as JAX cannot reset it. A CPU counts nothing."""
    counted = device.memory_stats() or {}
    return Memory({"jax_peak_in_use": counted["peak_bytes_in_use"]} if "peak_bytes_in_use" in counted else {})
