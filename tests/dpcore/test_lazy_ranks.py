"""Lazy tables on copies of a model make the update of one process, with its noise to the bit. Launched by torchrun."""

from __future__ import annotations

import pytest
import torch

from tests.dpcore import lazy_ranks
from tests.dpcore.lazy import Model, batch, engine, same
from tests.dpcore.lazy_ranks import SETTINGS, trained
from tests.dpcore.several import launch

pytestmark = pytest.mark.xdist_group("ranks")

CHECKS = ["update", "noise", "shares", "between", "resume"]
OF_SEVERAL = ["failed", "interrupted", "replaced", "refused"]


@pytest.fixture(scope="module", params=[2, 1, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """The reports of 1, 2 or 4 ranks, from one launch."""
    checks = [*CHECKS, *(OF_SEVERAL if request.param > 1 else ())]
    return launch(tmp_path_factory.mktemp("lazy"), request.param, *checks, script=lazy_ranks.__file__)


def alone(**options):
    return engine(Model(), **options)


def whole(x, y):
    return x, y


@pytest.mark.parametrize("name", SETTINGS)
def test_the_update_is_that_of_dense_noise_in_one_process(found, name):
    start, dense = Model().state_dict(), trained(alone(lazy=(), **SETTINGS[name]), whole)
    reports = [report["update"][name] for report in found]
    assert reports[0].keys() == dense.keys() and len(dense) == len(start) * (2 if name == "momentum" else 1)
    for part in (start.keys(), dense.keys() - start.keys()):
        apart, moved = (
            sum(float((dense[key] - other.get(key, torch.zeros(()))).norm()) ** 2 for key in part)
            for other in (reports[0], start)
        )
        assert apart <= 1e-12 * moved
    assert all(same(report, reports[0]) for report in reports)


@pytest.mark.parametrize("name", SETTINGS)
def test_noise_is_that_of_one_process_to_the_bit(found, name):
    truth = trained(alone(exact_steps=2, **SETTINGS[name]), whole, is_noise=True)
    assert not same(truth, trained(alone(exact_steps=2, seed=6, **SETTINGS[name]), whole, is_noise=True))
    for report in found:
        assert same(report["noise"][name], truth)


def test_secret_seeds_become_one(found):
    first = found[0]["noise"]["secret"]
    assert all(same(report["noise"]["secret"], first) for report in found)
    assert not same(first, found[0]["noise"]["plain"])


def test_each_rank_draws_its_share_of_a_release(found):
    shares = [report["shares"] for report in found]
    assert sum(share["drawn"] for share in shares) == shares[0]["of"]
    assert max(share["drawn"] for share in shares) <= shares[0]["of"] / len(found) + 1


def test_what_one_rank_reads_between_steps_all_bring_up_to_date(found):
    """Rows that wait for long get other numbers at another step."""
    one = alone(exact_steps=1)

    def look(step):
        if step == 3:
            one.model.items(torch.arange(0, 50, 3))
        if step in (6, 9):
            one.flush()

    truth = trained(one, whole, is_noise=True, between=look)
    assert not same(truth, trained(alone(exact_steps=1), whole, is_noise=True))
    for report in found:
        assert same(report["between"], truth)


def test_resumed_ranks_equal_those_that_were_not_interrupted(found):
    for report in found:
        assert same(report["resume"]["resumed"], report["resume"]["whole"])
        assert same(report["resume"]["whole"], found[0]["resume"]["whole"])


def test_where_a_rank_fails_none_releases_and_all_go_on_alike(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    one, last = alone(exact_steps=1), len(found) - 1
    (ids, _, users), _ = batch(torch.Generator().manual_seed(9), size=8)
    either = torch.cat([ids.flatten(), users])  # all integers of a batch are taken for rows of each table

    def read(step):
        if step in (5, 7):  # what the failed step has brought up to date
            one.model.items(either)
            one.model.users(either[either < 20])

    truth = trained(one, whole, is_noise=True, between=read)
    for rank, report in enumerate(found):
        assert report["failed"]["steps"] == 12 and same(report["failed"]["weights"], truth)
        said = report["failed"]["said"]
        if rank < last:
            assert all(f"failed on rank {last}, which says why: nothing was released" in text for text in said)
        else:
            assert "product must be" in said[0] and "broken here" in said[1] and "which says why" not in str(said)


def test_a_step_that_one_rank_has_not_written_whole_ends_the_run(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in found[:-1]:
        assert all(f"failed on rank {len(found) - 1}" in said for said in report["interrupted"])
    assert all("Step 1 was interrupted on this rank" in said for said in found[-1]["interrupted"])


def test_ranks_are_alike_behind_a_step_that_one_could_not_make(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in (report["replaced"] for report in found):
        assert "failed on rank" in report["table"]["said"] or "A table was moved" in report["table"]["said"]
        assert "differ in the noise" in report["seed"]["said"]
        assert all(same(report[what]["weights"], found[0]["replaced"][what]["weights"]) for what in report)


def test_ranks_that_differ_are_refused(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for said in (report["refused"] for report in found):
        assert "differ in what is kept of them" in said["exact"]
        for what, named in {
            "weights": "the weights",
            "momentum": "the weights",
            "steps": "the number of steps",
        }.items():
            assert f"differ in {named}: " in said[what]
        assert all("differ in the optimizer's settings" in said[what] for what in ("rate", "tensor"))
        assert "a lazy table is whole on every rank" in said.get("shards", "a lazy table is whole on every rank")
