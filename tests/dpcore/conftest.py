"""Every test runs the pure torch rules, whatever this machine has compiled; test_native.py is about the kernels. And it
draws the same numbers in every run, whichever tests its process ran before."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

os.environ["DPCORE_NATIVE"] = "0"


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start torch's random numbers anew. And let a check of a batch draw what it always draws here: which examples it
    takes is unpredictable, and so is when a later batch is checked, one in 1024, which a test that counts would see."""
    from dpcore.example_isolation import check, criterion, loss

    torch.manual_seed(0)
    drawn = SimpleNamespace(Random=lambda: random.Random(7))
    for module in (check, criterion, loss):
        monkeypatch.setattr(module, "random", drawn)


@pytest.fixture(scope="module")
def only_new_objects() -> Iterator[None]:
    """Let the collector see only what a module's own tests make: torch has brought in so many objects that to look
    through them all takes a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the kernels are compiled into once, by whichever of pytest-xdist's processes comes first."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(scope="module")
def compiled(kernel_cache: Path) -> Iterator[bool]:
    """Whether there are compiled kernels; a module's tests then use them."""
    from tests.dpcore.exactness import own_kernels

    with own_kernels(kernel_cache) as found:
        yield found


@pytest.fixture
def trainer(tmp_path):
    """Return a function that makes a Trainer of a small model, or of one by name; ``options`` are its arguments."""
    pytest.importorskip("transformers")
    from dpcore import PrivacyEngine
    from dpcore.transformers import DPTrainer
    from tests.dpcore.trainer_parts import NOISY, Texts, arguments, language_model

    def make(
        kind=DPTrainer, model="gpt2", data=None, privacy=NOISY, folder=tmp_path, more=(), arguments_of=None, **options
    ):
        model = language_model(model) if isinstance(model, str) else model
        given = {"args": arguments(folder, arguments_of, **options), "train_dataset": Texts() if data is None else data}
        return kind(model=model, **given, engine=PrivacyEngine(seed=1), privacy=privacy, **dict(more))

    return make
