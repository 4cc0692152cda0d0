"""Schedules that a loop steps in every iteration, where a batch is handed out in pieces: they move once per batch."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from dpcore import GradSampleModule, PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.planner import MicroBatches
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers import clipping_optimizer as optimizers
from dpcore.schedulers import ExponentialBatchSize, ExponentialGradClip, LambdaNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.comparison import relative_error

EXAMPLES, BATCHES = 40, 4


class OwnStep(lr_scheduler.LRScheduler):
    """A user's subclass with a ``step`` of its own."""

    def get_lr(self) -> list[float]:
        return [lr / (1 + self.last_epoch) for lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


def sequential(o: Any) -> Any:
    """A warm-up, then a decay, as many scripts have them."""
    parts = [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)]
    return lr_scheduler.SequentialLR(o, parts, milestones=[3])


def chained(o: Any) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.ExponentialLR(o, 0.9)])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1.0 / (1 + k)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=3 * BATCHES + 1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "sequential": sequential,
    "chained": chained,
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "steps": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "a user's own": OwnStep,
}


class Run:
    """A private run, and a record of the rate, noise and bound of every update.

    ``before``: what is built on the original optimizer; ``after``: on the private one.
    """

    def __init__(
        self,
        size: int | str | None,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        data = TensorDataset(torch.randn(EXAMPLES, 5), torch.arange(EXAMPLES) % 3)
        original = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = None if before is None else before(original)
        self.engine = PrivacyEngine(seed=3)
        settings = {"noise_multiplier": 0.5, "max_grad_norm": 0.4, "max_physical_batch_size": size, **options}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model, optimizer=original, data_loader=DataLoader(data, batch_size=EXAMPLES // BATCHES), **settings
        )
        if after is not None:
            self.schedule = after(self.optimizer)
        self.updates: list[tuple[float, float, Any]] = []
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: Any, *_: Any) -> None:
        self.updates.append((optimizer.param_groups[0]["lr"], optimizer.noise_multiplier, optimizer.max_grad_norm))

    def iterate(self, loader: Any = None) -> Iterator[int]:
        """The lengths of the pieces, after each one's step."""
        for x, y in self.loader if loader is None else loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            yield len(x)

    def iterate_and_step(self, loader: Any = None) -> Iterator[int]:
        """The ordinary loop: the schedule is stepped in every iteration."""
        for length in self.iterate(loader):
            self.schedule.step()
            yield length

    def train(self, epochs: int = 3, loader: Any = None) -> Run:
        """The ordinary loop: the schedule is stepped in every iteration."""
        for _ in range(epochs):
            for _ in self.iterate(loader):
                self.schedule.step()
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


@contextmanager
def small_pieces() -> Iterator[None]:
    """Batches of about ten examples are planned in pieces of three, not whole."""
    with (
        mock.patch.object(optimizers, "micro_batches", lambda *_: MicroBatches(3, 3)),
        mock.patch("dpcore.utils.batch_memory_manager.FIRST_PIECE", 3),
    ):
        yield


def assert_same(pieces: Run, whole: Run) -> None:
    assert pieces.updates == whole.updates and len(whole.updates) == 3 * BATCHES
    assert len(set(whole.updates)) > 1
    assert relative_error(pieces.weights, whole.weights) < 1e-5
    assert pieces.engine.accountant.history == whole.engine.accountant.history


@pytest.mark.parametrize(("place", "size"), [("before", 3), ("after", "auto")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_and_weights_are_those_of_whole_batches(schedule: str, place: str, size: int | str) -> None:
    """A schedule that was built on the original optimizer, or on the private one."""
    made: dict[str, Any] = {place: SCHEDULES[schedule]}
    whole, pieces = Run(None, **made).train(), Run(size, **made)
    with small_pieces():
        lengths = [length for _ in range(3) for length in pieces.iterate_and_step()]
    assert len(lengths) > 2 * len(whole.updates)
    assert_same(pieces, whole)
    assert pieces.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_a_memory_managers_pieces() -> None:
    whole, pieces = (Run(None, before=SCHEDULES["one cycle"]) for _ in range(2))
    manager = BatchMemoryManager(data_loader=pieces.loader, max_physical_batch_size=3, optimizer=pieces.optimizer)
    with manager as loader:
        pieces.train(loader=loader)
    assert_same(pieces, whole.train())


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaNoise(o, noise_lambda=lambda k: 1.0 + k),
        lambda o: ExponentialGradClip(o, gamma=0.8),
    ],
    ids=["noise", "bound"],
)
@pytest.mark.parametrize("size", [3, "auto"])
def test_noise_and_bound_are_those_of_whole_batches(schedule: Any, size: int | str) -> None:
    whole, pieces = Run(None, after=schedule).train(), Run(size, after=schedule)
    with small_pieces():
        pieces.train()
    assert_same(pieces, whole)


def test_a_schedule_of_the_batch_size_between_rounds() -> None:
    run = Run(3, after=lambda o: ExponentialBatchSize(o, gamma=0.5))
    for _ in run.iterate():
        pass
    run.schedule.step()
    assert run.optimizer.expected_batch_size == 5


def test_the_length_of_the_loader_is_how_often_a_schedule_moves() -> None:
    """Scripts give it to OneCycleLR; a number of pieces would stretch the cycle."""
    for size in (None, 3, "auto"):
        assert len(Run(size).loader) == BATCHES


def test_empty_batches_move_schedules_too() -> None:
    run = Run(3, after=SCHEDULES["steps"], sample_rate=0.02, expected_batch_size=1)
    lengths = list(run.iterate_and_step())
    assert lengths.count(0) > 5 and run.schedule.last_epoch == len(run.updates) == len(run.loader)


def test_a_schedule_that_is_stepped_between_rounds() -> None:
    run = Run(3, before=SCHEDULES["steps"])
    for epoch in range(1, 4):
        for _ in run.iterate():
            pass
        run.schedule.step()
        assert run.schedule.last_epoch == epoch


@pytest.mark.parametrize("manager", [False, True])
@pytest.mark.parametrize("wrapped", [iter, enumerate, lambda pieces: (piece for piece in pieces)])
def test_a_loop_that_is_left_within_a_batch_is_over(wrapped: Any, manager: bool) -> None:
    """The schedule of rounds moves; one of iterations had no complete batch."""
    run = Run(None if manager else 3, before=SCHEDULES["steps"], check_batches=False)
    loader: Any = run.loader
    if manager:
        loader = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=run.optimizer).loader
    for _ in wrapped(run.iterate(loader)):
        assert run.optimizer.batch_goes_on
        run.schedule.step()
        break
    assert run.schedule.last_epoch == 0
    run.schedule.step()
    assert run.schedule.last_epoch == 1
    assert len(list(run.iterate_and_step(loader))) > BATCHES
    assert run.schedule.last_epoch == 1 + BATCHES


def test_a_loop_that_ends_with_an_error_within_a_batch_is_over() -> None:
    run = Run(3, before=SCHEDULES["steps"])

    def fails() -> None:
        for _ in run.iterate():
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    run.schedule.step()
    assert run.schedule.last_epoch == 1


def test_a_step_that_fails_within_a_batch_leaves_none_to_wait_for() -> None:
    run = Run(3, before=SCHEDULES["steps"])
    pieces = iter(run.loader)
    x, y = next(pieces)
    F.cross_entropy(run.model(x), y).backward()
    run.optimizer.step()
    with pytest.raises(PrivacyError, match="found no backward pass"):
        run.optimizer.step()
    run.schedule.step()
    assert run.schedule.last_epoch == 1


def test_pieces_that_the_loop_cuts_itself() -> None:
    run = Run(None, after=SCHEDULES["lambda"])
    for x, y in run.loader:
        for rows, goes_on in ((slice(0, 4), True), (slice(4, None), False)):
            run.optimizer.signal_skip_step(goes_on)
            F.cross_entropy(run.model(x[rows]), y[rows]).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.schedule.step()
    assert [lr for lr, *_ in run.updates] == pytest.approx([0.1 / (1 + k) for k in range(BATCHES)])


def test_a_metric_or_a_position_within_a_batch_is_refused() -> None:
    """A piece's loss is not the batch's, and ``epoch + i / len(loader)`` counts pieces."""
    for make in (lr_scheduler.ReduceLROnPlateau, SCHEDULES["warm restarts"]):
        run = Run(3, before=make)
        with pytest.raises(UnsupportedError, match=r"scheduler\.step\(value\)"):
            for _ in run.iterate():
                run.schedule.step(0.5)
        assert run.updates == []


def test_a_metric_of_whole_batches_or_rounds_is_served() -> None:
    run = Run(3, after=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0))
    for _ in run.iterate():
        if not run.optimizer.batch_goes_on:
            run.schedule.step(0.5)
    run.schedule.step(metrics=0.5)
    assert run.schedule.last_epoch == 1 + BATCHES
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**BATCHES)


def test_other_schedules_do_not_wait() -> None:
    """Schedules move of an optimizer that is not private, and of a private one whose own batch is complete."""
    run, other = Run(3), Run(3, before=SCHEDULES["steps"])
    ordinary = SCHEDULES["cosine"](torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    for _ in itertools.islice(run.iterate(), 1):
        assert run.optimizer.batch_goes_on
        ordinary.step()
        other.schedule.step()
    assert ordinary.last_epoch == other.schedule.last_epoch == 1


def test_nothing_is_put_into_a_schedule() -> None:
    run = Run(3, before=SCHEDULES["cosine"])
    entries = set(vars(run.schedule))
    for _ in itertools.islice(run.iterate_and_step(), 9):
        pass
    assert set(vars(run.schedule)) == entries and type(run.schedule) is lr_scheduler.CosineAnnealingLR
    file = io.BytesIO()
    torch.save(run.schedule.state_dict(), file)
    file.seek(0)
    resumed = Run(3, before=SCHEDULES["cosine"])
    resumed.schedule.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.schedule.last_epoch == run.schedule.last_epoch > 0


class AllOwn(lr_scheduler.LRScheduler):
    """A user's class that shares nothing with torch's but the name."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1


def test_a_class_that_notes_no_rate_waits_too() -> None:
    run = Run(3, before=AllOwn)
    assert len(list(run.iterate_and_step())) > BATCHES
    assert run.schedule.last_epoch == BATCHES


class Ahead(torch.optim.Optimizer):
    """An optimizer of the user's around another one, of which it takes the parameters."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        self.other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_a_schedule_of_the_optimizer_in_the_users_own_waits() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(5, 3), TensorDataset(torch.randn(EXAMPLES, 5), torch.arange(EXAMPLES) % 3)
    own = Ahead(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule, others = (lr_scheduler.StepLR(optimizer, 100) for optimizer in (own.base, own.other))
    private, optimizer, loader = PrivacyEngine(seed=3).make_private(
        module=model,
        optimizer=own,
        data_loader=DataLoader(data, batch_size=EXAMPLES // BATCHES),
        noise_multiplier=0.5,
        max_grad_norm=0.4,
        max_physical_batch_size=3,
    )
    pieces = 0
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        schedule.step()
        others.step()
        pieces += 1
    assert schedule.last_epoch == BATCHES < others.last_epoch == pieces


def test_a_schedule_of_a_wrapper_that_came_later_waits() -> None:
    """As accelerate puts one around the private optimizer."""

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

        def step(self, closure=None):
            return self.optimizer.step(closure)

    wrapped = GradSampleModule(torch.nn.Linear(4, 2))
    sgd = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    private = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=4)
    outer = Around(private)
    schedule = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)
    for goes_on in (True, False):
        private.signal_skip_step(goes_on)
        wrapped(torch.randn(4, 4)).sum().backward()
        outer.step()
        schedule.step()
    assert sgd.param_groups[0]["lr"] == 0.5
