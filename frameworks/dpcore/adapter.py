"""DP-SGD by dpcore's engine: one forward and one backward pass per micro-batch, no per-example gradients kept."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader

from dpcore import CorrelatedNoise, Engine, GaussianNoise, PrivacyEngine, native
from dpcore.accountants import PRVAccountant
from dpcore.correlated import Correlation
from dpcore.errors import UnsupportedError
from dpcore.grad_sample import GradSampleModule
from dpcore.optimizers import DPOptimizer
from dpcore.utils.batch_memory_manager import AUTO, PiecewiseLoader
from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import PRECISIONS, TorchAdapter
from harness.contract import NO_OWN_LOOP, PARALLEL, Adapter, Setting, Unsupported
from harness.tasks import Task

MECHANISMS = {
    "previous": CorrelatedNoise.previous(0.9),
    "square-root": CorrelatedNoise.square_root(8),
    "banded": CorrelatedNoise.banded(8),
}


def create(variant: str) -> Adapter:
    """``native``: with the kernels, as the wheel has them. ``engine``: pure torch, as the wheel without kernels is.
    ``compiled``: with the kernels, and the pass as graphs compiled by torch.compile. ``loop``: what ``make_private``
    hands out, in the loop that its users write; ``auto``: the same with ``max_physical_batch_size="auto"``; ``ddp`` and
    ``fsdp2``: the same in several processes; ``previous``, ``square-root`` and ``banded``: the same with noise that is
    correlated over steps. ``lazy``: as ``native``, with noise that is drawn when a table's row is next read."""
    if variant in PARALLEL:
        from frameworks._shared.torch.ranks import Lead
        from frameworks.dpcore.ranked import Ranked

        return Lead(__file__, variant, Ranked(variant))
    if variant == "loop":
        return Loop()
    if variant == "auto":
        return Pieces()
    if variant == "lazy":
        from frameworks.dpcore.lazy import Lazy

        return Lazy()
    if variant in MECHANISMS:
        return Correlated(MECHANISMS[variant])
    return Dpcore(kernels=variant != "engine", graphs=variant == "compiled")


class Dpcore(TorchAdapter):
    """A thin shell: the engine clips, sums, adds noise, divides by B and calls the optimiser."""

    optimizers = optimizers.NAMES
    precisions = PRECISIONS
    physical: str | None = None  # max_physical_batch_size of the loop

    def __init__(self, kernels: bool, graphs: bool) -> None:
        self.kernels = kernels
        self.graphs = graphs
        self.engine: Engine | None = None
        self.examined: tuple[Task, str, str] | None = None  # what the engine's trials were about

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        self.prepare(setting)
        kept, model = self.engine, (task, setting.device, setting.precision)
        if kept is not None and self.examined == model:
            # The engine tries out once per model what mixes examples and what is fastest, or compiles it, as other
            # contestants compile once: the model gets its weights back, and the engine what else it was given.
            self.configure(task, setting)
            self.model = self.whole
            torch_models.load_parameters(self.model, task, initial)
            kept.accumulator.set_bounds(setting.max_grad_norm)
            kept.noise_multiplier, kept.expected_batch_size = setting.noise_multiplier, setting.batch_size
            kept.optimizer = self.optimizer()
            kept.noise, kept.steps = GaussianNoise(setting.seed), 0
            return
        self.configure(task, setting)
        self.model = self.whole = self.network(initial)
        try:
            self.engine = Engine(
                self.by_rows(),
                self.losses_of_rows(),
                max_grad_norm=setting.max_grad_norm,
                noise_multiplier=setting.noise_multiplier,
                expected_batch_size=setting.batch_size,
                optimizer=self.optimizer(),
                noise=GaussianNoise(setting.seed),
                compile=self.graphs,
                group=task.views,
            )
        except UnsupportedError as error:
            self.engine = None
            raise Unsupported(str(error)) from None
        self.examined = model

    def prepare(self, setting: Setting) -> None:
        """Makes the kernels, as the wheel has them, and refuses what is not private."""
        if self.kernels and setting.device == "cpu":
            try:
                native.build()
            except native.NativeBuildError as error:
                raise Unsupported(str(error)) from None
        if not setting.private:
            raise Unsupported("dpcore only trains with differential privacy; its non-private twin is pytorch.")
        self.own = None

    def by_rows(self) -> torch.nn.Module:
        """The network behind the layer that makes several rows of an example, which are one unit."""
        return self.model[1:] if self.task.views > 1 else self.model

    def losses_of_rows(self) -> torch_models.Loss:
        task = self.task
        return torch_models.loss_fn(replace(task, layers=task.layers[1:]) if task.views > 1 else task)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().batch(indices)
        return (x, y) if self.task.views == 1 else (self.model[0](x), y.repeat_interleave(self.task.views))

    def optimizer(self) -> torch.optim.Optimizer:
        return optimizers.make(torch_models.trained_parameters(self.model), self.setting, of_sum=False)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        assert self.engine is not None
        x, y = self.batch(indices)
        with self.autocast():  # the engine takes norms, sums and noise out of it by itself
            self.engine.step(x, y, None if mask is None else torch.from_numpy(mask).to(self.device))

    def epoch(self, seed: int) -> int:
        """``make_private`` and its loader; the first epoch's seed also decides the ones that follow."""
        if self.task.views > 1:
            raise Unsupported("its own loader draws views at random, by dpcore.views, and not the task's.")
        if self.own is None:
            self.model = self.network(self.parameters())
            losses = torch_models.loss_fn(self.task)
            module, optimizer, loader = PrivacyEngine(seed=seed).make_private(
                module=self.model,
                optimizer=self.optimizer(),
                data_loader=self.loader(torch.Generator()),
                noise_multiplier=self.setting.noise_multiplier,
                max_grad_norm=self.setting.max_grad_norm,
                sample_rate=self.setting.sample_rate,
                expected_batch_size=self.setting.batch_size,
                max_physical_batch_size=self.physical,
            )
            self.own = (module, lambda out, y: losses(out, y).mean(), optimizer, loader)
        before = self.own[2].steps
        self.train(*self.own)
        return self.own[2].steps - before  # of whole batches, of which a loop may see pieces

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        accountant = PRVAccountant()
        accountant.step(
            noise_multiplier=self.setting.noise_multiplier, sample_rate=self.setting.sample_rate, steps=steps
        )
        return float(accountant.get_epsilon(delta))


class Loop(Dpcore):
    """The wrapped model and the optimiser that ``make_private`` hands out, between the lines of an ordinary loop.

    The harness draws the batches, so that there is no loader, and the two are made as Opacus' users make them by hand.
    """

    def __init__(self) -> None:
        super().__init__(kernels=True, graphs=False)

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        self.prepare(setting)
        known = self.examined == (task, setting.device, setting.precision)
        self.configure(task, setting)
        if known:  # the wrapper tries out once per model what mixes examples, as the engine does
            torch_models.load_parameters(self.model, task, initial)
            self.private = None  # a module has one
            gc.collect()
        else:
            self.model = self.network(initial)
            self.losses = self.losses_of_rows()
            self.wrapped = GradSampleModule(self.by_rows(), ordinary_grad=False, group=task.views)
            self.examined = (task, setting.device, setting.precision)
        self.private = DPOptimizer(
            self.optimizer(),
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            expected_batch_size=setting.batch_size,
            noise=GaussianNoise(setting.seed),
        )

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.step_of(*self.batch(indices))

    def step_of(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Make the lines of the loop."""
        self.private.zero_grad()
        with self.autocast():
            loss = self.losses(self.wrapped(x), y).mean()
        loss.backward()
        self.private.step()


class Pieces(Loop):
    """The loop over pieces of its batches, whose size is planned by time and memory."""

    physical = AUTO

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if task.views > 1:
            raise Unsupported("pieces are cut between units, which dpcore.views makes, and not the task's views.")
        self.pieces = None  # which holds the optimizer
        super().build(task, setting, initial)
        # Of the harness's batches: it has none of its own.
        self.pieces = PiecewiseLoader(DataLoader([0]), self.physical, self.private)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        for x, y in self.pieces.pieces_of(self.batch(indices)):
            self.step_of(x, y)


class Correlated(Loop):
    """The loop whose steps have the noise of ``make_private(mechanism=...)``.

    Its epsilon is that of a cycle of batches, which the loader draws; the harness draws others, so that the steps are
    numbered here, and nothing is said of epsilon.
    """

    def __init__(self, mechanism: CorrelatedNoise) -> None:
        super().__init__()
        self.mechanism = mechanism

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.private.run.correlation = self.correlation = Correlation(self.mechanism, cycle=1)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.correlation.step = self.private.steps
        super().step(indices, mask)

    def noise_factor(self, steps: int) -> np.ndarray:
        return np.array(self.mechanism.responses(cycle=steps, steps=steps))

    def epoch(self, seed: int) -> int:
        raise Unsupported(NO_OWN_LOOP)

    def epsilon(self, steps: int, delta: float) -> float | None:
        return None
