"""Truncated Poisson batches: what is kept, what epsilon charges for it, and batches of one length."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import BudgetError, DPDataLoader, Engine, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.accountants import PRVAccountant, RDPAccountant
from dpcore.audit import audit_step
from dpcore.loading.uniform_sampler import UniformWithReplacementSampler
from tests.dpcore.private_setup import losses, make, small_data, small_model, step


@pytest.mark.parametrize("secure", [False, True])
def test_a_longer_batch_is_cut_and_every_example_has_the_same_chance(secure):
    drawn = {"num_samples": 40, "sample_rate": 0.3, "secure": secure, "steps": 3000}
    cut = UniformWithReplacementSampler(max_batch_size=11, **drawn, seed=3)
    counts, sizes = np.zeros(40), []
    for batch in cut:
        assert len(set(batch)) == len(batch) <= 11
        counts[batch] += 1
        sizes.append(len(batch))
    sizes = np.bincount(sizes, minlength=12)
    wanted = stats.binom.pmf(np.arange(12), 40, 0.3)
    wanted[11] += stats.binom.sf(11, 40, 0.3)
    assert stats.chisquare(sizes[5:], wanted[5:] / wanted[5:].sum() * sizes[5:].sum()).pvalue > 1e-6
    assert stats.chisquare(counts).pvalue > 1e-6


def test_without_long_batches_the_draws_are_those_of_poisson_sampling():
    drawn = {"num_samples": 200, "sample_rate": 0.1, "seed": 4}
    assert [*UniformWithReplacementSampler(**drawn)] == [*UniformWithReplacementSampler(**drawn, max_batch_size=60)]


@given(st.floats(0.4, 3.0), st.integers(1, 12), st.integers(2, 30), st.sampled_from([0.0, -1.0, 1.0]))
@settings(max_examples=40, deadline=None)
def test_epsilon_holds_for_truncated_batches(sigma, most, examples, others):
    """One step, beside the exact mixtures: one example's gradient is 1, and that of each other, whose place it may take
    in a batch that is cut, is ``others``."""
    q, delta = 0.25, 1e-2
    accountant = PRVAccountant()
    accountant.step(noise_multiplier=sigma, sample_rate=q)
    overflow = UniformWithReplacementSampler(num_samples=examples, sample_rate=q, max_batch_size=most).overflow
    accountant.add_failure_probability(min(1.0, 2.0 * overflow))
    epsilon = accountant.get_epsilon(delta)
    if math.isinf(epsilon):
        return
    x = np.linspace(-examples - 12 * sigma, examples + 1 + 12 * sigma, 100_001)
    without, with_it = np.zeros_like(x), np.zeros_like(x)
    for count, chance in enumerate(stats.binom.pmf(np.arange(examples + 1), examples, q)):
        alone = stats.norm.pdf(x, others * min(count, most), sigma)
        kept = min(1.0, most / (count + 1))
        beside = stats.norm.pdf(x, 1 + others * min(count, most - 1), sigma)
        without += chance * alone
        with_it += chance * ((1 - q * kept) * alone + q * kept * beside)
    for a, b in ((with_it, without), (without, with_it)):
        assert np.trapezoid(np.maximum(a - math.exp(epsilon) * b, 0.0), x) <= delta + 1e-6


def private(most, engine=None, **options):
    return make(engine=engine, max_batch_size=most, noise_multiplier=1.0, **options)


def test_epsilon_charges_the_chance_of_a_longer_batch():
    engine, module, optimizer, loader = private(40)
    for x, y in loader:
        step(module, optimizer, x, y)
    chance = stats.binom.sf(40, 61, 1 / 6)
    assert engine.accountant.failure_probability == pytest.approx(6 * 2 * chance, rel=1e-6)
    other = PRVAccountant()
    other.step(noise_multiplier=1.0, sample_rate=1 / 6, steps=6)
    assert engine.get_epsilon(1e-3) == pytest.approx(other.get_epsilon(1e-3), rel=1e-3)
    other.add_failure_probability(12 * chance)
    assert engine.get_epsilon(1e-3) == pytest.approx(other.get_epsilon(1e-3))


def test_a_bound_that_costs_epsilon_warns_and_names_one_that_does_not():
    model = small_model()
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "noise_multiplier": 1.0}
    given |= {"data_loader": DataLoader(small_data(600), batch_size=60), "max_grad_norm": 1.0, "max_batch_size": 70}
    with pytest.warns(UserWarning, match=r"longer than max_batch_size=70 with the chance 0.0\d+.*max_batch_size=(\d+)"):
        PrivacyEngine().make_private(**given)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyEngine().make_private(**given | {"module": model, "optimizer": optimizer, "max_batch_size": 160})


@pytest.mark.parametrize("most", [13, 16, 20])
def test_the_warning_names_the_step_after_which_epsilon_is_infinite(most):
    with pytest.warns(UserWarning, match=f"max_batch_size={most} ") as caught:
        model = small_model()
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(small_data(), batch_size=10), max_batch_size=most,
        )  # fmt: skip
    said = re.search(r"delta up to 1 / 60 epsilon is infinite after (\d+) step", str(caught[0].message))
    delta, steps = 1 / 60, int(said[1])
    charge = 2 * UniformWithReplacementSampler(num_samples=60, sample_rate=1 / 6, max_batch_size=most).overflow
    accountant = PRVAccountant()
    for _ in range(steps - 1):
        accountant.add_failure_probability(charge)
    accountant.step(noise_multiplier=50.0, sample_rate=1 / 6, steps=steps)
    assert accountant.failure_probability < delta
    accountant.add_failure_probability(charge)
    assert math.isinf(accountant.get_epsilon(delta))


def test_an_explicit_poisson_is_not_cut():
    with pytest.raises(ValueError, match=r"'poisson' cuts no batch, and max_batch_size is 20.*'truncated'"):
        make(sampling="poisson", max_batch_size=20)
    with pytest.raises(ValueError, match="'poisson' cuts no batch"):
        DPDataLoader(small_data(), sample_rate=0.1, sampling="poisson", max_batch_size=20)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_budget_holds_with_the_charge(accountant):
    model = small_model()
    engine = PrivacyEngine(seed=3, accountant=accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10),
            target_epsilon=2.0,
            target_delta=1e-2,
            epochs=2,
            max_grad_norm=1.0,
            max_batch_size=25,
        )
    for _ in range(2):
        for x, y in loader:
            step(module, optimizer, x, y)
    assert engine.accountant.failure_probability > 1e-5
    assert 1.9 < engine.get_epsilon(1e-2) <= 2.0
    with pytest.raises(BudgetError):
        for _ in range(30):
            for x, y in loader:
                step(module, optimizer, x, y)
    assert engine.get_epsilon(1e-2) <= 2.0


def test_cut_batches_that_take_all_of_delta_leave_no_budget():
    model = small_model()
    with pytest.raises(ValueError, match="takes all of delta 1e-05; give a larger max_batch_size"):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10),
            target_epsilon=2.0,
            target_delta=1e-5,
            epochs=2,
            max_grad_norm=1.0,
            max_batch_size=11,
        )


def test_what_was_charged_is_kept_by_checkpoints_and_another_bound_is_refused(tmp_path):
    engine, module, optimizer, loader = private(20)
    for x, y in loader:
        step(module, optimizer, x, y)
    engine.save_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    again, module, optimizer, _ = private(20)
    again.load_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    assert again.get_epsilon(1e-2) == engine.get_epsilon(1e-2)
    other, module, optimizer, _ = private(21)
    with pytest.raises(PrivacyError, match="saved with max_batch_size=20, this run has 21"):
        other.load_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="max_batch_size is 0; it must be a whole number, at least 1"):
        private(0)
    with pytest.raises(ValueError, match="max_batch_size cuts Poisson batches"):
        private(5, poisson_sampling=False)
    with pytest.raises(UnsupportedError, match="max_batch_size is for one process"):
        DPDataLoader(small_data(), sample_rate=0.1, distributed=True, max_batch_size=9)
    loader = DPDataLoader(small_data(), sample_rate=1 / 6, max_batch_size=30)
    with pytest.raises(ValueError, match="max_batch_size is 20, and the loader draws its batches already"):
        private(20, data_loader=loader)
    _, _, _, own = private(None, data_loader=loader)
    assert own.sampler_state.max_batch_size == 30


def test_an_accountant_that_charges_nothing_is_refused():
    class Mine(RDPAccountant):
        def get_epsilon(self, delta, **options):
            return 1.0

    engine = PrivacyEngine()
    engine.accountant = Mine()
    with pytest.raises(UnsupportedError, match="charges no failure probability"):
        private(20, engine=engine)


def test_padded_batches_have_one_shape_and_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
    loader = DPDataLoader(data, sample_rate=1 / 6, seed=1, max_batch_size=24, steps=30)
    engine = Engine(model, losses, max_grad_norm=0.3, compile="eager")
    lengths = set()
    for batch in loader:
        (x, y), mask = dpcore.padded(batch, 24)
        found = engine.clipped_sum(x, y, mask)
        sums = {name: value.clone() for name, value in found.sums.items()}
        alone = Engine(model, losses, max_grad_norm=0.3, check_isolation=False).clipped_sum(*batch)
        for name, value in alone.sums.items():
            torch.testing.assert_close(sums[name], value)
        lengths.add(len(batch[0]))
    assert len(lengths) > 5 and "physical batch size: 24" in engine.explain()


def test_padding():
    batch = {"x": torch.arange(6.0).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0)}
    found, mask = dpcore.padded(batch, 5)
    assert found["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]] and found["names"] == [
        "a",
        "b",
        "c",
        "a",
        "a",
    ]
    assert found["scale"] == 2.0 and mask.tolist() == [True, True, True, False, False]
    empty, mask = dpcore.padded((torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)), 2)
    assert empty[0].shape == (2, 2) and not mask.any()
    with pytest.raises(ValueError, match="The batch has 3 rows, and is to be filled up to 2"):
        dpcore.padded(batch, 2)


def test_views_may_be_bounded_and_padded_too():
    loader = DPDataLoader(dpcore.views(small_data(), None, 2), sample_rate=1 / 6, seed=1, max_batch_size=20)
    engine = Engine(small_model(), losses, group=2)
    for batch in loader:
        (x, y), mask = dpcore.padded(batch, 40)
        assert engine.clipped_sum(x, y, mask).norms.shape == (20,)
        F.cross_entropy(engine.model(x), y)


def _released(most, examples=20, rate=0.9, seed=0):
    """Scores of steps with σ = 1 on ``examples`` gradients of -1 and, where it is included, one of 1."""
    numbers = np.random.default_rng(seed)

    def sample(included, count):
        drawn = numbers.binomial(examples, rate, count)
        mine = (numbers.random(count) < rate) & included
        mine &= numbers.random(count) < most / np.maximum(drawn + 1, most)  # it stays in a batch that is cut, by chance
        return mine - np.minimum(drawn, most - mine) + numbers.standard_normal(count)

    return sample


def test_an_audit_finds_truncation_that_is_accounted_as_poisson_and_nothing_where_it_is_charged():
    accountant, delta = PRVAccountant(), 1e-2
    accountant.step(noise_multiplier=1.0, sample_rate=0.9)
    poisson = accountant.get_epsilon(delta)
    assert audit_step(_released(10), epsilon=poisson, delta=delta, trials=100_000, confidence=0.999).violated
    sampler = UniformWithReplacementSampler(num_samples=20, sample_rate=0.9, max_batch_size=21)
    accountant.add_failure_probability(2 * sampler.overflow)
    charged = accountant.get_epsilon(delta)
    assert not audit_step(_released(21), epsilon=charged, delta=delta, trials=100_000, confidence=0.999).violated
    accountant.add_failure_probability(min(1.0, 2 * stats.binom.sf(10, 21, 0.9)))
    assert math.isinf(accountant.get_epsilon(delta))


def _cut(engine=None):
    engine, model, optimizer, loader = make(None, engine or PrivacyEngine(), noise_multiplier=1.0, max_batch_size=20)
    for batch in loader:
        step(model, optimizer, *batch)
    return engine, optimizer


def test_the_charges_of_two_runs_add_up_where_one_goes_on_from_the_others_state():
    (engine, optimizer), (_, other) = _cut(), _cut()
    charged = engine.accountant.failure_probability
    for _ in range(2):  # the second time it is counted already
        optimizer.load_state_dict(other.state_dict())
        assert engine.accountant.failure_probability == pytest.approx(2 * charged)


def test_another_accountant_with_the_same_history_has_the_charge_too():
    engine, _ = _cut()
    epsilon, other = engine.get_epsilon(1e-2), PRVAccountant()
    other.history = list(engine.accountant.history)
    engine.accountant = other
    assert engine.get_epsilon(1e-2) == epsilon


def test_an_engine_with_a_loader_of_its_own_does_not_forget_the_bound():
    class Own(PrivacyEngine):
        def _prepare_data_loader(self, data_loader, **options):
            return super()._prepare_data_loader(data_loader, **options)

    with pytest.raises(ValueError, match=r"max_batch_size is 20, and Own\._prepare_data_loader"):
        make(None, Own(), sample_rate=None, max_batch_size=20)


def test_noise_for_a_budget_is_that_of_the_rate_at_which_a_loaders_sampler_draws():
    drawn = UniformWithReplacementSampler(num_samples=60, sample_rate=0.3)  # four batches a round, and not a quarter
    model, engine = small_model(), PrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(small_data(), batch_sampler=drawn),
        max_grad_norm=1.0,
        target_epsilon=2.0,
        target_delta=1e-2,
        epochs=2,
    )
    accountant = PRVAccountant()
    accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=loader.sample_rate, steps=8)
    assert 1.99 < accountant.get_epsilon(1e-2) <= 2.0
