"""The real contestants of the layer benchmark, each in its own environment, by the worker that a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import layers
from harness.environments import executor, memory_limit, venv
from harness.environments.executor import Limits, Venv
from harness.layers import LAYERS
from harness.plan import layer_registry
from harness.plan.layer_registry import LayerContestant
from harness.run import layers as layer_run
from harness.worker.layer_request import LayerRequest

pytestmark = pytest.mark.frameworks

QUICK = {"embedding": ("plain", "per_sample", "clipped"), "lstm": ("clipped",)}
"""Layers of the core that CI sees, and their passes."""
BATCH = 6

COUNTED = """
import torch
from frameworks._shared.torch.layers import profiled
held = []
for size in (0, 2**20, 4 * 2**20, 16 * 2**20):
    def work():
        torch.empty(size, dtype=torch.uint8)
        held.append(torch.empty(size // 2, dtype=torch.uint8))
    found = profiled(work)
    assert (found.delta, found.peak) == (size // 2, size), (size, found)
gone = profiled(held.clear)
assert gone.delta == -sum((0, 2**19, 2**21, 2**23)) and gone.peak == 0, gone
cycle = []
def leaves_garbage():
    cycle = [torch.empty(2**20, dtype=torch.uint8)]
    cycle.append(cycle)
garbage = profiled(leaves_garbage)
assert (garbage.delta, garbage.peak) == (0, 2**20), garbage
"""


def cells() -> list[Any]:
    """(contestant, layer, passes): what CI runs is QUICK, everything else is slow."""
    return [
        pytest.param(
            contestant,
            layer.name,
            passes,
            id=f"{contestant.name}-{layer.name}-{passes}",
            marks=[] if contestant.variant.core and passes in QUICK.get(layer.name, ()) else [pytest.mark.slow],
        )
        for contestant in layer_registry.contestants()
        for layer in LAYERS.values()
        if contestant.variant.has(layer) and (layer.name not in {x.name for x in layers.SWEEP[1:-1]})
        for passes in contestant.variant.passes
    ]


def python_of(contestant: LayerContestant) -> Path:
    try:
        return venv.ensure(contestant.framework, print).python
    except venv.EnvironmentFault as fault:
        pytest.skip(str(fault))


@pytest.mark.parametrize(("contestant", "layer", "passes"), cells())
def test_a_cell_is_right_and_its_memory_adds_up(contestant: LayerContestant, layer: str, passes: str) -> None:
    facts = LAYERS[layer]
    place = Venv(python_of(contestant), contestant.variant.environment, "harness.worker.layers")
    references = layer_run.ensure_references((layer,), print, venv.VenvBackend().run_tool)
    for mode in ("time", "memory"):
        asked = LayerRequest(
            mode=mode,
            folder=str(contestant.framework.folder),
            variant=contestant.variant.name,
            layer=layer,
            passes=passes,
            batch_size=BATCH,
            max_grad_norm=1.0,
            device="cpu",
            threads=1,
            seed=0,
            reference=str(references[layer]),
            predicts=False,
            seconds=1.0,
            most_passes=3,
            least_passes=2,
            longest_pass=60.0,
            most_bytes=16 * 2**30,
        )
        result = place.run(asked, Limits(memory_limit.default_limit(), 600.0), lambda event: None)
        if result.state == "unsupported" or contestant.variant.why_unsupported(facts):
            pytest.skip(str(result.reason))
        assert result.state == "ok", result
        assert all(check.passed for check in result.checks)
    parts = result.layer.parts
    slack = 4096  # token ids may be half as wide, and a framework may add a few scalars
    assert parts.labels == BATCH * facts.label_bytes
    assert facts.parameter_bytes <= parts.module <= 2 * facts.parameter_bytes + slack
    whole = parts.module + parts.gradients
    assert whole >= facts.parameter_bytes * (1 + (BATCH if passes == "per_sample" else 1))
    assert parts.intermediate >= 0 and abs(parts.unexplained) <= 64 * 1024 + parts.peak // 1000


def test_pytorchs_allocations_are_counted_to_the_byte() -> None:
    contestant = next(c for c in layer_registry.contestants() if c.name == "pytorch-eager")
    executor.run_tool(python_of(contestant), "tests.frameworks.run_code", [COUNTED])
