"""Count the graphs of a compiled engine over 1,000 padded batches: ``python -m proofs.one_graph [BACKEND]`` (minutes).

For truncated Poisson batches and for balls in bins with a longest batch; every batch is filled up to that length.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dpcore

STEPS, EXAMPLES, MOST = 1000, 2000, 64


def graphs() -> int:
    """Return how many graphs were captured in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def main() -> None:
    """Print after which steps there was a new graph."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "eager"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(EXAMPLES, 1, 12, 12), torch.arange(EXAMPLES) % 3)
    for sampling in ("truncated", "bins"):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
        loader = dpcore.DPDataLoader(data, sample_rate=0.01, sampling=sampling, max_batch_size=MOST, seed=1)
        engine = dpcore.Engine(
            model,
            lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"),
            noise_multiplier=1.0,
            expected_batch_size=20,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            compile=backend,
        )
        before, last, lengths = graphs(), 0, set[int]()
        while engine.steps < STEPS:
            for batch in loader:
                known = graphs()
                (x, y), mask = dpcore.padded(batch, MOST)
                engine.step(x, y, mask)
                last = engine.steps if graphs() > known else last
                lengths.add(len(batch[0]))
        print(
            f"{sampling}, {backend}: {engine.steps} steps, {len(lengths)} lengths of batches, "
            f"{graphs() - before} graphs, the last of them at step {last}",
            flush=True,
        )


if __name__ == "__main__":
    main()
