"""Parameters that stay gathered between the pieces of a batch: the same updates, fewer gathers, no longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dpcore import Engine, free_memory
from dpcore.free_memory import free_bytes
from tests.dpcore import kept, ranks
from tests.dpcore.engines import engine_of
from tests.dpcore.several import launch

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reshard_after_forward"), reason="torch's fully_shard cannot be told before 2.8"
    ),
]
PARAMETERS = 6


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    return launch(tmp_path_factory.mktemp("kept"), request.param, script=kept.__file__)


def test_updates_are_those_of_pieces_that_gather_each_to_the_bit(found):
    for report in found:
        for how in (name for name in ("sharded", "columns", "hybrid") if name in report):
            apiece, kept_on, by_memory = (report[how][name] for name in ("False", "True", "None"))
            assert torch.equal(kept_on["weights"], apiece["weights"])
            assert torch.equal(by_memory["weights"], apiece["weights"])
            assert kept_on["accounted"] == apiece["accounted"]
        assert torch.equal(*report["engine"])


def test_parameters_are_gathered_once_a_batch_and_are_whole_within_it_alone(found):
    for report in found:
        for how in (name for name in ("sharded", "columns", "hybrid") if name in report):
            apiece, kept_on, by_memory = (report[how][name] for name in ("False", "True", "None"))
            assert apiece["within"] == {0} and kept_on["within"] == {PARAMETERS}
            assert apiece["behind"] == kept_on["behind"] == by_memory["behind"] == {0}
            units = kept_on["gathers"][1:]
            assert set(units) == {3}  # the layers' that fully_shard was applied to
            assert all(n >= 5 * 2 for n in apiece["gathers"][1:])  # twice but for the root, by piece
            assert by_memory["gathers"][0] == apiece["gathers"][0] and by_memory["gathers"][1:] == units
            assert "gathered for each piece" in apiece["engine"]
            assert "once per logical batch" in kept_on["engine"]


@pytest.mark.parametrize("what", [interruption.__name__ for interruption in kept.INTERRUPTIONS])
def test_what_comes_between_pieces_changes_nothing_and_leaves_nothing_whole(found, what):
    for report in found:
        apiece, kept_on = report[what]
        assert torch.equal(kept_on["weights"], apiece["weights"])
        assert kept_on["behind"] == {0} and kept_on["accounted"] == apiece["accounted"]
        assert kept_on["said"] == apiece["said"]
        if what in ("evaluate", "save", "save_checkpoint"):
            assert torch.equal(kept_on["weights"], report["sharded"]["False"]["weights"])
        if what == "save_checkpoint":
            assert "PrivacyError" in kept_on["said"]


def test_a_change_of_what_is_gathered_is_warned_of_and_nothing_else(found):
    for report in found:
        assert report["warned"] == [True, False, False, False]


def test_one_rank_may_look_at_its_shards_between_a_pass_and_its_step(found):
    for report in found:
        assert torch.equal(*report["looked at"])


def test_an_engine_whose_pass_failed_lets_go_and_makes_the_same_step(found):
    for report in found:
        apiece, kept_on = report["failing engine"]
        assert torch.equal(kept_on["weights"], apiece["weights"])
        assert kept_on["shown"] == apiece["shown"] == [False, 0, 0]
        assert "gathered for each piece" in apiece["said"] and "once per logical batch" in kept_on["said"]


def test_the_ranks_choose_by_the_one_with_the_least_memory_and_do_not_change_their_minds(found):
    for report in found:
        much, little = report["much"], report["little"]
        assert torch.equal(much["weights"], little["weights"])
        assert much["gathers"][0] > 3 and set(much["gathers"][1:]) == {3}
        assert min(little["gathers"]) > 3 and "are more than half of what is free" in little["engine"]


def test_free_memory_is_what_the_narrowest_control_group_leaves(tmp_path, monkeypatch):
    assert 0 < free_bytes(torch.device("cpu")) < 2**50
    monkeypatch.setattr(free_memory, "_rooms", lambda: iter([7]))
    assert free_bytes(torch.device("cpu")) == 7


def test_a_module_that_is_not_in_shards_has_nothing_to_keep():
    with pytest.raises(ValueError, match="not in shards"):
        engine_of(nn.Linear(2, 2), keep_gathered=True)
    with pytest.raises(ValueError, match="must be True, False or None"):
        Engine(nn.Linear(2, 2), lambda o, y: o.sum(1), keep_gathered="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not in shards"):
        ranks.private(how="alone", keep_gathered=False)
