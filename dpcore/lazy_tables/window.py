"""The rows of a table that one batch reads, as a small table in the model's place for the large one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import UnsupportedError
from dpcore.lazy_tables.history import Step
from dpcore.lazy_tables.table import Table, noise_of
from dpcore.microbatch.accumulator import Accumulator
from dpcore.noise import GaussianNoise


class Window(nn.Module):
    """Stands for ``module``, an ``nn.Embedding`` or ``nn.EmbeddingBag``, while a step is made.

    ``rows``: those of the batch, in the first places. It has no ``weight``, which other code would take for the table.
    """

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, name: str) -> None:
        super().__init__()
        self.name = name
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.rows = Parameter(torch.zeros(1, module.embedding_dim))
        self._bag = (module.mode, module.include_last_offset) if isinstance(module, nn.EmbeddingBag) else None
        self._padding = module.padding_idx
        self._shown = torch.zeros(0, dtype=torch.int64)

    @property
    def shown(self) -> Tensor:
        """The table's rows that are here, ascending."""
        return self._shown

    def show(self, rows: Tensor, values: Tensor) -> None:
        """Hold these rows, different ones in ascending order, from now on."""
        places = len(rows) + 1  # place 0 is where ids of padding lead, which are not trained
        if places > len(self.rows):
            self.rows.data = torch.zeros(1 << (places - 1).bit_length(), self.embedding_dim)
        self.rows.data[1:places] = values
        if self._padding is not None and len(at := (rows == self._padding).nonzero()):
            self.rows.data[0] = values[at[0, 0]]
        self._shown = rows

    def part(self, of: Tensor) -> Tensor:
        """Return the places of the rows that are here, of a tensor like ``rows``."""
        return of[1 : len(self._shown) + 1]

    def _places(self, ids: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            places = torch.searchsorted(self._shown, ids.long().contiguous()).clamp_(max=max(len(self._shown) - 1, 0))
            if ids.numel() and not (len(self._shown) and bool((self._shown[places] == ids).all())):
                raise UnsupportedError(
                    f"{self.name} reads a row whose number is not among the integers of the batch x, so that its noise "
                    "may be missing; give the engine a function that finds the rows: "
                    f"tables={{{self.name!r}: rows_of}}, where rows_of(x) returns an integer tensor."
                )
            places += 1
            if self._padding is not None:
                places[ids == self._padding] = 0
        return places

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Do what the module does."""
        places, padding = self._places(input), None if self._padding is None else 0
        if self._bag is None:
            return F.embedding(places, self.rows, padding)
        mode, last = self._bag
        return F.embedding_bag(
            places,
            self.rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=last,
            padding_idx=padding,
        )


class NoiseOfWindows(GaussianNoise):
    """``noise`` where the engine has windows for the large tables: every number at its address among the latter's.

    ``tables``: those behind the parameters of windows.
    """

    def __init__(self, noise: GaussianNoise, tables: dict[Parameter, tuple[Window, Table]]) -> None:
        super().__init__(0)
        self.noise = noise
        self.tables = tables
        self.accumulator: Accumulator | None = None

    has_addresses = False  # those of the flat sum are others
    may_come_first = True

    def serve(self, user: Any) -> None:
        """Let the steps of ``user`` draw."""
        self.noise.serve(user)

    def fill_(self, target: Tensor, std: float, step: int, start: int = 0) -> Tensor:
        """Set the flat sum of all parameters to the step's noise."""
        assert self.accumulator is not None and target is self.accumulator.flat
        made = Step(self.noise.name(step), std, 0.0, 0.0)
        drawn = noise_of(made, [(table, window.shown) for window, table in self.tables.values()])
        of_tables = dict(zip(self.tables, drawn, strict=True))
        address = 0
        for param, summed in self.accumulator.sums.items():
            if param not in self.tables:
                self.noise.fill_(summed, std, step, address)
                address += param.numel()
                continue
            window, table = self.tables[param]
            summed.zero_()
            window.part(summed).copy_(of_tables[param])
            address += table.parameter.numel()
        return target
