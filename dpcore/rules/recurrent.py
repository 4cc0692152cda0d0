"""Rules for ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: the input projection is hoisted out of the time loop, and only the
recurrence is a loop.

With pre-activations z_t = W_ih x_t + b + W_hh h_{t-1} and their gradients δ_t, a layer's gradients are those of plain
contractions: dW_ih = Σ_t δ_t x_tᵀ, dW_hh = Σ_t δ_t h_{t-1}ᵀ, db = Σ_t δ_t, and the gradient at the projected input
*is* δ. A GRU's recurrent weights see δ_n times the reset gate, an LSTM's projection the total gradient at h_t: these
are the gradients at places of their own.

Packed sequences are laid out as [T, B, ...]; what lies behind a sequence's end has zero gradients. Dropout between the
layers draws from the same random stream in the same layout as torch's own, so that a batch that is processed in one
piece sees the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from dpcore.errors import UnsupportedError
from dpcore.rules.linear import ContractionUse
from dpcore.rules.products import Projection
from dpcore.rules.recurrent_loops import GruRecurrence, LstmRecurrence, RnnRecurrence, Steps
from dpcore.tape.tape import Tape
from dpcore.tape.uses import handles

_LSTM, _GRU, _TANH, _RELU = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
_GATES = {_LSTM: 4, _GRU: 3, _TANH: 1, _RELU: 1}


class _Place:
    """A place in the graph whose gradient weights need whose inputs are only known later.

    The graph holds it by its hook, so it must not hold the graph: neither the tensor there nor one made from it.
    """

    def __init__(self) -> None:
        self._uses: list[tuple[ContractionUse, Tensor | None]] = []

    def attach(self, tape: Tape, tensor: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        """The tensor to go on with."""
        return tape.attach(tensor, self._receive) if any(tape.trains(w) for w in weights) else tensor

    def _receive(self, grad: Tensor | None) -> None:
        for use, order in self._uses:
            use.grad = None if grad is None else _by_example(grad, order)

    def feeds(self, use: ContractionUse, order: Tensor | None) -> None:
        """The gradient here, in the order of the examples, is the one at the output of ``use``."""
        self._uses.append((use, order))


def _by_example(tensor: Tensor, place: Tensor | None) -> Tensor:
    """[T, B, ...] in the order of the examples."""
    return tensor if place is None else tensor.index_select(1, place)


class _Direction:
    """One layer in one direction. ``place`` [B], where packed sequences were sorted: example i is the place[i]-th."""

    def __init__(self, tape: Tape, weights: Sequence[Tensor], steps: Steps, place: Tensor | None) -> None:
        frozen = [w for w in weights if w.requires_grad and not tape.trains(w)]
        if frozen:
            raise UnsupportedError(
                "A recurrent layer's weights must be parameters of the model, all trained or frozen."
            )
        self.tape, self.steps, self.place = tape, steps, place
        self.w_ih, self.w_hh = weights[:2]
        biases: Sequence[Tensor | None] = weights[2:4] if len(weights) > 3 else (None, None)
        self.b_ih, self.b_hh = biases
        self.w_hr = weights[-1] if len(weights) % 2 else None

    def _project(self, x: Tensor, bias: Tensor | None) -> tuple[_Place, Tensor]:
        place = _Place()
        z = Projection.apply(x, self.w_ih.detach(), bias)
        return place, place.attach(self.tape, z, (self.w_ih, self.w_hh, self.b_ih, self.b_hh))

    def _record(
        self,
        place: _Place,
        inputs: Sequence[tuple[Tensor, Tensor]],
        biases: Sequence[Tensor | None],
    ) -> None:
        """Weights with their inputs [T, B, ...], and biases, whose gradient is the one at ``place``."""
        trained = {w: _by_example(x.detach(), self.place) for w, x in inputs if self.tape.trains(w)}
        trained_biases = tuple(b for b in biases if self.tape.trains(b))
        params = (*trained, *trained_biases)
        if params:
            use = ContractionUse(self.tape.layer(params), trained, trained_biases, time_major=True)
            use.sequential = True
            self.tape.uses.append(use)
            # Nothing of ``self`` in here: it holds the tape, which holds this, and such a circle would keep the whole
            # batch until Python's collector comes by.
            place.feeds(use, self.place)

    def _both_biases(self) -> Tensor | None:
        return None if self.b_ih is None or self.b_hh is None else self.b_ih.detach() + self.b_hh.detach()

    def lstm(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X [T, B, p] -> h [T, B, H or its projection], h_T, c_T."""
        place, z = self._project(x, self._both_biases())
        output_place, zeros, projection = _Place(), None, None
        if self.w_hr is not None:
            projection = self.w_hr.detach()
            zeros = output_place.attach(self.tape, z.new_zeros((*x.shape[:2], h0.shape[1])), (self.w_hr,))
        h, c_last, before, *m = LstmRecurrence.apply(z, zeros, self.w_hh.detach(), projection, h0, c0, self.steps)
        self._record(place, [(self.w_ih, x), (self.w_hh, before)], (self.b_ih, self.b_hh))
        if self.w_hr is not None:
            self._record(output_place, [(self.w_hr, m[0])], ())
        return h, self.steps.last(h), c_last

    def gru(self, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        """X [T, B, p] -> h [T, B, H], h_T."""
        place, z = self._project(x, None if self.b_ih is None else self.b_ih.detach())
        bias = None if self.b_hh is None else self.b_hh.detach()
        # Nothing is ever written there: it is the place in the graph that counts.
        recurrent_place = _Place()
        p = recurrent_place.attach(self.tape, torch.empty_like(z), (self.w_hh, self.b_hh))
        h, before = GruRecurrence.apply(z, p, self.w_hh.detach(), bias, h0, self.steps)
        self._record(place, [(self.w_ih, x)], (self.b_ih,))
        self._record(recurrent_place, [(self.w_hh, before)], (self.b_hh,))
        return h, self.steps.last(h)

    def rnn(self, x: Tensor, h0: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
        """X [T, B, p] -> h [T, B, H], h_T."""
        place, z = self._project(x, self._both_biases())
        h, before = RnnRecurrence.apply(z, self.w_hh.detach(), h0, relu, self.steps)
        self._record(place, [(self.w_ih, x), (self.w_hh, before)], (self.b_ih, self.b_hh))
        return h, self.steps.last(h)


class _Packing:
    """Where the rows [N, ...] of a packed sequence lie in [T, B, ...]: ``sizes`` are the numbers of sequences that
    reach each step.
    """

    def __init__(self, sizes: Tensor, device: torch.device) -> None:
        self.sizes = tuple(sizes.tolist())
        steps = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        within = torch.arange(len(steps)) - (sizes.cumsum(0) - sizes)[steps]
        self._rows = (steps * self.sizes[0] + within).to(device)

    def pad(self, data: Tensor) -> Tensor:
        """[N, ...] -> [T, B, ...], zeros elsewhere."""
        padded = data.new_zeros((len(self.sizes) * self.sizes[0], *data.shape[1:]))
        return padded.index_copy(0, self._rows, data).unflatten(0, (len(self.sizes), self.sizes[0]))

    def pack(self, padded: Tensor) -> Tensor:
        """[T, B, ...] -> [N, ...]."""
        return padded.flatten(0, 1).index_select(0, self._rows)


def _check_shapes(gates: int, x: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Raise where the tensors of one layer do not fit together: the modules check that, functional calls do not, and a
    compiled loop would read and write past the ends.
    """
    rows = len(weights[1])
    hidden = rows // gates
    biases, projections = len(weights) // 4 * 2, len(weights) % 2
    seen = len(weights[-1]) if projections else hidden
    due: list[tuple[int, ...]] = [
        (rows, x.shape[2]),
        (rows, seen),
        *[(rows,)] * biases,
        *[(seen, hidden)] * projections,
    ]
    due += [(x.shape[1], seen), (x.shape[1], hidden)][: len(states)]
    found = [tuple(t.shape) for t in (*weights, *states)]
    if found != due or rows != gates * hidden:
        raise ValueError(
            f"A recurrent layer got weights and first states of the shapes {found} for an input of shape "
            f"{tuple(x.shape)} (time, batch, features); they should be {due}."
        )


def _check_batch(tape: Tape, x: Tensor, weights: Sequence[Parameter], batch_first: bool) -> None:
    batch_dim = 0 if batch_first else 1
    if x.shape[batch_dim] != tape.batch_size == x.shape[1 - batch_dim]:
        raise UnsupportedError(
            f"{tape.layer(weights)} got an input of shape {tuple(x.shape)} with batch_first={batch_first}, so it runs "
            f"through the {tape.batch_size} examples as through time steps and every example reaches the outputs of "
            f"others; set batch_first={not batch_first}, or transpose the input."
        )
    tape.batch.check(x, weights, batch_dim)


@handles(_LSTM, _GRU, _TANH, _RELU)
def _recurrent(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packed = len(args) > 3 and not isinstance(args[3], bool)
    if not any(tape.trains(w) for w in args[3 if packed else 2]):
        return func(*args, **kwargs)
    with torch.autocast(args[0].device.type, enabled=False):
        return _packed(tape, func, *args) if packed else _padded(tape, func, *args)


@contextmanager
def packed_noted(tape: Tape, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Note in ``tape.packed`` which PackedSequence each of the recurrent ``modules`` is called with."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        tape.packed = given if isinstance(given, PackedSequence) else None

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def _packed(
    tape: Tape,
    func: Callable[..., Any],
    data: Tensor,
    sizes: Tensor,
    state: Any,
    weights: Sequence[Parameter],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> Any:
    if tape.packed is None or tape.packed.data is not data:
        raise UnsupportedError(
            f"The weights {tape.layer(weights)} are applied to packed sequences by a functional call, not told "
            "which sequence is which example; call nn.LSTM, nn.GRU or nn.RNN with the PackedSequence."
        )
    tape.batch.check(data.new_empty((int(sizes[0]), 0)), weights)
    packing = _Packing(sizes, data.device)
    x, *last = _layers(
        tape, func, packing.pad(data), state, weights, layers, dropout if training else 0.0, bidirectional, packing
    )
    return packing.pack(x), *last


def _padded(
    tape: Tape,
    func: Callable[..., Any],
    x: Tensor,
    state: Any,
    weights: Sequence[Parameter],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    _check_batch(tape, x, weights, batch_first)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    x, *last = _layers(tape, func, x, state, weights, layers, dropout if training else 0.0, bidirectional, None)
    return (x.transpose(0, 1) if batch_first else x), *last


def _layers(
    tape: Tape,
    func: Callable[..., Any],
    x: Tensor,
    state: Any,
    weights: Sequence[Parameter],
    layers: int,
    dropout: float,
    bidirectional: bool,
    packing: _Packing | None,
) -> list[Tensor]:
    """X [T, B, p] -> [h [T, B, directions * H], last states [layers * directions, B, ·] (h, and c of an LSTM)]."""
    dtype = weights[0].dtype
    x = x.to(dtype)
    states = [s.to(dtype) for s in (state if func is _LSTM else (state,))]
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    order = None if packing is None or tape.packed is None else tape.packed.sorted_indices
    place = None if order is None else order.argsort()
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for reverse in (False, True)[:directions]:
            k = len(last)
            steps = Steps(len(x), reverse, None if packing is None else packing.sizes)
            own, first = weights[k * each : (k + 1) * each], [s[k] for s in states]
            _check_shapes(_GATES[func], x, own, first)
            one = _Direction(tape, own, steps, place)
            if func is _LSTM:
                h, *ends = one.lstm(x, *first)
            elif func is _GRU:
                h, *ends = one.gru(x, *first)
            else:
                h, *ends = one.rnn(x, first[0], func is _RELU)
            outputs.append(h)
            last.append(tuple(ends))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and layer + 1 < layers:
            x = F.dropout(x, dropout) if packing is None else packing.pad(F.dropout(packing.pack(x), dropout))
    return [x, *(torch.stack(ends) for ends in zip(*last, strict=True))]
