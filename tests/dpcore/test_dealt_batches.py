"""Batches of several ranks that are those of one process, dealt by position."""

from __future__ import annotations

import copy

import pytest

from dpcore.data_loader import DPDataLoader
from dpcore.loading.uniform_sampler import DealtUniformWithReplacementSampler, UniformWithReplacementSampler


@pytest.mark.parametrize("most", [None, 5])
def test_a_batch_that_is_dealt_is_that_of_one_process_in_equal_shares(most):
    options = {"sample_rate": 0.1, "seed": 3, "steps": 300, "max_batch_size": most}
    alone = list(UniformWithReplacementSampler(num_samples=40, **options))
    for ranks in (1, 3, 50):
        samplers = [
            DealtUniformWithReplacementSampler(total_size=40, rank=rank, num_replicas=ranks, **options)
            for rank in range(ranks)
        ]
        for parts, whole in zip(zip(*samplers, strict=True), alone, strict=True):
            assert sorted(i for part in parts for i in part) == sorted(whole)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_copies_of_ranks_samplers_whose_seeds_differ_draw_among_their_own_examples():
    """One list each, dealt by position, could give an example to both."""
    for rank in range(2):
        sampler = DealtUniformWithReplacementSampler(
            total_size=100, sample_rate=0.5, seed=3, steps=4, rank=rank, num_replicas=2
        )
        assert {i % 2 for batch in sampler for i in batch} == {0, 1}
        assert {i % 2 for batch in copy.deepcopy(sampler) for i in batch} == {rank}


def test_shares_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="shares is 'equal'; it must be 'owned' or 'dealt'"):
        DPDataLoader(range(4), sample_rate=0.5, distributed=True, shares="equal")


def test_a_batch_that_is_dealt_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="Give all ranks one secret seed"):
        DPDataLoader([1, 2, 3], sample_rate=0.5, distributed=True, shares="dealt")
