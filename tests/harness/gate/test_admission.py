"""Which task the gate judges, and that the record says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.environments.executor import Limits
from harness.gate import admission
from harness.plan import e2e as plan
from harness.plan import registry
from harness.store import cache
from harness.tasks import GATE_TASKS, SMALL_GATE, TASKS
from harness.worker import machine
from harness.worker.request import Request
from harness.worker.result import Check, Result


def test_a_task_that_is_too_large_is_judged_by_its_small_twin_and_the_verdict_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(admission, "reference", lambda task, *_: cache.folder("references") / f"{task}.npz")
    asked: list[Request] = []

    def run(request: Request, *_: Any) -> Result:
        asked.append(request)
        return Result("ok", None, checks=[Check("update: one", 0.0, 1.0, True)])

    (contestant,) = registry.select(["dpcore-native"])
    found = {}
    for task in ("encoder-full", "small-encoder-full", "encoder-lora"):
        executor: Any = SimpleNamespace(identity="", run=run)
        found[task] = admission.judge(
            contestant, task, executor, Limits(2**30, 9.0), "cpu", 1, lambda _: None, lambda *_: None
        )
    assert [request.task for request in asked] == ["small-encoder-full", "encoder-lora"], "one verdict for both"
    assert asked[0].reference.endswith("small-encoder-full.npz") and asked[0].dataset_size == 70_000
    assert all(verdict.passed for verdict in found.values())
    assert [found[task].gate.judged_as for task in found] == ["small-encoder-full", None, None]
    assert found["small-encoder-full"].cached and found["small-encoder-full"].gate.key == found["encoder-full"].gate.key


def test_the_small_gate_has_a_verdict_of_its_own_and_says_which_network_it_judged() -> None:
    (contestant,) = registry.select(["dpcore-native"])
    keys = {small: admission.key_of(contestant, "gpt2-lm", "cpu", 1, small=small) for small in (False, True)}
    assert keys[True] != keys[False] and keys[True] == admission.key_of(contestant, "small-gpt2", "cpu", 1)
    assert [admission.judged_task("mnist-cnn", small) for small in (False, True)] == ["mnist-cnn"] * 2
    assert [admission.judged_task("vit", small) for small in (False, True)] == ["vit", "small-vit"]
    assert plan.preset("modern").small_gate and not plan.preset("modern", small_gate=False).small_gate
    assert not plan.preset("quick").small_gate


CPUINFO = """processor : 0
model name : {model}
flags : fpu sse2 {flags}
"""


@pytest.mark.parametrize(
    ("model", "flags", "is_another"),
    [
        ("A", "avx2 avx512f", False),
        ("A", "avx2 avx512f ibrs", False),  # a kernel that knows one more fault of the processor
        ("B", "avx2 avx512f", True),
        ("A", "avx2", True),
    ],
)
def test_verdicts_and_references_of_a_shared_cache_belong_to_a_kind_of_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, flags: str, is_another: bool
) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    (contestant,) = registry.select(["dpcore-native"])
    said = [("A", "avx2 avx512f"), (model, flags)]
    keys, paths = [], []
    for here in said:
        text = CPUINFO.format(model=here[0], flags=here[1])
        monkeypatch.setattr(machine, "_read", lambda path, text=text: text if path == "/proc/cpuinfo" else "")
        keys.append(admission.key_of(contestant, "logreg", "cpu", 1))
        paths.append(admission.reference("logreg", lambda _: None, lambda *call: call[1][-1].path.write_bytes(b"")))
    assert (keys[0] != keys[1]) is is_another and (paths[0] != paths[1]) is is_another


def test_what_is_judged_in_place_of_a_task_has_its_structure() -> None:
    assert set(SMALL_GATE) > set(plan.preset("modern").tasks)
    for task in (*TASKS.values(), *GATE_TASKS.values()):
        for name in {task.judged_as, SMALL_GATE.get(task.name, "")} - {""}:
            twin = GATE_TASKS[name]
            assert {type(layer) for layer in twin.layers} == {type(layer) for layer in task.layers}
            assert (twin.loss, twin.optimizer, twin.trained, twin.precision, twin.judged_as) == (
                task.loss,
                task.optimizer,
                task.trained,
                task.precision,
                "",
            )
