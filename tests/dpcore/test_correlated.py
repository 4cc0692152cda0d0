"""Noise that is correlated over steps: what is drawn, what it costs, and what must not happen to it."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import (
    BudgetError,
    CorrelatedNoise,
    GaussianNoise,
    PrivacyEngine,
    PrivacyError,
    UnsupportedError,
    correlated,
    normals,
)
from dpcore.accountants import PRVAccountant, RDPAccountant
from dpcore.correlated import Correlation

MECHANISMS = {
    "previous": CorrelatedNoise.previous(0.9),
    "square root": CorrelatedNoise.square_root(4),
    "banded": CorrelatedNoise.banded(3),
    "optimised": CorrelatedNoise.banded(3, steps=12, momentum=0.5),
    "independent": CorrelatedNoise.previous(0.0),
}


def private(mechanism, engine=None, examples=20, batch=5, sigma=1.0, **options):
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(examples, 6), torch.randint(3, (examples,)))
    model = nn.Linear(6, 3)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": DataLoader(data, batch)}
    engine = PrivacyEngine(seed=7) if engine is None else engine
    given |= {"module": model, "max_grad_norm": 1.0, "noise_multiplier": sigma, "mechanism": mechanism}
    return engine, *engine.make_private(**given, **options)


def steps(model, optimizer, loader):
    """One round; yields what each step has released."""
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield [p.detach().clone() for p in model.parameters()]


def matrix(mechanism, n):
    """C of n steps."""
    stated = sum(w * np.eye(n, k=-j) for j, w in enumerate(mechanism.weights[:n]))
    return stated if mechanism.is_banded else np.linalg.inv(stated)


def moved_most(mechanism, cycle, rounds, released):
    """The squared norm of what an example moves of the released rows of C x, the largest of all first batches."""
    c = matrix(mechanism, cycle * rounds)[released]
    return max(float((c[:, first::cycle].sum(1) ** 2).sum()) for first in range(cycle))


def mechanisms(cycle):
    return st.one_of(
        st.floats(0.0, 0.99).map(CorrelatedNoise.previous),
        st.integers(1, 9).map(CorrelatedNoise.square_root),
        st.integers(1, cycle).map(CorrelatedNoise.banded),
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 6), st.randoms(use_true_random=False))
def test_rounds_cost_what_the_matrix_says_and_parts_of_rounds_no_more(data, cycle, rounds, random):
    mechanism = data.draw(mechanisms(cycle))
    costs = mechanism.costs(cycle, rounds)
    whole = moved_most(mechanism, cycle, rounds, [*range(cycle * rounds)])
    assert sum(costs) == pytest.approx(whole, rel=1e-9) and sum(costs) >= whole * (1 - 1e-12)
    kept = sorted(random.sample(range(cycle * rounds), random.randint(1, cycle * rounds)))
    charged = sum(costs[r] for r in {t // cycle for t in kept})
    assert charged >= moved_most(mechanism, cycle, rounds, kept) * (1 - 1e-9)


# Sensitivity by jax_privacy 2.0.0's fixed_epoch_sensitivity, and epsilon at a noise multiplier of 10 and delta 1e-5 by
# dp_accounting 0.6.0's get_epsilon_gaussian: python -m proofs.correlated_peers holds more of them.
JUDGED = {
    ("previous", 0.5, 5, 3): (2.0415394863631167, 0.7420167910157284),
    ("previous", 0.95, 16, 8): (13.26549540528265, 6.092353788007126),
    ("square_root", 4, 16, 8): (3.64056419068622, 1.4010693919955914),
    ("square_root", 32, 64, 4): (3.2939343759435125, 1.2545271293157172),
    ("banded", 4, 5, 3): (2.1130176880471208, 0.7704831149718505),
    ("banded", 32, 64, 4): (2.944130010559613, 1.1086047607748646),
}


@pytest.mark.parametrize(("maker", "value", "cycle", "rounds"), JUDGED)
def test_costs_and_epsilon_are_those_of_two_other_packages(maker, value, cycle, rounds):
    costs = getattr(CorrelatedNoise, maker)(value).costs(cycle, rounds)
    accountant = PRVAccountant()
    for cost in costs:
        accountant.step(noise_multiplier=10.0 / math.sqrt(cost), sample_rate=1.0)
    found = math.sqrt(math.fsum(costs)), accountant.get_epsilon(1e-5)
    for own, theirs in zip(found, JUDGED[maker, value, cycle, rounds], strict=True):
        assert theirs * (1 - 1e-9) <= own <= theirs * (1 + 1e-6)


def test_weights_that_jax_privacy_optimised_are_taken_and_better_than_the_formula():
    """optimize_banded_toeplitz(128, 8) of jax_privacy 2.0.0, over its first; it says 9.7095 for eight rounds of 16."""
    weights = (1.0, 0.633074, 0.536305, 0.482211, 0.443036, 0.410155, 0.379069, 0.345013)

    def deviation(mechanism):
        sums = np.linalg.solve(matrix(mechanism, 128).T, np.tri(128).T)
        return math.sqrt((sums**2).sum() / 128 * sum(mechanism.costs(16, 8)))

    assert deviation(CorrelatedNoise(weights, is_banded=True)) == pytest.approx(9.709494803865086, rel=1e-6)
    assert deviation(CorrelatedNoise.banded(8)) == pytest.approx(1.049 * 9.7095, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_gradients_of_an_example_move_more(data, cycle, rounds, seed):
    mechanism = data.draw(mechanisms(cycle))
    rng = np.random.default_rng(seed)
    c = matrix(mechanism, cycle * rounds)
    gradients = rng.standard_normal((rounds, 3))
    gradients /= np.maximum(1.0, np.linalg.norm(gradients, axis=1, keepdims=True))
    moved = c[:, rng.integers(cycle) :: cycle] @ gradients
    assert (moved**2).sum() <= sum(mechanism.costs(cycle, rounds)) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_what_is_released_of_some_steps_tells_no_more_than_their_rounds_cost(data, cycle, rounds, seed):
    """Judge by the covariance of the released steps' noise alone, for gradients that need not point one way."""
    mechanism, rng = data.draw(mechanisms(cycle)), np.random.default_rng(seed)
    inverse = np.linalg.inv(matrix(mechanism, cycle * rounds))
    kept = np.flatnonzero(rng.random(cycle * rounds) < rng.random()).tolist() or [0]
    covariance = (inverse @ inverse.T)[np.ix_(kept, kept)]
    costs = mechanism.costs(cycle, rounds)
    charged = sum(costs[r] for r in {t // cycle for t in kept})
    for first in range(cycle):
        gradients = np.zeros((cycle * rounds, 2))
        own = rng.standard_normal((rounds, 2))
        own = np.ones((rounds, 2)) if seed % 2 else own
        gradients[first::cycle] = own / np.linalg.norm(own, axis=1, keepdims=True)
        x = gradients[kept]
        assert (x * np.linalg.solve(covariance, x)).sum() <= charged * (1 + 1e-9)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["previous", "square root", "banded"])
def test_noise_is_what_the_matrix_says_with_the_same_bits_in_any_order(name, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(correlated.native, "serves", lambda *of: False)
    mechanism, noise, like, start = MECHANISMS[name], GaussianNoise(seed=1), torch.empty(9001), 777
    whole = Correlation(mechanism, cycle=9)
    drawn = [whole.noise_of(noise, t, start, like).clone() for t in range(24)]
    z = np.stack([normals.normals(noise.name(t), 9001, start).numpy() for t in range(24)])
    inverse = np.linalg.inv(matrix(mechanism, 24))
    np.testing.assert_allclose(torch.stack(drawn).numpy(), inverse @ z, atol=1e-5)
    for rows, count in ((1, 2), (5, 1)):
        monkeypatch.setattr(correlated, "_rows_for", lambda *of, rows=rows: rows)
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)  # of the kernel's
        for order in ([0, 1, 2, 3, 9, 23], [23, 4], [5, 6, 6, 7, 8, 9, 10, 11]):  # gaps, a resume, a step again
            other = Correlation(mechanism, cycle=9)
            assert all(torch.equal(other.noise_of(noise, t, start, like), drawn[t]) for t in order)


def test_noise_is_made_for_fewer_steps_where_memory_is_short(monkeypatch):
    like = torch.empty(1000)
    assert correlated._rows_for(like, 1) == 2 and correlated._rows_for(like, 7) == 14
    monkeypatch.setattr(correlated.os, "sysconf", {"SC_AVPHYS_PAGES": 12, "SC_PAGE_SIZE": 4096}.get)
    assert correlated._rows_for(like, 7) == 3 and correlated._rows_for(torch.empty(10**6), 7) == 1


def test_noise_that_was_made_ahead_is_in_no_graph_either(monkeypatch):
    _, model, optimizer, loader = private(CorrelatedNoise.banded(3))
    made = steps(model, optimizer, loader)
    next(made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PrivacyError, match="while a CUDA graph is captured"):
        next(made)


def test_noise_that_was_made_ahead_is_made_again_on_another_device():
    correlation = correlated.Correlation(CorrelatedNoise.previous(0.9), 4)
    noise, here = GaussianNoise(3), torch.empty(5)
    first = correlation.noise_of(noise, 0, 0, here).clone()
    assert correlation.noise_of(noise, 1, 0, here.to("meta")).is_meta
    assert torch.equal(correlation.noise_of(noise, 0, 0, here), first)


def test_noise_of_steps_to_come_is_in_no_copy():
    _, model, optimizer, loader = private(CorrelatedNoise.previous(0.9))
    list(steps(model, optimizer, loader))
    assert optimizer.run.correlation._ahead
    assert not copy.deepcopy(optimizer.run.correlation)._ahead and not copy.copy(optimizer.run.correlation)._ahead


@pytest.mark.parametrize("name", MECHANISMS)
def test_epsilon_is_that_of_one_gaussian_mechanism(name):
    mechanism, sigma = MECHANISMS[name], 3.0
    engine, model, optimizer, loader = private(mechanism, sigma=sigma)
    for rounds in range(1, 4):
        list(steps(model, optimizer, loader))
        judge = PRVAccountant()
        judge.step(
            noise_multiplier=sigma / math.sqrt(moved_most(mechanism, 4, rounds, [*range(4 * rounds)])), sample_rate=1.0
        )
        truth = judge.get_epsilon(1e-3)
        assert truth <= engine.get_epsilon(1e-3) <= truth * (1 + 1e-6)
    assert len(engine.accountant) == 12


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_step_gets_its_noise_and_the_weighted_noise_of_steps_before(name):
    mechanism = MECHANISMS[name]
    _, noisy, optimizer, loader = private(mechanism)
    stream = copy.copy(optimizer.noise)
    released = []
    optimizer.attach_step_hook(lambda of: released.append(torch.cat([p.grad.flatten() for p in noisy.parameters()])))
    _, exact, plain, same = private(mechanism, PrivacyEngine(seed=7), sigma=0.0)
    exact_sums = []
    plain.attach_step_hook(lambda of: exact_sums.append(torch.cat([p.grad.flatten() for p in exact.parameters()])))
    for _ in range(3):
        pairs = zip(steps(noisy, optimizer, loader), steps(exact, plain, same), strict=True)
        for weights, _ in pairs:
            exact.load_state_dict({k: v for k, v in zip(exact.state_dict(), weights, strict=True)})
    stream.seed = optimizer.noise.seed
    drawn = [stream.fill_(torch.empty(21), 1.0, t) for t in range(12)]
    inverse = np.linalg.inv(matrix(mechanism, 12))
    for t, (mine, theirs) in enumerate(zip(released, exact_sums, strict=True)):
        noise = sum(inverse[t, s] * drawn[s] for s in range(t + 1)).float()
        if t == 0:  # behind it the weights differ by rounding
            torch.testing.assert_close(mine, theirs + noise / 5, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine - theirs, noise / 5, rtol=1e-3, atol=1e-4)


def test_every_round_has_the_same_batches():
    _, _, _, loader = private(MECHANISMS["previous"])
    rounds = [[x for x, _ in loader] for _ in range(3)]
    assert len(rounds[0]) == 4
    for other in rounds[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rounds[0], other, strict=True))
    assert len({tuple(x.flatten().tolist()) for x in rounds[0]}) == 4


def test_a_round_that_is_broken_off_leaves_a_gap_and_counts_whole():
    engine, model, optimizer, loader = private(MECHANISMS["square root"])
    list(itertools.islice(steps(model, optimizer, loader), 2))
    assert optimizer.run.correlation.last == 1
    list(steps(model, optimizer, loader))
    assert optimizer.run.correlation.last == 7 and len(engine.accountant) == 6
    whole = PRVAccountant()
    whole.step(noise_multiplier=sum(MECHANISMS["square root"].costs(4, 2)) ** -0.5, sample_rate=1.0)
    assert engine.get_epsilon(1e-3) == pytest.approx(whole.get_epsilon(1e-3), rel=1e-6)


@pytest.mark.parametrize("name", ["previous", "square root", "banded"])
def test_a_resumed_run_takes_back_the_noise_of_before(tmp_path, name):
    path = tmp_path / "c.pt"
    engine, model, optimizer, loader = private(MECHANISMS[name], PrivacyEngine())
    first = steps(model, optimizer, loader)
    list(itertools.islice(first, 3))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    ways = [[*first, *steps(model, optimizer, loader)]]
    for _ in range(2):
        other, again, resumed, rest = private(MECHANISMS[name], PrivacyEngine())
        other.load_checkpoint(path=path, module=again, optimizer=resumed)
        ways.append([*steps(again, resumed, rest), *steps(again, resumed, rest)])
        epsilon = other.get_epsilon(1e-3)
    assert len(ways[0]) == 5
    for several in zip(*ways, strict=True):
        for one, *others in zip(*several, strict=True):
            assert all(torch.equal(one, other) for other in others)
    whole = PRVAccountant()
    whole.step(noise_multiplier=sum(MECHANISMS[name].costs(4, 2)) ** -0.5, sample_rate=1.0)
    assert epsilon == pytest.approx(whole.get_epsilon(1e-3), rel=1e-6)


def test_a_file_s_run_goes_on_with_its_own_batches_only(tmp_path):
    path = tmp_path / "c.pt"
    engine, model, optimizer, loader = private(MECHANISMS["previous"], PrivacyEngine())
    list(itertools.islice(steps(model, optimizer, loader), 3))
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    other, again, resumed, rest = private(MECHANISMS["previous"], PrivacyEngine())
    own = rest.sampler_state.seed
    other.load_checkpoint(path=path, module=again, optimizer=resumed)
    rest.sampler_state.seed = own
    refused(other, again, resumed, rest, "must have the same batches")


def test_a_batch_of_another_seed_is_refused_though_the_seed_was_put_back():
    engine, model, optimizer, loader = private(MECHANISMS["previous"])
    list(itertools.islice(steps(model, optimizer, loader), 1))
    own = loader.sampler_state.seed

    def between():
        given = iter(loader)
        loader.sampler_state.seed = 5
        batch = next(given)
        loader.sampler_state.seed = own
        yield batch

    refused(engine, model, optimizer, between(), "must have the same batches")


def test_a_count_that_was_interrupted_is_made_up_for(monkeypatch):
    engine, model, optimizer, loader = private(MECHANISMS["previous"])

    def interrupted(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine.accountant, "step", interrupted)
        list(steps(model, optimizer, loader))
    list(steps(model, optimizer, loader))  # the second round
    whole = PRVAccountant()
    whole.step(noise_multiplier=sum(MECHANISMS["previous"].costs(4, 2)) ** -0.5, sample_rate=1.0)
    assert whole.get_epsilon(1e-3) <= engine.get_epsilon(1e-3) <= whole.get_epsilon(1e-3) * (1 + 1e-6)


def test_a_batch_that_was_fetched_and_not_used_ends_the_run():
    engine, model, optimizer, loader = private(MECHANISMS["previous"])
    list(itertools.islice(steps(model, optimizer, loader), 2))
    next(iter(loader))
    refused(engine, model, optimizer, loader, "fetched and not used")


@pytest.mark.parametrize("rows", ["views", "users"])
def test_units_of_several_rows_stay_in_their_batch(rows):
    torch.manual_seed(3)
    data = TensorDataset(torch.arange(24.0).unsqueeze(1).expand(24, 6), torch.randint(3, (24,)))
    units = dpcore.views(data, None, K=2) if rows == "views" else dpcore.users(data, [i // 2 for i in range(24)], K=2)
    model = nn.Linear(6, 3)
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "noise_multiplier": 1.0}
    model, optimizer, loader = PrivacyEngine(seed=7).make_private(
        **given, data_loader=DataLoader(units, 3), max_grad_norm=1.0, mechanism=MECHANISMS["previous"]
    )
    members = [[{int(i) // 2 if rows == "users" else int(i) for i in x[:, 0]} for x, _ in loader] for _ in range(3)]
    assert members[0] == members[1] == members[2] and len(set.union(*members[0])) == sum(map(len, members[0]))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyError, match="fetched and not used"):  # the rounds above
            optimizer.step()
        break


def refused(engine, model, optimizer, loader, words):
    before = [p.detach().clone() for p in model.parameters()]
    spent = len(engine.accountant)
    with pytest.raises(PrivacyError, match=words):
        list(steps(model, optimizer, loader))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(engine.accountant) == spent


@pytest.mark.parametrize("what", ["noise", "sigma", "bound", "sampler", "copied seed", "other batches"])
def test_what_would_break_the_correlation_is_refused(what):
    engine, model, optimizer, loader = private(MECHANISMS["previous"])
    sampler = loader.sampler_state.state_dict()
    list(itertools.islice(steps(model, optimizer, loader), 2))
    if what == "noise":
        optimizer.noise = GaussianNoise(seed=5)
        refused(engine, model, optimizer, loader, "not theirs any more")
    elif what == "other batches":
        loader.sampler_state.seed = 12345
        refused(engine, model, optimizer, loader, "must have the same batches")
    elif what == "copied seed":
        optimizer.noise.branch("other", known=True)
        refused(engine, model, optimizer, loader, "not theirs any more")
    elif what == "sigma":
        optimizer.noise_multiplier = 2.0
        refused(engine, model, optimizer, loader, "noise_multiplier is 2.0 and was 1.0")
    elif what == "bound":
        optimizer.max_grad_norm = 2.0
        refused(engine, model, optimizer, loader, "max_grad_norm is 2.0 and was 1.0")
    else:
        loader.sampler_state.load_state_dict(sampler)
        refused(engine, model, optimizer, loader, "the next one|another one")


def test_accumulated_batches_and_kept_ones_are_refused():
    engine, model, optimizer, loader = private(MECHANISMS["previous"])
    kept = list(loader)
    refused(engine, model, optimizer, kept[:1], "in their order")
    engine, model, optimizer, loader = private(MECHANISMS["previous"])
    with pytest.raises(PrivacyError, match="one batch of the private loader"):
        for n, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if n % 2:
                optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {"clipping": "adaptive", "target_unclipped_quantile": 0.5},
        {"check_batches": False},
        {"poisson_sampling": False},
        {"sampling": "poisson"},
        {"max_batch_size": 9},
        {"grad_sample_mode": "no_op"},
    ],
    ids=str,
)
def test_what_correlated_noise_does_not_go_with(options):
    with pytest.raises(UnsupportedError, match="Correlated noise does not go with"):
        private(MECHANISMS["previous"], **options)


def test_secure_noise_other_mechanisms_and_cycles_without_one_are_refused():
    with pytest.raises(UnsupportedError, match="secure_mode"):
        private(MECHANISMS["previous"], PrivacyEngine(secure_mode=True))
    with pytest.raises(TypeError, match="CorrelatedNoise"):
        private("bisr")
    with pytest.raises(ValueError, match="for correlated noise"):
        private(None, sampling="cycle")
    for weights in [(), (0.5,), (1.0, 0.5), (1.0, -0.7, -0.7), (1.0, math.nan), 0.9, "bisr"]:
        with pytest.raises(ValueError, match="weights are"):
            CorrelatedNoise(weights)
    for weights in [(), (0.5,), (1.0, 1.0), (1.0, 0.5, 0.5), (1.0, 0.5, 0.0), (1.0, -0.5), (1.0, math.nan)]:
        with pytest.raises(ValueError, match="of a banded matrix"):
            CorrelatedNoise(weights, is_banded=True)
    with pytest.raises(ValueError, match=r"share is 1\.0"):
        CorrelatedNoise.previous(1.0)
    for make in (CorrelatedNoise.square_root, CorrelatedNoise.banded):
        for bands in (0, 10**7):
            with pytest.raises(ValueError, match=f"bands is {bands}; it must be a whole number from 1 to 1000"):
                make(bands)


def test_more_bands_than_a_round_has_batches_are_refused():
    private(CorrelatedNoise.banded(4))
    with pytest.raises(UnsupportedError, match="has 5 bands, and a round 4 batches"):
        private(CorrelatedNoise.banded(5))


def test_the_noise_for_a_budget_spends_it_and_no_more():
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(20, 6), torch.randint(3, (20,)))
    model = nn.Linear(6, 3)
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, 5),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=3,
        max_grad_norm=1.0,
        mechanism=MECHANISMS["square root"],
    )
    for _ in range(3):
        assert engine.within_budget(optimizer)
        list(steps(model, optimizer, loader))
    assert 1.999 < engine.get_epsilon(1e-3) <= 2.0
    assert not engine.within_budget(optimizer)
    with pytest.raises(BudgetError):
        list(steps(model, optimizer, loader))


def test_pieces_release_what_whole_batches_do():
    ways = []
    for most in (None, 2):
        _, model, optimizer, loader = private(MECHANISMS["previous"], max_physical_batch_size=most)
        *_, last = steps(model, optimizer, loader)
        ways.append(last)
    for one, two in zip(*ways, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_the_weights_of_the_square_root_are_those_of_the_series():
    weights = np.array(CorrelatedNoise.square_root(6).weights)
    assert np.convolve(weights, weights)[:6] == pytest.approx([1, -1, 0, 0, 0, 0], abs=1e-15)
    weights = np.array(CorrelatedNoise.banded(6).weights)
    assert np.convolve(weights, weights)[:6] == pytest.approx(np.ones(6), abs=1e-15)


def test_steps_of_different_noise_on_all_examples_are_one_gaussian_mechanism():
    for kind in (PRVAccountant, RDPAccountant):
        several, one = kind(), kind()
        for noise in (2.0, 3.0, 5.0):
            several.step(noise_multiplier=noise, sample_rate=1.0)
        one.step(noise_multiplier=(1 / 4 + 1 / 9 + 1 / 25) ** -0.5, sample_rate=1.0)
        assert one.get_epsilon(1e-5) <= several.get_epsilon(1e-5) <= one.get_epsilon(1e-5) * (1 + 1e-6)


def test_the_report_says_that_noise_is_correlated():
    engine, model, optimizer, loader = private(MECHANISMS["previous"], PrivacyEngine(), sigma=8.0)
    list(steps(model, optimizer, loader))
    text = dpcore.report(engine).markdown()
    assert (
        "correlated over steps" in text and "the same batches in every epoch" in text and "zeros in the place" in text
    )
