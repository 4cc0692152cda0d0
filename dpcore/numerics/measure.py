"""Measures what the planner weighs on the processor at hand: ``python -m dpcore.numerics.measure --out costs.json``.

``DPCORE_CPU_COSTS`` names the file. Without it dpcore takes what held on the processors that it was made on. Nothing is
measured unasked: the choice of a method is a choice of roundings, and a program is to repeat itself to the last bit.
``python -m dpcore.gpu.tune`` measures a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dpcore.numerics.costs import Costs
from dpcore.numerics.precision import full_precision
from dpcore.numerics.rounding import gram, squares


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured.

    ``kept``: gradients by example [B, n], which should not fit a cache. ``product``: rows [B, T, p] of which Gram
    matrices are made. ``turns``: examples in turn. ``repeats``: of each, for the median.
    """

    kept: tuple[int, int]
    product: tuple[int, int, int]
    turns: int = 32
    repeats: int = 7


ON_A_CPU = Sizes(kept=(32, 2**20), product=(16, 256, 512))
"""128 MiB of kept gradients."""


def measure(device: torch.device, sizes: Sizes) -> Costs:
    """Return the costs on a device, measured as dpcore does it: without its kernels, in float32.

    A kept number is written once, read for the norm and read for the sum. The operators of an example in turn are a
    product, its squares, the wait for its factor, and an addition.
    """
    examples, numbers = sizes.kept
    batch, steps, features = sizes.product
    generator = torch.Generator().manual_seed(0)
    kept, total = torch.empty(examples, numbers, device=device), torch.zeros(numbers, device=device)
    factors = torch.ones(examples, device=device)
    rows = torch.randn(sizes.product, generator=generator).to(device)
    g, x = torch.randn(2, 4, 8, generator=generator).to(device)
    small = torch.zeros(64, device=device)

    def keep() -> None:
        kept.fill_(1.0)
        squares(kept)
        total.addmv_(kept.t(), factors)

    def take_turns() -> None:
        for _ in range(sizes.turns):
            flat = torch.mm(g.t(), x).reshape(-1)
            factor = squares(flat.unsqueeze(0)).value.rsqrt().clamp(max=1.0).tolist()
            small.add_(flat, alpha=factor[0])

    def seconds(run: Callable[[], object]) -> float:
        return median_seconds(run, device, sizes.repeats)

    with full_precision():
        of_number = seconds(keep) / kept.numel()
        of_flop = seconds(lambda: gram(rows)) / (2 * batch * steps**2 * features)
        of_turn = seconds(take_turns) / sizes.turns
    return Costs(of_number / of_flop, of_turn / of_number)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of ``run`` on a device, after one that is not taken."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    times = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> int:
    """Measure the processor and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--threads", type=int, help="as many as the training will have (default: torch's choice)")
    options = parser.parse_args()
    if not options.out.parent.is_dir():
        print(f"--out is {options.out}, whose folder is not there; make it first.", file=sys.stderr)
        return 2
    if options.threads is not None:
        if options.threads < 1:
            print(f"--threads is {options.threads}; it must be at least 1.", file=sys.stderr)
            return 2
        torch.set_num_threads(options.threads)
    found = asdict(measure(torch.device("cpu"), ON_A_CPU))
    about = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    options.out.write_text(json.dumps({**about, "planner": found}, indent=1) + "\n")
    print(", ".join(f"{name}: {value:.3g}" for name, value in found.items()) + f"; written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
