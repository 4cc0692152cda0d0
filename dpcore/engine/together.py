"""Engines of several processes: each sums the clipped gradients of its own examples, and all release one sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpcore.distributed import Ranks, fingerprint, ranks_of
from dpcore.engine.checks import length_of
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.noise import GaussianNoise
from dpcore.reduction import Replicated
from dpcore.release import Release
from dpcore.tree import flatten


class Together:
    """The ranks that hold copies of an engine's model, each with examples of its own of every batch.

    Nothing is exchanged before the sums of a step are there; then the ranks compare what decides about its release.
    """

    def __init__(self, ranks: Ranks, noise: GaussianNoise, trained: list[Any]) -> None:
        self._ranks = ranks
        self._reduction = Replicated(ranks)
        self._begun = self._shares_differ = False
        ranks.agree({"the trained parameters": trained, "the kind of the noise": type(noise).__name__})
        if noise.has_addresses:
            ranks.join_seed(noise)

    def finish(self, engine: Any, release: Release, batch: Any) -> None:
        """Add up the sums of all ranks, with noise, of which each draws its share.

        Raises:
            PrivacyError: a rank has other settings, another step or other weights, has the same batch as another one,
                or does not come.
        """
        noise, optimizer = engine.noise, engine.optimizer
        groups = [{n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups] if optimizer else None
        self._ranks.agree(
            {
                "the number of steps": engine.steps,
                "noise_multiplier": (engine.noise_multiplier, release.std),
                "max_grad_norm": engine.accumulator.bounds,
                "expected_batch_size": engine.expected_batch_size,
                "group": engine.group,
                "the noise": (noise.version, noise.rank, noise.seed if noise.has_addresses else None),
                "the optimizer's settings": groups,
                "the weights": None if self._begun else fingerprint(engine.model.parameters()),
            }
        )
        if not self._shares_differ:
            self._check_shares(batch)
        self._begun = True
        self._reduction.finish(release, engine.accumulator)

    def _check_shares(self, batch: Any) -> None:
        """PrivacyError where two ranks have the same examples; one alone may well be equal to another one.

        So they are looked at until all ranks have had several at once.
        """
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
        mine = fingerprint(tensors) if length_of(batch[0]) > 1 else None
        everyone = self._ranks.gather(mine)
        found = [other for other in everyone if other is not None]
        if len({*found}) < len(found):
            raise PrivacyError(
                "Two ranks have the same batch, so that an example would move the sum by twice max_grad_norm. Give "
                "each rank its share of one draw: DPDataLoader(data, sample_rate=q, seed=s, distributed=True, "
                'shares="dealt"), with one seed s on all of them (model.ranks.share_seed(None)).'
            )
        self._shares_differ = len(found) == len(everyone)


def together(model: nn.Module, noise: GaussianNoise, trained: list[Any]) -> Together | None:
    """Return the ranks that train ``model`` with this process; None for a model that trains alone.

    Raises:
        UnsupportedError: the model is sharded, or torch averages its gradients.
    """
    if any(hasattr(param, "device_mesh") for param in model.parameters()):
        raise UnsupportedError(
            "The model's parameters are sharded (fully_shard, parallelize_module), and Engine forms whole sums; hand "
            "the module to PrivacyEngine.make_private, whose sums stay in shards, or give Engine a whole model in "
            "dpcore.distributed.DifferentiallyPrivateDistributedDataParallel."
        )
    ranks = ranks_of(model)
    return None if ranks is None else Together(ranks, noise, trained)
