"""From the clipped sums of ranks to the one that is released: one process, copies of a model, shards, copies of shards.

A rank holds the whole model, or shards of it. In the first case its sums are whole too, and are added up over the ranks
once, at the end of a logical batch. In the second no rank ever holds the whole of them: those of one piece are formed
unit by unit, and every unit's are added up and dealt out before the next ones are formed (:class:`Sharded`,
:mod:`dpcore.microbatch.sharded_sums`). Ranks that compute with their parts (:class:`Parallel`) have nothing to add up,
but with those that compute with the same parts on other examples. In each case a rank draws its part of one stream of
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.distributed import Ranks, fingerprint
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.gathering import Batch, Gathering
from dpcore.noise import SecureNoise
from dpcore.release import Release, Sums


class Reduction:
    """One process alone: what it has is all."""

    shards: Mapping[Parameter, Any] = MappingProxyType({})
    """The parameter that the optimizer steps in the place of one that a pass uses, where it is another."""
    gathering: Gathering | None = None
    """Where parameters that a pass uses are there only while their layers compute."""
    holds_others = False
    """Whether ranks hold different numbers of every parameter, which cannot be compared."""

    def finish(self, release: Release, sums: Sums) -> None:
        """Add up the sums of all ranks, with noise."""
        release.add(sums)

    def alike(self, params: Iterable[Parameter]) -> Iterable[Parameter]:
        """Return those of ``params`` whose numbers are the same on all ranks."""
        return params

    def check_weights(self, params: Iterable[Parameter]) -> None:
        """PrivacyError where ranks that hold the same parts of ``params`` have other numbers; all ranks call this."""

    def keep(self, asked: bool | None, batch: Batch) -> None:
        """Keep what is gathered between the pieces of a ``batch``, where that is ``asked`` for (None: if it fits)."""
        if self.gathering is not None:
            self.gathering.kept.asked, self.gathering.kept.batch = asked, batch

    def explained(self, sums: Any) -> str:
        """Return what ranks in shards exchange; empty for others."""
        return "" if self.gathering is None else self.gathering.kept.explained(sums.piece_bytes)


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


class InParts(Reduction):
    """Ranks that hold parts of parameters."""

    def __init__(self, shards: Mapping[Parameter, Any], ranks: Ranks) -> None:
        self.shards, self.ranks = shards, ranks
        self._released: dict[Any, tuple[Any, int]] = {}

    def _check_addresses(self, release: Release) -> None:
        if not (release.noise.has_addresses or isinstance(release.noise, SecureNoise)):
            raise UnsupportedError(
                "The noise has no addresses (a checkpoint of a dpcore before counters goes on with it, or a subclass "
                "draws by itself), so that every shard would get the same numbers. Go on with a whole model in "
                "DifferentiallyPrivateDistributedDataParallel, or begin the run anew."
            )

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


class ModuleInParts(nn.Module):
    """The user's ``module``, around which stand the parameters that a pass uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.shards: Mapping[Any, Any] = {}
        """The sharded parameter of each that stands in its place in the module while it is gathered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Sharded(InParts):
    """Ranks that hold a shard of every parameter each, as ``fully_shard`` deals them out.

    Args:
        shards: The sharded parameter of every whole one.
        units: By the module that gathers them, the whole parameters that are gathered together, in the order of the
            forward pass.
        ranks: Those that hold all shards together.
        everyone: All that train the model.
        replicas: Those that hold the same shards, where there are several.
    """

    gathering: Gathering
    holds_others = True

    def __init__(
        self,
        shards: Mapping[Parameter, Any],
        units: Mapping[Any, Sequence[Parameter]],
        ranks: Ranks,
        everyone: Ranks,
        replicas: Ranks | None = None,
    ) -> None:
        super().__init__(shards, ranks)
        self.units, self.gathering = [*units.values()], Gathering(shards, units, True, everyone)
        self.everyone, self.replicas = everyone, replicas
        self._of_replicas = Reduction() if replicas is None else Replicated(replicas)

    def finish(self, release: Release, sums: Sums) -> None:
        """Add the noise of the shards' own addresses; the sums of the ranks that hold other shards are in them."""
        self._check_addresses(release)
        self.gathering.kept.note_release()
        self._of_replicas.finish(release, sums)

    def alike(self, params: Iterable[Parameter]) -> Iterable[Parameter]:
        return ()

    def check_weights(self, params: Iterable[Parameter]) -> None:
        if self.replicas is not None:
            shards = [self.shards.get(param, param).to_local() for param in params]
            self.replicas.agree({"the weights": fingerprint(shards)}, everyone=self.everyone)

    def begin_scatter(self, chunks: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to add up ``chunks`` [ranks, n] over the ranks, all of which call this.

        Returns:
            This rank's [n], and what waits until it is there; ``chunks`` must stay until then.
        """
        return self.ranks.begin_scatter(chunks)


class SumsInParts(Sums, Protocol):
    """Sums some of which are to be the same on all ranks."""

    def whole(self) -> dict[Parameter, Tensor]:
        """Return views of ``flat``: what every rank holds, of parameters that are not in parts."""
        ...


class Parallel(InParts):
    """Ranks that hold a part of every layer each, and work on the same examples.

    Args:
        shards: The parameter in parts of every one that is used in its place.
        split: The parameters of which the ranks hold different parts.
        of_first: Those that the first rank alone uses and sums.
        everyone: All ranks. Their parts are those that hold all parts together, and their copies, where there are any,
            those that train the same parts on other examples.
    """

    def __init__(
        self,
        shards: Mapping[Parameter, Any],
        split: set[Parameter],
        of_first: set[Parameter],
        everyone: Ranks,
    ) -> None:
        assert everyone.parts is not None
        super().__init__(shards, everyone.parts)
        self.split, self.of_first, self.everyone = split, of_first, everyone
        self._of_copies = Reduction() if everyone.copies is None else Replicated(everyone.copies)

    def alike(self, params: Iterable[Parameter]) -> Iterable[Parameter]:
        return [param for param in params if param not in self.split]

    def check_weights(self, params: Iterable[Parameter]) -> None:
        if self.everyone.copies is not None:
            self.everyone.copies.agree({"the weights": fingerprint(params)}, everyone=self.everyone)

    def finish(self, release: Release, sums: SumsInParts) -> None:  # type: ignore[override]
        """Add the noise of the parts' own addresses; what all ranks hold is released by the first one, to the bit."""
        self._check_addresses(release)
        whole = sums.whole()
        used = [summed for param, summed in whole.items() if param not in self.of_first]
        apart = [(part - first).norm() > 0.1 * first.norm() for part, first in self._with_first(used)]
        if self.everyone.largest(int(any(apart))):
            raise PrivacyError(
                "The ranks have different sums of a parameter that each of them holds whole: it is used on activations "
                "of which each rank has a part (a norm within attention heads). Freeze it, or leave that layer whole."
            )
        self._of_copies.finish(release, sums)
        for part, first in self._with_first([*whole.values()]):
            part.copy_(first)

    def _with_first(self, whole: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return every part with that of the first rank."""
        if not whole:
            return []
        joined = torch.cat([part.view(-1) for part in whole])
        self.ranks.take_first_(joined)
        firsts = joined.split([part.numel() for part in whole])
        return [(part, first.view_as(part)) for part, first in zip(whole, firsts, strict=True)]


class ParallelSharded(Parallel):
    """Ranks that hold shards of their parts: those that work on other examples hold the others.

    ``units``: as of :class:`Sharded`.
    """

    gathering: Gathering

    def __init__(
        self,
        shards: Mapping[Parameter, Any],
        split: set[Parameter],
        of_first: set[Parameter],
        everyone: Ranks,
        units: Mapping[Any, Sequence[Parameter]],
    ) -> None:
        super().__init__(shards, split, of_first, everyone)
        assert everyone.copies is not None
        self.units, self.gathering = [*units.values()], Gathering(shards, units, False, everyone)
        self.of_shards = everyone.copies
        self._of_copies = Reduction()  # whose sums are in the shards

    def finish(self, release: Release, sums: SumsInParts) -> None:  # type: ignore[override]
        self.gathering.kept.note_release()
        super().finish(release, sums)

    def alike(self, params: Iterable[Parameter]) -> Iterable[Parameter]:
        return ()

    def check_weights(self, params: Iterable[Parameter]) -> None:
        whole = [self.shards[param].to_local() for param in params if param not in self.split]
        self.ranks.agree({"the weights": fingerprint(whole)}, everyone=self.everyone)

    def begin_scatter(self, chunks: Tensor) -> tuple[Tensor, Callable[[], None]]:
        return self.of_shards.begin_scatter(chunks)


def check_keeps(asked: bool | None, reduction: Reduction) -> None:
    """ValueError where ``keep_gathered`` is no choice, or there is nothing to choose."""
    if asked not in (None, True, False):
        raise ValueError(f"keep_gathered is {asked!r}; it must be True, False or None (by free memory).")
    if asked is not None and reduction.gathering is None:
        raise ValueError(
            f"keep_gathered is {asked!r}, and the module is not in shards, which alone are gathered; leave it out, or "
            "apply fully_shard to the module before."
        )


def reduction_of(module: nn.Module, ranks: Ranks | None) -> Reduction:
    """Return how the clipped sums of ``module`` become one, whose training ``ranks`` share."""
    own = getattr(module, "reduction", None)
    if isinstance(own, Reduction):
        return own
    return Reduction() if ranks is None else Replicated(ranks)
