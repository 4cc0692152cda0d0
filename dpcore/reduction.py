"""From the clipped sums of ranks to the one that is released: one process, copies of a model, shards, copies of shards.

A rank holds the whole model, or shards of it. In the first case its sums are whole too, and are added up over the ranks
once, at the end of a logical batch. In the second no rank ever holds the whole of them: those of one piece are formed
unit by unit, and every unit's are added up and dealt out before the next ones are formed (:class:`Sharded`,
:mod:`dpcore.microbatch.sharded_sums`). Either way each rank draws its part of one stream of noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.noise import SecureNoise
from dpcore.release import Release, Sums


class Reduction:
    """One process alone: what it has is all."""

    def finish(self, release: Release, sums: Sums) -> None:
        """Add up the sums of all ranks, with noise."""
        release.add(sums)


class Replicated(Reduction):
    """``ranks`` that hold the same parameters, whole or in the same shards, and the sums of their own examples."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def finish(self, release: Release, sums: Sums) -> None:
        """Add up the sums of all ranks, with noise: each rank draws a share of it, where its numbers have addresses."""
        ranks, flat = self.ranks, sums.flat
        if isinstance(release.noise, SecureNoise):
            # Its release lies on a grid, which another rank's sum would undo: so the noise comes after the sums, and
            # the second reduction, to which the other ranks add zeros, hands it out.
            ranks.sum_(flat)
            if ranks.rank:
                flat.zero_()
        if release.noise.has_addresses:
            release.add_share(sums, ranks.rank, ranks.size)
        elif ranks.rank == 0:
            release.add(sums)
        ranks.sum_(flat)


class Sharded(Reduction):
    """Ranks that hold a shard of every parameter each, as ``fully_shard`` deals them out.

    Args:
        shards: The sharded parameter of every whole one.
        units: The whole parameters that are gathered together, in the order of the forward pass.
        ranks: Those that hold all shards together.
        replicas: Those that hold the same shards, where there are several.
    """

    def __init__(
        self,
        shards: Mapping[Parameter, Any],
        units: Sequence[Sequence[Parameter]],
        ranks: Ranks,
        replicas: Ranks | None = None,
    ) -> None:
        self.shards, self.units, self.ranks = shards, units, ranks
        self._of_replicas = Reduction() if replicas is None else Replicated(replicas)
        self._released: dict[Any, tuple[Any, int]] = {}

    def finish(self, release: Release, sums: Sums) -> None:
        """Add the noise of the shards' own addresses; the sums of the ranks that hold other shards are in them."""
        if not (release.noise.has_addresses or isinstance(release.noise, SecureNoise)):
            raise UnsupportedError(
                "The noise has no addresses (a checkpoint of a dpcore before counters goes on with it, or a subclass "
                "draws by itself), so that every shard would get the same numbers. Go on with a whole model in "
                "DifferentiallyPrivateDistributedDataParallel, or begin the run anew."
            )
        self._of_replicas.finish(release, sums)

    def begin_scatter(self, chunks: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to add up ``chunks`` [ranks, n] over the ranks, all of which call this.

        Returns:
            This rank's [n], and what waits until it is there; ``chunks`` must stay until then.
        """
        return self.ranks.begin_scatter(chunks)

    def note_released(self) -> None:
        """Take what lies in the shards' gradients for what was released: a later change is none of a step's."""
        grads = {shard: shard.grad for shard in self.shards.values()}
        self._released = {s: (grad, grad.to_local()._version) for s, grad in grads.items() if grad is not None}

    def check_no_ordinary_gradient(self) -> None:
        """PrivacyError where torch has put an ordinary gradient into a shard since the last step."""
        for shard in self.shards.values():
            grad, version = self._released.get(shard, (None, 0))
            if shard.grad is not None and (shard.grad is not grad or shard.grad.to_local()._version != version):
                raise PrivacyError(
                    f"A sharded parameter of shape {tuple(shard.shape)} has an ordinary, unclipped gradient: it is "
                    "used by an operation that dpcore has no rule for. Wrap that operation in a module of a kind that "
                    "dpcore knows, or freeze the parameter."
                )


def reduction_of(module: nn.Module, ranks: Ranks | None) -> Reduction:
    """Return how the clipped sums of ``module`` become one, whose training ``ranks`` share."""
    own = getattr(module, "reduction", None)
    if isinstance(own, Reduction):
        return own
    return Reduction() if ranks is None else Replicated(ranks)
