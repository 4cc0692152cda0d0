"""Rule for a parameter that is handed to every example as it is: ``expand``, ``repeat``, ``broadcast_to``.

Learned initial states, class tokens, learned queries, tables of positions [1, T, E] expanded to the batch. Per example
the gradient is that of its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.grad_sample.contraction import wide
from dpcore.grad_sample.tape import Tape, Use, handles


class BroadcastUse(Use):
    """``param``, given new dimensions in front and then repeated along ``dims`` (of the result), one of them the
    batch."""

    def __init__(self, name: str, param: Parameter, batch_dim: int, dims: Sequence[int]) -> None:
        self.name = name
        self.params = (param,)
        self.batch_dim = batch_dim
        self.dims = tuple(dims)

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        others = [d for d in self.dims if d != self.batch_dim]
        g = wide(self.grad)
        g = g.sum(others, keepdim=True) if others else g
        return g.movedim(self.batch_dim, 0).reshape(-1, *param.shape)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return False

    def rows(self, index: Tensor, dtype: torch.dtype) -> BroadcastUse:
        use = BroadcastUse(self.name, self.params[0], self.batch_dim, self.dims)
        use.grad = None if self.grad is None else self.grad.index_select(self.batch_dim, index).to(dtype)
        return use

    def stash_bytes(self) -> int:
        return 0 if self.grad is None else self.grad.nbytes


def broadcast(tape: Tape, tensor: Tensor, shape: Sequence[int], batch_dim: int) -> Tensor:
    """``tensor.expand(shape)``, recorded where the tensor is trained; its dimension ``batch_dim`` must be a
    repetition."""
    output = tape.constant(tensor).expand(*shape)
    if not tape.trains(tensor):
        return output
    return tape.record(BroadcastUse(tape.name((tensor,)), tensor, batch_dim, _repeated(tensor, shape)), output)


def _repeated(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Dimensions of ``shape`` along which ``tensor`` is repeated, those of length one included."""
    new = len(shape) - tensor.dim()
    return [d for d in range(len(shape)) if d < new or tensor.shape[d - new] == 1]


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
    return tape.record(BroadcastUse(tape.name((tensor,)), tensor, candidates[0], repeated), output)
