"""Rules for a parameter that every example gets as it is: expanded to the batch, added to it, or its factor.

Learned initial states, class tokens, learned queries, tables of positions, biases of attention; the scales of an RMS
norm written by hand. Per example the gradient is that of its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.errors import NoRuleError, NotLearnt, UnsupportedError
from dpcore.rules.linear import wide
from dpcore.rules.normalization import bound_arguments
from dpcore.tape.batch_dims import IN_ROWS
from dpcore.tape.tape import Tape, batch_first
from dpcore.tape.uses import Saved, Use, handles, rewrites


class BroadcastUse(Use):
    """A parameter's own copies: the gradient is [B, *param.shape] as it is."""

    def __init__(self, param: Parameter) -> None:
        self.params = (param,)

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        return wide(self.grad)


class FactorUse(Use):
    """A parameter as a factor of x [B, ...], along whose dimensions ``summed`` it is repeated; the output gradient has
    the shape of their product, batch first.
    """

    def __init__(self, name: str, x: Tensor, param: Parameter, summed: tuple[int, ...]) -> None:
        self.name = name
        self.params = (param,)
        self.summed = summed
        self._x = Saved(x)

    def grad_sample(self, param: Parameter) -> Tensor:
        assert self.grad is not None
        product = wide(self.grad) * wide(self._x.get(self.name).detach())
        product = product.sum(self.summed, keepdim=True) if self.summed else product
        return product.reshape(-1, *param.shape)


def _summed(tensor: Tensor, shape: Sequence[int], batch_dim: int) -> tuple[int, ...]:
    """Dimensions of a batch-first [B, ...] along which ``tensor`` is repeated, where ``shape`` has its batch in
    ``batch_dim``.
    """
    repeated = _repeated(tensor, shape)
    if batch_dim == IN_ROWS:
        return tuple(d + 1 for d in repeated)
    return tuple(d + (d < batch_dim) for d in repeated if d != batch_dim)


def _record(tape: Tape, use: Use, source: Tensor, output: Tensor, batch_dim: int) -> Tensor:
    """Records ``use`` of ``source``, which was repeated to the shape of ``output`` along ``batch_dim`` and others."""
    summed, size = _summed(source, output.shape, batch_dim), tape.batch_size

    def receive(grad: Tensor | None) -> None:
        if grad is not None:
            grad = grad.movedim(batch_dim, 0) if batch_dim != IN_ROWS else batch_first(grad, batch_dim, size)
            grad = grad.sum(summed, keepdim=True) if summed else grad
            grad = grad.reshape(size, *source.shape)
        use.grad = grad

    tape.uses.append(use)
    return tape.attach(output, receive)


def _repeated(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Dimensions of ``shape`` along which ``tensor`` is repeated, those of length one included."""
    new = len(shape) - tensor.dim()
    return [d for d in range(len(shape)) if d < new or tensor.shape[d - new] == 1]


def broadcast(tape: Tape, tensor: Tensor, shape: Sequence[int], batch_dim: int) -> Tensor:
    """``tensor.expand(shape)``, recorded where the tensor is trained; its dimension ``batch_dim`` must be a
    repetition.
    """
    if tape.trains(tensor) and (0 if batch_dim == IN_ROWS else batch_dim) not in _repeated(tensor, shape):
        raise NoRuleError(
            f"What is computed from {tape.sources.name(tensor)} has shape {tuple(tensor.shape)} and is used "
            f"at shape {tuple(shape)}, not as the same for every example.",
            (tape.sources.root(tensor),),
        )
    output = tape.constant(tensor).expand(*shape)
    return _record(tape, _use(tape, tensor), tensor, output, batch_dim) if tape.trains(tensor) else output


def _use(tape: Tape, param: Parameter) -> Use:
    """The use of copies of ``param``, or of what a layer made of ids without a batch."""
    derivation = tape.sources.stands.get(param)
    return BroadcastUse(param) if derivation is None or derivation.added is None else derivation.added()


def _batch_of(tape: Tape, x: Tensor, output: Tensor, param: Parameter, kind: str) -> int | None:
    """The dimension of an elementwise ``output`` that is the batch, along which ``param`` is repeated; None if none."""
    tape.rows.copy(x, output)
    batch_dim = tape.batch.of(output, (param,), 0, kind)
    return batch_dim if (0 if batch_dim == IN_ROWS else batch_dim) in _repeated(param, output.shape) else None


def _with_parameter(tape: Tape, args: tuple[Any, ...]) -> tuple[Tensor, Parameter] | None:
    """(batch, parameter) of two operands."""
    for x, param in (args, args[::-1]) if len(args) == 2 else ():
        if tape.trains(param) and isinstance(x, Tensor) and not tape.trains(x):
            return x, param
    return None


@handles(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_, derives=True)
def _add(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch plus a parameter, or plus what a layer made of ids without a batch."""
    found = None if kwargs else _with_parameter(tape, args)
    if found is None:
        return func(*args, **kwargs)
    if func in (Tensor.__iadd__, Tensor.add_):
        return _in_place(tape, func, args, "sum")
    x, param = found
    output = func(*(a.detach() if a is param else a for a in args))
    batch_dim = _batch_of(tape, x, output, param, "sum")
    if batch_dim is None:
        return func(*args)
    return _record(tape, _use(tape, param), param, output, batch_dim)


def _in_place(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kind: str) -> Any:
    """A batch that a parameter changes in place: every example has its own copy of the parameter.

    What is changed may be a view of what the model goes on with, so that its result is no place to wait at.
    """
    x, param = args
    if not tape.trains(param):
        return func(x, param)
    batch_dim = _batch_of(tape, x, x, param, kind)
    if batch_dim is None:
        raise UnsupportedError(
            f"{tape.sources.name(param)} changes in place something whose batch is not its first dimension; "
            "make that operation out-of-place."
        )
    return func(x, broadcast(tape, param, x.shape, batch_dim))


_IN_PLACE = (Tensor.__imul__, Tensor.mul_, Tensor.multiply_)


@handles(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, *_IN_PLACE, derives=True)
@handles(torch.multiply, Tensor.multiply, derives=True)
def _multiply(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch times a parameter: a scale."""
    found = None if kwargs else _with_parameter(tape, args)
    if found is None:
        return func(*args, **kwargs)
    if func in _IN_PLACE:
        return _in_place(tape, func, args, "product")
    x, param = found
    output = func(*(a.detach() if a is param else a for a in args))
    batch_dim = _batch_of(tape, x, output, param, "product")
    if batch_dim is None:
        return func(*args)
    rows = batch_first(x.expand(output.shape), batch_dim, tape.batch_size)
    use = FactorUse(tape.layer((param,)), rows, param, _summed(param, output.shape, batch_dim))
    return tape.record(use, output, batch_dim)


@rewrites(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract)
def _subtract(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch - parameter and parameter - batch as sums."""
    if len(args) != 2 or kwargs or not all(isinstance(a, Tensor) for a in args):
        return None
    return tape.call(torch.add, args[0], tape.call(torch.neg, args[1]))


@rewrites(Tensor.__rsub__, torch.rsub)
def _subtract_from(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _subtract(tape, func, args[::-1], kwargs)


@rewrites(torch.div, Tensor.div, Tensor.__truediv__, torch.divide, Tensor.divide)
@rewrites(torch.true_divide, Tensor.true_divide)
def _divide(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch / parameter as a product."""
    if len(args) != 2 or kwargs or not all(isinstance(a, Tensor) for a in args):
        return None
    return tape.call(torch.mul, args[0], tape.call(torch.reciprocal, args[1]))


@handles(Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to)
def _expand(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0] if args else None
    if not tape.trains(tensor):
        return func(*args, **kwargs)
    output = func(tensor.detach(), *args[1:], **kwargs)
    shape = output.shape
    if func is Tensor.repeat and output.dim() == tensor.dim() and shape[1:] == tensor.shape[1:] and len(tensor) > 1:
        copies = _tile(tape, tensor, output)
        if copies is not None:
            return copies
    repeated = _repeated(tensor, shape)
    new = len(shape) - tensor.dim()
    tiled = any(d >= new and shape[d] not in (1, tensor.shape[d - new]) for d in range(len(shape)) if d not in repeated)
    candidates = [d for d in repeated if shape[d] == tape.batch_size]
    if tiled or not candidates:
        # Not to the batch: whatever uses the result uses the parameter as such.
        return func(*args, **kwargs)
    place = candidates[0]
    if tape.probing:  # of as many copies as no other dimension has
        tape.batch.of(output, (tensor,), 0, "expansion")
    elif len(candidates) > 1 and tape.batch_size > 1:
        place = tape.batch.of(output, (tensor,), 0, "expansion")
    if place not in candidates:
        raise UnsupportedError(
            f"{tape.sources.name(tensor)} is expanded to shape {tuple(shape)}, where more than one dimension "
            f"could be the batch of {tape.batch_size} examples; expand it to the batch alone first, then further."
        )
    return _record(tape, BroadcastUse(tensor), tensor, output, place)


@handles(torch.where, Tensor.where, torch.masked_fill, Tensor.masked_fill, derives=True)
def _choose(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch here and a parameter there: every example has its own copy of the parameter."""
    params = [a for a in args if tape.trains(a)]
    if not params:
        return func(*args, **kwargs)
    if func in (torch.masked_fill, Tensor.masked_fill):  # which take one number alone
        return _choose(tape, torch.where, (args[1], args[2], args[0]), kwargs)
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tensor)))
    others = [a for a in args if isinstance(a, Tensor) and not tape.trains(a)]
    result = torch.empty((), device=params[0].device).expand(shape)
    for other in others:
        tape.rows.copy(other, result)
    batch_dim = tape.batch.of(result, params[:1], 0, "choice")
    if batch_dim < 0:
        return func(*args, **kwargs)
    return func(*(broadcast(tape, a, shape, batch_dim) if tape.trains(a) else a for a in args), **kwargs)


@handles(Tensor.__setitem__)
def _set_masked(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``x[mask] = parameter``, with a mask of the first dimensions of a batch, as a choice."""
    x, mask, value = args
    by_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and value in tape.sources
    if not by_mask or value.dim() > x.dim() - mask.dim():
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    value = value if value.dtype == x.dtype else tape.call(Tensor.to, value, x.dtype)
    func(x, ..., tape.call(torch.where, mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), value, x))
    return None


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, derives=True)
def _product(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matrices of a parameter of three or more dimensions times those of a batch: every example has its own copy."""
    if len(args) != 2 or kwargs or tape.trains(args[0]) == tape.trains(args[1]):
        return func(*args, **kwargs)
    param, x = args if tape.trains(args[0]) else args[::-1]
    if not isinstance(x, Tensor) or x.dim() < 3 or param.dim() < 2 or param.dim() > x.dim():
        return func(*args, **kwargs)
    batch_dim = tape.batch.of(x, (param,), 2, "factors")
    place = 0 if batch_dim == IN_ROWS else batch_dim
    shape = (*torch.broadcast_shapes(x.shape[:-2], param.shape[:-2]), *param.shape[-2:])
    if batch_dim < 0 or place >= x.dim() - 2 or place not in _repeated(param, shape):
        return func(*args, **kwargs)
    copies = broadcast(tape, param, shape, batch_dim)
    return torch.matmul(*(copies if a is param else a for a in args))


def _tile(tape: Tape, param: Parameter, output: Tensor) -> Tensor | None:
    """[n, ...] repeated to [B * n, ...]; None where it is not known for that."""
    by_copy = output.view(len(output) // len(param), *param.shape)
    try:
        if tape.batch.of(by_copy, (param,), 0, "copies") != 0:
            return None
    except NotLearnt:
        if tape.batch_size > 1:
            raise
        return None  # one copy may be a repetition along another dimension
    use, size = BroadcastUse(param), tape.batch_size

    def receive(grad: Tensor | None) -> None:
        use.grad = None if grad is None else grad.reshape(size, *param.shape)

    tape.uses.append(use)
    output = tape.attach(output, receive)
    tape.rows.put(output, 0, len(param))
    return output


@handles(F.scaled_dot_product_attention)
def _attention_bias(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A mask of attention that holds trained biases, the same for every example."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if not tape.trains(mask):
        return func(*args, **kwargs)
    call = bound_arguments(_signature, args, kwargs)
    query, key = call["query"], call["key"]
    shape = (*query.shape[:-1], key.shape[-2])
    batch_dim = tape.batch.of(query, (mask,), 2, "attention")
    tape.batch.check(query, (mask,), max(batch_dim, 0))
    call["attn_mask"] = broadcast(tape, mask, shape, batch_dim)
    return func(**call)


def _signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> None:
    """The arguments of a function that does not tell them itself."""
