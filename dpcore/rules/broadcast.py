"""Rules for a parameter that every example gets as it is: expanded or repeated to the batch, or added to a batch.

Learned initial states, class tokens, learned queries, tables of positions. Per example the gradient is that of its own
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.rules.linear import wide
from dpcore.tape.tape import Tape
from dpcore.tape.uses import Use, handles


class BroadcastUse(Use):
    """A parameter's own copies: the gradient is [B, *param.shape] as it is."""

    def __init__(self, param: Parameter) -> None:
        self.params = (param,)

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        return wide(self.grad)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return False

    def rows(self, index: Tensor, dtype: torch.dtype) -> BroadcastUse:
        use = BroadcastUse(self.params[0])
        use.grad = None if self.grad is None else self.grad.index_select(0, index).to(dtype)
        return use

    def stash_bytes(self) -> int:
        return 0 if self.grad is None else self.grad.nbytes


def _record(tape: Tape, use: Use, source: Tensor, output: Tensor, batch_dim: int) -> Tensor:
    """Records ``use`` of ``source``, which was repeated to the shape of ``output`` along ``batch_dim`` and others."""
    others = [d for d in _repeated(source, output.shape) if d != batch_dim]

    def receive(grad: Tensor | None) -> None:
        if grad is not None:
            grad = grad.sum(others, keepdim=True) if others else grad
            grad = grad.movedim(batch_dim, 0).reshape(-1, *source.shape)
        use.grad = grad

    tape.uses.append(use)
    return tape.attach(output, receive)


def _repeated(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Dimensions of ``shape`` along which ``tensor`` is repeated, those of length one included."""
    new = len(shape) - tensor.dim()
    return [d for d in range(len(shape)) if d < new or tensor.shape[d - new] == 1]


def broadcast(tape: Tape, tensor: Tensor, shape: Sequence[int], batch_dim: int) -> Tensor:
    """``tensor.expand(shape)``, recorded where the tensor is trained; its dimension ``batch_dim`` must be a
    repetition."""
    output = tape.constant(tensor).expand(*shape)
    return _record(tape, BroadcastUse(tensor), tensor, output, batch_dim) if tape.trains(tensor) else output


@handles(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch plus a parameter, or plus what a layer made of ids without a batch."""
    if len(args) == 2 and not kwargs:
        for x, other in (args, args[::-1]):
            source = _source(tape, other)
            if source is not None and isinstance(x, Tensor) and _source(tape, x) is None:
                param, use = source
                output = func(*(a.detach() if a is other else a for a in args))
                batch_dim = tape.batch_dim(output, (param,), 0, "sum")
                if batch_dim in _repeated(other, output.shape):
                    return _record(tape, use(), other, output, batch_dim)
    return func(*args, **kwargs)


def _source(tape: Tape, tensor: Any) -> tuple[Parameter, Callable[[], Use]] | None:
    if tape.trains(tensor):
        return tensor, lambda: BroadcastUse(tensor)
    shared = tape.shared.get(id(tensor))
    return None if shared is None else shared[1:]


@handles(Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to)
def _expand(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0] if args else None
    if not tape.trains(tensor):
        return func(*args, **kwargs)
    output = func(tensor.detach(), *args[1:], **kwargs)
    shape = output.shape
    repeated = _repeated(tensor, shape)
    new = len(shape) - tensor.dim()
    tiled = any(d >= new and shape[d] not in (1, tensor.shape[d - new]) for d in range(len(shape)) if d not in repeated)
    candidates = [d for d in repeated if shape[d] == tape.batch_size]
    if tiled or not candidates:
        # Not to the batch: whatever uses the result uses the parameter as such.
        return func(*args, **kwargs)
    if len(candidates) > 1 and tape.batch_size > 1:
        raise UnsupportedError(
            f"{tape.parameters[tensor]} is expanded to shape {tuple(shape)}, where more than one dimension could be "
            f"the batch of {tape.batch_size} examples; expand it to the batch alone first, then further."
        )
    return _record(tape, BroadcastUse(tensor), tensor, output, candidates[0])
