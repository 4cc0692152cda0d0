"""Normals that are added, or written, in one pass, without a buffer of noise: the streams of :mod:`dpcore.normals`.

In float32, by additions, products, exact divisions and roots alone: no function whose rounding depends on the device.
Before its first draw on a device the kernel is held against float64 there, and refused where it differs: noise that is
not what it should be would release the sums.
"""

from __future__ import annotations

import functools
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpcore.errors import PrivacyError
from dpcore.normals import BLOCK, GROUPS, LARGEST_ERROR, NAME_BYTES, normals, words_of


@triton.jit
def _pair(first, second):  # type: ignore[no-untyped-def]
    """Two independent standard normals of two words of 32 bits, by Box-Muller."""
    # log u, u = (first + 1/2) / 2^32 = 2^k m with m in [sqrt(1/2), sqrt(2)): log m = 2 atanh(s), s = (m - 1) / (m + 1).
    # Above sqrt(1/2) m - 1 is -(1 - u), which is known to more digits than u.
    is_large = first > 0xB504F333
    bits = ((first.to(tl.float32) + 0.5) * 2.3283064365386963e-10).to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    missing = ((0xFFFFFFFF - first).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    more = tl.where(is_large, -missing, m - 1.0)
    n = tl.where(is_large, 0, k).to(tl.float32)
    s = tl.div_rn(more, more + 2.0)
    q = s * s
    series = q * (q * (q * (q * (q * (2.0 / 11) + 2.0 / 9) + 2.0 / 7) + 2.0 / 5) + 2.0 / 3)
    # ln 2 in two parts: the first has few bits, so that its product with n is exact.
    log = n * 0.693359375 + (n * -2.12194440e-4 + (s * series + 2.0 * s))
    radius = tl.sqrt_rn(-2.0 * log)
    # The angle: the nearest number of quarter turns, and a rest of at most an eighth turn.
    quarter = (second + 0x20000000) >> 30
    rest = (second - (quarter << 30)).to(tl.int32, bitcast=True)
    r = (rest.to(tl.float32) + 0.5) * 1.4629180792671596e-09
    q = r * r
    sine = r * (q * (q * (q * (q * (1.0 / 362880) - 1.0 / 5040) + 1.0 / 120) - 1.0 / 6) + 1.0)
    cosine = q * (q * (q * (q * (-1.0 / 3628800) + 1.0 / 40320) - 1.0 / 720) + 1.0 / 24)
    cosine = q * (cosine - 0.5) + 1.0
    is_odd = (quarter & 1) == 1
    x, y = tl.where(is_odd, sine, cosine), tl.where(is_odd, cosine, sine)
    x = tl.where((quarter == 1) | (quarter == 2), -x, x)
    y = tl.where(quarter >= 2, -y, y)
    return radius * x, radius * y


@triton.jit
def _put(target, place, count, value, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = (place >= 0) & (place < count)
    if ADD:
        value += tl.load(target + place, mask=inside, other=0.0)
    tl.store(target + place, value, mask=inside)


# The stream's name changes with every step: a kernel that was compiled for special values would be compiled for ever.
@triton.jit(do_not_specialize=["first", "deviation", "k0", "k1", "c2", "c3"])
def _normals(  # type: ignore[no-untyped-def]
    target, count, first, skipped, deviation, k0, k1, c2, c3, ADD: tl.constexpr, GROUPS: tl.constexpr
):
    """target[i] = deviation * normal i, behind those of ``first`` blocks and ``skipped`` others; ADD: added to it.

    The stream's name: words as signed integers.
    """
    block = first + tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GROUPS)
    counter = block * GROUPS + lane
    w0, w1 = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    w2 = tl.zeros((GROUPS,), dtype=tl.uint32) + c2.to(tl.uint32, bitcast=True)
    w3 = tl.zeros((GROUPS,), dtype=tl.uint32) + c3.to(tl.uint32, bitcast=True)
    key_0, key_1 = k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(w0, 0xD2511F53), w0 * 0xD2511F53
        high_2, low_2 = tl.umulhi(w2, 0xCD9E8D57), w2 * 0xCD9E8D57
        w0, w1, w2, w3 = high_2 ^ w1 ^ key_0, low_2, high_0 ^ w3 ^ key_1, low_0
        key_0, key_1 = key_0 + 0x9E3779B9, key_1 + 0xBB67AE85
    a, b = _pair(w0, w1)
    c, d = _pair(w2, w3)
    place = tl.program_id(0).to(tl.int64) * (4 * GROUPS) + lane - skipped
    _put(target, place, count, deviation * a, ADD)
    _put(target, place + GROUPS, count, deviation * b, ADD)
    _put(target, place + 2 * GROUPS, count, deviation * c, ADD)
    _put(target, place + 3 * GROUPS, count, deviation * d, ADD)


def draw(target: Tensor, std: float, name: bytes, start: int, add: bool) -> None:
    """Write std * (the numbers from ``start`` on of the stream ``name``) to ``target``, or ``add`` them to it.

    The target is contiguous float32. PrivacyError where the kernel does not compute the stream on this device.
    """
    check(target.device)
    _launch(target, std, name, start, add)


def _launch(target: Tensor, std: float, name: bytes, start: int, add: bool) -> None:
    words = [word - 2**32 if word >= 2**31 else word for word in words_of(name)]
    count = target.numel()
    if count:
        first, skipped = divmod(start, BLOCK)
        grid = (triton.cdiv(skipped + count, BLOCK),)
        _normals[grid](target, count, first, skipped, float(std), *words, ADD=add, GROUPS=GROUPS)
    torch.autograd.graph.increment_version(target)


@functools.cache
def check(device: torch.device) -> None:
    """Hold the kernel against float64, once for each device.

    Of several lengths and places: Triton compiles other variants for multiples of 16, which most of them are.
    """
    names, pieces = (bytes(range(NAME_BYTES)), bytes([255] * NAME_BYTES)), ((0, 3 * BLOCK), (0, 3 * BLOCK + 5), (7, 9))
    for name, (start, length) in itertools.product(names, pieces):
        for add in (False, True):
            found = torch.ones(length, device=device)
            _launch(found, 2.0, name, start, add)
            true = 2.0 * normals(name, length, start) + add
            error = float((found.double().cpu() - true).abs().max())
            if not error <= 3.0 * LARGEST_ERROR:
                raise PrivacyError(
                    f"The kernel of noise on {device} is off by {error:.3g} from what it should draw; without it, by "
                    "DPCORE_TRITON=0, torch's operators compute the same."
                )
