"""Every test runs the pure torch rules, whatever this machine has compiled; test_native.py is about the kernels."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["DPCORE_NATIVE"] = "0"


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
