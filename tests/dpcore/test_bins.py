"""Balls in bins and shuffled batches: what is drawn, and the epsilon that holds for them."""

import math
import warnings
from itertools import count

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import BudgetError, CorrelatedNoise, DPDataLoader, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.accountants import GaussianAccountant, PRVAccountant, RDPAccountant, get_noise_multiplier
from dpcore.accountants.allocation import law_of
from dpcore.audit import audit_step


def epsilon(sigma, bins, epochs, delta):
    accountant = PRVAccountant()
    accountant.count_epochs(noise_multiplier=sigma, bins=bins, epochs=epochs)
    return accountant.get_epsilon(delta)


def exact(sigma, bins, delta):
    """Epsilon of an epoch of two or three bins: the last one by a closed form, the others on a fine grid."""
    x = np.linspace(-12, 12 + 1 / sigma, 6001 if bins == 2 else 1201)
    weight = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    ratio = np.exp(x / sigma - 1 / (2 * sigma**2))
    others = ratio if bins == 2 else np.add.outer(ratio, ratio).ravel()
    weights = weight if bins == 2 else np.outer(weight, weight).ravel()

    def delta_of(level, removal):
        strike = bins * math.exp(level if removal else -level) - others
        beyond = np.where(strike > 0, strike, 1.0)
        up = 1 / (2 * sigma) - sigma * np.log(beyond)
        down = up - 1 / sigma
        if removal:
            value = np.where(strike > 0, special.ndtr(up) - beyond * special.ndtr(down), 1.0 - strike)
            return float(weights @ value) / bins
        value = np.where(strike > 0, beyond * special.ndtr(-down) - special.ndtr(-up), 0.0)
        return float(weights @ value) / bins * math.exp(level)

    def root(removal):
        if delta_of(0.0, removal) <= delta:
            return 0.0
        return optimize.brentq(lambda level: math.log(max(delta_of(level, removal), 1e-300) / delta), 0.0, 40.0)

    return max(root(True), root(False))


@pytest.mark.parametrize(
    ("sigma", "bins", "delta"),
    [(1.0, 2, 1e-5), (0.5, 2, 1e-8), (3.0, 2, 1e-5), (10.0, 2, 1e-10), (0.6, 3, 1e-6), (5.0, 3, 1e-5)],
)
def test_epsilon_of_few_bins_is_never_below_the_exact_one_and_within_a_thousandth(sigma, bins, delta):
    truth = exact(sigma, bins, delta)
    assert truth - 1e-7 <= epsilon(sigma, bins, 1, delta) <= truth + 1e-3 * max(1.0, truth)


@pytest.mark.parametrize(("sigma", "bins", "level"), [(1.0, 10, 1.5), (0.7, 40, 2.0), (2.0, 25, 0.3)])
def test_delta_of_an_epoch_covers_what_is_sampled(sigma, bins, level):
    """Under P one term has the mean 1 / σ more: with these samples small deltas are seen well enough."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((400_000, bins))
    x[:, 0] += 1 / sigma
    ratio = np.exp(x / sigma - 1 / (2 * sigma**2)).mean(1)
    sampled = np.maximum(1 - math.exp(level) / ratio, 0.0)
    error = 5 * sampled.std() / math.sqrt(len(sampled))
    law = law_of(sigma, bins)
    found = float(law.mass @ np.maximum(law.values / bins - math.exp(level), 0.0)) + law.lost_p
    assert sampled.mean() - error <= found <= sampled.mean() + error + 2e-3 * found
    assert abs(float(law.mass @ law.values) / bins - 1.0) < 1e-11


def test_one_bin_is_the_gaussian_mechanism_and_many_bins_are_near_poisson_samples():
    gauss, poisson = PRVAccountant(), PRVAccountant()
    gauss.step(noise_multiplier=2.0, sample_rate=1.0, steps=5)
    assert epsilon(2.0, 1, 5, 1e-5) == gauss.get_epsilon(1e-5)
    poisson.step(noise_multiplier=5.0, sample_rate=1 / 200, steps=200 * 50)
    assert epsilon(5.0, 200, 50, 1e-5) == pytest.approx(poisson.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize("epochs", [1, 7])
def test_epsilon_lies_between_that_of_one_bin_in_none_and_in_all(epochs):
    """More bins, more noise, fewer epochs: each a smaller epsilon."""
    assert epsilon(1.0, 20, epochs, 1e-5) < epsilon(1.0, 10, epochs, 1e-5) < epsilon(1.0, 1, epochs, 1e-5)
    assert epsilon(1.1, 10, epochs, 1e-5) < epsilon(1.0, 10, epochs, 1e-5) < epsilon(1.0, 10, epochs + 1, 1e-5)


def test_epochs_and_steps_compose_and_risks_know_them():
    mixed = PRVAccountant()
    mixed.step(noise_multiplier=1.0, sample_rate=0.05, steps=20)
    alone = mixed.get_epsilon(1e-5)
    mixed.count_epochs(noise_multiplier=1.0, bins=20)
    assert max(alone, epsilon(1.0, 20, 1, 1e-5)) < mixed.get_epsilon(1e-5) < alone + epsilon(1.0, 20, 1, 1e-5)
    assert mixed.get_epsilon_bounds(1e-5) == (0.0, mixed.get_epsilon(1e-5))
    # By ε and δ an attack finds at most e^ε α + δ.
    assert 0.01 < mixed.tpr_at(0.01) <= math.exp(mixed.get_epsilon(1e-2)) * 0.01 + 1e-2 + 1e-3
    copy = PRVAccountant()
    copy.load_state_dict(mixed.state_dict())
    assert copy.history == mixed.history
    assert copy.get_epsilon(1e-5) == mixed.get_epsilon(1e-5)


@pytest.mark.parametrize("kind", [RDPAccountant, GaussianAccountant])
def test_accountants_without_a_bound_refuse_bins(kind):
    accountant = kind()
    with pytest.raises(UnsupportedError, match="prv"):
        accountant.count_epochs(noise_multiplier=1.0, bins=10)
    accountant.history = [(1.0, ("bins", 10), 1)]
    with pytest.raises(UnsupportedError, match="prv"):
        accountant.get_epsilon(1e-5)
    with pytest.raises(UnsupportedError, match="prv"):
        private("bins", engine=PrivacyEngine(accountant=accountant.mechanism()))


@pytest.mark.parametrize("sampling", ["bins", "shuffle"])
def test_the_noise_for_a_budget_keeps_it_and_is_hardly_more(sampling):
    asked = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.05, "epochs": 3, "sigma_tolerance": 1e-3}
    sigma = get_noise_multiplier(**asked, sampling=sampling)
    bins = 20 if sampling == "bins" else 1
    assert epsilon(sigma, bins, 3, 1e-5) <= 2.0 < epsilon(sigma - 2e-3, bins, 3, 1e-5) + 1e-3


# ---- what is drawn


def loader(kind, seed=0, rows=60, **options):
    data = TensorDataset(torch.arange(rows))
    return DPDataLoader(data, sample_rate=0.25, sampling=kind, seed=seed, **options)


def drawn(batches):
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"secure": True, "seed": None}])
@pytest.mark.parametrize("kind", ["bins", "shuffle"])
def test_every_epoch_has_every_example_in_one_batch_and_is_dealt_anew(kind, options):
    one = loader(kind, **options)
    epochs = [drawn(one) for _ in range(3)]
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(60))
        assert len(epoch) == 4
    assert len({str(epoch) for epoch in epochs}) == 3
    if not options:
        again = loader(kind)
        assert [drawn(again) for _ in range(3)] == epochs
        assert drawn(loader(kind, seed=1)) != epochs[0]


@pytest.mark.parametrize("secure", [False, True])
def test_bins_are_uniform_and_independent(secure):
    one = loader("bins", None if secure else 3, rows=2, secure=secure)
    places = np.zeros((4, 4))
    for _ in range(2000):
        where = {number: t for t, batch in enumerate(drawn(one)) for number in batch}
        places[where[0], where[1]] += 1
    assert stats.chisquare(places.ravel()).pvalue > 1e-6


def test_shuffled_batches_have_one_length_and_the_last_one_may_be_dropped():
    data = TensorDataset(torch.arange(23))
    for drop_last in (False, True):
        made = DPDataLoader.from_data_loader(DataLoader(data, batch_size=5, drop_last=drop_last), sampling="shuffle")
        assert [len(batch) for batch in drawn(made)] == [5, 5, 5, 5] + [3] * (not drop_last)


def test_a_bin_is_cut_and_charged():
    one = loader("bins", 3, max_batch_size=16)
    assert max(len(batch) for _ in range(20) for batch in drawn(one)) == 16
    assert one.sampler_state.overflow == pytest.approx(stats.binom.sf(16, 61, 0.25))


def test_an_epoch_that_was_broken_off_is_left_and_a_saved_one_goes_on():
    one, other = loader("bins", 3), loader("bins", 3)
    first, second = drawn(other), drawn(other)
    rows = iter(one)
    assert drawn([next(rows)]) == first[:1]
    saved = one.position()
    del rows
    assert drawn(one) == second
    resumed = loader("bins", 9)
    resumed.go_on(saved)
    assert drawn(resumed) == first[1:]


# ---- what is counted


def private(sampling, engine=None, rows=103, generator=None, **options):
    torch.manual_seed(0)
    model, data = torch.nn.Linear(5, 3), TensorDataset(torch.randn(rows, 5), torch.arange(rows) % 3)
    engine = engine or PrivacyEngine(seed=1)
    private = {"noise_multiplier": 1.0} if "target_epsilon" not in options else {}
    make = engine.make_private if private else engine.make_private_with_epsilon
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(data, batch_size=10, generator=generator),
    }
    return engine, *make(**given, max_grad_norm=1.0, sampling=sampling, **private, **options)


def train(model, optimizer, loader, steps=None):
    for made in count(1):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if made == steps:
                return
            made += 1
        if steps is None:
            return


@pytest.mark.parametrize(("sampling", "bins"), [("bins", 11), ("shuffle", 1)])
def test_every_begun_epoch_counts_once(sampling, bins):
    engine, model, optimizer, made = private(sampling)
    for begun, steps in ((1, 1), (2, 3), (3, None)):  # the first two are broken off
        train(model, optimizer, made, steps)
        assert engine.get_epsilon(1e-3) == epsilon(1.0, bins, begun, 1e-3)
    assert len(engine.accountant) == 1 + 3 + 11


def test_batches_that_are_accumulated_or_whose_epochs_are_unknown_count_with_all_their_epochs():
    engine, model, optimizer, made = private("bins")
    for k, (x, y) in enumerate(made):
        F.cross_entropy(model(x), y).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    # Two batches share the noise of one: each epoch counts with 1 / √2 of it.
    assert engine.get_epsilon(1e-3) == epsilon(1.0 / 2**0.5, 11, 1, 1e-3)
    engine, model, optimizer, made = private("bins", check_batches=False)
    train(model, optimizer, made)
    assert engine.get_epsilon(1e-3) == epsilon(1.0, 11, 1, 1e-3)


def test_batches_of_another_loader_bring_its_epochs():
    engine, model, optimizer, made = private("bins", max_physical_batch_size=4)
    train(model, optimizer, made)
    assert engine.get_epsilon(1e-3) == epsilon(1.0, 11, 1, 1e-3)
    engine, model, optimizer, made = private("bins")
    other = DPDataLoader(made.dataset, sample_rate=1 / 11, sampling="bins", seed=5)
    train(model, optimizer, made, 2)
    train(model, optimizer, other, 2)
    assert engine.get_epsilon(1e-3) == epsilon(1.0, 11, 2, 1e-3)
    poisson = DPDataLoader(made.dataset, sample_rate=1 / 11, seed=5)
    with pytest.raises(PrivacyError, match="came from elsewhere"):
        train(model, optimizer, poisson, 1)


@pytest.mark.parametrize("sampling", ["bins", "shuffle"])
@pytest.mark.parametrize("how", ["seed", "state", "steps", "own batches"])
def test_releases_of_one_deal_are_not_free(sampling, how):
    """An epoch was paid once by its name: whatever was made of the same deal afterwards cost nothing."""
    engine = PrivacyEngine()
    generators = [torch.Generator().manual_seed(0) if how == "seed" else None for _ in range(3)]
    checks = how in ("seed", "state")
    first = private(sampling, engine, generator=generators[0], check_batches=checks)[1:]
    saved = first[2].sampler_state.state_dict()
    for again, generator in enumerate(generators):
        model, optimizer, made = first
        if how == "seed" and again:
            model, optimizer, made = private(sampling, engine, generator=generator)[1:]
        if how == "state":
            made.sampler_state.load_state_dict(saved)
        batches = list(DataLoader(made.dataset, batch_size=10)) if how == "own batches" else made
        for x, y in batches:
            for _ in range(3 if how == "steps" else 1):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        if how == "steps":
            break
    # Three releases of each batch of one deal are one with 1 / √3 of the noise.
    bins = 11 if sampling == "bins" else 1
    assert engine.get_epsilon(1e-3) >= epsilon(1.0 / 3**0.5, bins, 1, 1e-3)


def test_an_accountant_without_a_bound_does_not_take_the_place_of_one_that_has_it():
    engine, model, optimizer, made = private("bins")
    train(model, optimizer, made, 1)
    other = RDPAccountant()
    other.history = list(engine.accountant.history)
    with pytest.raises(UnsupportedError):
        engine.accountant = other


def test_shuffled_epochs_without_their_last_batch_are_shorter():
    noise = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-3, sample_rate=10 / 15, steps=4, sampling="shuffle"
    )
    accountant = PRVAccountant()
    accountant.history = [(noise, 1.0, 4)]
    assert accountant.get_epsilon(1e-3) <= 3.0


def test_less_noise_within_an_epoch_counts_it_again():
    engine, model, optimizer, made = private("bins")
    for k, (x, y) in enumerate(made):
        optimizer.noise_multiplier = 1.0 if k < 4 else 0.9
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-3) >= epsilon(0.9, 11, 1, 1e-3)


@pytest.mark.parametrize("sampling", ["bins", "shuffle"])
def test_a_run_goes_on_in_its_epoch_and_counts_it_once(sampling, tmp_path):
    engine, model, optimizer, made = private(sampling)
    whole = private(sampling)
    train(*whole[1:])
    train(model, optimizer, made, 4)
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    other, model, optimizer, made = private(sampling)
    other.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    train(model, optimizer, made)
    assert other.get_epsilon(1e-3) == whole[0].get_epsilon(1e-3)
    assert len(other.accountant) == 11
    for mine, its in zip(model.parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(mine, its)
    train(model, optimizer, made, 1)
    assert other.get_epsilon(1e-3) > whole[0].get_epsilon(1e-3)
    third, model, optimizer, made = private("poisson")
    with pytest.raises(PrivacyError, match="sampling"):
        third.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)


@pytest.mark.parametrize("sampling", ["bins", "shuffle"])
def test_a_budget_for_epochs_holds_for_them_and_not_for_one_more(sampling):
    planned = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2}
    engine, model, optimizer, made = private(sampling, **planned)
    train(model, optimizer, made)
    assert engine.within_budget(optimizer)
    train(model, optimizer, made)
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0
    assert not engine.within_budget(optimizer)
    with pytest.raises(BudgetError):
        train(model, optimizer, made, 1)
    assert engine.get_epsilon(1e-3) <= 3.0


def test_a_budget_knows_that_an_epoch_was_left_though_an_older_iterator_is_held():
    """It was said to have room for as long as any iterator was held."""
    engine, model, optimizer, made = private("shuffle", target_epsilon=3.0, target_delta=1e-3, epochs=2)
    held = iter(made)
    train(model, optimizer, [next(held)])
    assert engine.within_budget(optimizer)
    train(model, optimizer, made, 2)
    assert not engine.within_budget(optimizer)
    with pytest.raises(BudgetError):
        train(model, optimizer, made, 1)


@pytest.mark.parametrize(
    "options",
    [{"sampling": "shuffle"}, {"sampling": None, "mechanism": CorrelatedNoise.previous(0.5)}],
    ids=["shuffle", "correlated"],
)
def test_a_budget_knows_that_an_epoch_which_was_left_is_not_gone_on_with(options, tmp_path):
    """It was said to have room for a step of the epoch that the next iteration leaves."""
    planned = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1, **options}
    engine, model, optimizer, made = private(**planned)
    for x, y in made:
        assert engine.within_budget(optimizer)  # for the batch at hand
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert engine.within_budget(optimizer)  # for the one that follows
        break
    assert not engine.within_budget(optimizer)
    engine.save_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    with pytest.raises(BudgetError):
        train(model, optimizer, made, 1)
    engine, model, optimizer, made = private(**planned)
    engine.load_checkpoint(path=tmp_path / "file", module=model, optimizer=optimizer)
    assert engine.within_budget(optimizer)
    train(model, optimizer, made)
    assert optimizer.steps == len(made) and engine.get_epsilon(1e-3) <= 3.0
    assert not engine.within_budget(optimizer)


def test_a_loader_that_deals_epochs_is_counted_as_it_draws_and_takes_no_other_name():
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    made = DPDataLoader(data, sample_rate=0.25, sampling="bins")
    model = torch.nn.Linear(5, 3)
    engine, given = PrivacyEngine(), {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": made}
    given |= {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "expected_batch_size": 15}
    with pytest.raises(ValueError, match="bins"):
        engine.make_private(**given, sampling="poisson")
    model, optimizer, private_loader = engine.make_private(**given)
    train(model, optimizer, private_loader)
    assert engine.get_epsilon(1e-3) == epsilon(1.0, 4, 1, 1e-3)
    assert "balls in bins" in dpcore.report(engine).markdown()
    with pytest.raises(UnsupportedError, match="schedule"):
        private_loader.set_sample_rate(0.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling": "balls"}, "balls"),
        ({"sampling": "BINS"}, "one of 'poisson', 'truncated', 'bins', 'shuffle'. Did you mean 'bins'"),
        ({"sampling": "truncated"}, "max_batch_size"),
        ({"sampling": "shuffle", "max_batch_size": 12}, "max_batch_size"),
        ({"sampling": "bins", "poisson_sampling": False}, "poisson_sampling"),
    ],
)
def test_what_does_not_go_together_is_refused(options, named):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=named):
        warnings.simplefilter("ignore")
        private(**options)


@pytest.mark.parametrize("rate", [None, 0.1], ids=["length", "rate"])
@pytest.mark.parametrize("sampling", ["poisson", "bins", "shuffle"])
def test_data_without_examples_are_a_sentence(sampling, rate):
    data = TensorDataset(torch.randn(0, 5), torch.arange(0))
    with pytest.raises(ValueError, match="num_samples is 0: there must be at least one example"):
        DPDataLoader.from_data_loader(DataLoader(data, batch_size=5), sampling=sampling, sample_rate=rate)


def test_a_rate_that_makes_no_whole_number_of_bins_is_said():
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    with pytest.warns(UserWarning, match=r"sample_rate is 0.13, .* dealt into 8, at the rate 0.125"):
        assert len(DPDataLoader(data, sample_rate=0.13, sampling="bins")) == 8


@pytest.mark.parametrize(
    ("sampling", "shown"),
    [("bins", "33 steps: 3 epochs of 11 bins at noise 1)"), ("shuffle", "33 steps: 3 at noise 1, rate 1)")],
)
def test_an_engine_says_the_epochs_that_are_counted(sampling, shown):
    engine, model, optimizer, loader = private(sampling)
    for _ in range(3):
        train(model, optimizer, loader)
    assert shown in repr(engine)


def test_a_batch_of_more_examples_than_there_are_is_said():
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    with pytest.warns(UserWarning, match="batch_size is 100 for 60 examples.* sample rate 1"):
        DPDataLoader.from_data_loader(DataLoader(data, batch_size=100))


def test_the_sampler_is_named_by_sampling():
    with pytest.raises(TypeError, match="'sampler'; say how batches are drawn by sampling="):
        private("bins", sampler="bins")


def test_views_are_dealt_by_their_examples():
    data = dpcore.views(TensorDataset(torch.randn(40, 5), torch.arange(40) % 3), None, K=3)
    made = DPDataLoader(data, sample_rate=0.25, sampling="bins", seed=0)
    rows = torch.cat([x for x, _ in made])
    assert rows.shape == (120, 5)
    assert len(rows.unique(dim=0)) == 40


def drawn_scores(others, canary):
    """Scores of epochs of 100 batches of which all but one release ``others`` and noise, and the first one more."""

    def sample(included, count):
        y = 0.7 * np.random.default_rng(3 + included).standard_normal((count, 100)) + others
        y[:, 0] += canary[included]
        return y.max(1) if others else np.exp(y / 0.49).mean(1)

    return sample


def test_an_audit_finds_shuffled_batches_that_are_counted_as_poisson_samples_and_nothing_else():
    """Batches of one example, all but the canary at -1: a release near 1 can only be that of the canary's batch."""
    poisson = PRVAccountant()
    poisson.step(noise_multiplier=0.7, sample_rate=0.01, steps=100)
    shuffled, binned = drawn_scores(-1.0, (1.0, 2.0)), drawn_scores(0.0, (0.0, 1.0))
    judged = {"delta": 1e-3, "trials": 20_000, "confidence": 0.99}
    assert audit_step(shuffled, epsilon=poisson.get_epsilon(1e-3), **judged).violated
    assert not audit_step(shuffled, epsilon=epsilon(0.7, 1, 1, 1e-3), **judged).violated
    assert not audit_step(binned, epsilon=epsilon(0.7, 100, 1, 1e-3), **judged).violated
