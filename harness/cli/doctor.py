"""``dpbench doctor``: is the instrument right, and is the machine fit for measuring? Every line is measured now."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np

from harness.contract import Adapter, Array, Setting
from harness.data import store
from harness.environments import memory_limit, variables, venv
from harness.environments.containers import engine
from harness.environments.containers.engine import Engine
from harness.errors import BadInput
from harness.store import cache
from harness.tasks import TASKS, Task
from harness.worker import machine, memory, quota, speed_probe
from harness.worker.clock import ForeignLoad, timed_steps


@dataclass(frozen=True)
class Finding:
    """``state`` is ``ok``, ``warning`` (numbers still count, read them with care) or ``fault`` (they do not)."""

    check: str
    state: str
    measured: str
    rule: str
    remedy: str = ""


class Phantom(Adapter):
    """An adapter that sleeps a known time and holds known bytes: what is measured of it is the instrument."""

    def __init__(self, sleep_seconds: float = 0.0, allocate_bytes: int = 0) -> None:
        self.sleep_seconds = sleep_seconds
        self.allocate_bytes = allocate_bytes

    def build(self, task: Task, setting: Setting, initial: Mapping[str, Array]) -> None:
        pass

    def place(self, x: Array, y: Array) -> None:
        pass

    def step(self, indices: Array, mask: Array | None) -> None:
        if self.allocate_bytes:
            # Straight from the kernel: a C allocator would hand out pages that are resident already, or take huge ones.
            with mmap(-1, self.allocate_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS) as area:
                np.asarray(area).fill(1)
        if self.sleep_seconds:
            time.sleep(self.sleep_seconds)

    def synchronize(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Array]:
        return {}


NO_INDICES = np.zeros(0, dtype=np.int64)


def sleep_error(seconds: float, steps: int = 20) -> float:
    """Relative error of the clock on ``steps`` sleeps of ``seconds``."""
    measured = timed_steps(Phantom(sleep_seconds=seconds), [(NO_INDICES, None)] * steps)
    return measured / (steps * seconds) - 1.0


def bytes_error(allocated: int) -> int:
    """Measured peak growth less the bytes really allocated."""
    memory.settle()
    before = memory.now()
    memory.reset_peak()
    timed_steps(Phantom(allocate_bytes=allocated), [(NO_INDICES, None)])
    return memory.peak() - before - allocated


def overhead_seconds(steps: int = 20_000) -> float:
    """Return what the timed loop itself costs per step."""
    return min(timed_steps(Phantom(), [(NO_INDICES, None)] * steps) for _ in range(5)) / steps


SHORTEST_STEP_SECONDS = 0.0003
"""An assumption on the safe side: the embedding without DP at batch size 16 takes about so long on one CPU core."""


BYTES_SLACK = 2**17 * max(2, os.cpu_count() or 1)
"""Linux adds up resident pages in batches of 32 for each processor (percpu_counter), 128 KiB of 4 KiB pages: so far
VmRSS and VmHWM may be off."""


def _clock() -> Finding:
    resolution = time.get_clock_info("perf_counter").resolution
    state = "ok" if resolution <= 1e-6 else "fault"
    return Finding("clock resolution", state, f"{resolution * 1e9:.0f} ns", "at most 1 µs")


def _sleeps() -> Finding:
    errors = {ms: sleep_error(ms / 1e3) for ms in (5, 10, 50)}
    worst = max(errors.values(), key=abs)
    text = ", ".join(f"{ms} ms: {error:+.1%}" for ms, error in errors.items())
    return Finding("known sleeps", "ok" if abs(worst) <= 0.05 else "fault", text, "within 5 %", "stop other processes")


def _bytes() -> Finding:
    sizes = (1, 4, 16)
    errors = {mib: bytes_error(mib * 2**20) for mib in sizes}
    text = ", ".join(f"{mib} MiB: {error / 1024:+.0f} KiB" for mib, error in errors.items())
    bad = any(abs(error) > max(BYTES_SLACK, 0.05 * mib * 2**20) for mib, error in errors.items())
    return Finding("known bytes", "fault" if bad else "ok", text, f"within 5 % or {BYTES_SLACK // 1024} KiB")


def _overhead() -> Finding:
    seconds = overhead_seconds()
    share = seconds / SHORTEST_STEP_SECONDS
    text = f"{seconds * 1e9:.0f} ns a step, {share:.3%} of a step of 0.3 ms"
    return Finding("harness overhead", "ok" if share < 0.005 else "fault", text, "under 0.5 % of a step of 0.3 ms")


def _noise_floor() -> Finding:
    values = [speed_probe.seconds() for _ in range(15)]
    half = len(values) // 2
    spread = statistics.stdev(values) / statistics.fmean(values)
    drift = statistics.median(values[half:]) / statistics.median(values[:half]) - 1.0
    text = f"speed probe {statistics.median(values) * 1e3:.1f} ms, spread {spread:.1%}, second half {drift:+.1%}"
    state = "ok" if spread <= 0.05 else "warning"
    return Finding("noise floor (speed probe)", state, text, "spread at most 5 %", "more rounds; a quieter machine")


def _foreign() -> Finding:
    load = ForeignLoad()
    with load.watch():
        time.sleep(1.0)
    state = "ok" if load.share <= 0.05 else "warning"
    remedy = "end what else is running, or measurements will be marked disturbed"
    return Finding("foreign load", state, f"{load.share:.1%} of {os.cpu_count()} processors", "at most 5 %", remedy)


def _quota() -> Finding:
    limit, rule = quota.group(), "no control group stops this process"
    if limit is None:
        return Finding("quota of processors", "ok", "none", rule)
    (begun, stopped), remedy = limit.periods(), "lift the limit (docker --cpus, a pod's); records name it, on its own"
    text = f"{limit.processors:g} of {os.cpu_count()} processors, stopped in {stopped} of {begun} periods so far"
    return Finding("quota of processors", "warning", text, rule, remedy)


def _variables() -> Finding:
    named = ", ".join(f"{name}={value}" for name, value in variables.named().items())
    remedy = "unset them, or measure with them on purpose: records name them and stand apart"
    return Finding("variables", "warning" if named else "ok", named or "none", "none that libraries read", remedy)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        found = venv.interpreter("3.11")
    except venv.EnvironmentFault as fault:
        return Finding("python", "fault", version, "a Python 3.11 for the environments", str(fault))
    return Finding("python", "ok", f"{version}; environments use {found}", "a Python 3.11 for the environments")


def _memory() -> Finding:
    limit = memory_limit.MemoryLimit(memory_limit.default_limit())
    kind = limit.kind
    limit.close()
    text = f"{memory_limit.default_limit() / 2**30:.1f} GiB a process, enforced by {kind}"
    state = "ok" if kind != "watchdog" else "warning"
    return Finding(
        "memory limit", state, text, "a cgroup", "the watchdog samples every 0.1 s; run where cgroups may be made"
    )


def _disk() -> Finding:
    free = shutil.disk_usage(cache.root()).free / 2**30
    return Finding(
        "disk",
        "ok" if free > 10 else "warning",
        f"{free:.0f} GiB free in {cache.root()}",
        "10 GiB",
        "set DPBENCH_CACHE",
    )


def _data() -> Finding:
    names = sorted({task.dataset for task in TASKS.values()} - set(store.OF_FULL_TASKS))
    there = {name: store.describe(name) is not None for name in names}
    kind = {name: "synthetic" if name in store.MADE else "genuine" for name in names}
    text = ", ".join(f"{name} {kind[name] if ok else 'missing'}" for name, ok in there.items())
    return Finding("data", "ok" if all(there.values()) else "warning", text, "data in the cache", "dpbench data fetch")


def _environments() -> Finding:
    made = venv.existing()
    text = ", ".join(f"{'+'.join(e.frameworks)} {e.size_bytes / 2**30:.1f} GiB" for e in made) or "none"
    return Finding("environments", "ok", text, "made by the first run")


def _gpu() -> Finding:
    gpus = machine.gpus()
    return Finding("GPU", "ok", "; ".join(gpus) or "none: --device cuda will be refused", "only for --device cuda")


@lru_cache
def _connected() -> Engine | str:
    """Return the engine, or why there is none."""
    try:
        return engine.connect()
    except BadInput as fault:
        return str(fault)


ONLY_FOR_CONTAINERS = "only for --isolation docker; cells run in venvs without it"


def _engine() -> Finding:
    on = _connected()
    if isinstance(on, str):
        # Only who has pointed at one, or has one and may not use it, wants to hear of it.
        is_wanted = engine.HOST in os.environ or "may not open" in on
        remedy = f"make it answer, or unset {engine.HOST}: --isolation docker will be refused"
        return Finding("container engine", "warning" if is_wanted else "ok", on, ONLY_FOR_CONTAINERS, remedy)
    rootless = ", rootless" if on.facts["rootless"] else ""
    text = f"{on.name} at {on.host}, {on.facts['storage']}{rootless}, API {on.facts['api']}"
    return Finding("container engine", "ok", text, ONLY_FOR_CONTAINERS)


def _container_limits() -> Finding:
    on = _connected()
    if isinstance(on, str):
        return Finding("container limits", "ok", "no engine", ONLY_FOR_CONTAINERS)
    absent = engine.unlimited(on.facts)
    text = f"cgroup v{on.facts['cgroup']}, " + (f"no limit on {', '.join(absent)}" if absent else "limits all three")
    rule = "memory and processes must be limited, processors should"
    return Finding("container limits", "warning" if absent else "ok", text, rule, engine.DELEGATE)


def _container_gpu() -> Finding:
    on = _connected()
    if isinstance(on, str):
        return Finding("container GPU", "ok", "no engine", ONLY_FOR_CONTAINERS)
    has_runtime = "nvidia" in on.facts["runtimes"]
    if not (has_runtime or machine.gpus()):
        return Finding("container GPU", "ok", "none on this machine", "only for --device cuda")
    text = f"runtimes {', '.join(on.facts['runtimes'])}"
    remedy = "for --device cuda: install the NVIDIA container toolkit there and restart the engine"
    return Finding(
        "container GPU", "ok" if has_runtime else "warning", text, "the engine knows the runtime nvidia", remedy
    )


def _container_images() -> Finding:
    on = _connected()
    if isinstance(on, str):
        return Finding("container images", "ok", "no engine", ONLY_FOR_CONTAINERS)
    from harness.environments.containers import images

    base = images.base_digest(on)
    made = images.existing(on)
    size = sum(image.mib for image in made) / 2**10
    text = f"base {base[7:19] if base else 'none'}, {len(made)} images ({size:.1f} GiB with what they share)"
    left = engine.orphans(on)
    text += f", {len(left)} leftovers of killed runs" if left else ""
    state = "warning" if left else "ok"
    return Finding("container images", state, text, "made by the first run", "dpbench image sweep")


CHECKS: tuple[Callable[[], Finding], ...] = (
    *(_clock, _sleeps, _bytes, _overhead, _noise_floor, _foreign, _quota, _variables, _python, _memory, _disk, _data),
    *(_environments, _gpu, _engine, _container_limits, _container_gpu, _container_images),
)


def examine(as_json: bool) -> bool:
    """Run every check and print it; return whether none is a fault."""
    findings = [check() for check in CHECKS]
    if as_json:
        print(json.dumps({"machine": machine.describe(), "checks": [asdict(f) for f in findings]}, indent=1))
    else:
        _print(findings)
    return all(finding.state != "fault" for finding in findings)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    facts = machine.describe()
    title = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB, machine {facts['id']}"
    view = Table(title=title, title_justify="left")
    for column in ("check", "state", "measured", "rule", "remedy"):
        view.add_column(column, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "fault": "red"}
    for f in findings:
        remedy = f.remedy if f.state != "ok" else ""
        view.add_row(f.check, Text(f.state, style=colours[f.state]), *map(Text, (f.measured, f.rule, remedy)))
    Console().print(view)
