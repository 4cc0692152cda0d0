"""Measures whether dpcore and Opacus do the same in ``dpcore.examples.minilm_imdb``, from the root of a checkout:

    python -m tests.dpcore.minilm_agreement --data FOLDER     # a record in results/minilm-imdb/agreement for each kind

Both libraries run the example's own ``train`` from the same head and adapters on the same batches, which are drawn
here. Without noise their weights after the last step are compared. With the series' noise the first gradient that
AdamW gets is compared with the one without: the rest is noise, and its standard deviation should be sigma C / B.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
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
SAMPLERS = {
    "dpcore": "dpcore.loading.uniform_sampler.UniformWithReplacementSampler",
    "opacus": "opacus.utils.uniform_sampler.UniformWithReplacementSampler",
}
BATCHES_SEED = 7


class _Enough(Exception):
    """As many steps as were asked for."""


@dataclass(frozen=True)
class Run:
    """Flat vectors of all trained weights: where they start, the first gradient that AdamW gets, where they end."""

    start: Tensor
    gradient: Tensor
    end: Tensor


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


@contextmanager
def _watched(steps: int) -> Iterator[dict[str, Tensor]]:
    """Put into the yielded dictionary what a :class:`Run` has; end the loop by _Enough after so many steps."""
    seen: dict[str, Tensor] = {}
    made = [0]

    def weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.AdamW and not made[0]:
            seen["start"] = _flat(weights(optimizer))
            seen["gradient"] = _flat([p.grad for p in weights(optimizer) if p.grad is not None])

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.AdamW:
            made[0] += 1
            if made[0] == steps:
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
    sampler = importlib.import_module(SAMPLERS[options.library].rpartition(".")[0]).UniformWithReplacementSampler
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


def compare(trained: str, arguments: Sequence[str], every_step: bool = True) -> dict[str, Any]:
    """Compare the libraries.

    Args:
        trained: ``lora`` or ``bias``.
        arguments: further options of the example.
        every_step: False: only the first step is compared.

    Returns:
        Distances over the length of what dpcore has, and for each library the noise's standard deviation over
        sigma C / B.
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
    clean = {name: run(of[name], batches, 0.0, steps if every_step else 1) for name in LIBRARIES}
    ours, theirs = (clean[name] for name in LIBRARIES)
    matters = _matters(options)
    noise = {}
    for name in LIBRARIES:
        released = run(of[name], batches, sigma, 1).gradient - clean[name].gradient
        noise[name] = float(released.std()) / (sigma * options.max_grad_norm / options.batch_size)
    return {
        "train": trained,
        "steps": steps if every_step else 1,
        "batch_sizes": [len(batch) for batch in batches],
        "trained_parameters": len(ours.start),
        "same_start": bool(torch.equal(ours.start, theirs.start)),
        "first_gradient": _distance(ours.gradient, theirs.gradient),
        "update": _distance(ours.end - ours.start, theirs.end - theirs.start),
        "update_without_key_biases": _distance(*((r.end - r.start)[matters] for r in (ours, theirs))),
        "noise_multiplier": sigma,
        "noise_over_sigma_c_by_b": noise,
        "learning_rate": options.learning_rate,
        "max_grad_norm": options.max_grad_norm,
        "versions": {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", *LIBRARIES)},
    }


def _matters(options: argparse.Namespace) -> Tensor:
    """Which trained weights are no biases of keys. Attention ignores those: they move all scores of a query alike.

    Their gradient is rounding, and AdamW makes steps of full length of it.
    """
    model = minilm_imdb.classifier(options.data, options.train)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.cat([torch.full((p.numel(),), not name.endswith("key.bias")) for name, p in named])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / ours.norm())


def main() -> int:
    from tests.dpcore.minilm_series import RECORDS, tune

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="as minilm_series has it")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    native.build()  # as the series has it
    rates = tune(options.data, RECORDS / "tuning", [])
    (RECORDS / "agreement").mkdir(exist_ok=True)
    for kind in options.kinds:
        found = compare(kind, ["--data", str(options.data), "--test", "1", "--learning-rate", repr(rates[kind])])
        (RECORDS / "agreement" / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
