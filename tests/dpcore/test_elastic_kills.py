"""A rank that is killed changes nothing of what a restarted run releases, counts and ends with."""

from __future__ import annotations

import pytest

from proofs import elastic_kills
from tests.dpcore.test_distributed import SHARDS_HERE

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU"),
]
MOMENTS = [
    "between shards and file",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("within the noise", "between release and update")),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A saved beginning, and the run from there on that nothing happens to."""
    start = elastic_kills.begun(tmp_path_factory.mktemp("kills"))
    return start, elastic_kills.killed(start, "never")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_whose_rank_was_killed_is_the_undisturbed_one(undisturbed, moment):
    start, whole = undisturbed
    found = elastic_kills.killed(start, moment)
    assert found["starts"] == 2 and whole["starts"] == 1
    assert not elastic_kills.differences(whole, found)
    assert [count for _, _, count in found["history"]] == [elastic_kills.STEPS]


def test_differences_are_seen(undisturbed):
    _, whole = undisturbed
    lost = [whole["released"][0][:-1], whole["released"][1]]
    other = {"weights": "", "epsilon": 0.0, "history": [], "files": [], "released": lost}
    assert elastic_kills.differences(whole, other) == ["weights", "epsilon", "history", "files", "released by rank 0"]
