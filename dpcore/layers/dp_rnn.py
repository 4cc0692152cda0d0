"""``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` with the constructors of Opacus' layers.

Parameters and ``state_dict`` are torch's; those that Opacus' layers save are loaded too. Unlike Opacus', the initial
weights and the dropout between layers are torch's too, and an LSTM may have ``proj_size``.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def _check_no_projection(kind: str, proj_size: int) -> None:
    if proj_size:
        raise ValueError(f"proj_size is {proj_size}, but only an LSTM has projections; leave it out of {kind}.")


class _OpacusNames(nn.Module):
    """A layer that loads what Opacus' layers save within a model, and takes Opacus' name of the first state.

    There every weight stands under torch's name, and again under that of its cell, ``l0.ih.weight`` beside
    ``weight_ih_l0``.
    """

    def forward(self, input: Any, hx: Any = None, state_init: Any = None) -> Any:
        if hx is not None and state_init is not None:
            raise ValueError("hx and state_init are two names of the first state; give one of the two.")
        return super().forward(input, state_init if hx is None else hx)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in list(state_dict):
            part = re.fullmatch(re.escape(prefix) + r"(l\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)", key)
            if part:
                layer, which, kind = part.groups()
                state_dict.setdefault(f"{prefix}{kind}_{which}_{layer}", state_dict.pop(key))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class DPRNN(_OpacusNames, nn.RNN):
    """``nn.RNN``: input [T, B, p], or [B, T, p] with ``batch_first``, or a PackedSequence -> (output, h_n).

    ValueError for ``proj_size`` other than 0.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
        **factory: Any,
    ) -> None:
        _check_no_projection("DPRNN", proj_size)
        super().__init__(
            input_size,
            hidden_size,
            num_layers=num_layers,
            nonlinearity=nonlinearity,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **factory,
        )


class DPGRU(_OpacusNames, nn.GRU):
    """``nn.GRU``: input [T, B, p], or [B, T, p] with ``batch_first``, or a PackedSequence -> (output, h_n).

    ValueError for ``proj_size`` other than 0.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        **factory: Any,
    ) -> None:
        _check_no_projection("DPGRU", proj_size)
        sizes = input_size, hidden_size, num_layers
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, **factory)


class DPLSTM(_OpacusNames, nn.LSTM):
    """``nn.LSTM``: input [T, B, p], or [B, T, p] with ``batch_first``, or a PackedSequence -> (output, (h_n, c_n))."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        **factory: Any,
    ) -> None:
        sizes = input_size, hidden_size, num_layers
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, proj_size, **factory)


class RNNLinear(nn.Linear):
    """``nn.Linear`` under the name that custom recurrent cells written for Opacus use; may be called once per step."""

    max_batch_len: int
