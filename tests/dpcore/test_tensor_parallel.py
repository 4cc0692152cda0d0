"""Ranks that hold parts of layers train as one process does: updates, noise, resumes; and what is refused."""

from __future__ import annotations

import pytest
import torch

from dpcore.noise import GaussianNoise
from tests.dpcore import parallel
from tests.dpcore.several import launch

pytestmark = pytest.mark.xdist_group("ranks")

REFUSED = {
    **dict.fromkeys(("sequence", "inputs"), "Layer 'norm', of class LayerNorm, is split in another way"),
    **dict.fromkeys(("of sequence", "DTensors between"), "Layer 'up', of class Linear, is split in another way"),
    **dict.fromkeys(("to sequence", "partial"), "Layer 'down', of class Linear, is split in another way"),
    "part of the mesh": "The mesh of tensor parallelism has 1 of 2 processes",
    "too many ranks": "A rank has no row",
    "max_norm": "Table 'table' has max_norm",
    "wrapped": "Parameter up.weight is a DTensor",
    "engine": "The model's layers are split",
    "no wrapper": "is not for a sharded module",
    "other weights": "The ranks differ in the weights",
    "other inputs": "were called with different batches",
    "another order": "has the ranks in the order [1, 0]",
    **dict.fromkeys(("other targets", "other targets of a split head", "head that is not gathered"), "The loss has"),
    **dict.fromkeys(("partial gradient", "dropout"), "different gradients"),
    "small partial gradient": "different sums of a parameter",
    "no rule": "module.head.0 has no rule",
    **dict.fromkeys(("replaced", "moved"), "was replaced or moved after make_private"),
    "penalty": "has an ordinary, unclipped gradient",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The reports of two ranks, from one launch."""
    folder = tmp_path_factory.mktemp("parallel")
    return launch(folder, 2, "same", "noise", "extremes", "resume", "refused", script=parallel.__file__)


@pytest.mark.parametrize("name", parallel.SAME)
def test_noisy_steps_are_those_of_one_process(found, name):
    options = parallel.SAME[name]
    alone = parallel.train(alone=True, **options)
    moved = (alone["weights"][1:] - alone["weights"][0]).norm(dim=1)
    for report in (r["same"][name] for r in found):
        away = (report["weights"] - alone["weights"])[1:].norm(dim=1) / moved
        assert float(away.max()) < (1e-6 if options.get("dtype") == torch.float32 else 1e-13)
        assert torch.equal(report["weights"], found[0]["same"][name]["weights"])
        assert report["batches"] == alone["batches"]
        assert report["accounted"] == alone["accounted"]


@pytest.mark.parametrize("kind", ["perceptron", "block"])
def test_some_of_the_compared_examples_are_clipped_and_others_are_not(kind):
    norms = torch.cat([n[0] for n in parallel.train(alone=True, kind=kind)["norms"]])
    assert 0.2 < float((norms > parallel.CLIPS[kind]).double().mean()) < 0.8


def test_the_noises_bits_are_those_of_one_process_and_the_same_on_all_ranks(found):
    seeded = found[0]["noise"]["seed"]
    alone = GaussianNoise(7).add_(torch.zeros_like(seeded), parallel.CLIPS["block"], 0)
    assert torch.equal(seeded, alone)
    for report in (r["noise"] for r in found):
        for name in ("seed", "secret", "secure"):
            assert torch.equal(report[name], found[0]["noise"][name])
            assert float(report[name].std()) / parallel.CLIPS["block"] == pytest.approx(1.0, rel=0.15)
        assert report["on grid"]
        assert not torch.equal(report["secret"], seeded)


def test_examples_whose_norms_cancel_or_overflow_are_clipped_as_in_one_process(found):
    for alone, apart in (pair for report in found for pair in report["extremes"]):
        assert float(alone.norm()) > 100
        assert float((apart - alone).norm() / alone.norm()) < 1e-6


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(found):
    for report in (r["resume"] for r in found):
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert not torch.equal(report["first"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"] == [(1.0, parallel.RATE, 4)]


def test_whole_weights_are_saved_under_the_names_of_the_users_model(found):
    for report in (r["resume"]["whole"] for r in found):
        ordinary = parallel.Block().double()
        ordinary.load_state_dict(report["saved"])
        torch.testing.assert_close(parallel.weights(ordinary), report["weights"])


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks(tmp_path):
    went_on = []
    for size in (2, 1, 4):
        checks = ("keep", "go_on") if size == 2 else ("go_on",)
        went_on += [report["go_on"] for report in launch(tmp_path, size, *checks, script=parallel.__file__)]
    for weights in went_on:
        torch.testing.assert_close(weights, went_on[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_release_something_else_is_refused(found, name):
    for report in found:
        assert REFUSED[name] in report["refused"][name]
