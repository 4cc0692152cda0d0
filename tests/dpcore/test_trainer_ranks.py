"""accelerate, transformers, TRL and Lightning with two processes train as one does; launched by torchrun."""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from dpcore import PrivacyEngine, UnsupportedError
from dpcore.noise import GaussianNoise
from dpcore.processes import check_processes
from tests.dpcore import ranks, trainer_ranks
from tests.dpcore.several import launch, trained_alone, union
from tests.dpcore.trainer_parts import EXAMPLES, PIECES, ROWS, STEPS, Texts, language_model

pytestmark = pytest.mark.xdist_group("ranks")

CHECKS = {
    "accelerate": ["accelerate_same", "accelerate_noise", "accelerate_resume", "accelerate_empty", "accelerate_shards"],
    "transformers": ["transformers_same", "transformers_noise", "transformers_shards"],
    "lightning": ["lightning_same", "lightning_noise", "lightning_refusals"],
}
_LAUNCHED: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def found(request, tmp_path_factory):
    """The two ranks' reports on the library ``request.param``, from one launch."""
    library = request.param
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    library = "transformers" if library == "trl" else library  # what one imports, the other needs
    if library not in _LAUNCHED:
        folder, checks = tmp_path_factory.mktemp(library), CHECKS[library]
        if library == "transformers" and importlib.util.find_spec("trl") is not None:
            checks = ["trl_same", *checks]  # before a check whose accelerators shard from then on
        _LAUNCHED[library] = launch(folder, 2, *checks, script=trainer_ranks.__file__)
    return _LAUNCHED[library]


def by(library: str) -> Any:
    # Lightning is among the pins of the ordinary tests, too, where a launch takes half a minute: make test-models.
    marks = [pytest.mark.slow] if library == "lightning" else []
    return pytest.mark.parametrize("found", [pytest.param(library, marks=marks)], indirect=True)


def spent(sigma: float, rate: float, steps: int) -> float:
    """The epsilon of one process that takes these steps."""
    engine = PrivacyEngine()
    for _ in range(steps):
        engine.accountant.step(noise_multiplier=sigma, sample_rate=rate)
    return engine.get_epsilon(1e-5)


def check_noisy_steps(reports: list[dict[str, Any]], steps: int) -> None:
    """Clipping is that of a loop over the examples of both ranks, with the noise of one process, at every step."""
    batches = union(reports)
    assert len(batches) == steps and all(len(set(batch)) == len(batch) for batch in batches)
    truth = trained_alone(batches, 1.0, torch.float64)
    for report in reports:
        torch.testing.assert_close(report["history"], truth, rtol=1e-9, atol=1e-10)
        assert torch.equal(report["weights"], reports[0]["weights"])
        assert report["accounted"] == [(1.0, ranks.RATE, steps)]
        assert report["epsilon"] == spent(1.0, ranks.RATE, steps)


# ---- accelerate


@by("accelerate")
def test_accelerates_two_processes_without_noise_end_where_its_own_do(found):
    for report in (r["accelerate_same"] for r in found):
        assert report["accounted"] == [(0.0, 0.1, STEPS)]
        assert report["rates"][0] == report["rates"][1]
        assert report["difference"] < 1e-12


@by("accelerate")
@pytest.mark.parametrize("size", ["2", "auto"])
def test_accelerates_two_processes_clip_and_add_noise_as_one(found, size):
    reports = [r["accelerate_noise"][size] for r in found]
    check_noisy_steps(reports, 20)
    # They go in step, also where one of them has fewer examples.
    assert reports[0]["passes"] == reports[1]["passes"] > 20
    assert any(len(mine) != len(other) for mine, other in zip(*(r["batches"] for r in reports), strict=True))


@by("accelerate")
def test_accelerates_two_processes_release_the_noise_of_one_where_nothing_is_drawn(found):
    draws = found[0]["accelerate_empty"]
    assert torch.equal(draws, found[1]["accelerate_empty"])
    assert stats.kstest(draws[:, :200].flatten().numpy(), "norm").pvalue > 1e-4
    assert abs(float(draws.std()) - 1) < 0.02


@by("accelerate")
def test_accelerates_two_processes_go_on_from_their_checkpoint_bit_for_bit(found):
    for report in (r["accelerate_resume"] for r in found):
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"] == [(1.0, ranks.RATE, 6)]


@by("accelerate")
def test_accelerates_shards_clip_and_add_noise_as_one_process_and_go_on_from_their_checkpoint(found):
    reports = [r["accelerate_shards"] for r in found]
    for size in ("2", "auto"):
        check_noisy_steps([report[size] for report in reports], 20)
    for report in reports:
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"] == [(1.0, ranks.RATE, 6)]
        assert {"privacy.pt", "pytorch_model_fsdp_0"} <= set(report["files"])
        assert report["moved at a rate of 0"] == 0.0 and report["steps"] == 4
        assert "poisson_sampling=False with FSDP2" in report["in order"]
        assert "work together as FSDP" in report["version 1"] and "fsdp_version=2" in report["version 1"]
    assert all(mine + other == whole for (whole, mine), (_, other) in zip(*(r["local"] for r in reports), strict=True))


@pytest.mark.parametrize(
    ("kind", "processes", "parallel", "reason"),
    [
        ("FSDP", 2, None, "work together as FSDP.*fsdp_version=2"),
        ("DEEPSPEED", 1, None, "work together as DEEPSPEED"),
        ("MULTI_XPU", 2, None, "work together as MULTI_XPU"),
        ("MULTI_GPU", 4, SimpleNamespace(tp_size=2, cp_size=None), "parallelism_config has tp_size above 1"),
        ("MULTI_GPU", 4, SimpleNamespace(tp_size=1, cp_size=1), None),
        ("NO", 1, None, None),
        ("FSDP2", 4, SimpleNamespace(dp_replicate_size=2, dp_shard_size=2), None),
        ("FSDP2", 4, SimpleNamespace(dp_shard_size=2, tp_size=2), "parallelism_config has tp_size above 1"),
    ],
)
def test_an_accelerator_whose_processes_share_a_model_is_refused(kind, processes, parallel, reason):
    of = SimpleNamespace(value=kind.removesuffix("2"))
    told = {"num_processes": processes, "parallelism_config": parallel, "is_fsdp2": kind == "FSDP2"}
    accelerator = SimpleNamespace(distributed_type=of, **told)
    if reason is None:
        check_processes(accelerator)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_processes(accelerator)


# ---- transformers and TRL


@by("transformers")
def test_two_processes_of_a_trainer_without_noise_end_where_transformers_own_do(found):
    for report in (r["transformers_same"] for r in found):
        assert report["accounted"] == [(0.0, 0.1, STEPS)]
        assert report["difference"] < 1e-6


def texts_alone(batches: list[list[int]], kind: str = "gpt2") -> torch.Tensor:
    """The end of SGD by a loop over examples in float64, with the noise of one process."""
    model, noise, ids = language_model(kind).train(), GaussianNoise(seed=7), Texts().ids
    parameters = list(model.parameters())
    for step, batch in enumerate(batches):
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        for i in batch:
            logits = model(input_ids=ids[i : i + 1]).logits
            # The Trainer's mean over the words after the first.
            loss = F.cross_entropy(logits[0, :-1], ids[i, 1:])
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
            total += gradient * min(1.0, ranks.CLIP / float(gradient.norm()))
        noise.add_(total, ranks.CLIP, step)
        with torch.no_grad():
            for p, g in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                p -= 0.1 * g.view_as(p) / (2 * PIECES * ROWS)
    return trainer_ranks.flat(model)


@by("transformers")
def test_two_processes_of_a_trainer_clip_and_add_noise_as_one(found):
    reports = [r["transformers_noise"]["whole"] for r in found]
    batches = union(reports)
    assert len(batches) == 6 and all(len(set(batch)) == len(batch) for batch in batches)
    truth = texts_alone(batches)
    for report in reports:
        torch.testing.assert_close(report["weights"], truth, rtol=1e-8, atol=1e-9)
        assert torch.equal(report["weights"], reports[0]["weights"])
        assert report["accounted"] == [(1.0, 2 * PIECES * ROWS / EXAMPLES, 6)]
        assert report["epsilon"] == spent(1.0, 2 * PIECES * ROWS / EXAMPLES, 6)


@by("transformers")
def test_two_processes_of_a_trainer_go_on_from_their_checkpoint_bit_for_bit(found):
    for report in (r["transformers_noise"] for r in found):
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"]


@by("transformers")
def test_empty_batches_of_a_trainers_two_processes_are_steps(found):
    reports = [r["transformers_noise"]["empty"] for r in found]
    start = trainer_ranks.flat(language_model("gpt2"))
    draws = (reports[0]["weights"] - start) * 8 / (0.1 * ranks.CLIP)
    assert all(report["batches"] == [[]] * 6 and report["accounted"][0][2] == 6 for report in reports)
    assert torch.equal(reports[0]["weights"], reports[1]["weights"])
    # The sum of six steps' noise.
    assert abs(float(draws.std()) - 6**0.5) < 0.1


@by("transformers")
def test_a_trainers_shards_clip_and_add_noise_as_one_process_and_go_on_from_their_checkpoint(found):
    reports = [r["transformers_shards"] for r in found]
    for run, kind in (("whole", "llama"), ("rare", "llama"), ("gpt2", "gpt2")):
        batches = union([report[run] for report in reports])
        assert len(batches) == 6 and all(len(set(batch)) == len(batch) for batch in batches)
        assert run != "rare" or any(not batch for report in reports for batch in report[run]["batches"])
        for report in reports:
            torch.testing.assert_close(report[run]["weights"], texts_alone(batches, kind), rtol=1e-8, atol=1e-9)
    for report in reports:
        assert report["whole"]["accounted"] == [(1.0, 2 * PIECES * ROWS / EXAMPLES, 6)]
        assert report["rare"]["accounted"] == [(1.0, 0.02, 6)]
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"]


@by("trl")
def test_two_processes_of_trls_trainer_without_noise_end_where_its_own_do(found):
    for report in (r["trl_same"] for r in found):
        assert report["accounted"] == [(0.0, 0.1, STEPS)]
        assert report["difference"] < 1e-6


# ---- Lightning


@by("lightning")
def test_lightnings_two_processes_without_noise_end_where_its_own_do(found):
    for report in (r["lightning_same"] for r in found):
        assert report["steps"] == 20 and report["accounted"] == [(0.0, 0.2, 20)]
        assert report["difference"] < 1e-9


@by("lightning")
def test_lightnings_two_processes_clip_and_add_noise_as_one(found):
    check_noisy_steps([r["lightning_noise"]["noise"] for r in found], 20)


@by("lightning")
def test_lightnings_two_processes_go_on_from_their_checkpoint_bit_for_bit(found):
    for report in (r["lightning_noise"] for r in found):
        assert torch.equal(report["resumed"]["weights"], report["whole"]["weights"])
        assert report["resumed"]["accounted"] == report["whole"]["accounted"] == [(1.0, ranks.RATE, 8)]
        assert not report["told"]


@by("lightning")
def test_lightnings_two_processes_take_equally_many_steps_with_empty_batches(found):
    reports = [r["lightning_noise"]["empty"] for r in found]
    assert any(not batch for batch in reports[0]["batches"]) and any(batch for batch in union(reports))
    assert all(report["accounted"] == [(1.0, 0.05, 20)] for report in reports)
    assert torch.equal(reports[0]["weights"], reports[1]["weights"])


@by("lightning")
def test_what_lightnings_processes_cannot_add_up_is_refused(found):
    for report in (r["lightning_refusals"] for r in found):
        assert "work together by DDPStrategy" in report["ddp"] and "DPDDPStrategy()" in report["ddp"]
        assert "not that of make_private" in report["ordinary"]


def test_lightnings_strategy_takes_no_options_of_a_reducer():
    pytest.importorskip("lightning")
    from dpcore.lightning import DPDDPStrategy

    with pytest.raises(UnsupportedError, match="has no ddp_comm_hook, find_unused_parameters"):
        DPDDPStrategy(find_unused_parameters=True, ddp_comm_hook=copy.copy)


def test_a_replicated_module_needs_a_process_group():
    from dpcore.distributed import replicate

    with pytest.raises(ValueError, match="torchrun"):
        replicate(nn.Linear(2, 2))
