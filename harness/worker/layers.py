"""The worker of layers: one fresh process inside a framework's own environment, one cell.

``python -m harness.worker.layers REQUEST.json`` speaks as :mod:`harness.worker.e2e` does. Standard library and numpy
only.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import layers
from harness.layer_contract import Bytes, LayerAdapter, LayerSetting, Unsupported
from harness.layers import LAYERS, Layer
from harness.worker import sketch
from harness.worker.clock import ForeignLoad, collector_paused
from harness.worker.gate import layers as layer_gate
from harness.worker.layer_request import LayerRequest
from harness.worker.line import Line
from harness.worker.process import Emit, die_with_parent, events, load_create, pin, save_weights, versions
from harness.worker.result import Check, LayerParts, Result, of_error
from harness.worker.result import Layer as Measured

BATCHES_BYTES = 64 * 2**20
MOST_BATCHES = 20
"""Passes go over that many different random batches in turn, fewer where inputs and targets are large: a pass should
find its data where a training step would, not in the cache of the last pass."""
LEAST_BATCHES = 2
"""An adapter that returns the gradients of the pass before is found out by those of another batch."""

WARM_UP_PASSES = 3
WARM_UP_SECONDS = 0.05
LONGEST_WARM_UP = 3.0
"""At least so many passes and seconds; a slow one ends the warm-up."""

COLLECTED_SECONDS = 0.5
"""Passes may leave cyclic garbage that holds a batch. After so many timed seconds Python's collector runs, outside the
clock: never would fill the memory, after every pass would take longer than a short pass."""

PROBED_SIZES = (4, 16)
PROBED_PASSES = 3

UNEXPLAINED_BYTES = 64 * 2**10
UNEXPLAINED_SHARE = 1e-3
"""By how much the parts of the memory may miss what is alive."""

Create = Callable[[], LayerAdapter]


def setting_of(request: LayerRequest, batch_size: int) -> LayerSetting:
    return LayerSetting(
        variant=request.variant,
        passes=request.passes,
        batch_size=batch_size,
        max_grad_norm=request.max_grad_norm,
        device=request.device,
        threads=request.threads,
    )


def ready(create: Create, layer: Layer, request: LayerRequest, batch_size: int, batches: int = 1) -> LayerAdapter:
    """An adapter with ``batches`` random batches, built and not yet run."""
    adapter = create()
    adapter.configure(layer, setting_of(request, batch_size))
    made = [layers.batch(layer, batch_size, layers.batch_seed(request.seed, number)) for number in range(batches)]
    adapter.place_inputs([inputs for inputs, _ in made])
    adapter.place_labels([targets for _, targets in made])
    adapter.build(layers.initial_parameters(layer, request.seed))
    return adapter


def timed_pass(adapter: LayerAdapter, batch: int) -> float:
    """Seconds of one pass, from a device at rest to a device at rest."""
    adapter.synchronize()
    start = time.perf_counter()
    adapter.run(batch)
    adapter.synchronize()
    return time.perf_counter() - start


def batches_of(layer: Layer, batch_size: int) -> int:
    return max(
        LEAST_BATCHES, min(MOST_BATCHES, BATCHES_BYTES // (batch_size * (layer.input_bytes + layer.label_bytes)))
    )


# ---- memory


def fault_of(parts: LayerParts) -> str | None:
    """Return why these figures are void, or None."""
    room = UNEXPLAINED_BYTES + UNEXPLAINED_SHARE * parts.peak
    if parts.unexplained is not None and abs(parts.unexplained) > room:
        return (
            f"the parts do not add up: {parts.unexplained} bytes more are alive after a pass than input, labels, "
            f"module and gradients (limit {room:.0f})."
        )
    if parts.intermediate < 0:
        return f"the parts do not add up: they exceed the peak by {-parts.intermediate} bytes."
    return None


def count_parts(
    create: Create, layer: Layer, request: LayerRequest, batch_size: int
) -> tuple[LayerParts, LayerAdapter]:
    """The bytes of one batch, piece by piece, in the order in which they are allocated; the peak is that of the first
    two passes (the second is the first that finds old gradients)."""
    adapter = create()
    adapter.configure(layer, setting_of(request, batch_size))
    adapter.count(lambda: None)  # whatever the instrument itself allocates at its first use
    baseline = adapter.allocated()
    inputs, targets = layers.batch(layer, batch_size, layers.batch_seed(request.seed, 0))
    weights = layers.initial_parameters(layer, request.seed)
    placed = adapter.count(lambda: adapter.place_inputs([inputs]))
    labelled = adapter.count(lambda: adapter.place_labels([targets]))
    built = adapter.count(lambda: adapter.build(weights))
    passes = [adapter.count_pass(0), adapter.count_pass(0)]
    level = placed.delta + labelled.delta + built.delta
    left = sum(p.delta for p in passes)
    peak = max(_highest(level, passes), level + left)
    parts = LayerParts(
        input=placed.delta,
        labels=labelled.delta,
        module=built.delta,
        gradients=left,
        intermediate=peak - level - left,
        peak=peak,
        baseline=baseline,
        instrument=adapter.instrument,
        unexplained=adapter.allocated() - baseline - level - left,
    )
    return parts, adapter


def _highest(level: int, passes: list[Bytes]) -> int:
    highest = level
    for bytes_of_pass in passes:
        highest = max(highest, level + bytes_of_pass.peak)
        level += bytes_of_pass.delta
    return highest


# ---- prediction


def predict(create: Create, layer: Layer, request: LayerRequest) -> tuple[float, int]:
    """(seconds, bytes) of a pass at the cell's batch size, on the straight line through two small ones.

    The passes are timed while they are counted, which makes them a little slower: PyTorch's profiler takes a block that
    it did not see come for another one when it sees it go, so in a process that counts, every pass is counted.
    """
    seconds, sizes = [], []
    for size in PROBED_SIZES:
        parts, adapter = count_parts(create, layer, request, size)
        sizes.append(parts.peak)
        seconds.append(min(_timed_and_counted(adapter) for _ in range(PROBED_PASSES)))
        del adapter
        gc.collect()
    far = (request.batch_size - PROBED_SIZES[0]) / (PROBED_SIZES[1] - PROBED_SIZES[0])
    at = [first + max(0.0, last - first) * far for first, last in (seconds, sizes)]
    return at[0], int(at[1])


def _timed_and_counted(adapter: LayerAdapter) -> float:
    seconds: list[float] = []
    adapter.count(lambda: seconds.append(timed_pass(adapter, 0)))
    return seconds[0]


def too_large(request: LayerRequest, seconds: float, size: int) -> str | None:
    """The reason why a cell is not tried, or None."""
    if size > request.most_bytes:
        return f"predicted {size / 2**30:.1f} GiB for a pass (limit {request.most_bytes / 2**30:.0f} GiB)."
    if seconds > request.longest_pass:
        return f"predicted {seconds:.1f} s for a pass (limit {request.longest_pass:.0f} s)."
    return None


# ---- the two purposes


def measure_memory(create: Create, layer: Layer, request: LayerRequest) -> Result:
    """The parts of the memory of one batch."""
    parts, adapter = count_parts(create, layer, request, request.batch_size)
    shapes = layer_gate.batch_dimension(layer, setting_of(request, request.batch_size), adapter.gradient_shapes())
    result = Result(
        "ok",
        layer=Measured(parts=parts, plan=dict(adapter.plan())),
        memory={f"{request.device}_peak_allocated": parts.peak},
        checks=[Check(**shapes)],
    )
    if reason := fault_of(parts) or (None if shapes["passed"] else f"{shapes['check']}: {shapes['detail']}"):
        return replace(result, state="rejected", reason=reason)
    return result


def measure_time(create: Create, layer: Layer, request: LayerRequest, emit: Emit) -> Result:
    """Correctness on a small batch, warm-up, timed passes, and the shapes of what the last one left."""
    emit({"event": "phase", "phase": "check"})
    with np.load(request.reference) as file:
        checks = layer_gate.check(
            create, layer, setting_of(request, request.batch_size), layer_gate.Reference(dict(file))
        )
    if refusal := _refusal(checks):
        return Result("rejected", refusal, checks=[Check(**check) for check in checks])
    gc.collect()
    emit({"event": "phase", "phase": "warm-up"})
    count = batches_of(layer, request.batch_size)
    adapter = ready(create, layer, request, request.batch_size, count)
    warm_up = 0
    started = time.perf_counter()
    while warm_up < WARM_UP_PASSES or time.perf_counter() - started < WARM_UP_SECONDS:
        timed_pass(adapter, warm_up % count)
        warm_up += 1
        if time.perf_counter() - started > LONGEST_WARM_UP:
            break
    emit({"event": "phase", "phase": "passes"})
    seconds: list[float] = []
    load = ForeignLoad()
    with collector_paused(), load.watch():
        spent = collected = 0.0
        while len(seconds) < request.least_passes or (spent < request.seconds and len(seconds) < request.most_passes):
            seconds.append(timed_pass(adapter, len(seconds) % count))
            spent += seconds[-1]
            if spent - collected > COLLECTED_SECONDS:
                gc.collect()
                collected = spent
    checks.append(layer_gate.batch_dimension(layer, setting_of(request, request.batch_size), adapter.gradient_shapes()))
    if request.left is not None:
        setting = setting_of(request, request.batch_size)
        save_weights(request.left, layer_gate.left_behind(setting, adapter.gradients()))
    result = Result(
        "ok",
        layer=Measured(
            pass_seconds=seconds,
            batches=count,
            warm_up=warm_up,
            stopped_by="passes" if len(seconds) >= request.most_passes else "seconds",
            plan=dict(adapter.plan()),
        ),
        foreign_share=load.share if load.available >= SHARE_FROM else 0.0,
        throttled=load.throttled,
        checks=[Check(**check) for check in checks],
    )
    if request.sketches:
        del adapter
        gc.collect()
        result = replace(result, sketch=sketch.of(spread_batch(create, layer, request)))
    refusal = _refusal(checks)
    return replace(result, state="rejected", reason=refusal) if refusal else result


def spread_batch(create: Create, layer: Layer, request: LayerRequest) -> Mapping[str, np.ndarray]:
    """Return what a pass leaves behind of a batch as large as the measured one, whose norms are spread as those of the
    checked batch: at its clipping bound about half of the examples are clipped, wherever in the batch they stand."""
    inputs, targets = layers.batch(layer, request.batch_size, 1000 * request.seed)
    scale = layer_gate.spread(request.batch_size).reshape(-1, *(1 for _ in layer.output))
    with np.load(request.reference) as file:
        bound = layer_gate.Reference(dict(file)).bound()
    adapter = create()
    adapter.configure(layer, replace(setting_of(request, request.batch_size), max_grad_norm=bound))
    adapter.place_inputs([inputs])
    adapter.place_labels([targets * scale])
    adapter.build(layers.initial_parameters(layer, request.seed))
    adapter.run(0)
    adapter.synchronize()
    return adapter.gradients()


SHARE_FROM = 0.5
"""Processor-seconds. The kernel counts in ticks of 10 ms: over shorter times, the share of others is a guess."""


def _refusal(checks: list[layer_gate.Check]) -> str | None:
    failed = [check for check in checks if not check["passed"]]
    return "; ".join(f"{c['check']}: error {c['error']}, limit {c['limit']} ({c['detail']})" for c in failed) or None


def measure(request: LayerRequest, emit: Emit) -> Result:
    layer = LAYERS[request.layer]
    emit({"event": "phase", "phase": "import"})
    create = partial(load_create(Path(request.folder, "layers.py")), request.variant)
    predicted: dict[str, Any] = {}
    if request.predicts and request.batch_size > PROBED_SIZES[1]:
        emit({"event": "phase", "phase": "prediction"})
        seconds, size = predict(create, layer, request)
        predicted = {"predicted_seconds": seconds, "predicted_bytes": size}
        if reason := too_large(request, seconds, size):
            return Result("unsupported", reason, layer=Measured(**predicted))
    if request.mode == "memory":
        result = measure_memory(create, layer, request)
    else:
        result = measure_time(create, layer, request, emit)
    return replace(result, layer=replace(result.layer or Measured(), **predicted))


def run(request: LayerRequest, emit: Emit, line: Line | None = None) -> None:
    """One measurement; whatever happens, the last event is a ``result``. ``line``: unused, as other workers have it."""
    try:
        result = measure(request, emit)
    except (Unsupported, NotImplementedError) as error:
        traceback.print_exc()
        result = Result("unsupported", str(error) or f"{type(error).__name__} without a message")
    except Exception as error:
        traceback.print_exc()
        result = of_error(error)
    emit(replace(result, versions=versions()).as_event())


def main() -> None:
    die_with_parent()
    request = LayerRequest.from_json(Path(sys.argv[1]).read_text())
    emit = events()
    pin(request.threads)
    run(request, emit)


if __name__ == "__main__":
    main()
