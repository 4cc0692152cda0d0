"""Work that is put off until the weights are read is told from a reading that was slow once."""

from __future__ import annotations

import numpy as np
import pytest

from harness.worker.deferred import Read, copies, fault_of

MEGABYTES_90 = {"weight": np.ones(22_500_000, np.float32)}
EVEN = Read(timed=2.4, first=0.030, second=0.030, cpu=0.030, extra_cpu=0.0)


def _slower(by: float, cpu: float | None = None) -> Read:
    return Read(2.4, 0.030 + by, 0.030, 0.030 + by, by if cpu is None else cpu)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_one_slow_reading_of_three_is_no_work_put_off(share: float) -> None:
    """A first copy of 90 MB in fresh memory: MiniLM was rejected for it."""
    reads = [EVEN, _slower(0.072), EVEN]
    assert fault_of(MEGABYTES_90, {}, reads, share) == {}


@pytest.mark.parametrize("reads", [[_slower(0.072)], [_slower(0.06)] * 2 + [EVEN], [EVEN, EVEN, _slower(0.3)]])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_put_off_for_long_or_mostly_is_rejected(reads: list[Read], share: float) -> None:
    found = fault_of(MEGABYTES_90, {}, reads, share)
    assert found["state"] == "rejected" and "deferred past the clock" in found["reason"]


def test_a_busy_machine_excuses_only_waiting() -> None:
    waited = [_slower(0.3, cpu=0.001)] * 3
    assert fault_of(MEGABYTES_90, {}, waited, 0.5) == {}
    assert fault_of(MEGABYTES_90, {}, waited, 0.0)["deferred"]


class _Weights:
    """An adapter of which only the weights are asked for."""

    def __init__(self) -> None:
        self.held = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)}

    def parameters(self) -> dict[str, np.ndarray]:
        return self.held


def test_weights_are_read_into_the_arrays_of_before_and_are_copies() -> None:
    adapter = _Weights()
    first = copies(adapter, {})
    adapter.held["a"] += 1
    assert not first["a"].any()  # what the adapter changes later is not seen
    held = first["a"]
    again = copies(adapter, first)
    assert again["a"] is held and (held == 1).all() and again["b"] is first["b"]
    adapter.held = {"a": np.ones(4, np.float32)}  # another shape, and no "b"
    assert copies(adapter, again).keys() == {"a"} and held.shape == (3,)
