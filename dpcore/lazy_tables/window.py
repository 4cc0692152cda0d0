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

    def make_room(self, count: int) -> None:
        """Have places for so many rows."""
        places = count + 1  # place 0 is where ids of padding lead, which are not trained
        if places > len(self.rows):
            self.rows.data = torch.zeros(1 << (places - 1).bit_length(), self.embedding_dim)

    def show(self, rows: Tensor, values: Tensor) -> None:
        """Hold these rows, different ones in ascending order, from now on."""
        self.make_room(len(rows))
        self.rows.data[1 : len(rows) + 1] = values
        if self._padding is not None and len(at := (rows == self._padding).nonzero()):
            self.rows.data[0] = values[at[0, 0]]
        self._shown = rows

    def part(self, of: Tensor) -> Tensor:
        """Return the places of the rows that are here, of a tensor like ``rows``."""
        return of[1 : len(self._shown) + 1]

    def in_places(self, first: int, last: int) -> tuple[Tensor, slice, slice]:
        """Return the table's rows that have numbers among those [first, last) of ``rows``.

        Returns:
            Them; where these numbers are, counted from ``first``, and which ones of the rows' they are.
        """
        width = self.embedding_dim
        low, high = max(first // width, 1), min(-(-last // width), len(self._shown) + 1)
        begin = max(first, low * width)
        end = max(min(last, high * width), begin)
        found = self._shown[low - 1 : high - 1]
        return found, slice(begin - first, end - first), slice(begin - low * width, end - low * width)

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

    What the engine takes for an address is a place in its flat sum. ``tables``: those behind the parameters of windows.
    """

    def __init__(self, noise: GaussianNoise) -> None:
        self.noise = noise
        super().__init__(noise.seed, noise.rank)
        self.tables: dict[Parameter, tuple[Window, Table]] = {}
        self.accumulator: Accumulator | None = None

    @property
    def seed(self) -> int:  # type: ignore[override]
        """That of ``noise``, which ranks may replace by one of theirs together."""
        return self.noise.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.noise.seed = value

    def serve(self, user: Any) -> None:
        """Let the steps of ``user`` draw."""
        self.noise.serve(user)

    def note_made(self, step: int) -> None:
        """Note that a step was made."""
        self.noise.note_made(step)

    def _put(self, target: Tensor, std: float, step: int, start: int, add: bool) -> Tensor:
        """Write or add the noise of the places from ``start`` on to ``target``, a vector."""
        if std == 0.0:
            return target
        assert self.accumulator is not None
        place = address = 0
        read, parts = [], []
        for param in self.accumulator.parameters.values():
            first, last = max(start - place, 0), min(start + len(target) - place, param.numel())
            part = target[place + first - start : place + last - start] if first < last else target[:0]
            place += param.numel()
            if param not in self.tables:
                if first < last:
                    (self.noise.add_ if add else self.noise.fill_)(part, std, step, address + first)
                address += param.numel()
                continue
            window, table = self.tables[param]
            address += table.numel
            if first < last:
                rows, where, numbers = window.in_places(first, last)
                read.append((table, rows))
                parts.append(((part if add else part.zero_())[where], numbers))
        drawn = noise_of(Step(self.noise.name(step), std, 0.0, 0.0), read)
        for (part, numbers), noise in zip(parts, drawn, strict=True):
            part.add_(noise.view(-1)[numbers])
        return target
