"""Engines of several processes: each sums the clipped gradients of its own examples, and all release one sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpcore.distributed import Ranks, fingerprint
from dpcore.engine.checks import length_of
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.noise import GaussianNoise
from dpcore.reduction import Reduction
from dpcore.release import Release
from dpcore.same_weights import SameWeights
from dpcore.tree import flatten


class Together:
    """The ranks that hold copies or shards of an engine's model, each with examples of its own of every batch.

    Behind the sums of a step the ranks compare what decides about its release.
    """

    def __init__(self, ranks: Ranks, reduction: Reduction, noise: GaussianNoise, trained: list[Any]) -> None:
        self.ranks, self._reduction = ranks, reduction
        self._shares_differ = self._are_waiting = False
        self._same_weights = SameWeights()
        ranks.agree({"the trained parameters": trained, "the kind of the noise": type(noise).__name__})
        if noise.has_addresses:
            ranks.join_seed(noise)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within, a rank does its own part, behind which the others :meth:`meet` it; where it fails, they are told."""
        # Ranks with shards exchange tensors on the way, and would take this word for another.
        self._are_waiting = not self._reduction.shards
        try:
            yield
        except BaseException:
            with suppress(PrivacyError):  # of the other ranks: what has happened here says more
                self._tell(False)
            raise

    def meet(self) -> None:
        """Wait for the other ranks. PrivacyError, on all of them, where one has failed in its part."""
        self._tell(True)

    def _tell(self, is_well: bool) -> None:
        if not self._are_waiting:
            return
        self._are_waiting = False
        everyone = self.ranks.stacked(torch.tensor(int(is_well), device=self.ranks.device))
        if failed := [rank for rank, well in enumerate(everyone.tolist()) if not well]:
            raise PrivacyError(
                f"The step failed on rank {failed[0]}, which says why: nothing was released, on no rank. Where all "
                "ranks go on with their next batches, the next step has the number and the noise of this one."
            )

    def finish(self, engine: Any, release: Release, batch: Any) -> None:
        """Add up the sums of all ranks, with noise, of which each draws its share.

        Raises:
            PrivacyError: a rank has other settings, another step or other weights, has the same batch as another one,
                has failed, or does not come.
        """
        self.meet()
        noise, optimizer = engine.noise, engine.optimizer
        groups = [{n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups] if optimizer else None
        self._same_weights.agree(
            {
                "the number of steps": engine.steps,
                "noise_multiplier": (engine.noise_multiplier, release.std),
                "max_grad_norm": engine.accumulator.bounds,
                "expected_batch_size": engine.expected_batch_size,
                "group": engine.group,
                "the noise": (noise.version, noise.rank, noise.seed if noise.has_addresses else None),
                "the optimizer's settings": groups,
            },
            self.ranks,
            self._reduction,
            engine.model.parameters(),
            optimizer,
        )
        if not self._shares_differ:
            self._check_shares(batch)
        self._reduction.finish(release, engine.accumulator)

    def _check_shares(self, batch: Any) -> None:
        """PrivacyError where two ranks have the same examples; one alone may well be equal to another one.

        So they are looked at until all ranks have had several at once.
        """
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
        mine = fingerprint(tensors) if length_of(batch[0]) > 1 else None
        everyone = self.ranks.gather(mine)
        found = [other for other in everyone if other is not None]
        if len({*found}) < len(found):
            raise PrivacyError(
                "Two ranks have the same batch, so that an example would move the sum by twice max_grad_norm. Give "
                "each rank its share of one draw: DPDataLoader(data, sample_rate=q, seed=s, distributed=True, "
                'shares="dealt"), with one seed s on all of them (model.ranks.share_seed(None)).'
            )
        self._shares_differ = len(found) == len(everyone)


def with_whole_parameters(model: nn.Module) -> nn.Module:
    """Return ``model``, or where it is sharded a module around it that has whole parameters.

    UnsupportedError where its layers are split (tensor parallelism).
    """
    if not any(hasattr(param, "device_mesh") for param in model.parameters()):
        return model
    from dpcore.sharded_module import FSDPModule, ShardedModule  # slow to import, and nothing is sharded before it was

    if not any(isinstance(part, FSDPModule) for part in model.modules()):
        raise UnsupportedError(
            "The model's layers are split (parallelize_module), of which Engine has no sums; hand the module to "
            "PrivacyEngine.make_private, or give Engine a model in shards (fully_shard) or whole in "
            "dpcore.distributed.DifferentiallyPrivateDistributedDataParallel."
        )
    return ShardedModule(model)
