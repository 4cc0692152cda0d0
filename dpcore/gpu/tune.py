"""Measures on the GPU at hand what dpcore would otherwise assume, and writes it as data: ``python -m dpcore.gpu.tune``.

The planner's costs come first, then the kernels with several sizes of tiles, the fastest of which are kept. Needs a
CUDA device and Triton. With ``TRITON_INTERPRET=1`` it only tries itself on a CPU: its file says ``simulated``, and is
refused.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.gpu import interpreted
from dpcore.gpu.tuned import KINDS, Sizes
from dpcore.gpu.windows import Windows
from dpcore.numerics import measure
from dpcore.numerics.measure import median_seconds

MAPS = ((16, 128, 768, 768), (8, 1024, 768, 3072), (8, 512, 4096, 4096))
"""(B, T, d, p) of linear maps in GPT-2 and in a Llama of 7 billion parameters."""
CONVOLUTIONS = ((256, 1, 28, 16, 8, 2, 3), (64, 64, 32, 64, 3, 1, 1), (64, 256, 8, 256, 3, 1, 1))
"""(B, c, size, d, kernel, stride, padding): the first of the MNIST CNN, and two of a residual network on CIFAR-10."""
TINY_MAPS, TINY_CONVOLUTIONS = ((2, 20, 33, 17),), ((2, 2, 6, 5, 3, 2, 1),)
DTYPES = {"float32": torch.float32, "half": torch.bfloat16}
REPEATS, TINY_REPEATS = 7, 1
ON_A_GPU = measure.Sizes(kept=(64, 2**20), product=(16, 512, 768), repeats=REPEATS)
"""256 MiB of kept gradients."""
TINY = measure.Sizes(kept=(2, 256), product=(2, 8, 8), repeats=TINY_REPEATS)


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
    print(f"planner: {found['planner']}")
    for kind, table in ((kind, found[kind]) for kind in KINDS):
        for width, sizes in table.items():
            print(f"{kind}, {width}: {sizes}")
    print(f"{len(found['tried'])} tried, {found['left']} not begun; written to {options.out}")
    return 0


def tune(seconds: float) -> dict[str, Any]:
    """Return the file's content: the planner's costs, the fastest sizes by kind and type, and all that was tried."""
    begun, tried, left = time.monotonic(), list[dict[str, Any]](), 0
    planner = measure.measure(torch.device(_device()), TINY if interpreted() else ON_A_GPU)
    times: dict[str, dict[Sizes, dict[str, list[float]]]] = {kind: {} for kind in KINDS}
    for sizes, width, kind in itertools.product(candidates(), DTYPES, KINDS):
        if time.monotonic() - begun > seconds:
            left += 1
            continue
        row = {"kind": kind, "type": width, **asdict(sizes)}
        try:
            measured = [_seconds(case, sizes) for case in _cases(kind, DTYPES[width])]
            times[kind].setdefault(sizes, {})[width] = measured
            tried.append({**row, "seconds": measured})
        except Exception as failure:  # too much shared memory, say: the next sizes are to be tried
            tried.append({**row, "failed": f"{type(failure).__name__}: {failure}"[:300]})
    cuda = torch.cuda.is_available()
    return {
        "simulated": interpreted(),
        "device": torch.cuda.get_device_name() if cuda else "the CPU, by Triton's interpreter",
        "torch": torch.__version__,
        "planner": asdict(planner),
        **{kind: {width: asdict(sizes) for width, sizes in fastest(of).items()} for kind, of in times.items()},
        "tried": tried,
        "left": left,
    }


# ---- the kernels' sizes


def candidates() -> Iterator[Sizes]:
    """Yield sizes to try, the default first; in the interpreter, where all are alike, a few."""
    yield Sizes()
    tiles, depths, warps, stages = ((32, 64), (32,), (4,), (3,)) if interpreted() else _SPACE
    for tile, depth, warp, stage in itertools.product(tiles, depths, warps, stages):
        sizes = Sizes(tile, depth, warp, stage)
        if sizes != Sizes():
            yield sizes


_SPACE = ((64, 128, 32, 16), (32, 64), (4, 8), (3, 4, 2))


def fastest(times: dict[Sizes, dict[str, list[float]]]) -> dict[str, Sizes]:
    """Return the fastest sizes for each type, all with the tile that is the fastest for all types together.

    Args:
        times: Seconds of each case by sizes and type; {} where nothing could be measured with the default.

    Returns:
        Sizes by type. They are compared by the product over the cases of their time over the default's.
    """
    base = times.get(Sizes(), {})
    ratios = {
        (sizes, width): math.prod(map(float.__truediv__, taken, base[width]))
        for sizes, of in times.items()
        for width, taken in of.items()
        if width in base
    }
    best: dict[int, dict[str, Sizes]] = {}
    for (sizes, width), ratio in ratios.items():
        of_tile = best.setdefault(sizes.tile, {})
        if width not in of_tile or ratio < ratios[of_tile[width], width]:
            of_tile[width] = sizes
    complete = [of_tile for of_tile in best.values() if of_tile.keys() == base.keys()]
    return min(complete, key=lambda of: math.prod(ratios[s, width] for width, s in of.items()), default={})


@dataclass(frozen=True)
class _Case:
    """One kernel with random operands: ``run`` returns the norms [B], which are to be ``true``."""

    run: Callable[[Sizes], Tensor]
    true: Tensor


def _map(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Case:
    """A linear map over time by tiles, with the sum that shares them, or by Gram matrices."""
    from dpcore.gpu import contraction

    examples, steps, d, p = shape
    g, x = _random(dtype, (examples, steps, d), (examples, steps, p))
    factors, out = torch.ones(examples, device=_device()), torch.zeros(d, p, device=_device())

    def by_gram(sizes: Sizes) -> Tensor:
        return contraction.gram_norm_sq(g, x, sizes).value

    def by_tiles(sizes: Sizes) -> Tensor:
        norms, limits = contraction.tiled_norm_sq(g, x, sizes)
        contraction.add_clipped_sum(g, x, factors, out, limits, sizes)
        return norms.value

    true = torch.stack([_square(a.double().t() @ b.double()) for a, b in zip(g, x, strict=True)])
    return _Case(by_gram if kind == "gram" else by_tiles, true)


def _convolution(dtype: torch.dtype, shape: tuple[int, ...]) -> _Case:
    """Norms and the clipped sum of a convolution of pictures."""
    from dpcore.gpu import convolution

    examples, c, size, d, kernel, stride, padding = shape
    out_size = (size + 2 * padding - kernel) // stride + 1
    windows = Windows((kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1))
    g, x = _random(dtype, (examples, d, out_size, out_size), (examples, c, size, size))
    factors, out = torch.ones(examples, device=_device()), torch.zeros(d, c, kernel, kernel, device=_device())

    def run(sizes: Sizes) -> Tensor:
        norms, limits = convolution.norm_sq(g, x, windows, sizes)
        convolution.add_clipped_sum(g, x, windows, factors, out, limits, sizes)
        return norms.value

    unfolded = (F.unfold(one.double()[None], kernel, 1, padding, stride)[0] for one in x)
    true = torch.stack([_square(of_g.double().flatten(1) @ u.t()) for of_g, u in zip(g, unfolded, strict=True)])
    return _Case(run, true)


@functools.cache
def _cases(kind: str, dtype: torch.dtype) -> tuple[_Case, ...]:
    if kind == "windows":
        return tuple(_convolution(dtype, shape) for shape in (TINY_CONVOLUTIONS if interpreted() else CONVOLUTIONS))
    return tuple(_map(kind, dtype, shape) for shape in (TINY_MAPS if interpreted() else MAPS))


def _seconds(case: _Case, sizes: Sizes) -> float:
    """Return the median time. Raises ValueError where values are wrong."""
    found = case.run(sizes)
    if not bool(((found - case.true).abs() <= 2.0**-6 * case.true).all()):
        raise ValueError(f"wrong norms with {sizes}")
    return _median(lambda: case.run(sizes))


def _median(run: Callable[[], object]) -> float:
    return median_seconds(run, torch.device(_device()), TINY_REPEATS if interpreted() else REPEATS)


def _device() -> str:
    return "cpu" if interpreted() else "cuda"


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(_device(), dtype) for shape in shapes]


def _square(gradient: Tensor) -> Tensor:
    return gradient.square().sum()


if __name__ == "__main__":
    sys.exit(main())
