"""Samplers of a user's own class draw by themselves, and go on from a state only where they draw no list again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dpcore import PrivacyEngine
from dpcore.errors import UnsupportedError
from dpcore.secret_seeds import draw_seed
from dpcore.utils.uniform_sampler import UniformWithReplacementSampler
from tests.dpcore.test_extension_points import made, train

pytestmark = pytest.mark.filterwarnings("ignore")


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
    model, optimizer, loader = made(engine)
    vars(loader)["batch_sampler"] = Lottery()
    train(model, optimizer, loader)
    assert len(engine.accountant) == 4
    with pytest.raises(UnsupportedError, match="Lottery draws its lists by itself"):
        engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    assert not (tmp_path / "file").exists()


class OwnNumbers(UniformWithReplacementSampler):
    """Numbers of its own behind ``draw``, the same in every process."""

    def __init__(self, **options):
        super().__init__(num_samples=40, sample_rate=0.25, **options)
        self.own = np.random.default_rng(7)

    def draw(self, k):
        return [*np.flatnonzero(self.own.random(self.num_samples) < self.sample_rate)]


class ByNumber(OwnNumbers):
    """Lists that follow from their number alone."""

    def draw(self, k):
        self.own = np.random.default_rng([7, k])
        return super().draw(k)


class Repeats(OwnNumbers):
    """An ``__iter__`` of its own around that of its base, with the same numbers in every round."""

    draw = UniformWithReplacementSampler.draw

    def __iter__(self):
        own = np.random.default_rng(7)
        for _ in super().__iter__():
            yield [*np.flatnonzero(own.random(self.num_samples) < self.sample_rate)]


class BySeed(OwnNumbers):
    """Draws as :class:`UniformWithReplacementSampler` asks."""

    def draw(self, k):
        self.own = np.random.default_rng([self.seed, k])
        return super().draw(k)


def _run_of(sampler):
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = made(engine, nn.Linear(4, 2))
    if sampler is not None:
        vars(loader)["batch_sampler"] = sampler
    return engine, model, optimizer, loader


@pytest.mark.parametrize("kind", [OwnNumbers, ByNumber, Repeats])
def test_a_sampler_whose_lists_do_not_follow_its_seed_does_not_go_on(kind, tmp_path):
    """The run that went on used the same batches, and epsilon took them for fresh ones."""
    engine, model, optimizer, loader = _run_of(kind())
    train(model, optimizer, loader)
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} draws its lists by itself.*Override draw\(k\)"):
        engine.save_checkpoint(path=tmp_path / "own", module=model, optimizer=optimizer)
    state = optimizer.state_dict()

    engine, model, optimizer, loader = _run_of(kind())
    with pytest.raises(UnsupportedError, match="may use batches again"):
        optimizer.load_state_dict(state)
    rows = iter(loader)
    for _ in range(2):  # nor where the error is ignored
        x, y = next(rows)
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(UnsupportedError, match="may use batches again"):
            optimizer.step()
        optimizer.zero_grad()
    assert len(engine.accountant) == 4

    engine, model, optimizer, _ = _run_of(None)
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    engine, model, optimizer, loader = _run_of(kind())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match="may use batches again"):
        engine.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_sampler_whose_lists_follow_its_seed_goes_on(tmp_path):
    engine, model, optimizer, loader = _run_of(BySeed(seed=3))
    lists = [[*loader.batch_sampler] for _ in range(2)]
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    state = optimizer.state_dict()
    engine, model, optimizer, loader = _run_of(BySeed(seed=3))
    engine.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    assert [*loader.batch_sampler] not in lists and loader.batch_sampler.drawn == 12
    engine, model, optimizer, loader = _run_of(BySeed(seed=3))
    state["param_groups"][0]["privacy"]["runs"] = {"another": [(1.0, 0.25, 4)]}
    optimizer.load_state_dict(state)
    assert [*loader.batch_sampler] not in lists


class Buffered(UniformWithReplacementSampler):
    """Draws the coins of eight lists at a time, always into the same array."""

    def __init__(self, seed):
        super().__init__(num_samples=12, sample_rate=0.25, seed=seed)
        self.coins, self.of = np.empty((8, 12)), None

    def draw(self, k):
        if self.of != (self.seed, k // 8):
            np.random.default_rng([self.seed, k // 8]).random(out=self.coins)
            self.of = self.seed, k // 8
        return np.flatnonzero(self.coins[k % 8] < self.sample_rate).tolist()


def test_a_state_leaves_what_a_sampler_keeps_of_its_lists_as_it_is():
    """The lists behind a saved state were those of a seed that everybody knows."""
    sampler, twin = Buffered(3), Buffered(3)
    lists = [sampler.draw(k) for k in range(3)]
    sampler.state_dict()
    assert [*lists, *map(sampler.draw, range(3, 8))] == [twin.draw(k) for k in range(8)]


def test_a_generator_that_was_set_is_another_one_in_a_run_that_goes_on():
    """It drew the batches of the run from whose state it went on."""
    _, model, optimizer, loader = _run_of(Weighted(torch.Generator().manual_seed(3)))
    lists = [*loader.batch_sampler]
    train(model, optimizer, loader)
    state = optimizer.state_dict()
    _, _, optimizer, loader = _run_of(Weighted(torch.Generator().manual_seed(3)))
    loader.batch_sampler.generator = torch.Generator().manual_seed(3)
    optimizer.load_state_dict(state)
    assert [*loader.batch_sampler] != lists
    with pytest.raises(UnsupportedError, match=r"set in a run that goes on.*Leave it out"):
        loader.batch_sampler.generator = torch.Generator().manual_seed(3)


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
