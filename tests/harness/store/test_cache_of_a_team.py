"""One cache for several users: each seals what is theirs, and reads the environments that another has made."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.driver import ROOT
from tests.support.users import run_as

SEALS = """
import os
from harness.store import cache, seal, sequence
from harness.environments import venv
path = cache.folder("references") / "one.npz"
path.write_bytes(b"mine")
seal.put(path)
assert seal.holds(path, print) and sequence.take() > 0
(made,) = venv.existing()
print(seal.of("name", b"content"), made.lock_hash, venv.parent())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="dpbench-test-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "DPBENCH_CACHE": str(folder / "cache")}


@pytest.mark.parametrize("mode", [0o777, 0o755], ids=["writable", "only readable"])
def test_a_second_user_is_told_nothing_of_the_first_one_s_key(place: Path, mode: int) -> None:
    made = place / "cache" / "envs" / "abc"
    made.mkdir(parents=True)
    (made / "dpbench.json").write_text('{"lock_hash": "abc", "frameworks": ["one"], "seconds": 1}')
    for folder in (place / "cache", place / "cache" / "envs"):
        os.chown(folder, 12345, 12345)
    (place / "cache").chmod(mode)
    (place / "home").mkdir(mode=0o777)
    (place / "home").chmod(0o777)
    given = environment(place) | {"XDG_CACHE_HOME": str(place / "home")}
    said = []
    for user in (12345, 12346, 12345, 12346):
        done = run_as(user, [sys.executable, "-c", SEALS], given)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said[0] == said[2] and said[1] == said[3] and said[0][0] != said[1][0]
    assert {one[1] for one in said} == {"abc"}
    keys = [*place.rglob("key")]
    assert len(keys) == 2 and all(key.stat().st_mode & 0o77 == 0 for key in keys)


@pytest.mark.parametrize("verb", [["data", "path"], ["list"], ["env", "list"], ["doctor"]], ids=lambda words: words[0])
def test_a_user_without_a_home_meets_no_traceback(place: Path, verb: list[str]) -> None:
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    done = run_as(12345, [sys.executable, "-m", "harness", *verb], given)
    # What doctor finds on a busy machine is another matter.
    assert done.returncode in ((0, 1) if verb == ["doctor"] else (0,)) and "Traceback" not in done.stderr, done.stderr
    if verb == ["data", "path"]:
        assert done.stdout.strip() == str(place / "dpbench-12345")
