"""Measure the covariance over steps of the noise that ``make_private(mechanism=...)`` adds, and of faulty ones.

python -m proofs.covariance [--steps 64] [--record results/checks/covariance-DATE.json]

Each run makes steps without a gradient (all examples are zeros), the second half of them behind a checkpoint that was
saved and loaded into a new engine. Its noise, multiplied by the factor F that the mechanism states, must be white: the
scores are the gate's (:mod:`harness.worker.gate.noise`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import CorrelatedNoise, PrivacyEngine, correlated
from harness.worker.gate import correlation
from harness.worker.gate import noise as gate_noise

WIDTHS = (64, 96, 10)
BATCH, BATCHES = 4, 8
SIGMA, BOUND = 1.5, 0.7
MECHANISMS = {
    "previous(0.9)": CorrelatedNoise.previous(0.9),
    "square_root(4)": CorrelatedNoise.square_root(4),
    "square_root(8)": CorrelatedNoise.square_root(8),
    "banded(8)": CorrelatedNoise.banded(8),
}


def factor(mechanism: CorrelatedNoise, steps: int) -> np.ndarray:
    """Return the first column of F: the bands, or by the series of its inverse's."""
    weights, column = mechanism.weights, np.zeros(steps)
    if mechanism.is_banded:
        column[: len(weights)] = weights[:steps]
        return column
    column[0] = 1.0
    for t in range(1, steps):
        near = np.array(weights[1 : t + 1])
        column[t] = -near @ column[t - len(near) : t][::-1]
    return column


def private(mechanism: CorrelatedNoise) -> tuple[Any, ...]:
    """Return engine, model, optimizer and loader of a run whose gradients are zero: its inputs are."""
    layers = itertools.pairwise(WIDTHS)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in layers))
    data = TensorDataset(torch.zeros(BATCH * BATCHES, WIDTHS[0]))
    engine = PrivacyEngine(seed=1)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        loss_reduction="sum",
        mechanism=mechanism,
    )


def released(mechanism: CorrelatedNoise, steps: int) -> tuple[np.ndarray, dict[str, slice]]:
    """Return [steps, parameters], the noise of each step over σC, and where each parameter's is."""
    found: list[np.ndarray] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "half")
        for part in range(2):
            engine, model, optimizer, loader = private(mechanism)
            if part:
                engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
            batches = itertools.chain.from_iterable(itertools.repeat(loader))
            for (x,) in itertools.islice(batches, steps // 2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                grads = [p.grad.flatten() for p in optimizer.params]
                found.append((torch.cat(grads) / (SIGMA * BOUND)).numpy())
            engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    ends = list(itertools.accumulate(p.numel() for p in optimizer.params))
    return np.stack(found), {f"layer {i}": slice(a, b) for i, (a, b) in enumerate(itertools.pairwise([0, *ends]))}


def judged(noise: np.ndarray, slices: Mapping[str, slice], column: np.ndarray) -> dict[str, Any]:
    """Return what the gate finds in noise that is made white by its factor, as a record holds it."""
    z = correlation.white(noise, correlation.factor(column, len(noise)))
    mean, spread = gate_noise.moments(z, slices)
    found = {
        "mean": mean,
        "variance": spread,
        "steps apart": gate_noise.independent_steps(z, slices),
        "steps that come again": gate_noise.repeated(z, slices),
        "normal": gate_noise.normality(z),
    }
    scores = {
        name: {"score": round(score.value, 3), "limit": round(score.limit, 3), "where": score.where}
        for name, score in found.items()
    }
    return {"passed": all(score.passed for score in found.values()), "scores": scores}


def fills(change: Any) -> Any:
    """Return a stand-in for what makes noise, whose steps and factors are changed."""
    fill = correlated._fill

    def changed(rows: Any, noise: Any, steps: range, start: int, factors: Sequence[float], *how: bool) -> None:
        steps, factors, share = change(steps, factors)
        fill(rows, noise, steps, start, factors, *how)
        rows.mul_(share)

    return mock.patch.object(correlated, "_fill", changed)


def faults(steps: int) -> dict[str, Any]:
    """Return, by their names, changes of steps, factors and size of noise that the scores have to reject."""
    half = steps // 2
    inverse = tuple(factor(MECHANISMS["square_root(4)"], steps)[1:4])
    return {
        "the factor in place of its inverse": lambda at, back: (at, inverse, 1),
        "the ring is read backwards": lambda at, back: (at, back[::-1], 1),
        "the ring is one step too short": lambda at, back: (at, back[:2], 1),
        "the ring is one step too long": lambda at, back: (
            range(max(0, at.start - 1), at.stop),
            (*back, -0.0390625),
            1,
        ),
        "the ring is lost on resume": lambda at, back: (
            range(half if at.start < half < at.stop - 1 else at.start, at.stop),
            back,
            1,
        ),
        "the multiplier is lost on resume": lambda at, back: (at, back, 1 / SIGMA if at.stop > half + 8 else 1),
    }


def proof(steps: int) -> dict[str, Any]:
    """Return the verdicts on dpcore's mechanisms, and on faults in one of them."""
    result: dict[str, Any] = {"steps": steps, "mechanisms": {}, "faults": {}}
    for name, mechanism in MECHANISMS.items():
        result["mechanisms"][name] = judged(*released(mechanism, steps), factor(mechanism, steps))
    mechanism = MECHANISMS["square_root(4)"]
    column = factor(mechanism, steps)
    for name, change in faults(steps).items():
        with fills(change):
            result["faults"][name] = judged(*released(mechanism, steps), column)
    return result


def largest(verdict: Mapping[str, Any]) -> str:
    """Return the score that comes nearest to its limit, or passes it by most."""
    name, score = max(verdict["scores"].items(), key=lambda item: item[1]["score"] / max(item[1]["limit"], 1e-9))
    return f"{name} {score['score']:.1f}, limit {score['limit']:.1f} ({score['where']})"


def main() -> None:
    """Print a line for each mechanism and each fault; exit code 1 where a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = proof(given.steps)
    wrong = 0
    for kind, right in (("mechanisms", True), ("faults", False)):
        for name, verdict in found[kind].items():
            wrong += verdict["passed"] != right
            print(f"{'passed  ' if verdict['passed'] else 'rejected'} {name}: {largest(verdict)}")
    if given.record is not None:
        given.record.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
