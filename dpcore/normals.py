"""The streams of normals whose numbers have addresses: number i of the stream of a name, drawn without those before it.

A stream is named by 128 bits: the two words of a Philox key and the upper two words of its counter. The lower two count
groups of four normals, so that no counter comes twice, and two streams of different names share none.

Here a stream is computed by torch's operators, in float64, on any device. The kernels compute the same in float32
(``dpcore/native/noise.cpp`` on CPUs, with the same bits for all instruction sets; :mod:`dpcore.gpu.noise` on CUDA), and
are held against this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAME_BYTES = 16
GROUPS = 256
"""Groups whose first normals stand beside each other, then their second ones, and so on: kernels write in order."""
BLOCK = 4 * GROUPS
LARGEST_ERROR = 2e-6
"""The most by which a normal of a kernel may differ from float64's, none of which is above 6.77."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_PIECE = {"cpu": 2**18, "cuda": 2**22}
"""Numbers at a time: what a cache holds, or what keeps a device busy."""


def words_of(name: bytes) -> tuple[int, int, int, int]:
    """Return the four words of a ``name`` of 16 bytes: of the key, and of the counter's upper half."""
    if len(name) != NAME_BYTES:
        raise ValueError(f"A stream's name has {len(name)} bytes; it must have {NAME_BYTES}.")
    k0, k1, c2, c3 = (int.from_bytes(name[at : at + 4], "little") for at in range(0, NAME_BYTES, 4))
    return k0, k1, c2, c3


def philox(counters: Tensor, name: bytes) -> list[Tensor]:
    """Return four words [n] of 32 bits, as int64, for counters int64 [n] (Salmon et al. 2011, Philox 4x32-10).

    A product of two words may exceed an int64, which keeps all of its bits. Words are cut to 32 bits before they are
    multiplied, and at the end.
    """
    *keys, c2, c3 = words_of(name)
    words = [counters & _LOW, counters >> 32, torch.full_like(counters, c2), torch.full_like(counters, c3)]
    for _ in range(_ROUNDS):
        first, third = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (third >> 32).bitwise_xor_(words[1]).bitwise_xor_(keys[0]).bitwise_and_(_LOW),
            third,
            (first >> 32).bitwise_xor_(words[3]).bitwise_xor_(keys[1]).bitwise_and_(_LOW),
            first,
        ]
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL, strict=True)]
    return [word.bitwise_and_(_LOW) for word in words]


def normals(name: bytes, count: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the numbers ``start`` to ``start + count`` of the stream ``name``, standard normals, float64.

    Box-Muller of two words each: a radius of the uniform (w + 1/2) / 2^32, and an angle.
    """
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    words = philox(torch.arange(first * GROUPS, last * GROUPS, dtype=torch.int64, device=device), name)
    drawn = torch.empty((last - first, 4, GROUPS), dtype=torch.float64, device=device)
    for pair in (0, 2):
        radius, angle = (word.double().add_(0.5).mul_(2.0**-32) for word in words[pair : pair + 2])
        radius.log_().mul_(-2.0).sqrt_()
        angle.mul_(2.0 * math.pi)
        for place, along in ((pair, angle.cos()), (pair + 1, angle.sin())):
            drawn[:, place] = along.mul_(radius).view(-1, GROUPS)
    return drawn.view(-1)[start - first * BLOCK :][:count]


def add_to_rows(target: Tensor, deviations: Tensor, name: bytes, rows: Tensor, start: int) -> None:
    """target[i, j] += deviations[i] * (number start + rows[i] * width + j of the stream ``name``).

    Args:
        target: [n, width].
        deviations: [n].
        name: The stream's.
        rows: int64 [n].
        start: The address of row 0.
    """
    width = target.shape[1]
    places = (start + rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)).view(-1)
    # The last bits of a logarithm may be others in what is left over behind whole vectors.
    places = torch.nn.functional.pad(places, (0, -len(places) % GROUPS))
    block, place, lane = places // BLOCK, places % BLOCK // GROUPS, places % GROUPS
    words = philox(block * GROUPS + lane, name)
    radius, angle = (torch.where(place < 2, words[k], words[2 + k]).double().add_(0.5).mul_(2.0**-32) for k in (0, 1))
    radius.log_().mul_(-2.0).sqrt_()
    angle.mul_(2.0 * math.pi)
    drawn = torch.where(place % 2 == 0, angle.cos(), angle.sin()).mul_(radius)[: target.numel()].view(target.shape)
    target += drawn * deviations.double().unsqueeze(1)


def put(target: Tensor, std: float, name: bytes, start: int, add: bool) -> None:
    """Write std * (the numbers from ``start`` on) to ``target``, a vector, or ``add`` them to it."""
    device = target.device if target.device.type in _PIECE else torch.device("cpu")  # which has float64
    piece = _PIECE[device.type]
    for at in range(0, len(target), piece):
        part = target[at : at + piece]
        noise = normals(name, len(part), start + at, device).mul_(std)
        if device != target.device:
            noise = noise.to(target.dtype).to(target.device)
        if add:
            part.add_(noise)
        else:
            part.copy_(noise)
