"""Builds the simulated device and makes torch see it. Load it before the first ``import torch`` of a process."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

SOURCE = Path(__file__).with_name("device.cpp")
FREE_BYTES = 8 << 30
"""Free memory as ``torch.cuda.mem_get_info`` tells it: a fixed figure, so that plans do not depend on the machine."""


@dataclass
class Counts:
    """Counts of a stretch of code, by kind.

    ``reads``: the host waited for a value of the device. ``uploads``: a tensor of the host was copied to the device.
    ``operators``: what the device was asked to compute. ``peak_bytes``: the most memory that tensors held, beyond what
    they held at the start.
    """

    reads: dict[str, int] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    allocations: int = 0
    peak_bytes: int = 0


def leave(code: int) -> NoReturn:
    """End the process at once, after what it has printed.

    Autograd has a thread for the device. While the interpreter ends, that thread may still ask for the interpreter's
    lock, and then takes the whole process down ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def build(folder: Path) -> Path:
    """Compile the device for the torch that is installed, once per folder, source and version.

    Args:
        folder: Where the library is kept.

    Returns:
        The path of the library.

    Raises:
        FileNotFoundError: There is no g++.
        subprocess.CalledProcessError: g++ refuses the source.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("no g++: the simulated device is compiled when it is first used")
    version = importlib.metadata.version("torch")
    name = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    target = folder / f"simulated-cuda-{name}.so"
    if target.exists():
        return target
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    partial = target.with_suffix(".partial")
    command = [compiler, "-O1", "-fPIC", "-shared", "-std=c++20", "-w", "-isystem", str(torch / "include")]
    command += ["-isystem", str(torch / "include/torch/csrc/api/include"), str(SOURCE), "-o", str(partial)]
    command += ["-L", str(torch / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    partial.rename(target)
    return target


class SimulatedDevice:
    """The device of this process, and the counts of what it is asked to do.

    Args:
        library: What :func:`build` returned.

    Raises:
        RuntimeError: torch was imported before: it has decided by then that there is no accelerator.
    """

    def __init__(self, library: Path) -> None:
        if "torch" in sys.modules:
            raise RuntimeError("The simulated device is loaded before torch: import torch afterwards.")
        self._library = ctypes.CDLL(str(library))
        self._library.simulated_counts.restype = ctypes.c_char_p
        self._library.simulated_peak_bytes.restype = ctypes.c_long
        self._library.simulated_allocations.restype = ctypes.c_long
        _let_torch_believe()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what the block does; the counts are filled in at its end."""
        counts = Counts()
        self._library.simulated_start()
        try:
            yield counts
        finally:
            self._library.simulated_stop()
            counts.reads, counts.uploads, counts.operators = (self._kind(i) for i in range(3))
            counts.allocations = self._library.simulated_allocations()
            counts.peak_bytes = self._library.simulated_peak_bytes()

    def _kind(self, index: int) -> dict[str, int]:
        lines = self._library.simulated_counts(index).decode().splitlines()
        return {what: int(number) for what, _, number in (line.partition("\t") for line in lines)}


def _let_torch_believe() -> None:
    """Answer the questions that torch's Python asks of the CUDA library, which a CPU build does not have."""
    import torch

    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.synchronize = lambda device=None: None
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.mem_get_info = lambda device=None: (FREE_BYTES, 2 * FREE_BYTES)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    cuda.amp.common.amp_definitely_not_available = lambda: False
