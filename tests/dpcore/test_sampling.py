"""Poisson batches: their distribution, their length, their structure when empty."""

from __future__ import annotations

import collections
import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from dpcore import Engine, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.data_loader import DPDataLoader
from dpcore.tree import batch_length
from dpcore.utils.batch_memory_manager import cut
from dpcore.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    steps_per_epoch,
)

RARE = 1e-10
"""A p-value that no right sampler shows: secure ones draw other batches in every run, and are asked for so many that a
wrong one shows it nevertheless."""


@pytest.mark.parametrize("secure", [False, True])
def test_sizes_are_binomial_and_members_uniform_without_repeats(secure):
    sampler = UniformWithReplacementSampler(num_samples=40, sample_rate=0.1, seed=3, steps=10_000, secure=secure)
    batches = list(sampler)
    assert all(len(set(b)) == len(b) for b in batches)
    sizes = np.bincount([len(b) for b in batches], minlength=12)
    expected = len(batches) * stats.binom.pmf(np.arange(12), 40, 0.1)
    few = expected < 5
    observed = np.append(sizes[:12][~few], len(batches) - sizes[:12][~few].sum())
    wanted = np.append(expected[~few], len(batches) - expected[~few].sum())
    assert stats.chisquare(observed, wanted).pvalue > RARE
    counts = np.bincount(np.concatenate([np.array(b, dtype=int) for b in batches]), minlength=40)
    assert stats.chisquare(counts).pvalue > RARE
    together = sum(0 in b and 1 in b for b in batches)
    assert stats.binomtest(together, len(batches), 0.01).pvalue > RARE


def test_a_tiny_rate_is_exact():
    sampler = UniformWithReplacementSampler(num_samples=10**9, sample_rate=1e-9, seed=3, steps=3000)
    total = sum(len(b) for b in sampler)
    assert stats.poisson.sf(total - 1, 3000) > 1e-4 and stats.poisson.cdf(total, 3000) > 1e-4


def test_no_step_of_a_round_is_lost():
    assert all(steps_per_epoch(1 / n) == n for n in range(1, 3000))
    assert steps_per_epoch(0.3) == 4


def test_batches_are_a_function_of_seed_and_number():
    a = UniformWithReplacementSampler(num_samples=100, sample_rate=0.1, seed=5)
    b = UniformWithReplacementSampler(num_samples=100, sample_rate=0.1, seed=5)
    first, second = list(a), list(a)
    assert first == list(b) and first != second
    with pytest.raises(ValueError, match="sample_rate is 0"):
        UniformWithReplacementSampler(num_samples=100, sample_rate=0.0)


@pytest.mark.parametrize(
    ("ranks", "secure"), [(1, False), (3, False), (3, True), pytest.param(50, False, marks=pytest.mark.slow)]
)
def test_the_union_over_the_ranks_is_a_poisson_sample_of_all_examples(ranks, secure):
    samplers = [
        DistributedUniformWithReplacementSampler(
            total_size=40, sample_rate=0.1, seed=3, steps=5000, secure=secure, rank=rank, num_replicas=ranks
        )
        for rank in range(ranks)
    ]
    batches = [[i for part in parts for i in part] for parts in zip(*samplers, strict=True)]
    assert len(batches) == 5000 and all(len(set(b)) == len(b) for b in batches)
    sizes = np.bincount([len(b) for b in batches], minlength=41)
    expected = len(batches) * stats.binom.pmf(np.arange(41), 40, 0.1)
    few = expected < 5
    observed, wanted = np.append(sizes[~few], sizes[few].sum()), np.append(expected[~few], expected[few].sum())
    assert stats.chisquare(observed, wanted).pvalue > RARE
    assert stats.chisquare(np.bincount(np.concatenate([np.array(b, dtype=int) for b in batches]))).pvalue > RARE
    together = sum(0 in b and 1 in b for b in batches)  # of different ranks
    assert stats.binomtest(together, len(batches), 0.01).pvalue > RARE


def test_ranks_share_no_random_numbers_and_go_on_from_one_state():
    def sampler(rank):
        return DistributedUniformWithReplacementSampler(
            total_size=1000, sample_rate=0.5, seed=3, steps=4, rank=rank, num_replicas=2
        )

    zero, one = list(sampler(0)), list(sampler(1))
    overlap = len({i // 2 for i in zero[0]} & {i // 2 for i in one[0]})
    assert 80 < overlap < 170  # 125 expected; equal streams would give some 250
    resumed = sampler(1)
    first = sampler(0)
    iterator = iter(first)
    next(iterator), next(iterator)
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == one[2:]
    with pytest.raises(ValueError, match="rank is 2"):
        sampler(2)


Pair = namedtuple("Pair", "x y")


class Named(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"pair": Pair(torch.full((2, 3), float(i)), i), "text": "abc"}


def test_an_empty_batch_has_the_structure_of_the_others():
    loader = DPDataLoader(Named(), sample_rate=1e-9, steps=3)
    batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert batch["pair"].x.shape == (0, 2, 3)
        assert batch["pair"].y.shape == (0,) and batch["pair"].y.dtype == torch.int64
        assert batch["text"] == []
        assert batch_length(batch) == 0


def test_cutting_keeps_the_structure():
    batch = {"pair": Pair(torch.arange(6), [torch.arange(6)]), "other": 3}
    part = cut(batch, slice(2, 4))
    assert part["pair"].x.tolist() == [2, 3] and part["pair"].y[0].tolist() == [2, 3] and part["other"] == 3


def names(count: int) -> list[str]:
    return [f"example {i}" for i in range(count)]


PER_EXAMPLE: dict[str, Any] = {
    "a tensor": torch.arange,
    "a list of names": names,
    "a tuple of names": lambda n: tuple(names(n)),
    "a list of dicts": lambda n: [{"name": name, "size": (i, 3)} for i, name in enumerate(names(n))],
    "a list of lists of any length": lambda n: [names(i % 4) for i in range(n)],
    "a list of nothing": lambda n: [None] * n,
    "a list of arrays of any length": lambda n: [np.arange(i + n + 1) for i in range(n)],
    "an array": lambda n: np.arange(2 * n).reshape(n, 2),
}


@settings(deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(PER_EXAMPLE)), max_size=4),
    length=st.integers(1, 6),
    start=st.integers(0, 6),
    count=st.integers(0, 6),
    shape=st.sampled_from([dict, list, tuple]),
)
def test_whatever_a_batch_holds_for_every_example_is_cut_alike(kinds, length, start, count, shape):
    rows = slice(start, start + count)
    values = [torch.arange(length), *(PER_EXAMPLE[kind](length) for kind in kinds)]
    batch = shape(enumerate(values)) if shape is dict else shape(values)
    part = cut(batch, rows)
    assert type(part) is shape and len(part) == len(values)
    for whole, piece in zip(values, part.values() if shape is dict else part, strict=True):
        assert type(piece) is type(whole) and len(piece) == len(range(length)[rows])
        assert all(np.array_equal(a, b) for a, b in zip(piece, whole[rows], strict=True))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_what_is_not_one_per_example_stays_whole(length):
    x, y = torch.randn(length, 3), torch.arange(length)
    rows, pieces = slice(0, 1), [x[:1], y[:1]]
    pair = cut([x, y], rows)
    assert all(torch.equal(a, b) for a, b in zip(pair, pieces, strict=True))
    nested = cut([[x, y], {"x": x, "names": names(length)}], rows)
    assert all(torch.equal(a, b) for a, b in zip(nested[0], pieces, strict=True))
    assert torch.equal(nested[1]["x"], x[:1]) and nested[1]["names"] == names(1)
    other = {
        "x": x,
        "classes": names(length + 1),
        "of": "abc",
        "array": np.array(3),
        "number": np.float32(3),
        "how": sum,
    }
    part = cut(other, rows)
    assert all(part[name] is other[name] for name in ("of", "array", "number", "how"))
    assert part["classes"] == names(length + 1)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_lists_as_torch_collates_them_are_cut_within(length):
    """Two names per example become two lists of one name per example, also where the batch has two examples."""
    examples = [{"x": torch.tensor(float(i)), "names": [f"a{i}", f"b{i}"]} for i in range(length)]
    part = cut(default_collate(examples), slice(0, 1))
    assert [list(row) for row in part["names"]] == [["a0"], ["b0"]]


WEIGHTS = {"x": torch.zeros(6, 2), "weights": torch.ones(3)}


@pytest.mark.parametrize(
    ("batch", "where", "shape"),
    [
        (WEIGHTS, "batch['weights']", "(3,)"),
        ([torch.zeros(6, 2), (torch.ones(9), torch.zeros(6))], "batch[1][0]", "(9,)"),
        ({"x": torch.zeros(6, 2), "one": torch.zeros(1, 6)}, "batch['one']", "(1, 6)"),
        (Pair(torch.zeros(6), torch.zeros(0)), "batch[1]", "(0,)"),
        ({"x": torch.zeros(6, 2), "weights": np.ones(3)}, "batch['weights']", "(3,)"),
        ({"x": torch.zeros(6, 2), "ids": [np.arange(12), torch.zeros(6)]}, "batch['ids'][0]", "(12,)"),
    ],
)
def test_a_tensor_whose_rows_are_not_examples_is_refused(batch, where, shape):
    """Class weights would have to go whole into every piece, flat ids in parts: which it is nothing tells."""
    for rows in (slice(0, 3), slice(0, 6)):
        with pytest.raises(UnsupportedError) as refused:
            cut(batch, rows)
        assert f"{where} has the shape {shape}, and the batch 6 examples" in str(refused.value)


@dataclasses.dataclass
class Targets:
    y: torch.Tensor


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.2, 0.3, 0.5], "holds 3 numbers, and the batch 6 examples"),
        ((224, 224), "holds 2 numbers, and the batch 6 examples"),
        (list(range(12)), "holds 12 numbers, and the batch 6 examples"),
        (range(6), "is of type range"),
        (collections.deque(range(6)), "is of type deque"),
        (Targets(torch.zeros(6)), "is of type Targets"),
    ],
)
def test_other_values_of_which_it_is_not_known_whose_they_are(value, message):
    """A list of three numbers would be cut in the batches that happen to have three examples, and in no other."""
    with pytest.raises(UnsupportedError, match=rf"batch\['value'\] {message}"):
        cut({"x": torch.zeros(6, 2), "value": value}, slice(0, 3))


@pytest.mark.parametrize("kind", [np.array, list])
def test_flat_ids_beside_offsets_are_not_handed_to_every_piece(kind):
    """The last bag of a piece would have held the words of all examples that follow, which no count of rows shows."""
    lengths = [2, 3, 1, 4, 2, 2]
    offsets = torch.tensor(np.cumsum([0, *lengths[:-1]]))
    batch = {"offsets": offsets, "ids": kind(range(sum(lengths)))}
    bags, piece = nn.EmbeddingBag(20, 4), slice(0, 3)
    whole = bags(torch.tensor(batch["ids"]), offsets)
    mixed = bags(torch.tensor(batch["ids"]), offsets[piece])
    assert torch.equal(mixed[:2], whole[:2]) and not torch.allclose(mixed[2], whole[2])
    with pytest.raises(UnsupportedError, match=r"batch\['ids'\] .*such as flat ids, is padded"):
        cut(batch, piece)


def test_a_tensor_without_dimensions_is_in_every_piece():
    part = cut({"temperature": torch.tensor(2.0), "x": torch.arange(4)}, slice(1, 3))
    assert part["temperature"] == 2.0 and part["x"].tolist() == [1, 2]


def test_a_length_that_is_known_counts():
    assert cut(torch.arange(4), slice(1, 3), 4).tolist() == [1, 2]
    with pytest.raises(UnsupportedError, match="the batch 5 examples"):
        cut(torch.arange(4), slice(1, 3), 5)


def test_pieces_of_a_batch_with_class_weights_are_refused():
    loader = DataLoader(range(64), batch_size=16, collate_fn=lambda rows: (torch.randn(len(rows), 4), torch.ones(3)))
    model = nn.Linear(4, 3)
    made = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=4,
    )
    with pytest.raises(UnsupportedError, match=r"batch\[1\] has the shape \(3,\)"):
        next(iter(made[2]))


def test_an_engine_s_pieces_of_class_weights_are_refused_and_a_number_goes_whole():
    def losses(outputs, targets):
        return F.cross_entropy(outputs, targets[0], weight=targets[1], reduction="none")

    def scaled(outputs, targets):
        return F.cross_entropy(outputs / targets[1], targets[0], reduction="none")

    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3
    weighted = Engine(model, losses, max_grad_norm=1.0, physical_batch_size=2)
    with pytest.raises(UnsupportedError, match=r"batch\[1\]\[1\] has the shape \(3,\), and the batch 6 examples"):
        weighted.clipped_sum(x, (y, torch.ones(3)))
    whole, pieces = (
        Engine(model, scaled, max_grad_norm=1.0, physical_batch_size=size).clipped_sum(x, (y, torch.tensor(2.0)))
        for size in (6, 2)
    )
    assert torch.allclose(whole.sums["weight"], pieces.sums["weight"], rtol=1e-5)


def test_packed_sequences_cannot_be_cut():
    with pytest.raises(UnsupportedError, match="PackedSequence"):
        cut(nn.utils.rnn.pack_sequence([torch.arange(5.0), torch.arange(3.0)]), slice(0, 1))


@pytest.mark.parametrize("size", [3, "auto"])
def test_pieces_hold_the_names_of_their_examples(size):
    class Texts(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return {"x": torch.full((4,), float(i)), "y": i % 3, "name": str(i)}

    model = nn.Linear(4, 3)
    module, optimizer, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Texts(), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=size,
    )
    pieces = 0
    for batch in loader:
        assert batch["name"] == [str(int(x)) for x in batch["x"][:, 0]]
        F.cross_entropy(module(batch["x"]), batch["y"]).backward()
        optimizer.step()
        pieces += 1
    assert pieces > len(loader) or size == "auto"


def test_only_map_style_data_can_be_sampled():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(1)])

    with pytest.raises(ValueError, match="map-style"):
        DPDataLoader(Stream(), sample_rate=0.5)
    loader = DPDataLoader(Named(), sample_rate=0.5)
    assert DPDataLoader.from_data_loader(loader) is loader
    assert DPDataLoader.from_data_loader(DataLoader(Named(), batch_size=2)).sample_rate == 1 / 3


def made_private(seed: int | None, engine: PrivacyEngine | None = None) -> DPDataLoader:
    """The private loader of one whose generator has ``seed``."""
    model = nn.Linear(1, 1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    _, _, loader = (engine or PrivacyEngine()).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(torch.arange(40.0)[:, None], batch_size=8, shuffle=True, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return loader


def drawn(loader: DPDataLoader) -> list[list[float]]:
    return [sorted(batch.flatten().tolist()) for batch in loader]


def test_the_generator_of_a_loader_seeds_its_batches_and_not_the_noise():
    assert drawn(made_private(3)) == drawn(made_private(3)) != drawn(made_private(4))
    assert drawn(made_private(None)) != drawn(made_private(None))

    def ordinary(seed):
        return DataLoader(torch.arange(40.0)[:, None], batch_size=8, generator=torch.Generator().manual_seed(seed))

    direct = [drawn(DPDataLoader.from_data_loader(ordinary(seed))) for seed in (3, 3, 4)]
    assert direct[0] == direct[1] != direct[2]
    assert direct[0] == drawn(made_private(3))
    same = ordinary(3)  # used twice, it moves on
    assert drawn(DPDataLoader.from_data_loader(same)) != drawn(DPDataLoader.from_data_loader(same))
    global_state = torch.get_rng_state()
    DPDataLoader.from_data_loader(ordinary(3))
    assert torch.equal(torch.get_rng_state(), global_state)


def test_the_generator_of_a_loader_comes_after_a_seed_and_secure_mode():
    assert drawn(made_private(3, PrivacyEngine(seed=5))) == drawn(made_private(4, PrivacyEngine(seed=5)))
    assert drawn(made_private(3, PrivacyEngine(seed=5))) != drawn(made_private(3, PrivacyEngine(seed=6)))
    secure = [drawn(made_private(3, PrivacyEngine(secure_mode=True))) for _ in range(2)]
    assert secure[0] != secure[1]
    loader = DataLoader(torch.arange(40.0), batch_size=8, generator=torch.Generator().manual_seed(3))
    chosen = [drawn(DPDataLoader.from_data_loader(loader, seed=7)) for _ in range(2)]
    assert chosen[0] == chosen[1]


def test_two_runs_with_equal_generators_have_noise_of_their_own():
    """A generator for the order of batches must not make the noise repeat."""
    results = []
    for _ in range(2):
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        generator = torch.Generator().manual_seed(3)
        module, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(torch.arange(40.0)[:, None], batch_size=8, generator=generator),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        module(next(iter(loader))).mean().backward()
        optimizer.step()
        results.append(model.weight.detach().clone())
    assert not torch.equal(*results)


def test_a_sampler_of_the_users_is_not_silently_replaced():
    for sampler in (WeightedRandomSampler([1.0] * 5, 5), SubsetRandomSampler([0, 1])):
        with pytest.raises(UnsupportedError, match=type(sampler).__name__):
            DPDataLoader.from_data_loader(DataLoader(Named(), batch_size=2, sampler=sampler), sample_rate=0.5)
    with pytest.raises(PrivacyError, match="distributed=False"):
        DPDataLoader.from_data_loader(DPDataLoader(Named(), sample_rate=0.5), distributed=True)


class _NonEmpty(UniformWithReplacementSampler):
    """Draws its own coins, from what a sampler of Opacus' has."""

    def __iter__(self):
        for _ in range(self.steps):
            chosen = torch.rand(self.num_samples, generator=self.generator) < self.sample_rate
            if chosen.any():
                yield chosen.nonzero().flatten().tolist()


def test_a_sampler_that_draws_its_own_coins():
    given = torch.Generator().manual_seed(1)
    secret = [list(_NonEmpty(num_samples=20, sample_rate=0.2)) for _ in range(2)]
    seeded = [list(_NonEmpty(num_samples=20, sample_rate=0.2, seed=4)) for _ in range(2)]
    assert secret[0] != secret[1] and seeded[0] == seeded[1]
    sampler = _NonEmpty(num_samples=20, sample_rate=0.2, generator=given)
    assert sampler.generator is given and list(sampler) != list(sampler)


def test_a_loader_by_the_librarys_own_sampler_is_the_private_one():
    """It was refused: it would have been replaced by what it is."""
    sampler = UniformWithReplacementSampler(num_samples=60, sample_rate=0.2, seed=3, steps=7)
    expected = [sampler.draw(k) for k in range(7)]
    ordinary = DataLoader(range(60), batch_sampler=sampler, collate_fn=list)
    with pytest.warns(UserWarning, match="rand_on_empty"):
        private = DPDataLoader.from_data_loader(ordinary, rand_on_empty=True)
    assert list(private) == expected and len(private) == 7 and private.sample_rate == 0.2
    again = DPDataLoader.from_data_loader(ordinary, sample_rate=0.2)
    again.go_on(private.position() | {"drawn": "2", "left": "5"})
    assert list(again) == expected[2:]
    for wrong in ({"sample_rate": 0.1}, {"secure": True}, {"distributed": True}):
        with pytest.raises(UnsupportedError, match=r"draws from 60 of 60 examples at the rate 0\.2"):
            DPDataLoader.from_data_loader(ordinary, **wrong)
    part = UniformWithReplacementSampler(num_samples=30, sample_rate=0.2)
    with pytest.raises(UnsupportedError, match="draws from 30 of 60 examples"):
        DPDataLoader.from_data_loader(DataLoader(range(60), batch_sampler=part))
    derived = _NonEmpty(num_samples=60, sample_rate=0.2)
    with pytest.raises(UnsupportedError, match="_NonEmpty would be replaced"):
        DPDataLoader.from_data_loader(DataLoader(range(60), batch_sampler=derived))


def test_an_order_of_accelerates_is_that_of_the_whole_data_set():
    """Its sampler derives from torch's and draws every example once; anybody else's may choose."""
    from torch.utils.data import RandomSampler, TensorDataset

    data = TensorDataset(torch.arange(20))
    kinds = {
        place: type("Seedable", (RandomSampler,), {"__module__": place}) for place in ("accelerate.data_loader", "mine")
    }
    private = DPDataLoader.from_data_loader(
        DataLoader(data, batch_size=5, sampler=kinds["accelerate.data_loader"](data))
    )
    assert private.sample_rate == 0.25
    with pytest.raises(UnsupportedError, match="Seedable would be replaced by Poisson sampling"):
        DPDataLoader.from_data_loader(DataLoader(data, batch_size=5, sampler=kinds["mine"](data)))
