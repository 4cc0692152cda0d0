"""The tasks as data, and all that adapters need to know of them.

The first four are facts from the public suite that the paper builds on. Adapters, those of old commits too, import the
layers (:mod:`harness.network`) and what a task is (:mod:`harness.task`) from here.
"""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.architectures import *
from harness.errors import BadInput
from harness.network import *
from harness.optimizer import AdamW
from harness.task import *

VOCABULARY = 10_004
TOKENS = 256
PIECES, PIECE_TOKENS = 30_522, 64
"""Word pieces of BERT's vocabulary; how many of a review the encoder sees."""
MINILM = {"blocks": 6, "dim": 384, "heads": 12, "hidden": 1536, "vocabulary": PIECES, "positions": 512, "classes": 2}
CLICK_COUNTS, CLICK_IDS = 13, 4
CLICK_ROWS = (20_000, 10_000, 10_000, 5_000, 2_000, 1_000, 500, 100)
"""Of a request for a page: counts; how many ids each field has; how many different ones there are, by field."""
MILLION_ROWS = (500_000, 200_000, 150_000, 100_000, 40_000, 8_000, 1_900, 100)
"""Those of ``recsys-1m``, a million together."""
LORA, BIASES, HEAD = ("*.lora_a", "*.lora_b"), ("*.bias",), ("head.*",)

WARM_UP = 100
"""Steps over which AdamW's rate rises."""

LM_VOCABULARY = 8192
LM_TOKENS = 128
LM_TRAIN_SIZE, LM_TEST_SIZE = 16_471, 1_852

ADULT: dict[str, Any] = {
    "dataset": "adult",
    "input_shape": (104,),
    "input_dtype": "float32",
    "train_size": 30_162,
    "test_size": 15_060,
    "in_paper": False,
}
IMDB: dict[str, Any] = {
    "dataset": "imdb",
    "input_shape": (TOKENS,),
    "input_dtype": "int32",
    "classes": 2,
    "loss": "cross_entropy",
    "train_size": 25_000,
    "test_size": 25_000,
}
CIFAR10: dict[str, Any] = {
    "dataset": "cifar10",
    "input_shape": (3, 32, 32),
    "input_dtype": "float32",
    "classes": 10,
    "loss": "cross_entropy",
    "train_size": 50_000,
    "test_size": 10_000,
}
BROWN: dict[str, Any] = {
    "dataset": "brown",
    "input_shape": (LM_TOKENS,),
    "input_dtype": "int32",
    "classes": LM_VOCABULARY,
    "loss": TOKEN_LOSS,
    "train_size": LM_TRAIN_SIZE,
    "test_size": LM_TEST_SIZE,
    "learning_rate": 1e-3,
    "in_paper": False,
    "initial_deviation": 0.02,
}
"""Shared by tasks on one data set."""

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
        Task(name="cifar10-cnn", title="CIFAR-10 CNN", **CIFAR10, layers=cifar_layers()),
        Task(
            name="imdb-embedding",
            title="IMDb embedding",
            **IMDB,
            layers=(Embedding("embedding", VOCABULARY, 16), MeanOverTime(), Linear("fc", 16, 2)),
        ),
        Task(
            name="imdb-lstm",
            title="IMDb LSTM",
            **IMDB,
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
            **ADULT,
            classes=2,
            loss="binary_cross_entropy",
            layers=(Linear("fc", 104, 1),),
        ),
        Task(
            name="ffnn",
            title="Feed-forward network on Adult",
            **ADULT,
            classes=2,
            loss="cross_entropy",
            layers=(Linear("fc1", 104, 50), ReLU(), Linear("fc2", 50, 2)),
        ),
        Task(
            name="gpt2-lm",
            title="GPT-2, 4 layers of 128, from scratch on the Brown corpus",
            **BROWN,
            layers=gpt2_layers(blocks=4, dim=128, heads=4, vocabulary=LM_VOCABULARY, positions=LM_TOKENS),
            optimizer=AdamW(weight_decay=0.01, warm_up=WARM_UP),
        ),
        Task(
            name="llama-lora",
            title="Llama, 4 layers of 192, LoRA of rank 8 on a frozen random base, Brown corpus",
            **BROWN,
            layers=llama_layers(4, dim=192, heads=6, kv_heads=2, hidden=512, lora=8, vocabulary=LM_VOCABULARY),
            optimizer=AdamW(warm_up=WARM_UP),
            trained=LORA,
        ),
        Task(
            name="vit",
            title="ViT, 4 layers of 128, patches of 4 pixels, from scratch on CIFAR-10",
            **CIFAR10,
            layers=vit_layers(blocks=4, dim=128, heads=4, side=32, patch=4, classes=10),
            learning_rate=1e-3,
            in_paper=False,
            optimizer=AdamW(weight_decay=0.01, warm_up=WARM_UP),
            initial_deviation=0.02,
        ),
        *(
            Task(
                name=f"wrn-16-{k}",
                title=f"Wide ResNet 16-{k} with GroupNorm on CIFAR-10",
                **CIFAR10,
                layers=wide_resnet_layers(blocks=2, widths=(16 * k, 32 * k, 64 * k), first=16, groups=8, classes=10),
                in_paper=False,
            )
            for k in (2, 4)
        ),
        Task(
            name="llama-full",
            title="Llama, 4 layers of 192, from scratch on the Brown corpus",
            **BROWN,
            layers=llama_layers(4, dim=192, heads=6, kv_heads=2, hidden=512, lora=0, vocabulary=LM_VOCABULARY),
            optimizer=AdamW(weight_decay=0.01, warm_up=WARM_UP),
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
        *(with_views(TASKS["wrn-16-4"], k, f"wrn-16-4-k{k}") for k in (4, 16)),
        replace(
            TASKS["recsys"],
            name="recsys-1m",
            title="Recommender: 8 tables of 1,000,000 rows together, 13 counts, an MLP, synthetic clicks",
            dataset="clicks-1m",
            layers=recommender_layers(CLICK_COUNTS, MILLION_ROWS, CLICK_IDS, dim=16, hidden=(64, 32)),
            judged_as="small-recsys",
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


def _small(name: str, title: str, like: str, layers: tuple[Layer, ...], shape: tuple[int, ...], classes: int) -> Task:
    return replace(
        TASKS[like],
        name=name,
        title=title,
        layers=layers,
        dataset="",
        input_shape=shape,
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
GATE_TASKS["small-views"] = with_views(GATE_TASKS["small-wrn"], 4, "small-views")
_ROUNDED = [in_bfloat16(GATE_TASKS[f"small-{n}"]) for n in ("gpt2", "llama", "llama-full", "encoder-full", "vit")]
GATE_TASKS |= {task.name: task for task in _ROUNDED}
"""The structure of the modern tasks in a thousandth of their arithmetic: what CI judges, never measured."""

SMALL_GATE = {"gpt2-lm": "small-gpt2", "llama-lora": "small-llama", "wrn-16-2": "small-wrn", "wrn-16-4": "small-wrn"}
SMALL_GATE |= dict.fromkeys(("wrn-16-4-k4", "wrn-16-4-k16"), "small-views")
SMALL_GATE |= {f"{name}-bf16": f"{SMALL_GATE[name]}-bf16" for name in ("gpt2-lm", "llama-lora")}
SMALL_GATE |= {n: f"small-{n}" for n in ("llama-full", "vit", "encoder-full", "encoder-lora", "encoder-bias", "recsys")}
"""The task of the gate that has a modern task's structure, for runs that ask for the small gate."""


def known_task(name: str) -> Task:
    """Return a task by its name, measured or for the gate alone."""
    return TASKS[name] if name in TASKS else GATE_TASKS[name]


PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_paper)
PAPER_BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)

OUTSIDE = "DPBENCH_TASKS"
"""Environment variable: Python files of tasks of one's own, each with a list ``TASKS``; separated like PATH."""

LEAST_ROWS = 3_000


def _from_outside(file: str) -> list[Task]:
    try:
        found = list(runpy.run_path(file)["TASKS"])
        for task in found:
            if task.name in TASKS or task.train_size < LEAST_ROWS:
                raise ValueError(f"{task.name} is taken, or has {task.train_size} training examples")
        return found
    except Exception as error:
        raise BadInput(
            f"{OUTSIDE} names {file}, which gives no tasks ({type(error).__name__}: {error}); it has to be a Python "
            "file with a list TASKS of harness.tasks.Task, each with a name of its own and at least "
            f"{LEAST_ROWS:,} training examples, which the gate's large batch takes."
        ) from None


_files = [str(Path(file).absolute()) for file in os.environ.get(OUTSIDE, "").split(os.pathsep) if file]
if _files:
    os.environ[OUTSIDE] = os.pathsep.join(_files)  # workers have another working directory
OUTSIDE_TASKS: dict[str, Task] = {task.name: task for file in _files for task in _from_outside(file)}
TASKS |= OUTSIDE_TASKS
