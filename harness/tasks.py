"""The tasks as data: networks, starting weights, losses, training settings, and the physical floor of each.

The first four are facts from the public suite that the paper builds on. The layers are in :mod:`harness.network`.
Standard library and numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cache
from hashlib import sha256
from inspect import getsource
from itertools import pairwise
from typing import Any

import numpy as np

from harness.network import GELU as GELU
from harness.network import LORA_SCALE, Product, cost, fan_in, parameter_shapes, walk
from harness.network import Attention as Attention
from harness.network import AvgPool2d as AvgPool2d
from harness.network import Bags as Bags
from harness.network import Conv2d as Conv2d
from harness.network import Embedding as Embedding
from harness.network import Flatten as Flatten
from harness.network import GroupNorm as GroupNorm
from harness.network import Layer as Layer
from harness.network import LayerNorm as LayerNorm
from harness.network import Linear as Linear
from harness.network import Lstm as Lstm
from harness.network import MaxPool2d as MaxPool2d
from harness.network import MeanOverSpace as MeanOverSpace
from harness.network import MeanOverTime as MeanOverTime
from harness.network import Positions as Positions
from harness.network import ReLU as ReLU
from harness.network import Residual as Residual
from harness.network import RMSNorm as RMSNorm
from harness.network import SiLU as SiLU
from harness.network import SpaceAsTime as SpaceAsTime
from harness.network import SwiGLU as SwiGLU
from harness.network import TiedHead as TiedHead
from harness.network import TokenTypes as TokenTypes
from harness.optimizer import PLAIN, AdamW, Optimizer

FLOAT_BYTES = 4
NORMS = GroupNorm | LayerNorm | RMSNorm
TOKEN_LOSS = "token_cross_entropy"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
PRECISION_BYTES = {FLOAT32: 4, BFLOAT16: 2}
"""Of a value that a product puts out, by the precision of the products."""
NOT_OWN = -1
"""Label of a position that is none of an example's own tokens: padding, or a prompt."""


@dataclass(frozen=True)
class Task:
    """A task: network, data set, loss and size. ``loss`` is ``cross_entropy`` on logits [classes],
    ``binary_cross_entropy`` on one logit with labels in {0, 1}, or ``token_cross_entropy`` on logits [T, classes] with
    labels [T]: the mean over the positions whose label is not NOT_OWN, zero where there are none. Each example's own
    loss; no mean over examples inside.

    ``trained``: patterns (as of file names) of the parameters that training changes; the others are frozen.
    ``initial_deviation``: of the normal starting weights of all matrices (transformers: 0.02), with zeros for biases
    and for lora_b; None: uniform by fan-in. Norms start with ones and zeros.
    ``pretrained``: whether training starts from published weights, which the data set brings along
    (:mod:`harness.data.pretrained`); what they do not name, such as a head, starts as ``initial_deviation`` says.
    ``judged_as``: the task of the gate that is judged in its place, where the gate needs more memory and time than two
    cores have: it holds some forty steps of noise on all trained parameters at once. "": itself.
    ``precision``: of what goes into the products of the forward and the backward pass, and comes out of them. Weights,
    losses, norms, clipped sums, noise and the optimizer are float32 whatever it is."""

    name: str
    title: str
    dataset: str
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    loss: str
    layers: tuple[Layer, ...]
    train_size: int
    test_size: int
    learning_rate: float = 0.15
    in_paper: bool = True
    optimizer: Optimizer = PLAIN
    trained: tuple[str, ...] = ("*",)
    initial_deviation: float | None = None
    pretrained: bool = False
    judged_as: str = ""
    precision: str = FLOAT32

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Canonical parameter names and shapes, frozen ones included, in the order of the layers."""
        return {name: shape for layer in walk(self.layers) for name, shape in parameter_shapes(layer).items()}

    @property
    def trained_parameters(self) -> dict[str, tuple[int, ...]]:
        """Those that training changes: over them an example's gradient is clipped, and they alone get noise."""
        return {n: s for n, s in self.parameters.items() if any(fnmatch(n, pattern) for pattern in self.trained)}

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def trained_count(self) -> int:
        return sum(math.prod(shape) for shape in self.trained_parameters.values())

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Return the shape of one example's labels."""
        return self.input_shape if self.loss == TOKEN_LOSS else ()

    @property
    def tokens(self) -> int | None:
        """Positions of one example, padding included; None where inputs are not tokens."""
        return self.input_shape[0] if isinstance(self.layers[0], Embedding) else None

    @property
    def trains_tied_table(self) -> bool:
        """Whether a trained table has two uses."""
        tables = {f"{layer.table}.weight" for layer in walk(self.layers) if isinstance(layer, TiedHead)}
        return bool(tables & self.trained_parameters.keys())

    @property
    def forward_flops(self) -> int:
        """Multiply-adds count as two; contractions only, of one example's forward pass."""
        return sum(product.flops for product in self._walk()[0])

    @property
    def training_flops(self) -> int:
        """Floor of one example's forward and backward: 3 x forward, less the gradients of frozen matrices and the
        input gradient of the first layer with weights, which nobody needs (an embedding multiplies nothing)."""
        products, trained = self._walk()[0], self.trained_parameters
        first_is_fed_by_data = not isinstance(self.layers[0], Embedding | Bags)
        first = products[0].flops if products and first_is_fed_by_data else 0
        return sum(p.flops * (3 if p.parameter is None or p.parameter in trained else 2) for p in products) - first

    @property
    def activation_bytes(self) -> int:
        """Bytes of the outputs of all layers for one example, in the task's precision: what must move through memory at
        least once forward and once backward."""
        return PRECISION_BYTES[self.precision] * self._walk()[1]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, which are float32 in every precision."""
        return FLOAT_BYTES * self.parameter_count

    def _walk(self) -> tuple[list[Product], int]:
        """(contractions, output elements) of all layers."""
        shape: tuple[int, ...] = self.input_shape
        products: list[Product] = []
        size = 0
        for layer in self.layers:
            more, elements, shape = cost(layer, shape)
            products, size = products + more, size + elements
        return products, size


def initial_parameters(task: Task, seed: int) -> dict[str, np.ndarray]:
    """Canonical float32 random weights, the same for every framework: uniform in +-1/sqrt(fan_in) (an LSTM: in
    +-1/sqrt(hidden)), standard normal embeddings, ones and zeros for norms; or as ``task.initial_deviation`` says.
    Those of a pretrained task are :func:`harness.data.pretrained.starting_parameters`."""
    rng = np.random.default_rng([seed, 0x1A17])
    values: dict[str, np.ndarray] = {}
    for layer in walk(task.layers):
        for name, shape in parameter_shapes(layer).items():
            if task.initial_deviation is not None:
                value = _transformer_start(layer, name, shape, task.initial_deviation, rng)
            elif isinstance(layer, Embedding):
                value = rng.standard_normal(shape)
            elif isinstance(layer, NORMS):
                value = _norm_start(name, shape)
            else:
                value = rng.uniform(-1.0, 1.0, shape) / math.sqrt(fan_in(layer))
            values[name] = value.astype(np.float32)
    return values


def _transformer_start(
    layer: Layer, name: str, shape: tuple[int, ...], deviation: float, rng: np.random.Generator
) -> np.ndarray:
    if isinstance(layer, NORMS):
        return _norm_start(name, shape)
    if name.endswith((".lora_b", ".bias")):
        return np.zeros(shape)
    if name.endswith(".lora_a"):
        return rng.uniform(-1.0, 1.0, shape) / math.sqrt(shape[1])
    return deviation * rng.standard_normal(shape)


def _norm_start(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape) if name.endswith(".bias") else np.ones(shape)


@cache
def definition_hash(task: Task) -> str:
    """Return a hash of what makes the task what it is: its data, shapes, layers, optimizer, and how its weights start.
    No other task is in it, so that one that comes or goes changes no verdict and no record of this one."""
    parts = [_written(task), repr(task.parameters), repr((LORA_SCALE, NOT_OWN)), getsource(type(task.optimizer))]
    parts += [getsource(part) for part in (initial_parameters, _transformer_start, _norm_start)]
    # Adapters may use what a layer's class computes.
    parts += [getsource(kind) for kind in dict.fromkeys(type(layer) for layer in walk(task.layers))]
    if task.initial_deviation is None:
        weighted = [layer for layer in walk(task.layers) if parameter_shapes(layer)]
        parts += [str(fan_in(layer)) for layer in weighted if not isinstance(layer, Embedding | NORMS)]
    return sha256("\0".join(parts).encode()).hexdigest()[:12]


def _written(value: Any) -> str:
    """Return data as text. Fields at their defaults are left out: a new one changes no task that does not use it."""
    if isinstance(value, tuple | list):
        return f"({','.join(map(_written, value))})"
    if not is_dataclass(value):
        return repr(value)
    given = ((f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default)
    return f"{type(value).__name__}({','.join(f'{name}={_written(item)}' for name, item in given)})"


def check_parameters(task: Task, values: Mapping[str, np.ndarray]) -> str | None:
    """One sentence about the first way in which ``values`` are not this task's weights, or None."""
    expected = task.parameters
    if set(values) != set(expected):
        return f"{task.name}: parameter names are {sorted(values)}, the task has {sorted(expected)}."
    for name, shape in expected.items():
        if tuple(values[name].shape) != shape:
            return f"{task.name}: {name} has shape {tuple(values[name].shape)}, the task has {shape}."
    return None


VOCABULARY = 10_004
TOKENS = 256


def _cifar_layers() -> tuple[Layer, ...]:
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    layers: list[Layer] = []
    for i, (c_in, c_out) in enumerate(widths):
        layers += [Conv2d(f"conv{i + 1}", c_in, c_out, 3, 1, 1), ReLU()]
        if i % 2:
            layers.append(AvgPool2d(2, 2))
    return (
        *layers,
        Conv2d("conv7", 128, 256, 3, 1, 1),
        ReLU(),
        Conv2d("conv8", 256, 10, 3, 1, 1),
        MeanOverSpace(),
    )


BERT_EPS = 1e-12
PIECES, PIECE_TOKENS = 30_522, 64
"""Word pieces of BERT's vocabulary; how many of a review the encoder sees."""
MINILM = {"blocks": 6, "dim": 384, "heads": 12, "hidden": 1536, "vocabulary": PIECES, "positions": 512, "classes": 2}
CLICK_COUNTS, CLICK_IDS = 13, 4
CLICK_ROWS = (20_000, 10_000, 10_000, 5_000, 2_000, 1_000, 500, 100)
"""Of a request for a page: counts; how many ids each field has; how many different ones there are, by field."""
LORA, BIASES = ("*.lora_a", "*.lora_b"), ("*.bias",)
HEAD = ("head.*",)

WARM_UP = 100
"""Steps over which AdamW's rate rises."""

LM_VOCABULARY = 8192
LM_TOKENS = 128
LM_TRAIN_SIZE, LM_TEST_SIZE = 16_471, 1_852


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
    blocks: int,
    dim: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    lora: int,
    vocabulary: int,
    rotary: float = 10_000.0,
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
        wide, narrow = (
            Linear(f"h{i}.wide", dim, hidden, lora=lora),
            Linear(f"h{i}.narrow", hidden, dim, lora=lora),
        )
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


_CIFAR10: dict[str, Any] = {"dataset": "cifar10", "input_shape": (3, 32, 32), "input_dtype": "float32", "classes": 10}
_CIFAR10 |= {"loss": "cross_entropy", "train_size": 50_000, "test_size": 10_000}
_IMDB: dict[str, Any] = {"dataset": "imdb", "input_shape": (TOKENS,), "input_dtype": "int32", "classes": 2}
_IMDB |= {"loss": "cross_entropy", "train_size": 25_000, "test_size": 25_000}
_BROWN: dict[str, Any] = {"dataset": "brown", "input_shape": (LM_TOKENS,), "input_dtype": "int32"}
_BROWN |= {"classes": LM_VOCABULARY, "loss": TOKEN_LOSS, "train_size": LM_TRAIN_SIZE, "test_size": LM_TEST_SIZE}
_ADULT: dict[str, Any] = {"dataset": "adult", "input_shape": (104,), "input_dtype": "float32", "classes": 2}
_ADULT |= {"train_size": 30_162, "test_size": 15_060, "in_paper": False}
_MODERN: dict[str, Any] = {"learning_rate": 1e-3, "in_paper": False, "initial_deviation": 0.02}
_DECAYING = AdamW(weight_decay=0.01, warm_up=WARM_UP)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="mnist-cnn",
            title="MNIST CNN",
            dataset="mnist",
            input_shape=(1, 28, 28),
            input_dtype="float32",
            classes=10,
            loss="cross_entropy",
            layers=(
                Conv2d("conv1", 1, 16, 8, 2, 3),
                ReLU(),
                MaxPool2d(2, 1),
                Conv2d("conv2", 16, 32, 4, 2, 0),
                ReLU(),
                MaxPool2d(2, 1),
                Flatten(),
                Linear("fc1", 512, 32),
                ReLU(),
                Linear("fc2", 32, 10),
            ),
            train_size=60_000,
            test_size=10_000,
        ),
        Task(
            name="cifar10-cnn",
            title="CIFAR-10 CNN",
            **_CIFAR10,
            layers=_cifar_layers(),
        ),
        Task(
            name="imdb-embedding",
            title="IMDb embedding",
            **_IMDB,
            layers=(Embedding("embedding", VOCABULARY, 16), MeanOverTime(), Linear("fc", 16, 2)),
        ),
        Task(
            name="imdb-lstm",
            title="IMDb LSTM",
            **_IMDB,
            layers=(
                Embedding("embedding", VOCABULARY, 100),
                Lstm("lstm", 100, 100),
                MeanOverTime(),
                Linear("fc", 100, 2),
            ),
        ),
        Task(
            name="logreg",
            title="Logistic regression on Adult",
            **_ADULT,
            loss="binary_cross_entropy",
            layers=(Linear("fc", 104, 1),),
        ),
        Task(
            name="ffnn",
            title="Feed-forward network on Adult",
            **_ADULT,
            loss="cross_entropy",
            layers=(Linear("fc1", 104, 50), ReLU(), Linear("fc2", 50, 2)),
        ),
        Task(
            name="gpt2-lm",
            title="GPT-2, 4 layers of 128, from scratch on the Brown corpus",
            **_BROWN,
            layers=gpt2_layers(blocks=4, dim=128, heads=4, vocabulary=LM_VOCABULARY, positions=LM_TOKENS),
            **_MODERN,
            optimizer=_DECAYING,
        ),
        Task(
            name="llama-lora",
            title="Llama, 4 layers of 192, LoRA of rank 8 on a frozen random base, Brown corpus",
            **_BROWN,
            layers=llama_layers(4, dim=192, heads=6, kv_heads=2, hidden=512, lora=8, vocabulary=LM_VOCABULARY),
            **_MODERN,
            optimizer=AdamW(warm_up=WARM_UP),
            trained=LORA,
        ),
        Task(
            name="vit",
            title="ViT, 4 layers of 128, patches of 4 pixels, from scratch on CIFAR-10",
            **_CIFAR10,
            layers=vit_layers(blocks=4, dim=128, heads=4, side=32, patch=4, classes=10),
            **_MODERN,
            optimizer=_DECAYING,
        ),
        Task(
            name="wrn-16-2",
            title="Wide ResNet 16-2 with GroupNorm on CIFAR-10",
            **_CIFAR10,
            layers=wide_resnet_layers(blocks=2, widths=(32, 64, 128), first=16, groups=8, classes=10),
            in_paper=False,
        ),
        Task(
            name="wrn-16-4",
            title="Wide ResNet 16-4 with GroupNorm on CIFAR-10",
            **_CIFAR10,
            layers=wide_resnet_layers(blocks=2, widths=(64, 128, 256), first=16, groups=8, classes=10),
            in_paper=False,
        ),
        Task(
            name="llama-full",
            title="Llama, 4 layers of 192, from scratch on the Brown corpus",
            **_BROWN,
            layers=llama_layers(4, dim=192, heads=6, kv_heads=2, hidden=512, lora=0, vocabulary=LM_VOCABULARY),
            **_MODERN,
            optimizer=_DECAYING,
        ),
        Task(
            name="recsys",
            title="Recommender: bags of ids in 8 tables, 13 counts, an MLP, synthetic clicks",
            dataset="clicks",
            input_shape=(CLICK_COUNTS + len(CLICK_ROWS) * CLICK_IDS,),
            input_dtype="int32",
            classes=2,
            loss="binary_cross_entropy",
            layers=recommender_layers(CLICK_COUNTS, CLICK_ROWS, CLICK_IDS, dim=16, hidden=(64, 32)),
            train_size=40_000,
            test_size=10_000,
            in_paper=False,
        ),
        Task(
            name="encoder-full",
            title="MiniLM, 6 layers of 384, pretrained, all of it fine-tuned on IMDb",
            dataset="imdb-wordpiece",
            input_shape=(PIECE_TOKENS,),
            input_dtype="int32",
            classes=2,
            loss="cross_entropy",
            layers=encoder_layers(**MINILM),
            train_size=25_000,
            test_size=25_000,
            learning_rate=5e-4,
            in_paper=False,
            optimizer=AdamW(warm_up=WARM_UP),
            initial_deviation=0.02,
            pretrained=True,
            judged_as="small-encoder-full",
        ),
    )
}


def in_bfloat16(task: Task) -> Task:
    """Return the same task with its products in bfloat16, under its name with ``-bf16``, and so what is judged in its
    place."""
    return replace(
        task,
        name=f"{task.name}-bf16",
        title=f"{task.title}, in bfloat16",
        precision=BFLOAT16,
        judged_as=task.judged_as and f"{task.judged_as}-bf16",
    )


_LOWERED = {task.name: task for task in map(in_bfloat16, (TASKS["gpt2-lm"], TASKS["llama-lora"]))}
BF16_TASKS = tuple(_LOWERED)
TASKS |= _LOWERED

TASKS |= {
    task.name: task
    for task in (
        replace(
            TASKS["encoder-full"],
            name="encoder-lora",
            title="MiniLM, 6 layers of 384, pretrained, LoRA of rank 8 and the head fine-tuned on IMDb",
            layers=encoder_layers(**MINILM, lora=8),
            trained=(*LORA, *HEAD),
            judged_as="",
        ),
        replace(
            TASKS["encoder-full"],
            name="encoder-bias",
            title="MiniLM, 6 layers of 384, pretrained, biases and the head fine-tuned on IMDb (BiTFiT)",
            trained=(*BIASES, *HEAD),
            judged_as="",
        ),
    )
}

GPT2_VOCABULARY, GPT2_POSITIONS, E2E_TOKENS = 50_257, 1024, 100
"""GPT-2's word pieces and positions; how many tokens of them a text of E2E has in the paper on book-keeping."""
LLAMA_1B = {"blocks": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocabulary": 128_256}
LLAMA_ROTARY = 500_000.0
ROBERTA_LARGE = {"blocks": 24, "dim": 1024, "heads": 16, "hidden": 4096, "vocabulary": 50_265, "positions": 514}
ROBERTA_LARGE |= {"classes": 2, "kinds": 1}
LARGE_CLICK_ROWS = (2_000_000,) * 26


def _full(name: str, title: str, like: str, layers: tuple[Layer, ...], judged_as: str, **more: Any) -> Task:
    """Return a task of a published shape that trains as the modern task ``like`` does; ``more``: what else differs."""
    return replace(TASKS[like], name=name, title=title, layers=layers, judged_as=judged_as, pretrained=False, **more)


def _of_words(dataset: str, tokens: int, train_size: int) -> dict[str, Any]:
    """Return the fields of a task that reads made-up words."""
    return {"dataset": dataset, "input_shape": (tokens,), "train_size": train_size, "test_size": 256}


_FULL = (
    _full(
        "gpt2-124m",
        "GPT-2, 12 layers of 768, synthetic words",
        "gpt2-lm",
        gpt2_layers(12, dim=768, heads=12, vocabulary=GPT2_VOCABULARY, positions=GPT2_POSITIONS),
        "small-gpt2",
        **_of_words("words-gpt2", E2E_TOKENS, 4096),
        classes=GPT2_VOCABULARY,
    ),
    _full(
        "gpt2-774m",
        "GPT-2 large, 36 layers of 1280, synthetic words",
        "gpt2-lm",
        gpt2_layers(36, dim=1280, heads=20, vocabulary=GPT2_VOCABULARY, positions=GPT2_POSITIONS),
        "small-gpt2",
        **_of_words("words-gpt2", E2E_TOKENS, 4096),
        classes=GPT2_VOCABULARY,
    ),
    _full(
        "llama-1b",
        "Llama, 16 layers of 2048, synthetic words",
        "llama-full",
        llama_layers(**LLAMA_1B, lora=0, rotary=LLAMA_ROTARY),
        "small-llama-full",
        **_of_words("words-llama-1024", 1024, 2048),
        classes=LLAMA_1B["vocabulary"],
    ),
    _full(
        "llama-1b-lora",
        "Llama, 16 layers of 2048, LoRA of rank 16, synthetic words",
        "llama-lora",
        llama_layers(**LLAMA_1B, lora=16, rotary=LLAMA_ROTARY),
        "small-llama",
        **_of_words("words-llama-512", 512, 2048),
        classes=LLAMA_1B["vocabulary"],
    ),
    _full(
        "encoder-355m",
        "RoBERTa-large, 24 layers of 1024, synthetic words",
        "encoder-full",
        encoder_layers(**ROBERTA_LARGE),
        "small-encoder-full",
        **_of_words("words-roberta", 256, 4096),
    ),
    _full(
        "encoder-355m-lora",
        "RoBERTa-large, LoRA of rank 8 and the head, synthetic words",
        "encoder-lora",
        encoder_layers(**ROBERTA_LARGE, lora=8),
        "small-encoder-lora",
        **_of_words("words-roberta", 256, 4096),
    ),
    _full(
        "vit-b16",
        "ViT-B/16, 12 layers of 768, synthetic pictures of 224 pixels",
        "vit",
        vit_layers(12, dim=768, heads=12, side=224, patch=16, classes=1000),
        "small-vit",
        dataset="pictures-224",
        input_shape=(3, 224, 224),
        classes=1000,
        train_size=512,
        test_size=64,
    ),
    _full(
        "wrn-40-4",
        "Wide ResNet 40-4 with GroupNorm on CIFAR-10",
        "wrn-16-4",
        wide_resnet_layers(blocks=6, widths=(64, 128, 256), first=16, groups=8, classes=10),
        "small-wrn",
    ),
    _full(
        "recsys-large",
        "Recommender: bags of ids in 26 tables of 2,000,000, synthetic clicks",
        "recsys",
        recommender_layers(CLICK_COUNTS, LARGE_CLICK_ROWS, CLICK_IDS, dim=16, hidden=(512, 256)),
        "small-recsys",
        dataset="clicks-large",
        input_shape=(CLICK_COUNTS + len(LARGE_CLICK_ROWS) * CLICK_IDS,),
        train_size=20_000,
        test_size=2_000,
    ),
)
_FULL_IN_BFLOAT16 = ("gpt2-124m", "gpt2-774m", "llama-1b", "llama-1b-lora", "encoder-355m", "vit-b16")
_MORE = {task.name: task for task in (*_FULL, *(in_bfloat16(task) for task in _FULL if task.name in _FULL_IN_BFLOAT16))}
FULL_TASKS = tuple(_MORE)
"""Of published shapes, with random weights: for one GPU. Nothing chooses them but a preset for GPUs, or their name."""
TASKS |= _MORE

SMALL_VOCABULARY, SMALL_TOKENS = 307, 40
SMALL_SIDE, SMALL_CLASSES = 8, 5
SMALL_PIECES, SMALL_REVIEW = 311, 16
SMALL_BLOCKS, SMALL_ROWS = 2, 70_000
"""Faults hide below such sizes: ids and rows that one byte or two cannot hold, texts longer than vectors, and a
second block."""


def _small(
    name: str, title: str, like: str, layers: tuple[Layer, ...], input_shape: tuple[int, ...], classes: int
) -> Task:
    return replace(
        TASKS[like],
        name=name,
        title=title,
        layers=layers,
        dataset="",
        input_shape=input_shape,
        classes=classes,
        train_size=SMALL_ROWS,
        test_size=0,
        pretrained=False,
        judged_as="",
    )


def _small_words(name: str, title: str, like: str, layers: tuple[Layer, ...]) -> Task:
    return _small(name, title, like, layers, (SMALL_TOKENS,), SMALL_VOCABULARY)


def _small_pictures(name: str, title: str, like: str, layers: tuple[Layer, ...]) -> Task:
    return _small(name, title, like, layers, (3, SMALL_SIDE, SMALL_SIDE), SMALL_CLASSES)


def _small_encoder(name: str, trained: str, like: str, lora: int = 0) -> Task:
    layers = encoder_layers(SMALL_BLOCKS, 16, 2, 40, SMALL_PIECES, positions=SMALL_REVIEW + 3, classes=2, lora=lora)
    title = f"Encoder of two blocks, {trained} trained, for the gate alone"
    return _small(name, title, like, layers, (SMALL_REVIEW,), 2)


GATE_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _small_words(
            "small-gpt2",
            "GPT-2 of two blocks, for the gate alone",
            "gpt2-lm",
            gpt2_layers(SMALL_BLOCKS, dim=16, heads=2, vocabulary=SMALL_VOCABULARY, positions=SMALL_TOKENS),
        ),
        _small_words(
            "small-llama",
            "Llama of two blocks with LoRA, for the gate alone",
            "llama-lora",
            llama_layers(SMALL_BLOCKS, dim=24, heads=4, kv_heads=2, hidden=40, lora=3, vocabulary=SMALL_VOCABULARY),
        ),
        _small_pictures(
            "small-vit",
            "Vision transformer of two blocks, for the gate alone",
            "vit",
            vit_layers(SMALL_BLOCKS, dim=16, heads=2, side=SMALL_SIDE, patch=2, classes=SMALL_CLASSES),
        ),
        _small_pictures(
            "small-wrn",
            "Wide ResNet of two blocks, for the gate alone",
            "wrn-16-2",
            wide_resnet_layers(blocks=1, widths=(8, 12), first=8, groups=4, classes=SMALL_CLASSES),
        ),
    )
}
GATE_TASKS |= {task.name: task for task in map(in_bfloat16, (GATE_TASKS["small-gpt2"], GATE_TASKS["small-llama"]))}
GATE_TASKS |= {
    task.name: task
    for task in (
        _small_encoder("small-encoder-full", "all of it", "encoder-full"),
        _small_encoder("small-encoder-lora", "LoRA and the head", "encoder-lora", lora=3),
        _small_encoder("small-encoder-bias", "biases and the head", "encoder-bias"),
        _small_words(
            "small-llama-full",
            "Llama of two blocks, all of it trained, for the gate alone",
            "llama-full",
            llama_layers(SMALL_BLOCKS, dim=24, heads=4, kv_heads=2, hidden=40, lora=0, vocabulary=SMALL_VOCABULARY),
        ),
        _small(
            "small-recsys",
            "Recommender of three small tables, for the gate alone",
            "recsys",
            recommender_layers(counts=3, rows=(300, 40, 12), ids=4, dim=4, hidden=(16, 8)),
            (3 + 3 * 4,),
            2,
        ),
    )
}
GATE_TASKS |= {
    task.name: task
    for task in map(in_bfloat16, (GATE_TASKS[f"small-{name}"] for name in ("llama-full", "encoder-full", "vit")))
}
"""The structure of the modern tasks in a thousandth of their arithmetic: what CI judges, never measured."""


SMALL_GATE = {
    "gpt2-lm": "small-gpt2",
    "gpt2-lm-bf16": "small-gpt2-bf16",
    "llama-full": "small-llama-full",
    "llama-lora": "small-llama",
    "llama-lora-bf16": "small-llama-bf16",
    "vit": "small-vit",
    "wrn-16-2": "small-wrn",
    "wrn-16-4": "small-wrn",
    "encoder-full": "small-encoder-full",
    "encoder-lora": "small-encoder-lora",
    "encoder-bias": "small-encoder-bias",
    "recsys": "small-recsys",
}
"""The task of the gate that has a modern task's structure, for runs that ask for the small gate."""


def known_task(name: str) -> Task:
    """Return a task by its name, measured or for the gate alone."""
    return TASKS[name] if name in TASKS else GATE_TASKS[name]


PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_paper)
PAPER_BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
