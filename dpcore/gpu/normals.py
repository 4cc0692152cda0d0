"""The counter-based stream of normals: which number stands at which place, in numpy and float64.

A stream is named by 128 bits: the two words of a Philox key and the upper two words of its counter. The lower two count
groups of four normals, so that no counter comes twice, and two streams of different names share none. The kernel in
:mod:`dpcore.gpu.noise` computes the same in float32; this is what it is held against.
"""

from __future__ import annotations

import numpy as np

NAME_BYTES = 16
GROUPS = 256
"""Groups whose first normals stand beside each other, then their second ones, and so on: the kernel writes in order."""
LARGEST_ERROR = 2e-6
"""By how much a normal of the kernel may differ from float64's, none of which is above 6.77."""

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def words_of(name: bytes) -> tuple[int, int, int, int]:
    """Return the four words of a ``name`` of 16 bytes: of the key, and of the counter's upper half."""
    if len(name) != NAME_BYTES:
        raise ValueError(f"A stream's name has {len(name)} bytes; it must have {NAME_BYTES}.")
    k0, k1, c2, c3 = (int(word) for word in np.frombuffer(name, dtype="<u4"))
    return k0, k1, c2, c3


def philox(counters: np.ndarray, name: bytes) -> np.ndarray:
    """Return four words [4, n] of 32 bits, as uint64, for counters [n] (Salmon et al. 2011, Philox 4x32-10)."""
    keys = [np.uint64(word) for word in words_of(name)[:2]]
    c0, c1 = counters & _LOW, counters >> np.uint64(32)
    c2, c3 = (np.full_like(counters, word) for word in words_of(name)[2:])
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ keys[0],
            second & _LOW,
            (first >> np.uint64(32)) ^ c3 ^ keys[1],
            first & _LOW,
        )
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL, strict=True)]
    return np.stack([c0, c1, c2, c3])


def normals(name: bytes, count: int) -> np.ndarray:
    """Return the first ``count`` standard normals of the stream ``name``, float64.

    Box-Muller of two words each: a radius of the uniform (w + 1/2) / 2^32, and an angle.
    """
    blocks = -(-count // (4 * GROUPS))
    uniforms = (philox(np.arange(blocks * GROUPS, dtype=np.uint64), name).astype(np.float64) + 0.5) * 2.0**-32
    radii, angles = np.sqrt(-2.0 * np.log(uniforms[0::2])), 2.0 * np.pi * uniforms[1::2]
    first, second = radii * np.cos(angles), radii * np.sin(angles)
    of_groups = np.stack([first[0], second[0], first[1], second[1]])
    return of_groups.reshape(4, blocks, GROUPS).swapaxes(0, 1).reshape(-1)[:count]
