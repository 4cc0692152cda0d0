"""Rules for embeddings. Per example, row v of the gradient is S_v = Σ_{t: id_t = v} G_t; all other rows are zero.

The norm needs the sums over equal ids, Σ_v |S_v|²; nothing of the vocabulary's size is formed per example, except a
table of small integers. Where the layer behind averages or sums over the positions, all G_t are one vector G, S_v =
count_v G, and on a CPU the ids are counted once for norm and sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore import gpu, native
from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.numerics.rounding import SquaredNorm, squares, unit
from dpcore.rules.limits import Limits
from dpcore.rules.linear import wide
from dpcore.tape.tape import Tape, batch_first
from dpcore.tape.uses import Saved, Use, handles


@functools.cache
def _csc_matvecs() -> Callable[..., None] | None:
    """Return the loop of scipy's own product, straight into a given array; None where scipy has it no more.

    The public way checks all indices and makes a copy as large as the table.
    """
    try:
        from scipy.sparse._sparsetools import csc_matvecs
    except ImportError:
        return None
    return csc_matvecs  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TokenCounts:
    """The different tokens of each example, and how often it holds each.

    Those of example b, of B, are ``tokens`` and ``counts`` (int32, floating point) from starts[b] to starts[b + 1].
    ``squares`` [B]: the sums of the squared counts.
    """

    tokens: Tensor
    counts: Tensor
    starts: Tensor
    squares: Tensor

    @classmethod
    def of(cls, ids: Tensor, rows: int, skipped: int | None, dtype: torch.dtype) -> TokenCounts:
        """Count the tokens of ids [B, T], T > 0, each in [0, rows), on a CPU; the token ``skipped`` does not count."""
        if dtype == torch.float32 and native.serves():
            return cls(*native.count_tokens(ids.contiguous(), rows, skipped))
        # Equal ids beside each other: numpy sorts integers along vectors, many times faster than torch.
        ordered = ids.numpy().astype(np.int32)
        ordered.sort(axis=1)
        last = np.ones(ordered.shape, dtype=bool)
        np.not_equal(ordered[:, 1:], ordered[:, :-1], out=last[:, :-1])
        ends = last.reshape(-1).nonzero()[0]
        tokens = ordered.reshape(-1)[ends]
        counts = ends + 1
        counts[1:] -= counts[:-1].copy()
        if skipped is not None:
            counts *= tokens != skipped
        starts = ends.searchsorted(np.arange(0, ids.numel() + 1, ids.shape[1]))
        squares = np.add.reduceat(counts * counts, starts[:-1])
        return cls(
            torch.from_numpy(tokens),
            torch.from_numpy(counts).to(dtype),
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(squares).to(dtype),
        )

    def add_rows(self, out: Tensor, rows: Tensor) -> None:
        """out[v] += Σ_b count_bv rows[b] in place; out [V, d], rows [B, d]."""
        if native.serves(out, rows, self.counts) and out.is_contiguous():
            native.add_by_token(out, self.tokens, self.counts, self.starts, rows)
            return
        n = int(self.starts[-1])
        add_sparse(out, self.tokens[:n].numpy(), self.starts.numpy(), rows, self.counts[:n].numpy())


class EmbeddingUse(Use):
    """Token ids [B, ...], weight [V, d], output gradient [B, ..., d]; rows of ``padding_idx`` are not trained."""

    sparse = True

    def __init__(self, name: str, ids: Tensor, weight: Parameter, padding_idx: int | None) -> None:
        self.name = name
        self.params = (weight,)
        self.padding_idx = padding_idx
        self._ids = Saved(ids)
        self._counts: TokenCounts | None = None
        # Sums of the gradients over equal ids, and what they are the sums of.
        self._sums: tuple[Tensor, int, Tensor] | None = None
        self._limits = Limits()
        self.formed = True
        """False where the vectors [B, T, d] never were formed."""

    def kind(self) -> tuple[Any, ...] | None:
        return None if self.grad is None else (type(self), id(self.params[0]))

    def ids(self) -> Tensor:
        """The ids [B, ...], which must not have been changed since."""
        return self._ids.get(self.name)

    def _pooled(self) -> tuple[TokenCounts, Tensor] | None:
        """Counts of the tokens and the output gradient [B, d] that all positions of an example share, on a CPU."""
        assert self.grad is not None
        ids = self.ids()
        if not _is_pooled(self.grad) or ids.dim() != 2 or not 0 < ids.numel() < 2**31:
            return None
        g = wide(self.grad[:, 0])
        if self._counts is None or self._counts.counts.dtype != g.dtype:
            self._counts = TokenCounts.of(ids.long(), len(self.params[0]), self.padding_idx, g.dtype)
        return self._counts, g

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Ids [B, T] and output gradients [B, T, d], zero where the id is ``padding_idx``.

        The gradients are expanded along T (stride 0) where the layer behind averages or sums over the positions.
        """
        assert self.grad is not None
        ids = self.ids()
        ids = ids.reshape(len(ids), -1).long()
        g = wide(self.grad)
        g = g if g.dim() == 3 else g.reshape(*ids.shape, -1)
        if self.padding_idx is not None:
            g = g.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return ids, g

    def _for_gpu(self) -> tuple[Tensor, Tensor] | None:
        """Ids [B, T] and output gradients [B, T, d] in their own precision, where kernels for GPUs take them."""
        if self.grad is None or not gpu.available():
            return None
        ids = self.ids()
        ids, g = ids.reshape(len(ids), -1), self.grad.detach()
        g = g if g.dim() == 3 else g.reshape(*ids.shape, -1)
        return (ids, g) if ids.shape[1] > 1 and g.stride(1) != 0 and gpu.serves_lookup(g, ids) else None

    def _slots(self, ids: Tensor) -> Tensor:
        """[B, T] positions such that equal ids of an example share one: any position that holds the id.

        Every position writes itself into a table at its id, and all read back whoever wrote last: O(T), no sorting, and
        the table is never cleared because only cells just written are read.
        """
        table = ids.new_empty((len(ids), self.params[0].shape[0]), dtype=torch.int32)
        table.scatter_(1, ids, torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids))
        return table.gather(1, ids).long()

    def _slot_counts(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T]: how often an example holds a token, at one of its positions, zero at the others."""
        counts = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
        ones = torch.ones((), dtype=dtype, device=ids.device).expand_as(ids)
        return counts.scatter_add_(1, self._slots(ids), ones)

    def _token_sums(self, ids: Tensor, g: Tensor) -> Tensor:
        """[B, T, d]: S_v of each different token at one of its positions, zero at the others.

        Clipped are these very sums, whose norm was taken. Gradients that are clipped one by one and then added up are
        rounded one by one: where they cancel, that rest has a larger norm than the sum, and the example than C.
        """
        assert self.grad is not None
        if self._sums is None or self._sums[0] is not self.grad or self._sums[1] != self.grad._version:
            rows = self._slots(ids) + torch.arange(0, ids.numel(), ids.shape[1], device=ids.device).unsqueeze(1)
            sums = add_rows(torch.zeros((ids.numel(), g.shape[2]), dtype=g.dtype, device=g.device), rows, g)
            self._sums = self.grad, self.grad._version, sums.view(*ids.shape, -1)
        return self._sums[2]

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        pooled = self._pooled()
        if pooled is not None:
            tokens, g = pooled
            norms = squares(g)
            norms.value.mul_(tokens.squares)
            return norms._replace(error=norms.error + 2.0 * unit(g.dtype))
        if (taken := self._for_gpu()) is not None:
            norms, limits = gpu.lookup_norm_sq(*taken, self.padding_idx)
            assert self.grad is not None
            self._limits.note(self.grad, limits)
            return norms
        ids, g = self._positions()
        if ids.shape[1] == 1:
            return squares(g[:, 0])
        if g.stride(1) == 0:
            norms = squares(g[:, 0])
            counts = self._slot_counts(ids, g.dtype)
            total = squares(counts)
            norms.value.mul_(total.value)
            return norms._replace(error=(1.0 + norms.error) * (1.0 + total.error) - 1.0 + 2.0 * unit(g.dtype))
        return squares(self._token_sums(ids, g).flatten(1))

    def grad_sample(self, param: Parameter) -> Tensor:
        ids, g = self._positions()
        v, d = param.shape
        out = torch.zeros((len(ids) * v, d), dtype=g.dtype, device=g.device)
        rows = ids + torch.arange(0, len(out), v, device=ids.device).unsqueeze(1)
        return add_rows(out, rows, g).view(len(ids), v, d)

    def takes_turns(self, param: Parameter) -> bool:
        return True

    def example(self, param: Parameter, i: int) -> Tensor:
        assert self.grad is not None
        out = torch.zeros(param.shape, dtype=wide(self.grad[:0]).dtype, device=self.grad.device)
        self.add_example(param, i, out)
        return out

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        assert self.grad is not None
        ids = self.ids()[i].reshape(-1).long()
        g = wide(self.grad[i]).reshape(len(ids), -1)
        if self.padding_idx is not None:
            g = g.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        add_rows(out, ids, g)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        pooled = self._pooled()
        if pooled is not None:
            tokens, g = pooled
            tokens.add_rows(out, g * factors.unsqueeze(1))
            return
        if (taken := self._for_gpu()) is not None:
            gpu.lookup_clipped_sum(*taken, self.padding_idx, factors, out, self._limits.of(self.grad))
            return
        ids, g = self._positions()
        factors = factors.view(-1, 1, 1)
        if ids.shape[1] == 1:
            add_rows(out, ids, g * factors)
            return
        if g.stride(1) == 0:
            # Once for each different token: an addition for each of its positions would be a rounding for each.
            add_rows(out, ids, (g[:, :1] * factors) * self._slot_counts(ids, g.dtype).unsqueeze(2))
            return
        sums = self._token_sums(ids, g)
        # As large as the vectors: no longer held than needed.
        self._sums = None
        add_rows(out, ids, sums.mul_(factors))

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return True

    def rows(self, index: Tensor, dtype: torch.dtype) -> EmbeddingUse:
        ids = self.ids().index_select(0, index)
        use = EmbeddingUse(self.name, ids, self.params[0], self.padding_idx)
        if self.grad is not None and _is_pooled(self.grad):
            use.grad = self.grad[:, :1].index_select(0, index).to(dtype).expand(-1, *self.grad.shape[1:])
        elif self.grad is not None:
            use.grad = self.grad.index_select(0, index).to(dtype)
            use._limits = self._limits.rows(self.grad, index, use.grad)
        return use

    def of_units(self, group: int) -> EmbeddingUse:
        ids, g = self.ids(), self.grad
        use = EmbeddingUse(self.name, ids.reshape(len(ids) // group, -1), self.params[0], self.padding_idx)
        use.grad = None if g is None else g.reshape(*use.ids().shape, -1)
        return use

    def stash_bytes(self) -> int:
        ids = self._ids.tensor
        pooled = self.grad is not None and _is_pooled(self.grad)
        # Counts of the tokens, or the table of slots, which a single position has no need of.
        several = ids.numel() > len(ids)
        table = 8 * ids.numel() if pooled else 4 * len(ids) * self.params[0].shape[0] * several
        grad = self.grad if self.formed or self.grad is None else self.grad[:, 0]
        return ids.nbytes + table + (0 if grad is None else grad.nbytes)


def _is_pooled(grad: Tensor) -> bool:
    """Return whether the gradients at all positions of an example are one in memory that numpy sees."""
    return grad.dim() == 3 and grad.stride(1) == 0 and _has_memory(grad)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether numpy can see its values: on a CPU, and not while it is traced."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """out[index[...]] += rows[..., :] in place with repeated indices added up; out [V, d], index [...], rows [...,
    d].
    """
    index, rows = index.reshape(-1), rows.reshape(-1, out.shape[1])
    if not _has_memory(out) or not len(index):
        return out.index_add_(0, index, rows)
    add_sparse(out, index.numpy(), np.arange(len(index) + 1), rows)
    return out


def add_rows_of_bags(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """out[index[b, t]] += rows[b] in place with repeated indices added up; out [V, d], index [B, T], rows [B, d]."""
    length = index.shape[1]
    if not _has_memory(out) or not len(index):
        return out.index_add_(0, index.reshape(-1), rows.repeat_interleave(length, 0))
    add_sparse(out, index.reshape(-1).numpy(), np.arange(0, index.numel() + 1, length), rows)
    return out


def add_weighted_rows(out: Tensor, index: Tensor, owner: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """out[index[n]] += weights[n] * rows[owner[n]] in place; out [V, d], rows [B, d], ``owner`` [N] in ascending
    order.
    """
    if not _has_memory(out) or not len(index):
        return out.index_add_(0, index, rows[owner] * weights.unsqueeze(1))
    starts = np.concatenate([[0], torch.bincount(owner, minlength=len(rows)).cumsum(0).numpy()])
    add_sparse(out, index.numpy(), starts, rows, weights.numpy())
    return out


def add_sparse(
    out: Tensor, index: np.ndarray, starts: np.ndarray, rows: Tensor, values: np.ndarray | None = None
) -> None:
    """Add M rows to ``out``, where column j of the sparse M holds ``values`` at index[starts[j] : starts[j + 1]].

    ``values`` None are ones. out [V, d], index in [0, V). The product of a sparse matrix is one tight loop; torch's
    index_add_ on a CPU took 6 to 12 times as long.
    """
    right = rows.contiguous().numpy()
    values = np.ones(len(index), dtype=right.dtype) if values is None else values
    inner = _csc_matvecs()
    if inner is None or not out.is_contiguous() or not (out.dtype == rows.dtype and right.dtype == values.dtype):
        matrix = scipy.sparse.csc_array((values, index, starts), shape=(len(out), len(rows)), copy=False)
        out += torch.from_numpy(matrix @ right)
        return
    starts = starts.astype(index.dtype, copy=False)
    inner(*out.shape[:1], *right.shape, starts, index, values, right.reshape(-1), out.numpy().reshape(-1))


def _pool(tape: Tape, use: EmbeddingUse, total: Tensor, count: int) -> Tensor:
    """Records ``use``, of whose vectors only the sums ``total`` [B, d] over the positions, divided by ``count``, are
    formed.
    """
    use.formed = False
    length = use.ids().shape[1]

    def receive(grad: Tensor | None) -> None:
        if grad is not None:
            use.grad = (grad if count == 1 else grad / count).unsqueeze(1).expand(-1, length, -1)

    tape.uses.append(use)
    return tape.attach(total if count == 1 else total / count, receive)


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
        name = tape.layer((weight,))
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
        batch_dim = tape.batch.of(input, (weight,), 0)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += len(weight)
        if batch_dim < 0:
            if weight in tape.sources.stands:
                raise NoRuleError(f"{name} looks up a table that is itself computed from parameters.", (weight,))

            # The same ids for every example, as those of positions. The tape keeps this function, which must not keep
            # the tape: all activations would wait for Python's collector.
            batch_size = tape.batch_size

            def repeated() -> EmbeddingUse:
                return EmbeddingUse(name, input.expand(batch_size, *input.shape), weight, padding_idx)

            return tape.derive(func, (input, weight, padding_idx), {}, added=repeated)
        ids = batch_first(input, batch_dim, tape.batch_size)
        use = EmbeddingUse(name, ids, weight, padding_idx)

        def form() -> Tensor:
            use.ids()
            formed = EmbeddingUse(name, ids, weight, padding_idx)
            return tape.record(formed, func(input, weight.detach(), padding_idx), batch_dim)

        if not batch_dim and tape.lookups.may_wait(tape, weight, input):
            return tape.lookups.put_off(tape, weight, input, form, lambda total, count: _pool(tape, use, total, count))
        output = form()
        if tape.probing and not batch_dim and output.dim() == 3:
            tape.lookups.watch(output, weight)
        return output

    return call(*args, **kwargs)


@handles(torch.mean, Tensor.mean, derives=True)
def _mean(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A mean over dimensions as a sum and a division, so that its gradient is one vector expanded along them (stride 0)
    and not a copy per position; embedding rules above make use of that.
    """
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
