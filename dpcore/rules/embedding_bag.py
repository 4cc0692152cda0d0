"""Rules for ``nn.EmbeddingBag``: one bag of ids per example.

For a sum or mean, y_b = Σ_n a_n W[id_n] over the ids of bag b, the gradient has rank one: row v of it is c_bv G_b with
c_bv = Σ_{n: id_n = v} a_n. For a maximum every column of the output belongs to one id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore import native
from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.native.parts import Part
from dpcore.numerics.rounding import SquaredNorm, gamma, squares, trusted
from dpcore.rules.embedding import add_rows, add_rows_of_bags, add_weighted_rows
from dpcore.rules.linear import wide
from dpcore.rules.normalization import bound_arguments
from dpcore.tape.tape import Tape
from dpcore.tape.uses import Saved, Use, handles


class EmbeddingBagUse(Use):
    """Ids [N] that count, in the order of their bags [N], with coefficients [N]; weight [V, d], output gradient [B,
    d].
    """

    def __init__(self, name: str, weight: Parameter, ids: Tensor, bags: Tensor, coefficients: Tensor) -> None:
        self.params = (weight,)
        self.name = name
        self.ids, self.bags = ids, bags
        self._coefficients = Saved(coefficients)
        self._sums: Tensor | None = None

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Output gradients [B, d] and coefficients [N]."""
        assert self.grad is not None
        g = wide(self.grad)
        return g, self._coefficients.get(self.name).to(g.dtype)

    def _token_sums(self) -> Tensor:
        """[N]: c_bv at one place of each different id of a bag, zero at the others; equal ids find each other as in
        :class:`EmbeddingUse`, and as there what is clipped is what the norm was taken of: weights may cancel.
        """
        g, coefficients = self._parts()
        if self._sums is None or self._sums.dtype != coefficients.dtype:
            rows = len(self.params[0])
            cells = self.bags * rows + self.ids
            table = self.ids.new_empty(len(g) * rows, dtype=torch.int32)
            table[cells] = torch.arange(len(cells), dtype=torch.int32, device=cells.device)
            self._sums = torch.zeros_like(coefficients).index_add_(0, table[cells].long(), coefficients)
        return self._sums

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        """|G_b|² Σ_v c_bv²."""
        g, _ = self._parts()
        counts = torch.zeros(len(g), dtype=torch.float64, device=g.device)
        counts.index_add_(0, self.bags, self._token_sums().double().square())
        norms = squares(g)
        error = norms.error + gamma(len(self.bags) + 1, torch.float64)
        largest = torch.maximum(norms.value.double(), counts)
        return SquaredNorm(trusted(norms.value * counts, largest, g.shape[1]), error)

    def grad_sample(self, param: Parameter) -> Tensor:
        g, coefficients = self._parts()
        v, d = param.shape
        out = g.new_zeros((len(g) * v, d))
        add_rows(out, self.bags * v + self.ids, g[self.bags] * coefficients.unsqueeze(1))
        return out.view(len(g), v, d)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        g, _ = self._parts()
        add_weighted_rows(out, self.ids, self.bags, self._token_sums(), g * factors.unsqueeze(1))

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return True

    def rows(self, index: Tensor, dtype: torch.dtype) -> EmbeddingBagUse:
        assert self.grad is not None
        number = self.bags.new_full((len(self.grad),), -1)
        number[index] = torch.arange(len(index), device=index.device)
        bags = number[self.bags]
        kept = (bags >= 0).nonzero().squeeze(1)
        kept = kept[bags[kept].argsort(stable=True)]
        coefficients = self._coefficients.get(self.name)[kept].to(dtype)
        use = EmbeddingBagUse(self.name, self.params[0], self.ids[kept], bags[kept], coefficients)
        use.grad = self.grad.index_select(0, index).to(dtype)
        return use

    def stash_bytes(self) -> int:
        grad = 0 if self.grad is None else self.grad.nbytes
        table = 0 if self.grad is None else 4 * len(self.grad) * len(self.params[0])
        return self.ids.nbytes + self.bags.nbytes + self._coefficients.tensor.nbytes + grad + table


MOST_IN_A_BAG = 32
"""Ids of a bag that are compared with each other; beyond, looking them up in a table takes less time and memory."""


class EqualBagUse(Use):
    """Sums or means over bags of one length: ``ids`` [B, T], each with the same ``coefficient``; weight [V, d], output
    gradient [B, d].
    """

    def __init__(self, name: str, weight: Parameter, ids: Tensor, coefficient: float) -> None:
        self.params = (weight,)
        self.name = name
        self._ids = Saved(ids)
        self.coefficient = coefficient

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Output gradients [B, d] and ids [B, T]."""
        assert self.grad is not None
        return wide(self.grad), self._ids.get(self.name)

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        """|G_b|² Σ_v c_bv², where Σ_v c_bv² is the number of pairs of equal ids times the coefficient's square."""
        g, ids = self._parts()
        pairs = (ids.unsqueeze(2) == ids.unsqueeze(1)).sum((1, 2)).double()
        counts = pairs * self.coefficient**2
        norms = squares(g)
        # What is added is the coefficient times the factor times g, each rounded, and k of these in turn for
        # an id that occurs k times, which may round upwards every time. The square doubles all of it.
        error = norms.error + gamma(2 * (ids.shape[1] + 3), g.dtype)
        largest = torch.maximum(norms.value.double(), counts)
        return SquaredNorm(trusted(norms.value * counts, largest, g.shape[1]), error)

    def grad_sample(self, param: Parameter) -> Tensor:
        g, ids = self._parts()
        v, d = param.shape
        out = g.new_zeros((len(g) * v, d))
        places = ids + v * torch.arange(len(g), device=ids.device).unsqueeze(1)
        add_rows(out, places, (g * self.coefficient).unsqueeze(1).expand(*ids.shape, d))
        return out.view(len(g), v, d)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        g, ids = self._parts()
        add_rows_of_bags(out, ids, g * (factors * self.coefficient).unsqueeze(1))

    def for_kernels(self, param: Parameter, formed: bool) -> Part | None:
        g, ids = self.grad, self._ids.get(self.name)
        assert g is not None
        if not native.are_plain(g) or not param.is_contiguous():
            return None
        return Part.bags(g if self.coefficient == 1.0 else g * self.coefficient, ids)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return True


class EmbeddingMaxUse(Use):
    """``winners`` [B, d]: the id that each column of the output comes from, -1 in an empty bag; weight [V, d]."""

    def __init__(self, name: str, weight: Parameter, winners: Tensor) -> None:
        self.name = name
        self.params = (weight,)
        self._winners = Saved(winners)

    def _g(self) -> Tensor:
        assert self.grad is not None
        return wide(self.grad).masked_fill(self._winners.tensor < 0, 0.0)

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        return squares(self._g())

    def grad_sample(self, param: Parameter) -> Tensor:
        g = self._g()
        out = g.new_zeros((len(g), *param.shape))
        return out.scatter_(1, self._winners.tensor.clamp(min=0).unsqueeze(1), g.unsqueeze(1))

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        out.scatter_add_(0, self._winners.tensor.clamp(min=0), (self._g() * factors.unsqueeze(1)).to(out.dtype))

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return True


def _bags(call: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Ids [N], the bag of each [N], and the number of bags."""
    ids, offsets = call["input"], call["offsets"]
    if ids.dim() == 2:
        bags = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
        return ids.reshape(-1).long(), bags, len(ids)
    count = len(offsets) - 1 if call["include_last_offset"] else len(offsets)
    ends = torch.cat([offsets[1 : count + 1].long(), offsets.new_full((1,), len(ids)).long()])[:count]
    return ids.long(), torch.repeat_interleave(ends - offsets[:count].long()), count


@handles(F.embedding_bag)
def _embedding_bag(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    call = bound_arguments(func, args, kwargs)
    weight = call["weight"]
    if not tape.trains(weight):
        return func(*args, **kwargs)
    name = tape.layer((weight,))
    if call["max_norm"] is not None:
        raise UnsupportedError(
            f"{name} has max_norm={call['max_norm']}, which rescales the rows of the tokens in the batch without noise "
            "and so reveals them; set max_norm=None."
        )
    if call["scale_grad_by_freq"]:
        raise UnsupportedError(
            f"{name} has scale_grad_by_freq=True, which makes one example's gradient depend on the others' tokens; "
            "set it to False."
        )
    padding_idx = call["padding_idx"]
    given = call["input"]
    equal = given.dim() == 2 and 0 < given.shape[1] <= MOST_IN_A_BAG
    if equal and call["mode"] != "max" and padding_idx is None and call["per_sample_weights"] is None:
        _check_count(tape, name, weight, len(given))
        call["weight"] = weight.detach()
        coefficient = 1.0 / given.shape[1] if call["mode"] == "mean" else 1.0
        return tape.record(EqualBagUse(name, weight, given.long(), coefficient), func(**call))
    ids, bags, count = _bags(call)
    _check_count(tape, name, weight, count)
    padding_idx = None if padding_idx is None else padding_idx % len(weight)
    counts = torch.ones(len(ids), dtype=torch.bool, device=ids.device) if padding_idx is None else ids != padding_idx
    if call["mode"] == "max":
        output, winners = _maximum(weight, ids, bags, counts, count, padding_idx)
        return tape.record(EmbeddingMaxUse(name, weight, winners), output)
    call["weight"] = weight.detach()
    output = func(**call)
    if call["per_sample_weights"] is not None:
        coefficients = call["per_sample_weights"].detach().reshape(-1)
    else:
        coefficients = torch.ones(len(ids), dtype=output.dtype, device=ids.device)
    if padding_idx is not None:
        ids, bags, coefficients = ids[counts], bags[counts], coefficients[counts]
    if call["mode"] == "mean":
        lengths = torch.zeros(count, dtype=output.dtype, device=ids.device).index_add_(0, bags, coefficients)
        coefficients = coefficients / lengths[bags]
    return tape.record(EmbeddingBagUse(name, weight, ids, bags, coefficients), output)


def _check_count(tape: Tape, name: str, weight: Parameter, count: int) -> None:
    if count != tape.batch_size:
        raise NoRuleError(
            f"{name} got {count} bags for a batch of {tape.batch_size} examples; give it one bag per example.",
            (weight,),
        )


def _maximum(
    weight: Tensor, ids: Tensor, bags: Tensor, counts: Tensor, count: int, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, d], and the id that each maximum comes from [B, d], -1 in an empty bag.

    torch only keeps track of them for a weight that gets a gradient, which is then cut off again.
    """
    lengths = torch.bincount(bags, minlength=count)
    offsets = lengths.cumsum(0) - lengths
    tracked = weight.detach().requires_grad_()
    output, _, _, winners = torch.embedding_bag(tracked, ids, offsets, False, 2, False, None, False, padding_idx)
    empty = torch.bincount(bags[counts], minlength=count) == 0
    return output.detach(), winners.masked_fill(empty.unsqueeze(1), -1).long()
