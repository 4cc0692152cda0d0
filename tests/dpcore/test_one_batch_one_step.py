"""Ordinary loops whose steps would be something else than one fresh Poisson batch with noise of its own."""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from dpcore import PrivacyEngine, PrivacyError, clipped_sum
from dpcore.data_loader import DPDataLoader
from dpcore.errors import UnsupportedError
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from dpcore.utils.uniform_sampler import UniformWithReplacementSampler
from tests.dpcore.private_setup import losses, make, small_data, step, truth


def _backward(model, x, y):
    losses(model(x), y).mean().backward()


def test_a_logical_batch_of_several_batches_of_the_loader():
    _, model, optimizer, loader = make()
    batches = iter(loader)
    optimizer.signal_skip_step()
    step(model, optimizer, *next(batches))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PrivacyError, match="may be of 2 batches"):
        step(model, optimizer, *next(batches))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loop_that_is_left_within_a_batch_and_begun_again():
    _, model, optimizer, loader = make(sample_rate=0.5)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as pieces:
        step(model, optimizer, *next(iter(pieces)))
        assert optimizer.logical_batch.unfinished
        start = copy.deepcopy(model._module)
        seen = []
        for x, y in pieces:
            seen.append((x, y))
            step(model, optimizer, x, y)
            if optimizer.steps:
                break
    whole = truth(start, *(torch.cat(part) for part in zip(*seen, strict=True)))
    for name, p in model._module.named_parameters():
        torch.testing.assert_close(p.grad * 10, whole[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("change", [lambda x: x.clone(), lambda x: x + 0.0])
def test_pieces_that_are_fetched_before_the_step_on_the_one_before_and_cannot_be_told_apart(change):
    _, model, optimizer, loader = make(sample_rate=0.5)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=12, optimizer=optimizer) as pieces:
        ahead = iter(pieces)
        (x, y), _ = next(ahead), next(ahead)
        with pytest.raises(PrivacyError, match="handed out before"):
            step(model, optimizer, change(x), y)
    assert optimizer.steps == 0


def test_a_piece_that_the_loop_leaves_out():
    _, model, optimizer, loader = make(sample_rate=0.5)
    with (
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=12, optimizer=optimizer) as pieces,
        pytest.raises(PrivacyError, match="leave no piece out"),
    ):
        for k, (x, y) in enumerate(pieces):
            if k != 2:
                step(model, optimizer, x, y)


def test_whole_batches_may_be_fetched_ahead_or_left_out():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=60, optimizer=optimizer) as pieces:
        ahead = iter(pieces)
        now = next(ahead)
        for k, following in enumerate(ahead):
            if k != 2:
                step(model, optimizer, *now)
            now = following
    assert len(engine.accountant) == optimizer.steps == 4


def test_a_bound_that_changes_within_a_logical_batch():
    _, model, optimizer, loader = make(sample_rate=0.5)
    x, y = next(iter(loader))
    optimizer.signal_skip_step()
    step(model, optimizer, x[:9], y[:9])
    optimizer.max_grad_norm = 0.1
    with pytest.raises(PrivacyError, match="within a logical batch"):
        step(model, optimizer, x[9:], y[9:])


def test_an_error_forgets_the_batch():
    """Or a loop that tries again with a smaller piece would add its examples twice."""
    _, model, optimizer, loader = make(sample_rate=0.5)
    x, y = next(iter(loader))
    whole = truth(model._module, x, y)
    add = optimizer.accumulator.add

    def fails(*args):
        add(*args)
        raise MemoryError

    optimizer.accumulator.add = fails
    with pytest.raises(MemoryError):
        step(model, optimizer, x, y)
    optimizer.accumulator.add = add
    _backward(model, x, y)
    optimizer.step()
    for name, p in model._module.named_parameters():
        torch.testing.assert_close(p.grad * 10, whole[name], rtol=1e-8, atol=1e-10)


def test_examples_are_counted_before_they_are_collated():
    """Strings that the loop turns into tensors are as many examples as the sampler has drawn."""
    data = [(f"{k}", k % 3) for k in range(60)]

    def words(batch):
        return [name for name, _ in batch]

    loader = DPDataLoader(data, sample_rate=0.5, collate_fn=words, seed=1)
    _, model, optimizer, loader = make(data_loader=loader)
    batches = iter(loader)
    for copies in (1, 2):
        names = next(batches) * copies
        x = torch.tensor([[float(n)] * 6 for n in names], dtype=torch.float64)
        y = torch.zeros(len(names), dtype=torch.long)
        if copies == 1:
            step(model, optimizer, x, y)
    with pytest.raises(PrivacyError, match=f"{len(names)} rows went through .* handed out {len(names) // 2} examples"):
        step(model, optimizer, x, y)


def _several(examples):
    return default_collate([e for e in examples for _ in range(4)])


class _Rows(torch.utils.data.Dataset):
    """Four rows for every index, by the batched fetch that torch prefers."""

    def __len__(self):
        return 60

    def __getitem__(self, k):
        return torch.full((6,), float(k), dtype=torch.float64), k % 3

    def __getitems__(self, indices):
        return [self[k] for k in indices for _ in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("poisson_sampling", [True, False])
@pytest.mark.parametrize("how", ["collate", "data set"])
def test_several_rows_for_one_example_before_the_loop(how, poisson_sampling, workers):
    if how == "collate":
        loader = DataLoader(small_data(), batch_size=10, collate_fn=_several, num_workers=workers)
    else:
        loader = DataLoader(_Rows(), batch_size=10, num_workers=workers)
    _, model, optimizer, loader = make(data_loader=loader, poisson_sampling=poisson_sampling)
    with pytest.raises(PrivacyError, match="several rows"):
        for x, y in loader:
            step(model, optimizer, x, y)


def test_counts_survive_persistent_workers_and_rounds_that_are_left():
    loader = DataLoader(small_data(), batch_size=10, num_workers=2, persistent_workers=True)
    _, model, optimizer, loader = make(data_loader=loader)
    for stop in (2, 99, 1, 99):
        for k, (x, y) in enumerate(loader):
            step(model, optimizer, x, y)
            if k == stop:
                break


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_one_backward_through_two_halves_of_a_batch(poisson_sampling):
    """Rows of the same number would be clipped as one example."""
    _, model, optimizer, loader = make(sample_rate=0.5, poisson_sampling=poisson_sampling)
    x, y = next(iter(loader))
    half = len(x) // 2
    with pytest.raises(PrivacyError, match="rows went through"):
        losses(model(x[:half]), y[:half]).add(losses(model(x[half : 2 * half]), y[half : 2 * half])).mean().backward()
        optimizer.step()


def test_batches_in_pieces_of_the_loops_own_and_accumulated_ones():
    _, model, optimizer, loader = make(poisson_sampling=False)
    batches = iter(loader)
    x, y = next(batches)
    for rows in (slice(0, 3), slice(3, 10)):
        _backward(model, x[rows], y[rows])
    optimizer.step()
    for _ in range(2):
        _backward(model, *next(batches))
    optimizer.step()
    # A batch that is only looked at may be left out, and one may be fetched ahead.
    next(batches)
    now, ahead = next(batches), next(batches)
    for batch in (now, ahead):
        _backward(model, *batch)
        optimizer.step()


def test_pieces_of_the_loops_own_whose_number_tells_how_long_a_batch_is():
    """Each was averaged over its pieces, the noise as well."""
    _, model, optimizer, loader = make(noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match=r"made 2 backward passes for a batch of .* and 1 for each batch before"):
        for x, y in loader:
            for rows in range(0, len(x), 5):
                _backward(model, x[rows : rows + 5], y[rows : rows + 5])
            optimizer.step()
    _, model, optimizer, loader = make(noise_multiplier=1.0)
    for x, y in loader:
        for part in range(2):
            _backward(model, x[part::2], y[part::2])
        optimizer.step()
    batches = iter(loader)
    with pytest.raises(PrivacyError, match="made 1 backward passes"):
        for _ in range(2):
            _backward(model, *next(batches))
        optimizer.step()


class _FirstHalf(Sampler):
    def __iter__(self):
        return iter([[*range(k, k + 10)] for k in range(0, 30, 10)])

    def __len__(self):
        return 3


class _Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(9, -1, -1))


REFUSED_LOADERS = {
    "a batch sampler of the user's": {"batch_sampler": _FirstHalf()},
    "torch's own over a part": {"batch_sampler": BatchSampler(SequentialSampler(range(30)), 10, False)},
    "a sampler of a class derived from torch's": {"sampler": _Backwards(range(60)), "batch_size": 10},
    "a sampler of a part": {"sampler": RandomSampler(range(30)), "batch_size": 10},
    "weights": {"sampler": WeightedRandomSampler([1.0] * 60, 60), "batch_size": 10},
    "a rank's share": {"sampler": DistributedSampler(range(60), num_replicas=4, rank=1), "batch_size": 10},
    "no batches": {"batch_size": None},
}


@pytest.mark.parametrize("how", REFUSED_LOADERS)
def test_a_choice_of_examples_is_not_lost_without_a_word(how):
    with pytest.raises(UnsupportedError, match=r"Poisson sampling of the whole data set|batch_size=None"):
        make(data_loader=DataLoader(small_data(), **REFUSED_LOADERS[how]))


def test_torchs_own_batch_sampler_of_all_examples_is_honoured():
    batches = BatchSampler(RandomSampler(range(60)), 10, False)
    _, _, _, loader = make(data_loader=DataLoader(small_data(), batch_sampler=batches))
    assert loader.sample_rate == 1 / 6


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_an_example_at_several_places_of_the_data(poisson_sampling):
    data = small_data()
    for several in (
        Subset(data, [0, 1, 1]),
        Subset(data, [0, -60]),
        ConcatDataset([data, data]),
        ConcatDataset([Subset(data, [0, 0]), data]),
        ConcatDataset([data, Subset(data, [4, 7])]),  # a rare class is repeated
        ConcatDataset([Subset(data, [0, 1]), Subset(Subset(data, range(30)), [1, 2])]),
        Subset(ConcatDataset([data, data]), [3, 63]),
    ):
        with pytest.raises(PrivacyError, match="times max_grad_norm"):
            make(data_loader=DataLoader(several, batch_size=10), poisson_sampling=poisson_sampling)
    halves = ConcatDataset([Subset(data, range(30)), Subset(data, range(30, 60))])
    for once in (Subset(data, [0, 1, 5]), halves, Subset(ConcatDataset([data, small_data()]), [3, 64])):
        make(data_loader=DataLoader(once, batch_size=2), poisson_sampling=poisson_sampling)


def test_a_batch_sampler_that_repeats_an_example_without_poisson_sampling():
    class Twice(_FirstHalf):
        def __iter__(self):
            return iter([[0, 1, 2, 1]])

    *_, loader = make(data_loader=DataLoader(small_data(), batch_sampler=Twice()), poisson_sampling=False)
    with pytest.raises(PrivacyError, match="Twice has put an example into one batch 2 times"):
        next(iter(loader))


def test_a_sampler_of_tensors_that_repeats_an_example():
    """Two tensors of one number were taken for two examples."""

    class Drawn(_FirstHalf):
        def __len__(self):
            return 60

        def __iter__(self):
            return iter(torch.arange(60) % 7)

    loader = DataLoader(small_data(), batch_size=10, sampler=Drawn())
    *_, loader = make(data_loader=loader, poisson_sampling=False)
    with pytest.raises(PrivacyError, match="has put an example into one batch 2 times"):
        next(iter(loader))


def test_two_models_of_one_engine_share_neither_noise_nor_batches():
    engine = PrivacyEngine(seed=3)
    first, second = make(engine=engine), make(engine=engine)
    again = make(engine=PrivacyEngine(seed=3))
    noise = [run[2].noise.add_(torch.zeros(100), 1.0, 0) for run in (first, second, again)]
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    drawn = [run[3].sampler_state.draw(0) for run in (first, second, again)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_two_models_of_one_engine_on_one_batch():
    """The accountant composes independent batches: 1.8 instead of 3.5 after 500 steps at q = 0.01 and σ = 1."""
    engine = PrivacyEngine(seed=3)
    _, first, first_optimizer, loader = make(engine=engine)
    _, second, second_optimizer, _ = make(engine=engine, data_loader=loader)
    batches = iter(loader)
    x, y = next(batches)
    step(first, first_optimizer, x, y)
    with pytest.raises(PrivacyError, match="two optimizers of one engine"):
        step(second, second_optimizer, x, y)
    step(second, second_optimizer, *next(batches))


def test_a_checkpoint_that_does_not_know_what_was_released_since():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    step(model, optimizer, *next(iter(loader)))
    after = [p.detach().clone() for p in model.parameters()]
    for parts in ({}, {"optimizer": optimizer}):
        file.seek(0)
        with pytest.raises(PrivacyError, match="counted 1 steps that are not in the checkpoint"):
            engine.load_checkpoint(path=file, module=model, **parts)
    assert len(engine.accountant) == 1
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))


def test_a_checkpoint_without_the_noise_goes_on_with_another():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    step(model, optimizer, *next(iter(loader)))
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model)
    file.seek(0)
    engine, model, resumed, loader = make(noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="goes on with fresh ones"):
        engine.load_checkpoint(path=file, module=model, optimizer=resumed)
    assert resumed.noise.seed != optimizer.noise.seed
    assert loader.sampler_state.seed != optimizer.run.loader.sampler_state.seed


def test_a_checkpoint_that_is_loaded_within_a_batch():
    engine, model, optimizer, loader = make()
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    optimizer.signal_skip_step()
    step(model, optimizer, *next(iter(loader)))
    file.seek(0)
    engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
    assert not optimizer.logical_batch.unfinished and not optimizer.accumulator.flat.any()


def test_secure_mode_with_a_seeded_loader():
    loader = DPDataLoader(small_data(), sample_rate=0.5, seed=0)
    with pytest.raises(PrivacyError, match="secure=True"):
        make(engine=PrivacyEngine(secure_mode=True), data_loader=loader)


def test_the_smallest_random_number_is_a_size(monkeypatch):
    for value in (0.0, 1 - 2**-53):
        monkeypatch.setattr(random.SystemRandom, "random", lambda self, value=value: value)
        drawn = UniformWithReplacementSampler(num_samples=10, sample_rate=0.1, secure=True).draw(0)
        assert len(set(drawn)) == len(drawn) <= 10


@pytest.mark.parametrize("sampler", [RandomSampler, WeightedRandomSampler])
def test_sampling_with_replacement(sampler):
    data = small_data()
    drawn = RandomSampler(data, replacement=True) if sampler is RandomSampler else WeightedRandomSampler([1.0] * 60, 60)
    with pytest.raises(PrivacyError, match=f"{sampler.__name__} draws with replacement"):
        make(data_loader=DataLoader(data, batch_size=10, sampler=drawn), poisson_sampling=False)


@pytest.mark.parametrize("own", [False, True])
def test_a_round_in_which_every_example_comes_several_times(own):
    """The rate was taken to be a tenth of what it was."""
    data = small_data()
    sampler = RandomSampler(data, num_samples=600)
    batches = {"batch_sampler": BatchSampler(sampler, 10, False)} if own else {"sampler": sampler, "batch_size": 10}
    loader = DataLoader(data, **batches)
    with pytest.raises(PrivacyError, match="draws 600 times a round from 60 examples"):
        make(data_loader=loader, poisson_sampling=False, sample_rate=None)
    make(data_loader=loader, poisson_sampling=False)  # told at which rate


def test_batches_that_are_no_poisson_samples_are_warned_of():
    model = torch.nn.Linear(6, 3).double()
    with pytest.warns(UserWarning, match="shuffled or fixed batches can be larger"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10, shuffle=True),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )


def test_the_rate_that_is_set_is_the_rate_that_is_drawn_and_counted():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    loader.sample_rate = 0.5
    assert loader.sampler_state.sample_rate == 0.5
    step(model, optimizer, *next(iter(loader)))
    assert engine.accountant.history == [(1.0, 0.5, 1)]


def test_a_secure_checkpoint_in_an_ordinary_run():
    engine, model, optimizer, _ = make(engine=PrivacyEngine(secure_mode=True))
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    engine, model, optimizer, _ = make()
    with pytest.raises(PrivacyError, match="saved in secure mode"):
        engine.load_checkpoint(path=file, module=model, optimizer=optimizer)


@pytest.mark.parametrize("seed", range(20))
def test_an_example_that_is_clipped_in_float64_stays_below_the_bound_in_float32(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    x, y = torch.randn(1, 7) * 1e25, torch.tensor([1])
    sums = clipped_sum(model, lambda outputs, y: 100 * losses(outputs, y), x, y, 1.0).sums
    assert 0.9999 < sum(float(s.double().square().sum()) for s in sums.values()) ** 0.5 < 1.0
