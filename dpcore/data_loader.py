"""Data loaders whose batches are Poisson samples, or those of epochs that are dealt into bins or shuffled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dpcore.arguments import check_number, number_of
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.loading.checks import check_whole
from dpcore.loading.counting_loader import CountingDataLoader
from dpcore.loading.epoch_sampler import CUT, EPOCHS, EpochSampler, check_sampling, epoch_sampler
from dpcore.loading.ledger import Source
from dpcore.loading.rounds import Round, Rounds
from dpcore.loading.uniform_sampler import (
    DealtUniformWithReplacementSampler,
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    drawn_seed,
    steps_per_epoch,
)
from dpcore.loading.units import rows_per_unit
from dpcore.tree import has_tensor, opened

RAND_ON_EMPTY = (
    "rand_on_empty is not needed and is ignored: an empty batch keeps its structure and has length 0. A random example "
    "in its place would let one example move the sum by twice max_grad_norm."
)

STREAMS = "deal a stream into bins by dpcore.bins_of_stream, in a loop over an Engine"


def emptied(one: Any, two: Any) -> Any:
    """The batch without examples that belongs to batches of one example and of two equal ones.

    Tensors and lists have length 0 where one batch is longer than the other, numbers are what they would be, and
    whatever is the same in both stays: constants, names of classes.
    """
    if isinstance(one, Tensor | np.ndarray):
        return _shortened(one, two)
    if isinstance(one, int) and not isinstance(one, bool):
        return 2 * one - two
    if isinstance(one, list | tuple):
        parts = map(emptied, one, two) if len(one) == len(two) else ()
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)  # type: ignore[arg-type]
    shell, others = opened(one), opened(two)
    if shell is not None and others is not None:
        return shell[0].around([emptied(*pair) for pair in zip(shell[1], others[1], strict=True)])
    if hasattr(one, "__dict__") and has_tensor(list(vars(one).values())):
        made = copy.copy(one)
        vars(made).update({name: emptied(value, vars(two)[name]) for name, value in vars(one).items()})
        return made
    return one


def _shortened(one: Any, two: Any) -> Any:
    """A tensor or an array of length 0 in the dimension in which they differ; of counts, what they would be."""
    if one.shape != two.shape:
        along = next(d for d in range(one.ndim) if one.shape[d] != two.shape[d])
        return one[(slice(None),) * along + (slice(0),)]
    counts = isinstance(one, Tensor) and not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool)
    return (2 * one - two).clamp(min=0) if counts else one


def _batches(loader: DataLoader[Any]) -> int:
    """Return the number of batches of a loader, one of which a step takes; ValueError where there are none."""
    examples = len(loader.dataset)  # type: ignore[arg-type]
    if not len(loader) and examples:
        raise ValueError(
            f"The loader has no batch: batch_size is {loader.batch_size} for {examples} examples, and drop_last=True "
            f"drops them. Choose a batch_size of at most {examples}, or pass sample_rate and expected_batch_size."
        )
    if loader.batch_size is not None and loader.batch_size > examples:
        warn_caller(
            f"batch_size is {loader.batch_size} for {number_of(examples, 'example')}: every batch has all of them, at "
            f"the sample rate 1, and sampling amplifies nothing. Choose a batch_size below {examples}."
        )
    return len(loader)


def _check_kind(loader: DataLoader[Any], sampling: str | None, most: int | None) -> None:
    """Refuse a name of no sampler, and another one than that of a loader which draws its batches already."""
    check_sampling(sampling, getattr(loader.batch_sampler, "max_batch_size", None) if most is None else most)
    own = getattr(loader, "kind", None)
    if None not in (own, sampling) and own != sampling and {own, sampling} & {*EPOCHS}:
        raise ValueError(
            f"sampling is {sampling!r}, and the loader draws its batches already, by sampling={own!r}; give it to one "
            "of them only, the loader."
        )


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say who reads the examples, for another loader over the same data."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    return {name: getattr(loader, name) for name in (*names, "persistent_workers")}


class _Collate:
    """``collate`` that also knows an empty batch: what batches of the first example, once and twice, tell of it."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self.collate = collate
        self.dataset = dataset

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self.collate(examples)
        data: Any = self.dataset
        first = [data[0]] if rows_per_unit(data) is None else data.__getitems__([0])
        return emptied(self.collate(first), self.collate([*first, *first]))


def _sampler(
    sampling: str | None,
    examples: int,
    *,
    shares: str | None,
    steps: int | None,
    max_batch_size: int | None,
    drop_last: bool,
    **drawn: Any,
) -> UniformWithReplacementSampler:
    """Return the sampler; ``shares``: what a rank's part of a batch is, None for one process."""
    if sampling not in EPOCHS:
        drawn |= {"steps": steps}
        if shares is None:
            return UniformWithReplacementSampler(num_samples=examples, max_batch_size=max_batch_size, **drawn)
        return _sampler_of_ranks(shares, max_batch_size, total_size=examples, **drawn)
    if steps is not None:
        raise ValueError(f"steps is {steps}, and a round of sampling={sampling!r} is one epoch; leave it out.")
    rate = check_number("sample_rate", drawn.pop("sample_rate"), lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
    drawn |= {"shares": shares, "drop_last": drop_last, "max_batch_size": max_batch_size}
    return epoch_sampler(sampling, examples, rate, **drawn)


def _sampler_of_ranks(
    shares: str, max_batch_size: int | None, secure: bool, **drawn: Any
) -> UniformWithReplacementSampler:
    if shares not in ("owned", "dealt"):
        raise ValueError(f"shares is {shares!r}; it must be 'owned' or 'dealt'.")
    if shares == "dealt" and not secure:
        return DealtUniformWithReplacementSampler(max_batch_size=max_batch_size, **drawn)
    _check_own_part(max_batch_size)
    return DistributedUniformWithReplacementSampler(secure=secure, **drawn)


def _check_own_part(max_batch_size: int | None) -> None:
    if max_batch_size is not None:
        raise UnsupportedError(
            "max_batch_size is for one process, or for ranks among which one batch is dealt: here each draws its own "
            "part, and none knows how long the batch is. Leave it out; max_physical_batch_size bounds what a rank has "
            "in work at once."
        )


def _check_built(loader: DPDataLoader, distributed: bool, secure: bool) -> None:
    """Refuse a loader that was built for another number of ranks, or with a seed for secure mode."""
    if loader.distributed != distributed:
        raise PrivacyError(
            f"The loader was built with distributed={loader.distributed} for a module that is trained by "
            f"{'several ranks' if distributed else 'one process'}; every example would be drawn at another "
            f"rate than the accountant counts. Build it with distributed={distributed}."
        )
    if secure and not loader.sampler_state.secure:
        raise PrivacyError(
            "secure_mode draws batches from the operating system's generator, but this DPDataLoader draws them "
            "from a seed, and whoever knows it knows which examples were in each batch. Build it with "
            "secure=True."
        )


def _check_numbered(dataset: Any, sampling: str | None) -> None:
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"sampling={sampling or 'poisson'!r} draws examples by number, and the loader's data set is an "
            f"IterableDataset, which has none; use a map-style data set (with __len__ and __getitem__), {STREAMS}, or "
            "pass poisson_sampling=False, a sample_rate that bounds every example's chance, and expected_batch_size."
        )


def _check_own_draws(
    sampler: UniformWithReplacementSampler, size: int, sample_rate: float | None, distributed: bool, secure: bool
) -> None:
    """Refuse a sampler of the loader's own that draws otherwise than the run is to."""
    rate = sampler.sample_rate
    if distributed or sampler.num_samples != size or sample_rate not in (None, rate) or secure > sampler.secure:
        how = "securely" if sampler.secure else "by a seed"
        raise UnsupportedError(
            f"The loader's {type(sampler).__name__} draws from {sampler.num_samples} of {size} examples at the "
            f"rate {rate:.6g} in one process, {how}, and this run is to draw otherwise. Pass a loader with a batch "
            "size and no batch_sampler, and the rate as sample_rate=."
        )


class DPDataLoader(CountingDataLoader):
    """A loader of Poisson samples of a data set, ceil(1 / sample_rate) a round, or as ``sampling`` says.

    Batches may be empty; they then have the structure of the others and length 0.

    Args:
        dataset: A map-style data set; with ``distributed`` the whole data, on all ranks.
        sample_rate: The chance of each example to be in a batch; a public number, in (0, 1].
        collate_fn: As torch's; it must take a list of examples.
        seed: Makes the batches reproducible; None draws a secret one, as a release needs.
        secure: Whether to draw from the operating system's cryptographic generator instead of a seed.
        steps: Batches a round, where not ceil(1 / sample_rate).
        distributed: Whether every rank of the process group draws its own part of each batch; ``sample_rate`` is then
            an example's chance to be in the union.
        shares: What a rank's part is. "dealt": positions r, r + ranks, ... of the batch that one process would
            draw; the seed must be the same on all ranks (make_private sees to it), and each must hold the whole data.
            "owned": the rank draws among the examples r, r + ranks, ... of the data, which no other rank has to hold;
            so does a ``secure`` loader.
        generator: Draws the seed, in place of ``seed``.
        max_batch_size: The most examples of a batch (truncated Poisson sampling); of a longer one so many are kept, at
            random. The accountant must know of it, as it does from make_private: see docs/privacy.md.
        sampling: "poisson", or "truncated" where ``max_batch_size`` is needed; None: by whether that is given. "bins":
            every round puts each example into one of round(1 / sample_rate) batches, uniformly and independently.
            "shuffle": every round cuts the examples, in random order, into batches of sample_rate times their number.
            Epsilon is another one for each: count rounds by hand by ``accountant.count_epochs``, shuffled ones as one
            step at the rate 1 each.
        drop_last: Whether a shuffled batch that is shorter than the others is left out.
        **options: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ValueError: the data set has no length, or a number is out of its range.
        UnsupportedError: there is a longest batch for ranks each of which knows its own part alone.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
        secure: bool = False,
        steps: int | None = None,
        distributed: bool = False,
        shares: str = "owned",
        generator: torch.Generator | None = None,
        max_batch_size: int | None = None,
        sampling: str | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"sampling={sampling or 'poisson'!r} draws examples by number, and this data set has no length; use a "
                f"map-style data set, or {STREAMS}."
            )
        if generator is not None:
            seed = drawn_seed(generator)
        check_sampling(sampling, max_batch_size)
        self.rounds = Rounds()
        self._newest: int | None = None
        """The number of the draw of the newest batch, None where it is not known."""
        self.distributed = distributed
        drawn: dict[str, Any] = {"sample_rate": sample_rate, "seed": seed, "secure": secure, "steps": steps}
        drawn |= {"max_batch_size": max_batch_size, "drop_last": drop_last}
        sampler = _sampler(sampling, len(dataset), shares=shares if distributed else None, **drawn)
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=_Collate(collate_fn or default_collate, dataset),
            # Of its own: a loader that draws its workers' seeds from the global random numbers would shift those of
            # dropout when a resumed run begins to iterate anew.
            generator=torch.Generator().manual_seed(sampler.seed % 2**63),
            **options,
        )

    @classmethod
    def from_data_loader(
        cls,
        loader: DataLoader[Any],
        *,
        sample_rate: float | None = None,
        seed: int | None = None,
        secure: bool = False,
        distributed: bool = False,
        shares: str = "owned",
        generator: torch.Generator | None = None,
        rand_on_empty: bool = False,
        max_batch_size: int | None = None,
        sampling: str | None = None,
    ) -> DPDataLoader:
        """Return the Poisson counterpart of an ordinary loader.

        Args:
            loader: A torch loader over its whole data set; a DPDataLoader is returned as it is.
            sample_rate: The chance of each example to be in a batch. None: 1 / len(loader),
                which tells how many examples there are.
            seed: Makes the batches reproducible; None: the generator draws it, or else it is secret.
            secure: Whether to draw from the operating system's cryptographic generator.
            distributed: Whether every rank draws its own part of each batch.
            shares: "dealt" or "owned"; a DPDataLoader keeps its own.
            generator: Draws the seed, in place of ``seed``; None: that of ``loader``, where it has one and neither
                ``seed`` nor ``secure`` says otherwise.
            rand_on_empty: Accepted for compatibility and ignored, with a warning: an empty batch stays one.
            max_batch_size: The most examples of a batch; a loader whose batches are drawn already keeps its own.
            sampling: As of the class; None: as a DPDataLoader does. Shuffled batches are as long as the loader's.

        Raises:
            UnsupportedError: the loader's sampler chooses examples, which would be lost, or its data set is iterable.
            PrivacyError: a DPDataLoader was built for another number of ranks, or with a seed in secure mode.
        """
        if rand_on_empty:
            warn_caller(RAND_ON_EMPTY)
        drawn = loader.batch_sampler
        if max_batch_size not in (None, own := getattr(drawn, "max_batch_size", max_batch_size)):
            raise ValueError(
                f"max_batch_size is {max_batch_size}, and the loader draws its batches already, with "
                f"max_batch_size={own}; give it to one of them only, the loader."
            )
        _check_kind(loader, sampling, max_batch_size)
        is_drawn = sampling not in EPOCHS and not isinstance(loader, DPDataLoader)
        if is_drawn and type(drawn) is UniformWithReplacementSampler:
            return cls._drawn_by(loader, drawn, sample_rate, distributed, secure)
        if isinstance(loader, DPDataLoader):
            _check_built(loader, distributed, secure)
            return loader
        _check_numbered(loader.dataset, sampling)
        check_whole(loader, distributed)
        if sample_rate is None:
            # Shuffled batches have the loader's length, Poisson batches and bins make as many batches as it has.
            sample_rate = 1 / max(_batches(loader), 1)
            if sampling in CUT:
                length: int = getattr(drawn, "batch_size", 1)
                sample_rate = min(1.0, length / max(len(loader.dataset), 1))  # type: ignore[arg-type]
        if generator is None and seed is None and not secure:
            generator = loader.generator
        return cls(
            loader.dataset,
            sample_rate=sample_rate,
            collate_fn=loader.collate_fn,
            seed=seed,
            secure=secure,
            distributed=distributed,
            shares=shares,
            generator=generator,
            max_batch_size=max_batch_size,
            sampling=sampling,
            drop_last=sampling in CUT and bool(getattr(loader.batch_sampler, "drop_last", False)),
            **worker_options(loader),
        )

    @classmethod
    def _drawn_by(
        cls,
        loader: DataLoader[Any],
        sampler: UniformWithReplacementSampler,
        sample_rate: float | None,
        distributed: bool,
        secure: bool,
    ) -> DPDataLoader:
        """Return the private loader of one whose batches are Poisson samples already: the same batches."""
        size = len(loader.dataset)  # type: ignore[arg-type]
        rate = sampler.sample_rate
        _check_own_draws(sampler, size, sample_rate, distributed, secure)
        options: dict[str, Any] = worker_options(loader)
        made = cls(loader.dataset, sample_rate=rate, collate_fn=loader.collate_fn, seed=sampler.seed, **options)
        vars(made)["batch_sampler"] = sampler
        return made

    def __repr__(self) -> str:
        size, batches = len(self.dataset), number_of(len(self), "batch", "batches")  # type: ignore[arg-type]
        drawn = "" if self.kind == "poisson" else f", sampling={self.kind!r}"
        return (
            f"{type(self).__name__}({number_of(size, 'example')}, sample_rate={self.sample_rate:.6g}: about "
            f"{size * self.sample_rate:.4g} a batch, {batches} a round, {self.handed_out} handed out{drawn})"
        )

    def _begin(self) -> Round:
        self.sampler_state.begin()
        return self.rounds.begin(self.sampler_state.drawn)

    def _end(self, begun: Round) -> None:
        self.rounds.end(begun)

    def _take(self, begun: Round) -> int | None:
        super()._take(begun)
        begun.taken += 1
        self._newest = self._draw_of(begun)
        return self._newest

    def _draw_of(self, begun: Round) -> int | None:
        if not self.num_workers:
            return self.sampler_state.drawn - 1
        known = begun is self.rounds.alone and getattr(self, "in_order", True)
        return begun.first + begun.taken - 1 if known else None

    @property
    def is_dealt(self) -> bool:
        """Whether this rank's batches are parts of lists that all ranks draw."""
        return bool(getattr(self.batch_sampler, "is_joint", False))

    @property
    def where(self) -> tuple[Any, ...]:
        """What must be the same on all ranks at a step, if each is to have another part of one list.

        How many batches were handed out, and the draw of the newest: where it is not known, what no other rank has.
        """
        unknown = self._newest is None and self.handed_out
        return self.handed_out, f"not known to rank {dist.get_rank()}" if unknown else self._newest

    @property
    def source(self) -> Source:
        return self.sampler_state.source

    @property
    def kind(self) -> str:
        """How batches are drawn: "poisson", "truncated", "bins" or "shuffle"."""
        return self.sampler_state.kind

    @property
    def sample_rate(self) -> float:
        """The rate at which the sampler draws, which is what the accountant counts."""
        return self.sampler_state.sample_rate

    @sample_rate.setter
    def sample_rate(self, sample_rate: float) -> None:
        self.set_sample_rate(sample_rate)

    def set_sample_rate(self, sample_rate: float) -> None:
        """Changes the public rate from the next round on.

        ValueError within a round, whose batches may be drawn ahead of the loop at the old rate, and where it is not a
        probability.
        """
        sample_rate = check_number("sample_rate", sample_rate, lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
        if sample_rate == self.sample_rate:
            return
        if isinstance(self.sampler_state, EpochSampler):
            raise UnsupportedError(
                f"The sample rate cannot be changed with sampling={self.kind!r}, whose epochs are counted by their "
                "number of batches; take sampling='poisson' for a schedule of the batch size."
            )
        if self.rounds.open:
            raise ValueError("The sample rate was changed within a round of the loader; do it between rounds.")
        sampler = self.sampler_state
        if sampler.steps == steps_per_epoch(self.sample_rate):
            sampler.steps = steps_per_epoch(sample_rate)
        sampler.sample_rate = sample_rate

    def position(self, unused: int = 0) -> dict[str, str]:
        """Return where a run goes on that is resumed now: the sampler's state without what was drawn and not used.

        Beside it stands what else decides the batches, in :attr:`among`.

        Args:
            unused: How many of the batches handed out last were not used. Those that workers have drawn ahead of the
                loop come on top.
        """
        sampler = self.sampler_state
        state = sampler.state_dict() | self.among
        if (alone := self.rounds.alone) is None or not getattr(self, "in_order", True):
            return state
        ahead = sampler.drawn - alone.first - alone.taken if self.num_workers else 0
        back = max(0, ahead + min(unused, alone.taken))
        return {**state, "drawn": str(sampler.drawn - back), "left": str(int(state["left"]) + back)}

    def go_on(self, position: dict[str, str]) -> None:
        """Draw on from a :meth:`position`."""
        self.rounds.newest = None  # a round that is open has drawn at another place
        self.sampler_state.load_state_dict(position)

    @property
    def among(self) -> dict[str, str]:
        """Among how many examples a batch is drawn, by how many ranks, and how many it has at most.

        (0 ranks: as by one process, whole; at most 0: any number.) With seed, rate and number of the draw this decides
        a batch.
        """
        sampler = self.sampler_state
        most = str(sampler.max_batch_size or 0)
        return {
            "examples": str(sampler.num_samples),
            "ranks": str(sampler.owners),
            "at most": most,
        }

    @property
    def sampler_state(self) -> UniformWithReplacementSampler:
        """The batch sampler, which carries seed and position."""
        assert isinstance(self.batch_sampler, UniformWithReplacementSampler)
        return self.batch_sampler
