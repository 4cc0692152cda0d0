"""The counter-based stream of normals that the kernel for GPUs draws, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpcore.gpu.normals import GROUPS, normals, philox, words_of

NAME = bytes(range(16))


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
    name = np.array([*key, *counter[2:]], dtype="<u4").tobytes()
    low = np.array([counter[0] | counter[1] << 32], dtype=np.uint64)
    assert tuple(philox(low, name)[:, 0]) == expected


def test_no_counter_comes_twice_in_a_stream_or_in_two_with_one_key():
    """Philox is one to one for each key: different counters give different words."""
    same_key = [NAME, NAME[:8] + bytes(8), NAME[:12] + bytes([255] * 4)]
    counters = np.concatenate([np.arange(10_000), 2**32 - 5_000 + np.arange(10_000)]).astype(np.uint64)
    words = np.concatenate([philox(counters, name) for name in same_key], axis=1)
    assert len(np.unique(words, axis=1).T) == 3 * 20_000


def test_a_name_has_128_bits_each_of_which_counts():
    first = normals(NAME, 100)
    for bit in range(128):
        other = (int.from_bytes(NAME, "little") ^ 1 << bit).to_bytes(16, "little")
        assert not np.isin(normals(other, 100), first).any()
    with pytest.raises(ValueError, match="has 15 bytes; it must have 16"):
        words_of(NAME[:15])


def test_a_stream_is_standard_normal_to_its_tails_and_without_correlations():
    drawn = normals(NAME, 2_000_000)
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(drawn**power) - moment) < 5 * (spread / len(drawn)) ** 0.5
    for limit in (3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(limit) * len(drawn)
        assert abs((abs(drawn) > limit).sum() - expected) < 5 * expected**0.5
    for lag in (1, GROUPS, 2 * GROUPS, 4 * GROUPS):  # neighbours, and what comes of the same words
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / len(drawn) ** 0.5
        assert abs(np.corrcoef(drawn[:-lag] ** 2, drawn[lag:] ** 2)[0, 1]) < 5 / len(drawn) ** 0.5


def test_a_shorter_stream_is_the_beginning_of_a_longer_one():
    assert (normals(NAME, 5000)[:777] == normals(NAME, 777)).all()
    assert len(normals(NAME, 0)) == 0
