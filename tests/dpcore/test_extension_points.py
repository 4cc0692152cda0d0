"""Methods that subclasses of the engine override in Opacus are called with what they expect, or refused by name."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import DPDataLoader, GradSampleModule, PrivacyEngine
from dpcore.accountants import PRVAccountant
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.optimizers import AdaClipDPOptimizer, DPOptimizer
from dpcore.utils.batch_memory_manager import BatchMemoryManager

pytestmark = pytest.mark.filterwarnings("ignore")


class _HalfClip(DPOptimizer):
    """A clipping of one's own: every gradient is halved."""

    def clip_and_accumulate(self):
        super().clip_and_accumulate()
        for param in self.params:
            param.summed_grad = param.summed_grad / 2


class _Engine(PrivacyEngine):
    def __init__(self, **options):
        super().__init__(**options)
        self.asked = {}

    def _prepare_optimizer(self, *, optimizer, **options):
        self.asked["optimizer"] = options
        wanted = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
        return _HalfClip(optimizer, **{name: options[name] for name in wanted})


def made(engine, net=None, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Linear(4, 2) if net is None else net
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), batch_size=10)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, **options}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return engine.make_private(module=net, optimizer=sgd, data_loader=data, **settings)


def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_an_optimizer_of_ones_own_is_the_one_that_steps_and_is_counted():
    engine = _Engine(seed=3)
    model, optimizer, loader = made(engine)
    assert type(optimizer) is _HalfClip and optimizer.loss_reduction == "mean"
    asked = engine.asked["optimizer"]
    assert asked["noise_multiplier"] == 1.0 and asked["max_grad_norm"] == 0.7 and asked["expected_batch_size"] == 10
    assert asked["clipping"] == "flat" and asked["distributed"] is False
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_its_noise_is_that_of_the_engines_seed():
    """Two runs of one seed end at the same weights, without which nobody could repeat anything."""
    first, again, other = (train(*made(_Engine(seed=seed), sample_rate=0.25)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_overrides_that_call_their_base_change_nothing():
    class Through(PrivacyEngine):
        def _prepare_model(self, module, *, batch_first=True, loss_reduction="mean"):
            return super()._prepare_model(module, batch_first=batch_first, loss_reduction=loss_reduction)

        def _prepare_data_loader(self, data_loader, *, poisson_sampling, distributed):
            return super()._prepare_data_loader(data_loader, poisson_sampling=poisson_sampling, distributed=distributed)

        def _prepare_optimizer(self, **options):
            return super()._prepare_optimizer(**options)

    for options in ({}, {"poisson_sampling": False}, {"clipping": "automatic"}):
        ends = [train(*made(kind(seed=5), **options)) for kind in (PrivacyEngine, Through)]
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b)


def test_a_loader_of_ones_own_tells_its_rate():
    class Rarer(PrivacyEngine):
        def _prepare_data_loader(self, data_loader, **options):
            return DPDataLoader(data_loader.dataset, sample_rate=0.125)

    engine = Rarer()
    train(*made(engine))
    assert engine.accountant.history == [(1.0, 0.125, 8)]
    with pytest.raises(PrivacyError, match=r"DPDataLoader of the rate 0.125, and sample_rate is 0.5"):
        made(Rarer(), sample_rate=0.5)


def test_a_method_that_is_replaced_on_the_instance_is_called():
    engine, asked = PrivacyEngine(), []
    usual = engine._prepare_model
    engine._prepare_model = lambda module, **options: asked.append(module) or usual(module, **options)
    model, *_ = made(engine)
    assert len(asked) == 1 and isinstance(model, GradSampleModule)


def test_a_validation_of_ones_own_is_asked():
    class Strict(PrivacyEngine):
        def validate(self, *, module, optimizer, data_loader):
            raise ValueError("no linear layers")

    with pytest.raises(ValueError, match="no linear layers"):
        made(Strict())


def _returning(point, value):
    return type("Mine", (PrivacyEngine,), {point: lambda self, *args, **options: value(options)})()


@pytest.mark.parametrize(
    ("point", "value", "sentence"),
    [
        ("_prepare_optimizer", lambda given: given["optimizer"], r"Mine\._prepare_optimizer\(\) returned a SGD.*clips"),
        ("_prepare_optimizer", lambda _: object.__new__(_HalfClip), r"whose __init__\(\) calls super\(\).__init__\(\)"),
        ("_prepare_optimizer", lambda _: made(PrivacyEngine())[1], r"around another optimizer or module"),
        ("_prepare_model", lambda _: nn.Linear(4, 2), r"Mine\._prepare_model\(\) returned a Linear.*by example"),
        (
            "_prepare_data_loader",
            lambda _: DataLoader(TensorDataset(torch.zeros(4, 4))),
            r"returned a DataLoader of an unknown rate",
        ),
    ],
)
def test_what_an_override_must_not_return(point, value, sentence):
    with pytest.raises(PrivacyError, match=sentence):
        made(_returning(point, value))


def test_a_criterion_of_ones_own_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Mine overrides _prepare_criterion\(\)"):
        made(_returning("_prepare_criterion", lambda _: None), grad_sample_mode="ghost")
    made(_returning("_prepare_criterion", lambda _: None))


def test_the_parts_can_be_made_one_by_one():
    """As programs do that join them by themselves."""
    engine = PrivacyEngine(accountant="rdp")
    net = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), batch_size=10)
    model = engine._prepare_model(net, grad_sample_mode="hooks")
    loader = engine._prepare_data_loader(data, poisson_sampling=True, distributed=False)
    optimizer = engine._prepare_optimizer(
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=10,
    )
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.25))
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)] and engine.get_epsilon(1e-3) > 0


def test_what_subclasses_read_of_their_bases():
    engine = PrivacyEngine()
    assert engine.dataset is None and engine.secure_rng is None
    model, optimizer, loader = made(engine)
    assert engine.dataset is loader.dataset

    class Manager(BatchMemoryManager):
        def __enter__(self):
            return super().__enter__(), self.data_loader, self.optimizer, self.max_physical_batch_size

    with Manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as (pieces, *read):
        assert read == [loader, optimizer, 4]
        train(model, optimizer, pieces)

    class Unmade(DPOptimizer):
        def __init__(self, optimizer):
            self.original_optimizer = optimizer

    with warnings.catch_warnings(), pytest.raises(AttributeError, match=r"has not called super\(\).__init__\(\)"):
        Unmade(torch.optim.SGD(model.parameters(), lr=0.1)).step()


@pytest.mark.parametrize("base", [DPOptimizer, AdaClipDPOptimizer])
def test_an_override_that_changes_its_answer_moves_neither_the_update_nor_epsilon(base):
    """It told the truth where it was asked whether it does, and then that there was one batch."""

    class Changes(base):
        @property
        def accumulated_iterations(self):
            return self.logical_batch.batches if sys._getframe(1).f_code.co_name == "check_count" else 1

    runs = []
    for kind in (base, Changes):
        engine = PrivacyEngine(seed=1)
        adaptive = {"clipping": "adaptive"} if base is AdaClipDPOptimizer else {}
        model, optimizer, loader = made(engine, **adaptive)
        optimizer.__class__ = kind
        bare = PRVAccountant()
        optimizer.attach_step_hook(bare.get_optimizer_hook_fn(sample_rate=0.25))
        for number, (x, y) in enumerate(loader, 1):
            nn.functional.cross_entropy(model(x), y).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        runs.append((engine.accountant.history, bare.history, [p.tolist() for p in model.parameters()]))
    assert runs[0] == runs[1] and len(engine.accountant) == len(bare) == 4


def test_noise_that_follows_the_number_of_the_step_is_counted_as_it_was():
    """It was counted as that of the step behind it."""
    sigmas = [4.0, 3.0, 2.0, 1.0, 0.5]

    class Falling(DPOptimizer):
        noise_multiplier = property(lambda self: sigmas[self.steps])

    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = made(engine)
    optimizer.__class__ = Falling
    bare = PRVAccountant()
    optimizer.attach_step_hook(bare.get_optimizer_hook_fn(sample_rate=0.25))
    train(model, optimizer, loader)
    assert engine.accountant.history == bare.history == [(sigma, 0.25, 1) for sigma in sigmas[:4]]
    assert engine._spending.runs()[optimizer.run.name] == bare.history


def test_noise_that_is_changed_behind_the_guards_is_refused():
    """The budget was asked about other noise than that of the release."""

    class Lowers(DPOptimizer):
        def add_noise(self):
            self.noise_multiplier = 0.1
            super().add_noise()

    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = made(engine)
    optimizer.__class__ = Lowers
    with pytest.raises(PrivacyError, match=r"noise_multiplier was changed from 1 to 0\.1"):
        train(model, optimizer, loader)
    assert not len(engine.accountant) and all(p.grad is None for p in model.parameters())


def test_an_optimizer_that_tells_another_number_of_batches_is_refused():
    class Counts(DPOptimizer):
        accumulated_iterations = property(lambda self: 1)

    net = nn.Linear(4, 2)
    model = GradSampleModule(net)
    optimizer = Counts(
        torch.optim.SGD(net.parameters(), 0.1), noise_multiplier=1, max_grad_norm=1, expected_batch_size=6
    )
    for batches in (1, 2):
        for _ in range(batches):
            model(torch.randn(6, 4)).square().sum(1).mean().backward()
        before = net.weight.detach().clone()
        told = pytest.raises(PrivacyError, match=r"is 1, .* adds up 2 batches")
        with told if batches == 2 else warnings.catch_warnings():
            optimizer.step()
        assert torch.equal(net.weight, before) == (batches == 2)
        optimizer.zero_grad()


class _OwnNoise(DPOptimizer):
    """Noise of one's own, which counts its draws in the attribute that dpcore counts steps in."""

    def add_noise(self):
        self.steps += 1
        for param in self.params:
            noise = torch.randn_like(param)
            param.grad = param.summed_grad + self.noise_multiplier * self.max_grad_norm * noise


def test_noise_of_ones_own_that_moves_the_steps_is_counted():
    engine = PrivacyEngine()
    model, optimizer, loader = made(engine)
    optimizer.__class__ = _OwnNoise
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_a_step_made_by_hand_is_guarded_named_and_counted():
    engine = PrivacyEngine()
    model, optimizer, loader = made(engine)
    names = []
    optimizer.attach_step_guard(lambda of: names.append(of.steps))
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.clip_and_accumulate()
        optimizer.add_noise()
        optimizer.scale_grad()
        with torch.no_grad():
            for param in optimizer.params:
                param.sub_(0.1 * param.grad)
    assert engine.accountant.history == [(1.0, 0.25, 4)] and names == [0, 1, 2, 3]
    assert loader.waiting == 0


def test_a_batch_whose_hook_raised_is_not_drawn_again(tmp_path):
    engine = PrivacyEngine()
    model, optimizer, loader = made(engine, sampling="shuffle")

    def breaks(of):
        raise RuntimeError

    def step(batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    rows = iter(loader)
    step(next(rows))
    optimizer.attach_step_hook(breaks)
    used = next(rows)
    with pytest.raises(RuntimeError):
        step(used)
    optimizer.step_hooks.remove(breaks)
    optimizer.zero_grad()
    engine.save_checkpoint(path=tmp_path / "c", module=model, optimizer=optimizer)
    again = PrivacyEngine()
    model, optimizer, loader = made(again, sampling="shuffle")
    again.load_checkpoint(path=tmp_path / "c", module=model, optimizer=optimizer)
    assert not torch.equal(next(iter(loader))[0], used[0])


class _FailsOnce(DPOptimizer):
    fails = True

    def add_noise(self):
        if self.fails:
            raise RuntimeError
        super().add_noise()


def test_a_step_by_hand_behind_one_that_failed_asks_the_guards():
    model, optimizer, loader = made(PrivacyEngine())
    optimizer.__class__ = _FailsOnce
    asked = []
    optimizer.attach_step_guard(lambda of: asked.append(of.steps))
    rows = iter(loader)
    x, y = next(rows)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.fails = False
    x, y = next(rows)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    assert len(asked) == 2
