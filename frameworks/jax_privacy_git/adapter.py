"""DP-SGD by the trainer of JAX Privacy's repository: ``DPTrainer.train_step`` and ``fit``, its plan's epsilon."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition, training

from frameworks._shared.jax import models as jax_models
from frameworks._shared.jax import optax_optimizers, optimizers
from frameworks._shared.jax.adapter import JaxAdapter, Tree, Update
from harness.contract import Adapter, Setting
from harness.tasks import Task

MICRO_BATCH = 1
"""``microbatch_size`` on a CPU (NOTES.md); any other platform takes the whole batch."""

ONE_BAND = np.ones(1)
"""The strategy whose noise is independent from step to step: DP-SGD."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``trainer``."""
    return JaxPrivacyTrainer(variant)


class JaxPrivacyTrainer(JaxAdapter):
    """The library's trainer, made where the step is traced, so that rate, C and sigma need no compilation of their
    own; and one with constants for the library's own loop."""

    optimizers = optax_optimizers.NAMES

    def __init__(self, variant: str) -> None:
        super().__init__(variant)
        self.own: training.DPTrainer | None = None
        self.own_is_for: tuple[Any, ...] = ()

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        base = {name: initial[name] for name in task.parameters if name not in task.trained_parameters}
        needed = (task, replace(setting, seed=0), base)
        if self.own_is_for[:2] != needed[:2] or not _equal(self.own_is_for[2], base):
            self.own, self.own_is_for = None, needed

    def noise_state(self, key: jax.Array) -> Any:
        """Return the state of a run without its weights. The library makes the noise's key of the plan's seed."""
        trained, _ = _parted(self.task, self.params)
        return _without_weights(self.trainer(_config(self.setting), {}).init(trained))

    def numbers(self) -> np.ndarray:
        return np.concatenate([super().numbers(), optimizers.constants(self.setting)])

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        super().place(x, y)
        self.data = x, y

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        size = self.micro_batch
        rows = indices if mask is None else np.where(mask, indices, -1)
        rows = batch_selection.pad_to_multiple_of(rows, size or 1, microbatch_size=size)
        super().step(np.maximum(rows, 0), rows >= 0)

    def update(self, task: Task, platform: str) -> Update:
        def update(params, state, x, y, rows, mask, hyper):
            trained, base = _parted(task, params)
            trainer = self.trainer(_Traced(_config(self.setting), *hyper[1:3]), base, hyper[3:])
            loss_key = jax.random.key(0)  # no network here draws anything
            after, _ = trainer.train_step(_with_weights(trained, state), (x[rows], y[rows]), ~mask, loss_key)
            return {**base, **after.params}, _without_weights(after)

        return jax.jit(update, donate_argnums=(0, 1))

    def epoch(self, seed: int) -> int:
        """Poisson batches of ``DPTrainer.fit``, which pads them to a multiple of 32 and fetches them on the host. A
        size that has not occurred yet is compiled inside the clock."""
        trained, base = _parted(self.task, self.params)
        if self.own is None:
            # A step gives the memory of all weights away, and this trainer may outlive it.
            self.own = self.trainer(_config(self.setting), jax.tree.map(jnp.copy, base))
        before = _with_weights(trained, (jnp.zeros((), jnp.int32), *self.state[1:]))
        # Ahead of time `fit` would compile every size anew at each call; a user calls it once.
        after = self.own.fit(self.data, before, rng_or_seed=seed, precompile=False)
        self.params, self.state = {**base, **after.params}, _without_weights(after)
        return int(after.step)

    def epsilon(self, steps: int, delta: float) -> float:
        plan = _config(self.setting, steps).make()
        accountant = dp_accounting.pld.PLDAccountant(plan.neighboring_relation)
        return float(accountant.compose(plan.dp_event).get_epsilon(delta))

    def trainer(
        self, config: training.ExecutionPlanConfig, base: Tree, given: jax.Array | None = None
    ) -> training.DPTrainer:
        """Return the library's trainer.

        Args:
            config: of the mechanism.
            base: weights that are not trained, which the loss closes over.
            given: what :func:`frameworks._shared.jax.optimizers.constants` returns; None: those of the setting.
        """
        task, constants = self.task, optimizers.constants(self.setting) if given is None else given
        example_loss = jax_models.example_loss(task, jax_models.fastest_on(self.device.platform, task))
        return training.DPTrainer(
            config=config,
            performance_flags=training.PerformanceFlags(
                noise_seed=self.setting.seed, microbatch_size=self.micro_batch, keep_batch_dim=False
            ),
            loss_fn=lambda trained, data, key: (example_loss({**trained, **base}, *data), ()),
            optimizer=optax.chain(optax.scale(1 / constants[1]), optax_optimizers.optimizer(constants)),
        )

    @property
    def micro_batch(self) -> int | None:
        """Examples that are differentiated at once; None: all."""
        return MICRO_BATCH if self.device.platform == "cpu" else None


@dataclass(frozen=True)
class _Traced:
    """The plan of ``config`` with C and sigma as arguments of a compiled step: ``BandMFConfig`` takes numbers only."""

    config: training.BandMFConfig
    bound: jax.Array
    multiplier: jax.Array

    def make(self, performance_flags: training.PerformanceFlags) -> training.DPExecutionPlan:
        flags = performance_flags
        clipped_grad = functools.partial(
            jax_privacy.clipped_grad,
            l2_clip_norm=self.bound,
            dtype=flags.dtype,
            microbatch_size=flags.microbatch_size,
            keep_batch_dim=flags.keep_batch_dim,
        )
        plan = self.config.make(flags)
        sensitivity = clipped_grad(lambda: None).sensitivity(plan.neighboring_relation)
        noise = noise_addition.gaussian_privatizer(
            stddev=self.multiplier * sensitivity, prng_key=flags.noise_seed, dtype=flags.dtype
        )
        return replace(plan, clipped_grad=clipped_grad, noise_addition_transform=noise)


def _config(setting: Setting, steps: int | None = None) -> training.BandMFConfig:
    """DP-SGD for that many steps (None: an epoch); what it returns is a sum over the batch."""
    steps = steps or -(-setting.dataset_size // setting.batch_size)
    return training.BandMFConfig(
        iterations=steps,
        expected_participations=steps * setting.sample_rate,
        strategy=ONE_BAND,
        noise_multiplier=setting.noise_multiplier,
        l2_clip_norm=setting.max_grad_norm,
        rescale_to_unit_norm=False,
    )


def _equal(some: Tree, others: Tree) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(some[name], others[name]) for name in some)


def _parted(task: Task, params: Tree) -> tuple[Tree, Tree]:
    """(those that are trained, the others)."""
    trained = {name: params[name] for name in task.trained_parameters}
    return trained, {name: value for name, value in params.items() if name not in trained}


def _with_weights(trained: Tree, state: tuple[Any, ...]) -> training.TrainingState:
    step, of_optimizer, of_noise = state
    return training.TrainingState(step=step, params=trained, opt_state=of_optimizer, noise_state=of_noise)


def _without_weights(state: training.TrainingState) -> tuple[Any, ...]:
    return state.step, state.opt_state, state.noise_state
