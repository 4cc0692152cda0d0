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
from dpcore.secret_seeds import draw_seed
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from dpcore.utils.uniform_sampler import UniformWithReplacementSampler

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


def _made(engine, net=None, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Linear(4, 2) if net is None else net
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), batch_size=10)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, **options}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return engine.make_private(module=net, optimizer=sgd, data_loader=data, **settings)


def _train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_an_optimizer_of_ones_own_is_the_one_that_steps_and_is_counted():
    engine = _Engine(seed=3)
    model, optimizer, loader = _made(engine)
    assert type(optimizer) is _HalfClip and optimizer.loss_reduction == "mean"
    asked = engine.asked["optimizer"]
    assert asked["noise_multiplier"] == 1.0 and asked["max_grad_norm"] == 0.7 and asked["expected_batch_size"] == 10
    assert asked["clipping"] == "flat" and asked["distributed"] is False
    _train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_its_noise_is_that_of_the_engines_seed():
    """Two runs of one seed end at the same weights, without which nobody could repeat anything."""
    first, again, other = (_train(*_made(_Engine(seed=seed), sample_rate=0.25)) for seed in (3, 3, 4))
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
        ends = [_train(*_made(kind(seed=5), **options)) for kind in (PrivacyEngine, Through)]
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a, b)


def test_a_loader_of_ones_own_tells_its_rate():
    class Rarer(PrivacyEngine):
        def _prepare_data_loader(self, data_loader, **options):
            return DPDataLoader(data_loader.dataset, sample_rate=0.125)

    engine = Rarer()
    _train(*_made(engine))
    assert engine.accountant.history == [(1.0, 0.125, 8)]
    with pytest.raises(PrivacyError, match=r"DPDataLoader of the rate 0.125, and sample_rate is 0.5"):
        _made(Rarer(), sample_rate=0.5)


def test_a_method_that_is_replaced_on_the_instance_is_called():
    engine, asked = PrivacyEngine(), []
    usual = engine._prepare_model
    engine._prepare_model = lambda module, **options: asked.append(module) or usual(module, **options)
    model, *_ = _made(engine)
    assert len(asked) == 1 and isinstance(model, GradSampleModule)


def test_a_validation_of_ones_own_is_asked():
    class Strict(PrivacyEngine):
        def validate(self, *, module, optimizer, data_loader):
            raise ValueError("no linear layers")

    with pytest.raises(ValueError, match="no linear layers"):
        _made(Strict())


def _returning(point, value):
    return type("Mine", (PrivacyEngine,), {point: lambda self, *args, **options: value(options)})()


@pytest.mark.parametrize(
    ("point", "value", "sentence"),
    [
        ("_prepare_optimizer", lambda given: given["optimizer"], r"Mine\._prepare_optimizer\(\) returned a SGD.*clips"),
        ("_prepare_optimizer", lambda _: object.__new__(_HalfClip), r"whose __init__\(\) calls super\(\).__init__\(\)"),
        ("_prepare_optimizer", lambda _: _made(PrivacyEngine())[1], r"around another optimizer or module"),
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
        _made(_returning(point, value))


def test_a_criterion_of_ones_own_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Mine overrides _prepare_criterion\(\)"):
        _made(_returning("_prepare_criterion", lambda _: None), grad_sample_mode="ghost")
    _made(_returning("_prepare_criterion", lambda _: None))


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
    _train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)] and engine.get_epsilon(1e-3) > 0


def test_what_subclasses_read_of_their_bases():
    engine = PrivacyEngine()
    assert engine.dataset is None and engine.secure_rng is None
    model, optimizer, loader = _made(engine)
    assert engine.dataset is loader.dataset

    class Manager(BatchMemoryManager):
        def __enter__(self):
            return super().__enter__(), self.data_loader, self.optimizer, self.max_physical_batch_size

    with Manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as (pieces, *read):
        assert read == [loader, optimizer, 4]
        _train(model, optimizer, pieces)

    class Unmade(DPOptimizer):
        def __init__(self, optimizer):
            self.original_optimizer = optimizer

    with warnings.catch_warnings(), pytest.raises(AttributeError, match=r"has not called super\(\).__init__\(\)"):
        Unmade(torch.optim.SGD(model.parameters(), lr=0.1)).step()


class Weighted(UniformWithReplacementSampler):
    """A sampler as others write it, which draws by itself and does not call its base's ``__init__``."""

    def __init__(self, generator=None):
        self.num_samples, self.sample_rate, self.generator = 6, 0.5, generator

    def __iter__(self):
        for _ in range(2):
            yield (torch.rand(self.num_samples, generator=self.generator) < self.sample_rate).nonzero()[:, 0].tolist()


def test_a_sampler_that_draws_by_itself_may_set_its_generator():
    given = torch.Generator().manual_seed(3)
    sampler = Weighted(given)
    assert sampler.generator is given and [*sampler] == [*Weighted(torch.Generator().manual_seed(3))] != [*sampler]
    torch.manual_seed(3)
    secret = Weighted()
    torch.manual_seed(3)
    assert (
        secret.generator is secret.generator and secret.generator.initial_seed() != Weighted().generator.initial_seed()
    )


def test_a_sampler_s_own_generator_follows_its_secret_seed():
    """After a fork the seed is another one; None in place of a generator draws one, too."""
    sampler = Weighted()
    before = sampler.generator
    draw_seed(sampler)
    assert sampler.generator is not before and sampler.generator is sampler.generator
    seed = sampler.seed
    sampler.generator = None
    assert sampler.seed != seed


@pytest.mark.parametrize("kind", [UniformWithReplacementSampler, type("Mine", (UniformWithReplacementSampler,), {})])
def test_a_generator_that_would_draw_nothing_is_refused(kind):
    sampler = kind(num_samples=6, sample_rate=0.5)
    with pytest.raises(UnsupportedError, match=rf"generator of a {kind.__name__} was set.*Pass generator= or seed="):
        sampler.generator = torch.Generator()


class Lottery(UniformWithReplacementSampler):
    """A sampler with numbers of its own, of which nobody else knows."""

    def __init__(self):
        self.num_samples, self.sample_rate = 40, 0.25

    def __iter__(self):
        for _ in range(4):
            yield (torch.rand(self.num_samples) < self.sample_rate).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("kind", [Weighted, Lottery])
def test_the_state_of_a_sampler_that_draws_by_itself_is_refused(kind):
    """It told that no list was drawn, or was an AttributeError."""
    sampler = kind()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"{kind.__name__} draws its lists by itself.*Override draw\(k\)"):
            sampler.state_dict()
        with pytest.raises(UnsupportedError, match="draws its lists by itself"):
            sampler.load_state_dict({"seed": "1", "drawn": "0", "left": "0"})
        assert len([*sampler]) > 1


def test_a_run_by_a_sampler_that_draws_by_itself_cannot_be_saved(tmp_path):
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = _made(engine)
    vars(loader)["batch_sampler"] = Lottery()
    _train(model, optimizer, loader)
    assert len(engine.accountant) == 4
    with pytest.raises(UnsupportedError, match="Lottery draws its lists by itself"):
        engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    assert not (tmp_path / "file").exists()


def test_a_sampler_that_leaves_lists_out_has_a_state():
    class Longer(UniformWithReplacementSampler):
        def __iter__(self):
            yield from (chosen for chosen in super().__iter__() if len(chosen) > 3)

    lists = [*Longer(num_samples=40, sample_rate=0.1, seed=3)]
    sampler = Longer(num_samples=40, sample_rate=0.1, seed=3)
    begun = iter(sampler)
    first, other = next(begun), Longer(num_samples=40, sample_rate=0.1)
    other.load_state_dict(sampler.state_dict())
    assert [first, *other] == lists


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
        model, optimizer, loader = _made(engine, **adaptive)
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
    model, optimizer, loader = _made(engine)
    optimizer.__class__ = _OwnNoise
    _train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_a_step_made_by_hand_is_guarded_named_and_counted():
    engine = PrivacyEngine()
    model, optimizer, loader = _made(engine)
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
    assert optimizer.run.batches_seen == 4


def test_a_batch_whose_hook_raised_is_not_drawn_again(tmp_path):
    engine = PrivacyEngine()
    model, optimizer, loader = _made(engine, sampling="shuffle")

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
    model, optimizer, loader = _made(again, sampling="shuffle")
    again.load_checkpoint(path=tmp_path / "c", module=model, optimizer=optimizer)
    assert not torch.equal(next(iter(loader))[0], used[0])


class _FailsOnce(DPOptimizer):
    fails = True

    def add_noise(self):
        if self.fails:
            raise RuntimeError
        super().add_noise()


def test_a_step_by_hand_behind_one_that_failed_asks_the_guards():
    model, optimizer, loader = _made(PrivacyEngine())
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
