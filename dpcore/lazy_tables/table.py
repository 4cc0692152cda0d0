"""The rows of a table and their momentum, and up to which step each of them has its noise."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore import native, normals
from dpcore.errors import PrivacyError
from dpcore.lazy_tables.history import History, Step, mix
from dpcore.lazy_tables.share import Share
from dpcore.noise import GaussianNoise

CHUNK = 2**21
"""Numbers at a time when all rows are brought up to date: what a cache holds."""
MOMENTUM = "momentum_buffer"
"""Its name in the state of torch.optim.SGD."""
BROKEN = -1
"""In place of the step up to which rows have their noise, while they are written."""
FEW = 4
"""One row of so many, or less, is treated apart from the others."""
PIECES = 16
"""Chunks in which rows are looked for that lie apart."""


class Table:
    """The values of ``parameter`` [n, d], which shows NaN while rows wait for their noise.

    ``address``: that of the table's first number among the trained ones. ``states``: gives what the optimizer has for
    each parameter, where there is momentum, which is hidden and shown, too. ``share``: which rows these are of the
    table's ``count``; all methods take them by their numbers here.
    """

    def __init__(
        self,
        parameter: Parameter,
        address: int,
        noise: GaussianNoise,
        states: Callable[[], MutableMapping[Parameter, dict[str, Any]]] | None,
        share: Share,
        count: int,
    ) -> None:
        self.parameter = parameter
        self.address = address
        self.share, self.count = share, count
        self._noise = noise
        self._states = states
        self._parts = [parameter.data]
        self._mask = _mask_of(parameter)
        self._done = torch.zeros(0, dtype=torch.int32)
        self.is_hidden = False

    def hide(self, steps: int) -> None:
        """Take the values out of the parameter, in which all rows have the noise of ``steps`` steps."""
        seen = self.shown()
        if self.is_hidden:
            if self.parameter.data_ptr() == self._parts[0].data_ptr():
                self.show(False)  # Ctrl-C ended a call that read the table.
                seen[0] = self.parameter.data
            is_masked = all(tensor is not None and tensor.data_ptr() == self._mask.data_ptr() for tensor in seen)
            if not is_masked or not self._mask[:1, :1].isnan().all():  # zero_() alone writes to one number for all
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
        self._mask = _mask_of(self.parameter)  # the last one may have been written to
        # An interruption from here on is one in which a table was replaced: flush() gives the values back.
        self.is_hidden = True
        self._momentum = self._mask
        self.show(False)

    def shown(self) -> list[Any]:
        """Return what the parameter and its momentum, where there is any, have now."""
        return [self.parameter.data] if self._states is None else [self.parameter.data, self._momentum]

    @property
    def numel(self) -> int:
        """Return how many numbers the whole table has."""
        return self.count * self._mask.shape[1]

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
        self.put(rows, state, steps)

    def _of(self, rows: Tensor) -> list[Tensor]:
        return [part.index_select(0, rows) for part in self._parts]

    def put(self, rows: Tensor, state: Sequence[Tensor], steps: int) -> None:
        """Keep the state of rows that have the noise of so many steps."""
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
            recent = history.is_recent(done).nonzero().squeeze(1).add_(first)
            if FEW * len(recent) <= len(done):  # they come together, wherever they lie
                for rows in recent.split(count):
                    bring_up([(self, rows)], history)
        for first in range(0, len(self._mask), count):
            some = slice(first, first + count)
            done = self._done[some]
            before = done.clone()
            done.fill_(BROKEN)
            rows = torch.arange(first, first + len(done))
            state = [part[some] for part in self._parts]
            self._add_late(state, rows, before, history)
            before[~history.is_recent(before)] = history.steps
            _repeat(state, self.places(rows), before, history, self.lattice[1])
            done.fill_(history.steps)
        like = self.parameter
        self.parameter.data = self._parts[0].to(like.device, like.dtype)
        self._momentum = self._parts[-1].to(like.device, like.dtype)
        self._parts, self._done, self.is_hidden = [self.parameter.data], self._done[:0], False

    def late(self, rows: Tensor, history: History) -> tuple[list[Tensor], Tensor]:
        """Return the state of ``rows`` with the noise of those that waited for many steps, and their steps as kept."""
        state, done = self._of(rows), self._done[rows]
        self._check_whole(done)
        self._add_late(state, rows, done, history)
        return state, done

    @property
    def lattice(self) -> tuple[int, int]:
        """Return where its rows begin among all addresses: at a multiple of its width, and so far beside it."""
        width = self._mask.shape[1]
        return width, self.address % width

    def places(self, rows: Tensor) -> Tensor:
        """Return the numbers of ``rows`` on its lattice."""
        return self.share.numbers(rows) + self.address // self._mask.shape[1]

    def _add_late(self, state: Sequence[Tensor], rows: Tensor, done: Tensor, history: History) -> None:
        """Do in place to the ``state`` of rows up to date at steps ``done`` what many steps did to some of them."""
        if not len(done) or int(done.min()) >= history.steps - history.exact:
            return
        kept, roots = history.late(done)
        if kept is not None:
            mix(state, kept)
        # Of streams of their own for every step at which rows are brought up to date, each of them at most once.
        for number, kind in enumerate(("noise", "momentum")[: len(state)]):
            name = self._noise.name(history.steps, f"pending {kind} from {self.address} on")
            for part, line in zip(state[number:], roots[number:], strict=True):
                add_noise(part, line[number], name, self.share.numbers(rows), self.address)


Read = Sequence[tuple[Table, Tensor]]
"""Tables, and of each of them different rows [n] in ascending order."""


def bring_up(read: Read, history: History) -> list[Tensor]:
    """Return the values of these rows of each table with all noise, [n, d]."""
    found = [table.late(rows, history) for table, rows in read]
    for (_, start), group in _by_lattice(read):
        done = _joined([found[i][1] for i in group])
        recent = history.is_recent(done).nonzero().squeeze(1)
        if not len(recent):
            continue
        state = [_joined(parts) for parts in zip(*(found[i][0] for i in group), strict=True)]
        places = _joined([read[i][0].places(read[i][1]) for i in group])
        if len(recent) == len(done):
            _repeat(state, places, done, history, start)
        else:
            some = [part[recent] for part in state]
            _repeat(some, places[recent], done[recent], history, start)
            for part, new in zip(state, some, strict=True):
                part[recent] = new
        cut = [part.split([len(read[i][1]) for i in group]) for part in state]
        for i, *parts in zip(group, *cut, strict=True):
            found[i] = list(parts), found[i][1]
    for (table, rows), (state, _) in zip(read, found, strict=True):
        table.put(rows, state, history.steps)
    return [state[0] for state, _ in found]


def noise_of(step: Step, read: Read) -> list[Tensor]:
    """Return the noise of a step in these rows of each table, by their numbers in the whole of it, [n, d]."""
    found = [torch.zeros(0)] * len(read)
    for (width, start), group in _by_lattice(read):
        drawn = _noise(step, _joined([read[i][1] + read[i][0].address // width for i in group]), width, start)
        for i, part in zip(group, drawn.split([len(read[i][1]) for i in group]), strict=True):
            found[i] = part
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _by_lattice(read: Read) -> list[tuple[tuple[int, int], list[int]]]:
    """Return which of the tables have rows on one lattice, in the order of their addresses.

    These are one table to who draws: a call for each of many would take longer than what it draws.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for i in sorted(range(len(read)), key=lambda i: read[i][0].address):
        found.setdefault(read[i][0].lattice, []).append(i)
    return list(found.items())


def _repeat(state: list[Tensor], places: Tensor, done: Tensor, history: History, start: int) -> None:
    """Do in place to rows that few steps have left out what these did: one step after the other."""
    oldest, newest, width = int(done.min()), int(done.max()), state[0].shape[1]
    for number, step in enumerate(history.recent, history.steps - len(history.recent)):
        if number >= newest:
            step.update(state, _noise(step, places, width, start))
        elif number >= oldest:
            is_newer = done > number
            which = is_newer.nonzero().squeeze(1)
            if FEW * len(which) <= len(done):  # a step that is made for all, which these then take back
                some = [part[which] for part in state]
                step.update(state, _noise(step, places, width, start))
            else:
                which = (~is_newer).nonzero().squeeze(1)
                some = [part[which] for part in state]
                step.update(some, _noise(step, places[which], width, start))
            for part, rows in zip(state, some, strict=True):
                part[which] = rows


def _noise(step: Step, places: Tensor, width: int, start: int) -> Tensor:
    noise = torch.zeros(len(places), width)
    add_noise(noise, torch.full((len(places),), step.std, dtype=torch.float64), step.name, places, start)
    return noise


def _mask_of(parameter: Parameter) -> Tensor:
    """Return NaN in its shape, of one number."""
    return torch.full((1, 1), float("nan")).expand(parameter.shape)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def add_noise(target: Tensor, deviations: Tensor, name: bytes, rows: Tensor, start: int) -> None:
    """target[i, j] += deviations[i] * (number start + rows[i] * width + j of the stream ``name``)."""
    if native.serves(target) and target.is_contiguous():
        native.add_normals_to_rows(target, deviations.float(), name, rows, start)
    else:
        normals.add_to_rows(target, deviations, name, rows, start)
