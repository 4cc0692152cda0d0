"""Logistic regression that is right in the gate, and adapters that cheat in the timed process in known ways."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from harness.contract import Adapter, Array, Setting
from harness.tasks import Task
from harness.worker.batches import REPLAYED_STEPS
from harness.worker.measurement import SETTLING_STEPS
from tests.support.gate_numpy import Exact, Values

REQUEST = Path(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].endswith(".json") else None
CLOCK = time.perf_counter
MODE = json.loads(REQUEST.read_text())["mode"] if REQUEST else ""
HONEST_STEPS = SETTLING_STEPS + REPLAYED_STEPS
"""Another process replays so many steps and compares: the cunning ones begin after them."""


class Vectorised(Exact):
    """Right, and fast enough for a run."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.steps = 0

    def step(self, indices: Array, mask: Array | None) -> None:
        self.steps += 1
        s = self.setting
        x, y = self.x[indices], self.y[indices]
        error = 1 / (1 + np.exp(-(x @ self.weights["fc.weight"][0] + self.weights["fc.bias"][0]))) - y
        norms = np.abs(error) * np.sqrt(np.square(x).sum(1) + 1)
        error = error * np.minimum(1.0, s.max_grad_norm / np.maximum(norms, 1e-30))
        self.move({"fc.weight": (error @ x)[None], "fc.bias": error.sum(keepdims=True)})

    def move(self, sums: Values) -> None:
        s = self.setting
        for name, value in sums.items():
            noise = s.noise_multiplier * s.max_grad_norm * self.normal(value.shape)
            moved = self.weights[name] - s.learning_rate / s.batch_size * (value + noise)
            self.weights[name] = moved.astype(np.float32)


class Quarter(Vectorised):
    """Takes a quarter of every batch that is not the gate's."""

    def step(self, indices: Array, mask: Array | None) -> None:
        super().step(indices[: len(indices) // 4], mask)


class AfterThree(Vectorised):
    """Three honest steps, then noise alone."""

    def step(self, indices: Array, mask: Array | None) -> None:
        super().step(indices if self.steps < 3 else indices[:0], mask)


class UntilRead(Vectorised):
    """Honest until the weights are read after some steps."""

    was_read = False

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.was_read = False

    def parameters(self) -> Values:
        self.was_read = self.steps >= 4
        return super().parameters()

    def step(self, indices: Array, mask: Array | None) -> None:
        super().step(indices[:0] if self.was_read else indices, mask)


class SkipsSteps(Vectorised):
    """Leaves out every second step as long as the clock runs: the replay sees them all."""

    def step(self, indices: Array, mask: Array | None) -> None:
        caller = sys._getframe(1).f_code.co_name
        if caller == "timed_until" and self.steps >= HONEST_STEPS and self.steps % 2:
            self.steps += 1
        else:
            super().step(indices, mask)


class Peeks(Vectorised):
    """Looks for the batches before the clock: in the request, and in every caller's frame."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        if MODE != "time":
            return
        assert REQUEST is not None
        found = json.loads(REQUEST.read_text())["batch_seed"] >= 0
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name != "replay":  # by then everything is timed
                found |= any(name in {"epochs", "batches", "part"} for name in frame.f_locals)
            else:
                return
            frame = frame.f_back
        with open(os.environ["DPBENCH_CHEAT_FOUND"], "a") as file:
            file.write(f"{found}\n")


class DefersEvenly(Vectorised):
    """Works whenever the weights are read, as long the second time as the first."""

    def parameters(self) -> Values:
        end = time.process_time() + 0.06 * (self.steps > 0)
        while time.process_time() < end:
            pass
        return super().parameters()


def timing() -> bool:
    """Whether the caller's caller runs under the clock."""
    return sys._getframe(2).f_code.co_name in {"timed_until", "timed_steps"}


def is_read() -> bool:
    """Return whether the weights are read after a stretch, by the caller's caller or by whom it asks to."""
    caller = sys._getframe(2)
    above = caller.f_back
    return "read_twice" in (caller.f_code.co_name, above.f_code.co_name if above else "")


class WorksAhead(Vectorised):
    """Works at each reading of the weights on the batches that lie in the worker's memory, in their order there, and
    shows the results under the clock as long as it is given those batches."""

    ahead: list[Array]

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.ahead = []

    def parameters(self) -> Values:
        now = super().parameters()
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "measure_time":
            frame = frame.f_back
        if frame is not None and "part" in frame.f_locals:
            known = frame.f_locals
            made = self.steps - SETTLING_STEPS - known["made_in_all"]
            todo = known["part"][made:] + known["batches"][known["done"] + len(known["part"]) :]
            self.ahead = [indices for indices, _ in todo]
        return now

    def step(self, indices: Array, mask: Array | None) -> None:
        if timing() and self.ahead and self.steps >= HONEST_STEPS:
            rows = self.ahead.pop(0)
            with open(os.environ["DPBENCH_CHEAT_FOUND"], "a") as file:
                file.write(f"{np.array_equal(rows, indices)}\n")
        super().step(indices, mask)


class OneNoise(Vectorised):
    """One noise for all steps where it is timed."""

    def normal(self, shape: tuple[int, ...]) -> Array:
        if MODE == "gate" or self.steps == 0:
            return super().normal(shape)
        return np.random.default_rng([self.setting.seed, *shape]).standard_normal(shape)


class HalfTwice(Vectorised):
    """Takes half of the rows twice wherever there is noise."""

    def step(self, indices: Array, mask: Array | None) -> None:
        half = indices[: len(indices) // 2]
        super().step(np.concatenate([half, half]) if self.setting.noise_multiplier else indices, mask)


class UntilHalt(Vectorised):
    """Honest until the weights are read where the clock halted, then noise alone; the replay was honest as long."""

    reads = 0

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        self.reads = 0

    def parameters(self) -> Values:
        if is_read():
            made, epoch = self.steps - SETTLING_STEPS, -(-len(self.x) // self.setting.batch_size)
            self.reads += made > REPLAYED_STEPS and made % epoch != 0
        return super().parameters()

    def step(self, indices: Array, mask: Array | None) -> None:
        super().step(indices[:0] if self.reads >= 2 else indices, mask)


class Jumps(Vectorised):
    """Noise alone under the clock from the fifth step on. The replay is honest, but for steps after which weights are
    compared: there it jumps to those that were read."""

    seen: ClassVar[dict[int, Values]] = {}

    def parameters(self) -> Values:
        if self.steps >= HONEST_STEPS and is_read():
            type(self).seen[self.steps] = super().parameters()
        return super().parameters()

    def step(self, indices: Array, mask: Array | None) -> None:
        is_timed = sys._getframe(1).f_code.co_name in {"timed_until", "timed_steps"}
        super().step(indices[:0] if is_timed and self.steps >= HONEST_STEPS else indices, mask)
        if not is_timed and self.steps in self.seen:
            self.weights = {name: value.copy() for name, value in self.seen[self.steps].items()}


class StopsClocks(Vectorised):
    """Takes its time when the weights are read, and stops the worker's clock meanwhile."""

    lost = 0.0

    def parameters(self) -> Values:
        if is_read():
            start = CLOCK()
            time.sleep(0.1)
            self.lost += CLOCK() - start
            time.perf_counter = lambda: CLOCK() - self.lost
        return super().parameters()


class WorksBetween(Vectorised):
    """Works when the worker collects garbage, between a reading of the weights and the next start."""

    def place(self, x: Array, y: Array) -> None:
        super().place(x, y)
        if MODE == "time":
            gc.callbacks.append(self.work)

    def work(self, phase: str, about: Mapping[str, int]) -> None:
        if phase == "start" and about["generation"] == 2 and self.steps > 2:
            time.sleep(0.5)


class TwoProcessors(Vectorised):
    """Lets a child work on all processors of the machine."""

    def place(self, x: Array, y: Array) -> None:
        super().place(x, y)
        if MODE == "time":
            code = (
                "import os, time; os.sched_setaffinity(0, range(os.cpu_count()))\nprint(flush=True)\nwhile True: pass"
            )
            self.child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            assert self.child.stdout is not None
            self.child.stdout.readline()


class FirstOfATurn(Vectorised):
    """Works ahead in the first step of each turn, which is not counted."""

    def step(self, indices: Array, mask: Array | None) -> None:
        if sys._getframe(2).f_code.co_name == "begin_turn":
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        super().step(indices, mask)


class ForgesTime(Vectorised):
    """Says at its first timed step what it would have measured, and goes."""

    def step(self, indices: Array, mask: Array | None) -> None:
        if MODE == "time":
            seconds = [1e-3]
            timed = {"steps_per_epoch": 472, "steps_timed": 472, "epochs": 1, "extrapolated": False}
            timed |= {"measured_seconds": seconds, "part_seconds": seconds}
            result = {"event": "result", "state": "ok", "epoch_seconds": seconds, "timed": timed, "epsilon_steps": 472}
            for number in range(3, 20):  # whichever is the worker's own
                try:
                    os.write(number, json.dumps(result).encode() + b"\n")
                except OSError:
                    continue
            os._exit(0)
        super().step(indices, mask)


class PatchesClock(Vectorised):
    """A clock that goes slowly while a step is under way."""

    def step(self, indices: Array, mask: Array | None) -> None:
        if sys._getframe(1).f_code.co_name == "timed_until" and not hasattr(self, "real"):
            self.real = time.perf_counter
            start = self.real()
            time.perf_counter = lambda: start + (self.real() - start) / 100
        time.sleep(2e-3)
        super().step(indices, mask)


class PatchesWorker(Vectorised):
    """Another function in the place of the one that times."""

    def place(self, x: Array, y: Array) -> None:
        super().place(x, y)
        if MODE == "time":
            sys.modules["__main__"].timed_until = lambda adapter, batches, stop: (1e-3, len(batches))


class MemoryCrash(Vectorised):
    """Has no replay, because that raises."""

    def step(self, indices: Array, mask: Array | None) -> None:
        if MODE == "memory":
            raise RuntimeError("there is nothing to compare with")
        super().step(indices[:1], mask)


class OwnLoop(Vectorised):
    """A loop of its own that makes one update without noise, and says that it made an epoch's."""

    def epoch(self, seed: int) -> int | None:
        self.move({name: np.ones_like(value) for name, value in self.weights.items()})
        self.weights["fc.bias"] = self.weights["fc.bias"] + np.float32(1e-6 * (seed % 7))
        return -(-len(self.x) // self.setting.batch_size)

    def normal(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape)


def found_above(name: str, start: int = 2) -> object | None:
    """Return what the nearest caller has under this name, if any has."""
    frame = sys._getframe(start)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


class AsksEarly(Vectorised):
    """Asks the referee for the batches' seed by itself, before anything is built."""

    def build(self, task: Task, setting: Setting, initial: Values) -> None:
        super().build(task, setting, initial)
        line = found_above("line")
        if MODE == "time" and line is not None and not hasattr(self, "seed"):
            self.seed = line.ask("seed")["batch_seed"]


class ForgesTheEnd(Vectorised):
    """Says at the first step of a stretch that the stretch has ended and that the weights were read, and stops the
    worker's clock while it works."""

    def step(self, indices: Array, mask: Array | None) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name not in {"time", "begin_turn"}:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "time":
            line = frame.f_locals["self"].line
            if not hasattr(line, "honest"):
                line.honest, line.left = line.tell, 0
                line.tell = self.swallow(line)
            if not line.left:
                for what in ("end", "read", "read"):
                    line.honest(what)
                line.left = 3
                now = CLOCK()
                time.perf_counter = lambda: now
        super().step(indices, mask)
        end = time.process_time() + 2e-4
        while time.process_time() < end:
            pass

    @staticmethod
    def swallow(line: object) -> object:
        def tell(what: str) -> None:
            line.left -= 1
            time.perf_counter = CLOCK

        return tell


class FillsLater(Vectorised):
    """Does nothing under the clock after the first steps, and fills what it returned while the replay runs."""

    handed: ClassVar[dict[int, list[Values]]] = {}

    def parameters(self) -> Values:
        found = super().parameters()
        if self.steps >= HONEST_STEPS and is_read():
            found["fc.bias"] += np.float32(1e-7)
            self.handed.setdefault(self.steps, []).append(found)
        return found

    def step(self, indices: Array, mask: Array | None) -> None:
        if sys._getframe(1).f_code.co_name in {"timed_until", "timed_steps"} and self.steps >= HONEST_STEPS:
            self.steps += 1
            return
        super().step(indices, mask)
        for arrays in self.handed.get(self.steps, ()):
            for name, value in arrays.items():
                value[...] = self.weights[name]


class FillsPastTheCopy(FillsLater):
    """The same, and lets the worker keep what it was given instead of copies."""

    def place(self, x: Array, y: Array) -> None:
        super().place(x, y)
        sys.modules["harness.worker.deferred"].copies = lambda adapter, into: dict(adapter.parameters())


class BesideTheWorker(Vectorised):
    """Works in a process that is its parent's child, and not its own."""

    def place(self, x: Array, y: Array) -> None:
        super().place(x, y)
        if MODE == "memory":
            clone_parent, on_x86 = 0x8000, {"x86_64": 56, "aarch64": 220}[os.uname().machine]
            if ctypes.CDLL(None).syscall(on_x86, clone_parent | 17, 0, 0, 0, 0) == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; x = b'1' * 2**26; time.sleep(60)"])


VARIANTS: Mapping[str, type[Exact]] = {
    "honest": Vectorised,
    "quarter": Quarter,
    "after-three": AfterThree,
    "until-read": UntilRead,
    "skips-steps": SkipsSteps,
    "peeks": Peeks,
    "defers-evenly": DefersEvenly,
    "works-ahead": WorksAhead,
    "one-noise": OneNoise,
    "half-twice": HalfTwice,
    "until-halt": UntilHalt,
    "jumps": Jumps,
    "stops-clocks": StopsClocks,
    "works-between": WorksBetween,
    "two-processors": TwoProcessors,
    "first-of-a-turn": FirstOfATurn,
    "forges-time": ForgesTime,
    "patches-clock": PatchesClock,
    "patches-worker": PatchesWorker,
    "memory-crash": MemoryCrash,
    "own-loop": OwnLoop,
    "asks-early": AsksEarly,
    "forges-end": ForgesTheEnd,
    "fills-later": FillsLater,
    "fills-past-copy": FillsPastTheCopy,
    "beside": BesideTheWorker,
}


def create(variant: str) -> Adapter:
    return VARIANTS[variant]()
