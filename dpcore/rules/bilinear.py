"""Rule for ``nn.Bilinear``: y_k = x1ᵀ W_k x2 + b_k at every position.

It is a linear layer on the products x1_i x2_j, whose Gram matrix is the product of those of x1 and x2: per example the
products are never formed for the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.numerics.rounding import SquaredNorm, gram_roundings, squares, trusted, unit
from dpcore.rules.gram import norm_of, products_of_grams
from dpcore.rules.linear import flops_per_kept_float, wide
from dpcore.tape.tape import Tape
from dpcore.tape.uses import Saved, Use, handles


class BilinearUse(Use):
    """Weight [d, p, q] applied to x1 [B, ..., p] and x2 [B, ..., q]; output gradient [B, ..., d]."""

    def __init__(self, name: str, x1: Tensor, x2: Tensor, weight: Parameter | None, bias: Parameter | None) -> None:
        self.name = name
        self.weight, self.bias = weight, bias
        self.params = tuple(p for p in (weight, bias) if p is not None)
        self._x1, self._x2 = Saved(x1), Saved(x2)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """x1 [B, T, p], x2 [B, T, q] and output gradients [B, T, d]."""
        assert self.grad is not None
        tensors = (self._x1.get(self.name), self._x2.get(self.name), self.grad)
        x1, x2, g = (wide(t.detach()) for t in tensors)
        positions = x1.shape[1:-1].numel()
        return tuple(t.reshape(len(t), positions, t.shape[-1]) for t in (x1, x2, g))  # type: ignore[return-value]

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        parts = self._parts()
        if parts[0].shape[1] == 1:
            (a, error_a, *_), (b, error_b, *_), (c, error_c, *_) = (squares(t[:, 0]) for t in parts)
            error = (1.0 + error_a) * (1.0 + error_b) * (1.0 + error_c) - 1.0
            norm_sq = trusted(a * b * c, _largest_but_one(a, b, c), max(t.shape[2] for t in parts))
            return SquaredNorm(norm_sq, error + 3.0 * unit(a.dtype))
        roundings = sum(gram_roundings(t.shape[-1]) for t in parts) + 1
        norm_sq, rows = products_of_grams(parts)
        norms = norm_of(norm_sq, rows, roundings)
        a, b, c = (of_part.sum(1) for of_part in rows)
        return norms._replace(value=trusted(norms.value, _largest_but_one(a, b, c), roundings * rows[0].shape[1] ** 2))

    def grad_sample(self, param: Parameter) -> Tensor:
        x1, x2, g = self._parts()
        if param is self.bias:
            return g.sum(1)
        products = (x1.unsqueeze(3) * x2.unsqueeze(2)).flatten(2)
        return torch.bmm(g.transpose(1, 2), products).view(len(g), *param.shape)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        x1, x2, g = (t.flatten(0, 1) for t in self._parts())
        g = g * factors.repeat_interleave(len(g) // len(factors)).unsqueeze(1)
        # One output at a time: what is formed is as large as x1, not as the products.
        for k in range(len(out)):
            out[k].addmm_((x1 * g[:, k : k + 1]).t(), x2)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        assert self.grad is not None
        if param is self.bias:
            return False
        positions = self.grad.shape[1:-1].numel()
        d, p, q = param.shape
        price = flops_per_kept_float(param.device)
        return positions == 1 or 2 * positions**2 * (p + q + d) < price * d * p * q


def _largest_but_one(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The largest square beside which one of the three may be lost: any of the others, or any two of them."""
    return torch.stack([a * b, a * c, b * c, a, b, c]).amax(0)


@handles(F.bilinear)
def _bilinear(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def call(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        trained_weight: Parameter | None = weight if tape.trains(weight) else None
        trained_bias: Parameter | None = bias if tape.trains(bias) else None
        params = [p for p in (trained_weight, trained_bias) if p is not None]
        if not params:
            return func(input1, input2, weight, bias)
        batch_dim = tape.batch.required(input1, params)
        tape.batch.check(input2, params, batch_dim)
        output = func(input1, input2, tape.constant(weight), tape.constant(bias))
        x1, x2 = (x.transpose(0, 1) if batch_dim else x for x in (input1, input2))
        return tape.record(BilinearUse(tape.layer(params), x1, x2, trained_weight, trained_bias), output, batch_dim)

    return call(*args, **kwargs)
