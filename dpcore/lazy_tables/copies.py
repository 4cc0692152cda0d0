"""Tables on several ranks, whose rows wait for the same noise: copies, or of each table a share of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpcore.distributed import fingerprint
from dpcore.engine.together import Together
from dpcore.errors import PrivacyError
from dpcore.lazy_tables.table import CHUNK, Read, Table
from dpcore.noise import GaussianNoise
from dpcore.same_weights import SameWeights, check_none_alone, may_differ


class Copies:
    """Makes all ranks bring up to date what any of them reads. One process has no ``together``, and nothing to do.

    Each rank draws the noise of its rows by itself. What a row gets that has waited for long depends on the step at
    which it is brought up to date: so that is the same on all ranks, also for what calls of the model read on one.
    """

    def __init__(self, together: Together | None, tables: Sequence[Table], noise: GaussianNoise, kind: object) -> None:
        """Take the ``tables``, their ``noise``, and of what ``kind`` they are, which is compared."""
        self.made = 0
        """The number of steps that were made, and written to all tables."""
        self._together, self._tables, self._noise = together, tables, noise
        self._same, self._may_differ = SameWeights(), False
        self._read: list[list[Tensor]] = [[] for _ in tables]
        if together is not None:
            shapes = [(table.count, table.numel, table.address, table.share.size) for table in tables]
            together.ranks.agree({"the lazy tables": shapes, "what is kept of them": kind})

    @property
    def shares(self) -> bool:
        """Return whether each rank holds other rows."""
        return self._tables[0].share.ranks is not None

    def attempt(self) -> AbstractContextManager[None]:
        """Within, this rank does its own part of a step."""
        return nullcontext() if self._together is None else self._together.attempt()

    def note_read(self, table: Table, rows: Tensor) -> None:
        """Note that ``rows`` were brought up to date between steps."""
        if self._together is None:
            return
        read = self._read[self._tables.index(table)]
        read.append(rows)
        if sum(map(len, read)) > 2 * table.count:
            read[:] = [torch.cat(read).unique()]

    def check(self, steps: int) -> None:
        """PrivacyError where one of the ``steps`` was made in part; before each one, and on each rank by itself."""
        if self._together is not None and steps != self.made:
            raise PrivacyError(
                f"Step {self.made} was interrupted on this rank while it was written to the tables, and the other "
                "ranks have all of it; make the model and its LazyEngine anew on all ranks, from the last checkpoint."
            )

    def gather(
        self, rows: Sequence[Tensor], steps: int, optimizer: Any, is_step: bool
    ) -> tuple[list[Tensor], Read | None]:
        """Return which ``rows`` of each table any rank reads in a step of the ``optimizer``, or before one.

        Returns:
            Those, ascending; and what this one is to bring up to date before, since any has: None for all rows.

        Raises:
            PrivacyError: a rank has failed, has other noise, has made more steps, does not make one while others
                do, or has loaded its share alone.
        """
        if self._together is None:
            return list(rows), []
        self._together.meet()
        ranks = self._together.ranks
        mine = [*rows, *(torch.cat([rows[0][:0], *read]).unique() for read in self._read)]
        waits = all(table.is_hidden for table in self._tables)
        # Rows may get noise before the engine compares what it is drawn by.
        noise = (self._noise.version, self._noise.rank, self._noise.seed)
        same = self._same.told([table.parameter for table in self._tables], optimizer)
        words = [steps, hash(noise), is_step, *same, waits, *map(len, mine)]
        told = ranks.stacked(torch.tensor(words, device=ranks.device)).tolist()
        if self.shares:
            check_none_alone([of[3:5] for of in told])
        if any(of[:3] != words[:3] for of in told):
            ranks.agree({"the number of steps": steps, "the noise": noise, "whether they make a step": is_step})
        counts = [of[6:] for of in told]
        padded = torch.zeros(max(map(sum, counts)), dtype=torch.int64, device=ranks.device)
        padded[: sum(counts[ranks.rank])] = torch.cat(mine)
        found = [row[: sum(of)].split(of) for row, of in zip(ranks.stacked(padded).cpu(), counts, strict=True)]
        together = [torch.cat(parts).unique() for parts in zip(*found, strict=True)]
        read, between = together[: len(rows)], together[len(rows) :]
        # Where the step fails, some ranks may have brought them up to date, and others not.
        self._read = [[*of] for of in zip(read, between, strict=True)]
        self._may_differ = not self.shares and may_differ([of[3:5] for of in told])
        all_wait = all(of[5] for of in told) and not self._may_differ
        return read, self.held(between) if all_wait else None

    def held(self, rows: Sequence[Tensor]) -> Read:
        """Return those of the ``rows`` of each table that this rank holds."""
        return [(table, table.share.held(of)) for table, of in zip(self._tables, rows, strict=True)]

    def spread(self, values: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of ``rows`` of each table, of which this rank has those that it holds.

        PrivacyError, on all ranks, where one has failed before.
        """
        if self._together is None or not self.shares:
            return list(values)
        self._together.meet()
        return self._tables[0].share.spread(values, rows)

    def compare(self) -> None:
        """Compare the tables, all of whose rows are up to date, where those of a rank may be others; PrivacyError."""
        if self._together is None:
            return
        if self._may_differ:
            self._same.known = False
            self._together.meet()
            pieces = (piece for table in self._tables for piece in _pieces(table))
            self._together.ranks.agree({"the weights": fingerprint(pieces)})
        self._same.note()

    def forget(self) -> None:
        """Forget what was read, of which all ranks have made a step."""
        self._read = [[] for _ in self._tables]


def _pieces(table: Table) -> Iterable[Tensor]:
    """Return what the optimizer has of a table, in pieces that a cache holds."""
    shown = [part for part in table.shown() if part is not None]
    return (piece for part in shown for piece in part.split(max(CHUNK // part.shape[1], 1)))
