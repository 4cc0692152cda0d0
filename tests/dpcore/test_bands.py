"""Bands that dpcore optimises: against dense matrices, and in a run that goes on where another machine found others."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcore import CorrelatedNoise, PrivacyEngine, PrivacyError, bands, correlated
from dpcore.accountants import PRVAccountant
from tests.dpcore.test_correlated import matrix, private, steps

MOMENTA = st.sampled_from([0.0, 0.5, 0.9, 0.99])


def responses(momentum, n):
    """How far SGD moves a weight in each step for one gradient of 1 at first."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    found = []
    for t in range(n):
        weight.grad = torch.full_like(weight, float(t == 0))
        optimizer.step()
        found.append(-weight.item())
    return found


def deviation(mechanism, n, momentum=0.0):
    """The root mean variance of the noise in the weights, times the sensitivity to one participation: by matrices."""
    workload = sum(a * np.eye(n, k=-j) for j, a in enumerate(responses(momentum, n)))
    c = matrix(mechanism, n)
    noise = np.linalg.solve(c.T, workload.T)
    return math.sqrt((noise**2).sum() / n) * np.linalg.norm(c, axis=0).max()


def own(weights):
    return CorrelatedNoise(tuple(weights), is_banded=True)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 30), MOMENTA)
def test_noise_and_its_gradient_are_those_of_dense_matrices(data, n, momentum):
    b = data.draw(st.integers(1, n))
    falls = data.draw(st.lists(st.floats(0.05, 1.0), min_size=b, max_size=b))
    weights = np.cumsum(falls[::-1])[::-1] / sum(falls)
    weights[0] = 1.0
    log, gradient = bands.log_noise(weights, bands.response_of(n, momentum))
    assert math.exp(log / 2) == pytest.approx(deviation(own(weights), n, momentum), rel=1e-9)
    for i in range(b):
        ways = [weights + np.eye(b)[i] * step for step in (1e-5, -1e-5)]
        up, down = (bands.log_noise(way, bands.response_of(n, momentum))[0] for way in ways)
        assert gradient[i] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 40), MOMENTA, st.integers(0, 2**32 - 1))
def test_no_other_bands_have_less_noise(data, n, momentum, seed):
    b, rng = data.draw(st.integers(1, n)), np.random.default_rng(seed)
    found = CorrelatedNoise.banded(b, steps=n, momentum=momentum)
    least, formula = deviation(found, n, momentum), CorrelatedNoise.banded(b)
    assert len(found.weights) == b and found == CorrelatedNoise.banded(b, steps=n, momentum=momentum)
    assert least <= deviation(formula, n, momentum) * (1 + 1e-12)
    others = [own(np.array(found.weights) * (1 - share) + np.array(formula.weights) * share) for share in (0.5, 0.01)]
    for size in (0.3, 1e-2, 1e-3):
        falls = -np.diff(found.weights, append=0.0) * np.exp(size * rng.standard_normal(b))
        weights = np.cumsum(falls[::-1])[::-1]
        others.append(own(weights / weights[0]))
    assert all(least <= deviation(other, n, momentum) * (1 + 1e-9) for other in others)


def test_the_bands_are_those_that_jax_privacy_finds():
    """optimize_banded_toeplitz(128, 8) of jax_privacy 2.0.0, over its first."""
    theirs = (1.0, 0.633074, 0.536305, 0.482211, 0.443036, 0.410155, 0.379069, 0.345013)
    assert CorrelatedNoise.banded(8, steps=128).weights == pytest.approx(theirs, abs=2e-6)
    assert bands.response_of(9, 0.9) == pytest.approx(responses(0.9, 9))


@pytest.mark.parametrize(("b", "n", "momentum"), [(1, 6, 0.0), (2, 7, 0.0), (3, 9, 0.9), (4, 10, 0.5)])
def test_no_participation_at_least_the_bands_apart_moves_more_than_is_counted(b, n, momentum):
    mechanism = CorrelatedNoise.banded(b, steps=n, momentum=momentum)
    c, most = matrix(mechanism, n), {}
    for mask in itertools.product((0, 1), repeat=n):
        at = np.flatnonzero(mask)
        if (np.diff(at) >= b).all():
            most[len(at)] = max(most.get(len(at), 0.0), float(((c[:, at].sum(1)) ** 2).sum()))
    for rounds in range(1, n // b + 1):
        assert math.fsum(mechanism.costs(n // rounds, rounds)) == pytest.approx(most[rounds], rel=1e-9)
        assert math.fsum(mechanism.costs(n // rounds, rounds)) >= most[rounds]


@pytest.mark.parametrize(
    "found",
    [[1.0, 0.98, 0.981], [1.0, 1.0, 0.9], [1.0, 0.5, 0.0], [1.0, math.nan, 0.1], [1.0, 0.9, 0.1]],
    ids=["rises", "level", "ends at 0", "no number", "worse"],
)
def test_what_an_optimiser_finds_is_taken_only_if_it_falls_and_is_better(found, monkeypatch):
    response, formula = bands.response_of(1000, 0.9), CorrelatedNoise.banded(3)
    is_better = bands.log_noise(np.array(found), response)[0] < bands.log_noise(np.array(formula.weights), response)[0]
    assert is_better == (found[1] > 0.95)
    ended = type("Ended", (), {"x": np.array(found)})
    monkeypatch.setattr(bands.scipy.optimize, "minimize", lambda *of, **options: ended)
    assert CorrelatedNoise.banded(3, steps=1000, momentum=0.9) == formula


def test_noise_beyond_all_numbers_is_no_error():
    log, gradient = bands.log_noise(np.array([1.0, 3.0]), bands.response_of(5000, 0.0))
    assert 700 < log < math.inf and not gradient.any()


def of_another_machine(monkeypatch):
    """Let the optimiser find bands that differ in a late digit."""
    found = bands.least_noise
    monkeypatch.setattr(
        correlated, "least_noise", lambda *of: (1.0, *(weight * (1 - 1e-4) for weight in found(*of)[1:]))
    )


def test_a_run_goes_on_with_the_bands_of_its_file(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    mechanism = CorrelatedNoise.banded(3, steps=8)
    engine, model, optimizer, loader = private(mechanism, PrivacyEngine())
    first = steps(model, optimizer, loader)
    list(itertools.islice(first, 3))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    rest = [*first, *steps(model, optimizer, loader)]
    of_another_machine(monkeypatch)
    other = CorrelatedNoise.banded(3, steps=8)
    assert other.weights != mechanism.weights
    engine, model, optimizer, loader = private(other, PrivacyEngine())
    engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    again = [*steps(model, optimizer, loader), *steps(model, optimizer, loader)]
    assert all(torch.equal(a, b) for one, two in zip(rest, again, strict=True) for a, b in zip(one, two, strict=True))
    whole = PRVAccountant()
    whole.step(noise_multiplier=sum(mechanism.costs(4, 2)) ** -0.5, sample_rate=1.0)
    assert engine.get_epsilon(1e-3) == pytest.approx(whole.get_epsilon(1e-3), rel=1e-9)
    assert torch.load(path)["privacy_state"]["correlated"]["weights"] == list(mechanism.weights)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    assert torch.load(path)["privacy_state"]["correlated"]["weights"] == list(mechanism.weights)


@pytest.mark.parametrize(
    "other",
    [
        CorrelatedNoise.banded(3, steps=12),
        CorrelatedNoise.banded(3, steps=8, momentum=0.9),
        CorrelatedNoise.banded(3),
        own(CorrelatedNoise.banded(3, steps=8).weights),
    ],
    ids=lambda mechanism: mechanism.recipe or repr(mechanism),
)
def test_a_run_of_another_call_does_not_go_on(tmp_path, other):
    path = tmp_path / "c.pt"
    engine, model, optimizer, loader = private(CorrelatedNoise.banded(3, steps=8), PrivacyEngine())
    list(steps(model, optimizer, loader))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    engine, model, optimizer, _ = private(other, PrivacyEngine())
    with pytest.raises(PrivacyError, match=r"mechanism=CorrelatedNoise.banded\(3, steps=8, momentum=0.0\), this run"):
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)


def test_bands_of_a_file_that_are_none_are_refused(tmp_path):
    path = tmp_path / "c.pt"
    engine, model, optimizer, loader = private(CorrelatedNoise.banded(3, steps=8), PrivacyEngine())
    list(steps(model, optimizer, loader))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    entries = torch.load(path)
    for weights, error in (([1.0, 0.5, 0.6], "of a banded matrix"), ([1.0, 0.5, 0.4, 0.3, 0.2], "has 5 bands")):
        entries["privacy_state"]["correlated"]["weights"] = weights
        torch.save(entries, path)
        engine, model, optimizer, _ = private(CorrelatedNoise.banded(3, steps=8), PrivacyEngine())
        with pytest.raises(Exception, match=error):
            engine.load_checkpoint(path=path, module=model, optimizer=optimizer)


def test_files_of_the_formula_s_bands_say_what_they_always_did(tmp_path):
    path = tmp_path / "c.pt"
    engine, model, optimizer, loader = private(CorrelatedNoise.banded(3), PrivacyEngine())
    list(steps(model, optimizer, loader))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    entries = torch.load(path)
    assert entries["setting"]["mechanism"] == "CorrelatedNoise(weights=(1.0, 0.5, 0.375), is_banded=True)"
    assert set(entries["privacy_state"]["correlated"]) == {"last", "batches"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 7}, "steps is 7; it must be a whole number, that of the run's steps, from bands, 8, to 1,000,000"),
        ({"steps": 8.5}, "steps is 8.5; it must be a whole number"),
        ({"steps": 10**7}, "steps is 10000000; it must be"),
        ({"steps": 20, "momentum": 1.0}, r"momentum is 1\.0; it is that of SGD"),
        ({"momentum": 0.9}, r"momentum is 0\.9; .* steps= is needed, too"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        CorrelatedNoise.banded(8, **options)
