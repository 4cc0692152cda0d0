"""Laws of peak memory: what one forward and one backward pass of a layer should hold, in bytes. Pure functions.

Symbols as in the paper: ``b`` examples in the batch; ``C`` bytes of features, label and module output of one example;
``L`` bytes of the trained parameters of the module. No law counts intermediate results, workspaces of libraries, or
the rounding of an allocator (blocks of 512 bytes on CUDA), so a measured peak may lie above all of them; what a law
says is how the peak grows with b and L.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Regime = Literal["L/C << b", "L/C ~ b", "L/C >> b"]
FAR = 10.0
"""L/C and b are far apart from this factor on. The paper names its regimes but no border; this one is ours."""


@dataclass(frozen=True)
class Parts:
    """Measured bytes of what a pass cannot do without: the batch's input and labels, and the module. As in the paper's
    Table 4 the output, which is as large as the labels, is counted by counting the labels twice."""

    batch_size: int
    input_bytes: float
    label_bytes: float
    module_bytes: float

    @property
    def C(self) -> float:
        """Bytes of one example: its features, its label, its output."""
        return (self.input_bytes + 2 * self.label_bytes) / self.batch_size

    @property
    def L(self) -> float:
        """Bytes of the module."""
        return self.module_bytes

    @property
    def output(self) -> float:
        """Bytes of one example's output."""
        return self.label_bytes / self.batch_size

    @property
    def ratio(self) -> float:
        """L/C; infinite where an example has no bytes."""
        return self.L / self.C if self.C else math.inf

    @property
    def regime(self) -> Regime:
        """Return how L/C compares with b, which decides the shape of the paper's predicted overhead."""
        relation = self.ratio / self.batch_size
        return "L/C << b" if relation <= 1 / FAR else "L/C >> b" if relation >= FAR else "L/C ~ b"


def non_private(b: int, C: float, L: float) -> float:
    """bC + 2L, without DP.

    bC: features, labels and output of the batch. L: the module. L: its gradient, of the same shape.
    """
    return b * C + 2 * L


def paper_private(b: int, C: float, L: float) -> float:
    """bC + (1 + b)L, the paper's law for DP-SGD with per-sample gradients.

    bC as without DP. L: the module. bL: a gradient per example. The ordinary gradient is not counted.
    """
    return b * C + (1 + b) * L


def opacus_private(b: int, C: float, L: float) -> float:
    """bC + 2L + 2bL, what Opacus' hooks hold (1.0 of the paper's tables and 1.6 of today alike).

    bC as without DP. L: the module. L: the ordinary gradient, which autograd forms beside the per-sample ones because
    the parameters require gradients. bL: the per-sample gradients as the layer's rule returns them. bL: a second buffer
    of that size, filled with zeros, into which they are added while the first still stands. The paper's own table bears
    it out: for Linear and Embedding its peaks with and without DP differ by 2.00 bL at every b. (On a CPU, torch 2.13
    and Opacus 1.6, the peak of a linear and of an embedding layer was L less: the ordinary gradient came later.)
    """
    return b * C + 2 * L + 2 * b * L


def dpcore_private(
    b: int, C: float, L: float, m: int, output: float = 0.0, kept: float = 0.0, apart: float = 0.0
) -> float:
    """bC - (b - m) output + 2L + m kept + apart, what dpcore's engine holds with physical micro-batches of ``m``.

    The engine slices the batch (views, no copies) and runs m examples at a time: forward, backward, norms, factors,
    sum; the next slice reuses the memory. So features and labels of all b examples stand, but ``output`` (bytes of one
    example's output) only m times: bC - (b - m) output. L: the module. L: one flat buffer of the clipped sums, whose
    slices become the parameters' gradients. The tape keeps inputs and output gradients of the slice, which for a single
    layer are the features themselves and an intermediate result. Norms, factors and losses are a few bytes an example.

    ``kept``: bytes per example of those parameters whose per-sample gradient is formed once and kept between norm and
    sum, because that is cheaper than a norm without it (norms' scales, biases, early convolutions, recurrent weights
    over many steps; see dpcore's planner). ``apart``: bytes of the largest parameter whose clipped sum is formed by
    itself and then added (convolutions everywhere, embeddings on a CPU). Both are zero for a linear layer's weight.

    The sum is associative, so m is free: nothing but features and labels grows with b.
    """
    m = min(b, m)
    return b * C - (b - m) * output + 2 * L + m * kept + apart


def overhead(b: int, C: float, L: float) -> float:
    """M_DP / M_non-DP by the paper's laws, not approximated."""
    return paper_private(b, C, L) / non_private(b, C, L)


def overhead_by_regime(parts: Parts) -> float:
    """Return the paper's three approximations of the overhead: 1 + L/C where L/C << b, (2 + b)/3 where L/C ~ b, (1 +
    b)/2 where L/C >> b."""
    b = parts.batch_size
    if parts.regime == "L/C << b":
        return 1 + parts.ratio
    return (2 + b) / 3 if parts.regime == "L/C ~ b" else (1 + b) / 2


def share_explained(predicted: float, measured: float) -> float:
    """Return which share of a measured peak a law accounts for; above 1 it predicts more than there was."""
    return predicted / measured


def relative_error(predicted: float, measured: float) -> float:
    """Return (predicted - measured) / measured: above 0 an overestimate, below 0 an underestimate."""
    return predicted / measured - 1.0


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of n values, as the paper's "56.5 % ± 8.7 %" (its conv row, computed from its
    table, shows that it divides by n - 1). The deviation of one value is NaN."""

    mean: float
    deviation: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Raise ValueError for no value."""
    if not values:
        raise ValueError("A mean needs at least one value.")
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), deviation, len(values))
