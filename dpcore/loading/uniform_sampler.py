"""Poisson sampling: every example is in a batch with probability q, independently, as the accountant assumes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import scipy
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dpcore.arguments import check_number
from dpcore.errors import UnsupportedError
from dpcore.secret_seeds import check_seed, derived_seed, draw_seed

MANY_STEPS = 1 - 1e-12
MOST_RULE = "it must be a whole number, at least 1"
LISTS, EXAMPLES = 1000, 64
"""The most lists, and the least examples in them, by which it is seen whether a subclass draws by its seed."""


def steps_per_epoch(sample_rate: float) -> int:
    """ceil(1 / sample_rate), with 1 / (1 / n) = n for every n (int(1 / rate) loses a step for 33 values below 500)."""
    return max(1, int(np.ceil(MANY_STEPS / sample_rate)))


def drawn_seed(generator: torch.Generator) -> int:
    """A seed of the generator's next numbers, on whatever device it is."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _checked_most(max_batch_size: int | None) -> int | None:
    if max_batch_size is None:
        return None
    return int(check_number("max_batch_size", max_batch_size, lambda b: b >= 1 and b % 1 == 0, MOST_RULE))


def overflow(examples: int, sample_rate: float, most: int | None) -> float:
    """Return a bound of the chance that a Poisson batch is longer than ``most``, with one example more, too."""
    return 0.0 if most is None else min(1.0, float(scipy.stats.binom.sf(most, examples + 1, sample_rate)) * (1 + 1e-9))


def check_examples(count: int) -> None:
    """Refuse data without examples; ValueError."""
    if count <= 0:
        raise ValueError(
            f"num_samples is {count}: there must be at least one example to draw; look how the data set was read."
        )


def check_joint(*given: Any) -> None:
    """Refuse to deal out batches where nothing is given that decides their seed on all ranks; ValueError."""
    if all(value is None for value in given):
        raise ValueError(
            "A batch is dealt out without a seed: each rank would deal out one of its own, and an example could be "
            "in the shares of two. Give all ranks one secret seed, model.ranks.share_seed(None) for instance."
        )


class UniformWithReplacementSampler(Sampler[list[int]]):
    """A sampler of Poisson batches: ``steps`` lists of indices a round; list k of its life is a function of (seed, k).

    The size is Binomial(num_samples, sample_rate), drawn exactly, and the members are a uniform subset: the same
    distribution as one coin per example, in time proportional to the batch, and exact for any rate (float32 coins turn
    1e-7 into 1.19e-7). A copy, by ``copy.deepcopy`` or pickle, draws other batches, of a secret seed; to go on with the
    same ones, use :meth:`state_dict`.

    Args:
        num_samples: How many examples there are.
        sample_rate: The chance of each to be in a batch, in (0, 1].
        seed: Up to 128 bits; None draws a secret one.
        steps: Batches a round; None: ceil(1 / sample_rate).
        secure: Whether to draw from the operating system's cryptographic generator instead of a seed.
        generator: Draws the seed, in place of ``seed``.
        max_batch_size: The most examples of a batch; of a longer one so many are kept, at random.

    Raises:
        ValueError: there is no example, or a number is out of its range.
    """

    secure = False
    max_batch_size: int | None = None
    drawn = 0
    """Lists that were drawn; of a subclass with an ``__iter__`` of its own it is not known."""
    shared: Callable[[Any, int], Any] | None = None
    """Gives several processes the value of the first of them, where they work on the same examples."""
    _generator: torch.Generator | None = None
    _generator_of: int | None = None  # the seed for which it was made or set
    _is_reseeded = False
    _was_asked = False  # for its generator, whose numbers a state does not tell

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        seed: int | None = None,
        steps: int | None = None,
        secure: bool = False,
        generator: torch.Generator | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if generator is not None:
            seed = drawn_seed(generator)
        check_examples(num_samples)
        sample_rate = check_number("sample_rate", sample_rate, lambda q: 0.0 < q <= 1.0, "it must lie in (0, 1]")
        self.num_samples = int(num_samples)
        self.sample_rate = sample_rate
        self.steps = steps_per_epoch(sample_rate) if steps is None else int(steps)
        self.seed: int
        if seed is None:
            draw_seed(self)
        else:
            self.seed = check_seed(seed)
        self.secure = secure
        self.max_batch_size = _checked_most(max_batch_size)
        self._generator, self._generator_of = generator, self.seed
        self._left = 0
        self._resumed: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("seed", "shared", "_generator", "_generator_of")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Draw a secret seed in a copy: two models on the same batches spend more than two on their own."""
        self.__dict__.update(state, _generator=None)
        draw_seed(self)

    @property
    def generator(self) -> torch.Generator:
        """A generator for a subclass that draws its batches by itself: of the seed at first, and then going on.

        Such a subclass may set it, and need not have called ``__init__``; None is one of a secret seed.

        Raises:
            UnsupportedError: it was set, and the class draws lists that are functions of the seed; or the run goes on
                from another one's state.
        """
        if "seed" not in vars(self):
            draw_seed(self)
        self._was_asked = True
        if self._generator is None or self._generator_of != self.seed:  # of a forked process, or of a run that goes on
            self._generator, self._generator_of = torch.Generator().manual_seed(self.seed % 2**63), self.seed
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        if not self._has_own("__iter__", "draw"):
            raise UnsupportedError(
                f"The generator of a {type(self).__name__} was set, whose lists are functions of its seed: it would "
                "draw nothing. Pass generator= or seed= when the sampler is built; or override __iter__(), and draw "
                "from self.generator there."
            )
        if generator is not None and self._is_reseeded:
            raise UnsupportedError(
                f"The generator of a {type(self).__name__} was set in a run that goes on from the state of another, "
                "whose batches it may draw again. Leave it out: self.generator is one of a seed of this run's own."
            )
        if generator is None or "seed" not in vars(self):
            draw_seed(self)
        self._generator, self._generator_of = generator, self.seed

    def _has_own(self, *names: str) -> bool:
        """Return whether a class of the user's defines one of these."""
        own = [kind for kind in type(self).__mro__ if not kind.__module__.startswith(("dpcore.", "torch."))]
        return any({*names} & vars(kind).keys() for kind in own)

    @property
    def kind(self) -> str:
        """How batches are drawn, in a word."""
        return "poisson" if self.max_batch_size is None else "truncated"

    @property
    def source(self) -> float | tuple[str, int]:
        """Under what the ledger knows the batches."""
        return self.sample_rate

    def epoch_of(self, draw: int | None) -> str | None:
        """Return the name of the dealt epoch of a draw; None where there is none, or it is not known."""
        return None

    def begin(self) -> None:
        """Make ready for an iteration."""

    def __len__(self) -> int:
        return self.steps if "steps" in vars(self) else steps_per_epoch(self.sample_rate)

    def __iter__(self) -> Iterator[list[int]]:
        rounds, self._resumed = (self._resumed or self.steps), None
        for left in reversed(range(rounds)):
            self._left = left
            # Counted before it is handed out: a batch that was seen is never drawn again after a resume.
            self.drawn += 1
            yield self.draw(self.drawn - 1)

    def draw(self, k: int) -> list[int]:
        """Batch number ``k``; a fresh one at every call in secure mode."""
        return self._sample(self.num_samples, [self.seed, k])

    def _sample(self, count: int, stream: list[int]) -> list[int]:
        """Each of ``range(count)`` with probability ``sample_rate``, by the random numbers of ``stream``."""
        if count == 0:
            return []
        if self.secure:
            system = random.SystemRandom()
            # In (0, 1]: the quantile of 0 is -1, which is no size.
            size = int(scipy.stats.binom.ppf(1.0 - system.random(), count, self.sample_rate))
            chosen = system.sample(range(count), self._kept(size))
            return chosen if self.shared is None else self.shared(chosen, 0)  # nobody can repeat it
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(stream)))
        size = int(generator.binomial(count, self.sample_rate))
        return generator.choice(count, self._kept(size), replace=False).tolist()

    def _kept(self, size: int) -> int:
        """Return how many are left of so many: a uniform part of a uniform subset is a uniform subset, too."""
        return size if self.max_batch_size is None else min(size, self.max_batch_size)

    @property
    def overflow(self) -> float:
        """A bound of the chance that a batch is cut, with one example more, too."""
        return overflow(self.num_samples, self.sample_rate, self.max_batch_size)

    @property
    def owners(self) -> int:
        """How many ranks draw among examples of their own; 0: the batch is what one process draws."""
        return 0

    def set_epoch(self, epoch: int) -> None:
        """Accepted for compatibility and ignored: every list is drawn afresh."""

    def state_dict(self) -> dict[str, str]:
        """Return seed, number of batches drawn and of those left in the round, as decimal strings.

        A seed has up to 128 bits.

        Raises:
            UnsupportedError: a subclass draws by itself, so that these three do not decide its lists.
        """
        self._check_resumes(is_counted=self.drawn > 0)
        return {"seed": str(self.seed), "drawn": str(self.drawn), "left": str(self._left)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continues where the state was saved: the next round is what was left of the interrupted one.

        Raises:
            UnsupportedError: a subclass draws by itself.
        """
        self._check_resumes(is_counted="steps" in vars(self))
        self.seed, self.drawn = int(state["seed"]), int(state["drawn"])
        self._left = int(state["left"])
        self._resumed = self._left or None

    def reseed(self, *names: Any) -> None:
        """Draw other lists from now on, of a secret seed, or of one that follows from this one and ``names``.

        Raises:
            UnsupportedError: a subclass draws by itself, and would draw the same.
        """
        if not self._follows_seed():
            self._refuse()
        self._is_reseeded = True
        if names and "seed" in vars(self):
            self.seed = derived_seed(self.seed, *names)
        else:
            draw_seed(self)

    def check_loads(self) -> None:
        """Raise the error of :meth:`load_state_dict`, before anything is changed."""
        if not self._has_own("load_state_dict"):
            self._check_resumes(is_counted="steps" in vars(self))

    def _check_resumes(self, is_counted: bool) -> None:
        """Refuse the state of a subclass whose lists it does not decide: another run would draw lists again, unsaid.

        ``is_counted``: whether an ``__iter__`` of its own may well be one around this class's.
        """
        by_generator = self._was_asked and self._has_own("__iter__", "draw")
        if by_generator or (self._has_own("__iter__") and not is_counted) or not self._follows_seed():
            self._refuse()

    def _follows_seed(self) -> bool:
        """Return whether lists of one seed are the same and those of another are others, or all have all examples."""
        if self.sample_rate == 1.0 or not self._has_own("__iter__", "draw"):
            return True
        try:
            one, other, again = map(self._lists, (1, 2, 1))
        except (TypeError, RuntimeError):  # what it holds cannot be copied
            return False
        return one != other and (one == again or self.secure)

    def _lists(self, seed: int) -> list[str]:
        """Return the first lists of a copy with another seed, as texts."""
        made = copy.deepcopy(self)  # what it keeps of its lists stays as it is
        made.seed, made.drawn, made._resumed = seed, 0, None
        found, examples = [], 0
        for chosen in islice(made, LISTS):
            found.append(repr(numbers := [*chosen]))
            if (examples := examples + len(numbers)) >= EXAMPLES:
                break
        return found

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} draws its lists by itself, and how many it has drawn by which numbers is not "
            "known, so a run that goes on from a saved state may use batches again, and epsilon takes all for fresh. "
            "Override draw(k), as a function of self.seed and k, in place of __iter__(), with secure = True where its "
            "numbers are the operating system's; or override state_dict(), load_state_dict() and reseed(), too."
        )


class DistributedUniformWithReplacementSampler(UniformWithReplacementSampler):
    """One rank's part of a Poisson sample of ``total_size`` examples.

    Rank r owns the examples r, r + ranks, r + 2 ranks ... and draws each with probability ``sample_rate``; the union
    over the ranks is then exactly a Poisson sample of all examples at that rate. List k is a function of (seed, k,
    rank); all ranks draw equally many lists.

    Args:
        total_size: How many examples there are for all ranks together.
        sample_rate: The chance of each to be in a batch, in (0, 1].
        seed: The same on all ranks; None draws a secret one.
        steps: Batches a round; None: ceil(1 / sample_rate).
        secure: Whether to draw from the operating system's cryptographic generator instead of a seed.
        generator: Draws the seed, in place of ``seed``.
        rank: This process; the process group's where not given.
        num_replicas: How many ranks there are; the process group's where not given.
        shuffle: Accepted for compatibility and ignored, as ``shuffle_seed`` is: who owns an example is no matter.
        shuffle_seed: Accepted for compatibility and ignored.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        seed: int | None = None,
        steps: int | None = None,
        secure: bool = False,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        shuffle: bool = True,
        shuffle_seed: int = 0,
    ) -> None:
        drawn: dict[str, Any] = {"sample_rate": sample_rate, "seed": seed, "generator": generator}
        super().__init__(num_samples=total_size, steps=steps, secure=secure, **drawn)
        self.rank = dist.get_rank() if rank is None else rank
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank}; with num_replicas={self.num_replicas} it must lie below that.")

    @property
    def owners(self) -> int:
        return self.num_replicas

    def take(self, rank: int, num_replicas: int) -> None:
        """Draw part ``rank`` of ``num_replicas`` from now on: several ranks may work on one part's examples."""
        self.rank, self.num_replicas = rank, num_replicas

    def draw(self, k: int) -> list[int]:
        """This rank's part of batch number ``k``, often empty; a fresh one at every call in secure mode."""
        owned = range(self.rank, self.num_samples, self.num_replicas)
        return [owned[i] for i in self._sample(len(owned), [self.seed, k, self.rank])]


class DealtUniformWithReplacementSampler(DistributedUniformWithReplacementSampler):
    """One rank's part of the Poisson sample that one process draws: of its list k, positions rank, rank + ranks, ...

    The union is the same batch whatever the number of ranks, and the parts differ by one example in length. All ranks
    must have the same seed and take the same lists, or an example would be in the parts of two: steps of make_private
    compare them. A copy, which has a seed of its own, draws among the examples that its rank owns.

    Args:
        max_batch_size: The most examples of a batch, of all ranks together.
        **options: As of :class:`DistributedUniformWithReplacementSampler`, without ``secure``: numbers that nobody can
            repeat are the same on no two ranks.

    Raises:
        ValueError: there is no seed, or a number is out of its range.
    """

    def __init__(self, *, max_batch_size: int | None = None, **options: Any) -> None:
        check_joint(options.get("seed"), options.get("generator"))
        super().__init__(**options)
        self.max_batch_size = _checked_most(max_batch_size)
        self.is_joint = True
        """Whether the seed is that of all ranks."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "is_joint": False})

    @property
    def owners(self) -> int:
        return 0 if self.is_joint else self.num_replicas

    def draw(self, k: int) -> list[int]:
        """This rank's part of batch number ``k``."""
        if not self.is_joint:
            return super().draw(k)
        return UniformWithReplacementSampler.draw(self, k)[self.rank :: self.num_replicas]
