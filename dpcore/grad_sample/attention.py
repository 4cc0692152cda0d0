"""Rule for self-attention, ``nn.MultiheadAttention`` with query, key and value the same tensor.

Its parameters are those of two linear layers over the sequence, the packed input projection and the output projection;
what lies between has none. Other forms (cross-attention, ``bias_k``) are recorded as a whole by the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.errors import NoRuleError
from dpcore.grad_sample.contraction import ContractionUse
from dpcore.grad_sample.normalization import bound_arguments
from dpcore.grad_sample.tape import Tape, handles

_PARAMETERS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "bias_k", "bias_v")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, B, p] -> [T, B, d], recorded where the weight or the bias is trained."""
    output = F.linear(x, tape.constant(weight), tape.constant(bias))
    inputs = {w: x for w in (weight,) if tape.trains(w)}
    biases = tuple(b for b in (bias,) if tape.trains(b))
    params = (*inputs, *biases)
    if not params:
        return output
    return tape.record(ContractionUse(tape.name(params), inputs, biases, time_major=True), output)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: may not be seen) as 0 and -inf; a float mask as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


@handles(F.multi_head_attention_forward)
def _attention(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(output [T, B, E], attention weights or None) for query = key = value [T, B, E]."""
    call = bound_arguments(func, args, kwargs)
    trained = [p for p in (call[name] for name in (*_PARAMETERS, *_SEPARATE)) if tape.trains(p)]
    if not trained:
        return func(*args, **kwargs)
    query = call["query"]
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    plain = not call["use_separate_proj_weight"] and not call["add_zero_attn"]
    if not (query is call["key"] is call["value"] and plain and all(call[name] is None for name in extras)):
        raise NoRuleError(f"{tape.name(trained)} is an attention that is no plain self-attention.", trained)
    tape.check_batch(query, trained, 1)
    steps, batch, width = query.shape
    heads = call["num_heads"]

    def split(x: Tensor) -> Tensor:
        """[T, B, E] to [B, heads, T, E / heads]."""
        return x.reshape(steps, batch, heads, width // heads).permute(1, 2, 0, 3)

    projected = _linear(tape, query, call["in_proj_weight"], call["in_proj_bias"])
    q, k, v = (split(part) for part in projected.chunk(3, -1))
    mask = None
    if call["attn_mask"] is not None:
        mask = _additive(call["attn_mask"], query.dtype)
        mask = mask.view(batch, heads, steps, steps) if mask.dim() == 3 else mask
    if call["key_padding_mask"] is not None:
        padding = _additive(call["key_padding_mask"], query.dtype).view(batch, 1, 1, steps)
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
