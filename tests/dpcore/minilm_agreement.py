"""Measures whether dpcore and Opacus do the same in ``dpcore.examples.minilm_imdb``, from the root of a checkout:

    python -m tests.dpcore.minilm_agreement --data FOLDER     # a record in results/minilm-imdb/agreement for each kind

Both libraries run the example's own ``train`` from the same head and adapters on the same batches, which are drawn
here. Without noise their weights after the last step are compared. With the series' noise, and a learning rate of zero
so that the weights stay, the gradients that AdamW gets are compared with those without: the rest is noise. Its standard
deviation should be sigma C / B, and that of one step should know nothing of the next one's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from dpcore import native
from dpcore.accountants.utils import get_noise_multiplier
from dpcore.examples import minilm_imdb
from dpcore.examples.minilm_imdb import LIBRARIES
from dpcore.loading.uniform_sampler import UniformWithReplacementSampler

KINDS = ("lora", "bias")
SAMPLERS = {"dpcore": "dpcore.loading.uniform_sampler", "opacus": "opacus.utils.uniform_sampler"}
"""Modules of ``UniformWithReplacementSampler``, whose lists of indexes are replaced by those that are drawn here."""
BATCHES_SEED = 7
NOISE_STEPS = 3


class _Enough(Exception):
    """As many steps as were asked for."""


@dataclass(frozen=True)
class Run:
    """Flat vectors of all trained weights: where they start, the gradients that AdamW gets, where they end."""

    start: Tensor
    gradients: list[Tensor]
    end: Tensor


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


@contextmanager
def _watched(steps: int) -> Iterator[dict[str, Any]]:
    """Put into the yielded dictionary what a :class:`Run` has; end the loop by _Enough after so many steps."""
    seen: dict[str, Any] = {"gradients": []}

    def weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.AdamW:
            seen.setdefault("start", _flat(weights(optimizer)))
            seen["gradients"].append(_flat([p.grad for p in weights(optimizer) if p.grad is not None]))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.AdamW and len(seen["gradients"]) == steps:
            seen["end"] = _flat(weights(optimizer))
            raise _Enough

    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(before),
        torch_optimizer.register_optimizer_step_post_hook(after),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run(options: argparse.Namespace, batches: Sequence[list[int]], noise: float, steps: int) -> Run:
    """Make the example's first ``steps`` steps.

    Args:
        options: of the example.
        batches: indexes of the training reviews, one list for each step.
        noise: the noise multiplier.
        steps: how many.
    """
    sampler = importlib.import_module(SAMPLERS[options.library]).UniformWithReplacementSampler
    with (
        mock.patch.object(sampler, "__iter__", lambda self: iter(batches)),
        mock.patch.object(minilm_imdb, "get_noise_multiplier", lambda **_: noise),
        _watched(steps) as seen,
    ):
        try:
            minilm_imdb.train(options)
        except _Enough:
            return Run(**seen)
    raise AssertionError(f"the example ended before step {steps}")


def compare(trained: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Compare the libraries.

    Args:
        trained: ``lora`` or ``bias``.
        arguments: further options of the example.

    Returns:
        Distances over the length of what dpcore has, and of each library's noise the standard deviation over
        sigma C / B and the correlation between steps that is the farthest from zero.
    """
    of = {name: minilm_imdb.parse([*arguments, "--library", name, "--train", trained]) for name in LIBRARIES}
    options = of["dpcore"]
    size = len(minilm_imdb.reviews(options).train)
    rate = options.batch_size / size
    steps = -(-size // options.batch_size)
    delta = 1 / (2 * size)
    sigma = get_noise_multiplier(target_epsilon=options.epsilon, target_delta=delta, sample_rate=rate, steps=steps)
    drawn = UniformWithReplacementSampler(num_samples=size, sample_rate=rate, seed=BATCHES_SEED)
    batches = [drawn.draw(k) for k in range(steps)]
    ours, theirs = (run(of[name], batches, 0.0, steps) for name in LIBRARIES)
    matters = _matters(options)
    found = {name: _noise([*arguments, "--library", name, "--train", trained], batches, sigma) for name in LIBRARIES}
    return {
        "train": trained,
        "steps": steps,
        "examples": size,
        "batch_size": options.batch_size,
        "batch_sizes": [len(batch) for batch in batches],
        "trained_parameters": len(ours.start),
        "same_start": bool(torch.equal(ours.start, theirs.start)),
        "first_gradient": _distance(ours.gradients[0], theirs.gradients[0]),
        "update": _distance(ours.end - ours.start, theirs.end - theirs.start),
        "update_without_key_biases": _distance(*((r.end - r.start)[matters] for r in (ours, theirs))),
        "noise_multiplier": sigma,
        "noise_steps": NOISE_STEPS,
        "noise_over_sigma_c_by_b": {name: deviation for name, (deviation, _) in found.items()},
        "noise_correlation": {name: correlation for name, (_, correlation) in found.items()},
        "learning_rate": options.learning_rate,
        "max_grad_norm": options.max_grad_norm,
        "versions": {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", *LIBRARIES)},
    }


def _noise(arguments: Sequence[str], batches: Sequence[list[int]], sigma: float) -> tuple[float, float]:
    """The noise's standard deviation over sigma C / B, and the correlation of two steps' that is farthest from zero."""
    options = minilm_imdb.parse([*arguments, "--learning-rate", "0"])
    noisy, clean = (run(options, batches, noise, NOISE_STEPS).gradients for noise in (sigma, 0.0))
    noise = torch.stack(noisy) - torch.stack(clean)
    between = torch.corrcoef(noise)[*torch.triu_indices(NOISE_STEPS, NOISE_STEPS, 1)]
    deviation = float(noise.std()) / (sigma * options.max_grad_norm / options.batch_size)
    return deviation, float(between[between.abs().argmax()])


def _matters(options: argparse.Namespace) -> Tensor:
    """Which trained weights are no biases of keys. Attention ignores those: they move all scores of a query alike.

    Their gradient is rounding, and AdamW makes steps of full length of it.
    """
    model = minilm_imdb.classifier(options.data, options.train)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.cat([torch.full((p.numel(),), not name.endswith("key.bias")) for name, p in named])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / ours.norm())


def agrees(record: Mapping[str, Any]) -> bool:
    """Whether distances are those of rounding, and the noise is independent and of sigma C / B, within four standard
    errors."""
    errors = _errors(record)
    deviations, correlations = (record[of].values() for of in errors)
    return (
        record["same_start"]
        and max(record["first_gradient"], record["update_without_key_biases"]) < 1e-3
        and all(abs(found - 1) < 4 * errors["noise_over_sigma_c_by_b"] for found in deviations)
        and all(abs(found) < 4 * errors["noise_correlation"] for found in correlations)
    )


def _errors(record: Mapping[str, Any]) -> dict[str, float]:
    """Standard errors of independent normal noise."""
    count = record["trained_parameters"]
    return {
        "noise_over_sigma_c_by_b": 1 / math.sqrt(2 * count * record["noise_steps"]),
        "noise_correlation": 1 / math.sqrt(count),
    }


def main() -> int:
    from tests.dpcore.minilm_series import RECORDS, tune

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="as minilm_series has it")
    parser.add_argument("--examples", type=int, default=3072, help="reviews to train on")
    parser.add_argument("--batch-size", type=int, default=128, help="expected")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    native.build()  # as the series has it
    rates = tune(options.data, RECORDS / "tuning", [])
    (RECORDS / "agreement").mkdir(exist_ok=True)
    for kind in options.kinds:
        arguments = ["--data", str(options.data), "--test", "1", "--learning-rate", repr(rates[kind])]
        arguments += ["--examples", str(options.examples), "--batch-size", str(options.batch_size)]
        found = compare(kind, arguments)
        (RECORDS / "agreement" / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
