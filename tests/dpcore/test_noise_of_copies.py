"""No two engines, copies or processes draw the same noise: the difference of their gradients would be bare."""

from __future__ import annotations

import copy
import os
import pickle
import struct

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpcore import PrivacyEngine
from dpcore.data_loader import DPDataLoader
from dpcore.engine.engine import Engine
from dpcore.errors import PrivacyError
from dpcore.loading.uniform_sampler import UniformWithReplacementSampler
from dpcore.noise import GaussianNoise, SecureNoise
from tests.dpcore.private_setup import losses, make, small_data

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def _engine(noise=None, **options):
    torch.manual_seed(0)
    settings = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 1, "check_isolation": False}
    return Engine(nn.Linear(6, 200), losses, noise=noise, **(settings | options))


def _released(engine, count):
    x, y = (t[:count] for t in small_data().tensors)
    engine.privatize(x.float(), y)
    return engine.model.weight.grad.clone()


def _are_far_apart(one, other):
    """1,200 differences of independent normals: two normals' deviation."""
    assert 1.2 < float((one - other).std()) < 1.6


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_draws_noise_of_its_own(copied, seed):
    """The two gradients differed by one example's clipped gradient, without noise."""
    noise = GaussianNoise(seed)
    assert copied(noise).seed != noise.seed
    if copied is not copy.copy:
        engine = _engine(noise)
        _released(engine, 8)
        again = copied(engine)
        assert again.steps == 1
        _are_far_apart(_released(engine, 8), _released(again, 7))


def test_a_source_of_noise_serves_one_engine():
    noise = GaussianNoise()
    engine = _engine(noise)
    first, second = _released(engine, 8), _released(engine, 8)
    _are_far_apart(first, second)
    other = _engine(noise)
    with pytest.raises(PrivacyError, match=r"has served another engine or optimizer.*GaussianNoise\(\)"):
        _released(other, 7)
    assert other.steps == 0 and other.model.weight.grad is None
    del engine
    with pytest.raises(PrivacyError, match="has served another"):
        _released(other, 7)
    other.noise = GaussianNoise()
    _are_far_apart(first, _released(other, 7))


def test_secure_noise_serves_many():
    noise = SecureNoise()
    _are_far_apart(_released(_engine(noise), 8), _released(_engine(noise), 7))
    assert type(copy.deepcopy(noise)) is SecureNoise


def test_the_state_goes_on_with_the_same_noise():
    noise, other = GaussianNoise(), GaussianNoise()
    other.load_state_dict(noise.state_dict())
    assert torch.equal(noise.add_(torch.zeros(40), 1.0, 3), other.add_(torch.zeros(40), 1.0, 3))


def _in_child(answer):
    """Return what ``answer()`` does, eight bytes, in a forked process."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(start, answer())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(end, 8)


@needs_fork
def test_a_forked_process_has_noise_and_batches_of_its_own():
    noise = GaussianNoise()
    draw = lambda: struct.pack("d", noise.add_(torch.zeros(40, dtype=torch.float64), 1.0, 0)[7])  # noqa: E731
    assert draw() == draw()
    assert _in_child(draw) != draw()
    sampler = DPDataLoader(small_data(), sample_rate=0.5).sampler_state
    batch = lambda: struct.pack("q", sum(2**k for k in sampler.draw(0)))  # noqa: E731
    assert _in_child(batch) != batch()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_copied_loader_draws_batches_of_its_own(seed):
    """Two models were trained on the same batches, and the accountant counted them as independent."""
    loader = DPDataLoader(small_data(), sample_rate=0.5, seed=seed)
    for again in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader.sampler_state))):
        sampler = again.sampler_state if isinstance(again, DPDataLoader) else again
        assert sorted(sampler.draw(0)) != sorted(loader.sampler_state.draw(0))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_engine_makes_other_batches_and_other_noise(copied):
    """With the seed that was given, both models had the batches and the noise of the first."""
    engine = PrivacyEngine(seed=3)
    runs = [make(nn.Linear(6, 3).double(), one, noise_multiplier=1.0)[1:] for one in (engine, copied(engine))]
    batches = [sorted(loader.sampler_state.draw(0)) for _, _, loader in runs]
    noise = [optimizer.noise.add_(torch.zeros(40), 1.0, 0) for _, optimizer, _ in runs]
    assert batches[0] != batches[1] and not torch.equal(*noise)


@pytest.mark.parametrize("seed", ["a", "1", -1, 1.5, True])
@pytest.mark.parametrize("seeded", [GaussianNoise, PrivacyEngine, DPDataLoader])
def test_a_seed_is_a_whole_number(seeded, seed):
    more = {"dataset": small_data(), "sample_rate": 0.5} if seeded is DPDataLoader else {}
    with pytest.raises(ValueError, match=r"^seed is .*whole number, at least 0, or None"):
        seeded(seed=seed, **more)


@needs_fork
def test_a_chosen_seed_stays_the_same_in_a_forked_process():
    noise = GaussianNoise(5)
    draw = lambda: struct.pack("d", noise.add_(torch.zeros(40, dtype=torch.float64), 1.0, 0)[7])  # noqa: E731
    assert _in_child(draw) == draw()


@needs_fork
def test_a_private_loop_that_goes_on_in_two_processes():
    _, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.0)
    x, y = next(iter(loader))

    def update():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return struct.pack("d", model.weight[0, 0].item())

    assert _in_child(update) != update()


def test_a_pickled_sampler_does_not_tell_the_seed_of_the_batches():
    sampler = UniformWithReplacementSampler(num_samples=20, sample_rate=0.5)
    held = pickle.dumps(sampler)
    assert sampler.seed.to_bytes(17, "little")[:15] not in held
    assert pickle.loads(held).num_samples == 20
