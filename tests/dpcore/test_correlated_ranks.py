"""Correlated noise on several ranks is that of one process to the bit, on its batches. Launched by torchrun."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.utils.data import TensorDataset

from dpcore.data_loader import DPDataLoader
from dpcore.errors import UnsupportedError
from dpcore.loading.epoch_sampler import DealtCycle, EpochSampler
from tests.dpcore import correlated_ranks
from tests.dpcore.correlated_ranks import MECHANISMS, NUMBERS, private, trained
from tests.dpcore.several import launch, union

pytestmark = pytest.mark.xdist_group("ranks")

SAME_EXAMPLES = {"split": 4, "copies": 2, "shards": 2}
"""How many ranks, at most, work on the same examples where layers are split."""
CHECKS = ["noise", "update", "secret", "resume"]
SAID = {
    "left out": "differ in the batches",
    "left out by all": "needs one batch of the private loader for every step",
    "certain on some ranks": "needs one batch of the private loader for every step",
    "noise": "not theirs any more",
    "rank of the noise": "differ in the steps of correlated noise",
    "weights of the mechanism": "differ in the steps of correlated noise",
    "seed of the batches": "differ in the batches",
    "seed of the batches of all": "must have the same batches",
    "bound": "max_grad_norm is 0.4 and was 0.5",
    "copied loader": "needs one batch of the private loader for every step",
    "accumulated": "needs one batch of the private loader for every step",
    "failed behind the release": "differ in the weights",
}
REFUSED = {
    "mechanism": "differ in mechanism",
    "weights": "differ in mechanism",
    "none": "differ in how batches are drawn",
    "seed": "differ in seed",
    "batch": "differ in sample_rate",
    "copied loader": "it was copied, say",
    "unfollowed": "does not go with check_batches=False",
}


@pytest.fixture(scope="module", params=[2, 1, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """The reports of 1, 2 or 4 ranks, from one launch."""
    checks = [*CHECKS, *(["refused"] if request.param > 1 else ())]
    return launch(tmp_path_factory.mktemp("correlated"), request.param, *checks, script=correlated_ranks.__file__)


@functools.cache
def alone(name, steps, is_noise=False):
    dtype = torch.float32 if is_noise else torch.float64
    return trained(private(MECHANISMS[name], "alone", dtype), steps, is_noise=is_noise)


def test_noise_is_that_of_one_process_to_the_bit_and_each_rank_keeps_its_share_of_it(found):
    assert len({tuple(alone(name, 12, is_noise=True)["released"][3].tolist()) for name in MECHANISMS}) == 4
    for what in found[0]["noise"]:
        how, _, name = what.partition(" ")
        truth, kept = alone(name, 12, is_noise=True), [report["noise"][what]["kept"] for report in found]
        assert all(torch.equal(report["noise"][what]["released"], truth["released"]) for report in found), what
        assert truth["kept"] == NUMBERS
        if how in SAME_EXAMPLES:  # whose ranks hold other layers whole
            assert max(kept) < NUMBERS or len(found) == 1
            continue
        assert sum(kept) == NUMBERS
        # Shards are whole rows, so that those of small parameters differ.
        assert max(kept) <= NUMBERS / len(found) + (1 if how == "replicated" else 0.3 * NUMBERS)


def test_updates_batches_and_epsilon_are_those_of_one_process(found):
    for what in found[0]["update"]:
        how, _, name = what.partition(" ")
        truth, reports = alone(name, 8), [report["update"][what] for report in found]
        batches = union(reports[:: SAME_EXAMPLES.get(how, 1)])
        assert [sorted(batch) for batch in batches] == [sorted(batch) for batch in truth["batches"]]
        assert [sorted(batch) for batch in batches[:4]] == [sorted(batch) for batch in batches[4:]]
        assert sorted(i for batch in batches[:4] for i in batch) == list(range(41))
        for report in reports:
            torch.testing.assert_close(report["weights"], truth["weights"], rtol=1e-12, atol=1e-13)
            assert torch.equal(report["weights"], reports[0]["weights"])
            assert (report["epsilon"], report["accounted"]) == (truth["epsilon"], truth["accounted"])


def test_ranks_without_a_seed_share_secret_ones(found):
    first = found[0]["secret"]
    assert all(torch.equal(report["secret"], first) for report in found)
    assert not torch.equal(first, alone("banded", 8)["weights"][:2])


def test_a_resumed_run_equals_the_one_that_was_not_interrupted_to_the_bit(found):
    for report in (report["resume"] for report in found):
        for what, runs in report.items():
            whole, resumed = runs["whole"], runs["resumed"]
            assert torch.equal(resumed["weights"], whole["weights"]), what
            assert resumed["batches"] == whole["batches"]
            truth = alone(what.partition(" ")[2], 12)
            assert resumed["epsilon"] == whole["epsilon"] == truth["epsilon"]
            torch.testing.assert_close(resumed["weights"], truth["weights"][5:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((4, 2, 1), marks=pytest.mark.slow), pytest.param((1, 4), marks=pytest.mark.slow)]
)
def test_a_run_goes_on_at_another_number_of_ranks(sizes, tmp_path):
    launch(tmp_path, sizes[0], "resume", script=correlated_ranks.__file__)
    for size in sizes[1:]:
        for report in launch(tmp_path, size, "go_on", script=correlated_ranks.__file__):
            for what, run in report["go_on"].items():
                truth = alone(what.partition(" ")[2], 12)
                torch.testing.assert_close(run["weights"], truth["weights"][5:], rtol=1e-12, atol=1e-13)
                assert run["epsilon"] == truth["epsilon"]


def test_a_step_that_one_rank_refuses_is_refused_by_all(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in (report["refused"] for report in found):
        assert report["nothing"] == {"said": ["nothing was refused"] * 2, "moved": True}
        for what, words in SAID.items():
            assert words in report[what]["said"][0], what
            assert not report[what]["moved"]
        for what in ("noise", "rank of the noise", "weights of the mechanism", "failed behind the release"):
            assert "PrivacyError" in report[what]["said"][1]
    assert sum("refuses the step" in report["refused"]["certain on some ranks"]["said"][0] for report in found) == 1


def test_ranks_that_differ_are_not_made_private(found):
    if len(found) == 1:
        pytest.skip("asked of several ranks")
    for report in found:
        for what, words in REFUSED.items():
            assert words in report["refused"]["made"][what]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_cycle_that_is_dealt_is_that_of_one_process_in_equal_shares(ranks):
    given = {"num_samples": 23, "batches": 5, "batch_size": 5, "seed": 3}
    whole = EpochSampler(kind="cycle", **given)
    parts = [DealtCycle(rank=rank, num_replicas=ranks, **given) for rank in range(ranks)]
    for _ in range(2):
        rounds = [[*part] for part in parts]
        for k, batch in enumerate(whole):
            assert sorted(i for of in rounds for i in of[k]) == sorted(batch)
            assert max(len(of[k]) for of in rounds) - min(len(of[k]) for of in rounds) <= 1


def test_copies_of_ranks_cycles_whose_seeds_differ_have_no_example_in_common():
    given = {"num_samples": 23, "batches": 5, "batch_size": 5, "seed": 3}
    copies = [copy.deepcopy(DealtCycle(rank=rank, num_replicas=2, **given)) for rank in range(2)]
    assert copies[0].seed != copies[1].seed and [one.owners for one in copies] == [2, 2]
    for rank, one in enumerate(copies):
        assert sorted(i for batch in one for i in batch) == list(range(rank, 23, 2))


def test_a_cycle_is_dealt_by_one_seed_alone():
    with pytest.raises(ValueError, match="Give all ranks one secret seed"):
        DealtCycle(rank=0, num_replicas=2, num_samples=23, batches=5, batch_size=5)
    data = TensorDataset(torch.zeros(8))
    with pytest.raises(UnsupportedError, match="sampling='cycle' is for one process"):
        DPDataLoader(data, sample_rate=0.5, sampling="cycle", distributed=True, shares="owned", seed=1)
