"""What the machine is and what state the code is in: facts for the record. Standard library only."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.paths import ROOT


@lru_cache
def describe() -> dict[str, Any]:
    """CPU, memory, kernel, GPUs, and ``id``: a short hash that tells two machines apart without naming them."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "gpus": gpus(),
    }
    identity = [str(facts[k]) for k in ("cpu", "cores", "memory_bytes", "gpus")] + [_machine_id()]
    facts["id"] = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:8]
    return facts


def state() -> dict[str, Any]:
    """Return what changes from minute to minute: load and clock."""
    clocks = [float(line.split(":")[1]) for line in _read("/proc/cpuinfo").splitlines() if line.startswith("cpu MHz")]
    return {
        "gpu_throttle": _gpu_throttle(),
        "load_average": round(os.getloadavg()[0], 2),
        "cpu_mhz": round(sum(clocks) / len(clocks), 0) if clocks else None,
    }


def _gpu_throttle() -> list[str]:
    """Bit masks of the reasons why each GPU's clock is held down right now (0x0: none); empty without a GPU."""
    if not describe()["gpus"]:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks_event_reasons.active", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return done.stdout.split() if done.returncode == 0 else []


def gpus() -> list[str]:
    """Names and drivers of the CUDA devices that ``nvidia-smi`` sees; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


@lru_cache
def commit() -> tuple[str | None, bool | None]:
    """(git commit of this checkout, whether tracked files differ from it); (None, None) outside a checkout."""
    # An installed tree, or a copy without its .git, may lie inside of another repository.
    if _git("rev-parse", "--show-prefix") != "":
        return None, None
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None, None
    return head, bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _machine_id() -> str:
    return _read("/etc/machine-id").strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
