"""Rules for embeddings. Per example, row v of the gradient is S_v = Σ_{t: id_t = v} G_t; all other rows are zero.

The norm needs the sums over equal ids, Σ_v |S_v|²; nothing of the vocabulary's size is formed per example, except a
table of small integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import csc_array
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import UnsupportedError
from dpcore.grad_sample.contraction import wide
from dpcore.grad_sample.tape import Saved, Tape, Use, handles


class EmbeddingUse(Use):
    """Token ids [B, ...], weight [V, d], output gradient [B, ..., d]; rows of ``padding_idx`` are not trained."""

    def __init__(self, name: str, ids: Tensor, weight: Parameter, padding_idx: int | None) -> None:
        self.name = name
        self.params = (weight,)
        self.padding_idx = padding_idx
        self._ids = Saved(ids)

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Ids [B, T] and output gradients [B, T, d], zero where the id is ``padding_idx``.

        The gradients are expanded along T (stride 0) where the layer behind averages or sums over the positions.
        """
        assert self.grad is not None
        ids = self._ids.get(self.name)
        ids = ids.reshape(len(ids), -1).long()
        g = wide(self.grad)
        g = g if g.dim() == 3 else g.reshape(*ids.shape, -1)
        if self.padding_idx is not None:
            g = g.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return ids, g

    def _slots(self, ids: Tensor) -> Tensor:
        """[B, T] positions such that equal ids of an example share one: any position that holds the id.

        Every position writes itself into a table at its id, and all read back whoever wrote last: O(T), no sorting, and
        the table is never cleared because only cells just written are read.
        """
        table = ids.new_empty((len(ids), self.params[0].shape[0]), dtype=torch.int32)
        table.scatter_(1, ids, torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids))
        return table.gather(1, ids).long()

    def norm_sq(self, param: Parameter) -> tuple[Tensor, Tensor | None]:
        ids, g = self._positions()
        if ids.shape[1] == 1:
            return g.square().sum((1, 2)), None
        slots = self._slots(ids)
        if g.stride(1) == 0:
            counts = torch.zeros(ids.shape, dtype=g.dtype, device=g.device)
            counts.scatter_add_(1, slots, torch.ones((), dtype=g.dtype, device=g.device).expand_as(ids))
            return g[:, 0].square().sum(1) * counts.square().sum(1), None
        rows = slots + torch.arange(0, ids.numel(), ids.shape[1], device=ids.device).unsqueeze(1)
        sums = add_rows(torch.zeros((ids.numel(), g.shape[2]), dtype=g.dtype, device=g.device), rows, g)
        return sums.view(len(ids), -1).square().sum(1), None

    def grad_sample(self, param: Parameter) -> Tensor:
        ids, g = self._positions()
        v, d = param.shape
        out = torch.zeros((len(ids) * v, d), dtype=g.dtype, device=g.device)
        rows = ids + torch.arange(0, len(out), v, device=ids.device).unsqueeze(1)
        return add_rows(out, rows, g).view(len(ids), v, d)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        ids, g = self._positions()
        if g.stride(1) == 0:
            add_pooled_rows(out, ids, g[:, 0] * factors.unsqueeze(1))
        else:
            add_rows(out, ids, g * factors.view(-1, 1, 1))

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return True

    def rows(self, index: Tensor, dtype: torch.dtype) -> EmbeddingUse:
        ids = self._ids.get(self.name).index_select(0, index)
        use = EmbeddingUse(self.name, ids, self.params[0], self.padding_idx)
        use.grad = None if self.grad is None else self.grad.index_select(0, index).to(dtype)
        return use

    def stash_bytes(self) -> int:
        ids = self._ids.tensor
        table = 4 * len(ids) * self.params[0].shape[0]
        return ids.nbytes + table + (0 if self.grad is None else self.grad.nbytes)


def add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """out[index[...]] += rows[..., :] in place with repeated indices added up; out [V, d], index [...], rows [...,
    d].
    """
    index, rows = index.reshape(-1), rows.reshape(-1, out.shape[1])
    if out.device.type != "cpu" or not len(index):
        return out.index_add_(0, index, rows)
    _add_sparse(out, index, np.arange(len(index) + 1), rows)
    return out


def add_weighted_rows(out: Tensor, index: Tensor, owner: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """out[index[n]] += weights[n] * rows[owner[n]] in place; out [V, d], rows [B, d], ``owner`` [N] in ascending
    order."""
    if out.device.type != "cpu" or not len(index):
        return out.index_add_(0, index, rows[owner] * weights.unsqueeze(1))
    starts = np.concatenate([[0], torch.bincount(owner, minlength=len(rows)).cumsum(0).numpy()])
    _add_sparse(out, index, starts, rows, weights.numpy())
    return out


def add_pooled_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """out[index[b, t]] += rows[b] in place for all b, t; out [V, d], index [B, T], rows [B, d]."""
    if out.device.type != "cpu" or not index.numel():
        return out.index_add_(0, index.reshape(-1), rows.repeat_interleave(index.shape[1], 0))
    _add_sparse(out, index.reshape(-1), np.arange(0, index.numel() + 1, index.shape[1]), rows)
    return out


def _add_sparse(out: Tensor, index: Tensor, starts: np.ndarray, rows: Tensor, values: np.ndarray | None = None) -> None:
    """out += M rows, where column j of the sparse matrix M holds ``values`` (ones) at index[starts[j] : starts[j + 1]].

    The product of a sparse matrix is one tight loop; torch's index_add_ on a CPU took 6 to 12 times as long.
    """
    values = np.ones(len(index), dtype=rows.numpy().dtype) if values is None else values
    matrix = csc_array((values, index.numpy(), starts), shape=(len(out), len(rows)), copy=False)
    out += torch.from_numpy(matrix @ rows.contiguous().numpy())


@handles(F.embedding)
def _embedding(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def call(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if not tape.trains(weight):
            return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        name = tape.name((weight,))
        if max_norm is not None:
            raise UnsupportedError(
                f"{name} has max_norm={max_norm}, which rescales the rows of the tokens in the batch without "
                f"noise and so "
                "reveals them; set max_norm=None."
            )
        if scale_grad_by_freq:
            raise UnsupportedError(
                f"{name} has scale_grad_by_freq=True, which makes one example's gradient depend on the others' tokens; "
                "set it to False."
            )
        batch_dim = tape.batch_dim(input, (weight,), 0)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += len(weight)
        output = func(input, weight.detach(), padding_idx)
        if batch_dim < 0:
            # The same ids for every example, as those of positions.
            def use() -> EmbeddingUse:
                return EmbeddingUse(name, input.expand(tape.batch_size, *input.shape), weight, padding_idx)

            return tape.share(output, weight, use)
        ids = input.transpose(0, 1) if batch_dim else input
        return tape.record(EmbeddingUse(name, ids, weight, padding_idx), output, batch_dim)

    return call(*args, **kwargs)


@handles(torch.mean, Tensor.mean)
def _mean(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A mean over dimensions as a sum and a division, so that its gradient is one vector expanded along them (stride 0)
    and not a copy per position; embedding rules above make use of that."""
    tensor = args[0] if args else kwargs.get("input")
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    plain = len(args) <= 2 and not set(kwargs) - {"dim", "input"}
    if not plain or dims is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return func(*args, **kwargs)
    over = (dims,) if isinstance(dims, int) else tuple(dims)
    count = 1
    for dim in over or range(tensor.dim()):
        count *= tensor.shape[dim]
    return tensor.sum(dims) / count if count else func(*args, **kwargs)
