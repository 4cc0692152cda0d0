"""The GPU's energy counter, with a driver made up: not to be read, too coarse, absent."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from harness.environments import energy
from harness.environments.energy import GPU, Meter
from harness.environments.unavailable import Unavailable


class Fault(Exception):
    pass


def driver(*millijoules: int, fails: bool = False, gpus: int = 1, mig: int | None = None) -> SimpleNamespace:
    """Each look shows the counter moved on. ``mig``: whether the GPU is divided; None where it cannot be."""
    shown = iter(millijoules)

    def consumed(gpu: int) -> int:
        if fails:
            raise Fault("Not Supported")
        return next(shown)

    def divided(gpu: int) -> list[int]:
        if mig is None:
            raise Fault("Not Supported")
        return [mig, mig]

    return SimpleNamespace(
        NVMLError=Fault,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMigMode=divided,
        nvmlDeviceGetTotalEnergyConsumption=consumed,
    )


@pytest.mark.parametrize("mig", [None, 0])
def test_the_drivers_counter(monkeypatch: pytest.MonkeyPatch, mig: int | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(5_000, 5_000, 8_500, mig=mig))
    counter = energy.open_nvml()
    assert isinstance(counter, energy.Nvml)
    assert [counter.joules(), counter.joules()] == [0.0, 3.5]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "no nvidia-ml-py"),
        (driver(fails=True), "does not count energy here (NVML says Not Supported)"),
        (driver(0, gpus=2), "2 GPUs; what others do on them"),
        (driver(0, gpus=0), "0 GPUs"),
        (driver(0, mig=1), "divided (MIG)"),
    ],
)
def test_a_driver_that_says_nothing_of_the_contestant_alone(
    monkeypatch: pytest.MonkeyPatch, module: object, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = energy.open_nvml()
    assert isinstance(found, Unavailable) and words in found.reason


class Moves:
    """A counter that shows the given joules, one after the other, then the last; None: it cannot be read."""

    def __init__(self, *joules: float | None) -> None:
        self.shown = list(joules)

    def joules(self) -> float:
        found = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if found is None:
            raise OSError("gone")
        return found


def metered(counter: Moves | Unavailable, *stretches: float) -> dict[str, object]:
    meter = Meter({GPU: counter})
    for seconds in stretches:
        meter.start()
        meter.stop(seconds)
    return meter.said()


def test_a_meter_adds_up_the_stretches_and_not_what_lies_between() -> None:
    said = metered(Moves(0.0, 30.0, 100.0, 150.0), 4.0, 4.0)
    assert said == {"joules": {GPU: 80.0}, "seconds": 8.0, "stretches": 2, "unavailable": {}}


@pytest.mark.parametrize(
    ("counter", "stretches", "words"),
    [
        (Moves(0.0, 30.0, 40.0, None), (4.0, 4.0), "could not be read"),
        (Unavailable("there is none"), (4.0,), "there is none"),
    ],
)
def test_a_meter_that_cannot_tell_says_why_and_gives_no_figure(
    counter: Moves | Unavailable, stretches: tuple[float, ...], words: str
) -> None:
    said = metered(counter, *stretches)
    assert said["joules"] == {} and words in said["unavailable"][GPU]  # type: ignore[index]


def test_the_power_of_the_idle_machine_and_how_often_its_counter_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(energy.ForeignLoad, "share", 0.0)
    found = {GPU: Moves(0.0, 0.0, 2.0, 2.0, 5.0), "none": Unavailable("there is none")}
    said = energy.idle(found, 10 * energy.LOOK_SECONDS)
    assert said.reason is None and set(said.watts) == set(said.step_seconds) == {GPU}
    took = 5.0 / said.watts[GPU]
    assert took == pytest.approx(10 * energy.LOOK_SECONDS, rel=0.11)
    assert said.step_seconds[GPU] == pytest.approx(took / 2)


def test_a_machine_at_work_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy.ForeignLoad, "share", 0.2)
    said = energy.idle({GPU: Moves(0.0, 2.0)}, 0.02)
    assert said.watts == {} and "other programs took 20%" in str(said.reason)


def test_without_a_counter_nobody_waits() -> None:
    assert energy.idle({GPU: Unavailable("there is none")}, 1e9) == energy.Idle()
