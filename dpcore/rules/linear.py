"""Rules for y = x Wᵀ + b at every position: ``F.linear`` of any rank, and the building block of recurrent layers.

Per example, with inputs X (T x p) and output gradients G (T x d): dW = Gᵀ X, db = Σ_t G_t.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore import gpu, native
from dpcore.gpu import tuned
from dpcore.native.parts import Part
from dpcore.native.products import Product
from dpcore.numerics.rounding import SquaredNorm, gram_roundings, squares, trusted, written_error
from dpcore.rules import bfloat16
from dpcore.rules.gram import bounded, gram_norm_sq
from dpcore.rules.limits import Limits
from dpcore.rules.products import linear, prefers_onednn, product, products
from dpcore.tape.batch_dims import IN_ROWS
from dpcore.tape.tape import HALF, Tape, batch_first
from dpcore.tape.uses import Saved, Use, handles, rewrites

# A float of memory traffic costs about as much as this many FLOPs on a CPU core (50 GFLOP/s beside 10 GB/s, three
# passes over the kept gradient: written, squared, summed), where dpcore.numerics.measure has not measured it.
FLOPS_PER_KEPT_FLOAT = 60


def flops_per_kept_float(device: torch.device) -> float:
    """Return :data:`FLOPS_PER_KEPT_FLOAT`, or what was measured on the device."""
    costs = tuned.costs(device)
    return FLOPS_PER_KEPT_FLOAT if costs is None else costs.flops_per_kept_float


def wide(tensor: Tensor) -> Tensor:
    """In float32 or better: norms and sums of half-precision gradients are not taken in half precision.

    Where :mod:`dpcore.rules.bfloat16` takes a product, its result is widened and not its operands.
    """
    return tensor.float() if tensor.dtype in HALF else tensor


def contraction_norm_sq(g: Tensor, x: Tensor) -> SquaredNorm:
    """|GᵀX|² for G [B, T, d] and X [B, T, p], without forming the product."""
    lengths = x.shape[-1], g.shape[-1]
    if native.serves(g, x):
        roundings = sum(map(native.gram_roundings, lengths))
        return bounded(*native.contraction_norms(g, x), x.shape[1], roundings, sum(lengths), x.dtype)
    return gram_norm_sq((x, g), sum(map(gram_roundings, lengths)))


def add_contraction(g: Tensor, x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Out [d, p] += Σ_i factors[i] G_iᵀ X_i for G [B, ..., d] and X [B, ..., p]."""
    if x.dim() == 3 and native.serves(g, x, factors, out):
        if out.stride(1) == 1:
            native.contraction_clipped_sum(g, x, factors, out)
            return
        if out.stride(0) == 1:
            native.contraction_clipped_sum(x, g, factors, out.t())
            return
    factors = factors.view(-1, *[1] * (x.dim() - 1))
    if x.shape[-1] < g.shape[-1]:
        x = x * factors
    else:
        g = g * factors
    left, right = g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    if prefers_onednn(left, 2.0 * left.numel() * right.shape[1]):
        out += product(left, right.t())
    else:
        out.addmm_(left, right)


class ContractionUse(Use):
    """Weights [d, p_k] applied to inputs x_k [B, ..., p_k], and biases [d], all sharing one output gradient [B, ...,
    d].

    A linear layer has one weight; a recurrent layer has one for its input and one for its previous state. ``turned``:
    the weights are [p_k, d].
    """

    def __init__(
        self,
        name: str,
        inputs: dict[Parameter, Tensor],
        biases: tuple[Parameter, ...],
        time_major: bool = False,
        turned: bool = False,
    ) -> None:
        self.name = name
        self.params = (*inputs, *biases)
        self.time_major = time_major
        self.turned = turned
        self._inputs = {param: Saved(x) for param, x in inputs.items()}
        # [B, d, p] per-sample gradients that were formed along with another weight's and not yet asked for, and the
        # output gradients that they were formed of.
        self._products: tuple[Tensor, int, dict[Parameter, Tensor]] | None = None
        # Squared norms of the output gradients, where weight and bias share them, and what they are the norms of.
        self._squares: tuple[Tensor, int, SquaredNorm] | None = None
        self._limits = {param: Limits() for param in inputs}

    def kind(self) -> tuple[Any, ...] | None:
        g = self.grad
        if g is None or g.dtype != torch.float32 or g.device.type != "cpu" or self.time_major:
            return None
        inputs = [(saved.tensor.shape[1:], saved.tensor.dtype) for saved in self._inputs.values()]
        return type(self), self.turned, g.shape[1:], *inputs, *map(id, self.params)

    def _x(self, param: Parameter) -> Tensor:
        """[B, p] or [B, T, p]."""
        return self._positions(self._inputs[param].get(self.name))

    def _in_order(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both so that the product of the first one, turned, with the second one is as the weight is."""
        return (x, g) if self.turned else (g, x)

    def _g(self) -> Tensor:
        """[B, d] or [B, T, d]."""
        assert self.grad is not None
        return self._positions(self.grad)

    def _positions(self, tensor: Tensor) -> Tensor:
        return self._batch_first(wide(tensor.detach()))

    def _batch_first(self, tensor: Tensor) -> Tensor:
        if self.time_major:
            tensor = tensor.transpose(0, 1)
        return tensor if tensor.dim() <= 3 else tensor.flatten(1, -2)

    def _in_bfloat16(self, param: Parameter) -> bool:
        """Return whether a weight's gradients are formed by products of bfloat16."""
        saved, g = self._inputs.get(param), self.grad
        if saved is None or g is None or g.dtype != torch.bfloat16 or g.dim() == 2:
            return False
        return bfloat16.takes(g, saved.tensor)

    def _for_gpu(self, param: Parameter) -> tuple[Tensor, Tensor] | None:
        """Output gradients [B, T, d] and inputs [B, T, p] in their own precision, where kernels for GPUs take them; in
        the order of :meth:`_in_order`.
        """
        if param not in self._inputs or self.grad is None or self.grad.dim() == 2 or not gpu.available():
            return None
        g, x = (self._batch_first(t.detach()) for t in (self.grad, self._inputs[param].get(self.name)))
        return self._in_order(g, x) if gpu.serves(g, x) else None

    def _g_squares(self, g: Tensor) -> SquaredNorm:
        """Squared norms of output gradients [B, d]."""
        assert self.grad is not None
        if self._squares is None or self._squares[0] is not self.grad or self._squares[1] != self.grad._version:
            self._squares = self.grad, self.grad._version, squares(g)
        return self._squares[2]

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        if (taken := self._for_gpu(param)) is not None:
            found, limits = gpu.contraction_norm_sq(*taken)
            assert self.grad is not None
            self._limits[param].note(self.grad, limits)
            return found
        g = self._g()
        if param not in self._inputs:
            return self._g_squares(g) if g.dim() == 2 else squares(g.sum(1))
        x = self._x(param)
        if x.dim() == 2:
            of_x, of_g = squares(x), self._g_squares(g)
            largest = torch.maximum(of_x.value, of_g.value)
            norm_sq = trusted(of_x.value * of_g.value, largest, max(x.shape[1], g.shape[1]))
            return SquaredNorm(norm_sq, of_x.error + of_g.error + of_x.error * of_g.error)
        return contraction_norm_sq(g, x)

    def grad_sample(self, param: Parameter) -> Tensor:
        if self._in_bfloat16(param):
            assert self.grad is not None
            tensors = self._in_order(self.grad, self._inputs[param].get(self.name))
            return bfloat16.products(*(self._batch_first(t.detach()) for t in tensors))
        g = self._g()
        if param not in self._inputs:
            return g if g.dim() == 2 else g.sum(1)
        left, right = self._in_order(g, self._x(param))
        if g.dim() == 2:
            return left.unsqueeze(2) * right.unsqueeze(1)
        if native.serves(left, right):
            return native.contraction_grad_sample(left, right)
        if self.turned:
            return products(left.transpose(1, 2), right.transpose(1, 2))[0]
        # Weights that will be asked for too are taken along: they share what is copied of the output gradients.
        made = self._products
        assert self.grad is not None
        if made is None or made[0] is not self.grad or made[1] != self.grad._version or param not in made[2]:
            weights = [p for p in self._inputs if p is param or not self.ghost_is_cheaper(p)]
            of = dict(zip(weights, products(*(t.transpose(1, 2) for t in (g, *map(self._x, weights)))), strict=True))
            made = self._products = self.grad, self.grad._version, of
        return made[2].pop(param)

    def for_kernels(self, param: Parameter, formed: bool) -> Part | None:
        g, saved = self.grad, self._inputs.get(param)
        assert g is not None
        if not native.are_plain(g):
            return None
        g = self._batch_first(g)
        if saved is None:
            return Part.rows(g) if g.dim() == 2 else Part.sums(g)
        x = saved.get(self.name)
        if not native.are_plain(x):
            return None
        left, right = self._in_order(g, self._batch_first(x))
        if g.dim() == 2:
            return Part.outer(left, right)
        if not formed or not param.is_contiguous():
            return None
        return Part.rows(native.contraction_grad_sample(left, right).flatten(1))

    def takes_turns(self, param: Parameter) -> bool:
        assert self.grad is not None
        return param in self._inputs and self.grad.dim() > 2 and not self.time_major

    def _example(self, param: Parameter, i: int) -> tuple[Tensor, Tensor, bool]:
        """[T, n] and [T, m], of which the product of the one turned with the other is example i's gradient as it lies
        in memory; and whether that is turned. Both as they were recorded.
        """
        assert self.grad is not None
        batch = 1 if self.time_major else 0
        tensors = self._inputs[param].get(self.name), self.grad.detach()
        x, g = (t.select(batch, i).flatten(0, -2) for t in tensors)
        left, right = self._in_order(g, x)
        return (right, left, True) if _lies_turned(param) else (left, right, False)

    def write_example(self, param: Parameter, i: int, out: Tensor) -> SquaredNorm | None:
        left, right, turned = self._example(param, i)
        if not (turned or param.is_contiguous()):
            return None
        if self._in_bfloat16(param):
            out.view(left.shape[1], -1).copy_(bfloat16.product(left, right))
            return squares(out.unsqueeze(0))
        left, right = wide(left), wide(right)
        if not native.serves(left, right, out):
            return None
        value = native.contraction_into(*(t.unsqueeze(0) for t in (left, right, out.view(left.shape[1], -1))))
        return SquaredNorm(value, written_error(out.numel()))

    def product(self, param: Parameter) -> Product | None:
        assert self.grad is not None
        if param not in self._inputs or self.time_major or self.grad.dim() == 2:
            return None
        g, x = self.grad.detach(), self._inputs[param].get(self.name)
        if not native.serves(g, x):
            return None
        left, right = self._in_order(self._batch_first(g), self._batch_first(x))
        if param.is_contiguous():
            return Product(left, right)
        return Product(right, left) if _lies_turned(param) else None

    def example(self, param: Parameter, i: int) -> Tensor:
        left, right, turned = self._example(param, i)
        if self._in_bfloat16(param):
            found = wide(bfloat16.product(left, right))
            return found.t() if turned else found
        left, right = wide(left), wide(right)
        if native.serves(left, right):
            (found,) = native.contraction_grad_sample(left.unsqueeze(0), right.unsqueeze(0))
        else:
            found = product(left.t(), right.t())
        return found.t() if turned else found

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        if (taken := self._for_gpu(param)) is not None:
            gpu.contraction_clipped_sum(*taken, factors, out, self._limits[param].of(self.grad))
            return
        g = self._g()
        if param not in self._inputs:
            out.addmv_((g if g.dim() == 2 else g.sum(1)).t(), factors)
            return
        add_contraction(*self._in_order(g, self._x(param)), factors, out)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        assert self.grad is not None
        if self.grad.dim() == 2:
            return True
        if param not in self._inputs:
            return False
        if self._for_gpu(param) is not None:
            return True
        if self._in_bfloat16(param):  # at every number of positions, which that of the longest example may be
            return False
        positions = self.grad.shape[:-1].numel() // self.grad.shape[1 if self.time_major else 0]
        d, p = self.grad.shape[-1], self._inputs[param].tensor.shape[-1]
        return 2 * positions**2 * (p + d) < flops_per_kept_float(self.grad.device) * p * d

    def rows(self, index: Tensor, dtype: torch.dtype) -> ContractionUse:
        batch = 1 if self.time_major else 0

        def part(tensor: Tensor) -> Tensor:
            found = tensor.detach().index_select(batch, index)
            # Half precision stays: the gradients of these are to be formed as if all examples were still there.
            return found if dtype == torch.float32 and found.dtype in HALF else found.to(dtype)

        inputs = {p: part(saved.get(self.name)) for p, saved in self._inputs.items()}
        use = ContractionUse(self.name, inputs, self.params[len(inputs) :], self.time_major, self.turned)
        use.grad = None if self.grad is None else part(self.grad)
        use._limits = {p: limits.rows(self.grad, index, use.grad) for p, limits in self._limits.items()}
        return use

    def of_units(self, group: int) -> ContractionUse:
        def joined(tensor: Tensor) -> Tensor:
            """[B / group, group * T, ...]: the rows' positions are the unit's."""
            tensor = self._batch_first(tensor.detach())
            return tensor.reshape(len(tensor) // group, -1, tensor.shape[-1])

        inputs = {p: joined(saved.get(self.name)) for p, saved in self._inputs.items()}
        use = ContractionUse(self.name, inputs, self.params[len(inputs) :], turned=self.turned)
        use.grad, use.sequential = None if self.grad is None else joined(self.grad), self.sequential
        return use

    def stash_bytes(self) -> int:
        inputs = sum(saved.tensor.nbytes for saved in self._inputs.values())
        return inputs + (0 if self.grad is None else self.grad.nbytes)


def _lies_turned(weight: Parameter) -> bool:
    """Return whether a matrix lies in memory column by column."""
    return weight.stride(0) == 1 and weight.stride(1) > 1


@handles(F.linear, derives=True)
def _linear(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = (weight,) if tape.trains(weight) else ()
        biases = (bias,) if bias is not None and tape.trains(bias) else ()
        params = (*weights, *biases)
        if not params:
            return linear(input, weight, bias)
        if biases and biases[0].shape != weight.shape[:1]:  # one number for all outputs, say
            # Not ``call`` itself: a function that holds itself would keep the tape until Python's collector comes by.
            return tape.call(torch.add, tape.call(F.linear, input, weight), biases[0])
        return _recorded(tape, input, weight, bias, weights, biases, False)

    return call(*args, **kwargs)


def _recorded(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: tuple[Parameter, ...],
    biases: tuple[Parameter, ...],
    turned: bool,
) -> Tensor:
    """X times ``weight`` [d, p], or [p, d] if it is ``turned``, with what of it and of the bias is trained."""
    params = (*weights, *biases)
    batch_dim = tape.batch.required(x, params)
    matrix = weight.detach() if weights else weight
    output = linear(x, matrix.t() if turned else matrix, bias.detach() if biases and bias is not None else bias)
    rows = batch_dim == IN_ROWS
    inputs = dict.fromkeys(weights, batch_first(x, batch_dim, tape.batch_size) if rows else x)
    use = ContractionUse(tape.layer(params), inputs, biases, batch_dim == 1, turned)
    return tape.record(use, output, batch_dim if rows else 0)


def _by_turned(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X @ W + bias for W [p, d] that is trained, or comes from what is trained."""
    if not tape.trains(weight) or (bias is not None and bias in tape.sources and not tape.trains(bias)):
        return tape.call(F.linear, x, tape.call(Tensor.t, weight), bias)  # type: ignore[no-any-return]
    biases = (bias,) if tape.trains(bias) else ()
    return _recorded(tape, x, weight, bias, (weight,), biases, True)


@rewrites(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm)
def _matmul(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """X @ W and W @ x with a weight of two dimensions are linear maps of x."""
    if len(args) != 2 or kwargs or not all(isinstance(a, Tensor) for a in args):
        return None
    left, right = args[::-1] if func is Tensor.__rmatmul__ else args
    if right in tape.sources and right.dim() == 2 and left.dim() >= 2 and left not in tape.sources:
        return _by_turned(tape, left, right, None)
    if left in tape.sources and left.dim() == 2 and right.dim() >= 3 and right not in tape.sources:
        return tape.call(F.linear, right.transpose(-1, -2), left).transpose(-1, -2)
    return None


@rewrites(torch.einsum)
def _einsum(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A product of a batch's last dimensions with a weight, as "btd,dhk->bthk"."""
    if kwargs or len(args) < 2 or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if len(operands) != 2 or not all(isinstance(operand, Tensor) for operand in operands):
        return None
    terms = _terms(args[0].replace(" ", ""), [operand.dim() for operand in operands])
    return None if terms is None else _contracted(tape, operands, *terms)


def _terms(equation: str, dims: list[int]) -> tuple[str, str, str] | None:
    """The letters of two operands and of their product, with "..." spelt out; None where they do not fit ``dims``."""
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    letters = inputs.replace("...", "").replace(",", "")
    if len(terms) != 2 or not (letters.isascii() and letters.isalpha()) or all("..." in term for term in terms):
        return None
    if not arrow:
        # As torch says: what is there once, by the alphabet.
        out = "..." * ("..." in inputs) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    for i, term in enumerate(terms):
        if "..." in term:
            # Digits, which are no letters of an equation.
            hidden = string.digits[: max(dims[i] - len(term) + 3, 0)]
            terms[i], out = term.replace("...", hidden), out.replace("...", hidden)
    return (terms[0], terms[1], out) if [len(term) for term in terms] == dims else None


def _contracted(tape: Tape, operands: Sequence[Tensor], first: str, second: str, out: str) -> Tensor | None:
    """The product of a batch and a weight by :func:`F.linear`; None where it is none of the batch's last dimensions."""
    sources = [operand in tape.sources for operand in operands]
    if sources == [True, False]:
        operands, first, second = operands[::-1], second, first
    elif sources != [False, True]:
        return None
    x, weight = operands
    summed = [c for c in first if c in second]
    kept, new = [c for c in first if c not in second], [c for c in second if c not in first]
    single = all(len(set(term)) == len(term) for term in (first, second, out))
    if not single or not summed or not kept or sorted(out) != sorted(kept + new):
        return None
    sizes = dict(zip(second, weight.shape, strict=True))
    outputs, inputs = [sizes[c] for c in new], [sizes[c] for c in summed]
    # A dimension of length 1 would be spread out, and the batch has to stay where it is.
    if first != "".join(kept + summed) or out[0] != kept[0] or list(x.shape[len(kept) :]) != inputs:
        return None
    if second != "".join(new + summed):
        order = [second.index(c) for c in new + summed]
        weight = tape.call(Tensor.t, weight) if len(order) == 2 else tape.call(Tensor.permute, weight, order)
    if (len(new), len(summed)) != (1, 1):
        weight = tape.call(Tensor.reshape, weight, (math.prod(outputs), math.prod(inputs)))
    if len(summed) > 1:
        x = tape.call(Tensor.reshape, x, (*x.shape[: len(kept)], math.prod(inputs)))
    product = tape.call(F.linear, x, weight)
    if len(new) != 1:
        product = tape.call(Tensor.reshape, product, (*x.shape[: len(kept)], *outputs))
    if list(out) != kept + new:
        product = tape.call(Tensor.permute, product, [(kept + new).index(c) for c in out])
    return product


@rewrites(torch.tensordot)
def _tensordot(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A product of a batch's last dimensions with a weight, by the numbers of the dimensions."""
    given = dict(zip(("a", "b", "dims", "out"), args, strict=False)) | kwargs
    operands: list[Any] = [given.get("a"), given.get("b")]
    dims = given.get("dims", 2)
    pairs = [range(-dims, 0), range(dims)] if isinstance(dims, int) else dims
    if not all(isinstance(operand, Tensor) for operand in operands) or not isinstance(pairs, (list, tuple)):
        return None
    if given.get("out") is not None:
        return None
    lengths = [len(part) for part in pairs if isinstance(part, (list, tuple, range))]
    if len(pairs) != 2 or len(lengths) != 2 or lengths[0] != lengths[1]:
        return None
    first, second = string.ascii_lowercase[: operands[0].dim()], string.ascii_uppercase[: operands[1].dim()]
    if not all(-len(t) <= i < len(t) for t, part in zip((first, second), pairs, strict=True) for i in part):
        return None
    for i, j in zip(*pairs, strict=True):
        second = second.replace(second[j], first[i])
    out = "".join(c for c in first + second if (first + second).count(c) == 1)
    return _contracted(tape, operands, first, second, out)


@rewrites(torch.addmm, Tensor.addmm)
def _addmm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Bias + x @ W."""
    if len(args) != 3 or kwargs:
        return None
    bias, x, weight = args
    sources = bias in tape.sources or not bias.requires_grad, weight in tape.sources or not weight.requires_grad
    if bias.shape != weight.shape[-1:] or not all(sources) or x in tape.sources:
        return None
    return _by_turned(tape, x, weight, bias)
