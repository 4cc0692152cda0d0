"""Lazy tables on copies of a model make the update of one process, with its noise to the bit. Launched by torchrun."""

from __future__ import annotations

import pytest
import torch

from tests.dpcore import lazy_ranks
from tests.dpcore.lazy import Model, batch, engine, same
from tests.dpcore.lazy_ranks import SETTINGS, trained
from tests.dpcore.several import launch

pytestmark = pytest.mark.xdist_group("ranks")

BOTH = ["update", "noise", "shares", "resume"]
CHECKS = [*BOTH, *(f"shared {name}" for name in BOTH), "between", "elsewhere", "placeholder", "few", "reading"]
BOTH_OF_SEVERAL = ["failed", "interrupted", "loads"]
OF_SEVERAL = [*BOTH_OF_SEVERAL, *(f"shared {name}" for name in BOTH_OF_SEVERAL), "replaced", "refused"]
HELD = pytest.mark.parametrize("held", ["", "shared "])
"""Tables as copies, and in shares."""


@pytest.fixture(scope="module", params=[2, 1, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """The reports of 1, 2 or 4 ranks, from one launch."""
    checks = [*CHECKS, *(OF_SEVERAL if request.param > 1 else ())]
    return launch(tmp_path_factory.mktemp("lazy"), request.param, *checks, script=lazy_ranks.__file__)


def alone(model=None, **options):
    return engine(model or Model(), **options)


def whole(x, y):
    return x, y


@HELD
@pytest.mark.parametrize("name", SETTINGS)
def test_the_update_is_that_of_dense_noise_in_one_process(found, held, name):
    start, dense = Model().state_dict(), trained(alone(lazy=(), **SETTINGS[name]), whole)
    reports = [report[f"{held}update"][name] for report in found]
    assert reports[0].keys() == dense.keys() and len(dense) == len(start) * (2 if name == "momentum" else 1)
    for part in (start.keys(), dense.keys() - start.keys()):
        apart, moved = (
            sum(float((dense[key] - other.get(key, torch.zeros(()))).norm()) ** 2 for key in part)
            for other in (reports[0], start)
        )
        assert apart <= 1e-12 * moved
    assert all(same(report, reports[0]) for report in reports)


@HELD
@pytest.mark.parametrize("name", SETTINGS)
def test_noise_is_that_of_one_process_to_the_bit(found, held, name):
    truth = trained(alone(exact_steps=2, **SETTINGS[name]), whole, is_noise=True)
    assert not same(truth, trained(alone(exact_steps=2, seed=6, **SETTINGS[name]), whole, is_noise=True))
    for report in found:
        assert same(report[f"{held}noise"][name], truth)


@HELD
def test_secret_seeds_become_one(found, held):
    first = found[0][f"{held}noise"]["secret"]
    assert all(same(report[f"{held}noise"]["secret"], first) for report in found)
    assert not same(first, found[0][f"{held}noise"]["plain"])


@HELD
def test_each_rank_draws_its_share_of_a_release(found, held):
    shares = [report[f"{held}shares"] for report in found]
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


@HELD
def test_resumed_ranks_equal_those_that_were_not_interrupted(found, held):
    for report in found:
        assert same(report[f"{held}resume"]["resumed"], report[f"{held}resume"]["whole"])
        assert same(report[f"{held}resume"]["whole"], found[0][f"{held}resume"]["whole"])


@HELD
def test_where_a_rank_fails_none_releases_and_all_go_on_alike(found, held):
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
        assert report[f"{held}failed"]["steps"] == 12 and same(report[f"{held}failed"]["weights"], truth)
        said = report[f"{held}failed"]["said"]
        if rank < last:
            assert all(f"failed on rank {last}, which says why: nothing was released" in text for text in said)
        else:
            assert "product must be" in said[0] and "broken here" in said[1] and "which says why" not in str(said)


@HELD
def test_a_step_that_one_rank_has_not_written_whole_ends_the_run(found, held):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in found[:-1]:
        assert all(f"failed on rank {len(found) - 1}" in said for said in report[f"{held}interrupted"])
    assert all("Step 1 was interrupted on this rank" in said for said in found[-1][f"{held}interrupted"])


def test_ranks_are_alike_behind_a_step_that_one_could_not_make(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in (report["replaced"] for report in found):
        assert "failed on rank" in report["table"]["said"] or "A table was moved" in report["table"]["said"]
        assert "differ in the noise" in report["seed"]["said"]
        assert all(same(report[what]["weights"], found[0]["replaced"][what]["weights"]) for what in report)


@HELD
def test_what_one_rank_alone_has_loaded_is_refused_until_all_have_the_same(found, held):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for what, report in ((what, report) for one in found for what, report in one[f"{held}loads"].items()):
        text = "A rank has loaded or written its shards" if held else "The ranks differ in the weights"
        # Of shares nobody can tell that they are what they were.
        text = "nothing was refused" if what == "back" and not held else text
        assert all(text in said for said in report["said"][:2])
        assert report["said"][2:] == ["nothing was refused"] * 2
        assert same(report["weights"], found[0][f"{held}loads"][what]["weights"])


def test_one_process_goes_on_where_shares_were(found):
    for name, given in SETTINGS.items():
        one, chance = alone(exact_steps=2, **given), torch.Generator().manual_seed(1)
        for _ in range(2):
            truth = trained(one, whole, 6, is_noise=True, chance=chance)
        for report in (report["elsewhere"][name] for report in found):
            assert same(report["shares"], truth) and same(report["alone"], truth)


def test_a_rank_holds_its_share_of_a_table_that_none_has_held(found):
    truth = trained(alone(exact_steps=2, momentum=0.7), whole, is_noise=True)
    for rank, report in enumerate(report["placeholder"] for report in found):
        rows = len(range(rank, 50, len(found)))
        assert same(report["weights"], truth)
        assert report["rows"] == [rows] * 2 and report["bytes"] == [rows * 8 * 4] * 2
        for what in ("called", "copied", "ordinary"):
            assert "of whose rows each rank holds a part" in report[what]
        assert f"{rows} of its 50 rows are here" in report["alone"] or len(found) == 1


def test_a_table_in_shares_may_have_fewer_rows_than_there_are_ranks(found):
    def few(x, y):
        return (x[0] % 3, *x[1:]), y

    truth = trained(alone(model=Model(rows=3), exact_steps=2), few, is_noise=True)
    assert all(same(report["few"], truth) for report in found)


def test_the_model_is_read_between_steps_on_all_ranks_together(found):
    one, outputs, size = alone(exact_steps=1), {}, len(found)

    def look(step):
        (ids, x, users), _ = batch(torch.Generator().manual_seed(step), size=7)
        either = torch.cat([ids.flatten(), users])  # all integers of a batch are taken for rows of each table
        if step == 9:
            one.flush()
        if step in (3, 6, 9):
            one.model.items(either)
            one.model.users(either[either < 20])
            for rank in range(size):
                with torch.no_grad():
                    outputs[step, rank] = one.model(ids[rank::size], x[rank::size], users[rank::size])

    truth = trained(one, whole, is_noise=True, between=look)
    for rank, report in enumerate(report["reading"] for report in found):
        assert same(report["weights"], truth)
        assert len(found) == 1 or "differ in whether they make a step" in report["one steps"]
        for step, given in zip((3, 6, 9), report["outputs"], strict=True):
            assert torch.equal(given, outputs[step, rank])


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
        assert "which lazy tables are not" in said.get("shards", "which lazy tables are not")
