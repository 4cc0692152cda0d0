"""What the machine is and what state the code is in: facts for the record. Standard library only."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.paths import ROOT


@lru_cache
def describe() -> dict[str, Any]:
    """CPU, memory, kernel, GPUs, and ``id``: a short hash that tells two machines apart without naming them.

    Memory is in whole GiB, rounded up: another kernel keeps some pages more or less for itself. Which GPU is used, and
    by which driver, is no part of the identity, see :func:`card`.
    """
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": math.ceil(pages / 2**30) * 2**30,
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "gpus": gpus(),
    }
    identity = [*(str(facts[k]) for k in ("cpu", "cores", "memory_bytes")), _read("/etc/machine-id").strip(), kind()]
    facts["id"] = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:8]
    return facts


COMPUTES = re.compile(r"(sse|ssse|avx|fma|f16c|amx|vnni|neon|asimd|sve|sme|bf16|i8mm|fphp)\w*")
"""The instruction sets that libraries choose their kernels by."""


GENERATION = {"cpu family", "model", "CPU part"}
"""What tells processors of one name apart: virtual machines call several generations "AMD EPYC"."""


def kind(device: str = "cpu") -> str:
    """Return a hash of what decides which kernels a library runs here, and so of what a verdict or a reference from
    another machine is worth here: the processors' model and instruction sets, and, of a GPU, its model and driver."""
    lines = _read("/proc/cpuinfo").splitlines()
    generation = {" ".join(line.split()) for line in lines if line.partition(":")[0].strip() in GENERATION}
    flags = {word for line in lines for word in _flags(line)}
    parts = [platform.machine(), _cpu_model(), *sorted(generation), *sorted(flags)]
    # All GPUs of a machine have one driver.
    parts += [str(card()).rpartition(" ")[0], *gpus()[:1]] if device == "cuda" else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _flags(line: str) -> list[str]:
    name, _, words = line.partition(":")
    return [word for word in words.split() if COMPUTES.fullmatch(word)] if name.strip() in {"flags", "Features"} else []


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
    return _nvidia_smi("--query-gpu=clocks_event_reasons.active", "--format=csv,noheader")


def gpus() -> list[str]:
    """Names and drivers of the CUDA devices that ``nvidia-smi`` sees; empty without one."""
    return _nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def card() -> str | None:
    """Return the name and the UUID of the GPU that a process with one device computes on: the first that
    CUDA_VISIBLE_DEVICES lets it see, in the order of ``nvidia-smi``, a MIG slice as such; None where it sees none."""
    whole: list[tuple[str, str]] = []
    slices: list[tuple[str, str]] = []
    for line in _nvidia_smi("-L"):
        if found := re.search(r"(.*) \(UUID: ([^)]+)\)", line):
            name = re.sub(r"^(GPU \d+:|MIG)\s*|\s*Device\s+\d+:", "", found[1]).strip()
            if line.startswith("GPU"):
                whole.append((name, found[2]))
            else:
                slices.append((f"{whole[-1][0]} MIG {name}", found[2]))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if asked is None else asked.split(",")[0].strip()
    if re.fullmatch(r"\d+", first):
        seen = whole[int(first) :]
    else:
        seen = [(name, uuid) for name, uuid in (*whole, *slices) if first and uuid.startswith(first)]
    return f"{seen[0][0]} {seen[0][1]}" if seen else None


def _nvidia_smi(*arguments: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


@lru_cache
def commit() -> tuple[str | None, bool | None]:
    """(git commit of this checkout, whether tracked files differ from it); (None, None) outside a checkout, and where
    git does not say."""
    # An installed tree, or a copy without its .git, may lie inside of another repository.
    if git("rev-parse", "--show-prefix")[0] != "":
        return None, None
    head, _ = git("rev-parse", "HEAD")
    if head is None:
        return None, None
    return head, bool(git("status", "--porcelain", "--untracked-files=no")[0])


def why_no_commit() -> str | None:
    """Return a sentence on why git does not tell the commit of this checkout, in its own words; None where it does, or
    this is no checkout."""
    if commit()[0] is not None or not (ROOT / ".git").exists():
        return None
    return f"The records name no commit: {git('rev-parse', 'HEAD')[1] or 'git does not say why'}"


def git(*arguments: str, folder: Path = ROOT) -> tuple[str | None, str]:
    """Return (what git prints, None where it fails; its own words on why). ``folder``: of the repository, whatever one
    the shell's variables name."""
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    try:
        done = subprocess.run(
            ["git", "-c", "log.showSignature=false", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            env=kept,
        )
    except OSError as error:
        return None, f"git cannot be started ({error.strerror})"
    return (done.stdout.strip() if done.returncode == 0 else None), " ".join(done.stderr.split())


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
