"""The networks of the tasks, each a function of its sizes."""

from __future__ import annotations

from itertools import pairwise

from harness.network import (
    GELU,
    Attention,
    AvgPool2d,
    Bags,
    Conv2d,
    Embedding,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    MeanOverSpace,
    MeanOverTime,
    Positions,
    ReLU,
    Residual,
    RMSNorm,
    SiLU,
    SpaceAsTime,
    SwiGLU,
    TiedHead,
    TokenTypes,
)

BERT_EPS = 1e-12


def cifar_layers() -> tuple[Layer, ...]:
    """The public suite's network for CIFAR-10."""
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    layers: list[Layer] = []
    for i, (c_in, c_out) in enumerate(widths):
        layers += [Conv2d(f"conv{i + 1}", c_in, c_out, 3, 1, 1), ReLU()]
        if i % 2:
            layers.append(AvgPool2d(2, 2))
    return (*layers, Conv2d("conv7", 128, 256, 3, 1, 1), ReLU(), Conv2d("conv8", 256, 10, 3, 1, 1), MeanOverSpace())


def gpt2_layers(blocks: int, dim: int, heads: int, vocabulary: int, positions: int) -> tuple[Layer, ...]:
    """GPT-2's order: norms before attention and before the wide maps, a last norm, the head tied to the table.
    ``positions``: rows of their table, of which a text uses as many as it has tokens."""
    found: list[Layer] = [Embedding("tokens", vocabulary, dim), Positions("positions", positions, dim)]
    for i in range(blocks):
        found += [
            Residual((LayerNorm(f"h{i}.norm1", dim), Attention(f"h{i}.attention", dim, heads))),
            Residual(
                (
                    LayerNorm(f"h{i}.norm2", dim),
                    Linear(f"h{i}.wide", dim, 4 * dim),
                    GELU(),
                    Linear(f"h{i}.narrow", 4 * dim, dim),
                )
            ),
        ]
    return (*found, LayerNorm("norm", dim), TiedHead("tokens", vocabulary))


def llama_layers(
    blocks: int, dim: int, heads: int, kv_heads: int, hidden: int, lora: int, vocabulary: int, rotary: float = 10_000.0
) -> tuple[Layer, ...]:
    """Llama's order, with low-rank adapters of rank ``lora`` beside every linear map of the blocks. ``rotary``: base
    of the rotary positions."""
    found: list[Layer] = [Embedding("tokens", vocabulary, dim)]
    for i in range(blocks):
        attention = Attention(f"h{i}.attention", dim, heads, kv_heads, rotary=rotary, bias=False, lora=lora)
        found += [
            Residual((RMSNorm(f"h{i}.norm1", dim), attention)),
            Residual((RMSNorm(f"h{i}.norm2", dim), SwiGLU(f"h{i}.mlp", dim, hidden, lora))),
        ]
    return (*found, RMSNorm("norm", dim), TiedHead("tokens", vocabulary))


def vit_layers(blocks: int, dim: int, heads: int, side: int, patch: int, classes: int) -> tuple[Layer, ...]:
    """A vision transformer of patches with trained positions and the mean over them (Dosovitskiy et al. 2021)."""
    found: list[Layer] = [
        Conv2d("patches", 3, dim, patch, patch),
        SpaceAsTime(),
        Positions("positions", (side // patch) ** 2, dim),
    ]
    for i in range(blocks):
        attention = Attention(f"h{i}.attention", dim, heads, causal=False)
        wide, narrow = Linear(f"h{i}.wide", dim, 4 * dim), Linear(f"h{i}.narrow", 4 * dim, dim)
        found += [
            Residual((LayerNorm(f"h{i}.norm1", dim), attention)),
            Residual((LayerNorm(f"h{i}.norm2", dim), wide, GELU(), narrow)),
        ]
    return (*found, LayerNorm("norm", dim), MeanOverTime(), Linear("head", dim, classes))


def encoder_layers(
    blocks: int,
    dim: int,
    heads: int,
    hidden: int,
    vocabulary: int,
    positions: int,
    classes: int,
    lora: int = 0,
    kinds: int = 2,
) -> tuple[Layer, ...]:
    """BERT's order: a norm behind every sum, biases everywhere; then the mean over all tokens and a head. ``lora``:
    rank of the adapters beside every linear map of the blocks. ``kinds``: rows of the table of token types."""
    found: list[Layer] = [
        Embedding("tokens", vocabulary, dim),
        Positions("positions", positions, dim),
        TokenTypes("types", kinds, dim),
        LayerNorm("norm", dim, BERT_EPS),
    ]
    for i in range(blocks):
        wide, narrow = (Linear(f"h{i}.wide", dim, hidden, lora=lora), Linear(f"h{i}.narrow", hidden, dim, lora=lora))
        found += [
            Residual((Attention(f"h{i}.attention", dim, heads, causal=False, lora=lora),)),
            LayerNorm(f"h{i}.norm1", dim, BERT_EPS),
            Residual((wide, GELU(exact=True), narrow)),
            LayerNorm(f"h{i}.norm2", dim, BERT_EPS),
        ]
    return (*found, MeanOverTime(), Linear("head", dim, classes))


def recommender_layers(
    counts: int, rows: tuple[int, ...], ids: int, dim: int, hidden: tuple[int, ...]
) -> tuple[Layer, ...]:
    """Bags of ids and counts into a network of fully connected layers with ReLU, whose last puts out one logit."""
    bags = Bags("bags", counts, rows, ids, dim)
    widths = (bags.width, *hidden, 1)
    found: list[Layer] = [bags]
    for i, (before, width) in enumerate(pairwise(widths)):
        found += [Linear(f"fc{i + 1}", before, width), ReLU()]
    return tuple(found[:-1])


def wide_resnet_layers(
    blocks: int, widths: tuple[int, ...], first: int, groups: int, classes: int
) -> tuple[Layer, ...]:
    """A wide ResNet with GroupNorm in the order of De et al. (2022): norm and activation before every convolution.

    The activation is SiLU, theirs ReLU: among the hundred thousands of units of so deep a network some are always so
    near the kink that rounding decides, and the gate could not tell a right update from one with a small fault.

    ``blocks``: residual blocks of every width; from the second width on the first block halves the image. Where shapes
    change, the shortcut is a convolution of one pixel, of the normed input.
    """
    found: list[Layer] = [Conv2d("conv", 3, first, 3, 1, 1)]
    before = first
    for stage, width in enumerate(widths):
        for block in range(blocks):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            start: tuple[Layer, ...] = (GroupNorm(f"{name}.norm1", groups, before), SiLU())
            body: tuple[Layer, ...] = (
                Conv2d(f"{name}.conv1", before, width, 3, stride, 1),
                GroupNorm(f"{name}.norm2", groups, width),
                SiLU(),
                Conv2d(f"{name}.conv2", width, width, 3, 1, 1),
            )
            if before == width and stride == 1:
                found.append(Residual((*start, *body)))
            else:
                found += [*start, Residual(body, (Conv2d(f"{name}.shortcut", before, width, 1, stride),))]
            before = width
    return (*found, GroupNorm("norm", groups, before), SiLU(), MeanOverSpace(), Linear("head", before, classes))
