"""Count the graphs of a compiled engine over 1,000 padded batches: ``python -m proofs.one_graph [BACKEND]`` (minutes).

For truncated Poisson batches and for balls in bins with a longest batch; every batch is filled up to that length.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dpcore

STEPS, EXAMPLES, MOST = 1000, 2000, 64
BACKEND = sys.argv[1] if len(sys.argv) > 1 else "eager"


made: list[int] = []
"""The number of inputs of every graph that a backend was given."""


def counting(graph: Any, inputs: Any) -> Any:
    """Note a graph, and hand it on to the backend that was asked for."""
    made.append(len(inputs))
    return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)


def main() -> None:
    """Print after which steps there was a new graph."""
    torch._dynamo.register_backend(counting, name="counting")
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
            compile="counting",
        )
        before, last, lengths = len(made), 0, set[int]()
        while engine.steps < STEPS:
            for batch in loader:
                known = len(made)
                (x, y), mask = dpcore.padded(batch, MOST)
                engine.step(x, y, mask)
                last = engine.steps if len(made) > known else last
                lengths.add(len(batch[0]))
        print(
            f"{sampling}, {BACKEND}: {engine.steps} steps, {len(lengths)} lengths of batches, "
            f"{len(made) - before} graphs, the last of them at step {last}",
            flush=True,
        )


if __name__ == "__main__":
    main()
