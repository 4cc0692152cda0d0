"""Adapters that behave and misbehave in known ways, so that the instrument itself can be tested."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.contract import Adapter, Array, Memory, Setting, Unsupported
from harness.tasks import Task

LATE_BYTES, STEP_BYTES = 96 * 2**20, 32 * 2**20


class Phantom(Adapter):
    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.hoard: list[Array] = []

    def build(self, task: Task, setting: Setting, initial: Mapping[str, Array]) -> None:
        if self.variant == "refuses":
            raise Unsupported("it does not want to.")
        self.setting = setting
        self.weights = {name: value.copy() for name, value in initial.items()}
        self.pending = 0
        self.count = 0
        if self.variant == "shapeless":
            self.weights = {name: value[..., None] for name, value in self.weights.items()}

    def place(self, x: Array, y: Array) -> None:
        self.rows = len(x)
        self.original = np.ones(LATE_BYTES, dtype=np.uint8) if self.variant == "late" else None

    def step(self, indices: Array, mask: Array | None) -> None:
        self.count += 1
        if self.variant == "padded":
            assert mask is not None and len(indices) in self.setting.padded_sizes
        if self.variant == "idle":
            return
        for value in self.weights.values():
            value += 1e-3
        if self.variant == "hungry":
            np.ones(len(indices) * 2**20, dtype=np.uint8)
        if self.variant == "moody":
            np.ones(len(indices) * (10 if self.setting.seed == 1 else 12) * 2**20 // 10, dtype=np.uint8)
        if self.variant == "trying" and self.count <= 4:
            time.sleep(0.5)
            np.ones(len(indices) * 2**20, dtype=np.uint8)
        if self.variant == "slow":
            time.sleep(0.001 * len(indices))
        if self.variant == "device" and len(indices) > 300:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        misbehave = getattr(self, f"_{self.variant}", None)
        if misbehave is not None:
            misbehave()

    def _sleeper(self) -> None:
        """Tells the file DPBENCH_TEST_SLEPT when each sleep began and ended: a busy machine wakes a sleeper late."""
        started = time.perf_counter()
        time.sleep(0.01)
        ended = time.perf_counter()
        if "DPBENCH_TEST_SLEPT" in os.environ:
            with open(os.environ["DPBENCH_TEST_SLEPT"], "a") as file:
                file.write(f"{started} {ended}\n")

    def _late(self) -> None:
        """Lets go only now of what it needed to place the data."""
        self.original = None
        np.ones(STEP_BYTES, dtype=np.uint8)

    def _modest(self) -> None:
        np.ones(STEP_BYTES, dtype=np.uint8)

    def exchanged(self, indices: Array, mask: Array | None) -> Mapping[int, Mapping[str, int]]:
        return {os.getpid(): {"all_reduce": 2048}} if self.variant == "joint" else {}

    def peak_memory(self) -> Memory:
        names = ("peak_resident_growth", "peak_resident_growth_with_compile", "its_own")
        return Memory(dict.fromkeys(names, 1) if self.variant == "modest" else {})

    def _crash(self) -> None:
        if self.count == 4:
            raise RuntimeError("something the framework did not like")

    def _vanish(self) -> None:
        os._exit(7)

    def _glutton(self) -> None:
        while True:
            self.hoard.append(np.ones(2**24, dtype=np.uint8))

    def _hang(self) -> None:
        time.sleep(3600)

    def _nan(self) -> None:
        for value in self.weights.values():
            value[:] = np.nan

    def _deferred(self) -> None:
        self.pending += 1

    def _fickle(self) -> None:
        for value in self.weights.values():
            value += np.random.default_rng().standard_normal(value.shape).astype(np.float32)

    def _local(self) -> None:
        for value in self.weights.values():
            value += np.float32(1e-6 * (1 + os.getpid() % 1000))

    def _careless(self) -> None:
        """Loses the weights that it left as the replay."""
        request = json.loads(Path(sys.argv[1]).read_text())
        if self.count == 1 and request["mode"] == "memory":
            atexit.register(Path(request["snapshot"]).unlink, missing_ok=True)

    def _thief(self) -> None:
        """Takes away the weights that timed processes have left for their comparison."""
        request = json.loads(Path(sys.argv[1]).read_text())
        if self.count == 1 and request["mode"] == "memory":
            for path in Path(request["snapshot"]).parent.glob("*.time.npz"):
                path.unlink()

    def _evasive(self) -> None:
        """Ends where its weights would be looked at."""
        request = json.loads(Path(sys.argv[1]).read_text())
        if request["mode"] == "time" and request["snapshot"]:
            raise RuntimeError("it would rather not be compared")

    def _forgetful(self) -> None:
        if json.loads(Path(sys.argv[1]).read_text())["mode"] == "memory":
            raise RuntimeError("it does not know how this went")

    def _patricide(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def _forger(self) -> None:
        """Writes a result of its own where the worker writes its events, and is gone before its weights are read."""
        timed = {
            "steps_per_epoch": 1,
            "steps_timed": 1,
            "epochs": 1,
            "extrapolated": False,
            "measured_seconds": [0.001],
        }
        result = {"event": "result", "state": "ok", "epoch_seconds": [0.001], "timed": timed, "epsilon_steps": 1}
        result |= {"memory": {"peak_resident_growth": 1}, "foreign_share": 0.0, "versions": {}}
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, json.dumps(result).encode() + b"\n")
        os._exit(0)

    def epoch(self, seed: int) -> int | None:
        """Its own loop: 3 updates of 10 ms, with noise from the seed; ``own-unseeded`` cannot be seeded."""
        if self.variant not in {"own", "own-unseeded", "own-fickle"}:
            return super().epoch(seed)
        rng = np.random.default_rng(seed if self.variant == "own" else None)
        for _ in range(3):
            time.sleep(0.01)
            for value in self.weights.values():
                value += rng.standard_normal(value.shape).astype(np.float32)
        return 3

    def synchronize(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Array]:
        # At work, not asleep: on a busy machine only a process that works counts as one that deferred its work.
        end = time.process_time() + min(1.0, 0.02 * self.pending)
        while time.process_time() < end:
            pass
        self.pending = 0
        return {name: value.copy() for name, value in self.weights.items()}


def create(variant: str) -> Phantom:
    return Phantom(variant)
