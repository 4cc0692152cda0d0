"""Several processes equal one: sums, noise, empty batches, resumes; and what is refused. Launched by torchrun."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from dpcore import reference
from dpcore.distributed import DifferentiallyPrivateDistributedDataParallel
from dpcore.noise import grid_spacing
from tests.dpcore import engines, ranks
from tests.dpcore.comparison import TOLERANCE
from tests.dpcore.several import launch, trained_alone, union

pytestmark = pytest.mark.xdist_group("ranks")  # one launch for all of them

STEPS = 8  # two rounds of ceil(1 / 0.25) batches
CHECKS = [
    "sums",
    "pieces",
    "units",
    "noise",
    "shares",
    "same",
    "cut",
    "branches",
    "secure",
    "empty",
    "resume",
    "adaptive",
    "generator",
    "engine",
    "loads",
]
SHARDS_HERE = hasattr(torch.cpu.Stream, "record_event")
"""Whether this torch's fully_shard works on a CPU: that of torch 2.6 ends in an AttributeError as it first gathers."""
CHECKS += ["sharded", "run_again"] if SHARDS_HERE else []
LAST = ["refusals", "absent"]
"""Ask two ranks only; afterwards the group is of no more use."""


@pytest.fixture(scope="module", params=[2, 1, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """The reports of 1, 2 or 4 ranks, from one launch."""
    return launch(tmp_path_factory.mktemp("ranks"), request.param, *CHECKS, *(LAST if request.param == 2 else ()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_ranks_sum_what_one_process_sums_for_the_union_of_their_batches(found, dtype):
    reports = [report["sums"][str(dtype)] for report in found]
    batches = union(reports)
    assert len(batches) == STEPS and all(len(set(b)) == len(b) for b in batches)
    truth = trained_alone(batches, 0.0, dtype)
    start = ranks.weights(ranks.model(dtype))
    moved = (truth - start).norm()
    for report in reports:
        assert torch.equal(report["weights"], reports[0]["weights"])
        assert float((report["weights"] - truth).norm() / moved) < TOLERANCE[dtype]
        assert report["accounted"] == [(0.0, ranks.RATE, STEPS)]


def test_the_noise_is_that_of_one_process_with_the_same_seed_and_pieces_and_equal_views_change_nothing(found):
    for check in (
        [r["noise"]["same seed"] for r in found],
        *([r[name] for r in found] for name in ("pieces", "units")),
    ):
        truth = trained_alone(union(check), 1.0, torch.float64)
        for report in check:
            torch.testing.assert_close(report["weights"], truth, rtol=1e-9, atol=1e-10)
            assert report["accounted"] == [(1.0, ranks.RATE, STEPS)]


def test_the_noises_bits_are_those_of_one_process_and_each_rank_draws_its_share(found):
    for how, report in (one for r in found for one in r["shares"].items()):
        assert report["equal"]
        assert sum(r["shares"][how]["drawn"] for r in found) == report["of"]
        # Shards are whole rows, so that those of small parameters differ.
        assert abs(report["drawn"] - report["of"] / len(found)) < (1 if how == "replicated" else 0.3 * report["of"])


def test_batches_and_updates_are_those_of_one_process_however_the_model_is_held(found):
    alone = ranks.train(1.0, torch.float32, how="alone")
    start = ranks.weights(ranks.model(torch.float32))
    moved = (alone["weights"] - start).norm(dim=1)
    for how in found[0]["same"]:
        reports = [report["same"][how] for report in found]
        assert [sorted(batch) for batch in union(reports)] == [sorted(batch) for batch in alone["batches"]]
        for lengths in zip(*([*map(len, report["batches"])] for report in reports), strict=True):
            assert max(lengths) - min(lengths) <= 1
        for report in reports:
            assert torch.equal(report["weights"], reports[0]["weights"])
            assert float(((report["weights"] - alone["weights"]).norm(dim=1) / moved).max()) < 1e-6
            assert report["accounted"] == alone["accounted"]


def test_the_longest_batch_is_that_of_all_ranks_together(found):
    alone = ranks.train(0.0, torch.float64, how="alone", max_batch_size=6)
    assert max(map(len, alone["batches"])) == 6
    assert [sorted(b) for b in union([r["cut"] for r in found])] == [sorted(b) for b in alone["batches"]]


def test_ranks_of_which_one_goes_on_with_other_noise_all_do(found):
    """Each draws a part of one stream, and a checkpoint has the seed of rank 0."""
    reports = [r["branches"] for r in found]
    assert all(r["moved"] and r["seed"] == reports[0]["seed"] for r in reports)
    assert all(torch.equal(r["weights"], reports[0]["weights"]) for r in reports)


def test_without_a_seed_the_ranks_share_a_secret_one(found):
    secret = [r["noise"]["secret"] for r in found]
    assert all(torch.equal(s["weights"], secret[0]["weights"]) for s in secret)
    assert not torch.equal(secret[0]["weights"][0], found[0]["noise"]["same seed"]["weights"][0])


def test_the_batches_seed_is_drawn_by_the_generator_of_rank_0(found):
    """Other ranks' generators may have other seeds, as for an order of their own."""
    seeds = [report["generator"] for report in found]
    assert all(others == seeds[0] for others in seeds)
    assert seeds[0][0] == seeds[0][1] != seeds[0][2]


def test_secure_releases_of_all_ranks_lie_on_the_grid(found):
    """The other ranks' sums are in them before the noise and the rounding."""
    released = found[0]["secure"]
    assert torch.equal(released, released.round())
    assert float(released.std()) * grid_spacing(0.7 * ranks.CLIP) == pytest.approx(0.7 * ranks.CLIP, rel=0.5)
    assert all(torch.equal(r["secure"], released) for r in found)


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_secure_releases_of_shards_lie_on_the_grid_with_the_total_variance(found):
    for released in found[0]["sharded"]["secure"]:
        assert torch.equal(released, released.round())
        assert float(released.std()) * grid_spacing(0.7 * ranks.CLIP) == pytest.approx(0.7 * ranks.CLIP, rel=0.5)
    for report in found:
        assert all(map(torch.equal, report["sharded"]["secure"], found[0]["sharded"]["secure"]))


def test_an_empty_batch_is_a_step_with_noise_of_the_total_variance(found):
    draws = found[0]["empty"] / (2.0 * ranks.CLIP / ranks.DIVISOR)
    assert draws.shape[0] == 150
    assert stats.kstest(draws[:, :200].flatten().numpy(), "norm").pvalue > 1e-4
    assert abs(float(draws.std()) - 1) < 0.01
    assert all(torch.equal(r["empty"], found[0]["empty"]) for r in found)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit_on_every_rank(found):
    for report in (r["resume"] for r in found):
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert not torch.equal(report["first"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == [(1.0, ranks.RATE, 4)]
        if len(found) > 1:
            assert "differ in the weights" in report["unequal weights"]


def test_an_adaptive_bound_counts_the_examples_of_all_ranks(found):
    reports = [report["adaptive"] for report in found]
    x, y, _ = ranks.data().tensors
    norms = reference.clipped_sum(
        ranks.model(), lambda o, y: F.cross_entropy(o, y, reduction="none"), x, y, ranks.CLIP
    ).norms
    bound, expected = 0.8, []
    for batch in union(reports):
        centred = float((norms[batch] <= bound).sum()) - len(batch) / 2
        bound *= math.exp(-0.2 * centred / ranks.DIVISOR)
        expected.append(bound)
    assert len(set(expected)) > 2
    assert all(report["bounds"] == pytest.approx(expected, rel=1e-12) for report in reports)


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_a_sharded_model_trains_as_one_process_does_and_stays_sharded(found):
    reports = [report["sharded"] for report in found]
    for dtype in (torch.float64, torch.float32):
        parts = [report["sums"][str(dtype)] for report in reports]
        truth = trained_alone(union(parts), 0.0, dtype)
        moved = (truth - ranks.weights(ranks.model(dtype))).norm()
        for part in parts:
            assert float((part["weights"] - truth).norm() / moved) < TOLERANCE[dtype]
    for name in ("pieces", "auto", "hybrid"):
        parts = [report[name] for report in reports]
        truth = trained_alone(union(parts), 1.0, torch.float64)
        for part in parts:
            torch.testing.assert_close(part["weights"], truth, rtol=1e-9, atol=1e-10)
            assert part["accounted"] == [(1.0, ranks.RATE, STEPS)]
    for report in reports:
        assert torch.equal(report["resume"]["resumed"]["weights"], report["resume"]["whole"]["weights"])
        assert report["moved at a learning rate of 0"] == [0.0, 0.0]
        assert report["half precision"]
        assert "fully_shard on the root" in report["in part"]
        assert "has an ordinary, unclipped gradient" in report["ordinary"]
        assert "noise has no addresses" in report["no addresses"]
        assert "was added to the optimizer after make_private" in report["added"]
        assert "no rank holds whole sums" in report["own sums"]
        assert ("The model's mesh has" in report["one group"]) is (len(reports) > 1)
        assert ("differ in the weights" in report["unequal copies"]) is (len(reports) > 1)
        assert "is the checkpoint of a whole module" in report["of copies"]
        if len(reports) > 1:
            assert "on one that all ranks share" in report["shards on several disks"]
            assert f"is there for the ranks [0] of {len(reports)} alone" in report["a file on one disk"]
    for sizes in zip(*(report["local"] for report in reports), strict=True):
        assert sum(local for _, local, _ in sizes) == sizes[0][0]
        assert all(local == grad for _, local, grad in sizes)


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((4, 1, 2, 4), marks=pytest.mark.slow), pytest.param((1, 4), marks=pytest.mark.slow)]
)
def test_a_sharded_run_goes_on_at_another_number_of_ranks(sizes, tmp_path):
    kept = launch(tmp_path, sizes[0], "keep")[0]["keep"]
    for size in sizes[1:]:
        runs = launch(tmp_path, size, "go_on")[0]["go_on"].items()
        loaded = [(saved, how, went_on) for saved, by in runs for how, went_on in by.items()]
        assert len(loaded) == len(kept) * (2 if size > 1 else 1)
        for saved, how, went_on in loaded:
            torch.testing.assert_close(went_on, kept[saved], rtol=1e-12, atol=1e-13)
            assert size != sizes[0] or how != saved or torch.equal(went_on, kept[saved])


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_a_release_of_float32_shards_is_not_rounded_where_computing_is_in_bfloat16(found):
    assert all(share <= 0.01 for report in found for share in report["sharded"]["rounded"])


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_examples_whose_norms_cancel_or_overflow_are_clipped_in_shards_as_in_one_process(found):
    for alone, sharded in (pair for report in found for pair in report["sharded"]["extremes"]):
        assert float(alone.norm()) > 100
        assert float((sharded - alone).norm() / alone.norm()) < 1e-6


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_layers_without_a_rule_and_computed_weights_are_trained_in_shards_as_in_one_process(found):
    for report in (r["run_again"] for r in found):
        for what, distance in report["distances"].items():
            assert distance < (1e-12 if "float64" in what else 1e-6), what
        assert report["noise"]
        assert "inner within it was given to fully_shard by itself" in report["unit within"]
        assert "depends on the others in the batch" in report["mixes"]


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_ranks_with_and_without_examples_look_at_a_sharded_model_together(found):
    for alone, sharded in (one for r in found for one in (r["sharded"]["words"], *r["sharded"]["read back"])):
        torch.testing.assert_close(sharded, alone, rtol=1e-6, atol=1e-6)


def test_engine_trains_copies_as_one_process_does(found):
    alone = engines.train_by_engine(alone=True)
    moved = (alone["weights"] - ranks.weights(ranks.model(torch.float32))).norm(dim=1)
    for how in {"same", "pieces", "sharded", "columns", "hybrid"} & found[0]["engine"].keys():
        reports = [report["engine"][how] for report in found]
        assert [sorted(batch) for batch in union(reports)] == [sorted(batch) for batch in alone["batches"]]
        for report in reports:
            assert float(((report["weights"] - alone["weights"]).norm(dim=1) / moved).max()) < 1e-6
            assert torch.equal(report["noise"], alone["noise"])


def test_engines_of_all_ranks_release_one_sum_with_secret_noise(found):
    for how in ("secret", "secure"):
        reports = [report["engine"][how] for report in found]
        assert all(torch.equal(report["weights"], reports[0]["weights"]) for report in reports)
        assert all(torch.equal(report["noise"], reports[0]["noise"]) for report in reports)
        noise = reports[0]["noise"] / (ranks.CLIP / ranks.DIVISOR)
        assert float(noise.std()) == pytest.approx(1.0, rel=0.2)


def test_engines_that_would_release_more_than_is_said_are_refused(found):
    if len(found) != 2:
        pytest.skip("asked of two ranks")
    for said in (report["engine"] for report in found):
        assert "Two ranks have the same batch" in said["same batch"]
        assert "differ in noise_multiplier" in said["sigma"]
        assert "differ in the number of steps" in said["steps"]
        if SHARDS_HERE:
            assert "Two ranks have the same batch" in said["same batch in shards"]
            assert "differ in noise_multiplier" in said["sigma in shards"]
            assert "differ in the weights" in said["unequal copies"]


@pytest.mark.skipif(not SHARDS_HERE, reason="fully_shard of torch 2.6 does not run on a CPU")
def test_a_loss_that_fails_on_one_rank_in_shards_is_told_to_all(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    own = {"first": "Target 9 is out of bounds", "last": "Target 9 is out of bounds", "targets": "one row per example"}
    for rank, report in enumerate(report["engine"]["failed"] for report in found):
        for what, found_here in report.items():
            text = own[what] if rank == len(found) - 1 else "failed on another rank, which says why: nothing was"
            assert text in found_here["said"]
            assert found_here["steps"] == 0 and found_here["same"]


def test_what_one_rank_alone_loads_or_writes_is_refused_where_it_differs(found):
    """A rank may load other weights and those of before again, as for an evaluation; in shards nobody can tell."""
    for (how, by, what), report in ((key, r["loads"][key]) for r in found for key in r["loads"]):
        in_copies = how == "replicated"
        is_refused = len(found) > 1 and not (in_copies and what == "back")
        named = {"momenta": "the optimizer's state"}.get(what, "the weights")
        text = f"differ in {named}: " if in_copies else "A rank has loaded or written its shards"
        assert [text in said for said in report["said"][:2]] == [is_refused] * 2, (how, by, what, report)
        assert report["moved"] is not is_refused
        # Afterwards all have done the same to copies.
        assert report["said"][2:] == ["nothing was refused"] * 2 or not in_copies, (how, by, what, report)
        assert report["compared"] == 2  # once per run, the weights and the optimizer's state
        assert torch.equal(report["weights"], found[0]["loads"][how, by, what]["weights"])


def test_what_the_accountant_would_not_count_is_refused(found):
    if len(found) != 2:
        pytest.skip("asked of two ranks")
    for said in (report["refusals"] for report in found):
        assert "differ in seed" in said["seeds"]
        assert "differ in noise_multiplier" in said["sigma"]
        assert "differ in max_grad_norm" in said["clip"]
        assert "averages the gradients" in said["torch"]
        assert "distributed=False" in said["whole loader"]
        assert "would process every example" in said["no sharding"]
        assert "data sets differ" in said["other order"]
        assert "data sets differ" in said["other order of shares"]
        assert "repeats some examples" in said["repeats"]
        assert "differ in noise_multiplier" in said["schedule"]
        assert "differ in the batches" in said["left out"]
        assert "trains a model of its own" in said["alone"]
    assert "did not get an answer" in found[0]["absent"]


def test_without_a_process_group_there_is_one_sentence():
    with pytest.raises(ValueError, match="torchrun"):
        DifferentiallyPrivateDistributedDataParallel(nn.Linear(2, 2))
