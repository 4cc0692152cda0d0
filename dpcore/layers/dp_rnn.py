"""``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` with the constructors of Opacus' layers.

Parameters and ``state_dict`` are torch's, which are also those of Opacus' layers. Unlike Opacus', the initial weights
and the dropout between layers are torch's too, and an LSTM may have ``proj_size``.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def _check_no_projection(kind: str, proj_size: int) -> None:
    if proj_size:
        raise ValueError(f"proj_size is {proj_size}, but only an LSTM has projections; leave it out of {kind}.")


class DPRNN(nn.RNN):
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


class DPGRU(nn.GRU):
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
        super().__init__(
            input_size,
            hidden_size,
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **factory,
        )


class DPLSTM(nn.LSTM):
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
        super().__init__(
            input_size,
            hidden_size,
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            proj_size=proj_size,
            **factory,
        )


class RNNLinear(nn.Linear):
    """``nn.Linear`` under the name that custom recurrent cells written for Opacus use; may be called once per step."""

    max_batch_len: int
