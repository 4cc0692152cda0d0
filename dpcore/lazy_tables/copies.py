"""Copies of the tables on several ranks, whose rows wait for the same noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dpcore.distributed import fingerprint
from dpcore.engine.together import Together
from dpcore.errors import PrivacyError
from dpcore.lazy_tables.table import CHUNK, Read, Table
from dpcore.noise import GaussianNoise


class Copies:
    """Makes all ranks bring up to date what any of them reads. One process has no ``together``, and nothing to do.

    Each rank draws the noise of rows by itself. What a row gets that has waited for long depends on the step at which
    it is brought up to date: so that is the same on all ranks, also for what calls of the model read on one of them.
    """

    def __init__(self, together: Together | None, tables: Sequence[Table], noise: GaussianNoise, kind: object) -> None:
        """Take the ``tables``, their ``noise``, and of what ``kind`` they are, which is compared."""
        self.made = 0
        """The number of steps that were made, and written to all tables."""
        self._together, self._tables, self._noise = together, tables, noise
        self._are_alike = together is None
        self._weights = 0
        self._read: list[list[Tensor]] = [[] for _ in tables]
        if together is not None:
            shapes = [(table.parameter.shape, table.address) for table in tables]
            together.ranks.agree({"the lazy tables": shapes, "what is kept of them": kind})

    def attempt(self) -> AbstractContextManager[None]:
        """Within, this rank does its own part of a step."""
        return nullcontext() if self._together is None else self._together.attempt()

    def note_read(self, table: Table, rows: Tensor) -> None:
        """Note that ``rows`` were brought up to date between steps."""
        if self._together is None:
            return
        read = self._read[self._tables.index(table)]
        read.append(rows)
        if sum(map(len, read)) > 2 * table.rows:
            read[:] = [torch.cat(read).unique()]

    def check(self, steps: int) -> None:
        """PrivacyError where one of the ``steps`` was made in part; before each one, and on each rank by itself."""
        if self._together is not None and steps != self.made:
            raise PrivacyError(
                f"Step {self.made} was interrupted on this rank while it was written to the tables, and the other "
                "ranks have all of it; make the model and its LazyEngine anew on all ranks, from the last checkpoint."
            )
        if not self._are_alike:
            self._weights = fingerprint(piece for table in self._tables for piece in _pieces(table))

    def gather(self, rows: Sequence[Tensor], steps: int) -> tuple[list[Tensor], Read | None]:
        """Return which ``rows`` of each table any rank reads in a step.

        Returns:
            Those, ascending; and what all ranks are to bring up to date before, since any has: None for all rows.

        Raises:
            PrivacyError: a rank has failed, has other noise, other weights at the first step, or has made more steps.
        """
        if self._together is None:
            return list(rows), []
        self._together.meet()
        ranks = self._together.ranks
        mine = [*rows, *(torch.cat([rows[0][:0], *read]).unique() for read in self._read)]
        waits = all(table.is_hidden for table in self._tables)
        # Rows may get noise before the engine compares what it is drawn by.
        noise = (self._noise.version, self._noise.rank, self._noise.seed)
        like = [steps, self._weights, hash(noise)]
        told = ranks.stacked(torch.tensor([*like, waits, *map(len, mine)], device=ranks.device)).tolist()
        if any(of[:3] != like for of in told):
            ranks.agree({"the number of steps": steps, "the weights": self._weights, "the noise": noise})
        counts = [of for _, _, _, _, *of in told]
        padded = torch.zeros(max(map(sum, counts)), dtype=torch.int64, device=ranks.device)
        padded[: sum(counts[ranks.rank])] = torch.cat(mine)
        found = [row[: sum(of)].split(of) for row, of in zip(ranks.stacked(padded).cpu(), counts, strict=True)]
        together = [torch.cat(parts).unique() for parts in zip(*found, strict=True)]
        self._are_alike, self._weights = True, 0
        read, between = together[: len(rows)], together[len(rows) :]
        # Where the step fails, some ranks may have brought them up to date, and others not.
        self._read = [[*of] for of in zip(read, between, strict=True)]
        all_wait = all(waits for _, _, _, waits, *_ in told)
        return read, [*zip(self._tables, between, strict=True)] if all_wait else None

    def forget(self) -> None:
        """Forget what was read, of which all ranks have made a step."""
        self._read = [[] for _ in self._tables]


def _pieces(table: Table) -> Iterable[Tensor]:
    """Return what the optimizer has of a table, in pieces that a cache holds."""
    shown = [part for part in table.shown() if part is not None]
    return (piece for part in shown for piece in part.split(max(CHUNK // part.shape[1], 1)))
