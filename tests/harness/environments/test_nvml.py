"""GPU memory by the driver, with a driver made up: there is none where these tests run."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from harness.environments import nvml


class Fault(Exception):
    pass


def driver(*looks: dict[int, int | None], fails: bool = False) -> SimpleNamespace:
    """Two GPUs; each look shows bytes by process id on the first, and one byte of ours on the second."""
    shown = iter(looks)

    def processes(gpu: int) -> list[SimpleNamespace]:
        by_pid = next(shown) if gpu == 0 else {os.getpid(): 1}
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in by_pid.items()]

    def start() -> None:
        if fails:
            raise Fault

    return SimpleNamespace(
        NVMLError=Fault,
        nvmlInit=start,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )


def watched(monkeypatch: pytest.MonkeyPatch, module: object, looks: int) -> dict[str, int]:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    watch = nvml.Watch(os.getpid())
    for _ in range(looks):
        watch.look()
    return watch.memory


def test_the_highest_of_what_was_seen_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.getpid()
    made_up = driver({ours: 100, 1: 10**9}, {ours: 700}, {ours: None})
    assert watched(monkeypatch, made_up, 3) == {nvml.METRIC: 701}


@pytest.mark.parametrize("module", [None, driver(fails=True)], ids=["not installed", "no driver"])
def test_without_it_there_is_no_figure(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    assert watched(monkeypatch, module, 2) == {}


def test_a_process_that_the_driver_does_not_show_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = driver({1: 500})
    made_up.nvmlDeviceGetCount = lambda: 1
    assert watched(monkeypatch, made_up, 1) == {}
