"""The time loops of recurrent layers on inputs that are already projected: the part that cannot be one large product.

Each loop is an autograd function z -> h whose gradient at z *is* the gradient δ at the gates' pre-activations. What
does not depend on the previous step is multiplied out for all steps before the reverse loop. Weights get no gradients
here: those belong to the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpcore import native


@dataclass(frozen=True)
class Steps:
    """The T time steps of one direction over B sequences, the longest first.

    ``sizes`` (packed sequences only): how many sequences reach each step. A sequence that has ended, or in reverse has
    not begun, carries its state along, so that the last state is that of its own end. States are kept in T + 1 rows:
    between rows t and t + 1 lies step t.
    """

    count: int
    reverse: bool = False
    sizes: tuple[int, ...] | None = None

    @property
    def order(self) -> Sequence[int]:
        """Steps as they are gone through."""
        return range(self.count - 1, -1, -1) if self.reverse else range(self.count)

    def states(self, like: Tensor, first: Tensor) -> Tensor:
        """[T + 1, B, H] with the first state [B, H] in its place."""
        states = like.new_empty((self.count + 1, *first.shape))
        states[self.count if self.reverse else 0] = first
        return states

    def rows(self, steps: Tensor) -> list[Tensor]:
        """Return each step's view of the sequences that reach it, of a tensor [T, B, ...]."""
        views = steps.unbind(0)
        return list(views) if self.sizes is None else [v[:b] for v, b in zip(views, self.sizes, strict=True)]

    def before(self, states: Tensor) -> Tensor:
        """[T, B, H]: the state that each step starts from."""
        return states[1:] if self.reverse else states[:-1]

    def after(self, states: Tensor) -> Tensor:
        """[T, B, H]: the state that each step ends in."""
        return states[:-1] if self.reverse else states[1:]

    def last(self, states: Tensor) -> Tensor:
        """[B, H]: the state at the end."""
        return states[0] if self.reverse else states[-1]

    def carry(self, states: Tensor, t: int) -> None:
        """Takes the states of sequences that do not reach step t across it."""
        if self.sizes is not None and self.sizes[t] < states.shape[1]:
            self.after(states)[t, self.sizes[t] :] = self.before(states)[t, self.sizes[t] :]

    def clear(self, steps: Tensor) -> Tensor:
        """[T, B, ...] with zeros where a sequence does not reach a step, in place."""
        if self.sizes is not None:
            for t, b in enumerate(self.sizes):
                steps[t, b:] = 0.0
        return steps

    def gates(self, like: Tensor, width: int) -> Tensor:
        """[T, B, width] to be filled in, with zeros wherever that is not certain to happen."""
        shape = (*like.shape[:2], width)
        return like.new_empty(shape) if self.sizes is None else like.new_zeros(shape)

    def pull(self, grads: Sequence[Tensor], k: int, arriving: Tensor, carried: Tensor) -> Tensor:
        """Gradient [B, H] at the state before the step ``order[k]``.

        ``grads``: gradients at the outputs of all steps; ``arriving`` [b, H]: through the step; ``carried`` [B, H]: the
        gradient at the state after it, which goes past it for sequences that do not reach it.
        """
        if len(arriving) < len(carried):
            arriving = torch.cat([arriving, carried[len(arriving) :]])
        return arriving + grads[self.order[k - 1]] if k else arriving


def _lstm_loop(
    z: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    steps: Steps,
    gates: Tensor,
    h: Tensor,
    c: Tensor,
    tanh_c: Tensor,
    m: Tensor,
) -> None:
    """Fills in gates [T, B, 4H], tanh c and m [T, B, H], and the states h and c after the first."""
    hidden = tanh_c.shape[2]
    by_gate = gates.view(*z.shape[:2], 4, hidden)
    i, f, g, o = (steps.rows(by_gate[:, :, k]) for k in range(4))
    input_forget = steps.rows(by_gate[:, :, :2])
    h_t, c_t, h_next, c_next = (steps.rows(s) for kind in (steps.before, steps.after) for s in (kind(h), kind(c)))
    tanh_t, z_t, gates_t, m_t = (steps.rows(s) for s in (tanh_c, z, gates, m))
    transposed = weight.t()
    for t in steps.order:
        if gates is z:
            gates_t[t].addmm_(h_t[t], transposed)
        else:
            torch.addmm(z_t[t], h_t[t], transposed, out=gates_t[t])
        input_forget[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        torch.mul(f[t], c_t[t], out=c_next[t])
        c_next[t].addcmul_(i[t], g[t])
        torch.tanh(c_next[t], out=tanh_t[t])
        torch.mul(o[t], tanh_t[t], out=m_t[t])
        if projection is not None:
            torch.mm(m_t[t], projection.t(), out=h_next[t])
        steps.carry(h, t)
        steps.carry(c, t)


def _graph_is_kept() -> bool:
    """Return whether the backward pass that is running may be followed by another one over the same graph."""
    ask: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


class LstmRecurrence(torch.autograd.Function):
    """Gates in the order i, f, g, o; c = f c + i g; m = o tanh c; h = m, or W_hr m + p where there is a projection.

    (z [T, B, 4H], p [T, B, P] or None, W_hh [4H, P], W_hr [P, H] or None, h_0 [B, P], c_0 [B, H], steps) -> (h [T, B,
    P], c_T [B, H]; without gradient: the h [T, B, P] before each step, and m [T, B, H] where there is a projection).
    The gradient at p, which is zero, is that at h with all that comes back through later steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        p: Tensor | None,
        weight: Tensor,
        projection: Tensor | None,
        h0: Tensor,
        c0: Tensor,
        steps: Steps,
    ) -> tuple[Tensor, ...]:
        hidden = c0.shape[1]
        # Nobody looks at z again: the gates take its memory, except where rows behind a sequence's end must be zero.
        z = z.detach().contiguous()
        gates = z if steps.sizes is None else steps.gates(z, 4 * hidden)
        tanh_c = steps.gates(z, hidden)
        h, c = steps.states(z, h0), steps.states(z, c0)
        m = steps.after(h) if projection is None else steps.gates(z, hidden)
        if projection is None and steps.sizes is None and native.serves(z, weight, h0, c0):
            native.lstm_forward(z, weight, gates, h, c, tanh_c, steps.reverse)
        else:
            _lstm_loop(z, weight, projection, steps, gates, h, c, tanh_c, m)
        ctx.save_for_backward(gates, c, tanh_c, weight, projection)
        ctx.steps = steps
        constants = (steps.before(h),) if projection is None else (steps.before(h), m)
        ctx.mark_non_differentiable(*constants)
        return steps.after(h), steps.last(c).clone(), *constants

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_c: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        """δ by one reverse loop:

        dc_t = dm_t · o(1 - tanh²c) + dc_{t+1} f_{t+1}, and δ = (dc·g·i(1-i), dc·c_{t-1}·f(1-f), dc·i·(1-g²), dm·tanh
        c·o(1-o)).
        """
        gates, c, tanh_c, weight, projection = ctx.saved_tensors
        steps: Steps = ctx.steps
        # A graph that is not kept gives its memory to what is made of it.
        if projection is None and steps.sizes is None and native.serves(gates, c, tanh_c, weight, grad_h, grad_c):
            gates = gates.contiguous()  # hooks of saved tensors may bring them back otherwise
            delta = torch.empty_like(gates) if _graph_is_kept() else gates
            dh, dc = native.lstm_backward(gates, c, tanh_c, weight, grad_h, grad_c, delta, steps.reverse)
            return delta, None, None, None, dh, dc, None
        hidden = tanh_c.shape[2]
        delta = (gates.clone() if _graph_is_kept() else gates).view(*gates.shape[:2], 4, hidden)
        i, f, g, o = delta.unbind(2)
        dm_to_dc, f_all, to_g = o * (1 - tanh_c * tanh_c), f.clone(), i * (1 - g * g)
        i.mul_(1 - i).mul_(g)
        f.mul_(1 - f).mul_(steps.before(c))
        g.copy_(to_g)
        o.mul_(1 - o).mul_(tanh_c)
        cell_t, out_t = steps.rows(delta[:, :, :3]), steps.rows(delta[:, :, 3])
        delta_t, dm_to_dc_t, f_t = (steps.rows(s) for s in (delta.view_as(gates), dm_to_dc, f_all))
        grads = grad_h.unbind(0)
        dh_all = torch.empty_like(grad_h) if ctx.needs_input_grad[1] else None
        dc_all = grad_c.clone()
        order = steps.order
        dh_full = grads[order[-1]]
        for k in range(steps.count - 1, -1, -1):
            t = order[k]
            here = len(delta_t[t])
            dh, dc = dh_full[:here], dc_all[:here]
            if dh_all is not None:
                dh_all[t] = dh_full
            if projection is not None:
                dh = dh @ projection
            dc.addcmul_(dh, dm_to_dc_t[t])
            cell_t[t].mul_(dc.unsqueeze(1))
            out_t[t].mul_(dh)
            dc.mul_(f_t[t])
            if k and here == len(dh_full):
                dh_full = torch.addmm(grads[order[k - 1]], delta_t[t], weight)
            else:
                dh_full = steps.pull(grads, k, delta_t[t] @ weight, dh_full)
        dp = None if dh_all is None else steps.clear(dh_all)
        return steps.clear(delta).view_as(gates), dp, None, None, dh_full, dc_all, None


def _gru_loop(z: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps, h: Tensor) -> tuple[Tensor, Tensor]:
    """Fills in the states h after the first, and returns the gates [T, B, 3H] and (W h + b)_n [T, B, H]."""
    hidden = h.shape[2]
    gates, recurrent = steps.gates(z, 3 * hidden), steps.gates(z, 3 * hidden)
    h_t, h_next = steps.rows(steps.before(h)), steps.rows(steps.after(h))
    recurrent_t = steps.rows(recurrent)
    ru_t, n_t = steps.rows(gates[..., : 2 * hidden]), steps.rows(gates[..., 2 * hidden :])
    r_t, u_t = steps.rows(gates[..., :hidden]), steps.rows(gates[..., hidden : 2 * hidden])
    z_ru, z_n = steps.rows(z[..., : 2 * hidden]), steps.rows(z[..., 2 * hidden :])
    recurrent_ru = steps.rows(recurrent[..., : 2 * hidden])
    recurrent_n = steps.rows(recurrent[..., 2 * hidden :])
    transposed = weight.t()
    for t in steps.order:
        if bias is None:
            torch.mm(h_t[t], transposed, out=recurrent_t[t])
        else:
            torch.addmm(bias, h_t[t], transposed, out=recurrent_t[t])
        torch.add(z_ru[t], recurrent_ru[t], out=ru_t[t])
        ru_t[t].sigmoid_()
        torch.addcmul(z_n[t], r_t[t], recurrent_n[t], out=n_t[t])
        n_t[t].tanh_()
        torch.lerp(n_t[t], h_t[t], u_t[t], out=h_next[t])
        steps.carry(h, t)
    return gates, recurrent[..., 2 * hidden :]


class GruRecurrence(torch.autograd.Function):
    """Gates in the order r, u, n: r, u = σ(z + W h + b), n = tanh(z + r (W h + b)), h = (1 - u) n + u h.

    (z [T, B, 3H], p [T, B, 3H], W_hh [3H, H], b_hh [3H] or None, h_0 [B, H], steps) -> (h [T, B, H]; without gradient:
    the h [T, B, H] before each step). Nobody reads p; the gradient there is that at the pre-activations W h + b.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, p: Tensor, weight: Tensor, bias: Tensor | None, h0: Tensor, steps: Steps
    ) -> tuple[Tensor, Tensor]:
        hidden = h0.shape[1]
        h = steps.states(z, h0)
        given = (z, weight, h0) if bias is None else (z, weight, h0, bias)
        if steps.sizes is None and native.serves(*given):
            gates = z.detach().contiguous()  # the gates take its memory, as those of an LSTM do
            recurrent_n = steps.gates(z, hidden)
            native.gru_forward(gates, weight, bias, gates, recurrent_n, h, steps.reverse)
        else:
            gates, recurrent_n = _gru_loop(z, weight, bias, steps, h)
        ctx.save_for_backward(gates, recurrent_n, h, weight)
        ctx.steps = steps
        before = steps.before(h)
        ctx.mark_non_differentiable(before)
        return steps.after(h), before

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        """With dh the gradient at h: δ_n = dh (1-u)(1-n²), δ_u = dh (h - n) u(1-u), δ_r = δ_n (W h + b)_n r(1-r)."""
        gates, recurrent_n, h, weight = ctx.saved_tensors
        steps: Steps = ctx.steps
        if steps.sizes is None and native.serves(gates, recurrent_n, h, weight, grad_h):
            gates = gates.contiguous()  # hooks of saved tensors may bring them back otherwise
            delta = torch.empty_like(gates) if _graph_is_kept() else gates
            recurrent, dh = native.gru_backward(gates, recurrent_n, h, weight, grad_h, delta, steps.reverse)
            return delta, recurrent, None, None, dh, None
        before = steps.before(h)
        hidden = before.shape[2]
        r, u, n = gates.view(*gates.shape[:2], 3, hidden).unbind(2)
        to_n = (1 - u) * (1 - n * n)
        # Of the recurrent pre-activations, which carry the gradient to the step before.
        delta = torch.empty((*before.shape[:2], 3, hidden), dtype=gates.dtype, device=gates.device)
        torch.mul(to_n * recurrent_n, r * (1 - r), out=delta[:, :, 0])
        torch.mul(before - n, u * (1 - u), out=delta[:, :, 1])
        torch.mul(to_n, r, out=delta[:, :, 2])
        by_gate_t, delta_t, u_t = steps.rows(delta), steps.rows(delta.view_as(gates)), steps.rows(u)
        dh_all = torch.empty_like(grad_h)
        grads = grad_h.unbind(0)
        order = steps.order
        dh_full = grads[order[-1]]
        for k in range(steps.count - 1, -1, -1):
            t = order[k]
            dh_all[t] = dh_full
            dh = dh_full[: len(delta_t[t])]
            by_gate_t[t].mul_(dh.unsqueeze(1))
            dh_full = steps.pull(grads, k, torch.addmm(dh * u_t[t], delta_t[t], weight), dh_full)
        at_z = torch.cat([delta[:, :, :2], (dh_all * to_n).unsqueeze(2)], 2)
        return steps.clear(at_z).view_as(gates), steps.clear(delta).view_as(gates), None, None, dh_full, None


def _rnn_loop(z: Tensor, weight: Tensor, relu: bool, steps: Steps, h: Tensor) -> None:
    """Fills in the states h after the first."""
    h_t, h_next, z_t = (steps.rows(s) for s in (steps.before(h), steps.after(h), z))
    transposed = weight.t()
    for t in steps.order:
        torch.addmm(z_t[t], h_t[t], transposed, out=h_next[t])
        if relu:
            h_next[t].relu_()
        else:
            h_next[t].tanh_()
        steps.carry(h, t)


class RnnRecurrence(torch.autograd.Function):
    """h = tanh or relu of (z + W h).

    (z [T, B, H], W_hh [H, H], h_0 [B, H], relu, steps) -> (h [T, B, H]; without gradient: the h before each step).
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, h0: Tensor, relu: bool, steps: Steps) -> tuple[Tensor, Tensor]:
        h = steps.states(z, h0)
        if steps.sizes is None and native.serves(z, weight, h0):
            native.rnn_forward(z, weight, h, relu, steps.reverse)
        else:
            _rnn_loop(z, weight, relu, steps, h)
        after, before = steps.after(h), steps.before(h)
        ctx.save_for_backward(h, weight)
        ctx.relu, ctx.steps = relu, steps
        ctx.mark_non_differentiable(before)
        return after, before

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        """δ = dh · (1 - h²), or dh where h > 0."""
        states, weight = ctx.saved_tensors
        steps: Steps = ctx.steps
        if steps.sizes is None and native.serves(states, weight, grad_h):
            delta, dh_full = native.rnn_backward(states, weight, grad_h, ctx.relu, steps.reverse)
            return delta, None, dh_full, None, None
        h = steps.after(states)
        delta = (h > 0).to(h.dtype) if ctx.relu else 1 - h * h
        delta_t = steps.rows(delta)
        grads = grad_h.unbind(0)
        order = steps.order
        dh_full = grads[order[-1]]
        for k in range(steps.count - 1, -1, -1):
            t = order[k]
            here = len(delta_t[t])
            delta_t[t].mul_(dh_full[:here])
            if k and here == len(dh_full):
                dh_full = torch.addmm(grads[order[k - 1]], delta_t[t], weight)
            else:
                dh_full = steps.pull(grads, k, delta_t[t] @ weight, dh_full)
        return steps.clear(delta), None, dh_full, None, None
