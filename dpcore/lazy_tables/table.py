"""The rows of a table and their momentum, and up to which step each of them has its noise."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore import native, normals
from dpcore.errors import PrivacyError
from dpcore.lazy_tables.history import History, Step
from dpcore.noise import GaussianNoise

CHUNK = 2**21
"""Numbers at a time when all rows are brought up to date: what a cache holds."""
MOMENTUM = "momentum_buffer"
"""Its name in the state of torch.optim.SGD."""
BROKEN = -1
"""In place of the step up to which rows have their noise, while they are written."""
PIECES = 16
"""Chunks in which rows are looked for that lie apart."""


class Table:
    """The values of ``parameter`` [V, d], which shows NaN while rows wait for their noise.

    ``address``: that of its first number among the trained ones. ``states``: gives what the optimizer has for each
    parameter, where there is momentum, which is hidden and shown, too.
    """

    def __init__(
        self,
        parameter: Parameter,
        address: int,
        noise: GaussianNoise,
        states: Callable[[], MutableMapping[Parameter, dict[str, Any]]] | None = None,
    ) -> None:
        self.parameter = parameter
        self.address = address
        self._noise = noise
        self._states = states
        self._parts = [parameter.data]
        self._mask = torch.full((1, 1), float("nan")).expand(parameter.shape)
        self._done = torch.zeros(0, dtype=torch.int32)
        self.is_hidden = False

    def hide(self, steps: int) -> None:
        """Take the values out of the parameter, in which all rows have the noise of ``steps`` steps."""
        seen = [self.parameter.data] if self._states is None else [self.parameter.data, self._momentum]
        if self.is_hidden:
            if self.parameter.data_ptr() == self._parts[0].data_ptr():
                self.show(False)  # Ctrl-C ended a call that read the table.
                seen[0] = self.parameter.data
            if any(tensor is None or tensor.data_ptr() != self._mask.data_ptr() for tensor in seen):
                raise PrivacyError(
                    "A table was moved, or its values or their momentum were replaced, while rows waited for their "
                    "noise; call flush() of the engine before that."
                )
            return
        if any(tensor is not None and _is_mask(tensor) for tensor in seen):
            raise PrivacyError("Rows of a table wait for their noise in another LazyEngine, whose flush() comes first.")
        # Of its own: whoever kept the values (a state, a view, a checkpoint) must not see rows that wait.
        self._parts = [torch.zeros_like(self.parameter) if found is None else found.clone() for found in seen]
        self._done = torch.full((len(self._mask),), steps, dtype=torch.int32)
        # An interruption from here on is one in which a table was replaced: flush() gives the values back.
        self.is_hidden = True
        self._momentum = self._mask
        self.show(False)

    @property
    def rows(self) -> int:
        return len(self._mask)

    @property
    def _momentum(self) -> Any:
        assert self._states is not None
        return self._states().get(self.parameter, {}).get(MOMENTUM)

    @_momentum.setter
    def _momentum(self, value: Tensor) -> None:
        if self._states is not None:  # in a dictionary of its own, for an optimizer's saved state holds the other one
            self._states()[self.parameter] = {**self._states().get(self.parameter, {}), MOMENTUM: value}

    def show(self, values: bool) -> None:
        """Let the parameter have its ``values``, or NaN."""
        self.parameter.data = self._parts[0] if values else self._mask

    def update(self, rows: Tensor, grad: Tensor, step: Step, steps: int) -> None:
        """Make a step in rows that are up to date; it is the last of so many."""
        state = self._of(rows)
        step.update(state, grad)
        self._put(rows, state, steps)

    def _of(self, rows: Tensor) -> list[Tensor]:
        return [part[rows] for part in self._parts]

    def _put(self, rows: Tensor, state: Sequence[Tensor], steps: int) -> None:
        self._done[rows] = BROKEN
        for part, new in zip(self._parts, state, strict=True):
            part[rows] = new
        self._done[rows] = steps

    def _check_whole(self, done: Tensor) -> None:
        if len(done) and int(done.min()) == BROKEN:
            raise PrivacyError(
                "Rows of a table were being written when the run was interrupted, so that nobody knows what noise they "
                "have; make the model and its LazyEngine anew, from the last checkpoint."
            )

    def flush(self, history: History) -> None:
        """Bring all rows up to date, and give the values back to the parameter, where that one is now."""
        if not self.is_hidden:
            return
        self._check_whole(self._done)
        count = max(CHUNK // self._mask.shape[1], 1)
        for first in range(0, len(self._mask), PIECES * count):
            done = self._done[first : first + PIECES * count]
            # Those that are to get the numbers of single steps come together, wherever they lie.
            for rows in history.is_recent(done).nonzero().squeeze(1).add_(first).split(count):
                self.bring_up(rows, history)
        for first in range(0, len(self._mask), count):
            some = slice(first, first + count)
            done = self._done[some]
            before = done.clone()
            done.fill_(BROKEN)
            rows = torch.arange(first, first + len(done))
            self._add_late([part[some] for part in self._parts], rows, before, history)
            done.fill_(history.steps)
        like = self.parameter
        self.parameter.data = self._parts[0].to(like.device, like.dtype)
        self._momentum = self._parts[-1].to(like.device, like.dtype)
        self._parts, self._done, self.is_hidden = [self.parameter.data], self._done[:0], False

    def bring_up(self, rows: Tensor, history: History) -> Tensor:
        """Return the values of ``rows`` [n], different ones in ascending order, with all noise, [n, d]."""
        state, done = self._of(rows), self._done[rows]
        self._check_whole(done)
        self._add_late(state, rows, done, history)
        recent = history.is_recent(done).nonzero().squeeze(1)
        if len(recent) == len(rows):
            self._repeat(state, rows, done, history)
        elif len(recent):
            some = [part[recent] for part in state]
            self._repeat(some, rows[recent], done[recent], history)
            for part, new in zip(state, some, strict=True):
                part[recent] = new
        self._put(rows, state, history.steps)
        return state[0]

    def _add_late(self, state: Sequence[Tensor], rows: Tensor, done: Tensor, history: History) -> None:
        """Do in place to the ``state`` of rows up to date at steps ``done`` what many steps did to some of them."""
        if not len(done) or int(done.min()) >= history.steps - history.exact:
            return
        kept, roots = history.late(done)
        if kept is not None:
            mixed = [sum(old * by.unsqueeze(1) for old, by in zip(state, line, strict=True)) for line in kept]
            for part, new in zip(state, mixed, strict=True):
                part.copy_(new)
        # Of streams of their own for every step at which rows are brought up to date, each of them at most once.
        for number, kind in enumerate(("noise", "momentum")[: len(state)]):
            name = self._noise.name(history.steps, f"pending {kind} from {self.address} on")
            for part, line in zip(state[number:], roots[number:], strict=True):
                add_noise(part, line[number], name, rows, self.address)

    def _repeat(self, state: Sequence[Tensor], rows: Tensor, done: Tensor, history: History) -> None:
        """The same for rows that few steps have left out: one step after the other."""
        if not len(done):
            return
        oldest, newest = int(done.min()), int(done.max())
        for number, step in enumerate(history.recent, history.steps - len(history.recent)):
            if number >= newest:
                step.update(state, self.noise_of(step, rows))
            elif number >= oldest:
                which = (done <= number).nonzero().squeeze(1)
                some = [part[which] for part in state]
                step.update(some, self.noise_of(step, rows[which]))
                for part, new in zip(state, some, strict=True):
                    part[which] = new

    def noise_of(self, step: Step, rows: Tensor) -> Tensor:
        """Return the noise of a step in ``rows`` [n], [n, d]: that of their addresses."""
        noise = torch.zeros(len(rows), self._mask.shape[1])
        add_noise(noise, torch.full((len(rows),), step.std, dtype=torch.float64), step.name, rows, self.address)
        return noise


def _is_mask(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def add_noise(target: Tensor, deviations: Tensor, name: bytes, rows: Tensor, start: int) -> None:
    """target[i, j] += deviations[i] * (number start + rows[i] * width + j of the stream ``name``)."""
    if native.serves(target) and target.is_contiguous():
        native.add_normals_to_rows(target, deviations.float(), name, rows, start)
    else:
        normals.add_to_rows(target, deviations, name, rows, start)
