"""DP-SGD by Objax: ``PrivateGradValues``, plain and by norm accumulation, and its non-private twin, ``GradValues``."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

# Objax 1.8.0 was written for an older JAX and asks for two names that 0.5.3 has dropped. It uses the first as
# jax.tree.map; the second only to recognise arrays spread over several devices, of which there are none here.
jax.tree_map = jax.tree.map
jax.sharding.PmapSharding = type("PmapSharding", (), {})

import objax  # noqa: E402

from frameworks._shared.jax import adapter as jax_adapter  # noqa: E402
from frameworks._shared.jax import models as jax_models  # noqa: E402
from harness.contract import Adapter, Memory, Setting, Unsupported  # noqa: E402
from harness.tasks import Task  # noqa: E402

FORMS = {"non-private": None, "private-gradients": False, "norm-accumulation": True}
"""``use_norm_accumulation`` of each variant."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, one of FORMS."""
    return Objax(variant)


class Network(objax.Module):
    """A task's network, its parameters as ``TrainVar`` in the order of the task."""

    def __init__(self, task: Task, initial: Mapping[str, np.ndarray], form: jax_models.Form) -> None:
        super().__init__()
        self.parameters = objax.ModuleList([objax.TrainVar(jax.numpy.array(initial[n])) for n in task.parameters])
        self.names = tuple(task.parameters)
        self.example_loss = jax_models.example_loss(task, form)

    def losses(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Each example's own loss."""
        values = {name: var.value for name, var in zip(self.names, self.parameters, strict=True)}
        return jax.vmap(self.example_loss, (None, 0, 0))(values, x, y)


class Objax(Adapter):
    """One ``objax.Jit`` of the whole step. The gradient object is made where the step is traced, so that rate, C and
    sigma are arguments and need no compilation of their own."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.norm_accumulation = FORMS[variant]
        self.task: Task | None = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private != (self.norm_accumulation is not None):
            raise Unsupported(f"The variant {self.variant} is {'not ' * setting.private}private; use the other one.")
        self.device = jax_adapter.configure(setting)
        self.setting = setting
        if task != self.task:
            self.task = task
            self._compile(initial)
        for name, var in zip(self.network.names, self.network.parameters, strict=True):
            var.assign(jax.device_put(initial[name], self.device))
        self.keygen.seed(setting.seed)
        hyper = (setting.learning_rate / setting.batch_size, setting.max_grad_norm, setting.noise_multiplier)
        self.hyper = jax.device_put(np.array(hyper, np.float32), self.device)

    def _compile(self, initial: Mapping[str, np.ndarray]) -> None:
        private = self.norm_accumulation is not None
        form = jax_models.fastest_on(self.device.platform, self.task) if private else jax_models.PLAIN
        self.network = Network(self.task, initial, form)
        variables = self.network.vars()
        self.keygen = objax.random.Generator()
        sgd = objax.optimizer.SGD(variables)

        def loss(x, y, kept):
            # The loss of a padding row is 0, and a gradient of zero passes through the clipping as it is.
            return (kept * self.network.losses(x, y)).mean()

        def step(x, y, rows, mask, hyper):
            rate, bound, multiplier = hyper
            if not private:
                gradients = objax.GradValues(loss, variables)
            else:
                gradients = objax.privacy.dpsgd.PrivateGradValues(
                    loss,
                    variables,
                    multiplier,
                    bound,
                    microbatch=1,
                    batch_axis=(0, 0, 0),
                    keygen=self.keygen,
                    use_norm_accumulation=self.norm_accumulation,
                )
            mean, _ = gradients(x[rows], y[rows], mask)
            # Objax divides by the rows it was given, padding included; the update divides by B.
            sgd(rate * len(rows), mean)

        self.compiled = objax.Jit(step, variables + self.keygen.vars() + sgd.vars())

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = jax.device_put(x, self.device), jax.device_put(y, self.device)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        mask = np.ones(len(indices), bool) if mask is None else mask
        self.compiled(self.x, self.y, indices.astype(np.int32), mask, self.hyper)

    def synchronize(self) -> None:
        jax.block_until_ready(self.network.vars().tensors())

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {n: np.array(var.value) for n, var in zip(self.network.names, self.network.parameters, strict=True)}

    def peak_memory(self) -> Memory:
        return jax_adapter.peak_memory(self.device)

    def epsilon(self, steps: int, delta: float) -> float | None:
        if self.norm_accumulation is None:
            return None
        epsilon = objax.privacy.dpsgd.analyze_dp(
            q=self.setting.sample_rate, noise_multiplier=self.setting.noise_multiplier, steps=steps, delta=delta
        )
        return float(epsilon)
