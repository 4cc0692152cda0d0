"""The streams of normals whose numbers have addresses: in float64, by kernels, and in parts."""

from __future__ import annotations

import itertools
import math
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpcore import Engine, GaussianNoise, native
from dpcore.normals import BLOCK, GROUPS, LARGEST_ERROR, normals, philox, words_of
from tests.dpcore.comparison import odd_loss

NAME = bytes(range(16))
PLACES = st.one_of(st.integers(0, 5000), st.sampled_from([2**34 - 700, 2**34, 2**40 + 3]))
"""Starts of parts; at 2**34 the counter's second word begins."""


def by_kernel(test):
    needs = pytest.mark.skipif(not any(shutil.which(c) for c in native.COMPILERS), reason="no C++ compiler")
    return needs(pytest.mark.usefixtures("compiled")(test))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    name = b"".join(word.to_bytes(4, "little") for word in (*key, *counter[2:]))
    low = int.from_bytes(b"".join(word.to_bytes(4, "little") for word in counter[:2]), "little", signed=True)
    assert tuple(int(word) for word in philox(torch.tensor([low]), name)) == expected


def test_no_counter_comes_twice_in_a_stream_or_in_two_with_one_key():
    """Philox is one to one for each key: different counters give different words."""
    same_key = [NAME, NAME[:8] + bytes(8), NAME[:12] + bytes([255] * 4)]
    counters = torch.cat([torch.arange(10_000), 2**32 - 5_000 + torch.arange(10_000)])
    words = torch.cat([torch.stack(philox(counters, name)) for name in same_key], dim=1)
    assert len(torch.unique(words, dim=1).T) == 3 * 20_000


def test_a_name_has_128_bits_each_of_which_counts():
    first = normals(NAME, 100)
    for bit in range(128):
        other = (int.from_bytes(NAME, "little") ^ 1 << bit).to_bytes(16, "little")
        assert not torch.isin(normals(other, 100), first).any()
    with pytest.raises(ValueError, match="has 15 bytes; it must have 16"):
        words_of(NAME[:15])


def test_a_stream_is_standard_normal_to_its_tails_and_without_correlations():
    _obeys_the_law(normals(NAME, 1_000_000))


@by_kernel
def test_a_kernels_stream_is_standard_normal_to_its_tails_and_without_correlations():
    _obeys_the_law(GaussianNoise(1).fill_(torch.empty(1_000_000), 1.0, 0, 12_345).double())


def _obeys_the_law(drawn):
    count = len(drawn)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-4
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((drawn**power).mean()) - moment) < 5 * (spread / count) ** 0.5
    for limit in (3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(limit) * count
        assert abs(int((drawn.abs() > limit).sum()) - expected) < 5 * expected**0.5
    for lag in (1, GROUPS, 2 * GROUPS, BLOCK):  # neighbours, and what comes of the same words
        for sizes in (drawn, drawn**2, drawn.abs().log()):
            both = torch.stack([sizes[:-lag], sizes[lag:]])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / count**0.5


def test_two_steps_and_two_seeds_share_no_number():
    drawn = [GaussianNoise(seed).fill_(torch.empty(50_000), 1.0, step) for seed, step in ((5, 3), (5, 4), (6, 3))]
    for one, other in ((drawn[0], drawn[1]), (drawn[0], drawn[2])):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / 50_000**0.5
        assert float((one == other).float().mean()) < 1e-3


@given(PLACES, st.integers(0, 3000), st.binary(min_size=16, max_size=16))
@settings(max_examples=40, deadline=None)
def test_a_part_is_what_the_whole_has_there(start, count, name):
    first = max(0, start - 1100)
    whole = normals(name, count + start - first, first)
    assert torch.equal(normals(name, count, start), whole[start - first :])


@by_kernel
@given(PLACES, st.integers(1, 3000), st.integers(0, 3), st.floats(0.01, 100.0), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_kernel_draws_float64s_numbers_wherever_they_begin(start, count, offset, std, threads):
    memory = torch.full((count + offset + 8,), float("nan"))
    target, before = memory[offset : offset + count], torch.randn(count)
    torch.set_num_threads(threads)
    try:
        native.put_normals(target, std, NAME, start, add=False)
        added = before.clone()
        native.put_normals(added, std, NAME, start, add=True)
    finally:
        torch.set_num_threads(1)
    assert float((target.double() - std * normals(NAME, count, start)).abs().max()) <= std * LARGEST_ERROR
    assert torch.equal(added, before + target), "add and fill are one noise"
    assert bool(memory[:offset].isnan().all()) and bool(memory[offset + count :].isnan().all())


@by_kernel
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(0, 4000))
@settings(max_examples=30, deadline=None)
def test_parts_by_the_kernel_have_the_bits_of_the_whole(lengths, first):
    noise, total = GaussianNoise(3), sum(lengths)
    whole = noise.fill_(torch.empty(total), 0.3, 5, first)
    parts, start = [], first
    for length in lengths:
        parts.append(noise.fill_(torch.empty(length), 0.3, 5, start))
        start += length
    assert torch.equal(torch.cat(parts), whole)


@by_kernel
def test_many_threads_draw_the_bits_of_one():
    drawn = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        drawn.append(GaussianNoise(3).fill_(torch.empty(300_001), 1.0, 5, 77))
    torch.set_num_threads(1)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


EDGES = [0, 1, 2**23, 2**24 + 1, 2**29, 2**30, 2**31, 3 * 2**30, 0xB504F333, 2**30 + 2**29, 7 * 2**29]


def _address_of(words, key):
    """The name and the address that have these four words: Philox, backwards."""
    c0, c1, c2, c3 = words
    for step in reversed(range(10)):
        k0, k1 = ((k + step * weyl) % 2**32 for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        third, first = c1 * pow(0xCD9E8D57, -1, 2**32) % 2**32, c3 * pow(0xD2511F53, -1, 2**32) % 2**32
        c0, c1, c2, c3 = first, c0 ^ (third * 0xCD9E8D57 >> 32) ^ k0, third, c2 ^ (first * 0xD2511F53 >> 32) ^ k1
    counter = c0 + c1 * 2**32
    name = b"".join(word.to_bytes(4, "little") for word in (*key, c2, c3))
    return name, counter // GROUPS * BLOCK + counter % GROUPS


@by_kernel
def test_a_kernels_pairs_are_float64s_at_every_edge_of_their_words():
    chance, edges = random.Random(0), [(end + step) % 2**32 for end in EDGES for step in range(-2, 3)]
    largest = 0.0
    for first, second in itertools.product(edges, chance.sample(edges, 7)):
        while True:  # until the address is one that a tensor may have
            words = first, second, chance.getrandbits(32), chance.getrandbits(32)
            name, start = _address_of(words, (chance.getrandbits(32), chance.getrandbits(32)))
            if start + GROUPS < 2**62:
                break
        radius, angle = math.sqrt(-2 * math.log((first + 0.5) / 2**32)), 2 * math.pi * (second + 0.5) / 2**32
        for along, at in ((math.cos, start), (math.sin, start + GROUPS)):
            found = torch.empty(1)
            native.put_normals(found, 1.0, name, at, add=False)
            assert abs(float(found) - radius * along(angle)) <= LARGEST_ERROR
            largest = max(largest, abs(float(found)))
    assert largest > 6.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_drawn_without_a_kernel_is_the_same_stream(dtype):
    expected = 2.0 * normals(GaussianNoise(5).name(3), 3000)
    tolerance = {torch.float32: 1e-5, torch.float64: 0.0, torch.bfloat16: 0.04}[dtype]
    with native.disabled():
        for draw in (GaussianNoise(5).fill_, GaussianNoise(5).add_):
            found = draw(torch.zeros(50, 60, dtype=dtype), 2.0, 3).view(-1)
            assert float((found.double() - expected).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensors_numbers_are_row_major_in_any_layout(dtype):
    straight = GaussianNoise(5).fill_(torch.empty(30, 40, dtype=dtype), 1.0, 3, 17)
    turned = GaussianNoise(5).fill_(torch.empty(40, 30, dtype=dtype).t(), 1.0, 3, 17)
    added = GaussianNoise(5).add_(torch.zeros(40, 30, dtype=dtype).t(), 1.0, 3, 17)
    assert torch.equal(straight, turned) and torch.equal(straight, added)


def test_channels_last_models_get_the_noise_of_others():
    released = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 5, 3), nn.Flatten()).to(memory_format=layout)
        settings = {"noise_multiplier": 1.0, "expected_batch_size": 4, "noise": GaussianNoise(1)}
        engine = Engine(model, odd_loss, **settings, check_isolation=False)
        engine.privatize(torch.zeros(0, 3, 4, 4), torch.zeros(0))
        released.append([p.grad.clone() for p in model.parameters()])
    assert released[0][2].is_contiguous() and not released[1][2].is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(*released, strict=True))


def test_a_state_of_version_1_goes_on_with_its_stream():
    """Draws as torch's generator does, from the state that the hash gives it."""
    noise = GaussianNoise()
    noise.load_state_dict({"seed": "5", "rank": "0"})
    expected = torch.empty(1000).normal_(generator=noise.generator(3))
    # As the dpcore of version 1 drew it, by its kernel.
    assert expected[:3].tolist() == pytest.approx([0.2169436514, 1.5921379328, -1.4197809696], abs=1e-5)
    assert torch.equal(noise.add_(torch.zeros(1000), 1.0, 3), expected)
    assert torch.equal(noise.fill_(torch.zeros(1000), 1.0, 3), expected)
    assert not noise.has_addresses and noise.state_dict() == {"seed": "5", "rank": "0", "version": "1"}
    with pytest.raises(ValueError, match="start is 7, but this noise has no addresses: it is of version 1"):
        noise.add_(torch.zeros(10), 1.0, 3, 7)
    fresh = GaussianNoise(5)
    assert fresh.has_addresses and fresh.state_dict()["version"] == "2"
    assert not torch.equal(fresh.add_(torch.zeros(1000), 1.0, 3), expected)
    with pytest.raises(ValueError, match="version 3 of the stream"):
        noise.load_state_dict({"seed": "5", "rank": "0", "version": "3"})


def test_version_1_draws_by_the_kernel_for_cuda_only_where_it_is_asked_for(monkeypatch):
    """Without being asked it drew by torch's generator, and a resumed run repeats steps with the same noise."""
    monkeypatch.setattr("dpcore.gpu.serves_noise", lambda target: True)
    monkeypatch.setattr("dpcore.gpu.draw_normals", lambda target, *of, **how: target.zero_())
    noise = GaussianNoise(3)
    noise.load_state_dict({"seed": "3", "rank": "0"})
    for asked in (False, True):
        monkeypatch.setattr("dpcore.gpu.available", lambda asked=asked: asked)
        assert bool(noise.fill_(torch.ones(9), 1.0, 0).any()) is not asked


@by_kernel
def test_every_other_number_of_a_vector_may_be_a_target():
    noise, whole = GaussianNoise(3), torch.zeros(18)
    noise.add_(whole[::2], 1.0, 0)
    assert torch.equal(whole[::2], noise.fill_(torch.empty(9), 1.0, 0)) and not whole[1::2].any()
    assert torch.equal(noise.fill_(whole[1::2], 1.0, 0), whole[::2])
