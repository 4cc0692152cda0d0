"""Measures the kernels with several sizes of tiles and writes the fastest as data: ``python -m dpcore.gpu.tune``.

Needs a CUDA device and Triton. With ``TRITON_INTERPRET=1`` it only tries itself on a CPU: its file says ``simulated``,
and the kernels refuse it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpcore.gpu import interpreted
from dpcore.gpu.sizes import KINDS, Sizes

SHAPES = ((16, 128, 768, 768), (8, 1024, 768, 3072), (8, 512, 4096, 4096))
"""(B, T, d, p) of linear maps in GPT-2 and in a Llama of 7 billion parameters."""
TINY = ((2, 20, 33, 17),)
DTYPES = (torch.bfloat16, torch.float32)
REPEATS, TINY_REPEATS = 7, 1


def main() -> int:
    """Tune and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seconds", type=float, default=300.0, help="try no further sizes after this time")
    options = parser.parse_args()
    if not interpreted() and not torch.cuda.is_available():
        print("Tuning needs a CUDA device, and torch sees none; TRITON_INTERPRET=1 tries the script.", file=sys.stderr)
        return 2
    found = tune(options.seconds)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind, table in ((kind, found[kind]) for kind in KINDS):
        for dtype, sizes in table.items():
            print(f"{kind}, {dtype}: {sizes}")
    print(f"{len(found['tried'])} tried, {found['left']} not begun; written to {options.out}")
    return 0


def candidates() -> Iterator[Sizes]:
    """Yield sizes to try, the default first; in the interpreter, where all are alike, a few."""
    yield Sizes()
    tiles, depths, warps, stages = ((32, 64), (32,), (4,), (3,)) if interpreted() else _SPACE
    for tile, depth, warp, stage in itertools.product(tiles, depths, warps, stages):
        sizes = Sizes(tile, depth, warp, stage)
        if sizes != Sizes():
            yield sizes


_SPACE = ((64, 128, 32), (32, 64), (4, 8), (3, 4, 2))


def tune(seconds: float) -> dict[str, Any]:
    """Return the file's content: the fastest sizes by kind and type, and all that was tried.

    Sizes are compared by the geometric mean over the shapes of their time over the default's.
    """
    begun, tried, left = time.monotonic(), list[dict[str, Any]](), 0
    times: dict[tuple[str, torch.dtype, Sizes], list[float]] = {}
    for sizes, dtype, kind in itertools.product(candidates(), DTYPES, KINDS):
        if time.monotonic() - begun > seconds:
            left += 1
            continue
        row = {"kind": kind, "dtype": _name(dtype), **asdict(sizes)}
        try:
            times[kind, dtype, sizes] = measured = [_seconds(kind, shape, dtype, sizes) for shape in _shapes()]
            tried.append({**row, "seconds": measured})
        except Exception as failure:  # too much shared memory, say: the next sizes are to be tried
            tried.append({**row, "failed": f"{type(failure).__name__}: {failure}"[:300]})
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    for kind, dtype in itertools.product(KINDS, DTYPES):
        of = {sizes: taken for (k, t, sizes), taken in times.items() if (k, t) == (kind, dtype)}
        base = of.get(Sizes())
        if base:
            found[kind][_name(dtype)] = asdict(min(of, key=lambda s: math.prod(map(float.__truediv__, of[s], base))))
    cuda = torch.cuda.is_available()
    return {
        "simulated": interpreted(),
        "device": torch.cuda.get_device_name() if cuda else "the CPU, by Triton's interpreter",
        "torch": torch.__version__,
        "shapes": _shapes(),
        **found,
        "tried": tried,
        "left": left,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes() -> tuple[tuple[int, int, int, int], ...]:
    return TINY if interpreted() else SHAPES


def _seconds(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the median time of norms, and of the sum where it shares their tiles. Raises where values are wrong."""
    from dpcore.gpu import contraction

    examples, steps, d, p = shape
    generator = torch.Generator().manual_seed(0)
    device = "cpu" if interpreted() else "cuda"
    g, x = (torch.randn(examples, steps, n, generator=generator).to(device, dtype) for n in (d, p))
    factors, out = torch.ones(examples, device=device), torch.zeros(d, p, device=device)

    def by_gram() -> Tensor:
        return contraction.gram_norm_sq(g, x, sizes).value

    def by_tiles() -> Tensor:
        norms, limits = contraction.tiled_norm_sq(g, x, sizes)
        contraction.add_clipped_sum(g, x, factors, out, limits, sizes)
        return norms.value

    run: Callable[[], Tensor] = by_gram if kind == "gram" else by_tiles
    found = run()
    true = torch.stack([(a.double().t() @ b.double()).square().sum() for a, b in zip(g, x, strict=True)])
    if not bool(((found - true).abs() <= 2.0**-6 * true).all()):
        raise ValueError(f"wrong norms with {sizes}")
    times = []
    for _ in range(TINY_REPEATS if interpreted() else REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
