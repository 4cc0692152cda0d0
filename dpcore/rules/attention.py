"""Rules for ``nn.MultiheadAttention`` in all its forms.

Its parameters are those of linear layers over the sequences of queries, keys and values and over the output, and one
more key and value (``bias_k``, ``bias_v``) that every example gets; what lies between has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.numerics.rounding import SquaredNorm
from dpcore.rules.broadcast import broadcast
from dpcore.rules.linear import ContractionUse
from dpcore.rules.normalization import bound_arguments
from dpcore.tape.tape import Tape
from dpcore.tape.uses import Use, handles

_PARAMETERS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "bias_k", "bias_v")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class StackedUse(Use):
    """A weight [d_1 + d_2 + ..., p] and a bias of which each block of rows has inputs and output gradients of its own.

    Blocks do not overlap, so squared norms add up and sums go into their rows.
    """

    def __init__(self, blocks: Sequence[tuple[ContractionUse, slice]]) -> None:
        self.blocks = list(blocks)
        self.params = self.blocks[0][0].params

    def receive(self, block: ContractionUse, grad: Tensor | None) -> None:
        """Takes the output gradient of one block."""
        block.grad = grad
        self.grad = next((b.grad for b, _ in self.blocks if b.grad is not None), None)

    def _live(self) -> list[tuple[ContractionUse, slice]]:
        return [(block, rows) for block, rows in self.blocks if block.grad is not None]

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        norms = [block.norm_sq(param) for block, _ in self._live()]
        values, error = torch.stack([n.value for n in norms]).sum(0), max(n.error for n in norms)
        if all(n.scale is None for n in norms):
            return SquaredNorm(values, error)
        scales = torch.stack([n.value if n.scale is None else n.scale.to(n.value.dtype) for n in norms])
        tolerated = min(n.tolerated for n in norms if n.scale is not None)
        return SquaredNorm(values, error, scales.sum(0), tolerated)

    def grad_sample(self, param: Parameter) -> Tensor:
        parts = [(block.grad_sample(param), rows) for block, rows in self._live()]
        out = parts[0][0].new_zeros((len(parts[0][0]), *param.shape))
        for part, rows in parts:
            out[:, rows] = part
        return out

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        for block, rows in self._live():
            block.add_clipped_sum(param, factors, out[rows])

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return all(block.ghost_is_cheaper(param) for block, _ in self._live())

    def rows(self, index: Tensor, dtype: torch.dtype) -> StackedUse:
        use = StackedUse([(block.rows(index, dtype), rows) for block, rows in self.blocks])
        use.grad = next((b.grad for b, _ in use.blocks if b.grad is not None), None)
        return use

    def of_units(self, group: int) -> StackedUse:
        use = StackedUse([(block.of_units(group), rows) for block, rows in self._live()])
        use.grad = use.blocks[0][0].grad
        return use

    def stash_bytes(self) -> int:
        return sum(block.stash_bytes() for block, _ in self.blocks)


def _linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X [T, B, p] -> [T, B, d], recorded where the weight or the bias is trained."""
    output = F.linear(x, tape.constant(weight), tape.constant(bias))
    use = _contraction(tape, x, weight, bias)
    return output if use is None else tape.record(use, output)


def _contraction(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> ContractionUse | None:
    inputs = {w: x for w in (weight,) if tape.trains(w)}
    biases = tuple(b for b in (bias,) if tape.trains(b))
    params = (*inputs, *biases)
    return ContractionUse(tape.layer(params), inputs, biases, time_major=True) if params else None


def _project(tape: Tape, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [T or S, B, ·] after their projections, [T or S, B, E].

    As torch does, what is the same tensor goes through one product.
    """
    query, key, value = call["query"], call["key"], call["value"]
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    width = query.shape[-1]
    if query is key is value and not call["use_separate_proj_weight"]:
        q, k, v = _linear(tape, query, weight, bias).chunk(3, -1)
        return q, k, v
    if call["use_separate_proj_weight"]:
        weights = [call[name] for name in _SEPARATE]
        plain = [F.linear(x, tape.constant(w)) for x, w in zip((query, key, value), weights, strict=True)]
        outputs = [
            tape.record(ContractionUse(tape.layer((w,)), {w: x}, (), time_major=True), y) if tape.trains(w) else y
            for x, w, y in zip((query, key, value), weights, plain, strict=True)
        ]
        if bias is None:
            return outputs[0], outputs[1], outputs[2]
        # The bias is one parameter whose three parts see three gradients.
        parts = [y + b for y, b in zip(outputs, tape.constant(bias).chunk(3), strict=True)]
        if not tape.trains(bias):
            return parts[0], parts[1], parts[2]
        uses = [ContractionUse(tape.layer((bias,)), {}, (bias,), time_major=True) for _ in parts]
    else:
        parts = [
            F.linear(x, w, b)
            for x, w, b in zip(
                (query, key, value),
                tape.constant(weight).chunk(3),
                (None, None, None) if bias is None else tape.constant(bias).chunk(3),
                strict=True,
            )
        ]
        uses = [use for x in (query, key, value) if (use := _contraction(tape, x, weight, bias)) is not None]
        if not uses:
            return parts[0], parts[1], parts[2]
    stacked = StackedUse([(use, slice(n * width, (n + 1) * width)) for n, use in enumerate(uses)])
    tape.uses.append(stacked)
    q, k, v = (tape.attach(y, _receiver(stacked, use)) for y, use in zip(parts, uses, strict=True))
    return q, k, v


def _receiver(stacked: StackedUse, use: ContractionUse) -> Callable[[Tensor | None], None]:
    return lambda grad: stacked.receive(use, grad)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: may not be seen) as 0 and -inf; a float mask as it is."""
    if mask.dtype == torch.uint8:
        mask = mask.bool()
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _check_batch(tape: Tape, call: dict[str, Any], trained: Sequence[Parameter]) -> None:
    """The function's own layout is time first, whatever ``batch_first`` of the module."""
    for name in ("query", "key", "value"):
        x = call[name]
        if x.dim() == 3 and x.shape[1] != tape.batch_size == x.shape[0]:
            raise UnsupportedError(
                f"{tape.layer(trained)} got a {name} whose {tape.batch_size} examples lie where positions belong, so "
                "examples attend to each other; set batch_first=True, or transpose the input."
            )
        if x.dim() != 3:
            raise NoRuleError(
                f"{tape.layer(trained)} got a {name} of shape {tuple(x.shape)}, without a batch.", trained
            )
        tape.batch.check(x, trained, 1)


@handles(F.multi_head_attention_forward)
def _attention(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(output [T, B, E], attention weights or None) for query [T, B, E], key and value [S, B, ·]."""
    call = bound_arguments(func, args, kwargs)
    trained = [p for p in (call[name] for name in (*_PARAMETERS, *_SEPARATE)) if tape.trains(p)]
    if not trained:
        return func(*args, **kwargs)
    if call["static_k"] is not None or call["static_v"] is not None:
        raise NoRuleError(f"{tape.layer(trained)} is an attention with static keys or values.", trained)
    if call["is_causal"] and call["attn_mask"] is None:
        raise ValueError(f"{tape.layer(trained)} was called with is_causal=True, which needs an attn_mask beside it.")
    _check_batch(tape, call, trained)
    steps, batch, width = call["query"].shape
    heads = call["num_heads"]
    q, k, v = _project(tape, call)
    extra = 0
    if call["bias_k"] is not None:
        k, v = (
            torch.cat([x, broadcast(tape, bias, (1, batch, width), 1)])
            for x, bias in ((k, call["bias_k"]), (v, call["bias_v"]))
        )
        extra += 1
    if call["add_zero_attn"]:
        k, v = (torch.cat([x, x.new_zeros((1, batch, width))]) for x in (k, v))
        extra += 1

    def split(x: Tensor) -> Tensor:
        """[T, B, E] to [B, heads, T, E / heads]."""
        return x.reshape(len(x), batch, heads, width // heads).permute(1, 2, 0, 3)

    q, k, v = split(q), split(k), split(v)
    mask = None
    if call["attn_mask"] is not None:
        # The added keys are seen by all.
        mask = F.pad(_additive(call["attn_mask"], q.dtype), (0, extra))
        mask = mask.view(batch, heads, steps, -1) if mask.dim() == 3 else mask
    if call["key_padding_mask"] is not None:
        padding = F.pad(_additive(call["key_padding_mask"], q.dtype), (0, extra)).view(batch, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    dropout = call["dropout_p"] if call["training"] else 0.0
    weights = None
    if call["need_weights"]:
        scores = q @ k.transpose(-2, -1) / (width // heads) ** 0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        mixed = weights @ v
        if call["average_attn_weights"]:
            weights = weights.mean(1)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    output = mixed.permute(2, 0, 1, 3).reshape(steps, batch, width)
    return _linear(tape, output, call["out_proj_weight"], call["out_proj_bias"]), weights
