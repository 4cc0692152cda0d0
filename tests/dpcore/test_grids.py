"""Ranks that hold parts of layers, beside others that train the same parts on other examples, train as one process."""

from __future__ import annotations

import pytest
import torch

from dpcore.noise import GaussianNoise
from tests.dpcore import grids, parallel
from tests.dpcore.several import launch

pytestmark = pytest.mark.xdist_group("ranks")

REFUSED = {
    "no copies": "The mesh of tensor parallelism has 2 of 4 processes",
    "no mesh": "The module's parameters are sharded",
    **dict.fromkeys(("whole model", "both dimensions"), "device_mesh is the one dimension of a mesh"),
    **dict.fromkeys(("one dimension twice", "of another mesh"), "The 4 processes are no grid of 2 parts"),
    "another order": "has the ranks in the order [3, 2]",
    "other inputs": "were called with different batches",
    "other targets": "The loss has",
    **dict.fromkeys(("other seeds", "other seeds of copies"), "The ranks differ in seed"),
    **dict.fromkeys(("another copy", "another copy since then"), "The ranks differ in the weights"),
    **dict.fromkeys(("left out", "two orders"), "The ranks differ in the batches"),
    "whole loader": "The loader was built with distributed=False",
    **dict.fromkeys(("a part for each rank", "one part for all"), "Without Poisson sampling each of the 2 ranks"),
    "partial gradient": "different gradients",
    "small partial gradient": "different sums of a parameter",
    "penalty": "has an ordinary, unclipped gradient",
}
REFUSED_IN_SHARDS = {
    "in part": "is not sharded over the dimension of the mesh",
    "another order of shards": "The mesh has the ranks in the order [[2, 3], [0, 1]]",
    "around shards": "The module's parameters are sharded",
    "other whole weights": "The ranks differ in the weights",
    "other inputs of shards": "were called with different batches",
    "other targets of shards": "The loss has",
    "partial gradient of shards": "different gradients",
    "small partial gradient of shards": "different sums of a parameter",
    "other seeds of shards": "The ranks differ in seed",
    "left out of shards": "The ranks differ in the batches",
    "penalty on shards": "has an ordinary, unclipped gradient",
    "engine": "with one mesh for all, after parallelize_module",
    "computed weight": "is used by way of what the model computes",
    "no rule": "has no rule and would be run again",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The reports of four ranks, from one launch."""
    folder = tmp_path_factory.mktemp("grids")
    return launch(folder, 4, "same", "owned", "secure", "noise", "refused", script=grids.__file__)


def check_same(reports, options):
    alone = parallel.train(alone=True, **options)
    moved = (alone["weights"][1:] - alone["weights"][0]).norm(dim=1)
    for report, place in zip(reports, (0, 0, 1, 1), strict=True):
        away = (report["weights"] - alone["weights"])[1:].norm(dim=1) / moved
        assert float(away.max()) < (1e-6 if options.get("dtype") == torch.float32 else 1e-12)
        assert torch.equal(report["weights"], reports[0]["weights"])
        assert report["batches"] == [batch[place::2] for batch in alone["batches"]]
        assert report["accounted"] == alone["accounted"]


@pytest.mark.parametrize("how", grids.PUT)
@pytest.mark.parametrize("name", grids.SAME)
def test_noisy_steps_are_those_of_one_process(found, name, how):
    check_same([report["same"][how][name] for report in found], grids.SAME[name])


@pytest.mark.slow
def test_more_of_them_are(tmp_path):
    more = launch(tmp_path, 4, "more", script=grids.__file__)
    for how in grids.PUT:
        for name, options in grids.MORE.items():
            check_same([report["more"][how][name] for report in more], options)


@pytest.mark.parametrize("drawn", ["owned", "secure"])
@pytest.mark.parametrize("how", grids.PUT)
def test_ranks_that_draw_among_their_own_examples_have_no_example_in_common_with_another_share(found, how, drawn):
    reports = [report[drawn][how] for report in found]
    assert reports[0]["batches"] == reports[1]["batches"] and reports[2]["batches"] == reports[3]["batches"]
    for first, second in zip(reports[0]["batches"], reports[2]["batches"], strict=True):
        assert drawn == "secure" or ({*first} and {*second})
        assert not {*first} & {*second}
    assert all(torch.equal(report["weights"], reports[0]["weights"]) for report in reports)


@pytest.mark.parametrize("how", grids.PUT)
def test_the_noises_bits_are_those_of_one_process_and_the_same_on_all_ranks(found, how):
    seeded = found[0]["noise"][how]["seed"]
    assert torch.equal(seeded, GaussianNoise(7).add_(torch.zeros_like(seeded), parallel.CLIPS["block"], 0))
    for report in (r["noise"][how] for r in found):
        for name in ("seed", "secret", "secure"):
            assert torch.equal(report[name], found[0]["noise"][how][name])
            assert float(report[name].std()) / parallel.CLIPS["block"] == pytest.approx(1.0, rel=0.15)
        assert report["on grid"]
        assert not torch.equal(report["secret"], seeded)


def check_resumed(reports):
    for report in reports:
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert not torch.equal(report["first"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"] == [(1.0, parallel.RATE, 4)]
        ordinary = parallel.Block().double()
        ordinary.load_state_dict(report["whole"]["saved"])  # under the names of the user's model
        torch.testing.assert_close(parallel.weights(ordinary), report["whole"]["weights"])


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    reports = launch(tmp_path, 4, *(f"resume_{how}" for how in grids.PUT), script=grids.__file__)
    for how in grids.PUT:
        check_resumed([report[f"resume_{how}"] for report in reports])


@pytest.mark.slow
@pytest.mark.parametrize("how", grids.PUT)
def test_a_run_goes_on_on_another_mesh(tmp_path, how):
    ways = [f"go_on_{way}" for way in grids.PUT if way in (how, "copies")]
    reports = launch(tmp_path, 4, f"keep_{how}", *ways, script=grids.__file__)
    went_on = [report[way] for report in reports for way in ways]
    for size in (1, 2):
        went_on += [report["go_on"] for report in launch(tmp_path, size, "go_on", script=parallel.__file__)]
    for weights in went_on:
        torch.testing.assert_close(weights, went_on[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", REFUSED | (REFUSED_IN_SHARDS if parallel.SHARDS_HERE else {}))
def test_what_would_release_something_else_is_refused(found, name):
    for report in found:
        assert (REFUSED | REFUSED_IN_SHARDS)[name] in report["refused"][name]
