"""Gaussian noise whose numbers are functions of (seed, step, address) and of nothing else.

The stream of a step has a name, 128 bits of SHAKE-256 of seed and step, so that two different steps share noise with
negligible probability and the same step always gives the same noise. Number i of a stream is computed without those
before it (:mod:`dpcore.normals`), and belongs to one number of the sum: i is the offset of its parameter in the list of
trained parameters plus its row-major index. So ranks, shards and pieces draw their own parts of one stream, in any
layout, on any device, with the same result (bit for bit by one kernel; to rounding among the kernels and torch).

Version 1 of the stream, of checkpoints that name no version, is a Mersenne twister whose state is a hash of seed,
step and rank; it has no addresses, and one rank draws it all. A run that goes on from such a checkpoint keeps it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpcore import gpu, native, normals
from dpcore.errors import PrivacyError, warn_caller
from dpcore.secret_seeds import check_seed, derived_seed, draw_seed

_TWISTER_WORDS = 624
_LAST: dict[tuple[int, int], tuple[int, object]] = {}
"""The last step that has drawn from each secret stream in this process, by seed and rank, and the source of it."""


def warn_without_noise(noise_multiplier: float, before: float | None = None) -> None:
    """Say what a run without noise promises, unless it had none ``before``."""
    if noise_multiplier == 0.0 != before:
        warn_caller(
            "noise_multiplier is 0, so no noise is added, and the run has no privacy: its epsilon is infinite. Use it "
            "to compare; for a release take 1.0, say, or let make_private_with_epsilon find it for a budget."
        )


def check_not_captured() -> None:
    """Refuse noise that a CUDA graph would add again at every replay; PrivacyError."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise PrivacyError(
            "Noise is being drawn while a CUDA graph is captured, whose every replay would add the same numbers; "
            "capture what comes before the noise, and add it outside of the graph."
        )


class GaussianNoise:
    """Standard normal noise for one training run; ``seed`` None draws a secret 128-bit seed.

    The seed is as secret as the data: whoever knows it can subtract the noise. Numbers come from Box-Muller with
    32-bit uniforms and end at 6.77 standard deviations; :class:`SecureNoise` is for those who must exclude
    floating-point attacks. ``rank`` names the streams, too: processes that add up noise of their own need different
    ones.

    A copy, by ``copy.deepcopy`` or pickle, has a secret seed of its own, and so has a secret seed in a forked process:
    with the first one they would release other gradients under the same noise. To go on with the same noise, use
    :meth:`state_dict`.
    """

    seed: int
    version: int = 2
    """The stream's."""
    also: str = ""
    """What names the streams beside seed, step and rank."""
    _user: weakref.ref[Any] | None = None
    """Whose steps have drawn."""
    _source: object = None
    """An identity, which neither copies nor those that went on from the same state have."""
    _newest: tuple[int, int] = -1, -1
    """The seed and the number of the last step that was made with it."""

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        if seed is None:
            draw_seed(self)
        else:
            self.seed = check_seed(seed)
        self.is_chosen = seed is not None
        self._is_secret = seed is None
        """Whether the seed is one of the user's, whose noise is to be repeated and protects nothing."""
        self.rank = int(rank)
        self._generators: dict[str, torch.Generator] = {}
        self._template: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("seed", "_user", "_generators", "_template", "_source", "_newest")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _generators={}, _template=None, is_chosen=False, _is_secret=True)
        draw_seed(self)

    def serve(self, user: Any) -> None:
        """Let the next step of ``user`` draw; with a warning where another run of this process has drawn its noise.

        Raises:
            PrivacyError: steps of another user have drawn from this source, which has a step of the same number; or the
                user's number of steps was set back.
        """
        if self._user is None:
            self._user = weakref.ref(user)
        elif self._user() is not user:
            raise PrivacyError(
                "This source of noise has served another engine or optimizer, and gives every step the noise of its "
                "number: two gradients would get the same noise, and their difference would be bare. Give each its "
                "own, GaussianNoise()."
            )
        of, newest = self._newest
        if self.is_by_seed and of == self.seed and user.steps <= newest:
            raise PrivacyError(
                f"This is step {user.steps}, and step {newest} of the same run was made: steps was set back, and noise "
                "that is on another gradient would be added again, which lays their difference bare. Leave steps as it "
                "is; to begin anew take another source of noise, GaussianNoise()."
            )
        if self._is_secret and self.is_by_seed:
            self._note(user.steps)

    def note_made(self, step: int) -> None:
        """Note that a step was made: until then an attempt at it may fail, and come again under the same number."""
        self._newest = self.seed, step

    def _note(self, step: int) -> None:
        """Note that a step draws, and say so where a run from the same state has drawn this one's noise already."""
        self._source = self._source or object()
        last, source = _LAST.get((self.seed, self.rank), (-1, self._source))
        if source is not self._source and step <= last:
            warn_caller(
                "Another run of this process went on from the same checkpoint and has drawn the noise that this step "
                "adds: where their gradients differ, the difference of the two is bare. Let out only one of the two "
                "models. To train both, load the state_dict() of module and private optimizer in place of the "
                "checkpoint: the second run then has noise of its own, and counts what the first steps have spent.",
            )
        if step > last or source is not self._source:
            _LAST[self.seed, self.rank] = max(step, last), self._source

    def branch(self, *names: Any, known: bool) -> None:
        """Go on with other noise than that of a run which has the same seed and another history.

        Args:
            *names: What has become of the runs: those of which it is the same have the same noise.
            known: Whether that is all that decides the batches to come. If not, a secret seed is drawn anew.
        """
        if not known and not self.is_chosen:
            draw_seed(self)
        else:
            self.seed = derived_seed(self.seed, *names)

    def generator(self, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator positioned at the start of version 1's stream of ``step``; valid until the next call.

        A subclass that returns its own has its noise drawn from that one.
        """
        device = torch.device(device)
        generator = self._generators.get(str(device))
        if generator is None:
            generator = self._generators[str(device)] = torch.Generator(device)
        if device.type == "cpu":
            generator.set_state(self._twister_state(self._digest(step, 4 * _TWISTER_WORDS)))
        else:
            generator.manual_seed(int.from_bytes(self._digest(step, 8), "little"))
        return generator

    def _digest(self, step: int, length: int, of: str = "noise") -> bytes:
        return hashlib.shake_256(f"dpcore {of} {self.seed} {int(step)} {self.rank}{self.also}".encode()).digest(length)

    def name(self, step: int, of: str = "counter noise") -> bytes:
        """Return the name of the step's stream, or of another one for noise of another kind.

        Of another hash than the generator's key: a shorter digest of the same is the beginning of a longer one, and on
        CUDA both generators are Philox.
        """
        return self._digest(step, normals.NAME_BYTES, of)

    def add_(self, target: Tensor, std: float, step: int, start: int = 0) -> Tensor:
        """Add std * N(0, I) of this step to ``target``, in place, any shape; return it. ``std`` 0 leaves it alone.

        ``start``: the address of the target's first number; the others follow in row-major order.
        """
        return self._put(target, std, step, start, add=True)

    @property
    def may_come_first(self) -> bool:
        """True if noise can be written before the sums are added, because it does not depend on them."""
        return type(self).add_ is GaussianNoise.add_

    def fill_(self, target: Tensor, std: float, step: int, start: int = 0) -> Tensor:
        """Set ``target`` to std * N(0, I) of this step, in place: what :meth:`add_` makes of zeros, in fewer passes."""
        if std == 0.0 or not self.may_come_first:
            return self.add_(target.zero_(), std, step)
        return self._put(target, std, step, start, add=False)

    def _put(self, target: Tensor, std: float, step: int, start: int, add: bool) -> Tensor:
        if std == 0.0:
            return target
        # The kernel for CUDA drew the same in version 1, where it was asked for.
        if not self._is_own or (self.version == 1 and not (gpu.available() and gpu.serves_noise(target))):
            return self._put_of_generator(target, std, step, start, add)
        check_not_captured()
        flat = target.contiguous().view(-1)
        on_cpu = native.put_normals if native.serves(flat) else normals.put
        put = gpu.draw_normals if gpu.serves_noise(flat) else on_cpu
        put(flat, std, self.name(step), start, add=add)
        return target if target.is_contiguous() else target.copy_(flat.view(target.shape))

    def _put_of_generator(self, target: Tensor, std: float, step: int, start: int, add: bool) -> Tensor:
        if start:
            raise ValueError(
                f"start is {start}, but this noise has no addresses: it is of version 1, or of a subclass's own "
                "generator. Draw the whole of a step's at once."
            )
        generator = self.generator(step, target.device)
        if not add:
            return target.normal_(0.0, std, generator=generator)
        return target.add_(torch.empty_like(target).normal_(generator=generator), alpha=std)

    @property
    def is_by_seed(self) -> bool:
        """True if noise follows from the seed and from nothing else, as a subclass's need not."""
        return self._is_own and self.may_come_first

    @property
    def has_addresses(self) -> bool:
        """True if any part of a step's noise can be drawn by itself."""
        return self.is_by_seed and self.version > 1

    @property
    def _is_own(self) -> bool:
        """Return whether noise may be drawn from the seed; a subclass's own generator may be one that is known."""
        return type(self).generator is GaussianNoise.generator

    def state_dict(self) -> dict[str, str]:
        """Seed (up to 128 bits, as a decimal string), rank, and version: with the step number the whole state.

        And whether the seed, or the one that it follows from, is one of the user's.
        """
        state = {"seed": str(self.seed), "rank": str(self.rank), "version": str(self.version)}
        return state | {"chosen": "True"} if self.is_chosen else state

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on with the noise of a state; ValueError where its stream is one that this dpcore does not know."""
        version = int(state.get("version", 1))
        if version not in (1, 2):
            raise ValueError(
                f"The noise is of version {version} of the stream, and this dpcore knows 1 and 2; take the dpcore that "
                "wrote the state, or a newer one."
            )
        self.seed, self.rank, self.version = int(state["seed"]), int(state["rank"]), version
        self.is_chosen = self.is_chosen or "chosen" in state
        self._is_secret = "chosen" not in state  # whatever this run was built with, the stream is the state's
        if not self._is_secret:
            self._newest = -1, -1  # who chose the seed may repeat the run from a state on

    def _twister_state(self, words: bytes) -> Tensor:
        """Return a generator's state with 624 fresh words.

        torch keeps each word in 8 bytes after a 24-byte header (seed, words left = 1, which forces a fresh block,
        seeded flag and position) and cached normals behind them.
        """
        if self._template is None:
            self._template = torch.Generator().manual_seed(0).get_state()
        places = self._template.numpy()[24 : 24 + 8 * _TWISTER_WORDS].view(np.uint64)
        places[:] = np.frombuffer(words, dtype="<u4")
        return self._template


class SecureNoise(GaussianNoise):
    """Noise from the operating system's cryptographic generator; nothing of it can be repeated or predicted.

    A float is one of finitely many, and which ones a sampler can return depends on how it computes: an attacker who
    sees the low bits of a noisy sum may rule out values of the sum (Mironov 2012). Two answers are combined. Every
    value is the sum of four independent float64 normals, halved, each the cosine half of a Box-Muller pair whose sine
    half is discarded (Holohan and Braghin 2021): inverting it takes more than 2^53 guesses for each of them. And the
    noisy sum is rounded to a grid of about std / 2^20 that depends on nothing else: the low bits, in which such an
    attack reads, are not released.
    """

    def __init__(self) -> None:
        super().__init__(seed=0)

    def add_(self, target: Tensor, std: float, step: int, start: int = 0) -> Tensor:
        """Add std * N(0, I) to ``target`` in place, on the grid, fresh at every call."""
        if std == 0.0:
            return target
        spacing = grid_spacing(std)
        flat = target.reshape(-1).double().cpu().numpy()
        released = np.empty_like(flat)
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            noise = sum(_urandom_normals(len(piece)) for _ in range(4)) / 2.0
            released[start : start + _PIECE] = np.rint((piece + std * noise) / spacing) * spacing
        return target.copy_(torch.from_numpy(released).view(target.shape))

    def serve(self, user: Any) -> None:
        """Let anyone draw: nothing is drawn twice."""

    def branch(self, *names: Any, known: bool) -> None:
        """Do nothing: there is no seed."""

    def state_dict(self) -> dict[str, str]:
        """There is no state: noise that is never repeated needs none to be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, str]) -> None:
        return


# Values drawn at a time, to bound the memory of the random bytes.
_PIECE = 2**18


def grid_spacing(std: float) -> float:
    """The power of two in (std / 2^21, std / 2^20]: sums up to 8 std on it are exact in float32."""
    return 2.0 ** (math.floor(math.log2(std)) - 20)


def _urandom_normals(count: int) -> np.ndarray:
    """[count] float64 standard normals by Box-Muller from 53-bit uniforms in (0, 1]; one of each pair is discarded."""
    bits = np.frombuffer(secrets.token_bytes(16 * count), dtype=np.uint64) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 1.0) * 2.0**-53
    return np.sqrt(-2.0 * np.log(uniform[:count])) * np.cos(2.0 * np.pi * uniform[count:])
