"""The rows of tables that one of several ranks holds, where none holds all."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.distributed import Ranks, ranks_of
from dpcore.errors import UnsupportedError


@dataclass(frozen=True)
class Share:
    """Every ``size``-th row of each table from number ``rank`` on: rows that are read often lie beside each other.

    ``ranks``: who holds the others; None where all hold all.
    """

    rank: int = 0
    size: int = 1
    ranks: Ranks | None = None

    @property
    def rows(self) -> slice:
        """Return which rows of a whole table are here."""
        return slice(self.rank, None, self.size)

    def numbers(self, here: Tensor) -> Tensor:
        """Return the numbers in the whole table of rows by their numbers ``here``."""
        return here if self.size == 1 else here * self.size + self.rank

    def places(self, rows: Tensor) -> Tensor:
        """Return which of ``rows``, by their numbers in the whole table, are here."""
        return (rows % self.size == self.rank).nonzero().squeeze(1)

    def held(self, rows: Tensor) -> Tensor:
        """Return those of ``rows`` that are here, by their numbers here."""
        return self.of(rows, rows) // self.size

    def of(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return the ``values`` of those of ``rows`` that are here."""
        return values if self.size == 1 else values[self.places(rows)]

    def spread(self, values: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of all ``rows`` of each table, of which each rank has those that it holds."""
        if self.ranks is None:
            return list(values)
        whole = [here.new_empty(len(of), here.shape[1]) for of, here in zip(rows, values, strict=True)]
        places = [[Share(rank, self.size).places(of) for of in rows] for rank in range(self.size)]
        counts = [[len(at) * of.shape[1] for at, of in zip(of_rank, whole, strict=True)] for of_rank in places]
        mine = torch.zeros(max(map(sum, counts)), dtype=values[0].dtype, device=self.ranks.device)
        mine[: sum(counts[self.rank])] = torch.cat([of.reshape(-1) for of in values])
        for at_rank, of_rank, count in zip(places, self.ranks.stacked(mine).cpu(), counts, strict=True):
            for table, at, part in zip(whole, at_rank, of_rank[: sum(count)].split(count), strict=True):
                table[at] = part.view(-1, table.shape[1])
        return whole

    def cut(self, weight: Parameter, state: MutableMapping[str, Any], count: int) -> None:
        """Leave of a table's ``count`` rows, and of what an optimizer has of them, what is to be here."""
        if self.ranks is None or len(weight) < count:
            return
        kept = {name: of[self.rows].clone() for name, of in state.items() if getattr(of, "shape", None) == weight.shape}
        state.update(kept)
        weight.data = weight.data[self.rows].clone(memory_format=torch.contiguous_format)


def share_of(model: nn.Module, is_asked: bool) -> Share:
    """Return which rows of tables this rank is to hold: with ``is_asked`` a part.

    UnsupportedError where no other ranks train the model.
    """
    if not is_asked:
        return Share()
    ranks = ranks_of(model)
    if ranks is None:
        raise UnsupportedError(
            "shard_tables deals the rows of tables out to the ranks that train copies of the other parameters; wrap "
            "the whole model in dpcore.distributed.DifferentiallyPrivateDistributedDataParallel, or leave it out."
        )
    return Share(ranks.rank, ranks.size, ranks)
