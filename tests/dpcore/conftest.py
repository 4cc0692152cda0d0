"""Every test runs the pure torch rules, whatever this machine has compiled; test_native.py is about the kernels."""

import os

import pytest

os.environ["DPCORE_NATIVE"] = "0"


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """A cache that the kernels are compiled into once."""
    return tmp_path_factory.mktemp("cache")
