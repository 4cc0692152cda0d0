"""The rows of a table, and up to which step each of them has its noise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore import native, normals
from dpcore.errors import PrivacyError
from dpcore.lazy_tables.history import History, Step
from dpcore.noise import GaussianNoise

CHUNK = 2**21
"""Numbers at a time when all rows are brought up to date: what a cache holds."""
PIECES = 16
"""Chunks in which rows are looked for that lie apart."""


class Table:
    """The values of ``parameter`` [V, d], which shows NaN while rows wait for their noise.

    ``address``: that of its first number among the trained ones.
    """

    def __init__(self, parameter: Parameter, address: int, noise: GaussianNoise) -> None:
        self.parameter = parameter
        self.address = address
        self._noise = noise
        self._values = parameter.data
        self._mask = torch.full((1, 1), float("nan")).expand(parameter.shape)
        self._done = torch.zeros(0, dtype=torch.int32)
        self.is_hidden = False

    def hide(self, steps: int) -> None:
        """Take the values out of the parameter, in which all rows have the noise of ``steps`` steps."""
        if self.is_hidden:
            if self.parameter.data_ptr() != self._mask.data_ptr():
                raise PrivacyError(
                    "A table was moved, or its values were replaced, while rows waited for their noise; call flush() "
                    "of the engine before that."
                )
            return
        self._values = self.parameter.data
        self._done = torch.full((len(self._values),), steps, dtype=torch.int32)
        self.show(False)
        self.is_hidden = True

    def show(self, values: bool) -> None:
        """Let the parameter have its ``values``, or NaN."""
        self.parameter.data = self._values if values else self._mask

    def put(self, rows: Tensor, values: Tensor, steps: int) -> None:
        """Set rows to what they are after so many steps."""
        self._values[rows] = values  # first: what is interrupted here has too much noise and not too little
        self._done[rows] = steps

    def flush(self, history: History) -> None:
        """Bring all rows up to date, and give the values back to the parameter, where that one is now."""
        if not self.is_hidden:
            return
        count = max(CHUNK // self._values.shape[1], 1)
        for first in range(0, len(self._values), PIECES * count):
            done = self._done[first : first + PIECES * count]
            # Those that are to get the numbers of single steps come together, wherever they lie.
            for rows in history.is_recent(done).nonzero().squeeze(1).add_(first).split(count):
                self.bring_up(rows, history)
        for first in range(0, len(self._values), count):
            part = slice(first, first + count)
            done = self._done[part]
            self._add_late(self._values[part], torch.arange(first, first + len(done)), done, history)
            done.fill_(history.steps)
        like = self.parameter
        self.parameter.data = self._values.to(like.device, like.dtype)
        self._values, self._done, self.is_hidden = self.parameter.data, self._done[:0], False

    def bring_up(self, rows: Tensor, history: History) -> Tensor:
        """Return the values of ``rows`` [n], different ones in ascending order, with all noise, [n, d]."""
        values, done = self._values[rows], self._done[rows]
        self._add_late(values, rows, done, history)
        recent = history.is_recent(done).nonzero().squeeze(1)
        if len(recent) == len(rows):
            self._repeat(values, rows, done, history)
        elif len(recent):
            some = values[recent]
            self._repeat(some, rows[recent], done[recent], history)
            values[recent] = some
        self.put(rows, values, history.steps)
        return values

    def _add_late(self, values: Tensor, rows: Tensor, done: Tensor, history: History) -> None:
        """Do in place to ``values``, of rows up to date at steps ``done``, what many steps did to some of them."""
        if not len(done) or int(done.min()) >= history.steps - history.exact:
            return
        kept, deviations = history.late(done)
        if kept is not None:
            values.mul_(kept.unsqueeze(1))
        # Of a stream of its own for every step at which rows are brought up to date, each of them at most once.
        name = self._noise.name(history.steps, f"pending noise from {self.address} on")
        add_noise(values, deviations, name, rows, self.address)

    def _repeat(self, values: Tensor, rows: Tensor, done: Tensor, history: History) -> None:
        """The same for rows that few steps have left out: one step after the other."""
        if not len(done):
            return
        oldest, newest = int(done.min()), int(done.max())
        for number, step in enumerate(history.recent, history.steps - len(history.recent)):
            if number >= newest:
                step.update(values, self.noise_of(step, rows))
            elif number >= oldest:
                which = (done <= number).nonzero().squeeze(1)
                some = values[which]
                step.update(some, self.noise_of(step, rows[which]))
                values[which] = some

    def noise_of(self, step: Step, rows: Tensor) -> Tensor:
        """Return the noise of a step in ``rows`` [n], [n, d]: that of their addresses."""
        noise = torch.zeros(len(rows), self._values.shape[1])
        add_noise(noise, torch.full((len(rows),), step.std, dtype=torch.float64), step.name, rows, self.address)
        return noise


def add_noise(target: Tensor, deviations: Tensor, name: bytes, rows: Tensor, start: int) -> None:
    """target[i, j] += deviations[i] * (number start + rows[i] * width + j of the stream ``name``)."""
    if native.serves(target) and target.is_contiguous():
        native.add_normals_to_rows(target, deviations.float(), name, rows, start)
    else:
        normals.add_to_rows(target, deviations, name, rows, start)
