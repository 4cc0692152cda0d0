"""Rules for ``nn.LSTM``: the input projection is hoisted out of the time loop, and only the recurrence is a loop.

With pre-activations z_t = W_ih x_t + b + W_hh h_{t-1} and their gradients δ_t, a layer's gradients are those of plain
contractions: dW_ih = Σ_t δ_t x_tᵀ, dW_hh = Σ_t δ_t h_{t-1}ᵀ, db = Σ_t δ_t, and the gradient at the projected input
*is* δ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.errors import UnsupportedError
from dpcore.grad_sample.contraction import ContractionUse
from dpcore.grad_sample.products import Projection
from dpcore.grad_sample.tape import Tape, handles


class LstmRecurrence(torch.autograd.Function):
    """(z [T, B, 4H] projected inputs, W_hh [4H, H], h_0, c_0 [B, H]) -> (h [T, B, H], c_T [B, H]).

    Gates in the order i, f, g, o. Only z, h_0 and c_0 get gradients; W_hh's belongs to the tape.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
        steps, batch, width = z.shape
        hidden = width // 4
        gates = torch.empty_like(z)
        h = z.new_empty((steps + 1, batch, hidden))
        c = torch.empty_like(h)
        tanh_c = z.new_empty((steps, batch, hidden))
        h[0], c[0] = h0, c0
        by_gate = gates.view(steps, batch, 4, hidden)
        i, f, g, o = (by_gate[:, :, k].unbind(0) for k in range(4))
        input_forget = by_gate[:, :, :2].unbind(0)
        h_t, c_t, tanh_t, z_t, gates_t = h.unbind(0), c.unbind(0), tanh_c.unbind(0), z.unbind(0), gates.unbind(0)
        transposed = weight.t()
        for t in range(steps):
            torch.addmm(z_t[t], h_t[t], transposed, out=gates_t[t])
            input_forget[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c_t[t], out=c_t[t + 1])
            c_t[t + 1].addcmul_(i[t], g[t])
            torch.tanh(c_t[t + 1], out=tanh_t[t])
            torch.mul(o[t], tanh_t[t], out=h_t[t + 1])
        ctx.save_for_backward(gates, c, tanh_c, weight)
        ctx.mark_non_differentiable()
        return h[1:], c[-1].clone()

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_c: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        """δ by one reverse loop. What does not depend on the loop is multiplied out for all steps at once:

        dc_t = dh_t · o(1 - tanh²c) + dc_{t+1} f_{t+1}, and δ = (dc·g·i(1-i), dc·c_{t-1}·f(1-f), dc·i·(1-g²), dh·tanh
        c·o(1-o)).
        """
        gates, c, tanh_c, weight = ctx.saved_tensors
        steps, batch, width = gates.shape
        hidden = width // 4
        by_gate = gates.view(steps, batch, 4, hidden)
        i, f, g, o = by_gate.unbind(2)
        delta = torch.empty_like(by_gate)
        torch.mul(g, i * (1 - i), out=delta[:, :, 0])
        torch.mul(c[:-1], f * (1 - f), out=delta[:, :, 1])
        torch.mul(i, 1 - g * g, out=delta[:, :, 2])
        torch.mul(tanh_c, o * (1 - o), out=delta[:, :, 3])
        dh_to_dc = torch.mul(o, 1 - tanh_c * tanh_c)
        cell_t, out_t = delta[:, :, :3].unbind(0), delta[:, :, 3].unbind(0)
        delta_t, dh_to_dc_t, f_t, grad_h_t = (
            delta.view_as(gates).unbind(0),
            dh_to_dc.unbind(0),
            f.unbind(0),
            grad_h.unbind(0),
        )
        dc = grad_c.clone()
        dh = grad_h_t[-1]
        for t in range(steps - 1, -1, -1):
            dc.addcmul_(dh, dh_to_dc_t[t])
            cell_t[t].mul_(dc.unsqueeze(1))
            out_t[t].mul_(dh)
            dc.mul_(f_t[t])
            dh = torch.addmm(grad_h_t[t - 1], delta_t[t], weight) if t else delta_t[t] @ weight
        return delta.view_as(gates), None, dh, dc


def _lstm_layer(
    tape: Tape, x: Tensor, weights: Sequence[Tensor], h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, one direction, on x [T, B, p]; returns h [T, B, H], h_T, c_T [B, H]."""
    w_ih, w_hh, *biases = weights
    bias = biases[0].detach() + biases[1].detach() if biases else None
    frozen = [w for w in weights if w.requires_grad and not tape.trains(w)]
    if frozen:
        raise UnsupportedError("An LSTM's weights must be parameters of the model, all trained or all frozen.")
    z = Projection.apply(x, w_ih.detach(), bias)
    trained = [w for w in weights if tape.trains(w)]
    if not trained:
        h, c_last = LstmRecurrence.apply(z, w_hh.detach(), h0, c0)
        return h, h[-1], c_last
    inputs = {w_ih: x} if tape.trains(w_ih) else {}
    attached: list[ContractionUse] = []

    def set_grad(grad: Tensor | None) -> None:
        for use in attached:
            use.grad = grad

    z = tape.attach(z, set_grad)
    h, c_last = LstmRecurrence.apply(z, w_hh.detach(), h0, c0)
    if tape.trains(w_hh):
        inputs[w_hh] = torch.cat([h0.unsqueeze(0), h[:-1]]).detach()
    use = ContractionUse(tape.name(trained), inputs, tuple(b for b in biases if tape.trains(b)), time_major=True)
    use.sequential = True
    attached.append(use)
    tape.uses.append(use)
    return h, h[-1], c_last


@handles(torch.lstm)
def _lstm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packed = len(args) > 3 and not isinstance(args[3], bool)
    weights = args[3] if packed else args[2]
    if not any(tape.trains(w) for w in weights):
        return func(*args, **kwargs)
    if packed:
        raise UnsupportedError(
            f"{tape.name(weights)} got a PackedSequence, for which dpcore has no rule; pad the batch."
        )
    x, (h0, c0), weights, has_biases, layers, dropout, training, bidirectional, batch_first = args
    tape.check_batch(x, weights, 0 if batch_first else 1)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    if each != (4 if has_biases else 2):
        raise UnsupportedError(
            f"{tape.name(weights)} has proj_size > 0, for which dpcore has no rule; set proj_size=0."
        )
    x = x.transpose(0, 1) if batch_first else x
    x = x.contiguous()
    h_last, c_last = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            seq = x.flip(0) if direction else x
            h, h_end, c_end = _lstm_layer(tape, seq, weights[k * each : (k + 1) * each], h0[k], c0[k])
            outputs.append(h.flip(0) if direction else h)
            h_last.append(h_end)
            c_last.append(c_end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout, True)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(h_last), torch.stack(c_last)
