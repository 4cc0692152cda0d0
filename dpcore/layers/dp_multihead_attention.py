"""``nn.MultiheadAttention`` with the constructor of Opacus' layer, and a learned position at the end of a sequence.

The layer loads the weights of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_NAMES = {"qlinear": "q", "klinear": "k", "vlinear": "v"}


class SequenceBias(nn.Module):
    """A layer that appends ``bias`` [E], which starts standard normal, as the last position of a sequence.

    [T, B, E] becomes [T + 1, B, E]; with ``batch_first`` [B, T, E] becomes [B, T + 1, E].
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.bias = Parameter(torch.empty(embed_dim))
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        time = 1 if self.batch_first else 0
        # Through the batch alone first: in one step, a batch of one could not be told from the one position.
        rows = self.bias.expand(x.shape[1 - time], -1)
        return torch.cat([x, rows.unsqueeze(time)], time)


class DPMultiheadAttention(nn.MultiheadAttention):
    """Query [T, B, E], key [S, B, kdim], value [S, B, vdim] (batch first with ``batch_first``) -> (output, weights).

    ``state_dict`` is torch's, and so is that of Opacus' layer; its training checkpoints, with the names ``qlinear``,
    ``klinear``, ``vlinear``, ``seq_bias_k`` and ``seq_bias_v`` of its parts, are loaded as well.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _rename(state_dict, prefix, packed=self.in_proj_weight is not None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _rename(state: dict[str, Any], prefix: str, packed: bool) -> None:
    """Opacus' names of parts into torch's, in place."""
    weights = {letter: state.pop(f"{prefix}{name}.weight", None) for name, letter in _NAMES.items()}
    biases = [state.pop(f"{prefix}{name}.bias", None) for name in _NAMES]
    if all(isinstance(w, Tensor) for w in weights.values()):
        if packed:
            state[prefix + "in_proj_weight"] = torch.cat(list(weights.values()))
        else:
            state.update({f"{prefix}{letter}_proj_weight": w for letter, w in weights.items()})
    if all(isinstance(b, Tensor) for b in biases):
        state[prefix + "in_proj_bias"] = torch.cat(biases)
    for letter in "kv":
        bias = state.pop(f"{prefix}seq_bias_{letter}.bias", None)
        if isinstance(bias, Tensor):
            state[f"{prefix}bias_{letter}"] = bias.view(1, 1, -1)
