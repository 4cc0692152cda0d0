"""Batches of an epoch in which every example takes part once: balls in bins, and shuffled batches."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist

from dpcore.accountants.accountant import BINS, Rate
from dpcore.arguments import did_you_mean
from dpcore.errors import UnsupportedError, warn_caller
from dpcore.loading.uniform_sampler import UniformWithReplacementSampler, check_examples, check_joint

POISSON, TRUNCATED, SHUFFLE, CYCLE = "poisson", "truncated", "shuffle", "cycle"
CUT = (SHUFFLE, CYCLE)
"""Whose batches have one length."""
EPOCHS = (BINS, *CUT)
SAMPLINGS = (POISSON, TRUNCATED, *EPOCHS)
OFFERED = tuple(name for name in SAMPLINGS if name != CYCLE)
"""Those that a user may choose; a cycle comes with correlated noise."""
_REMEMBERED = 4096
"""Draws whose epochs are known; the ledger lets a step use one of 1024."""


def check_sampling(sampling: Any, max_batch_size: Any) -> str | None:
    """Return the name of a sampler; ValueError where there is none, or it does not go with the longest batch."""
    if sampling not in (None, *SAMPLINGS):
        raise ValueError(
            f"sampling is {sampling!r}; it must be one of {', '.join(map(repr, OFFERED))}."
            + (did_you_mean(sampling, OFFERED) if isinstance(sampling, str) else "")
        )
    if sampling == TRUNCATED and max_batch_size is None:
        raise ValueError("sampling='truncated' cuts Poisson batches; say to how many examples, by max_batch_size=.")
    if sampling == POISSON and max_batch_size is not None:
        raise ValueError(
            f"sampling='poisson' cuts no batch, and max_batch_size is {max_batch_size}; take sampling='truncated', or "
            "leave one of the two out."
        )
    if sampling in CUT and max_batch_size is not None:
        raise ValueError(
            f"max_batch_size is {max_batch_size}, and no batch of sampling={sampling!r} is longer than the others; "
            "leave it out, or take another sampling."
        )
    return sampling


def bins_for(sample_rate: float) -> int:
    """Return into how many bins an epoch is dealt at a sample rate."""
    return max(1, round(1 / sample_rate))


class EpochSampler(UniformWithReplacementSampler):
    """A sampler of the batches of epochs, which are dealt anew each time; batch k of its life is of epoch k // batches.

    An iteration that begins within an epoch begins the next one, unless it goes on where a state was saved.

    Args:
        num_samples: How many examples there are.
        kind: "bins": every example is put into one of the batches, uniformly and independently. "shuffle": the examples
            in random order are cut into batches. "cycle": so once, and every epoch has the same batches in one order.
        batches: Of an epoch.
        batch_size: Of shuffled batches; the last one may be shorter.
        seed: Up to 128 bits; None draws a secret one.
        secure: Whether to draw from the operating system's cryptographic generator instead of a seed.
        max_batch_size: The most examples of a bin; of a longer one so many are kept, at random.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        kind: str,
        batches: int,
        batch_size: int | None = None,
        seed: int | None = None,
        secure: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        rate = 1 / batches if batch_size is None else min(1.0, batch_size / num_samples)
        given: dict[str, Any] = {"seed": seed, "secure": secure, "max_batch_size": max_batch_size}
        super().__init__(num_samples=num_samples, sample_rate=rate, steps=batches, **given)
        self._kind, self.batch_size = kind, batch_size
        self._dealt: tuple[int, str, list[np.ndarray]] | None = None
        self._names: OrderedDict[int, str] = OrderedDict()
        self._begun: dict[str, None] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = {name: copy.copy(state[name]) for name in ("_names", "_begun")}
        super().__setstate__({**state, "_dealt": None, **shared})

    def load_state_dict(self, state: dict[str, str]) -> None:
        super().load_state_dict(state)
        self._dealt = None  # in secure mode what is left of an epoch is dealt anew, and counts as another one

    @property
    def kind(self) -> str:
        """Return "bins", "shuffle" or "cycle"."""
        return self._kind

    @property
    def source(self) -> tuple[str, int]:
        """How batches are drawn: the kind, and how many an epoch has."""
        return self.kind, self.steps

    @property
    def rate_of_epoch(self) -> Rate:
        """What an epoch counts for: of shuffled batches one step of all examples, for nobody is in two."""
        return (BINS, self.steps) if self.kind == BINS and self.steps > 1 else 1.0

    def begin(self) -> None:
        """Leave an epoch that was broken off, unless what is left of it is to come."""
        self.drawn = self.following(is_open=False)

    def following(self, is_open: bool) -> int:
        """Return the number of the next draw; ``is_open``: whether it is of an iteration that has begun."""
        goes_on = is_open or self._resumed is not None
        return self.drawn if goes_on else self.drawn + -self.drawn % self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.begin()
        yield from super().__iter__()

    def draw(self, k: int) -> list[int]:
        """Batch number ``k``; in secure mode of an epoch that was dealt before only while it is the newest."""
        epoch, place = divmod(k, self.steps)
        name = self.name_at(k)
        if self._dealt is None or (self._dealt[0] != epoch if self.secure else self._dealt[1] != name):
            self._dealt = epoch, name, self._deal(epoch)
        name = self._dealt[1]
        self._begun[name] = None
        self._names[k] = name
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)
        batch = self._dealt[2][place]
        if len(batch) > (kept := self._kept(len(batch))):
            if self.secure:
                return random.SystemRandom().sample(batch.tolist(), kept)
            batch = self._stream(epoch, 1 + place).permutation(batch)[:kept]
        return batch.tolist()

    def epoch_of(self, draw: int | None) -> str | None:
        """Return the name of the epoch of a draw; None where it is not known."""
        return None if draw is None else self._names.get(draw)

    @property
    def begun(self) -> list[str]:
        """The names of all epochs of which a batch was drawn here."""
        return list(self._begun)

    def name_at(self, k: int) -> str:
        """Return the name of the epoch of draw ``k``, by all that decides its deal; in secure mode a new one."""
        if self.secure:
            return secrets.token_hex(16)
        among = (self.kind, self.num_samples, self.steps, self.batch_size)
        return hashlib.sha256(repr((*among, self.seed, k // self.steps)).encode()).hexdigest()[:32]

    def _stream(self, epoch: int, what: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, epoch, what])))

    def _deal(self, epoch: int) -> list[np.ndarray]:
        """Return the examples of every batch of an epoch."""
        owned = np.arange(self.num_samples)
        epoch = 0 if self.kind == CYCLE else epoch
        if self.kind in CUT:
            assert self.batch_size is not None
            order = np.argsort(_system_numbers(len(owned))) if self.secure else self._stream(epoch).permutation(owned)
            return [order[t * self.batch_size : (t + 1) * self.batch_size] for t in range(self.steps)]
        bins = self._bins(epoch, len(owned))
        order = np.argsort(bins, kind="stable")
        return np.split(owned[order], np.cumsum(np.bincount(bins, minlength=self.steps))[:-1])

    def _bins(self, epoch: int, count: int) -> np.ndarray:
        """Return the bin of each of so many examples, uniform and independent."""
        if not self.secure:
            return self._stream(epoch).integers(self.steps, size=count)
        # Numbers beyond the last multiple would make the first bins likelier.
        most, numbers = 2**64 // self.steps * self.steps, _system_numbers(count)
        while most < 2**64 and (beyond := numbers >= np.uint64(most)).any():
            numbers[beyond] = _system_numbers(int(beyond.sum()))
        return (numbers % np.uint64(self.steps)).astype(np.int64)


class DealtCycle(EpochSampler):
    """One rank's part of a cycle: of each of its batches, as one process has it, positions rank, rank + ranks, ...

    All ranks must have the same seed and take the same batches, as steps of make_private compare. A copy, which has a
    seed of its own, takes of that one's batches the examples that its rank owns.

    Args:
        rank: This process.
        num_replicas: How many ranks there are.
        **options: As of :class:`EpochSampler`.

    Raises:
        ValueError: there is no seed.
    """

    def __init__(self, *, rank: int, num_replicas: int, **options: Any) -> None:
        check_joint(options.get("seed"))
        super().__init__(kind=CYCLE, **options)
        self.take(rank, num_replicas)
        self.is_joint = True
        """Whether the seed is that of all ranks."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "is_joint": False})

    @property
    def owners(self) -> int:
        return 0 if self.is_joint else self.num_replicas

    def take(self, rank: int, num_replicas: int) -> None:
        """Draw part ``rank`` of ``num_replicas`` from now on."""
        self.rank, self.num_replicas = rank, num_replicas

    def draw(self, k: int) -> list[int]:
        """This rank's part of batch number ``k``; an empty one where there are fewer examples than ranks."""
        batch = super().draw(k)
        if self.is_joint:
            return batch[self.rank :: self.num_replicas]
        return [i for i in batch if i % self.num_replicas == self.rank]


def _system_numbers(count: int) -> np.ndarray:
    return np.frombuffer(bytearray(os.urandom(8 * count)), dtype=np.uint64)


def epoch_sampler(
    kind: str, examples: int, sample_rate: float, *, shares: str | None, drop_last: bool, **drawn: Any
) -> EpochSampler:
    """Return the sampler for a sample rate; the length of shuffled batches is that times the number of examples.

    Args:
        kind: "bins", "shuffle" or "cycle".
        examples: How many there are.
        sample_rate: An example's chance to be in a batch.
        shares: What a rank's part of a batch is, "dealt" or "owned"; None for one process.
        drop_last: Whether a shuffled batch that is shorter is left out.
        **drawn: Seed, secure mode and the longest batch.

    Raises:
        UnsupportedError: several ranks, among which only a cycle is dealt.
        ValueError: no batch is whole.
    """
    if shares is not None and (kind, shares, drawn["secure"]) != (CYCLE, "dealt", False):
        raise UnsupportedError(
            f"sampling={kind!r} is for one process: each rank would deal epochs of its own, and none knows how many "
            "the others have begun. Leave it out: one Poisson batch is dealt out to all ranks."
        )
    if kind == BINS:
        if abs(1 / sample_rate - (bins := bins_for(sample_rate))) > 1e-6 * bins:
            warn_caller(
                f"sample_rate is {sample_rate:g}, and an epoch has a whole number of bins: it is dealt into {bins}, at "
                f"the rate {1 / bins:g}, and epsilon is that of these."
            )
        return EpochSampler(num_samples=examples, kind=kind, batches=bins, **drawn)
    check_examples(examples)
    size = max(1, round(sample_rate * examples))
    batches = examples // size if drop_last else math.ceil(examples / size)
    if not batches:
        raise ValueError(f"No batch of {size} can be made of {examples} examples; choose a smaller batch size.")
    drawn |= {"num_samples": examples, "batches": batches, "batch_size": size}
    if shares is None:
        return EpochSampler(kind=kind, **drawn)
    return DealtCycle(rank=dist.get_rank(), num_replicas=dist.get_world_size(), **drawn)
