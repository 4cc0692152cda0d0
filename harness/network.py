"""The layers of the tasks' networks as data: their parameters under canonical names, and what they cost.

Layouts are PyTorch's: NCHW images, OIHW kernels, [out, in] matrices, LSTM gates in the order i, f, g, o with ONE bias
vector; sequences are [T, dim]. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LORA_SCALE = 2.0
"""Factor of a low-rank adapter's output: alpha / r, with alpha = 2r as is usual."""


@dataclass(frozen=True)
class Conv2d:
    """2-D convolution with bias; weight [out, in, kernel, kernel], zero padding."""

    name: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True)
class Linear:
    """y = W x + b; weight [out, in].

    ``lora``: rank r of an adapter beside it, y + LORA_SCALE * B A x with lora_a [r, in] and lora_b [out, r]; 0: none.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = True
    lora: int = 0


@dataclass(frozen=True)
class Embedding:
    """Token ids [T] to vectors [T, dim]; weight [num_embeddings, dim]. Every row is trained, row 0 included."""

    name: str
    num_embeddings: int
    dim: int


@dataclass(frozen=True)
class Lstm:
    """One-layer LSTM over [T, in], zero initial state, returns [T, hidden].

    weight_ih [4H, in], weight_hh [4H, H], bias [4H] (one vector), gate order i, f, g, o.
    """

    name: str
    in_features: int
    hidden: int


@dataclass(frozen=True)
class ReLU:
    """max(x, 0)."""


@dataclass(frozen=True)
class MaxPool2d:
    """Maximum over windows, no padding."""

    kernel: int
    stride: int


@dataclass(frozen=True)
class AvgPool2d:
    """Mean over windows, no padding."""

    kernel: int
    stride: int


@dataclass(frozen=True)
class Flatten:
    """[C, H, W] to [C*H*W]."""


@dataclass(frozen=True)
class MeanOverSpace:
    """[C, H, W] to [C]."""


@dataclass(frozen=True)
class Views:
    """``count`` rows [C, H, W] of one.

    View k is mirrored where k is odd, and moved by k // 2 pixels to the right and down, zeros behind it. The first
    layer of a network, whose others see every row by itself; the example's loss is the mean of its rows', and its
    gradient is clipped once.
    """

    count: int


@dataclass(frozen=True)
class SpaceAsTime:
    """[C, H, W] to [H*W, C]: every place of a map becomes a position, row by row."""


@dataclass(frozen=True)
class MeanOverTime:
    """[T, d] to [d]; padding positions count."""


@dataclass(frozen=True)
class Positions:
    """Adds a trained vector for each position to [T, dim]; weight [length, dim]."""

    name: str
    length: int
    dim: int


@dataclass(frozen=True)
class TokenTypes:
    """Adds the vector of the first kind of tokens to [T, dim], as BERT does where there is one sentence.

    The weight is [kinds, dim], of which the first row alone is used.
    """

    name: str
    kinds: int
    dim: int


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight and bias [dim]."""

    name: str
    dim: int
    eps: float = 1e-5


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension; weight [dim]."""

    name: str
    dim: int
    eps: float = 1e-5


@dataclass(frozen=True)
class GroupNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias on [C, H, W]; weight and bias [C].

    Mean and variance are those of ``groups`` neighbouring groups of channels, each over all of its places.
    """

    name: str
    groups: int
    channels: int
    eps: float = 1e-5


@dataclass(frozen=True)
class GELU:
    """x times the normal distribution function of x, in the approximation by tanh (GPT-2's), or exact (BERT's)."""

    exact: bool = False


@dataclass(frozen=True)
class SiLU:
    """x times sigmoid(x)."""


@dataclass(frozen=True)
class SwiGLU:
    """down(SiLU(gate x) * up x) on [T, dim], without biases; the maps are NAME.gate, NAME.up and NAME.down."""

    name: str
    dim: int
    hidden: int
    lora: int = 0

    @property
    def maps(self) -> tuple[Linear, ...]:
        """Its linear maps: gate, up, down."""
        return (
            Linear(f"{self.name}.gate", self.dim, self.hidden, False, self.lora),
            Linear(f"{self.name}.up", self.dim, self.hidden, False, self.lora),
            Linear(f"{self.name}.down", self.hidden, self.dim, False, self.lora),
        )


@dataclass(frozen=True)
class Attention:
    """Self-attention on [T, dim]: softmax(Q K' / sqrt(dim / heads)) V, head by head, then the output map.

    The maps are NAME.query, NAME.key, NAME.value and NAME.output. ``kv_heads``: fewer heads of keys and values than
    of queries (grouped-query attention), each of which serves heads / kv_heads neighbouring heads of queries.
    ``causal``: no position sees a later one. ``rotary``: base of rotary positions, 0 for none; the two halves of a
    head's vector are the real and the imaginary parts (Llama's order).
    """

    name: str
    dim: int
    heads: int
    kv_heads: int = 0
    causal: bool = True
    rotary: float = 0.0
    bias: bool = True
    lora: int = 0

    @property
    def head_dim(self) -> int:
        """Return the length of one head's vectors."""
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def maps(self) -> tuple[Linear, ...]:
        """Its linear maps: query, key, value, output."""
        narrow = self.groups * self.head_dim
        widths = {"query": self.dim, "key": narrow, "value": narrow, "output": self.dim}
        return tuple(
            Linear(f"{self.name}.{part}", self.dim, width, self.bias, self.lora) for part, width in widths.items()
        )


@dataclass(frozen=True)
class Bags:
    """Integers [counts + fields * ids] to [counts + fields * dim], the first layer of a recommender.

    The first ``counts`` are counts, of which log(1 + x) is taken. Each of the fields then has ``ids`` ids, whose
    vectors out of the field's own table are summed up; an id may occur more than once. ``rows``: of each field's table;
    the tables are NAME.f0, NAME.f1, ...
    """

    name: str
    counts: int
    rows: tuple[int, ...]
    ids: int
    dim: int

    @property
    def maps(self) -> tuple[Embedding, ...]:
        """Its tables."""
        return tuple(Embedding(f"{self.name}.f{i}", rows, self.dim) for i, rows in enumerate(self.rows))

    @property
    def width(self) -> int:
        """Return how many numbers it puts out."""
        return self.counts + len(self.rows) * self.dim


@dataclass(frozen=True)
class TiedHead:
    """Logits [T, rows] of [T, dim]: the product with the table of the embedding ``table``, which it shares."""

    table: str
    rows: int


@dataclass(frozen=True)
class Residual:
    """x + f(x), f the layers one after the other; with a ``shortcut``, layers too, shortcut(x) + f(x)."""

    layers: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()


Layer = (
    Conv2d
    | Linear
    | Embedding
    | Lstm
    | ReLU
    | MaxPool2d
    | AvgPool2d
    | Flatten
    | MeanOverSpace
    | Views
    | SpaceAsTime
    | MeanOverTime
    | Positions
    | TokenTypes
    | GroupNorm
    | LayerNorm
    | RMSNorm
    | GELU
    | SiLU
    | SwiGLU
    | Attention
    | Bags
    | TiedHead
    | Residual
)


def walk(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield every layer in the order of computation.

    Those of a residual block come instead of it, its shortcut last, the linear maps of an attention or a SwiGLU and the
    tables of bags after it.
    """
    for layer in layers:
        if isinstance(layer, Residual):
            yield from walk(layer.layers + layer.shortcut)
        else:
            yield layer
            if isinstance(layer, Attention | SwiGLU | Bags):
                yield from layer.maps


def parameter_shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's own parameters by their canonical names.

    Those of the maps inside an attention, a SwiGLU or bags, and of the layers of a residual block, are theirs.
    """
    match layer:
        case Conv2d(name, c_in, c_out, k):
            return {f"{name}.weight": (c_out, c_in, k, k), f"{name}.bias": (c_out,)}
        case Linear(name, n_in, n_out, bias, lora):
            shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n_out, n_in)}
            if bias:
                shapes[f"{name}.bias"] = (n_out,)
            if lora:
                shapes |= {f"{name}.lora_a": (lora, n_in), f"{name}.lora_b": (n_out, lora)}
            return shapes
        case Embedding(name, rows, dim) | Positions(name, rows, dim) | TokenTypes(name, rows, dim):
            return {f"{name}.weight": (rows, dim)}
        case Lstm(name, n_in, h):
            return {f"{name}.weight_ih": (4 * h, n_in), f"{name}.weight_hh": (4 * h, h), f"{name}.bias": (4 * h,)}
        case LayerNorm(name, dim) | GroupNorm(name, _, dim):
            return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}
        case RMSNorm(name, dim):
            return {f"{name}.weight": (dim,)}
    return {}


@dataclass(frozen=True)
class Product:
    """A contraction of one example's forward pass.

    ``flops``: a multiply-add counts as two. ``parameter``: what it multiplies with; None where both factors are
    activations.
    """

    flops: int
    parameter: str | None


Costs = tuple[list[Product], int, tuple[int, ...]]
"""Contractions, elements of all outputs that a backward pass needs, shape of the output."""


def cost(layer: Layer, shape: tuple[int, ...]) -> Costs:
    """Return what a layer costs on one example of ``shape``."""

    def window(size: int, kernel: int, stride: int, padding: int = 0) -> int:
        return (size + 2 * padding - kernel) // stride + 1

    def plain(out: tuple[int, ...]) -> Costs:
        return [], math.prod(out), out

    match layer:
        case Conv2d(name, c_in, c_out, k, stride, padding):
            out: tuple[int, ...] = (c_out, window(shape[1], k, stride, padding), window(shape[2], k, stride, padding))
            return [Product(2 * c_in * k * k * math.prod(out), f"{name}.weight")], math.prod(out), out
        case Linear(name, n_in, n_out, _, lora):
            rows, out = math.prod(shape[:-1]), (*shape[:-1], n_out)
            products = [Product(2 * n_in * n_out * rows, f"{name}.weight")]
            if lora:
                products += [Product(2 * n_in * lora * rows, f"{name}.lora_a")]
                products += [Product(2 * n_out * lora * rows, f"{name}.lora_b")]
            return products, math.prod(out) + lora * rows, out
        case Embedding(_, _, dim):
            return plain((*shape, dim))
        case Lstm(name, n_in, h):
            flops = 2 * shape[0] * 4 * h * (n_in + h)
            return [Product(flops, f"{name}.weight_ih")], shape[0] * h, (shape[0], h)
        case MaxPool2d(k, stride) | AvgPool2d(k, stride):
            return plain((shape[0], window(shape[1], k, stride), window(shape[2], k, stride)))
        case Flatten():
            return plain((math.prod(shape),))
        case MeanOverSpace():
            return plain((shape[0],))
        case SpaceAsTime():
            return plain((shape[1] * shape[2], shape[0]))
        case MeanOverTime():
            return plain((shape[1],))
        case Bags():
            return plain((layer.width,))
        case TiedHead() | Attention() | SwiGLU() | Residual():
            return _cost_of_transformer(layer, shape)
    return plain(shape)


def _cost_of_transformer(layer: TiedHead | Attention | SwiGLU | Residual, shape: tuple[int, ...]) -> Costs:
    match layer:
        case TiedHead(table, rows):
            out = (*shape[:-1], rows)
            return [Product(2 * shape[-1] * math.prod(out), f"{table}.weight")], math.prod(out), out
        case Attention():
            query, *others = (cost(part, shape) for part in layer.maps)
            seen = shape[0] * (shape[0] + 1) // 2 if layer.causal else shape[0] ** 2
            inside = Product(2 * 2 * seen * layer.dim, None)
            sizes = query[1] + sum(size for _, size, _ in others) + layer.heads * shape[0] ** 2 + math.prod(shape)
            return [*query[0], *(p for products, _, _ in others for p in products), inside], sizes, shape
        case SwiGLU():
            gate, up, down = layer.maps
            (first, a, hidden), (second, b, _) = cost(gate, shape), cost(up, shape)
            third, c, out = cost(down, hidden)
            return first + second + third, a + b + math.prod(hidden) + c, out
        case Residual(layers, shortcut):
            found, size, out = _cost_of_chain(layers, shape)
            beside, elements, _ = _cost_of_chain(shortcut, shape)
            return found + beside, size + elements + math.prod(out), out


def _cost_of_chain(layers: Iterable[Layer], shape: tuple[int, ...]) -> Costs:
    """Return what layers one after the other cost."""
    found: list[Product] = []
    size = 0
    for layer in layers:
        more, elements, shape = cost(layer, shape)
        found, size = found + more, size + elements
    return found, size, shape


def fan_in(layer: Layer) -> int:
    """Return how many inputs a unit of the layer sums up."""
    match layer:
        case Conv2d(_, c_in, _, k):
            return c_in * k * k
        case Linear(_, n_in, _):
            return n_in
        case Lstm(_, _, hidden):
            return hidden
    raise TypeError(f"{type(layer).__name__} has no fan-in.")
