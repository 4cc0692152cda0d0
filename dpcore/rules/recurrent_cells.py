"""Rules for ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell``: two linear layers and gates, all of which have rules
or no parameters. A loop over time uses the same weights at every step; such parameters keep their per-sample gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.rules.linear import ContractionUse
from dpcore.tape.tape import Tape
from dpcore.tape.uses import handles


def _linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inputs = {w: x for w in (weight,) if tape.trains(w)}
    biases = tuple(b for b in (bias,) if tape.trains(b))
    output = F.linear(x, tape.constant(weight), tape.constant(bias))
    params = (*inputs, *biases)
    if not params:
        return output
    tape.batch.check(x, params)
    return tape.record(ContractionUse(tape.layer(params), inputs, biases), output)


@handles(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def _cell(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(x [B, p], state [B, H] or a pair of them, W_ih, W_hh, b_ih, b_hh) -> the next state."""
    if not any(tape.trains(w) for w in args[2:]):
        return func(*args, **kwargs)
    x, state, w_ih, w_hh, b_ih, b_hh = args
    h = state[0] if func is torch.lstm_cell else state
    from_input, from_state = _linear(tape, x, w_ih, b_ih), _linear(tape, h, w_hh, b_hh)
    if func is torch.lstm_cell:
        i, f, g, o = (from_input + from_state).chunk(4, 1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if func is torch.gru_cell:
        (r, u, n), (r_h, u_h, n_h) = from_input.chunk(3, 1), from_state.chunk(3, 1)
        n = (n + (r + r_h).sigmoid() * n_h).tanh()
        return n + (u + u_h).sigmoid() * (h - n)
    total = from_input + from_state
    return total.relu() if func is torch.rnn_relu_cell else total.tanh()
