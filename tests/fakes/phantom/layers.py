"""A LayerNorm in numpy with an allocator of its own, right and wrong in known ways; only for tests of the harness."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from harness.layer_contract import Bytes, CachingAllocator, LayerAdapter, LayerSetting, Unsupported
from harness.layers import Layer

WORKSPACE = 3 * 2**20
"""What the fake BLAS library keeps after its first product."""


def create(variant: str) -> LayerAdapter:
    """One of the variants of layers.toml."""
    return Phantom(variant)


class Counters:
    """The three functions of ``torch.cuda`` that count, over bytes that the fake says it holds."""

    def __init__(self) -> None:
        self.level = self.peak = 0

    def take(self, size: int) -> None:
        self.level += size
        self.peak = max(self.peak, self.level)

    def memory_allocated(self) -> int:
        return self.level

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.level


def gradients(weights: Mapping[str, np.ndarray], x: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Per-sample gradients [b, 64] of the cross-entropy of a LayerNorm's output, in the precision of the inputs."""
    centred = x - x.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    logits = normed * weights["weight"] + weights["bias"]
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    by_output = share * targets.sum(1, keepdims=True) - targets
    return {"weight": by_output * normed, "bias": by_output}


class Phantom(LayerAdapter):
    """A pass lasts at least ``sleep_seconds``, its arithmetic included; ``spare_bytes`` are held for a moment.
    ``lasted``: seconds of each pass as it saw them, for a busy machine wakes a sleeper late."""

    instrument = "a fake allocator"
    sleep_seconds = 0.0
    spare_bytes = 0

    def __init__(self, variant: str = "exact") -> None:
        self.variant = variant
        self.passes = 0
        self.lasted: list[float] = []
        self.left: dict[str, np.ndarray] = {}

    def configure(self, layer: Layer, setting: LayerSetting) -> None:
        if self.variant == "refuses" or layer.kind != "LayerNorm":
            raise Unsupported("the phantom only has a LayerNorm, and not for everyone.")
        self.setting = setting
        self.counters = Counters()
        self.counters.take(WORKSPACE)
        self.allocator = CachingAllocator(self.counters, self.synchronize)

    def place_inputs(self, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.x = [batch["x"] for batch in batches]
        self.counters.take(sum(x.nbytes for x in self.x))

    def place_labels(self, batches: Sequence[np.ndarray]) -> None:
        self.targets = list(batches)
        self.counters.take(sum(targets.nbytes for targets in batches))

    def build(self, initial: Mapping[str, np.ndarray]) -> None:
        self.weights = {name: value.copy() for name, value in initial.items()}
        self.counters.take(sum(value.nbytes for value in self.weights.values()))

    def run(self, batch: int) -> None:
        self.passes += 1
        if self.variant == "crash" and self.passes == 2:
            raise RuntimeError("it was asked to")
        self.counters.take(-sum(value.nbytes for value in self.left.values()))
        spare = self.spare_bytes + (2**30 * len(self.x[batch]) if self.variant == "hungry" else 0)
        self.counters.take(spare)
        started = time.perf_counter()
        until = started + self.sleep_seconds + 1e-3 * len(self.x[batch]) * (self.variant == "slow")
        found = gradients(self.weights, self.x[batch], self.targets[batch])
        if self.variant == "four-only" and self.setting.batch_size > 4:
            for value in found.values():
                value[4:] = 0.0
        idles = self.variant == "idles" and self.left and self.setting.batch_size > 4
        if not (self.variant == "caches" and self.left) and not idles:
            self.left = self._left(found)
        self.counters.take(sum(value.nbytes for value in self.left.values()))
        self.counters.take(-spare)
        time.sleep(max(0.0, until - time.perf_counter()))
        self.lasted.append(time.perf_counter() - started)

    def _left(self, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.variant == "drops-example":
            for value in found.values():
                value[-1] = 0.0
        if self.setting.passes == "per_sample":
            if self.variant == "time-first" and self.setting.batch_size > 4:
                return {name: np.zeros((64, *value.shape[1:]), np.float32) for name, value in found.items()}
            return found
        factors = np.ones(len(found["bias"]), np.float32)
        if self.setting.passes == "clipped" and self.variant not in ("never-clips", "clips-batch"):
            norms = np.sqrt(sum((value**2).sum(1) for value in found.values()))
            factors = np.minimum(1.0, self.setting.max_grad_norm / np.maximum(norms, 1e-30))
        sums = {name: np.einsum("b,bi->i", factors, value) for name, value in found.items()}
        if self.variant == "clips-batch":
            norm = np.sqrt(sum((value**2).sum() for value in sums.values()))
            sums = {name: value * min(1.0, self.setting.max_grad_norm / norm) for name, value in sums.items()}
        return sums

    def synchronize(self) -> None:
        pass

    def gradient_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.left.items()}

    def gradients(self) -> Mapping[str, np.ndarray]:
        return {name: value.copy() for name, value in self.left.items()}

    def count(self, work: Callable[[], None]) -> Bytes:
        return self.allocator.count(work)

    def allocated(self) -> int:
        return self.allocator.allocated() + (2**20 if self.variant == "leaky" and self.passes else 0)
