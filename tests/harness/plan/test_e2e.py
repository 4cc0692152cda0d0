"""Protocols as data, and the plans of whole runs."""

from __future__ import annotations

import pytest

from harness.errors import BadInput
from harness.plan import e2e as plan
from harness.plan import protocol, registry
from harness.tasks import FULL_TASKS, SMALL_GATE, TASKS


def test_protocols_are_data_and_the_page_quotes_every_rule() -> None:
    assert (registry.ROOT / "docs" / "rules.md").read_text() == protocol.page()
    for name in protocol.names():
        loaded = protocol.load(name)
        noise = 0.0 if name == "layers" else 1.1  # whose passes end with the clipped sum
        assert loaded.name == name and (loaded.noise_multiplier, loaded.max_grad_norm) == (noise, 1.0)


def test_every_block_of_the_quick_plan_is_whole() -> None:
    options = plan.preset("quick")
    contestants = registry.select(options.frameworks)
    jobs = [j for j in plan.jobs(options, contestants) if j.purpose == "time"]
    blocks: dict[tuple[str, int, int], list[str]] = {}
    for job in jobs:
        blocks.setdefault((job.cell.task, job.cell.batch_size, job.round), []).append(job.contestant.name)
    assert len(blocks) == sum(len(options.batch_sizes[t]) for t in options.tasks) * options.rounds == 18
    names = sorted(c.name for c in contestants)
    assert all(sorted(block) == names for block in blocks.values())
    assert len({job.name for job in jobs}) == len(jobs)


def test_every_task_is_timed_at_its_smallest_size_before_the_replays_are_made() -> None:
    def beginning(protocol: str) -> list[tuple[str, str, int]]:
        options = plan.preset("quick", protocol=protocol, tasks=("mnist-cnn", "imdb-lstm"))
        jobs = plan.jobs(options, registry.select(["pytorch-eager", "opacus-hooks"]))
        found = [(job.purpose, job.cell.task, job.cell.batch_size) for job in jobs if job.round == 0]
        assert found[::2] == found[1::2] and all(job.purpose == "time" for job in jobs if job.round)
        return found[::2]

    small, other, large = ("mnist-cnn", 64), ("imdb-lstm", 64), ("mnist-cnn", 512)
    assert beginning("verified") == [
        *(("time", *small), ("time", *other), ("memory", *small), ("memory", *other)),
        *(("time", *large), ("memory", *large)),
    ]
    assert beginning("as_shipped") == [
        (purpose, *block) for block in (small, other, large) for purpose in ("memory", "time")
    ], "a library's own loop is replayed before it is timed"


def test_the_plan_depends_on_its_seed_alone() -> None:
    contestants = registry.select(None)
    names = [[j.name for j in plan.jobs(plan.preset("quick", seed=s), contestants)] for s in (1, 1, 2)]
    assert names[0] == names[1] != names[2] and sorted(names[0]) == sorted(names[2])


def test_a_block_has_the_same_order_alone_and_however_the_contestants_are_named() -> None:
    options = plan.preset("quick", seed=3)
    contestants = registry.select(options.frameworks)
    whole = plan.jobs(options, contestants)
    for task, sizes in options.batch_sizes.items():
        for size in sizes:
            alone = plan.jobs(plan.preset("quick", seed=3, tasks=(task,), batch_sizes=(size,)), contestants[::-1])
            beside = [job for job in whole if (job.cell.task, job.cell.batch_size) == (task, size)]
            assert [(job.name, job.order) for job in alone] == [(job.name, job.order) for job in beside]
    orders = {tuple(j.contestant.name for j in whole if j.round == n and j.purpose == "time") for n in range(3)}
    assert len(orders) == 3


def test_the_modern_preset_has_a_task_of_each_kind_and_stays_below_25_minutes() -> None:
    options = plan.preset("modern")
    assert set(options.tasks) < set(SMALL_GATE)
    jobs = plan.jobs(options, registry.select(options.frameworks))
    assert {job.cell.task for job in jobs} <= plan.START_UP_SECONDS.keys(), "each has its own figures"
    expected = plan.expected_seconds(options, jobs)
    assert expected is not None and expected < 25 * 60


def test_full_tasks_are_in_the_preset_for_gpus_alone_which_processors_refuse() -> None:
    for name, options in plan.PRESETS.items():
        assert (not set(options.tasks) & set(FULL_TASKS)) is (name != "gpu-full")
    with pytest.raises(BadInput, match=r"preset gpu-full are for a GPU.*--device cuda"):
        plan.preset("gpu-full")
    options = plan.preset("gpu-full", device="cuda")
    assert options.tasks == tuple(plan.FULL_SIZES) and not options.small_gate
    assert {size for sizes in options.batch_sizes.values() for size in sizes} == {16, 4}


def test_the_estimate_of_a_full_task_on_processors_is_honest() -> None:
    contestants = registry.select(["pytorch-eager"])
    seconds = {}
    for device in ("cpu", "cuda"):
        options = plan.preset("gpu-full", tasks=("gpt2-124m-bf16",), device=device, rounds=1)
        seconds[device] = plan.expected_seconds(options, plan.jobs(options, contestants))
    assert seconds["cpu"] is not None and seconds["cuda"] is not None
    task = TASKS["gpt2-124m-bf16"]
    assert seconds["cpu"] > 16 * 30 * task.training_flops / plan.FLOPS_PER_SECOND["cpu"] > 600
    assert seconds["cuda"] < seconds["cpu"] / 2


def test_a_contestant_may_name_the_few_tasks_that_it_can_run() -> None:
    variant = registry.Variant(
        "v", "t", True, unsupported={"every-task": "no LoRA", "vit": "no words"}, supported=["llama-lora", "vit"]
    )
    said = {task: variant.why_unsupported(task) for task in ("llama-lora", "mnist-cnn", "vit")}
    assert said == {"llama-lora": None, "mnist-cnn": "no LoRA", "vit": "no words"}


def test_each_way_of_dp_lora_that_is_not_dp_sgd_is_declared_as_a_finding() -> None:
    variants = {variant.name: variant for variant in registry.frameworks()["dp_lora"].variants}
    for task in TASKS:
        has_lora = any(name.endswith(".lora_a") for name in TASKS[task].trained_parameters)
        for variant in variants.values():
            assert (variant.why_unsupported(task) is None) is has_lora
        assert (variants["hooks"].why_rejected(task) is None) is (task not in ("encoder-lora", "encoder-355m-lora"))
        assert variants["mean-loss"].why_rejected(task) and variants["ghost"].why_rejected(task)
